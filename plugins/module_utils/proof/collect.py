# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Collects the facts of one unit from all sources, and asks decide() about them.

What wakes it: systemd's own signals, the run folder (C(begin-run) and the death certificate), pidfds, control
group events, the log, the start job's end. A tick each second samples what sends no events (process states, CPU time,
logs on network file systems).
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import signal
import subprocess
import time
from collections import deque
from dataclasses import replace

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.decide import decide
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import (
    DUMPED,
    EXITED,
    KILLED,
    NOT_READ,
    Activity,
    Baseline,
    Exit,
    Facts,
    Heartbeat,
    Log,
    StartAnswer,
    UnitState,
    Unknown,
    Verdict,
    known,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.scan import Scanner, find_old
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import logfile, process, systemd
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import IN_MODIFY, NAMES

WINDOW = 5.0  # s over which CPU time and I/O are compared
FOREIGN_EVERY = 1.0  # s between looks at who else writes to a shared log
QUIET = 2.0  # s without a byte after which it is worth trying whether the log can be written
PRE_GRACE = 1.0  # s in which what ExecStartPre= wrote may still be read when the main process has begun
QUIET_AGAIN = 30.0  # s of more silence after which it is tried again
HEARTBEAT_MAX, TELEMETRY_MAX = 65536, 300  # bytes read of a heartbeat, characters kept of what it says
DATED = 1024  # bytes of an older log that share one date
STEADY = ("active", "inactive", "failed", "reloading")
CODES = {"exited": EXITED, "killed": KILLED, "dumped": DUMPED}
# Where the main process still is systemd itself, between fork and exec; systemd-executor is of 254.
BEFORE_EXEC = ("/systemd/systemd", "/systemd/systemd-executor", "/sbin/init")
# Exit statuses by which systemd says that it did not come to the exec: systemd.exec(5), "Process Exit Codes".
SETUP_STATUSES = range(200, 246)


def journal_output(run_id: str, namespace: str) -> tuple:
    """The command that prints what a run wrote to the journal, which may be one of its own (LogNamespace=)."""
    words = ("--lines=all", "--quiet", "--output=cat", "_SYSTEMD_INVOCATION_ID=" + run_id)
    return ("journalctl", *systemd.in_namespace(namespace), *words)


def signal_number(text: str) -> int:
    """Number of a signal or status as $EXIT_STATUS of systemd.exec(5) gives it: "1" or "KILL"."""
    if text.isdigit():
        return int(text)
    return getattr(signal, "SIG" + text, 0)


def certificate_exit(certificate: dict, run_id: str) -> Exit:
    """Turn a death certificate (exit.json) into an Exit."""
    return Exit(
        at=float(certificate.get("boottime") or 0.0),
        code=CODES.get(certificate.get("exit_code") or "", 0),
        status=signal_number(str(certificate.get("exit_status") or "0")),
        invocation_id=run_id,
        result=certificate.get("service_result") or "",
        source="certificate",
        stop_requested=bool(certificate.get("stop_requested")),
    )


def telemetry_of(path: str) -> str | None:
    """What a heartbeat says about its job's telemetry; None where it says nothing, as any file that a job touches may.

    The file is the job's: it is not waited for where it is a FIFO, and not read to an end that it may not have.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as handle:
            beat = json.loads(handle.read(HEARTBEAT_MAX) or b"null")
    except (OSError, ValueError, RecursionError):
        return None
    value = beat.get("telemetry") if isinstance(beat, dict) else None
    return value[:TELEMETRY_MAX] if isinstance(value, str) else None


class UnitWatch:
    """Everything about one unit under proof. C(touch) is called when facts() would give something new."""

    def __init__(
        self, unit, spec, loop, groups, redact, paths=None, user="", log=None, host="", declared=(), secrets=None
    ):
        self.unit, self.spec, self.loop, self.groups = unit, spec, loop, groups
        self.redact = redact
        self.paths = paths or ledger.Paths()
        self.user, self.host, self.declared = user, host, tuple(declared)
        self.secrets = secrets or {}
        self.log_path = spec.log.path or log
        self.state, self.properties = NOT_READ, {}
        self.baseline = None
        self.answer = StartAnswer()
        self.run_id = self.run_started_at = None
        self.exits, self.restarts_seen = [], 0
        self.exec_seen = False
        self.need_show = self.dirty = True
        self.shown_at = 0.0  # CLOCK_BOOTTIME of what is known of the unit
        self.verdict = self.wait = self.seen = None  # the last answer, and the facts that gave it
        self.wrong_processes = self.unexpanded = ()  # of diagnose
        self.instances_found = ()
        self.gpu_source = self.objects_source = self.last_log = None
        self._tails, self._dead_log, self._log_error = [], None, ""
        self._scanners = {}
        self._old_match = None
        self._processes = ()
        self._pidfd = None  # (pid, descriptor)
        self._dead_pid = 0  # main process that has died, which systemd may not know yet
        self._group_keys, self._group_fd, self._group = [], None, None
        self._oom_rise, self._oom_before, self._oom_now, self._oom_at = {}, 0, 0, None
        self._was_active = False
        self._uninterruptible_since = None
        self._samples = deque()
        self._place, self._probed = NOT_READ, None  # the log's place, and in which silence it was tried
        self._journal_run = None  # run whose output in the journal was read to its end
        self._journal, self._follower = NOT_READ, None
        self._folder_keys = []
        self._last_n_restarts = 0
        self._wrote = self._others = False  # a process of this run wrote to the log; somebody else may
        self._asked_at = 0.0
        self._beat = (None, 0.0)  # time of the heartbeat's last change as its file says it, and on CLOCK_BOOTTIME
        self._condition = ""  # the one that refused this start
        self._was_waiting = False  # systemd was seen waiting to restart it
        self._asked_for = None  # run that the ledger knew and systemd's answer did not, for which it was asked again

    # ---- before the start ----

    def take_baseline(self, observed: bool, now: float) -> None:
        """Remember how things are; I(observed) means that what runs already is what is to be proved."""
        state = self.state if isinstance(self.state, UnitState) else UnitState()
        group = state.control_group
        pids = self.groups.pids(group)
        self._oom_before = known(self.groups.oom_kills(group), 0) if group else 0
        self._oom_now = self._oom_before
        objects = self.objects_source.count() if self.objects_source else None
        gpu = self.gpu_source.memory() if self.gpu_source else None
        if observed:
            # The run began long ago: what was there before it is known from the proof of its launch, or not at all.
            objects = self._objects_before(state, objects)
            gpu = {} if isinstance(gpu, dict) else gpu
        self.baseline = Baseline(
            taken_at=now,
            observed=observed,
            invocation_id=state.invocation_id or self._last_run() or "",
            n_restarts=state.n_restarts,
            active_state=state.active_state,
            processes=pids if isinstance(pids, Unknown) else self._read_processes(pids, state.main_pid, detailed=False),
            logs=self._logs_there(),
            oom_kills=self._oom_before,
            objects=objects,
            gpu_memory=gpu,
        )
        self._attach(state, now)

    def _objects_before(self, state: UnitState, now):
        run_id = state.invocation_id or self._last_run()
        verdict = ledger.read_json(os.path.join(self.paths.run(self.unit, run_id), "verdict.json")) if run_id else None
        before = (verdict or {}).get("objects_before")
        return before if isinstance(before, int) else now

    def restore_baseline(self, baseline: Baseline, now: float) -> None:
        """Go on with the baseline of a prover that was killed."""
        self.baseline = baseline
        self._oom_before = self._oom_now = known(baseline.oom_kills, 0)
        if self.objects_source:
            now_there = self.objects_source.count()
            if baseline.objects is None:  # the one before had none yet
                self.baseline = replace(baseline, objects=now_there)
        self._attach(self.state if isinstance(self.state, UnitState) else UnitState(), now)

    def _attach(self, state: UnitState, now: float) -> None:
        """Begin to watch, from the baseline on."""
        self._last_n_restarts = known(self.baseline.n_restarts, 0)
        runs = self.paths.unit_runs(self.unit)
        if os.path.isdir(runs):
            self._folder_keys.append(self.loop.watch(runs, NAMES, self._on_folder))
        if self.baseline.observed:
            self._adopt(state, now)
        elif self.log_path:
            self._open_log(self.log_path)
        self.apply(self.state, self.properties, now)
        self._sample_gpu()

    def _adopt(self, state: UnitState, now: float) -> None:
        """Take the run that is there, or the last one of the ledger, as the run under test."""
        run_id = state.invocation_id or self._last_run()
        if run_id:
            self._begin_run(run_id, state, now)

    def _last_run(self) -> str | None:
        """The newest run of the ledger, None where none is kept or none was yet."""
        run_id = ledger.current_run(self.paths, self.unit)
        return run_id if run_id and ledger.valid_run_id(run_id) else None

    def _declared_log(self) -> str | None:
        """Where the log is, as far as it is known before there is a run."""
        if self.log_path:
            return self.log_path
        path = systemd.declared_output(self.unit, self.properties)
        return None if path and self._in_ledger(path) else path

    def _in_ledger(self, path: str) -> bool:
        return os.path.dirname(path) == self.paths.current(self.unit)

    # ---- runs ----

    def _begin_run(self, run_id: str, state: UnitState, now: float) -> None:
        """Follow a new invocation: a first one, an automatic restart, or an operator's restart."""
        first = self.run_id is None
        automatic = not first and (state.n_restarts > self._last_n_restarts or self._was_waiting)
        if not first:
            self._read_certificate(self.run_id)
            self._settle_logs(now)
            if automatic:
                self.restarts_seen = max(self.restarts_seen + 1, state.n_restarts - known(self.baseline.n_restarts, 0))
                self._dead_log = self._read_log_facts()
            else:
                self.baseline = replace(self.baseline, n_restarts=state.n_restarts)
                self.exits, self.restarts_seen, self._dead_log = [], 0, None
        self.run_id = run_id
        self._was_active, self._dead_pid = False, 0
        self._wrote = self._others = False
        self._asked_at = 0.0
        self._last_n_restarts = state.n_restarts
        self._was_waiting = False
        self.exec_seen = False
        self._place = self._journal = NOT_READ
        self._probed = None
        self._oom_before = (
            self._oom_now if self.groups.oom_kills(state.control_group) == self._oom_now and not first else 0
        )
        if first and self.baseline.observed:
            self._oom_before = known(self.baseline.oom_kills, 0)
        manifest = ledger.read_json(os.path.join(self.paths.run(self.unit, run_id), "manifest.json")) or {}
        started = state.exec_main_started_at if state.invocation_id == run_id else 0.0
        self.run_started_at = (
            float(manifest.get("boottime") or 0.0)
            or (started if started > self.baseline.taken_at else 0.0)
            or started
            or now
        )
        self._open_run_log(run_id, manifest, state)

    def _open_run_log(self, run_id: str, manifest: dict, state: UnitState) -> None:
        """Turn to the log of this run: its own file in the ledger, or the declared one from here on."""
        folder = self.paths.run(self.unit, run_id)
        self._folder_keys.append(self.loop.watch(folder, NAMES, self._on_folder))
        if self.log_path:
            if self.baseline.observed and not self._tails:
                self._open_log(self.log_path)
            elif self._tails and self._dead_log is None:
                pass  # one file for all runs: go on where we are
            elif self._dead_log is not None:
                self._restart_log()
            return
        path = systemd.declared_output(self.unit, self.properties)
        if (path and self._in_ledger(path)) or (path is None and manifest):
            self._close_logs()
            self._open_log(os.path.join(folder, "log"))
        elif path:
            if self._tails:
                self._restart_log()
            else:
                self._open_log(path)
        elif not self._follow_journal(run_id):
            self.spec = self._without_log()

    def _without_log(self):
        """The spec of a unit whose output goes nowhere that can be read: mute where nothing is asked of the log."""
        log = self.spec.log
        if log.required or self.spec.progress or self.spec.done:
            return self.spec
        return replace(self.spec, log=replace(log, fresh=False))

    def _restart_log(self) -> None:
        """Count from here on: the runs share one file, and what is in it up to now is the run before.

        Where the file was emptied or replaced since the new run's start, all of it is the new run's.
        """
        for tail in self._tails:
            tail.read(lambda data, tail=tail: None)
            if tail.emptied_at > self.run_started_at:
                tail.rewind()
            self._scanners[tail] = Scanner(self.spec, self.redact)

    def _logs_at(self, path: str) -> list:
        """The file, or, where the spec declares several, those that are there."""
        return sorted(glob.glob(path)) if self.spec.log.count > 1 else [path]

    def _logs_there(self):
        """{path: (device, inode, size)} of the declared logs that exist, Unknown where that cannot be known."""
        where = self._declared_log()
        try:
            found = {path: logfile.identity(path) for path in (self._logs_at(where) if where else ())}
        except OSError as error:
            return Unknown("%s: %s" % (error.filename, error.strerror))
        return {path: about for path, about in found.items() if about}

    def _open_log(self, path: str) -> None:
        for name in self._logs_at(path):
            self._open_file(name)

    def _open_file(self, path: str) -> None:
        """Follow one log: from where it ended at the baseline, or, of a run that was there before, all of it."""
        observed = self.baseline.observed
        start = None if observed else known(self.baseline.logs, {}).get(path)
        tail = logfile.Tail(path, start, self.loop, self._on_log, skip_middle=observed)
        self._tails.append(tail)
        self._scanners[tail] = Scanner(self.spec, self.redact)
        old = logfile.old_bytes(path, start)
        if old:
            self._old_match = self._old_match or find_old(self.spec, old, ledger.boottime(), self.redact)

    def _follow_journal(self, run_id: str) -> bool:
        """Read the unit's output from the journal where it goes there. Return whether it can be followed."""
        self._close_logs()
        if self.properties.get("StandardOutput") not in ("journal", "journal+console", "inherit", ""):
            return False
        self._log_error = systemd.journal_closed()
        try:
            self._follower = subprocess.Popen(
                (*journal_output(run_id, self._namespace), "--follow"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            return False
        os.set_blocking(self._follower.stdout.fileno(), False)
        scanner = self._scanners["journal"] = Scanner(self.spec, self.redact)

        def read() -> None:
            try:
                data = os.read(self._follower.stdout.fileno(), logfile.PIECE)
            except BlockingIOError:
                return
            if data:
                scanner.feed(data, ledger.boottime())
                scanner.settle(ledger.boottime())
                self.touch()
            else:
                self.loop.remove(self._follower.stdout.fileno())

        self.loop.add(self._follower.stdout.fileno(), read)
        return True

    def _close_logs(self) -> None:
        for tail in self._tails:
            tail.close()
        if self._follower:
            self.loop.remove(self._follower.stdout.fileno())
            self._follower.kill()
            self._follower.wait()
            self._follower.stdout.close()
            self._follower = None
        self._tails, self._scanners, self._log_error = [], {}, ""

    # ---- events ----

    def touch(self) -> None:
        self.dirty = True

    def ask(self) -> None:
        """Look at the unit at once."""
        self.need_show = self.dirty = True

    def _on_log(self) -> None:
        self.dirty = True
        if isinstance(self.state, UnitState) and not self.state.main_pid and not self.exits:
            self.ask()  # somebody opened the log: it may be the main process

    def _on_folder(self, _mask: int, _name: str) -> None:
        self.ask()

    def _on_group(self, _mask: int = 0, _name: str = "") -> None:
        self._read_oom()
        self.dirty = True
        if not self._pidfd and not self._certified(self.run_id):  # else its end is known soon, or already
            self.ask()

    def _on_oom_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._group_fd, 8)
        self._read_oom()
        self.ask()

    def _on_death(self) -> None:
        self._dead_pid = self._pidfd[0]
        self._drop_pidfd()
        self._read_oom()
        if not self._ended_by_itself(self._dead_pid):
            self.ask()

    def _ended_by_itself(self, pid: int) -> bool:
        """Record a main process that ran freely and exited with a failure, as the kernel has it. Return whether it did.

        systemd is busy with what it does at such an end, so its answer takes some ten milliseconds. It alone knows how it had a hand
        in other ends: a stop, whose job it told us of; a limit of time, a watchdog, a step of the start.
        """
        state = self.state
        if (
            not isinstance(state, UnitState)
            or (state.active_state, state.pending_job, state.type == "oneshot") != ("active", "", False)
            or state.main_pid != pid
            or state.watchdog
            or state.runtime_max
            or state.invocation_id != self.run_id
            or self.need_show
        ):
            return False
        status = process.exit_status(pid)
        if not status or status in SETUP_STATUSES or self._certified(self.run_id):
            return False
        now = ledger.boottime()
        self._refresh_processes(now)
        self._end(Exit(now, EXITED, status, self.run_id, pid, result="exit-code", source="pidfd"))
        self.dirty = True
        return True

    def _drop_pidfd(self) -> None:
        if self._pidfd:
            self.loop.remove(self._pidfd[1])
            os.close(self._pidfd[1])
            self._pidfd = None

    def _read_oom(self) -> None:
        if self._group:
            value = known(self.groups.oom_kills(self._group), 0)
            if value:
                self._oom_now = value
                self._count_oom(value - self._oom_before)

    def _count_oom(self, rise: int, run_id: str | None = None) -> None:
        run_id = run_id or self.run_id
        self._oom_rise[run_id] = max(rise, self._oom_rise.get(run_id, 0))
        if rise > 0 and self._oom_at is None:
            self._oom_at = ledger.boottime()

    def apply(self, state, properties: dict, now: float) -> None:
        """Take what systemd says now."""
        self.need_show = False
        self.dirty = True
        self.shown_at = now
        self.state, self.properties = state, properties or self.properties
        if self.baseline is None or not isinstance(state, UnitState):
            return
        refused = state.condition_at > self.baseline.taken_at and not state.condition_result
        if refused or (state.assert_at > self.baseline.taken_at and not state.assert_result):
            self._condition = self._condition or state.failed_condition
        if self._condition:  # an unloaded unit does not know it any more
            self.state = state = replace(state, failed_condition=self._condition)
        waiting = state.sub_state.startswith("auto-restart")
        found = state.invocation_id or self._last_run()
        if found and found != self.run_id and (self.baseline.observed or found != self.baseline.invocation_id):
            self._begin_run(found, state, now)
        self._was_waiting = self._was_waiting or waiting
        self._follow_group(state)
        self._follow_main(state)
        self._note_exit(state)
        self._note_exec(state)
        self._was_active = self._was_active or state.active_state == "active"
        self._refresh_processes(now)
        if state.main_pid and not self._pidfd and not os.path.exists("/proc/%d" % state.main_pid):
            self._dead_pid = state.main_pid  # it died before its pidfd could be had

    def _settled(self) -> bool:
        """Whether nothing is going on that systemd will tell of soon."""
        state = self.state
        if not isinstance(state, UnitState):
            return False
        return state.active_state in STEADY and not state.pending_job and not 0 < state.main_pid == self._dead_pid

    @property
    def queued(self) -> bool:
        """Whether systemd has a start of the unit in its queue."""
        return isinstance(self.state, UnitState) and self.state.pending_job in ("start", "restart")

    def _certified(self, run_id: str) -> bool:
        return any(end.invocation_id == run_id for end in self.exits)

    def _follow_group(self, state: UnitState) -> None:
        group = state.control_group
        if group == self._group or not group:
            self._read_oom()
            return
        for key in self._group_keys:
            self.loop.unwatch(key)
        if self._group_fd is not None:
            self.loop.remove(self._group_fd)
            os.close(self._group_fd)
        self._group = group
        events = self.groups.events_path(group)
        self._group_keys = [
            self.loop.watch(path, IN_MODIFY, self._on_group) for path in (events, self.groups.oom_path(group)) if path
        ]
        self._group_fd = self.groups.oom_event(group)
        if self._group_fd is not None:
            self.loop.add(self._group_fd, self._on_oom_event)
        self._read_oom()

    def _follow_main(self, state: UnitState) -> None:
        if self._pidfd and self._pidfd[0] == state.main_pid:
            return
        self._drop_pidfd()
        if state.main_pid and state.main_pid != self._dead_pid:
            descriptor = process.open_pidfd(state.main_pid)
            if descriptor is not None:
                self._pidfd = (state.main_pid, descriptor)
                self.loop.add(descriptor, self._on_death)
            # A group that a restart has made anew has a new directory under the same name.
            self._group = None
            self._follow_group(state)

    def _note_exit(self, state: UnitState) -> None:
        """Record the end of the run's main process once, from systemd or from the certificate."""
        if not self.run_id or self._certified(self.run_id):
            return
        seen = {(end.pid, end.at) for end in self.exits}
        ended = state.exec_main_code and state.exec_main_exited_at and not state.main_pid
        fresh = self.baseline.observed or state.exec_main_exited_at > self.baseline.taken_at
        if (
            ended
            and fresh
            and (state.exec_main_pid, state.exec_main_exited_at) not in seen
            and state.invocation_id in ("", self.run_id)
        ):
            self._end(
                Exit(
                    at=state.exec_main_exited_at,
                    code=state.exec_main_code,
                    status=state.exec_main_status,
                    invocation_id=self.run_id,
                    pid=state.exec_main_pid,
                    result=state.result,
                    stop_requested=self._stop_requested(state),
                )
            )
        elif not state.main_pid and state.active_state in ("inactive", "failed") and not self._end_of_parent(state):
            self._end_before_exec(state)

    def _stop_requested(self, state: UnitState) -> bool:
        """Whether a stop was asked for. A runner's state forgets it when it has ended, so its certificate says it too."""
        if state.pending_job in ("stop", "restart"):
            return True
        return bool((self._certificate(self.run_id) or {}).get("stop_requested"))

    def _certificate(self, run_id: str) -> dict | None:
        return ledger.read_json(os.path.join(self.paths.run(self.unit, run_id), "exit.json"))

    def _end_of_parent(self, state: UnitState) -> bool:
        """Record how a Type=forking unit's parent ended that left no main process. Return whether it did."""
        if state.type != "forking" or state.exec_main_code or state.invocation_id != self.run_id:
            return False
        code, status = systemd.parent_end(self.properties)
        if code:
            self._end(
                Exit(at=ledger.boottime(), code=code, status=status, invocation_id=self.run_id, result=state.result)
            )
        return bool(code)

    def _end_before_exec(self, state: UnitState) -> None:
        """A run that ended without a main process: a pre-command failed or was killed, or systemd could not fork."""
        status = systemd.failed_command_status(self.properties)
        setup, killed = status in SETUP_STATUSES, systemd.unfinished_command(self.properties)[1]
        if not (setup or killed) and state.invocation_id != self.run_id != self._asked_for:
            # The ledger knew the run before systemd was asked, or systemd has forgotten it: the next answer tells which.
            self._asked_for, self.need_show = self.run_id, True
            return
        if not (setup or killed) and self._read_certificate(self.run_id):
            return
        if state.result == "success" or state.invocation_id != self.run_id:
            return
        # 200 and up say the same of a pre-command as of the main process, unless it is the command that ended so.
        said = self._setup_error(self.run_id, status) if setup else ""
        code = KILLED if killed else 0 if said == "" else EXITED
        self._end(
            Exit(
                at=ledger.boottime(),
                code=code,
                status=killed or status,
                invocation_id=self.run_id,
                result=state.result,
                stop_requested=self.answer.job_result == "canceled" or self._stop_requested(state),
                setup_error=said,
            )
        )

    def _setup_error(self, run_id: str, status: int) -> str | Unknown:
        if self.state.control != "systemctl":
            return Unknown("no systemd runs here")
        found = systemd.setup_error(run_id, status, self.properties)
        return found if isinstance(found, Unknown) else self.redact(found)

    def _ask_whose_status(self, wrote: bool) -> None:
        """Ask the journal whether it was systemd that ended the last run, or the program that exits with the same number.

        That costs an exec, so it is asked only where nothing else tells: a failed setup differs from a program that dies at once, and
        without a word, by nothing but that.
        """
        last = self.exits[-1] if self.exits and isinstance(self.state, UnitState) else None
        if last is None or last.code != EXITED or last.status not in SETUP_STATUSES or last.setup_error != NOT_READ:
            return
        if last.invocation_id == self.run_id and (self.exec_seen or wrote):
            return
        self.exits[-1] = replace(last, setup_error=self._setup_error(last.invocation_id, last.status))

    def _read_certificate(self, run_id: str | None) -> bool:
        """Take the run's death certificate, if there is one. Return whether there is."""
        if run_id is None:
            return False
        certificate = self._certificate(run_id)
        if certificate is None:
            return False
        if certificate.get("oom_kill"):
            self._count_oom(certificate["oom_kill"] - self._oom_before, run_id)
        if not self._certified(run_id):
            end = certificate_exit(certificate, run_id)
            if end.code or end.result not in ("", "success"):
                self._end(end)
        return True

    def _end(self, end: Exit) -> None:
        if end.code == KILLED or end.code == DUMPED or (end.code == EXITED and end.status not in SETUP_STATUSES):
            self.exec_seen = True
        self.exits.append(end)
        # The counter goes with the group, and the certificate is written before that: one of them is there.
        self._read_oom()
        self._read_certificate(end.invocation_id or None)
        if self.gpu_source:  # what a worker that outlives the main process still holds
            self._refresh_processes(end.at)
            self._sample_gpu()

    def _note_exec(self, state: UnitState) -> None:
        if self.exec_seen or not state.main_pid:
            return
        if state.active_state == "active" and state.type not in ("simple", "forking", ""):
            self.exec_seen = True
            return
        with contextlib.suppress(OSError):
            self.exec_seen = not os.readlink("/proc/%d/exe" % state.main_pid).endswith(BEFORE_EXEC)

    # ---- samples ----

    def _log_inode(self) -> tuple | None:
        return self._tails[0].inode if self._tails else None

    def _read_processes(self, pids, main_pid: int, detailed: bool) -> tuple:
        found = (process.process(pid, main_pid, self._log_inode(), detailed, self.redact) for pid in pids)
        return tuple(item for item in found if item is not None)

    def _refresh_processes(self, now: float) -> None:
        state = self.state
        if not isinstance(state, UnitState):
            return
        pids = self.groups.pids(state.control_group)
        if isinstance(pids, Unknown):
            self._processes = pids
            return
        control = self.properties.get("ControlPID", 0)  # ExecStartPre=, ExecStopPost= …: not the job's
        pids = tuple(pid for pid in pids if pid != control)
        if state.main_pid and state.main_pid not in pids:
            pids += (state.main_pid,)  # systemd-run --scope as the command moves it out of the group, rightly
        self._processes = self._read_processes(pids, state.main_pid, detailed=True)
        workers = [item for item in self._processes if item.alive]
        if workers and all(item.state == "D" for item in workers):
            self._uninterruptible_since = self._uninterruptible_since or now
        else:
            self._uninterruptible_since = None

    def tick(self, now: float) -> None:
        """Sample what sends no events, and see to it that no event was missed."""
        self.need_show = self.need_show or not self._settled()
        self._refresh_processes(now)
        self._read_oom()
        if isinstance(self._processes, tuple):
            cpu = io = 0
            for item in self._processes:
                fields = process.read_stat(item.pid)
                cpu += fields["cpu"] if fields else 0
                amount = process.read_io(item.pid)
                io = amount if isinstance(amount, Unknown) else io if isinstance(io, Unknown) else io + amount
            self._samples.append((now, cpu, io))
            while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW:
                self._samples.popleft()
        self._sample_gpu()
        for scanner in self._scanners.values():
            scanner.settle(now)
        self.dirty = True

    def _sample_gpu(self) -> None:
        if self.gpu_source:
            seen = self._processes if isinstance(self._processes, tuple) else ()
            self.gpu_source.sample(seen, tuple(filter(self._is_older, seen)))

    def _activity(self):
        if len(self._samples) < 2:
            return NOT_READ
        (then, cpu0, io0), (now, cpu1, io1) = self._samples[0], self._samples[-1]
        io = io1 if isinstance(io1, Unknown) else io0 if isinstance(io0, Unknown) else max(io1 - io0, 0)
        return Activity(window=now - then, cpu=max(cpu1 - cpu0, 0.0), io=io)

    def read_logs(self, now: float) -> bool:
        """Read what is new. Return True when a log has more than its turn allows."""
        more = False
        if self.spec.log.count > 1 and self.log_path:
            have = {tail.path for tail in self._tails}
            for name in self._logs_at(self.log_path):
                if name not in have:
                    self._open_file(name)
        for tail in self._tails:
            if tail.unchanged:
                self._follow_overwriting(tail)
            more = tail.read(lambda data, tail=tail: self._feed(tail, data, now)) or more
        return more

    def _follow_overwriting(self, tail) -> None:
        """Find this run's bytes where StandardOutput=file:, or the program itself, writes over the old ones."""
        own = [item.pid for item in known(self._processes, ()) if item.alive and not self._is_older(item)]
        place = max((process.place(pid, tail.inode) for pid in own), default=0)
        if place:
            tail.overwritten(place)

    def _feed(self, tail, data: bytes, now: float) -> None:
        """Scan bytes of a log. What was there before we came is dated by its place between the run's start and its last write.

        Else a job that has hung for an hour would seem to have advanced just now.
        """
        scanner, end = self._scanners[tail], tail.position
        start = end - len(data)
        if start >= tail.past or self.run_started_at is None:
            scanner.feed(data, now)
            return
        span = max(tail.past_written_at - self.run_started_at, 0.0)
        for offset in range(0, len(data), DATED):
            piece = data[offset : offset + DATED]
            part = min((start + offset + len(piece)) / tail.past, 1.0)
            scanner.feed(piece, min(self.run_started_at + span * part, now))

    def _settle_logs(self, now: float) -> None:
        """Read all that is left of the logs of a run that has ended."""
        while self.read_logs(now):
            pass
        if "journal" in self._scanners and self._journal_run != self.run_id:
            self._journal_run = self.run_id
            self._scanners["journal"] = self._whole_journal(now)
        for scanner in self._scanners.values():
            scanner.settle(now, ended=True)

    @property
    def _namespace(self) -> str:
        return self.properties.get("LogNamespace", "")

    def _whole_journal(self, now: float) -> Scanner:
        """All output of the run that has ended: its last lines may still be on their way when its death is known."""
        scanner = Scanner(self.spec, self.redact)
        systemd.journalctl(*systemd.in_namespace(self._namespace), "--sync")
        with contextlib.suppress(OSError):
            quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with subprocess.Popen(
                journal_output(self.run_id, self._namespace), stdout=subprocess.PIPE, **quiet
            ) as child:
                for data in iter(functools.partial(child.stdout.read, logfile.PIECE), b""):
                    scanner.feed(data, now)
        return scanner

    def _read_log_facts(self):
        """The Log of the current run, several files put together where the spec declares several."""
        if self._log_error:
            return Unknown(self._log_error)
        if "journal" in self._scanners:
            return self._scanners["journal"].log("journal", exists=True)
        if not self._tails:
            if self.spec.log.count > 1 and self.log_path:
                return merge_logs(self.log_path, [])
            path = self._declared_log() or (os.path.join(self.paths.current(self.unit), "log"))
            if self.run_id is None or not self.spec.log.fresh:
                return Log(path=path, exists=False, required=dict.fromkeys(self.spec.log.required))
            return Unknown(
                "the unit's output goes to %s, which cannot be followed"
                % (self.properties.get("StandardOutput") or "nowhere")
            )
        closed = [tail.error for tail in self._tails if tail.error]
        if closed:
            return Unknown(closed[0])
        logs = [
            self._scanners[tail].log(
                tail.path,
                exists=tail.exists,
                kind=tail.kind,
                size=tail.size,
                changed=tail.change,
                old_match=self._old_match,
            )
            for tail in self._tails
        ]
        if self.spec.log.count == 1:
            return logs[0]
        return merge_logs(self.log_path, logs)

    def _log_facts(self):
        log = self._read_log_facts()
        if isinstance(log, Log) and log.new_bytes and (self._foreign(ledger.boottime()) or self._by_pre_commands(log)):
            return Log(path=log.path, size=log.size, required=dict.fromkeys(log.required), tail=log.tail)
        return log

    def _foreign(self, now: float) -> bool:
        """Whether the bytes in a log that several may write are somebody else's.

        They are when another process has it open for writing and no process of this run ever wrote through its own
        descriptor. A program that opens, writes and closes holds nothing, and gets the benefit of the doubt.
        """
        inode = self._log_inode()
        if (
            self._wrote
            or inode is None
            or self.spec.log.count > 1
            or self._own_folder()
            or isinstance(self._processes, Unknown)
        ):
            return False
        own = tuple(item.pid for item in self._processes if item.alive and not self._is_older(item))
        if not own:
            return False
        if any(process.has_written(pid, inode) for pid in own):
            self._wrote = True
        elif now - self._asked_at >= FOREIGN_EVERY:
            self._asked_at = now
            self._others = bool(process.other_writers(inode, own))
        return self._others and not self._wrote

    def _by_pre_commands(self, log: Log) -> bool:
        """Whether all that came was written by ExecStartPre= commands: nothing since the main process began, nothing by it."""
        commands = self.properties.get("ExecStartPre") or () if isinstance(self.state, UnitState) else ()
        if self._wrote or not any("begin-run" not in command[1] for command in commands):
            return False
        began, inode = self.state.exec_main_started_at, self._log_inode()
        if not began or inode is None or log.written_at is None or log.written_at > began + PRE_GRACE:
            return False
        own = [item.pid for item in known(self._processes, ()) if item.alive and not self._is_older(item)]
        self._wrote = any(process.has_written(pid, inode) for pid in own)
        return not self._wrote and any(process.holds(pid, inode) for pid in own)

    def _is_older(self, item) -> bool:
        """Whether a process was there before the start: KillMode=process leaves them in the group."""
        old = () if self.baseline.observed else known(self.baseline.processes, ())
        return any((item.pid, item.started_at) == (other.pid, other.started_at) for other in old)

    def _own_folder(self) -> bool:
        return self.run_id is not None and self._tails[0].path == os.path.join(
            self.paths.run(self.unit, self.run_id), "log"
        )

    def facts(self, now: float) -> Facts:
        """One look at the unit."""
        if self._certified(self.run_id):
            self._settle_logs(now)
        log = self._log_facts()
        self.last_log = log if isinstance(log, Log) else None
        wrote = isinstance(log, Log) and log.new_bytes
        if wrote and not self.exits:
            self.exec_seen = self.exec_seen or bool(isinstance(self.state, UnitState) and self.state.main_pid)
        self._ask_whose_status(bool(wrote))
        if isinstance(log, Log) and log.path != "journal" and self._worth_probing(log, now):
            self._place = logfile.probe_place(log.path, self.properties.get("User") or self.user or "root")
        if self._journal is NOT_READ and self._worth_journal():
            found = systemd.journal(self.unit, self.run_id or "")
            self._journal = found if isinstance(found, Unknown) else tuple(map(self.redact, found))
        if self.objects_source and self.baseline.objects == NOT_READ and self.objects_source.good is not None:
            # What came before this answer is not counted: that errs on the strict side.
            self.baseline = replace(self.baseline, objects=self.objects_source.good)
        base = self.baseline
        strays = self._processes
        if isinstance(strays, tuple):
            strays = tuple(filter(self._is_older, strays))
        return Facts(
            unit=self.unit,
            at=now,
            systemd=self.state,
            start=self.answer,
            run_id=self.run_id,
            run_started_at=self.run_started_at,
            exec_seen=self.exec_seen,
            exits=tuple(self.exits),
            restarts_seen=self.restarts_seen,
            processes=self._processes,
            strays=strays,
            uninterruptible_since=self._uninterruptible_since,
            activity=self._activity(),
            log=log,
            log_before=self._dead_log,
            log_place=self._place,
            oom_kills=known(base.oom_kills, 0) + sum(self._oom_rise.values()),
            oom_at=self._oom_at,
            was_active=self._was_active,
            instances_declared=self.declared,
            instances_found=self.instances_found,
            gpu=self.gpu_source.facts(known(base.gpu_memory, {}) or {}) if self.gpu_source else None,
            objects=self.objects_source.facts() if self.objects_source else None,
            heartbeat=self._heartbeat(),
            journal=self._journal,
            wrong_processes=self.wrong_processes,
            unexpanded=self.unexpanded,
            command=tuple(map(self.redact, systemd.command(self.properties))),
            user=self.properties.get("User") or self.user,
            working_directory=self.properties.get("WorkingDirectory", "").lstrip("!-"),
            host=self.host,
            **self._errors(log),
        )

    def _errors(self, log) -> dict:
        """Where else to look, of a run that failed without a byte in its log: fields of Facts."""
        last = self.exits[-1] if self.exits else None
        if last is None or last.code != EXITED or not last.status or not isinstance(log, Log) or log.new_bytes:
            return {}
        name = "StandardOutput" if self.properties.get("StandardError") == "inherit" else "StandardError"
        kind = self.properties.get(name, "")
        path = "/dev/null" if kind == "null" else systemd.declared_output(self.unit, self.properties, name)
        own_tmp = log.path.startswith(("/tmp/", "/var/tmp/")) and bool(self.properties.get("PrivateTmp"))
        if path and not self._in_ledger(path) and path != log.path:
            lines = logfile.last_lines(path, self.run_started_at or self.baseline.taken_at)
            return {"errors_at": path, "errors_tail": tuple(map(self.redact, lines)), "own_tmp": own_tmp}
        if kind.startswith("journal") and log.path != "journal":
            # Its lines are not quoted: the exec would cost more than they decide.
            words = (
                *systemd.in_namespace(self._namespace),
                "_SYSTEMD_INVOCATION_ID=" + (last.invocation_id or self.run_id),
            )
            return {"errors_at": "the journal (journalctl %s)" % " ".join(words), "own_tmp": own_tmp}
        return {"own_tmp": own_tmp and path != log.path}

    def _worth_probing(self, log: Log, now: float) -> bool:
        """Whether it is time to try to write beside the log: once in each silence, and at an end that may be due to that."""
        if self.run_started_at is None:
            return False
        ended = self._certified(self.run_id) or bool(self.exits and self.exits[-1].status == 209)
        silence = now - (log.written_at or self.run_started_at)
        # The trial forks and writes, and a verdict on a death is in a hurry: where bytes came there must be a sign of it.
        worth = (not log.new_bytes or logfile.looks_full(log.path)) if ended else silence > QUIET
        this = (log.new_bytes, ended, int(silence / QUIET_AGAIN))
        if not worth or this == self._probed:
            return False
        self._probed = this
        return True

    def _worth_journal(self) -> bool:
        """Only where systemd's properties do not say why: the exec costs more than a verdict may take."""
        state = self.state
        if not isinstance(state, UnitState) or self.baseline.observed:
            return False
        return (
            bool(self.exits)
            and self.exits[-1].code == 0
            or self.answer.job_result in ("failed", "dependency")
            and not self.exits
        )

    def _heartbeat(self):
        if not self.spec.heartbeat:
            return None
        path = self.spec.heartbeat.path
        try:
            written = os.stat(path).st_mtime_ns
        except FileNotFoundError:
            return Heartbeat(path)
        except OSError as error:
            return Unknown("%s: %s" % (path, error.strerror))
        now = ledger.boottime()
        if written != self._beat[0]:
            # Of the first one only the wall clock tells the age; those that come while we look are new, whatever that does.
            age = max(time.time() - written / 1e9, 0.0) if self._beat[0] is None else 0.0
            self._beat = (written, now - age)
        age = now - self._beat[1]
        began = self.run_started_at or self.baseline.taken_at
        if age > now - began + 1.0:
            return Heartbeat(path)  # written by the run before
        telemetry = telemetry_of(path)
        return Heartbeat(path, age, telemetry and self.redact(telemetry))

    def decide(self, now: float):
        """Ask for the verdict, keep it or what is waited for, and return it."""
        self.seen = self.facts(now)
        answer = decide(self.baseline, self.seen, self.spec, now)
        if isinstance(answer, Verdict):
            self.verdict, self.wait = answer, None
        else:
            self.verdict, self.wait = None, answer
        self.dirty = False
        return answer

    def close(self) -> None:
        self._close_logs()
        self._drop_pidfd()
        if self._group_fd is not None:
            self.loop.remove(self._group_fd)
            os.close(self._group_fd)
            self._group_fd = None
        for key in self._folder_keys + self._group_keys:
            self.loop.unwatch(key)
        for source in (self.objects_source, self.gpu_source):
            if source:
                source.close()


def merge_logs(path: str, logs: list) -> Log:
    """One Log of several files: found anywhere is found, and the youngest progress is the job's."""
    if not logs:
        return Log(path=path, exists=False)
    newest = max(logs, key=lambda log: log.written_at or 0.0)
    progress = [log.progress for log in logs if log.progress]
    return replace(
        newest,
        path=path,
        size=sum(log.size for log in logs),
        new_bytes=sum(log.new_bytes for log in logs),
        required={
            pattern: next((log.required[pattern] for log in logs if log.required.get(pattern)), None)
            for pattern in newest.required
        },
        forbidden=tuple(match for log in logs for match in log.forbidden),
        done=next((log.done for log in logs if log.done), None),
        progress=max(progress, key=lambda item: item.changed_at) if progress else None,
        files=tuple(log.path for log in logs if log.exists),
    )
