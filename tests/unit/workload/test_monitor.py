# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The monitor: it knows, or says that it does not know.  Its page in a real browser: tests/integration/test_page.py."""

import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser

import pytest
from common import store as stores
from common.runtime import Fatal
from hypothesis import given
from hypothesis import strategies as st
from monitoring import judge, metrics, objects, page, units
from monitoring.chart import chart
from monitoring.history import POINTS, Ages, Series
from monitoring.judge import Judge, Limits, State
from monitoring.look import Status
from monitoring.objects import Count, Listing, S3Watch
from monitoring.units import LOG_PIECE, Reader, Unit

from tests.unit.workload.conftest import stop

NOW = 1_000_000.0
TWO = {"shard-01-of-02": 3, "shard-02-of-02": 3}
LIMITS = Limits(stale_after=60, no_growth=600, every=5)


def listing(last=NOW, done=(False, False)) -> Listing:
    return Listing({name: Count(1, 1, 10, last, finished) for name, finished in zip(TWO, done, strict=True)})


# -- states: alive, slow, dead ---------------------------------------------------------------------------------------------


@pytest.mark.shows("W67")
@pytest.mark.parametrize(
    ("unit", "paces", "name"),
    [
        (Unit("a", phase="never started"), (None, None), "never started"),
        (Unit("a", phase="load", beat_age_s=1), (None, None), "loading"),
        (Unit("a", phase="load", beat_age_s=59, started_age_s=7200), (None, None), "loading"),
        (Unit("a", phase="run", step=1, step_age_s=1, beat_age_s=1), (None, None), "running"),
        (Unit("a", phase="run", step=1, step_age_s=40, beat_age_s=1), (None, None), "running"),
        (Unit("a", phase="run", step=1, step_age_s=16, beat_age_s=1), (5, 5), "slow"),
        (Unit("a", phase="run", step=1, step_age_s=1, beat_age_s=1), (5, 16), "slow"),
        (Unit("a", phase="run", step=1, step_age_s=1, beat_age_s=1), (0.1, 0.9), "running"),  # no longer than two looks
        (Unit("a", phase="run", step=1, step_age_s=31, beat_age_s=1, within_s=30), (1, 1), "stalled"),
        (Unit("a", phase="run", step=1, step_age_s=601, beat_age_s=1), (None, None), "stalled"),
        (Unit("a", phase="run", step=1, step_age_s=61, beat_age_s=61), (1, 1), "dead"),
        (Unit("a", phase="load", beat_age_s=61), (None, None), "dead"),
        (Unit("a", phase="run", step=1, step_age_s=6, beat_age_s=6, gone=True), (1, 1), "dead"),
        (Unit("a", phase="stop", step=1, step_age_s=99, beat_age_s=1), (1, 1), "stopping"),
        (Unit("a", phase="run", step=1, beat_age_s=9999, ended="exit 0", ended_well=True), (1, 1), "finished"),
        (Unit("a", phase="run", step=1, beat_age_s=9999, ended="signal KILL", ended_well=False), (1, 1), "failed"),
        (Unit("a", unknown="heartbeat.json: half"), (None, None), "unknown"),
        (Unit("a", unknown="heartbeat.json: half", ended="exit 0", ended_well=True), (None, None), "finished"),
        (Unit("a", unknown="verdict.json: half", phase="load", beat_age_s=1), (None, None), "loading"),
        (Unit("a"), (None, None), "unknown"),
        (Unit("a", log_age_s=5), (None, None), "running"),
        (Unit("a", log_age_s=5, within_s=60), (None, None), "loading"),
        (Unit("a", log_age_s=5, step=3, step_age_s=5, within_s=60), (None, None), "running"),
        (Unit("a", log_age_s=70, step=3, step_age_s=70, within_s=60), (None, None), "stalled"),
        (Unit("a", log_age_s=601), (None, None), "unknown"),
    ],
)
def test_a_state_is_what_the_facts_allow_to_say(unit, paces, name):
    found = judge.state(unit, *paces, LIMITS)
    assert found.name == name
    assert found.why or name in ("never started", "loading", "running", "stopping")


def test_a_pace_is_learnt_from_the_jobs_own_steps():
    """One step a minute, looked at every five seconds, is not a step every five seconds."""
    series = Series()
    for at in range(0, 600, 5):
        series.add(at, at // 60)
    usual, recent = judge.paces(series)
    assert usual == 60 and 30 < recent < 120
    for at in range(600, 900, 5):
        series.add(at, 9)
    assert judge.paces(series)[1] > 150
    assert judge.paces(Series()) == (None, None) == judge.paces(None)


# -- health ------------------------------------------------------------------------------------------------------------------

FAILED = (Unit("a"), State("failed", "exit 70"))


@pytest.mark.shows("W70")
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({}, None),
        ({"units": [(Unit("a"), State("running"))]}, None),
        ({"units": [(Unit("a"), State("slow", "x"))]}, None),
        ({"units": [(Unit("a"), State("dead", "no heartbeat for 61 s"))]}, "a is dead: no heartbeat for 61 s"),
        ({"units": [FAILED]}, "a is failed: exit 70"),
        ({"units": [(Unit("a", unknown="half"), State("loading"))]}, "not all is known: half"),
        ({"s3": Listing(unknown="refused")}, "batches in S3 are unknown: refused"),
        ({"local": Listing(unknown="no such folder")}, "batches on the local disk are unknown: no such folder"),
        ({"s3": listing(), "grown": 599.0}, None),
        ({"s3": listing(), "grown": 601.0}, "no new batch for 10 min"),
        ({"s3": listing(done=(True, True)), "grown": 601.0}, None),
        ({"s3": listing(done=(True, False)), "grown": 601.0}, "no new batch"),
        ({"s3": listing(done=(True, True)), "expected": None, "grown": 601.0}, "no new batch"),
        ({"s3": listing(), "local": Listing(), "grown": None}, None),
    ],
)
def test_health(case, said):
    case = {"units": [], "local": None, "s3": None, "expected": TWO, "grown": None, **case}
    found = judge.reasons(*case.values(), LIMITS)
    assert (found == []) if said is None else (len(found) == 1 and said in found[0]), found


# -- clocks ------------------------------------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.shows("W71")
def test_ages_follow_what_was_seen_and_not_what_a_clock_says():
    clock = Clock()
    ages = Ages(clock)
    assert ages.age("beat", 1, 30.0) == 30.0  # at first only the stamp can tell
    clock.now += 5
    assert ages.age("beat", 1, -3600.0) == 35.0  # this machine's clock was set back
    assert ages.age("beat", 2, 7200.0) == 0.0  # a fresh one cannot be older than the last look
    clock.now += 5
    assert ages.age("beat", 3, 7200.0) == 5.0
    assert ages.age("ahead", 1, -500.0) == 0.0
    ages.keep(["beat"])
    assert ages.age("ahead", 1, 9.0) == 9.0


@pytest.mark.shows("W71")
def test_growth_is_not_fooled_by_the_clock_of_s3():
    clock = Clock()
    judging = Judge(LIMITS, Ages(clock))
    assert judging.grown(listing(last=NOW + 9999), NOW) == 0.0  # its clock is ahead: never a negative age
    clock.now += 601
    assert judging.grown(listing(last=NOW + 9999), NOW + 601) == 601
    assert judging.grown(Listing(unknown="down"), NOW) is None and judging.grown(None, NOW) is None


@pytest.mark.shows("W74")
@given(st.lists(st.floats(0, 1e9), max_size=2000))
def test_a_series_is_bounded_and_keeps_its_newest(times):
    series = Series()
    for n, at in enumerate(sorted(times)):
        series.add(at, n)
    assert len(series.times) == len(series.values) <= POINTS and series.times == sorted(series.times)
    assert not times or series.values[-1] == len(times) - 1


def test_a_clock_set_back_begins_a_series_anew():
    series = Series([10.0, 20.0], [1, 2])
    series.add(15.0, 3)
    assert (series.times, series.values) == ([15.0], [3])


# -- batches -----------------------------------------------------------------------------------------------------------------


@pytest.mark.shows("W72")
def test_counts_are_of_batches_and_nothing_else():
    shard = "shard-01-of-02"
    found = {
        f"{shard}/batch-000001.safetensors": (10, 5.0),
        f"{shard}/batch-000001.json": (1, 9.0),
        f"{shard}/batch-000002.safetensors": (20, 7.0),
        f"{shard}/_DONE": (1, 9.0),
        f"{shard}/batch-1.safetensors": (1, 99.0),
        "run.json": (1, 99.0),
    }
    assert objects.count(found) == {shard: Count(batches=2, committed=1, bytes=30, last=7.0, done=True)}
    assert objects.commits(found, 100) == ((9.0, 1),)


def test_a_chart_of_many_commits_stays_small():
    found = {f"shard-01-of-01/batch-{n:06d}.json": (1, float(n)) for n in range(1, 5001)}
    points = objects.commits(found, 100)
    assert len(points) <= 102 and points[0] == (1.0, 1) and points[-1] == (5000.0, 5000)
    assert objects.commits({}, 100) == ()


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (None, None),
        (b"{", None),
        (b"[]", None),
        (b'{"samples": 5}', None),
        (b'{"samples": 5, "num_shards": 1, "batch_samples": 0}', None),
    ],
)
def test_expectations_come_from_a_readable_run_json_alone(manifest, expected):
    assert objects.expected(manifest) == expected


def test_expected_batches_follow_the_extractions_own_split():
    manifest = json.dumps({"samples": 797, "num_shards": 2, "batch_samples": 32}).encode()
    assert objects.expected(manifest) == {"shard-01-of-02": 13, "shard-02-of-02": 13}
    few = json.dumps({"samples": 7, "num_shards": 3, "batch_samples": 2}).encode()
    assert sum(objects.expected(few).values()) == 4


def test_a_local_folder_that_is_not_there_is_unknown_not_empty(tmp_path):
    assert objects.list_local(tmp_path / "gone").unknown
    assert objects.list_local(tmp_path / "gone", waiting=True).unknown is None
    assert objects.list_local(tmp_path / "gone/run", waiting=True).unknown
    (tmp_path / "run/shard-01-of-01").mkdir(parents=True)
    (tmp_path / "run/shard-01-of-01/.batch-000001.safetensors.1.tmp").touch()
    found = objects.list_local(tmp_path / "run")
    assert found.unknown is None and found.shards == {}


class Slow:
    """A store that answers when it is told to."""

    def __init__(self):
        self.asked, self.answer = threading.Event(), threading.Event()

    def objects(self, prefix):
        self.asked.set()
        assert self.answer.wait(20)
        return {f"{prefix}shard-01-of-02/batch-000001.json": (1, 5.0)}

    def get(self, key):
        return None


@pytest.mark.shows("W68", "W75")
def test_an_s3_that_does_not_answer_is_unknown_and_what_was_known_is_kept():
    store = Slow()
    store.answer.set()
    watch = S3Watch(store, "r", every=5, patience=0)
    assert watch.listing.unknown
    assert watch.look() == 5 and watch.listing.shards["shard-01-of-02"].committed == 1
    store.answer.clear()
    store.asked.clear()
    waiting = threading.Thread(target=watch.look)
    waiting.start()
    assert store.asked.wait(20)
    found = watch.listing
    assert "no answer" in found.unknown and found.shards == {} and found.before.committed == 1
    store.answer.set()
    waiting.join()
    assert watch.listing.unknown is None


@pytest.mark.shows("W75")
def test_a_long_listing_is_asked_for_less_often(monkeypatch):
    watch = S3Watch(Slow(), "r", every=5, patience=60)
    monkeypatch.setattr(objects, "list_s3", lambda *_: Listing(took_s=4.0))
    assert watch.look() == pytest.approx(36)  # a tenth of the time, at most


@pytest.mark.shows("W79")
def test_what_s3_said_is_shown_without_keys(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAXYZ")
    assert objects.said(OSError("AKIAXYZ at http://user:word@host/b")) == "(AWS_ACCESS_KEY_ID) at http://host/b"


# -- units -------------------------------------------------------------------------------------------------------------------


def unit_folder(runs, name: str, **files):
    folder = runs / name / "abc"
    folder.mkdir(parents=True)
    (runs / name / "current").symlink_to("abc")
    for file, content in files.items():
        path = folder / (file if file == "log" else f"{file}.json")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def beating(now: float, **more):
    return {"time": now - 4, "phase": "run", "step": 7, "step_age_s": 1.0, "pid": os.getpid(), **more}


def test_units_are_read_as_they_are(tmp_path):
    now = time.time()
    beat = beating(now, telemetry="off: none", shard="shard-01-of-02")
    unit_folder(tmp_path, "run.service", heartbeat=beat, verdict={"code": "ok_progressing", "ok": True})
    end = {"service_result": "exit-code", "exit_code": "exited", "exit_status": "70"}
    wrong = {"code": "crashed_traceback", "ok": False, "remedy": "read it"}
    unit_folder(tmp_path, "dead.service", heartbeat=beat, exit=end, verdict=wrong)
    killed = {"service_result": "oom-kill", "exit_code": "killed", "exit_status": "KILL"}
    unit_folder(tmp_path, "oom.service", exit=killed)
    unit_folder(tmp_path, "broken.service", heartbeat="{half", exit=end)
    unit_folder(tmp_path, "other.service")
    (tmp_path / "new.service/none").mkdir(parents=True)
    (tmp_path / "new.service/current").symlink_to("none")
    units = {unit.unit: unit for unit in Reader(tmp_path).look(now)}
    running = units["run.service"]
    assert (running.phase, running.step, running.step_age_s) == ("run", 7, pytest.approx(5, abs=0.1))
    assert (running.beat_age_s, running.gone) == (pytest.approx(4, abs=0.1), False)
    assert (running.verdict, running.verdict_ok, running.ended) == ("ok_progressing", True, None)
    dead = units["dead.service"]
    assert (dead.ended, dead.ended_well, dead.remedy) == ("exit 70", False, "read it")
    assert dead.ended_age_s is None  # a certificate without its time
    assert units["oom.service"].ended == "oom-kill, signal KILL"
    # What is broken spoils nothing else.
    assert units["broken.service"].unknown and units["broken.service"].ended == "exit 70"
    assert units["other.service"].beat_age_s is None and units["other.service"].unknown is None
    assert units["new.service"].phase == "never started"
    assert Reader(tmp_path / "gone").look(now)[0].unknown


@pytest.mark.shows("W69")
@pytest.mark.parametrize(
    "content",
    [
        "",
        "{half",
        "[]",
        "null",
        '{"time": "now"}',
        '{"time": NaN}',
        '{"time": 1e999}',
        '{"time": true}',
        "[" * 100_000,
        '"' + "x" * (2 << 20) + '"',
    ],
)
def test_a_heartbeat_that_cannot_be_read_is_unknown_with_a_reason(tmp_path, content):
    unit_folder(tmp_path, "a.service", heartbeat=content)
    unit_folder(tmp_path, "b.service", heartbeat=beating(time.time()))
    broken, fine = Reader(tmp_path).look(time.time())
    assert "heartbeat.json" in broken.unknown and broken.beat_age_s is None
    assert judge.state(broken, None, None, LIMITS).name == "unknown"
    assert fine.step == 7 and fine.unknown is None


@pytest.mark.shows("W69")
@given(
    st.dictionaries(
        st.sampled_from(["phase", "step", "step_age_s", "telemetry", "shard", "gpus", "pid", "exit_code"]),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["uuid", "util", "mem_mib"]), inner),
            max_leaves=6,
        ),
    )
)
def test_no_heartbeat_takes_the_page_down(tmp_path_factory, more):
    runs = tmp_path_factory.mktemp("runs")
    now = time.time()
    unit_folder(runs, "a.service", heartbeat={"time": now, **more})
    judged = Judge(LIMITS).units(Reader(runs).look(now), now)
    state = Status(now, "r", None, None, None, judged, [])
    assert "<script>alert" not in page.page(state, 5)
    json.dumps(state.data(), allow_nan=False)
    metrics.metrics(state)


@pytest.mark.shows("W69")
def test_a_fifo_in_place_of_a_heartbeat_does_not_stop_the_monitor(tmp_path):
    folder = unit_folder(tmp_path, "a.service")
    os.mkfifo(folder / "heartbeat.json")
    assert "no regular file" in Reader(tmp_path).look(time.time())[0].unknown


def test_a_process_that_is_gone_is_known_before_its_heartbeat_is_stale(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    now = time.time()
    unit_folder(tmp_path, "a.service", heartbeat=beating(now - 6, pid=gone.pid))
    unit_folder(tmp_path, "b.service", heartbeat=beating(now, pid=gone.pid))
    late, just = Reader(tmp_path).look(now)
    assert late.gone and not just.gone  # its certificate may still come


@pytest.mark.shows("W73")
def test_a_job_without_a_heartbeat_is_followed_by_its_own_progress_pattern(tmp_path):
    """tqdm ends its lines with a carriage return."""
    progress = {"progress": {"pattern": r"(?P<step>\d+)/90 \[", "within": 60}}
    folder = unit_folder(
        tmp_path, "a.service", manifest={"proof": progress}, log="loading\n  1%| 3/90 [00:01\r  2%| 4/9"
    )
    reader = Reader(tmp_path)
    (unit,) = reader.look(time.time())
    assert (unit.step, unit.within_s, unit.beat_age_s) == (3, 60, None) and unit.log_age_s < 60
    with open(folder / "log", "a") as log:
        log.write("0 [00:02\r")
    assert reader.look(time.time())[0].step == 4
    with open(folder / "log", "a") as log:
        log.write("x" * LOG_PIECE + "\n9/90 [\n" + "y" * 9)
    assert reader.look(time.time())[0].step == 9
    (folder / "log").write_text("1/90 [\n")
    assert reader.look(time.time())[0].step == 1


def test_a_pattern_that_does_not_compile_is_no_end(tmp_path):
    unit_folder(tmp_path, "a.service", manifest={"proof": {"progress": {"pattern": "("}}}, log="1\n")
    assert Reader(tmp_path).look(time.time())[0].step is None


# -- page and metrics ----------------------------------------------------------------------------------------------------------


def status(units=(), local=None, s3=None, unhealthy=(), **more) -> Status:
    judged = [(unit, judge.state(unit, None, None, LIMITS)) for unit in units]
    return Status(NOW, more.pop("run_id", "r"), TWO, local, s3, judged, list(unhealthy), **more)


class Well(HTMLParser):
    """Every opened element is closed, in order."""

    VOID = {"meta", "br", "link", "input", "path", "circle", "polygon", "polyline"}

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] not in ("style", "script"):
            self.text += data + " "


def test_the_page_escapes_and_is_well_formed():
    bad = '<script>alert("x")</script>'
    units = [Unit(bad, verdict=bad, remedy=bad, telemetry=f"off: {bad}", beat_age_s=1), Unit("u", unknown=bad)]
    html = page.page(status(units, Listing(), Listing({bad: Count(1)}), [bad], run_id=bad, host=bad), 5)
    parser = Well()
    parser.feed(html)
    assert parser.open == [] and "<script>alert" not in html and html.count("<script>") == 1
    assert 'name="viewport"' in html


@pytest.mark.shows("W68")
def test_unknown_is_never_shown_as_zero():
    before = Listing({"shard-01-of-02": Count(2, 2)}, at=NOW - 60)
    state = status([], Listing(unknown="no such folder"), Listing(unknown="refused", before=before), ["s3: unknown"])
    parser = Well()
    parser.feed(page.page(state, 5))
    assert parser.text.count("unknown") >= 4 and " 0 " not in parser.text
    assert "last known 60 s ago: 2 committed" in parser.text
    text = metrics.metrics(state)
    assert 'dflash_listing_known{where="s3"} 0' in text and "dflash_batches{" not in text
    assert state.data()["s3"] == {"unknown": "refused", "shards": None, "age_s": None, "took_s": 0.0}


def test_a_count_that_is_old_says_so():
    shards = {"shard-01-of-02": Count(2, 2, 1, NOW - 50)}
    assert "last one 50 s ago, counted 40 s ago" in page.page(status(s3=Listing(shards, at=NOW - 40)), 5)
    assert "counted" not in page.page(status(s3=Listing(shards, at=NOW - 4)), 5)


@pytest.mark.parametrize(
    ("units", "unhealthy", "title"),
    [
        ([], [], "All well"),
        ([Unit("a", phase="load", beat_age_s=1)], [], "All well"),
        ([Unit("a", beat_age_s=1, verdict="uploads_stalled", verdict_ok=False)], [], "Not all is proved"),
        ([Unit("a", ended="exit 0", ended_well=True, verdict="x", verdict_ok=False)], [], "All well"),
        ([Unit("a", unknown="half")], ["a is unknown"], "Not all is known"),
        ([Unit("a", beat_age_s=99)], ["a is dead"], "Needs attention"),
        ([], ["no new batch for 11 min"], "Needs attention"),
    ],
)
def test_the_title_says_how_it_is(units, unhealthy, title):
    assert f"<title>{title} – " in page.page(status(units, unhealthy=unhealthy), 5)


def test_metrics_are_typed_once_and_labels_escaped():
    unit = Unit('a"b\\c', step=3, step_age_s=1.0, verdict="ok_started", verdict_ok=True, beat_age_s=1)
    lines = metrics.metrics(status([unit], s3=listing(), gpus={"GPU-1": Series([1.0], [97])})).splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert 'dflash_step{unit="a\\"b\\\\c"} 3' in lines
    assert 'dflash_verdict_ok{unit="a\\"b\\\\c",code="ok_started"} 1' in lines
    assert [line for line in lines if "unit_state" in line and line.endswith(" 1")] == [
        'dflash_unit_state{unit="a\\"b\\\\c",state="running"} 1'
    ]
    assert 'dflash_gpu_utilization_percent{uuid="GPU-1"} 97' in lines


@pytest.mark.shows("W74")
def test_a_chart_says_in_words_what_it_shows():
    drawn = chart("Steps of a", [0.0, 60.0], [1, 5])
    assert 'role="img" aria-label="Steps of a: 1 at 00:00:00, 5 at 00:01:00 UTC, least 1, most 5"' in drawn
    assert chart("x", [1.0], [1]) == "" == chart("x", [1.0, 1.0], [1, 2])


@pytest.mark.shows("W74")
def test_gpus_are_charted_by_device_while_somebody_reports_them():
    judging = Judge(LIMITS)
    found = [
        {"uuid": "GPU-1", "util": 90},
        {"uuid": "GPU-2"},
        {"util": 3},
        {"uuid": "GPU-3", "util": "x"},
        {"uuid": None},
        7,
    ]
    busy = Unit("a", beat_age_s=1, gpus=units._gpus(found))
    assert [gpu["uuid"] for gpu in busy.gpus] == ["GPU-1", "GPU-2", "GPU-3"]
    judging.units([busy], 1.0)
    judging.units([busy], 2.0)
    assert judging.gpus == {"GPU-1": Series([1.0, 2.0], [90, 90])}
    judging.units([Unit("a", ended="exit 0", gpus=busy.gpus)], 3.0)
    assert judging.gpus == {}


# -- the program -----------------------------------------------------------------------------------------------------------------


def get(base: str, path: str):
    try:
        with urllib.request.urlopen(base + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.shows("W68", "W79")
def test_the_server_tells_what_is_and_that_s3_is_down(start, s3, tmp_path):
    store = stores.S3Store(s3.bucket("bkt"), s3.endpoint)
    store.put_bytes("r/run.json", json.dumps({"samples": 4, "num_shards": 1, "batch_samples": 2}).encode())
    store.put_bytes("r/shard-01-of-01/batch-000001.safetensors", b"x")
    runs = tmp_path / "runs"
    unit_folder(runs, "t.service", heartbeat=beating(time.time()))
    argv = ["--listen", "127.0.0.1:0", "--runs", runs, "--s3-uri", "s3://bkt/data", "--s3-endpoint", s3.endpoint]
    child = start("monitor.py", *argv, "--run-id", "r", "--every", "1", "--stale-after", "600")
    base = "http://" + child.until(r"ev=listen address=(\S+)")[1]
    child.until("ev=ready")
    assert get(base, "/healthz") == (200, "ok\n")
    code, body = get(base, "/api/status")
    assert code == 200 and json.loads(body)["s3"]["shards"]["shard-01-of-01"]["batches"] == 1
    assert "All well" in get(base, "/")[1] and get(base, "/nope")[0] == 404
    assert 'dflash_batches{where="s3",shard="shard-01-of-01"} 1' in get(base, "/metrics")[1]
    request = urllib.request.Request(base + "/", method="POST", data=b"")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request, timeout=10)
    stop(s3.process)
    child.until(r"ev=step .*healthy=0")
    code, body = get(base, "/healthz")
    assert code == 503 and "batches in S3 are unknown" in body
    assert "unknown" in get(base, "/")[1]
    shown = "".join(get(base, path)[1] for path in ("/", "/api/status", "/metrics", "/healthz")) + child.text
    assert "a-secret-of-the-test" not in shown
    child.process.terminate()
    assert child.wait(20) == 0 and "reason=sigterm" in child.lines[-1]


@pytest.mark.shows("W75")
def test_thousands_of_objects_are_listed_page_by_page(s3, tmp_path):
    """An S3 page has a thousand keys."""
    store = stores.S3Store(s3.bucket("bkt"), s3.endpoint)
    shard = s3.root / "bkt/data/r/shard-01-of-01"
    shard.mkdir(parents=True)
    for number in range(1, 1251):
        (shard / f"batch-{number:06d}.safetensors").touch()
        (shard / f"batch-{number:06d}.json").touch()
    found = objects.list_s3(store, "r")
    assert found.unknown is None and found.shards["shard-01-of-01"].committed == 1250
    assert found.committed == 1250 and len(found.commits) <= 122


@pytest.mark.shows("W80")
def test_a_taken_address_is_69_and_says_which(start, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "127.0.0.1:%d" % taken.getsockname()[1]
        child = start("monitor.py", "--listen", address, "--runs", tmp_path)
        assert child.wait(30) == 69 and address in child.lines[-1]


@pytest.mark.shows("W80")
def test_wrong_credentials_end_it_instead_of_showing_unknown_for_ever(start, s3, tmp_path):
    s3.bucket("bkt")
    argv = ["--listen", "127.0.0.1:0", "--runs", tmp_path, "--s3-uri", "s3://bkt/x", "--s3-endpoint", s3.endpoint]
    child = start("monitor.py", *argv, env={"AWS_SECRET_ACCESS_KEY": "wrong"})
    assert child.wait(30) == 78


@pytest.mark.shows("W79")
def test_loopback_is_the_default():
    import monitor

    assert monitor.parser().parse_args([]).listen == ("127.0.0.1", 8600)
    assert monitor.address("[::1]:80") == ("::1", 80)
    for bad in ("8600", ":8600", "host:", "host:x", "host:70000"):
        with pytest.raises(Fatal):
            monitor.parser().parse_args(["--listen", bad])
