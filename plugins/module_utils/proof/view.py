# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What several rows of the table derive from the same baseline, facts and spec."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import (
    DUMPED,
    EXITED,
    KILLED,
    NO_UNIT,
    Baseline,
    Exit,
    Facts,
    Log,
    Match,
    Process,
    Progress,
    UnitState,
    Unknown,
    known,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import LEVELS, Spec

# From when on a row speaks that needs to wait for nothing.
NOW = float("-inf")
# An automatic restart that comes this soon, s, is waited for, so that a crash loop is named and not its first round; and
# how much longer than RestartSec= it may take, s, on a machine that is busy (ExecStopPost= runs before it).
RESTART_SOON = 5.0
RESTART_GRACE = 30.0
# A stop that was asked for may be the first half of a restart, s.
STOP_GRACE = 3.0
# An end that looks like a stop gets this long, s, to show the job that asked for it.
TERM_GRACE = 0.5
# Lines after an exception's last line that still leave it at the end of the log: what wrappers and atexit handlers
# print.
WRAPPER_LINES = 5
# The same where the exit status says failure too: launchers of many ranks print a summary.
SUMMARY_LINES = 200
# Bytes read and written in a window that are more than the start of a program takes.
BUSY_IO = 1024 * 1024


class View:
    """What several rows derive from the same baseline, facts and spec. Sees no clock."""

    def __init__(self, baseline: Baseline, facts: Facts, spec: Spec, dead: bool = False) -> None:
        """``dead``: look at the last death, whatever runs since; for the cause of a crash loop."""
        self.baseline, self.facts, self.spec, self._dead = baseline, facts, spec, dead
        self.unit = facts.unit
        self.systemd: UnitState | None = known(facts.systemd)
        self.state = self.systemd or UnitState(active_state="unknown", sub_state="unknown")
        self.log: Log | None = known(facts.log)
        # The death is the run before's, or what the dead run wrote was lost to the next start before it was read.
        another = bool(facts.exits) and facts.exits[-1].invocation_id not in ("", facts.run_id)
        if dead and (another or not (self.log and self.log.new_bytes)):
            self.log = known(facts.log_before) or self.log
        self.path = self.log.path if self.log else (spec.log.path or f"the log of {self.unit}")
        self.processes: tuple[Process, ...] | None = known(facts.processes)

    def by_hand(self, verb: str) -> str:
        """What a person types to start or stop the unit."""
        if self.unit == NO_UNIT:
            return "its unit or its pid" if verb == "stop" else "it again"
        if self.state.control:
            return f"{self.state.control} {verb} {self.unit}"
        name = self.unit.rpartition(".")[0]
        return "SIGTERM to its runner" if verb == "stop" else f"launchproof run --name {name}"

    # --- the run and its end

    @cached_property
    def new_run(self) -> bool:
        """Whether there is a run under test."""
        return self.facts.run_id is not None and (
            self.baseline.observed or self.facts.run_id != known(self.baseline.invocation_id, "")
        )

    @cached_property
    def began(self) -> float:
        """When the deadlines began, CLOCK_BOOTTIME s."""
        if self.new_run and self.facts.run_started_at is not None:
            return self.facts.run_started_at
        return self.baseline.taken_at

    @cached_property
    def exit(self) -> Exit | None:
        """The end of the run under test: None while its main process lives, or when nobody saw how it ended."""
        if not self.new_run:
            return None
        own = [item for item in self.facts.exits if item.invocation_id in ("", self.facts.run_id)]
        if self._dead:
            return self.facts.exits[-1] if self.facts.exits else self._systemd_exit
        if self.main_alive:
            return None
        return own[-1] if own else self._systemd_exit

    @cached_property
    def _systemd_exit(self) -> Exit | None:
        state = self.systemd
        if state is None or state.exec_main_code == 0 or (state.main_pid and not self._dead):
            return None
        if state.invocation_id not in ("", self.facts.run_id):
            return None
        # ExecMain* still speak of the run before until this one has spawned its main process.
        if not self.baseline.observed and 0 < state.exec_main_started_at < self.baseline.taken_at:
            return None
        at = state.exec_main_exited_at or self.facts.at
        return Exit(
            at, state.exec_main_code, state.exec_main_status, state.invocation_id, state.exec_main_pid, state.result
        )

    @cached_property
    def main_alive(self) -> bool:
        """Whether the main process runs, as far as systemd and /proc say."""
        if self.state.main_pid == 0:
            # A forking server whose main process systemd could not guess.
            return self.state.active_state == "active" and self.state.sub_state == "running" and self.live_count > 0
        if self.processes is None:
            return True
        if self.stranger is not None:
            return any(process.alive for process in self.processes if process.started_at >= self.baseline.taken_at)
        # /proc is read more often than systemd is asked: one that is gone there has ended, though nobody knows how yet.
        return any(process.alive for process in self.processes if process.pid == self.state.main_pid)

    @cached_property
    def stranger(self) -> Process | None:
        """What systemd takes for the main process, where it is older than the run: it follows a PIDFile= that nobody removed."""
        if not self.state.pid_file or self.baseline.observed:
            return None
        mains = [process for process in self.processes or () if process.pid == self.state.main_pid]
        return next((process for process in mains if process.started_at < self.baseline.taken_at), None)

    @cached_property
    def alive(self) -> bool:
        """Whether the run goes on: a row that judges a living job holds only then."""
        return self.new_run and self.exit is None and not self._dead and (self.main_alive or self.starting)

    @cached_property
    def starting(self) -> bool:
        """Whether the unit is on its way up with no main process yet (ExecStartPre, a forking server)."""
        return self.state.active_state in ("activating", "reloading") and not self.auto_restart

    @cached_property
    def auto_restart(self) -> bool:
        """Whether systemd is about to start it again by itself."""
        return self.state.sub_state.startswith("auto-restart")

    @cached_property
    def active(self) -> bool:
        """Whether success may be told: never while activating, except for a oneshot."""
        state = self.state.active_state
        return state in ("active", "reloading") or (
            state == "activating" and self.state.type == "oneshot" and not self.auto_restart
        )

    @cached_property
    def vanished(self) -> bool:
        """Whether the run is over and nobody saw how."""
        return (
            self.new_run and self.exit is None and not self.alive and self.state.active_state in ("inactive", "failed")
        )

    @cached_property
    def result(self) -> str:
        """Service result of the death looked at: Result= resets at every start."""
        return (self.exit.result if self.exit else "") or self.state.result

    @cached_property
    def restarts(self) -> int:
        """Automatic restarts since the baseline."""
        rise = self.state.n_restarts - known(self.baseline.n_restarts, 0) if self.systemd else 0
        return max(rise, self.facts.restarts_seen, 0)

    @cached_property
    def looping(self) -> bool:
        """Whether it died at least twice.

        systemd counts a restart while the unit still waits for it: one restart that is counted is one death, not two.
        """
        again = len(self.facts.exits) >= 2 or self.state.active_state in ("failed", "inactive")
        return self.restarts >= 2 or (self.restarts == 1 and self.exit is not None and again)

    @cached_property
    def death(self) -> float:
        """From when on the end of the run may be told, CLOCK_BOOTTIME s."""
        if self.exit is None:
            return NOW
        if self.looping or self._dead:
            return self.exit.at
        failed = self.exit.code != EXITED or self.exit.status != 0
        will_restart = (
            self.auto_restart
            or (self.state.active_state == "activating" and self.restarts > 0)  # its next round is in ExecStartPre=
            or (
                # systemd may not have seen the end yet, or not have been asked since the start
                self.state.active_state in ("activating", "active", "deactivating")
                and (self.state.restart == "always" or (failed and self.state.restart not in ("no", "on-success")))
            )
        )
        if will_restart and self.state.restart_sec <= RESTART_SOON:
            return self.exit.at + self.state.restart_sec + RESTART_GRACE
        # Its start is in systemd's queue, or its stop is not over yet: on a busy machine that takes as long as it takes.
        if self.state.pending_job in ("restart", "start"):
            return self.exit.at + RESTART_GRACE
        if self.exit.stop_requested:
            return self.exit.at + (RESTART_GRACE if self.state.active_state == "deactivating" else STOP_GRACE)
        return self.exit.at + (TERM_GRACE if self._like_a_stop else 0.0)

    @property
    def _like_a_stop(self) -> bool:
        if self.exit.code == KILLED:
            return self.exit.status in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM) and self.result == "success"
        return self.exit.code == EXITED and (self.exit.status == 128 + signal.SIGTERM or (self.zero and not self.done))

    @cached_property
    def signal(self) -> int:
        """Number of the signal that ended it, also one that a shell reports as 128 + n; 0 for none."""
        if self.exit is None:
            return 0
        if self.exit.code in (KILLED, DUMPED):
            return self.exit.status
        if self.exit.code == EXITED and 128 < self.exit.status < 255:
            return self.exit.status - 128 if signal_name(self.exit.status - 128) else 0
        return 0

    @cached_property
    def zero(self) -> bool:
        """Whether it exited with status 0."""
        return self.exit is not None and self.exit.code == EXITED and self.exit.status == 0

    @cached_property
    def nonzero(self) -> bool:
        """Whether it exited with another status."""
        return self.exit is not None and self.exit.code == EXITED and self.exit.status != 0

    # --- the log

    @cached_property
    def bytes(self) -> int:
        """Bytes this run wrote to its log."""
        return self.log.new_bytes if self.log else 0

    @cached_property
    def mute(self) -> bool:
        """Whether the log was read and this run wrote nothing although it must."""
        return self.spec.log.fresh and self.log is not None and self.bytes == 0

    @cached_property
    def lost(self) -> bool:
        """Whether the job goes on writing into the declared log after that was deleted: nobody will ever read it."""
        if self.log is None or self.log.changed != "deleted":
            return False
        gone = f"{self.log.path} (deleted)"
        return any(gone in (known(process.outputs) or ()) for process in self.processes or () if process.alive)

    @cached_property
    def progress(self) -> Progress | None:
        """Progress of this run, None before the first value."""
        return self.log.progress if self.log else None

    @cached_property
    def open_forbidden(self) -> list[Match]:
        """Forbidden lines that the job has not survived by going on afterwards, oldest first."""
        matches = self.log.forbidden if self.log else ()
        return [match for match in matches if not self._survived(match)]

    def _survived(self, match: Match) -> bool:
        if self.progress is not None and self.progress.offset > match.offset:
            return True
        if match.kind != "traceback":
            return False
        if self.spec.progress is not None:
            # Progress is the sign of life. Only of a job that says that its work is complete other lines are one too: it
            # may well log an exception that it handles after its last step.
            return self.zero and self.done and match.lines_after > WRAPPER_LINES
        return match.lines_after > (SUMMARY_LINES if self.nonzero or self.signal else WRAPPER_LINES)

    @cached_property
    def unmatched(self) -> list[str]:
        """Required patterns that no line of this run matched."""
        found = self.log.required if self.log else {}
        return [pattern for pattern in self.spec.log.required if found.get(pattern) is None]

    @cached_property
    def done(self) -> bool:
        """Whether the done line is there."""
        return bool(self.spec.done and self.log and self.log.done)

    @cached_property
    def oom_rise(self) -> int:
        """Kills for memory in the unit's groups since the baseline."""
        before, after = known(self.baseline.oom_kills), known(self.facts.oom_kills)
        return max(0, after - before) if before is not None and after is not None else 0

    @cached_property
    def oom_survived(self) -> bool:
        """Whether progress came after the last kill for memory: its victim was not the job."""
        seen = self.facts.oom_at if self.facts.oom_at is not None else self.facts.at
        return self.progress is not None and self.progress.changed_at > seen

    # --- deadlines, CLOCK_BOOTTIME s

    @cached_property
    def start_deadline(self) -> float:
        return self.began + self.spec.deadlines.start

    @property
    def queued(self) -> bool:
        """Whether systemd itself has the start in its queue: a busy manager, or a unit that has to come first."""
        return not self.new_run and self.state.pending_job in ("start", "restart")

    @property
    def launch_deadline(self) -> float:
        """When a new run is due. A start that is queued will come, unless the time is up first."""
        return self.total_deadline if self.queued else self.start_deadline

    @cached_property
    def first_log_deadline(self) -> float:
        return self.began + self.spec.deadlines.first_log

    @cached_property
    def first_progress_deadline(self) -> float:
        return self.began + self.spec.deadlines.first_progress

    @cached_property
    def stall_after(self) -> float:
        """Seconds without a change after which progress counts as stalled."""
        spec = self.spec.progress
        if spec is None:
            return float("inf")
        if self.progress is None or self.progress.changes == 0:
            return spec.within
        if spec.stall_after is not None:
            return spec.stall_after
        return max(spec.within, spec.stall_factor * (self.progress.median_gap or 0.0))

    @cached_property
    def pace_deadline(self) -> float:
        """When the next sign of progress is due: the first value, then each change."""
        if self.progress is None:
            return self.first_progress_deadline
        return self.progress.changed_at + self.stall_after

    @cached_property
    def total_deadline(self) -> float:
        """When the time is up. A declared total counts from the start's order, one that follows from other deadlines from the run's start as those do."""
        declared = self.spec.deadlines.total is not None
        return (self.baseline.taken_at if declared else self.began) + self.spec.total

    @cached_property
    def stable_at(self) -> float:
        """When the main process will have lived for stable_for."""
        mains = [
            process.started_at for process in self.processes or () if process.main or process.pid == self.state.main_pid
        ]
        if self.stranger is not None:
            mains = [min((p.started_at for p in self.processes if p.alive and p is not self.stranger), default=0.0)]
        return max([self.began, *mains]) + self.spec.process.stable_for

    # --- what a success needs

    @cached_property
    def missing(self) -> list[tuple[str, str]]:
        """(stage, what is missing in words) of every requirement that is open; time is not one of them."""
        return list(self._missing())

    def _missing(self) -> Iterator[tuple[str, str]]:
        if not self.new_run:
            queued = f"; its {self.state.pending_job} job is in systemd's queue" if self.queued else ""
            yield "starting", f"{self.unit} has not been started anew{queued}"
            return
        if self.exit is not None:
            yield "ended", f"the main process ended ({how(self.exit)})"
        elif not self.main_alive and not self.vanished:
            yield "starting", f"{self.unit} has no main process yet ({self.state.active_state}/{self.state.sub_state})"
        elif self.vanished:
            yield "ended", "the run is over, and nobody saw how it ended"
        elif not self.active:
            yield "starting", f"{self.unit} is still {self.state.active_state} ({self.state.sub_state})"
        count = self.spec.process.count
        if count > 1 and self.live_count < count:
            yield "stable", f"{self.live_count} of {count} processes live"
        if len(self.facts.instances_found) < len(self.facts.instances_declared):
            yield (
                "stable",
                f"{len(self.facts.instances_found)} of {len(self.facts.instances_declared)} instances are there",
            )
        if self.oom_rise and not self.oom_survived:
            yield "stable", "a process was killed for memory, and no progress came after it"
        yield from self._missing_in_log()
        if self.gpu_missing:
            yield "gpu", f"GPU level is {self.gpu_level}, {self.spec.gpu.level} is needed"
        if self.spec.progress and self.progress is None:
            yield "first_progress", f"no progress value{self.of_ranks} in {self.path} yet"
        elif self.spec.progress and self.progress.changes == 0:
            yield "progress", f"progress{self.of_ranks} is at {self.progress.last} and has not advanced yet"
        if self.objects_missing:
            yield "objects", f"{self.new_objects} of {self.spec.objects.min_new} new objects at {self.spec.objects.uri}"
        if self.heartbeat_missing:
            yield (
                "heartbeat",
                f"no heartbeat younger than {self.spec.heartbeat.max_age:g} s at {self.spec.heartbeat.path}",
            )

    def _missing_in_log(self) -> Iterator[tuple[str, str]]:
        if self.spec.log.fresh and self.bytes == 0:
            yield "first_log", f"nothing written to {self.path} yet"
        if self.spec.log.count > 1 and len(self.log.files if self.log else ()) != self.spec.log.count:
            yield "first_log", f"{len(self.log.files if self.log else ())} of {self.spec.log.count} logs at {self.path}"
        if self.lost:
            yield "first_log", f"{self.path} was deleted, and the job writes on into the deleted file"
        for pattern in self.unmatched:
            yield "required", f"no line in {self.path} matches {pattern!r} yet"
        for match in self.open_forbidden:
            yield "required", f"{match.line!r} in {self.path}, and no progress after it"

    @cached_property
    def live_count(self) -> int:
        return sum(process.alive for process in self.processes or ())

    @property
    def gpu_level(self) -> str:
        gpu = known(self.facts.gpu)
        return gpu.level if gpu else "none"

    @cached_property
    def gpu_missing(self) -> bool:
        """Whether the GPU proof is open. A job that declares no GPU (facts.gpu None) needs none."""
        if self.spec.gpu is None or self.facts.gpu is None:
            return False
        gpu = known(self.facts.gpu)
        if gpu is None or gpu.level not in LEVELS or gpu.reason:
            return True
        if LEVELS.index(gpu.level) < LEVELS.index(self.spec.gpu.level):
            return True
        return any(gpu.memory.get(uuid, 0) < self.spec.gpu.memory_floor for uuid in gpu.declared)

    @cached_property
    def new_objects(self) -> int:
        """Objects more than at the baseline; none where either number is not known: old ones would count as new."""
        objects, before = known(self.facts.objects), self.baseline.objects
        if objects is None or isinstance(before, Unknown):
            return 0
        return max(0, objects.count - (before or 0))

    @cached_property
    def objects_deadline(self) -> float:
        """When objects are due, CLOCK_BOOTTIME s.

        Their time begins with the work: loading may take as long as the first progress may. Of an older run nobody knows
        what was there before it, so they count from now on.
        """
        began = max(self.began, self.baseline.taken_at) if self.baseline.observed else self.began
        if self.progress is not None:
            began = max(began, self.progress.first_at)
        return began + self.spec.objects.within if self.spec.objects else float("inf")

    @property
    def objects_missing(self) -> bool:
        return self.spec.objects is not None and self.new_objects < self.spec.objects.min_new

    @cached_property
    def heartbeat_missing(self) -> bool:
        if self.spec.heartbeat is None:
            return False
        beat = known(self.facts.heartbeat)
        return beat is None or beat.age is None or beat.age > self.spec.heartbeat.max_age

    # --- evidence

    def unit_evidence(self) -> dict[str, Any]:
        return {
            "active_state": self.state.active_state,
            "sub_state": self.state.sub_state,
            "result": self.result,
            "load_state": self.state.load_state,
        }

    def exit_evidence(self) -> dict[str, Any]:
        if self.exit is None:
            return {}
        data: dict[str, Any] = {
            "exit": {
                "how": how(self.exit),
                "code": {EXITED: "exited", KILLED: "killed", DUMPED: "dumped"}.get(self.exit.code, "unknown"),
                "status": self.exit.status,
                "pid": self.exit.pid,
                "source": self.exit.source,
            },
            "result": self.result,
        }
        # When a run before this one began is not known any more.
        if self.exit.invocation_id in ("", self.facts.run_id):
            data["exit"]["lived_s"] = round(max(0.0, self.exit.at - self.began), 3)
        if self.signal:
            data["exit"]["signal"] = signal_name(self.signal)
        return data

    def log_evidence(self, lines: int = 5) -> dict[str, Any]:
        if self.log is None:
            return {"log": {"path": self.path, "unknown": self.facts.log.why}}
        exists = self.log.exists or bool(self.log.kind)
        data: dict[str, Any] = {"path": self.log.path, "exists": exists, "new_bytes": self.log.new_bytes}
        if self.log.kind:
            data["kind"] = self.log.kind
        if self.log.changed:
            data["changed"] = self.log.changed
        if lines and self.log.tail:
            data["tail"] = list(self.log.tail[-lines:])
        return {"log": data}

    @property
    def of_ranks(self) -> str:
        """Words for the ranks that are behind, where the log is of several: " of rank 1"."""
        if self.progress is not None and self.progress.rank is not None:
            return f" of rank {self.progress.rank}"
        if self.spec.progress is None or self.progress is not None or not self.log or not self.log.ranks:
            return ""
        missing = self.spec.progress.ranks - len(self.log.ranks)
        return f" of {missing} of {self.spec.progress.ranks} ranks (rank {', '.join(self.log.ranks)} has one)"

    def progress_evidence(self) -> dict[str, Any]:
        if self.progress is None:
            return {}
        ranks = {"rank": self.progress.rank, "ranks": dict(self.progress.ranks)} if self.progress.ranks else {}
        return {
            "progress": {
                **ranks,
                "first": self.progress.first,
                "last": self.progress.last,
                "changes": self.progress.changes,
                "unchanged_s": round(max(0.0, self.facts.at - self.progress.changed_at), 3),
                "median_gap_s": self.progress.median_gap,
            }
        }

    def process_evidence(self) -> dict[str, Any]:
        return {"processes": [process_data(process) for process in (self.processes or ())[:16]]}

    def activity_evidence(self) -> dict[str, Any]:
        activity = known(self.facts.activity)
        if activity is None:
            return {}
        return {"activity": {"window_s": activity.window, "cpu_s": activity.cpu, "io_bytes": known(activity.io)}}

    def telemetry_evidence(self) -> dict[str, Any]:
        """What the job's heartbeat says about its telemetry; it stands beside every verdict and decides none."""
        beat = known(self.facts.heartbeat)
        return {"telemetry": beat.telemetry} if beat and beat.telemetry else {}

    def gpu_evidence(self) -> dict[str, Any]:
        """Memory of the declared GPUs that is in somebody else's hands, or left behind by a run that has ended."""
        gpu = known(self.facts.gpu)
        if gpu is None:
            return {}
        left = dict(gpu.memory) if self.exit is not None and gpu.level != "consistent" else {}
        return {
            **({"gpu_still_held": left} if left else {}),
            **({"gpu_others": list(gpu.others)} if gpu.others else {}),
        }

    @property
    def busy(self) -> bool:
        """Whether CPU or I/O advanced in the last window by more than starting and sleeping take, or it waits for a CPU."""
        if any(process.state == "R" for process in self.processes or ()):
            return True
        activity = known(self.facts.activity)
        if activity is None:
            return False
        return activity.cpu > 0.05 * max(activity.window, 0.1) or (known(activity.io) or 0) > BUSY_IO

    @property
    def command(self) -> str:
        """The job's command line for people, "" when not known."""
        return " ".join(self.facts.command)


def signal_name(number: int) -> str:
    """Return the signal's name, "" when there is none of that number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def how(exit_: Exit) -> str:
    """Return in words how a process ended."""
    if exit_.code == EXITED:
        return f"exit status {exit_.status}"
    if exit_.code in (KILLED, DUMPED):
        return (
            f"{signal_name(exit_.status) or f'signal {exit_.status}'}{', core dumped' if exit_.code == DUMPED else ''}"
        )
    return "no main process was started"


def process_data(process: Process) -> dict[str, Any]:
    """Return a process as data."""
    return {"pid": process.pid, "state": process.state, "main": process.main, "command": " ".join(process.argv)[:200]}


def match_data(match: Match) -> dict[str, Any]:
    """Return a match as data."""
    return {"pattern": match.pattern, "line": match.line, "offset": match.offset, "lines_after": match.lines_after}
