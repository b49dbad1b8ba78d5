# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The reference programs as forks of one process that has imported torch: a start costs 50 ms instead of seconds.

Each is a process of its own, with its own signals, threads and exit status. What comes before the imports is not shown
this way; tests.support.workload starts whole programs.
"""

import json
import os
import queue
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.workload import WORKLOAD, Program

SERVER = """
import importlib, json, os, sys
for name in ("extract_hidden_states", "train_dflash_pipeline", "boto3", "s3transfer.manager", "dflash.model", "transformers"):
    importlib.import_module(name)
from common import attention, checkpoint, committer, replicas, runtime, sources, target
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        out = os.open(asked["out"], os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(asked["env"])
        sys.argv = [asked["program"], *asked["argv"]]
        program = sys.modules[asked["program"].removesuffix(".py")]
        runtime.run(program.parser(), program.body)
    print(pid, flush=True)
"""


class Server:
    """The process that forks."""

    def __init__(self):
        env = {**os.environ, "PYTHONPATH": str(WORKLOAD), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, **what) -> int:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


class Child:
    """What of subprocess.Popen the tests use, for a child of the server."""

    def __init__(self, server: Server, pid: int, out: Path):
        self._server, self.pid, self.returncode = server, pid, None
        # A pidfd names this process for good, even when its number is given to another one.
        self._pidfd = os.pidfd_open(pid)
        self.stdout = open(out)  # noqa: SIM115 - read by a thread until the end of the process

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["fork"], timeout)
            self.returncode = self._server.ask(wait=self.pid)
            os.close(self._pidfd)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked(Program):
    """A program that was forked; its lines are waited for as those of any other."""

    def __init__(self, server: Server, program: str, argv: list, env: dict, out: Path):
        os.mkfifo(out)
        self.lines = []
        self._queue = queue.Queue()
        asked = {"program": program, "argv": [str(arg) for arg in argv], "env": env, "out": str(out)}
        self.process = Child(server, server.ask(**asked), out)
        threading.Thread(target=self._read, daemon=True).start()

    def killed_after(self, seconds: float) -> int:
        """SIGKILL after ``seconds``, or its own end before; the exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.wait()


@pytest.fixture(scope="session")
def fork_server():
    server = Server()
    yield server
    server.process.stdin.close()
    server.process.wait(30)


@pytest.fixture
def fork(fork_server, tmp_path):
    """``fork("extract_hidden_states.py", *argv, env={}) -> Forked``; all are ended with the test."""
    children: list[Forked] = []

    def begin(program: str, *argv, env=None) -> Forked:
        keys = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
        children.append(Forked(fork_server, program, argv, {**keys, **(env or {})}, tmp_path / f".out-{len(children)}"))
        return children[-1]

    yield begin
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()


@pytest.fixture
def moments(capsys):
    """Random numbers for moments; the seed is printed, and LAUNCHPROOF_SEED repeats it."""
    seed = int(os.environ.get("LAUNCHPROOF_SEED") or time.time_ns())
    with capsys.disabled():
        print(f" LAUNCHPROOF_SEED={seed}", end="")
    return random.Random(seed)
