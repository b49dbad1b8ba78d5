# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The run contract: lines, heartbeat, sd_notify, signals, threads, exit codes."""

import json
import os
import shlex
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from common import files, runtime
from common.runtime import Fatal, Job, format_event

MINI = """
import sys, threading, time
from common import runtime

def parser():
    p = runtime.Parser()
    runtime.common_options(p)
    p.add_argument("what")
    return p

def body(job, args):
    if args.what == "load":
        threading.Event().wait()
    if args.what == "raise":
        raise ValueError("a broken\\nthing")
    if args.what == "thread":
        gone = threading.Event()
        job.on_failure(gone.set)
        def die(): raise KeyError("in a thread")
        job.spawn("t", die)
        gone.wait()
        return {"reason": "done"}
    if args.what == "fatal":
        raise runtime.Fatal(runtime.CONFIGURATION, "knob", "turn it.")
    for n in range(1, 4):
        job.step(n, loss=0.5 / n)
    if args.what == "run":
        stopped = threading.Event()
        job.on_stop(stopped.set)
        stopped.wait()
        return {"reason": "sigterm"}
    return {"reason": "done"}

runtime.run(parser(), body)
"""


def fields(line: str) -> dict:
    """A line as a shell-like reader sees it."""
    return dict(part.split("=", 1) for part in shlex.split(line.replace("\\n", "/n")))


@pytest.mark.shows("W1")
def test_a_line_is_key_value_and_one_line_whatever_the_values_are():
    line = format_event(
        "x", {"a": 1.23456789, "b": None, "c": 'two "words"\nand more', "d": "", "e": "k=v", "f": "plain"}
    )
    assert "\n" not in line
    assert line.split(" ev=")[0].startswith("ts=2")
    assert ' a=1.23457 b=- c="two \\"words\\"\\nand more" d="" e="k=v" f=plain' in line


@pytest.mark.shows("W5", "W16")
@pytest.mark.parametrize(
    ("what", "code", "reason"),
    [("ok", 0, "done"), ("raise", 70, "exception"), ("thread", 70, "exception"), ("fatal", 78, "knob")],
)
def test_exit_code_and_last_line_agree(start, what, code, reason):
    program = start(MINI, what)
    assert program.wait() == code
    last = fields(program.lines[-1])
    assert (last["ev"], last["code"], last["reason"]) == ("exit", str(code), reason)
    assert ("Traceback" in program.text) == (code == 70)


@pytest.mark.shows("W13")
@pytest.mark.parametrize("args", [["extra", "words"], ["--nope"], []])
def test_usage_errors_end_with_64(start, args):
    program = start(MINI, *args)
    assert program.wait() == 64
    assert "reason=usage" in program.lines[-1]


@pytest.mark.shows("W2")
def test_the_first_line_comes_before_torch_is_imported(start, tmp_path):
    (tmp_path / "torch.py").write_text("print('torch is imported', flush=True)\nraise ImportError('no torch here')\n")
    for name, args in (
        ("extract_hidden_states.py", ["--data", tmp_path, "--out-dir", tmp_path / "out"]),
        ("train_dflash_pipeline.py", ["--data", tmp_path, "--ckpt-dir", tmp_path / "ckpt"]),
    ):
        program = start("import sys, runpy; sys.path[0] = sys.argv.pop(1); runpy.run_path(sys.argv.pop(1), run_name='__main__')",
                        tmp_path, runtime.__file__.replace("common/runtime.py", name), *args)  # fmt: skip
        assert program.wait() == 70, program.text
        assert " ev=start " in program.lines[0]
        assert program.lines[1] == "torch is imported"


@pytest.mark.shows("W20")
def test_sigterm_while_loading_ends_at_once(start):
    program = start(MINI, "load")
    program.until("ev=start")
    program.process.send_signal(signal.SIGTERM)
    assert program.wait(10) == 0
    assert "reason=sigterm" in program.lines[-1]


def test_sigterm_while_running_lets_the_body_finish(start):
    program = start(MINI, "run")
    program.until("ev=step step=1")
    program.process.send_signal(signal.SIGTERM)
    assert program.wait(10) == 0
    assert "ev=stopping signal=sigterm phase=run" in program.text
    assert "code=0 reason=sigterm" in program.lines[-1]


@pytest.mark.shows("W9", "W10", "W12")
def test_systemd_hears_ready_after_the_first_step_and_one_watchdog_a_step(start, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        assert start(MINI, "ok", env={"NOTIFY_SOCKET": str(tmp_path / "notify")}).wait() == 0
        heard = [sock.recv(100).decode() for _ in range(5)]
    assert heard == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1", "STOPPING=1"]


@pytest.mark.shows("W9")
def test_nothing_ready_is_said_while_loading(start, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(10)
        assert start(MINI, "fatal", env={"NOTIFY_SOCKET": str(tmp_path / "notify")}).wait() == 78
        assert sock.recv(100) == b"STOPPING=1"


@pytest.mark.shows("W6")
def test_the_heartbeat_says_who_where_and_how_long_ago(start, tmp_path):
    env = {"LAUNCHPROOF_RUN_DIR": str(tmp_path), "LAUNCHPROOF_UNIT": "x@1.service", "INVOCATION_ID": "ab" * 16}
    program = start(MINI, "ok", env=env)
    assert program.wait() == 0
    beat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert beat["unit"] == "x@1.service" and beat["invocation_id"] == "ab" * 16 and beat["pid"] == program.process.pid
    assert (beat["phase"], beat["step"], beat["exit_code"]) == ("stop", 3, 0)
    assert 0 <= beat["step_age_s"] < 10
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat.json"]


@pytest.mark.shows("W7")
def test_the_heartbeat_stays_in_the_folder_of_its_own_run(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "RUNS", tmp_path)
    monkeypatch.setenv("LAUNCHPROOF_UNIT", "x.service")
    monkeypatch.delenv("LAUNCHPROOF_RUN_DIR", raising=False)
    for run in ("one", "two"):
        (tmp_path / "x.service" / run).mkdir(parents=True)
    current = tmp_path / "x.service" / "current"
    current.symlink_to("one")
    job = Job(None)
    current.unlink()
    current.symlink_to("two")
    job.heartbeat()
    assert (tmp_path / "x.service/one/heartbeat.json").exists()
    assert not (tmp_path / "x.service/two/heartbeat.json").exists()


@pytest.mark.shows("W6")
def test_beats_of_many_threads_never_mix_and_the_last_one_says_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda _code: None)
    job = Job(tmp_path / "heartbeat.json")
    job.heartbeat()

    def beat(thread: int) -> list[dict]:
        read = []
        for turn in range(100):
            if (thread, turn) == (0, 50):
                job.finish(0, "done")
            job.heartbeat()
            read.append(json.loads(job.heartbeat_path.read_text()))
        return read

    with ThreadPoolExecutor(8) as pool:
        beats = [found for read in pool.map(beat, range(8)) for found in read]
    assert "exit_code" not in beats[0] and len(beats) == 800
    assert json.loads(job.heartbeat_path.read_text())["exit_code"] == 0
    assert "heartbeat not written" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["heartbeat.json"]


def test_the_phase_is_warmup_from_loaded_to_the_first_step(tmp_path):
    job = Job(tmp_path / "heartbeat.json")

    def phase():
        return json.loads(job.heartbeat_path.read_text())["phase"]

    job.heartbeat()
    assert phase() == "load"
    job.loaded()
    assert phase() == "warmup"
    job.step(1)
    job.heartbeat()
    assert phase() == "run"


@pytest.mark.shows("W4")
@pytest.mark.parametrize(("what", "phase"), [("load", "load"), ("run", "run")])
def test_a_line_now_and_then_says_that_it_lives(start, what, phase):
    quick = "from common import runtime; runtime.HEARTBEAT_EVERY_S = runtime.HEARTBEAT_LINE_EVERY_S = 0.05\n"
    child = start(quick + MINI, what)
    said = fields(child.until(f"ev=hb phase={phase} ").string)
    assert (said["last_step"], said["age_s"] == "-") == (("-", True) if what == "load" else ("3", False))


def test_the_line_comes_every_ten_seconds():
    assert runtime.HEARTBEAT_LINE_EVERY_S == 10


@pytest.mark.shows("W8")
def test_a_heartbeat_that_cannot_be_written_is_one_warning(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    job = Job(tmp_path / "file" / "heartbeat.json")
    job.heartbeat()
    job.heartbeat()
    assert capsys.readouterr().out.count("heartbeat not written") == 1


@pytest.mark.shows("W3")
def test_steps_print_at_most_once_a_second_unless_forced(capsys):
    job = Job(None)
    assert [job.step(n) for n in range(1, 200)] == [True] + [False] * 198
    assert job.step(200, force_line=True)
    out = capsys.readouterr().out
    assert out.count("ev=ready") == 1 and out.count("ev=step") == 2


@pytest.mark.shows("W21")
def test_a_folder_has_one_user(tmp_path):
    with files.exclusive(tmp_path / "x"), pytest.raises(Fatal) as caught, files.exclusive(tmp_path / "x"):
        pass
    assert caught.value.code == 78 and str(tmp_path / "x") in str(caught.value)


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Fatal) as caught:
        files.make_folder(tmp_path / "file" / "below")
    assert caught.value.code == 78


def test_an_atomic_write_leaves_the_old_content_when_it_fails(tmp_path, monkeypatch):
    files.write_atomic(tmp_path / "x", b"old")
    monkeypatch.setattr(os, "fsync", lambda _fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"
