# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The contract between a job and whoever watches it; standard library only, usable before torch is imported.

One flushed ``key=value`` line an event on standard output, a heartbeat file, sd_notify, exit codes, signals, and
threads whose exceptions end the process.  A job is a function ``body(job, args)``; :func:`run` is everything around it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# All of the contract under one name: a program imports this module alone.
from common import place
from common.contract import (  # noqa: F401
    BAD_DATA,
    CONFIGURATION,
    INTERNAL,
    OK,
    TOO_MANY_ERRORS,
    UNAVAILABLE,
    USAGE,
    Fatal,
    Parser,
    common_options,
    format_event,
    notify,
    whole,
)

HEARTBEAT_EVERY_S = 2.0
HEARTBEAT_LINE_EVERY_S = 10.0
STEP_LINE_EVERY_S = 1.0
WATCHDOG_EVERY_S = 1.0
RUNS = Path("/var/lib/launchproof/runs")


def run_folder() -> Path | None:
    """The folder of this run, resolved once so that a later run's ``current`` never receives this run's heartbeat."""
    if os.environ.get("LAUNCHPROOF_RUN_DIR"):
        return Path(os.environ["LAUNCHPROOF_RUN_DIR"])
    unit = os.environ.get("LAUNCHPROOF_UNIT")
    return (RUNS / unit / "current").resolve() if unit else None


@dataclass
class Progress:
    """Where the job is: phase ``load``, ``warmup`` (loaded, before the first real step), ``run`` or ``stop``.

    Besides, the last real step and its monotonic time in seconds.
    """

    phase: str = "load"
    step: int | None = None
    at: float | None = None


class Job:
    """One run of a program: its voice (lines, heartbeat, notify), its stop request and its threads."""

    def __init__(self, heartbeat: Path | None, out: TextIO | None = None):
        folder = run_folder()
        self.heartbeat_path = heartbeat or (folder / "heartbeat.json" if folder else None)
        self.place = place.place()
        # Whether other ranks count on this one: it leaves when they do.
        self.joined = False
        if self.place.local_rank:
            # One voice for a machine: the first of its ranks steps no sooner than the others do.
            self.heartbeat_path = None
            os.environ.pop("NOTIFY_SOCKET", None)
        self.unit = os.environ.get("LAUNCHPROOF_UNIT") or None
        self.invocation_id = os.environ.get("INVOCATION_ID") or None
        self.telemetry: Any = None
        # Constant fields of the heartbeat, for instance which shard this is.
        self.labels: dict[str, Any] = {}
        self.stopping = threading.Event()
        self.progress = Progress()
        self._out = out or sys.stdout
        self._out_lock = threading.Lock()
        self._started = time.monotonic()
        self._ready = False
        self._next_line = 0.0
        self._told_step: int | None = None
        self._next_watchdog = 0.0
        self._on_stop: list[Callable[[], None]] = []
        self._on_failure: list[Callable[[], None]] = []
        self._failure: BaseException | None = None
        self._failure_lock = threading.Lock()
        self._finished = threading.Event()
        self._heartbeat_lock = threading.Lock()
        self._heartbeat_broken = False
        self._wakeup: socket.socket | None = None

    # -- voice ---------------------------------------------------------------------------------------------------------

    def event(self, event: str, **fields: Any) -> None:
        """Print one event line and flush it; one of several ranks says which it is."""
        line = format_event(event, fields if self.place.alone else {**fields, "rank": self.place.rank})
        with self._out_lock:
            print(line, file=self._out, flush=True)

    def warn(self, message: str, **fields: Any) -> None:
        """Print one warning line."""
        self.event("warn", msg=message, **fields)

    def loaded(self) -> None:
        """Say in the heartbeat that all is loaded, and the first batch or step begins."""
        self.progress.phase = "warmup"
        self.heartbeat()

    def ready(self) -> None:
        """Tell systemd and the log, once, that the first real step is done, or that nothing was left to do."""
        if self._ready:
            return
        self._ready = True
        self.progress.phase = "run"
        self.event("ready", load_s=time.monotonic() - self._started)
        notify("READY=1")

    def step(self, step: int, force_line: bool = False, **fields: Any) -> bool:
        """Report real advance: feeds the watchdog, and prints a line at most once a second.

        Called from the loop that does the work, never from a timer: a stuck step must starve the watchdog.
        Returns whether a line was printed.
        """
        now = time.monotonic()
        first = not self._ready
        self.ready()
        self.progress.step, self.progress.at = step, now
        notify("WATCHDOG=1")
        if not (first or force_line or now >= self._next_line):
            return False
        self._next_line = now + STEP_LINE_EVERY_S
        self._told_step = step
        self.event("step", step=step, **fields)
        return True

    def _tell_last_step(self) -> None:
        """Print the step after which nothing came, where its line was held back: where a job stands is then in its log."""
        state = self.progress
        if state.at is not None and self._told_step != state.step and time.monotonic() - state.at > STEP_LINE_EVERY_S:
            self._told_step = state.step
            self.event("step", step=state.step)

    def advanced(self) -> None:
        """Feed the watchdog, at most once a second, for real work below a step: bytes that an upload has moved."""
        now = time.monotonic()
        if now >= self._next_watchdog:
            self._next_watchdog = now + WATCHDOG_EVERY_S
            notify("WATCHDOG=1")

    def heartbeat(self, exit_code: int | None = None) -> None:
        """Replace the heartbeat file; a folder that cannot be written is one warning, never the end of the job.

        Any thread may call it. The one with ``exit_code`` is the last: after :meth:`finish` no other is written.
        """
        if self.heartbeat_path is None:
            return
        with self._heartbeat_lock:
            if exit_code is not None or not self._finished.is_set():
                self._write_heartbeat(self.heartbeat_path, exit_code)

    def _write_heartbeat(self, path: Path, exit_code: int | None) -> None:
        state = self.progress
        beat: dict[str, Any] = {
            "schema": 1,
            "unit": self.unit,
            "invocation_id": self.invocation_id,
            "pid": os.getpid(),
            "phase": state.phase,
            "step": state.step,
            "step_age_s": None if state.at is None else round(time.monotonic() - state.at, 3),
            "time": round(time.time(), 3),
            **self.labels,
        }
        if self.telemetry is not None:
            beat.update(self.telemetry.sample())
        if exit_code is not None:
            beat["exit_code"] = exit_code
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # No fsync here: a beat that a power cut loses is worthless, and a slow disk must not delay the next one.
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(beat) + "\n")
            temporary.replace(path)
            self._heartbeat_broken = False
        except OSError as error:
            if not self._heartbeat_broken:
                self.warn(f"heartbeat not written: {error}")
            self._heartbeat_broken = True

    # -- threads and signals -------------------------------------------------------------------------------------------

    def on_stop(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when a stop is requested, so that whoever blocks finishes."""
        self._on_stop.append(wake)

    def on_failure(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when a thread failed, so that whoever blocks on its work gives up."""
        self._on_failure.append(wake)

    def spawn(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """Start a daemon thread whose exception ends the process (see :meth:`check`)."""

        def guarded() -> None:
            try:
                target()
            except BaseException as error:  # noqa: B036 - handed to the main thread, which ends the process
                self.fail(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def fail(self, error: BaseException) -> None:
        """Keep the first failure of a thread and wake the main thread."""
        with self._failure_lock:
            if self._failure is not None:
                return
            self._failure = error
        for wake in self._on_failure:
            wake()

    def check(self) -> None:
        """Raise, in the calling thread, what another thread died of."""
        if self._failure is not None:
            raise self._failure

    def start(self, argv: list[str]) -> None:
        """Listen to SIGTERM and SIGINT, say ``ev=start``, and begin the heartbeat."""
        # A Python signal handler runs inside whatever the main thread does, possibly while that holds the very lock the
        # handler wants. So the handler does nothing; the signal's byte wakes a thread that may take locks.
        read_end, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        self.event(
            "start",
            unit=self.unit,
            pid=os.getpid(),
            invocation_id=self.invocation_id,
            argv_sha=hashlib.sha256("\0".join(argv).encode()).hexdigest()[:16],
            cuda_visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        )
        self.spawn("signals", lambda: self._listen(read_end))
        self.spawn("heartbeat", self._beat)

    def _listen(self, read_end: socket.socket) -> None:
        name = signal.Signals(read_end.recv(1)[0]).name.lower()
        self.event("stopping", signal=name, phase=self.progress.phase)
        self.stopping.set()
        if self.progress.phase in ("load", "warmup") and not self.joined:
            # Importing, loading and compiling cannot be interrupted, and nothing is to be saved yet.
            self.finish(OK, name)
        for wake in self._on_stop:
            wake()

    def _beat(self) -> None:
        next_line = time.monotonic() + HEARTBEAT_LINE_EVERY_S
        while True:
            self.heartbeat()
            self._tell_last_step()
            if time.monotonic() >= next_line:
                next_line += HEARTBEAT_LINE_EVERY_S
                state = self.progress
                age = None if state.at is None else round(time.monotonic() - state.at, 1)
                gpu = self.telemetry.line() if self.telemetry is not None else {}
                self.event("hb", phase=state.phase, last_step=state.step, age_s=age, **gpu)
            if self._finished.wait(HEARTBEAT_EVERY_S):
                return

    def finish(self, code: int, reason: str, **fields: Any) -> None:
        """Say ``ev=exit`` and leave at once.

        os._exit, because daemon threads that are inside torch while the interpreter is torn down can abort and turn
        exit 0 into a signal.
        """
        self._finished.set()
        self.progress.phase = "stop"
        notify("STOPPING=1")
        self.heartbeat(exit_code=code)
        self.event("exit", code=code, reason=reason, **fields)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(
    parser: argparse.ArgumentParser,
    body: Callable[[Job, argparse.Namespace], dict[str, Any]],
    argv: list[str] | None = None,
) -> None:
    """Parse, start, run ``body`` and exit with this contract's code; never returns.

    ``body`` returns the fields of the exit line, ``reason`` among them, or raises :class:`Fatal`.
    """
    argv = sys.argv[1:] if argv is None else argv
    job = Job(None)
    try:
        args = parser.parse_args(argv)
        job = Job(args.heartbeat)
        job.start([sys.argv[0], *argv])
        fields = body(job, args)
        job.check()
    except Fatal as error:
        job.finish(error.code, error.reason, msg=str(error))
    except Exception as error:
        traceback.print_exc()
        job.finish(INTERNAL, "exception", type=type(error).__name__, msg=str(error)[:300])
    else:
        job.finish(OK, **fields)
