# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ends or hinders extraction, for real: nothing committed is lost, nothing uncommitted is counted."""

import json
import os
import signal
import socket
import subprocess

import pytest
from common import store as stores

from tests.support.preloaded import Forked
from tests.support.proxy import Proxy
from tests.support.workload import start_s3, stop
from tests.unit.workload.test_extract import arguments, everything

PROGRAM = "extract_hidden_states.py"
SHARD = "r/shard-01-of-01"
LONG = bool(os.environ.get("LAUNCHPROOF_LONG"))


@pytest.fixture(scope="module")
def whole(fork_server, texts, tmp_path_factory):
    """What an undisturbed run commits."""
    folder = tmp_path_factory.mktemp("whole")
    argv = arguments(texts, folder, batch_samples="1")
    child = Forked(fork_server, PROGRAM, argv, {}, folder / "log")
    assert child.wait() == 0, child.text
    return everything(stores.LocalStore(folder / "out"))


def assert_whole(store, whole) -> None:
    found = everything(store)
    assert set(found) == set(whole)
    for name, (tokens, states) in whole.items():
        assert found[name][0].equal(tokens) and found[name][1].equal(states), name


def finish(fork, argv, store, whole) -> str:
    """Resume without any disturbance; what it printed."""
    child = fork(PROGRAM, *argv)
    assert child.wait() == 0, child.text
    assert " reason=done" in child.lines[-1]
    assert_whole(store, whole)
    return child.text


@pytest.mark.shows("W30", "W31")
def test_killed_at_random_moments_and_resumed(fork, moments, texts, tmp_path, s3, whole):
    uri = s3.bucket("bkt")
    store = stores.S3Store(uri, s3.endpoint)
    argv = arguments(texts, tmp_path, s3, uri, resume=True, batch_samples="1")
    first = fork(PROGRAM, *argv)
    first.until("ev=resume")
    assert first.wait() == 0
    lasts = float(first.lines[-1].split("elapsed_s=")[1].split()[0])
    wanted, killed, partly = (30 if LONG else 4), 0, 0
    for attempt in range(5 * wanted):
        run = f"r{attempt}"
        argv[argv.index("--run-id") + 1] = run
        child = fork(PROGRAM, *argv)
        # Before the first batch there is little to tear: one moment in four, the others are while it commits.
        if killed % 4:
            child.until("ev=resume")
        if child.killed_after(moments.uniform(0, lasts)) != -signal.SIGKILL:
            continue
        killed += 1
        before = stores.committed(store, f"{run}/shard-01-of-01")
        partly += 0 < len(before) < len(whole)
        child = fork(PROGRAM, *argv)
        assert child.wait() == 0, child.text
        assert f" committed={len(before)} " in child.text
        assert child.text.count(" ev=step ") == len(whole) - len(before), "what is committed is not computed again"
        found = everything(store, run=run)
        assert set(found) == set(whole) and all(found[name][1].equal(whole[name][1]) for name in whole)
        assert [path.name for path in (tmp_path / f"out/{run}/shard-01-of-01").iterdir()] == [".lock"]
        if killed == wanted:
            break
    assert killed == wanted
    assert partly, "no moment was between the first commit and the last"


@pytest.mark.shows("W36")
@pytest.mark.parametrize("failures", [3, pytest.param(7, marks=pytest.mark.long, id="a-minute")])
def test_s3_may_be_away(fork, texts, tmp_path, s3, whole, failures):
    uri = s3.bucket("bkt")
    child = fork(PROGRAM, *arguments(texts, tmp_path, s3, uri, batch_samples="1"))
    child.until("ev=step step=5 ")
    stop(s3.process)
    child.until(f"ev=error .* row={failures} ")
    again = start_s3(s3.root, s3.port)
    try:
        assert child.wait() == 0, child.text
        assert " reason=done" in child.lines[-1]
        assert_whole(stores.S3Store(uri, s3.endpoint), whole)
    finally:
        stop(again.process)


@pytest.mark.shows("W37")
def test_s3_may_stay_away(fork, texts, tmp_path, s3, whole):
    uri = s3.bucket("bkt")
    argv = arguments(texts, tmp_path, s3, uri, resume=True, batch_samples="1")
    child = fork(PROGRAM, *argv, "--max-consecutive-errors", "2")
    child.until("ev=step step=5 ")
    stop(s3.process)
    assert child.wait() == 75, child.text
    assert " reason=too_many_errors " in child.lines[-1]
    child = fork(PROGRAM, *argv)
    assert child.wait() == 69, child.text
    again = start_s3(s3.root, s3.port)
    try:
        kept = len(stores.committed(stores.S3Store(uri, s3.endpoint), SHARD))
        assert kept >= 5
        assert f" committed={kept} " in finish(fork, argv, stores.S3Store(uri, s3.endpoint), whole)
    finally:
        stop(again.process)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "out"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this machine lets nobody mount a tmpfs: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.shows("W38")
def test_a_full_disk_is_75_and_what_was_committed_stays(fork, texts, tmp_path, whole, small_disk):
    argv = arguments(texts, tmp_path, resume=True, batch_samples="1", max_consecutive_errors="2")
    filler = small_disk / "filler"
    filler.write_bytes(bytes(3600 << 10))
    child = fork(PROGRAM, *argv)
    assert child.wait() == 75, child.text
    assert "No space left on device" in child.text
    assert not [path.name for path in (small_disk / SHARD).iterdir() if path.name.endswith(".tmp")]
    kept = everything(stores.LocalStore(small_disk))
    assert 0 < len(kept) < len(whole)
    filler.unlink()
    finish(fork, argv, stores.LocalStore(small_disk), whole)


@pytest.mark.shows("W39", "W10")
def test_a_slow_s3_slows_it_down_and_feeds_the_watchdog(fork, texts, tmp_path, s3, whole):
    uri = s3.bucket("bkt")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard, Proxy(s3.port, rate=200_000) as slow:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(60)
        argv = arguments(texts, tmp_path, s3, uri, resume=True, upload_queue="2")
        argv[argv.index("--batch-samples") + 1] = "60"
        argv[argv.index("--s3-endpoint") + 1] = slow.endpoint
        child = fork(PROGRAM, *argv, env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        first = [heard.recv(100), heard.recv(100)]
        assert first == [b"WATCHDOG=1"] * 2, "bytes move, and no batch is committed yet"
        waiting = list((tmp_path / "out" / SHARD).glob("batch-*"))
        assert len(waiting) <= 2 + 2, "those in the queue, the one on its way, and the one that waits for room"
        assert child.wait() == 0, child.text
    assert set(everything(stores.S3Store(uri, s3.endpoint))) == set(whole)


@pytest.mark.shows("W10")
def test_an_s3_that_is_silent_feeds_nothing(fork, texts, tmp_path, s3):
    uri = s3.bucket("bkt")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard, Proxy(s3.port) as proxy:
        heard.bind(str(tmp_path / "notify"))
        argv = arguments(texts, tmp_path, s3, uri, batch_samples="1")
        argv[argv.index("--s3-endpoint") + 1] = proxy.endpoint
        env = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "LAUNCHPROOF_RUN_DIR": str(tmp_path / "run")}
        child = fork(PROGRAM, *argv, env=env)
        child.until("ev=step step=5 ")
        proxy.freeze()
        heard.settimeout(3)
        with pytest.raises(TimeoutError):
            while heard.recv(100):
                pass
        child.until("ev=hb phase=run ", timeout=30)


@pytest.mark.shows("W40", "W32")
def test_a_local_file_that_is_cut_off_is_not_committed_and_made_again(fork, texts, tmp_path, s3, whole):
    uri = s3.bucket("bkt")
    store = stores.S3Store(uri, s3.endpoint)
    with Proxy(s3.port) as proxy:
        argv = arguments(texts, tmp_path, s3, uri, resume=True, batch_samples="1")
        argv[argv.index("--s3-endpoint") + 1] = proxy.endpoint
        child = fork(PROGRAM, *argv)
        child.until("ev=step step=5 ")
        proxy.freeze()
        # Six files: four that wait, one on its way, one with its thread at the queue's door.
        folder = tmp_path / "out" / SHARD
        waiting = sorted(until(lambda: len(found := list(folder.glob("batch-*.safetensors"))) >= 6 and found))
        os.truncate(waiting[-1], 10)
        proxy.thaw()
        assert child.wait() == 70, child.text
        assert " reason=local_file " in child.lines[-1] and waiting[-1].name in child.lines[-1]
        number = int(waiting[-1].stem.split("-")[1])
        assert number not in stores.committed(store, SHARD)
        assert waiting[-1].exists(), "a local file goes only after its commit"
        finish(fork, argv, store, whole)


def until(condition, timeout: float = 30):
    """The condition's first true value; the state of a folder has no event that this process could wait for."""
    import time

    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@pytest.mark.shows("W20", "W33")
@pytest.mark.parametrize(("line", "phase"), [("ev=start", "load"), ("ev=resume", "warmup|run"), ("step=3 ", "run")])
def test_sigterm_at_any_phase_ends_clean_and_is_resumed(fork, texts, tmp_path, s3, whole, line, phase):
    uri = s3.bucket("bkt")
    heartbeat = tmp_path / "heartbeat.json"
    argv = arguments(texts, tmp_path, s3, uri, resume=True, batch_samples="1", heartbeat=heartbeat)
    child = fork(PROGRAM, *argv)
    child.until(line)
    if line == "ev=resume":
        # The last line of the loading: that it is over, the heartbeat alone says.
        until(lambda: heartbeat.exists() and json.loads(heartbeat.read_text())["phase"] != "load")
    child.process.send_signal(signal.SIGTERM)
    assert child.wait() == 0, child.text
    assert " code=0 reason=sigterm" in child.lines[-1]
    child_phase = child.text.split("ev=stopping signal=sigterm phase=")[1].split()[0]
    assert child_phase in phase.split("|")
    if child_phase == "run":
        assert not list((tmp_path / "out").rglob("*.safetensors")), "what was computed is committed"
    finish(fork, argv, stores.S3Store(uri, s3.endpoint), whole)


@pytest.mark.shows("W33", "W37")
def test_sigterm_while_s3_is_away_does_not_wait_for_it(fork, texts, tmp_path, s3):
    uri = s3.bucket("bkt")
    child = fork(PROGRAM, *arguments(texts, tmp_path, s3, uri, batch_samples="1"))
    child.until("ev=step step=3 ")
    stop(s3.process)
    child.until("ev=error .* row=2 ")
    child.process.send_signal(signal.SIGTERM)
    assert child.wait(10) == 0, child.text
    assert " code=0 reason=sigterm" in child.lines[-1]
