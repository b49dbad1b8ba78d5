# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Control groups, processes, events, objects and GPUs: against this machine where it has them, else against files."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import NOT_READ, Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import events, gpu, objects, process
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.cgroup import Groups


@pytest.fixture
def loop():
    found = events.Loop()
    yield found
    found.close()


# --- control groups


@pytest.mark.parametrize("version", [1, 2])
def test_groups_of_both_versions(tmp_path, version):
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("")
    top, memory = (tmp_path, tmp_path) if version == 2 else (tmp_path / "systemd", tmp_path / "memory")
    for folder in ("x.service", "x.service/sub"):
        (top / folder).mkdir(parents=True)
        (top / folder / "cgroup.procs").write_text("7\n" if folder.endswith("sub") else "5\n6\n")
    (memory / "x.service").mkdir(parents=True, exist_ok=True)
    name, text = (
        ("memory.events", "oom 1\noom_kill 4\n")
        if version == 2
        else ("memory.oom_control", "under_oom 0\noom_kill 4\n")
    )
    (memory / "x.service" / name).write_text(text)
    groups = Groups(str(tmp_path))
    assert sorted(groups.pids("/x.service")) == [5, 6, 7]
    assert groups.oom_kills("/x.service") == 4
    assert groups.pids("/gone.service") == ()
    assert groups.oom_kills("/gone.service") == 0
    assert groups.pids("") == ()
    assert (groups.events_path("/x.service") is not None) == (version == 2)


# --- processes


def test_a_process_of_ours():
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print('up', file=sys.stderr, flush=True); sys.stdin.read()", "marker"],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "INVOCATION_ID": "f" * 32},
    ) as child:  # fmt: skip
        assert child.stderr.readline() == b"up\n"  # before it, the process may not have its new command line yet
        seen = process.process(child.pid, child.pid, None, detailed=True)
        assert seen.main and seen.alive and seen.argv[-1] == "marker"
        assert seen.invocation_id == "f" * 32
        assert "/dev/null" in seen.outputs
        assert seen.has_log is False
        assert os.getpid() in process.ancestors(child.pid)
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not process.process(child.pid, child.pid, None, detailed=True).alive, (
            "a zombie passes kill -0 and is none"
        )
    assert process.process(child.pid, child.pid, None, detailed=True) is None


LEADER_GONE = """
import ctypes, threading, sys
threading.Thread(target=sys.stdin.read).start()
print("up", file=sys.stderr, flush=True)
ctypes.CDLL(None).syscall(%d, 0)  # exit(2) of this thread alone
""" % (60 if os.uname().machine == "x86_64" else 93)


def test_a_process_lives_as_long_as_one_of_its_threads(tmp_path):
    pipe, words = subprocess.PIPE, [sys.executable, "-c", LEADER_GONE]
    with open(tmp_path / "log", "a") as log, subprocess.Popen(words, stdin=pipe, stdout=log, stderr=pipe) as child:
        assert child.stderr.readline() == b"up\n"
        about = os.fstat(log.fileno())
        for _try in range(100):
            if process.read_stat(child.pid)["state"] == "Z":
                break
            time.sleep(0.05)
        assert process.read_stat(child.pid)["state"] == "Z", "of the first thread"
        seen = process.process(child.pid, child.pid, (about.st_dev, about.st_ino), detailed=True)
        assert seen.alive and seen.main and seen.has_log is True and seen.argv[1] == "-c"
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.process(child.pid, child.pid, None, detailed=True).state == "Z"


def test_a_log_that_is_only_read_is_not_held(tmp_path):
    log = tmp_path / "log"
    log.touch()
    about = log.stat()
    for mode, holds in (("r", False), ("a", True)):
        with open(log, mode):
            assert process.outputs(os.getpid(), (about.st_dev, about.st_ino))[1] is holds


def test_who_wrote_to_a_shared_log(tmp_path):
    """With O_APPEND the position of a descriptor is 0 until something was written through it."""
    log = tmp_path / "log"
    log.write_text("somebody else's\n")
    inode = (log.stat().st_dev, log.stat().st_ino)
    script = "echo ready >&2; read _; echo mine; echo done >&2; read _"
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)  # as systemd does; Python's own open() seeks to the end
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=handle, stderr=subprocess.PIPE) as child:
        assert child.stderr.readline() == b"ready\n"
        assert not process.has_written(child.pid, inode)
        assert process.other_writers(inode, (os.getpid(),)) == (child.pid,)
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stderr.readline() == b"done\n"
        assert process.has_written(child.pid, inode)
        child.stdin.close()
    os.close(handle)
    with open(log):
        assert process.other_writers(inode, ()) == (), "whoever only reads is no writer"


def test_a_pidfd_tells_of_a_death(loop):
    dead = []
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        descriptor = process.open_pidfd(child.pid)
        loop.add(descriptor, lambda: dead.append(child.pid))
        assert not loop.step(0)
        child.stdin.close()
        assert loop.step(10) and dead == [child.pid]
    loop.remove(descriptor)
    os.close(descriptor)
    assert process.open_pidfd(child.pid) is None


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("exit 0", 0), ("kill -9 $$", 0)])
def test_the_kernel_tells_how_a_process_exited_that_nobody_has_waited_for(script, status):
    with subprocess.Popen(["/bin/sh", "-c", script]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.exit_status(child.pid) == status
        child.wait()
        assert process.exit_status(child.pid) == 0, "gone"


def test_a_process_that_lives_has_no_exit_status():
    assert process.exit_status(os.getpid()) == 0


def test_a_pattern_that_matches_only_the_shell_that_asks():
    code = (
        "import os, sys; from %s import matches; print(*matches('train_that_is_not.py', os.getpid())[1], sep='\\n')"
        % process.__name__
    )
    text = '%s -c "%s"; true # train_that_is_not.py' % (sys.executable, code)
    answer = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    assert "the observer's own shell" in answer.stdout, answer.stderr


# --- events


def test_a_path_watched_twice_tells_both_until_one_leaves(loop, tmp_path):
    seen = []
    first = loop.watch(str(tmp_path), events.NAMES, lambda mask, name: seen.append(("first", name)))
    loop.watch(str(tmp_path), events.NAMES, lambda mask, name: seen.append(("second", name)))
    (tmp_path / "a").touch()
    loop.step(5)
    loop.unwatch(first)
    (tmp_path / "b").touch()
    loop.step(5)
    assert seen == [("first", "a"), ("second", "a"), ("second", "b")]


def test_without_an_inotify_instance_nothing_is_watched_and_descriptors_still_are(monkeypatch, tmp_path):
    monkeypatch.setattr(events._libc, "inotify_init1", lambda flags: -1, raising=False)
    loop = events.Loop()
    assert loop.blind and loop.watch(str(tmp_path), events.NAMES, lambda mask, name: None) is None
    loop.unwatch(None)
    reading, writing = os.pipe()
    seen = []
    loop.add(reading, lambda: seen.append(os.read(reading, 1)))
    os.write(writing, b"x")
    assert loop.step(5) and seen == [b"x"]
    loop.close()


def test_a_prover_of_many_units_may_open_as_many_files():
    code = (
        "import resource as r; from %s import allow_many_files; hard = r.getrlimit(r.RLIMIT_NOFILE)[1];"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, hard)); allow_many_files(); print(r.getrlimit(r.RLIMIT_NOFILE)[0] == hard)"
    ) % events.__name__
    environ = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_what_is_not_there_cannot_be_watched(loop, tmp_path):
    assert loop.watch(str(tmp_path / "none"), events.NAMES, print) is None
    loop.unwatch(None)


# --- objects


def test_the_signature_is_that_of_awss_own_example():
    """Expected value: "Signature Calculations for the Authorization Header", example GET bucket (list objects), AWS S3 API reference."""
    environ = {
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    }
    now = datetime.datetime(2013, 5, 24, tzinfo=datetime.timezone.utc)
    headers = objects.sign("GET", "examplebucket.s3.amazonaws.com", "/", "max-keys=2&prefix=J", environ, now)
    assert headers["authorization"].endswith(
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )


PAGES = {
    None: "<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Contents/><Contents/>"
    "<NextContinuationToken>a/b</NextContinuationToken></ListBucketResult>",
    "a/b": "<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Contents/></ListBucketResult>",
}


@pytest.fixture
def s3():
    from urllib.parse import parse_qs, urlsplit

    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self):
            query = parse_qs(urlsplit(self.path).query)
            self.server.asked.append(self.path)
            body = PAGES[query.get("continuation-token", [None])[0]].encode()
            self.send_response(self.server.first.pop(0) if self.server.first else self.server.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.status, server.first = [], 200, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def environ(server):
    return {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:%d" % server.server_port,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }


def test_all_pages_of_a_listing_are_counted(s3):
    assert objects.s3_count("s3://bucket/run 1/x", environ(s3)) == 3
    assert s3.asked[0] == "/bucket?list-type=2&prefix=run%201%2Fx"


def test_a_refused_listing_is_unknown_and_not_0(s3, loop):
    s3.status = 403
    source = objects.ObjectsSource(type("Spec", (), {"uri": "s3://bucket/x"}), environ(s3), loop, lambda: None)
    found = source.count()
    assert isinstance(found, Unknown) and "403" in found.why
    source.close()


def test_a_server_that_is_just_restarting_is_asked_again(s3, loop):
    s3.first = [503, 503]
    source = objects.ObjectsSource(type("Spec", (), {"uri": "s3://bucket/x"}), environ(s3), loop, lambda: None)
    assert source.count() == 3
    s3.first = [503] * 100
    source._take(source._list())
    assert source.facts().count == 3, "the last number holds while the server may be coming back"
    source._failing_since -= objects.PATIENCE
    assert "503" in source.facts().why
    source.close()


def test_a_start_does_not_wait_for_a_server_that_does_not_answer_now(s3, loop, monkeypatch):
    monkeypatch.setattr(objects, "BASELINE_PATIENCE", 0.2)
    s3.first = [503] * 100
    source = objects.ObjectsSource(type("Spec", (), {"uri": "s3://bucket/x"}), environ(s3), loop, lambda: None)
    assert source.count() == NOT_READ and source.good is None and source.facts() == NOT_READ
    s3.first = []
    source._take(source._list())
    assert source.good == 3, "the first answer is the baseline then"
    source.close()


def test_missing_keys_are_named():
    with pytest.raises(objects.ListError, match="AWS_ACCESS_KEY_ID"):
        objects.s3_count("s3://b/p", {})


def test_a_folder_grows(loop, tmp_path):
    folder, touched = tmp_path / "out", []
    source = objects.ObjectsSource(type("Spec", (), {"uri": str(folder)}), {}, loop, lambda: touched.append(1))
    assert source.count() == 0
    folder.mkdir()
    assert source.facts().grew_at is None
    (folder / "a").touch()
    loop.step(5)
    assert (source.facts().count, bool(source.facts().grew_at), bool(touched)) == (1, True, True)
    source.close()


# --- GPUs


CUDA = gpu.Opened(frozenset({"nvidia0", "nvidiactl", "nvidia-uvm"}), True)
MEASURES = gpu.Opened(frozenset({"nvidia0", "nvidiactl"}), False)  # as nvidia-smi does, and telemetry
NOTHING = gpu.Opened(frozenset(), False)


@pytest.mark.parametrize(
    ("memory", "from_node", "rose", "held", "answer"),
    [
        ({"A": 9, "B": 9}, False, (), CUDA, ("proved", "")),
        ({"A": 9, "B": 9}, True, (), CUDA, ("proved_from_node", "")),
        ({"A": 9}, False, (), CUDA, ("none", "wrong_gpu")),
        ({"A": 9, "C": 9}, False, (), CUDA, ("none", "wrong_gpu")),
        ({"A": 9, "B": 9, "C": 9}, False, (), CUDA, ("none", "wrong_gpu")),
        ({"A": 9, "B": 1}, False, (), CUDA, ("none", "context_without_memory")),
        ({"A": None, "B": None}, False, ("A", "B"), CUDA, ("consistent", "")),
        ({"A": None, "B": None}, False, ("A",), CUDA, ("none", "context_without_memory")),
        ({}, False, ("A", "B"), CUDA, ("consistent", "")),
        ({}, False, ("A",), CUDA, ("none", "wrong_gpu")),
        ({}, False, (), CUDA, ("none", "opened_only")),
        ({}, False, ("A", "B"), MEASURES, ("none", "no_device")),
        ({}, False, ("A", "B"), NOTHING, ("none", "no_device")),
    ],
)
def test_the_ladder(memory, from_node, rose, held, answer):
    assert gpu.judge(("A", "B"), memory, from_node, rose, held, 5) == answer


@pytest.mark.parametrize(
    ("visible", "declared"),
    [
        (None, ("GPU-aa", "GPU-bb")),
        ("", ()),
        ("1", ("GPU-bb",)),
        ("GPU-b,0", ("GPU-bb", "GPU-aa")),
        ("GPU-zz", ("GPU-zz",)),
        ("7", ("7",)),
    ],
)
def test_declared_gpus(visible, declared):
    assert gpu.declared_uuids(visible, ["GPU-aa", "GPU-bb"]) == declared


def test_without_a_driver_there_is_no_device_and_the_reason_is_kept():
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a driver")
    spec = type("Spec", (), {"level": "proved", "memory_floor": 1})
    source = gpu.GpuSource(spec, {"CUDA_VISIBLE_DEVICES": "GPU-aa"})
    assert "libnvidia-ml" in source.memory().why
    source.sample(())
    assert (source.facts({}).level, source.facts({}).reason) == ("none", "no_device")
