# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The reference programs as real processes, and a real S3 server, for tests in their environment (.venv-workload)."""

import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

WORKLOAD = Path(__file__).parents[2] / "workload"
KEY, SECRET = "launchproof-test", "a-secret-of-the-test"


@dataclass
class S3:
    """A running server; its objects are files below ``root``/BUCKET."""

    endpoint: str
    root: Path
    process: subprocess.Popen

    @property
    def port(self) -> int:
        return int(self.endpoint.rsplit(":", 1)[1])

    def bucket(self, name: str) -> str:
        (self.root / name).mkdir()
        return f"s3://{name}/data"


def start_s3(root: Path, port: int = 0, keys: str = f"{KEY},{SECRET}", address: str = "127.0.0.1") -> S3:
    """Serve the folders below ``root`` as buckets; on a free port, unless one is given."""
    if not port:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
    rclone = Path(sys.executable).with_name("rclone")
    argv = [rclone, "serve", "s3", "--addr", f"{address}:{port}", "--auth-key", keys, "--config", "", root]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection((address, port), 1).close()
            return S3(f"http://{address}:{port}", root, process)
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "rclone serve s3 did not start"
            time.sleep(0.02)


def stop(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """An S3 server of this test alone."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    root = tmp_path / "s3"
    root.mkdir()
    server = start_s3(root)
    yield server
    stop(server.process)


class Program:
    """A child process whose lines are waited for, never slept for."""

    def __init__(self, argv: list, env: dict | None = None):
        self.lines: list[str] = []
        self._queue: queue.Queue = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, *map(str, argv)],
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def until(self, pattern: str, timeout: float = 90) -> re.Match:
        """The first new line that matches; fails at the end of the output or of the time."""
        deadline = time.monotonic() + timeout
        while True:
            line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            assert line is not None, f"ended before {pattern!r}:\n" + "\n".join(self.lines)
            self.lines.append(line)
            match = re.search(pattern, line)
            if match:
                return match

    def wait(self, timeout: float = 90) -> int:
        """The exit status; all lines are in ``lines`` then."""
        code = self.process.wait(timeout)
        while (line := self._queue.get(timeout=10)) is not None:
            self.lines.append(line)
        return code

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@pytest.fixture
def start():
    """Start one of the programs, or ``-c`` code; all are ended with the test."""
    programs: list[Program] = []

    def begin(program: str, *args, env=None) -> Program:
        argv = [WORKLOAD / program, *args] if program.endswith(".py") else ["-c", program, *args]
        programs.append(Program(argv, {"PYTHONPATH": str(WORKLOAD), **(env or {})}))
        return programs[-1]

    yield begin
    for program in programs:
        if program.process.poll() is None:
            stop(program.process)
