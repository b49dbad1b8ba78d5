# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The monitor's page in a real browser: real jobs that write real run folders, a real S3 server that fails for real.

Runs in the workload's environment (./test page), with Debian's Chromium.  A browser that is missing is a failure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.browser import chromium
from tests.support.workload import KEY, SECRET, WORKLOAD, s3, start, start_s3, stop  # noqa: F401 - s3, start: fixtures

sys.path.insert(0, str(WORKLOAD))
from common.store import DONE, RUN, LocalStore, S3Store, batch_name, shard_name  # noqa: E402

expect.set_options(timeout=30_000)

# A job of the reference contract that does what it is told, a word a line.
JOB = """
import sys
from common.runtime import Job
job, step = Job(None), 0
job.labels.update(shard=sys.argv[1]) if sys.argv[1] else None
job.start(sys.argv)
for word in sys.stdin:
    if word == "loaded\\n":
        job.loaded()
    elif word == "step\\n":
        step += 1
        job.step(step)
job.finish(0, "done")
"""


class Unit:
    """One unit with a real ledger; its process is a real job, or none."""

    def __init__(self, root: Path, name: str, number: int, within: float = 60, proof: dict | None = None):
        self.name, self.run_id, self.paths = name, f"{number:032x}", ledger.Paths(str(root))
        progress = {"pattern": r"step (?P<step>\d+)", "within": within}
        Path(self.paths.jobs).mkdir(parents=True, exist_ok=True)
        job = {"unit": name, "proof": {"progress": progress} if proof is None else proof}
        Path(self.paths.job(name)).write_text(json.dumps(job))
        ledger.begin_run(name, self.run_id, self.paths)
        self.folder = Path(self.paths.run(name, self.run_id))
        self.process: subprocess.Popen | None = None
        self._pacing = threading.Event()

    def run(self, shard: str = "") -> Unit:
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, shard],
            env={**os.environ, "PYTHONPATH": str(WORKLOAD), "LAUNCHPROOF_RUN_DIR": str(self.folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        return self

    def say(self, word: str) -> None:
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()

    def pace(self, seconds: float) -> None:
        """Let it make a step every so many seconds, until the next call or :meth:`rest`."""
        self.rest()
        self._pacing = mine = threading.Event()

        def beat() -> None:
            while not mine.wait(seconds):
                self.say("step")

        threading.Thread(target=beat, daemon=True).start()

    def rest(self) -> None:
        self._pacing.set()

    def end(self, result: str, code: str, status: str) -> None:
        """What systemd does after a process: the death certificate."""
        said = {"SERVICE_RESULT": result, "EXIT_CODE": code, "EXIT_STATUS": status}
        ledger.end_run(self.name, self.run_id, said, self.paths)

    def verdict(self, code: str, ok: bool, remedy: str = "") -> None:
        row = {"code": code, "ok": ok, "remedy": remedy, "at": ledger.timestamp()}
        ledger.write_json(str(self.folder / "verdict.json"), row)

    def close(self) -> None:
        self.rest()
        if self.process is not None:
            stop(self.process)
            self.process.stdin.close()


@pytest.fixture
def units(tmp_path) -> Iterator[Callable[..., Unit]]:
    """Make units below tmp_path; their processes end with the test."""
    made: list[Unit] = []

    def make(name: str, **more) -> Unit:
        made.append(Unit(tmp_path, name, len(made) + 1, **more))
        return made[-1]

    (tmp_path / "var/lib/launchproof/runs").mkdir(parents=True)
    yield make
    for unit in made:
        unit.close()


@pytest.fixture
def monitor(start, tmp_path) -> Callable[..., str]:  # noqa: F811
    """Start the monitor over tmp_path's run folders; returns its address.  It looks every second."""

    def begin(*more: str, stale_after: int = 60) -> str:
        argv = ["--listen", "127.0.0.1:0", "--runs", tmp_path / "var/lib/launchproof/runs", "--every", "1"]
        program = start("monitor.py", *argv, "--stale-after", str(stale_after), *more)
        begin.program = program
        return "http://" + program.until(r"ev=listen address=(\S+)")[1] + "/"

    return begin


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def show(browser) -> Iterator[Callable[..., Page]]:
    """Open an address.  Whatever the page complains of fails the test, unless its list ``complaints`` is cleared."""
    pages: list[Page] = []

    def open_page(url: str, width: int = 1200, **more) -> Page:
        page = browser.new_context(viewport={"width": width, "height": 800}, **more).new_page()
        page.complaints = []
        page.asked = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(url)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.context.close()
    assert [page.complaints for page in pages] == [[]] * len(pages)


def card(page: Page, unit: str) -> Locator:
    return page.locator(".unit").filter(has=page.get_by_role("heading", name=unit, exact=True))


def is_shown(page: Page, unit: str, word: str) -> None:
    """The word beside a unit's name."""
    expect(card(page, unit).locator(".pill")).to_have_text(word)


# -- states ----------------------------------------------------------------------------------------------------------------


@pytest.mark.shows("W67", "W73", "W76")
def test_loading_running_slow_stalled_dead_failed_and_finished_are_told_apart(units, monitor, show):
    loading = units("loading.service").run()
    running = units("running.service").run()
    slow = units("slow.service").run()
    stalled = units("stalled.service", within=3).run()
    dead = units("dead.service").run()
    finished = units("finished.service").run()
    foreign = units("foreign.service")
    for unit in (running, slow, stalled, dead, finished):
        unit.say("loaded")
        unit.pace(0.4)
    foreign.folder.joinpath("log").write_text("downloading\n")
    page = show(monitor())
    expect(page).to_have_title(re.compile("^All well – "))
    for unit in (running, slow, stalled, dead, finished):
        is_shown(page, unit.name, "Running")
    is_shown(page, "foreign.service", "Loading")
    # A rhythm is known after a few looks; the chart has as many points then.
    for unit in (running, slow):
        line = page.get_by_role("img", name=f"Steps of {unit.name}").locator("polyline")
        expect(line).to_have_attribute("points", re.compile(r"(\S+ ){12}"))
    expect(card(page, "slow.service")).to_contain_text(" / s")
    slow.pace(7)
    stalled.rest()
    dead.rest()
    dead.process.kill()
    dead.process.wait()
    finished.rest()
    finished.process.stdin.close()
    finished.process.wait()
    finished.end("success", "exited", "0")
    finished.verdict("completed", True)
    with foreign.folder.joinpath("log").open("a") as log:
        log.write("step 12\n")
    is_shown(page, "finished.service", "Finished")
    expect(card(page, "finished.service")).to_contain_text("completed")
    expect(card(page, "finished.service")).to_contain_text(re.compile(r"Ran for\d+ sEnded\d+ s ago"))
    is_shown(page, "slow.service", "Slow")
    expect(card(page, "slow.service")).to_contain_text("usually")
    is_shown(page, "stalled.service", "Stalled")
    is_shown(page, "dead.service", "Dead")
    is_shown(page, "running.service", "Running")
    is_shown(page, "loading.service", "Loading")
    is_shown(page, "foreign.service", "Running")
    expect(card(page, "loading.service").locator("svg[role=img]")).to_have_count(0)
    expect(page).to_have_title(re.compile("^Needs attention – "))
    summary = page.get_by_role("status")
    expect(summary).to_contain_text("dead.service is dead: its process is gone, and left no death certificate")
    expect(summary).to_contain_text("stalled.service is stalled")
    assert "slow.service" not in summary.inner_text() and "loading.service" not in summary.inner_text()
    # The certificate comes, and the verdict: now it is known how.
    dead.end("signal", "killed", "KILL")
    dead.verdict("killed_signal", False, "find out who sent SIGKILL")
    is_shown(page, "dead.service", "Failed")
    expect(card(page, "dead.service")).to_contain_text("signal KILL")
    expect(card(page, "dead.service")).to_contain_text("find out who sent SIGKILL")
    # A new run of the unit begins with a clean slate.
    loading.say("loaded")
    loading.say("step")
    is_shown(page, "loading.service", "Running")


@pytest.mark.shows("W69")
def test_a_broken_heartbeat_is_unknown_and_spoils_nothing_else(units, monitor, show):
    units("broken.service").folder.joinpath("heartbeat.json").write_text('{"time": 1')
    units("fine.service").run().say("step")
    page = show(monitor())
    is_shown(page, "broken.service", "Unknown")
    is_shown(page, "fine.service", "Running")
    expect(page).to_have_title(re.compile("^Not all is known – "))


# -- batches -----------------------------------------------------------------------------------------------------------------


def put(place: LocalStore | S3Store, shard: int, *numbers: int, done: bool = False) -> None:
    """Commit batches as extraction does."""
    for number in numbers:
        place.put_bytes(f"reference/{shard_name(shard, 2)}/{batch_name(number)}.safetensors", b"x")
        place.put_bytes(f"reference/{shard_name(shard, 2)}/{batch_name(number)}.json", b"{}")
    if done:
        place.put_bytes(f"reference/{shard_name(shard, 2)}/{DONE}", b"{}")


def plan(place: LocalStore | S3Store, samples: int, batch_samples: int) -> None:
    """The run's manifest, as extraction writes it."""
    run = {"samples": samples, "num_shards": 2, "batch_samples": batch_samples}
    place.put_bytes(f"reference/{RUN}", json.dumps(run).encode())


@pytest.mark.shows("W68", "W72", "W79")
def test_s3_down_or_with_other_keys_is_unknown_and_never_0(units, monitor, show, s3, tmp_path):  # noqa: F811
    units("extraction@1.service").run("shard-01-of-02").say("step")
    bucket = S3Store(s3.bucket("bkt"), s3.endpoint)
    plan(bucket, 100, 10)
    put(bucket, 1, 1, 2, 3)
    put(bucket, 2, 1, 2)
    LocalStore(tmp_path / "out").put_bytes(f"reference/{shard_name(1, 2)}/{batch_name(4)}.safetensors", b"x")
    where = ["--s3-uri", "s3://bkt/data", "--s3-endpoint", s3.endpoint, "--local-dir", str(tmp_path / "out")]
    page = show(monitor(*where))
    tiles = page.locator(".tiles")
    rows = page.get_by_role("row")
    expect(tiles).to_contain_text("Committed in S35 of 10")
    expect(tiles).to_contain_text("Waiting on the local disk1")
    expect(rows.filter(has_text="01 of 02")).to_contain_text(re.compile(r"Running.*3 of 5.* ago.*1.* ago"))
    expect(page.get_by_role("img", name="Batches committed")).to_be_visible()
    put(bucket, 2, 3, 4, 5, done=True)
    expect(rows.filter(has_text="02 of 02")).to_contain_text(re.compile("Done.*5 of 5"))
    expect(page).to_have_title(re.compile("^All well – "))

    def nothing_is_known(why: str) -> None:
        expect(tiles).to_contain_text("Committed in S3unknown")
        expect(tiles).to_contain_text(re.compile(r"last known .* ago: 8 committed"))
        expect(page.locator(".problem:visible")).to_contain_text(why)
        for shard in ("01 of 02", "02 of 02"):  # cells: state, in S3, its age, waiting, its age, progress
            for column in (1, 2):
                expect(rows.filter(has_text=shard).get_by_role("cell").nth(column)).to_have_text("unknown")
        expect(page).to_have_title(re.compile("^Not all is known – "))
        assert page.request.get(page.url + "healthz").status == 503
        assert page.request.get(page.url + "api/status").json()["s3"]["shards"] is None

    stop(s3.process)
    nothing_is_known("connect to the endpoint")
    port = int(s3.endpoint.rpartition(":")[2])
    other = start_s3(s3.root, port, keys=f"{KEY},another-secret-of-the-test")
    try:
        nothing_is_known("SignatureDoesNotMatch")
    finally:
        stop(other.process)
    again = start_s3(s3.root, port)
    try:
        expect(tiles).to_contain_text("Committed in S38 of 10")
        expect(page).to_have_title(re.compile("^All well – "))
        assert page.request.get(page.url + "healthz").status == 200
        shown = page.content() + page.request.get(page.url + "api/status").text()
        assert SECRET not in shown and KEY not in shown
    finally:
        stop(again.process)


@pytest.mark.shows("W70")
def test_no_new_batch_for_too_long_is_said(units, monitor, show, tmp_path):
    put(LocalStore(tmp_path / "out"), 1, 1)
    page = show(monitor("--local-dir", str(tmp_path / "out"), "--no-growth", "2"))
    expect(page.get_by_role("status")).to_contain_text("no new batch for")
    assert page.request.get(page.url + "healthz").status == 503
    put(LocalStore(tmp_path / "out"), 1, 2)
    expect(page.get_by_role("status")).to_have_text("All well")


# -- the page itself -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def everything(units, monitor, tmp_path) -> str:
    """The address of a page with all that it can show, names and words that are too long among it."""
    gpus = [
        {"uuid": f"GPU-{n}c1f7d2a-9b1e", "util": 90, "mem_mib": 71234, "power_w": 540, "temp_c": None} for n in "01"
    ]
    busy = units("a-training-with-a-rather-long-name-of-its-own@12.service").run()
    for _ in range(3):
        busy.say("step")
    measured = units("measured.service")
    units("loading.service").run()
    units("broken.service").folder.joinpath("heartbeat.json").write_text("{" * 300)
    failed = units("failed.service")
    failed.end("exit-code", "exited", "70")
    failed.verdict("crashed_traceback", False, f"read /var/lib/launchproof/runs/{'x' * 200}/log")
    busy.verdict("ok_progressing", True)
    plan(LocalStore(tmp_path / "out"), 9000, 1)
    put(LocalStore(tmp_path / "out"), 1, 1, 2, 3)

    def beat() -> None:
        while not over.wait(0.5):
            now = {"time": time.time(), "phase": "run", "step": 1, "step_age_s": 1, "telemetry": "nvml"}
            ledger.write_json(str(measured.folder / "heartbeat.json"), {**now, "gpus": gpus})

    over = threading.Event()
    writer = threading.Thread(target=beat)
    writer.start()
    yield monitor("--local-dir", str(tmp_path / "out"))
    over.set()
    writer.join()


@pytest.mark.shows("W77")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1200])
def test_it_is_readable_and_accessible_at_any_width(everything, show, width, scheme):
    page = show(everything, width, color_scheme=scheme)
    expect(page.get_by_role("img", name="Use of GPU-0c1f7d2a-9b1e in percent")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    # Nothing is cut off within it, either.
    wide = page.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('svg, .unseen') && "
        "e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML.slice(0, 200))"
    )
    assert wide == []
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) > 384) == (scheme == "light")


@pytest.mark.shows("W74", "W77")
def test_it_has_landmarks_headings_and_words_for_its_pictures(everything, show):
    page = show(everything)
    expect(page.get_by_role("img", name="Use of GPU-0c1f7d2a-9b1e in percent")).to_be_visible()
    for role in ("banner", "main", "contentinfo", "navigation"):
        expect(page.get_by_role(role)).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    assert page.get_by_role("heading", level=2).all_inner_texts() == ["Jobs", "Batches of reference", "GPUs"]
    expect(page.get_by_role("status")).to_contain_text("Needs attention")
    expect(page.get_by_role("table", name="Batches by shard")).to_be_visible()
    unnamed = page.evaluate("document.querySelectorAll('svg:not([aria-hidden]):not([aria-label])').length")
    assert unnamed == 0


@pytest.mark.shows("W77")
def test_the_keyboard_reaches_all_and_a_refresh_takes_nothing_away(everything, show):
    page = show(everything)
    pause, stamp = page.get_by_role("button", name="Pause"), page.locator("#stamp")
    page.keyboard.press("Tab")
    expect(pause).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    before = stamp.inner_text()
    expect(stamp).not_to_have_text(before)  # it refreshes itself, and focus stays
    expect(pause).to_be_focused()
    page.keyboard.press("Space")
    expect(pause).to_have_attribute("aria-pressed", "true")
    asked = len(page.asked)
    before = stamp.inner_text()
    everything_else = page.context.new_page()
    everything_else.goto(page.url)
    expect(everything_else.locator("#stamp")).not_to_have_text(before)
    other = everything_else.locator("#stamp").inner_text()
    expect(everything_else.locator("#stamp")).not_to_have_text(other)
    assert stamp.inner_text() == before and len(page.asked) <= asked + 1
    page.keyboard.press("Enter")
    expect(stamp).not_to_have_text(before)
    reached = []
    for _ in range(3):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
    assert reached == ["JSON", "Health", "Metrics"]


@pytest.mark.shows("W79")
def test_it_asks_nobody_but_the_monitor(everything, show):
    page = show(everything)
    first = page.locator("#stamp").inner_text()
    expect(page.locator("#stamp")).not_to_have_text(first)
    assert {url for url in page.asked if not url.startswith("data:")} == {everything}


@pytest.mark.shows("W77")
def test_without_scripts_it_reloads_itself(everything, show):
    page = show(everything, java_script_enabled=False)
    first = page.locator("#stamp").inner_text()
    expect(page.locator("#stamp")).not_to_have_text(first)
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()


@pytest.mark.shows("W78")
def test_a_monitor_that_is_gone_makes_the_open_page_say_unknown(units, monitor, show):
    units("a.service").run().say("step")
    page = show(monitor())
    is_shown(page, "a.service", "Running")
    stop(monitor.program.process)
    expect(page.get_by_role("alert")).to_contain_text("unknown")
    expect(page).to_have_title("Unknown: the monitor does not answer")
    # The browser itself writes down each request that failed.
    assert page.complaints and all("ERR_CONNECTION_REFUSED" in line for line in page.complaints)
    page.complaints.clear()
    page.context.close()
