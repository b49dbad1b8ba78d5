# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The diagnoses, in the order in which they decide: code, from when it may speak, evidence, remedy.

A row's ``check`` sees facts and never the time: it says whether the row holds, and *from when on* it may say so
(``Finding.since``). Time alone therefore only ever adds rows that may speak.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import launcher as launchers
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import (
    DUMPED,
    KILLED,
    NOT_READ,
    LogPlace,
    Match,
    Process,
    Unknown,
    known,
    number,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.setup_codes import SETUP_CODES
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.view import (
    NOW,
    View,
    how,
    match_data,
    process_data,
    signal_name,
)

# A state D that was seen this long is more than a page fault, s. The deadline that it waits for is the longer one.
D_WINDOW = 2.0

# Looking at a unit that nobody starts takes this long, s, until it is sure that there is no run.
LOOK_GRACE = 2.0

_UNWRITABLE = {
    "ENOSPC": "free space or inodes at {mount}",
    "EDQUOT": "raise or free the quota of {user} at {mount}",
    "EROFS": "mount {mount} writable, or put the log elsewhere",
    "EACCES": "let {user} write there: chown the folder of {path}",
    "ELOOP": "remove the symbolic links there, which lead to each other",
}


@dataclass(frozen=True)
class Finding:
    """A row that holds."""

    code: str
    # CLOCK_BOOTTIME s from which on it may speak; -inf = at once.
    since: float
    # What to do, one sentence; "" for a success.
    remedy: str
    # What decided it, plain builtins.
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    # Position as in docs, e.g. "13"; "" for rows that launch_proof's callers give.
    number: str
    codes: tuple[str, ...]
    # now, start, first_log, first_progress, stall, end, deadline; several where it depends.
    when: tuple[str, ...]
    decided_by: str
    remedy: str
    check: Callable[[View], Finding | None] | None = None
    ok: bool = False
    # It can be the cause inside a crash loop.
    cause: bool = False


# --- the rows' checks, in the table's order


def observer_blind(v: View) -> Finding | None:
    def blind(what: str, value: Any, fix: str) -> Finding | None:
        if not isinstance(value, Unknown) or value == NOT_READ:
            return None
        return Finding("observer_blind", NOW, f"{fix} for {v.unit}", {"source": what, "why": value.why})

    spec, facts = v.spec, v.facts
    reads_log = spec.log.fresh or spec.log.required or spec.progress or spec.done
    return (
        blind("systemd", facts.systemd, "let the observer ask systemd, or supervisor where no systemd runs,")
        or (reads_log and blind("log", facts.log, f"let the observer read {v.path}, or drop the log requirement"))
        or (
            spec.process.count > 1
            and blind("processes", facts.processes, "let the observer read the unit's group, or set count to 1")
        )
        or (spec.gpu and blind("gpu", facts.gpu, "let the observer open NVML, or drop the gpu requirement"))
        or (
            spec.objects
            and blind("objects", facts.objects, f"let the observer list {spec.objects.uri}, or drop objects")
        )
        or (
            spec.objects
            and blind(
                "objects before", v.baseline.objects, f"let the observer list {spec.objects.uri}, or drop objects"
            )
        )
        or (
            spec.heartbeat
            and blind("heartbeat", facts.heartbeat, f"let the observer read {spec.heartbeat.path}, or drop heartbeat")
        )
        or None
    )


def unit_not_loaded(v: View) -> Finding | None:
    # A transient unit is forgotten when it ends: not-found then, although it ran.
    if v.systemd is None or v.new_run or v.state.load_state in ("loaded", "merged"):
        return None
    evidence = {**v.unit_evidence(), "load_error": v.state.load_error, "path": v.state.fragment_path}
    if v.state.load_state == "not-found":
        start = known(v.facts.start)
        asked = v.baseline.observed or (start is not None and start.rc not in (None, 0))
        # Somebody else may be about to make it, as systemd-run does.
        since = NOW if asked else v.start_deadline
        by_hand = " (after a unit file by hand: systemctl daemon-reload)" if v.state.control == "systemctl" else ""
        remedy = f"deliver {v.unit} to this host, or correct its name{by_hand}"
        return Finding("unit_not_found", since, remedy, evidence)
    if v.state.load_state == "masked":
        return Finding("unit_invalid", NOW, f"run systemctl unmask {v.unit}", evidence)
    where = v.state.fragment_path or v.unit
    said = f": {v.state.load_error}" if v.state.load_error else ""
    return Finding("unit_invalid", NOW, f"correct {where}{said}, then run systemctl daemon-reload", evidence)


# systemd forgets which one it was when it is reloaded.
UNNAMED_COMMAND = "an ExecStartPre= command"


def start_refused(v: View) -> Finding | None:
    start = known(v.facts.start)
    text = start.text if start else ""
    evidence = {**v.unit_evidence(), "said": text}
    if start and start.job_result == "dependency":
        what = start.dependency or "a unit that it requires"
        return Finding(
            "start_refused",
            NOW,
            f"{what} failed: repair it, then start {v.unit}",
            {**evidence, "dependency": start.dependency},
        )
    touched = (
        v.new_run
        or v.baseline.observed
        or (start is not None and (start.rc not in (None, 0) or start.job_result == "failed"))
    )
    never_ran = not v.main_alive and (v.exit is None or v.exit.code == 0) and not v.facts.exec_seen
    if touched and never_ran and v.result == "resources":
        files = list(v.state.missing_files)
        what = (
            f"create {', '.join(files)}"
            if files
            else "create the file or directory that systemd names (EnvironmentFile=, PIDFile=)"
        )
        journal = known(v.facts.journal) or ()
        return Finding(
            "start_refused",
            NOW,
            f"{what}, which {v.unit} needs",
            {**evidence, "missing_files": files, "journal": list(journal[-5:])},
        )
    if v.exit is not None and v.exit.code == KILLED and v.state.failed_post_command and v.result == "exit-code":
        post = v.state.failed_post_command
        remedy = f"run it by hand: {post} failed, so systemd ended {v.unit}"
        return Finding(
            "start_refused",
            v.death,
            remedy,
            {**evidence, "failed_command": post, **v.exit_evidence(), **v.log_evidence(5)},
        )
    if v.exit is not None and never_ran and v.result in ("exit-code", "signal", "core-dump", "protocol"):
        journal = known(v.facts.journal) or ()
        evidence["failed_command"] = v.state.failed_command
        if v.exit.stop_requested:
            remedy = (
                f"{v.unit} was asked to stop before its main process was started: start it again if that was not meant"
            )
        else:
            what = v.state.failed_command or UNNAMED_COMMAND
            remedy = f"run it by hand: {what} failed, so the main process of {v.unit} was never started"
        return Finding("start_refused", v.death, remedy, {**evidence, "journal": list(journal[-5:])})
    if touched and never_ran and v.restarts == 0 and not v.new_run and v.state.result == "start-limit-hit":
        remedy = f"earlier runs of {v.unit} used up its start limit: run systemctl reset-failed {v.unit}"
        return Finding("start_refused", NOW, remedy, evidence)
    if (
        start
        and start.rc not in (None, 0)
        and not v.new_run
        and never_ran
        and re.match(r"Failed to (?:start|restart|enqueue|connect)", text)
    ):
        return Finding("start_refused", NOW, f"systemctl refused to start {v.unit}: {text.splitlines()[0]}", evidence)
    return None


def condition_skipped(v: View) -> Finding | None:
    skipped_by_command = (v.new_run or v.baseline.observed) and v.result == "exec-condition"
    if v.main_alive or v.facts.exec_seen or (v.exit is not None and not skipped_by_command):
        return None
    start, state = known(v.facts.start), v.state
    since = 0.0 if v.baseline.observed else v.baseline.taken_at
    journal = [
        line
        for line in known(v.facts.journal) or ()
        if re.search(r"[Cc]ondition check resulted in .*skipped|was skipped because|[Aa]ssertion failed", line)
    ]
    by = ""
    if start and start.job_result in ("skipped", "assert"):
        by = "the start job's answer"
    elif v.systemd is not None and not v.new_run and not state.condition_result and state.condition_at > since:
        by = "ConditionResult"
    elif v.systemd is not None and not v.new_run and not state.assert_result and state.assert_at > since:
        by = "AssertResult"
    elif skipped_by_command:
        by = "ExecCondition"
    elif journal and not v.new_run:
        by = "journal"
    if not by:
        return None
    name = (
        state.failed_command or "ExecCondition="
        if skipped_by_command
        else state.failed_condition or (journal[-1] if journal else "") or "a Condition or Assert of the unit"
    )
    evidence = {**v.unit_evidence(), "condition": name, "by": by, "journal": journal[-3:]}
    return Finding("condition_skipped", NOW, f"make {name} true for {v.unit}, or remove it", evidence)


def launcher_failed(v: View) -> Finding | None:
    if v.new_run or v.spec.launcher is None:
        return None
    seen = launchers.analyse(v.spec.launcher)
    if not seen.code:
        return None
    evidence = {key: value for key, value in vars(seen).items() if key != "code"}
    if seen.code == launchers.SELF_KILLED:
        remedy = (
            f"line {seen.line}, {seen.command!r}, matched the launcher's own command line ({seen.matched!r}) and killed it with "
            f"{seen.signal}: stop it by {v.by_hand('stop')}, never by pattern"
        )
    elif seen.code == launchers.NOT_DELIVERED:
        remedy = f"the launcher never reached the host ({seen.said or f'exit code {seen.rc}'}): repair the connection, then start {v.unit}"
    else:
        remedy = f"the launcher is no valid shell script ({seen.said or f'exit code {seen.rc}'}): correct it, then run {v.by_hand('start')}"
    return Finding(seen.code, NOW, remedy, evidence)


def wrong_process(v: View) -> Finding | None:
    if not v.facts.wrong_processes or v.new_run:
        return None
    first = v.facts.wrong_processes[0]
    remedy = f"the pattern matched {first}, not the job: look at the control group of {v.unit}, never at command lines"
    return Finding("wrong_process", NOW, remedy, {"matched": list(v.facts.wrong_processes)})


def glob_unexpanded(v: View) -> Finding | None:
    found = v.facts.unexpanded or (launchers.unexpanded(v.spec.launcher.output) if v.spec.launcher else ())
    if not found or v.new_run:
        return None
    remedy = f"no file is named {', '.join(found)}: {v.unit} never wrote one"
    return Finding("glob_unexpanded", NOW, remedy, {"names": list(found)})


def _older(v: View) -> list[Process]:
    found = {process.pid: process for process in (*(known(v.baseline.processes) or ()), *(known(v.facts.strays) or ()))}
    gone = {process.pid for process in v.processes or () if not process.alive}
    return [p for p in found.values() if p.alive and p.pid not in gone and p.started_at <= v.baseline.taken_at]


def never_launched(v: View) -> Finding | None:
    if v.new_run or v.systemd is None or _older(v):
        return None
    if any(process.alive and process.started_at > v.baseline.taken_at for process in v.processes or ()):
        return None
    start = known(v.facts.start)
    evidence = {
        **v.unit_evidence(),
        "invocation_before": known(v.baseline.invocation_id, "unknown"),
        "pending_job": v.state.pending_job,
    }
    if start:
        evidence["start"] = {"rc": start.rc, "said": start.text}
    if v.spec.launcher:
        evidence["launcher"] = {"rc": v.spec.launcher.rc, "output": v.spec.launcher.output[-400:]}
    if v.state.pending_job:
        remedy = f"the {v.state.pending_job} job of {v.unit} waits for another: see systemctl list-jobs"
    else:
        remedy = f"run {v.by_hand('start')}, and check that {v.facts.host or 'this'} is the right host"
    # Where what runs is looked at, no start is waited for.
    look = v.baseline.observed and not v.queued
    since = min(v.start_deadline, v.began + LOOK_GRACE) if look else v.launch_deadline
    return Finding("never_launched", since, remedy, evidence)


def previous_run_alive(v: View) -> Finding | None:
    older = _older(v)
    if v.new_run or not older:
        return None
    pids = ", ".join(str(process.pid) for process in older[:8])
    remedy = f"stop the old run of {v.unit} (pid {pids}) with {v.by_hand('stop')}, then start it"
    return Finding(
        "previous_run_alive",
        v.launch_deadline,
        remedy,
        {**v.unit_evidence(), "processes": [process_data(p) for p in older[:16]]},
    )


def crash_loop(v: View) -> Finding | None:
    if not v.new_run or not v.looping:
        return None
    cause = cause_of(v)
    gave_up = v.state.result == "start-limit-hit" or (v.state.active_state == "failed" and not v.auto_restart)
    evidence = {
        "restarts": v.restarts,
        "deaths": max(len(v.facts.exits), v.restarts + (v.exit is not None)),
        "gave_up": gave_up,
        "cause": {"code": cause.code, **cause.evidence} if cause else {"code": "unknown"},
        **v.unit_evidence(),
    }
    first = f"{v.unit} died {evidence['deaths']} times"
    return Finding("crash_loop", NOW, f"{first}: {cause.remedy}" if cause else f"{first}: read {v.path}", evidence)


def cause_of(v: View) -> Finding | None:
    """Return the row that explains the last death of a crash loop."""
    view = View(v.baseline, v.facts, v.spec, dead=True)
    for row in TABLE:
        if row.cause and row.check:
            finding = row.check(view)
            if finding:
                return finding
    return None


def _spawn_failed(v: View) -> list[str]:
    return [
        line
        for line in known(v.facts.journal) or ()
        if re.search(r"Failed at step|Failed to (?:spawn|execute)|Failed to set up", line)
    ]


def setup_failed(v: View) -> Finding | None:
    if not v.nonzero or v.exit.status not in SETUP_CODES:
        return None
    said = known(v.exit.setup_error)
    if said == "":
        return None  # systemd had nothing to tell: the program itself exits with that number
    journal = [said] if said else _spawn_failed(v)
    if not journal and (v.facts.exec_seen or v.bytes):
        return None
    # The log's place says more than "stdout failed".
    if v.exit.status == 209 and _place_error(v):
        return None
    step, remedy = SETUP_CODES[v.exit.status]
    text = remedy.format(
        unit=v.unit,
        user=v.facts.user or "its user",
        log=v.path,
        program=v.facts.command[0] if v.facts.command else "its program",
        directory=v.facts.working_directory or "of the unit",
    )
    return Finding(
        "setup_failed",
        v.death,
        f"{text}; then restart {v.unit} (systemd ended it with {v.exit.status}, {step})",
        {"step": step, "number": v.exit.status, "journal": journal[-3:], **v.exit_evidence()},
    )


def _place_error(v: View) -> str:
    place: LogPlace | None = known(v.facts.log_place)
    if place is None:
        return ""
    if place.error in _UNWRITABLE:
        # A file that systemd opened as root, or that is open already, needs no permission of the user's any more.
        opened = any(process.has_log is True for process in v.processes or ())
        return "" if place.error == "EACCES" and opened else place.error
    return "ENOSPC" if place.free_bytes == 0 or place.free_inodes == 0 else ""


def log_unwritable(v: View) -> Finding | None:
    error = _place_error(v)
    if not error or not v.new_run:
        return None
    stdout_failed = v.nonzero and v.exit.status == 209
    if stdout_failed or v.mute:
        since = v.death if v.exit else NOW
    elif error in ("EACCES", "ELOOP"):
        return None  # it could write before
    elif v.nonzero and all("No space left" in match.line for match in v.open_forbidden):
        since = v.death
    elif v.alive and v.spec.progress:
        since = v.pace_deadline
    else:
        return None
    place = known(v.facts.log_place)
    # The mount point comes with its type and options.
    user, mount = place.user or "the job's user", (place.mount or place.path).split(" ")[0]
    remedy = f"{place.path} cannot be written ({error}): " + _UNWRITABLE[error].format(
        path=place.path, user=user, mount=mount
    )
    evidence = {
        "place": {
            "path": place.path,
            "error": error,
            "mount": place.mount,
            "free_bytes": place.free_bytes,
            "free_inodes": place.free_inodes,
        },
        **v.exit_evidence(),
        **v.log_evidence(0),
    }
    return Finding("log_unwritable", since, f"{remedy}; then restart {v.unit}", evidence)


def oom_killed(v: View) -> Finding | None:
    if not v.new_run:
        return None
    if not v.oom_rise and not (v.exit is not None and v.result == "oom-kill"):
        return None
    limit = (
        f"raise MemoryMax= (now {v.state.memory_max} bytes)"
        if v.state.memory_max
        else "raise the memory of the container"
    )
    evidence = {
        "oom_kills": v.oom_rise,
        "memory_max": v.state.memory_max,
        "alive": v.alive,
        **v.unit_evidence(),
        **v.exit_evidence(),
    }
    if v.exit is not None:
        since = v.death
    else:
        # A victim that the job survives raises the counter too: it gets the time to show that it goes on.
        if v.oom_survived:
            return None
        seen = v.facts.oom_at if v.facts.oom_at is not None else v.facts.at
        if v.restarts and seen < v.began:
            return None  # that ended the run before this one: the restart is what there is to tell
        since = seen + v.spec.process.stable_for
    return Finding(
        "oom_killed", since, f"the kernel killed for memory in {v.unit}: lower the batch size, or {limit}", evidence
    )


def time_limit(v: View) -> Finding | None:
    if not v.new_run or v.result not in ("timeout", "watchdog"):
        return None
    evidence = {**v.unit_evidence(), **v.exit_evidence()}
    since = v.death if v.exit else NOW
    lived = (v.exit.at if v.exit else v.facts.at) - v.began
    if v.result == "watchdog":
        limit = v.state.watchdog
        evidence["watchdog_s"] = limit
        remedy = f"{v.unit} sent no keep-alive within {_seconds(limit)}: send WATCHDOG=1, or raise WatchdogSec="
        # Of a run before this one it is not known when it began.
        if limit is not None and lived < limit and (v.exit is None or v.exit.invocation_id in ("", v.facts.run_id)):
            evidence["lived_s"] = round(lived, 3)
            remedy = (
                f"{v.unit} lived for {lived:.1f} s, less than WatchdogSec= ({_seconds(limit)}): its program itself called for its end "
                "(WATCHDOG=trigger, or a shorter WATCHDOG_USEC=); see what it found wrong"
            )
        return Finding("watchdog", since, remedy, evidence)
    if v.state.runtime_max is not None and lived >= 0.95 * v.state.runtime_max:
        evidence["runtime_max_s"] = v.state.runtime_max
        remedy = f"{v.unit} reached RuntimeMaxSec= ({_seconds(v.state.runtime_max)}): raise it, or make the job shorter"
        return Finding("runtime_limit", since, remedy, evidence)
    if v.facts.was_active or (v.exit is not None and v.exit.stop_requested):
        return None
    evidence["timeout_start_s"] = v.state.timeout_start
    needs = {
        "notify": "READY=1 was never sent",
        "notify-reload": "READY=1 was never sent",
        "forking": "the parent did not exit, or the PID file is missing",
        "dbus": f"its BusName= ({v.state.bus_name}) never came on the bus",
    }
    # systemd waits for one step at a time: what the type needs comes after ExecStartPre= and before ExecStartPost=.
    step = v.state.unfinished_command
    why = f"{step} did not finish" if step else needs.get(v.state.type, "a start command did not finish")
    evidence["hung_in"] = step
    remedy = f"{v.unit} was not up within {_seconds(v.state.timeout_start)} (Type={v.state.type}): {why}"
    return Finding("start_timeout", since, remedy, evidence)


def _seconds(value: float | None) -> str:
    return "its limit" if value is None else f"{value:g} s"


def killed_by_signal(v: View) -> Finding | None:
    if not v.signal:
        return None
    name = signal_name(v.signal) or f"signal {v.signal}"
    evidence = {"signal": name, "stop_requested": v.exit.stop_requested, **v.exit_evidence(), **v.log_evidence()}
    whose = f"pid {v.exit.pid} of {v.unit}" if v.exit.pid else v.unit  # a certificate does not tell the pid
    if v.exit.code == DUMPED:
        remedy = f"look at the core of {whose} (coredumpctl info {v.exit.pid or v.unit}): it crashed with {name}"
        return Finding("core_dumped", v.death, remedy, evidence)
    step = v.state.unfinished_command
    during = f" while {step} ran" if step else ""
    if v.exit.stop_requested:
        remedy = f"{v.unit} was asked to stop ({name}){during}: start it again if that was not meant"
    else:
        remedy = f"find out who sent {name} to {whose}{during} (kill, a limit, the kernel log)"
    return Finding("killed_by_signal", v.death, remedy, evidence)


def crashed_traceback(v: View) -> Finding | None:
    if v.exit is None or not v.open_forbidden:
        return None
    match = v.open_forbidden[-1]
    evidence = {"match": match_data(match), **v.exit_evidence(), **v.log_evidence(8)}
    return Finding(
        "crashed_traceback",
        v.death,
        f"{v.unit} ended with {match.line.strip()!r} in {v.path}: correct that, then restart it",
        evidence,
    )


def died_before_log(v: View) -> Finding | None:
    if not v.nonzero or not v.mute:
        return None
    user = f" as {v.facts.user}" if v.facts.user else ""
    where = f" in {v.facts.working_directory}" if v.facts.working_directory else ""
    tail = v.facts.errors_tail
    aside = f"; its errors go to {v.facts.errors_at}" if v.facts.errors_at else ""
    aside += f", whose last line is {tail[-1].strip()!r}" if tail else ""
    aside += "; its /tmp is one of its own (PrivateTmp=), so what it wrote there is not here" if v.facts.own_tmp else ""
    by_hand = f"run it by hand{user}{where}: {v.command or 'its ExecStart='}"
    evidence: dict[str, Any] = {"command": list(v.facts.command), **v.exit_evidence(), **v.log_evidence()}
    if v.facts.errors_at:
        evidence["errors"] = {"go_to": v.facts.errors_at, "tail": list(tail)}
    return Finding(
        "died_before_log",
        v.death,
        f"{v.unit} ended with {how(v.exit)} and wrote nothing to {v.path}{aside}: {by_hand}",
        evidence,
    )


def exited_nonzero(v: View) -> Finding | None:
    if not v.nonzero or v.mute:
        return None
    last = v.log.tail[-1] if v.log and v.log.tail else ""
    said = f"; its last line is {last.strip()!r}" if last else ""
    return Finding(
        "exited_nonzero",
        v.death,
        f"{v.unit} ended with {how(v.exit)}: read {v.path}{said}",
        {**v.exit_evidence(), **v.log_evidence(10)},
    )


def completed(v: View) -> Finding | None:
    if not v.zero or not v.done or v.unmatched:
        return None
    return Finding(
        "completed",
        v.death,
        "",
        {"done": match_data(v.log.done), **v.exit_evidence(), **v.log_evidence(), **v.progress_evidence()},
    )


def exited_early(v: View) -> Finding | None:
    if not v.zero or v.done:
        return None
    others = [process for process in v.processes or () if process.alive and not process.main]
    if others:
        why = (
            f"it left {len(others)} process(es) behind (pid {others[0].pid}): it daemonised, keep it in the foreground"
        )
    elif v.result == "protocol":
        why = (
            f"Type={v.state.type} waits for what it never did (READY=1, PIDFile=, a process that stays): use Type=exec"
        )
    elif v.exit.stop_requested:
        why = "it was asked to stop: start it again if that was not meant"
    elif v.spec.done:
        why = f"no line matches {v.spec.done.pattern!r}: it stopped early, or a pipe or wrapper hid its exit code"
    else:
        why = "it daemonised, a pipe or wrapper hid its exit code, or it is a job that ends: then declare proof.done.pattern"
    return Finding(
        "exited_early",
        v.death,
        f"{v.unit} ended with exit status 0 after {max(0.0, v.exit.at - v.began):.1f} s; {why}",
        {**v.exit_evidence(), **v.log_evidence(), "left_behind": [process_data(process) for process in others[:8]]},
    )


def worker_gone(v: View) -> Finding | None:
    count = v.spec.process.count
    if v.stranger is not None and not v.main_alive and v.new_run and v.active:
        pid, words = v.stranger.pid, " ".join(v.stranger.argv)[:80]
        remedy = f"the program of {v.unit} is gone; its PIDFile= names pid {pid} ({words}), which is older than this run: remove {v.state.pid_file}"
        return Finding("worker_gone", v.start_deadline, remedy, {**v.unit_evidence(), **v.process_evidence()})
    if not v.alive or v.processes is None or v.live_count >= count or not v.main_alive:
        return None
    zombies = sum(process.state == "Z" for process in v.processes)
    remedy = f"{v.live_count} of {count} processes of {v.unit} live, {zombies} are zombies: exec the worker, without a wrapper that outlives it"
    evidence = {"expected": count, "live": v.live_count, "zombies": zombies, **v.process_evidence()}
    return Finding("worker_gone", v.start_deadline, remedy, evidence)


def restarted_in_window(v: View) -> Finding | None:
    # Before the new main process there is nothing yet that could be stable.
    if v.restarts != 1 or not v.alive or not v.main_alive:
        return None
    last = v.facts.exits[-1] if v.facts.exits else None
    before = how(last) if last else "its end was not seen"
    cause = cause_of(v) if last else None
    evidence = {
        "restarts": 1,
        "previous_exit": before,
        "cause": {"code": cause.code, **cause.evidence} if cause else None,
        **v.unit_evidence(),
    }
    why = cause.remedy if cause else "read the run before in its run folder"
    # Until it is stable, the second death may come: then it is a crash loop.
    return Finding(
        "restarted_in_window", v.stable_at, f"{v.unit} died once and was restarted ({before}): {why}", evidence
    )


def uninterruptible(v: View) -> Finding | None:
    since = v.facts.uninterruptible_since
    if not v.alive or since is None:
        return None
    if v.mute:
        deadline = v.first_log_deadline
    elif v.spec.progress:
        deadline = v.pace_deadline
    else:
        return None
    workers = [process.pid for process in v.processes or () if process.state == "D"]
    remedy = f"every worker of {v.unit} (pid {', '.join(map(str, workers[:8]))}) waits in the kernel (state D): look at its storage and GPU driver"
    evidence = {"since_s": round(max(0.0, v.facts.at - since), 3), **v.process_evidence(), **v.log_evidence()}
    return Finding("uninterruptible", max(since + D_WINDOW, deadline), remedy, evidence)


def count_mismatch(v: View) -> Finding | None:
    declared, found = v.facts.instances_declared, v.facts.instances_found
    gone = [] if found == declared else sorted(set(declared) - set(found))
    if gone:
        remedy = (
            f"start {', '.join(gone[:8])}: {len(found)} of {len(declared)} instances of the job of {v.unit} are there"
        )
        return Finding(
            "count_mismatch",
            v.start_deadline,
            remedy,
            {"declared": list(declared), "found": list(found), "missing": gone},
        )
    if v.spec.log.count > 1 and v.alive and v.log is not None and len(v.log.files) != v.spec.log.count:
        found = ", ".join(v.log.files[:8]) or "none"
        remedy = (
            f"see which shard of {v.unit} writes none of its {v.spec.log.count} logs at {v.path}; there are {found}"
        )
        evidence = {"declared": v.spec.log.count, "found": list(v.log.files)}
        return Finding("count_mismatch", v.first_log_deadline, remedy, evidence)
    return None


def error_but_alive(v: View) -> Finding | None:
    if not v.alive or not v.open_forbidden:
        return None
    sinces = [(_speaks(v, match), match) for match in v.open_forbidden]
    since, match = min(sinces, key=lambda pair: pair[0])
    remedy = f"{v.unit} lives on after {match.line.strip()!r} in {v.path} without progress: restart it"
    return Finding(
        "error_but_alive",
        since,
        remedy,
        {"match": match_data(match), **v.unit_evidence(), **v.log_evidence(8), **v.progress_evidence()},
    )


def _speaks(v: View, match: Match) -> float:
    if match.kind == "declared":
        return match.at
    if match.kind == "default":
        # A handled one is followed by a sign of life.
        return match.at + v.spec.process.stable_for
    # A handled exception may be followed by minutes of loading.
    return max(match.at, v.pace_deadline if v.spec.progress else match.at + v.spec.deadlines.first_log)


def log_misrouted(v: View) -> Finding | None:
    if not v.alive or not v.processes or not (v.mute or v.lost):
        return None
    live = [process for process in v.processes if process.alive]
    if not live or (not v.lost and any(process.has_log is not False for process in live)):
        return None
    places = sorted({place for process in live for place in known(process.outputs) or ()})
    if not places or (v.path == "journal" and any(place.startswith("socket:") for place in places)):
        return None
    where = f"the deleted {v.path}" if v.lost else f"{', '.join(places[:4])} and not to {v.path}"
    if v.path in places and not v.lost:
        where = f"a {v.path} that only it sees (PrivateTmp=, RootDirectory=, another mount)"
    if v.log.kind:
        where = f"{', '.join(places[:4])}; {v.path} is a {v.log.kind}, and a log must be a regular file, which can be read again"
    return Finding(
        "log_misrouted",
        v.first_log_deadline,
        f"{v.unit} writes to {where}: correct StandardOutput=, the redirection, the rotation, or log.path",
        {"goes_to": places[:16], **v.log_evidence(0), **v.process_evidence()},
    )


def stale_log(v: View) -> Finding | None:
    old = known(v.log.old_match) if v.log else None
    if not v.alive or not v.mute or old is None:
        return None
    remedy = f"{v.path} holds only lines of an earlier run ({old.line.strip()!r}): do not trust them, see why {v.unit} writes none"
    return Finding("stale_log", v.first_log_deadline, remedy, {"old": match_data(old), **v.log_evidence()})


def silent(v: View) -> Finding | None:
    if not v.alive or not v.mute:
        return None
    detail = "buffered" if v.busy else "idle"
    if v.busy:
        remedy = f"{v.unit} works and writes nothing to {v.path}: set PYTHONUNBUFFERED=1, or flush"
    else:
        remedy = f"{v.unit} does nothing and wrote nothing to {v.path}: see where it hangs (py-spy dump, /proc/{v.state.main_pid}/stack)"
    zombies = sum(process.state == "Z" for process in v.processes or ())
    evidence = {
        "detail": detail,
        "zombies": zombies,
        **v.unit_evidence(),
        **v.log_evidence(),
        **v.activity_evidence(),
        **v.process_evidence(),
    }
    return Finding("silent", v.first_log_deadline, remedy, evidence)


def gpu_not_engaged(v: View) -> Finding | None:
    gpu = known(v.facts.gpu)
    if not v.alive or not v.gpu_missing or gpu is None:
        return None
    detail = gpu.reason or "context_without_memory"
    fix = {
        "no_device": "give the container its /dev/nvidia* devices (driver and container must match)",
        "opened_only": "it opened the driver and made no context: look for a fall-back to the CPU",
        "context_without_memory": f"its memory there is below {v.spec.gpu.memory_floor} bytes: look for a fall-back to the CPU",
        "wrong_gpu": f"it runs on {', '.join(gpu.found)}: set CUDA_VISIBLE_DEVICES to the UUIDs",
    }.get(detail, detail)
    cause = "; ".join([*gpu.why[:1], *([fix] if detail == "wrong_gpu" or not gpu.why else [])])
    remedy = f"{v.unit} does not use {', '.join(gpu.declared) or 'a GPU'}: {cause}"
    evidence = {
        "detail": detail,
        "level": gpu.level,
        "needed": v.spec.gpu.level,
        "declared": list(gpu.declared),
        "found": list(gpu.found),
        "memory": dict(gpu.memory),
        "why": list(gpu.why),
        "pids": gpu.pids,
    }
    return Finding("gpu_not_engaged", v.began + v.spec.gpu_within, remedy, evidence)


def no_progress_yet(v: View) -> Finding | None:
    if not v.alive or not v.spec.progress or v.progress is not None or v.mute:
        return None
    what = v.spec.progress.pattern or v.spec.progress.json_field
    remedy = f"{v.unit} writes to {v.path} and no line has a value for {what!r}: correct the pattern, or raise deadlines.first_progress"
    cut_at = v.log.cut_at if v.log else None
    if cut_at and v.spec.progress.json_field:
        remedy = f"{v.unit} writes lines of more than {cut_at // 1024} KiB to {v.path}, and no JSON line that long is read: log {what!r} on a shorter line"
    ranks = v.log.ranks if v.log else ()
    if ranks:
        remedy = f"{v.unit} has no progress{v.of_ranks}: see in {v.path} what the others wait for"
    evidence = {
        **({"ranks": list(ranks)} if ranks else {}),
        **({"lines_cut_at": cut_at} if cut_at else {}),
        "looked_for": what,
        "deadline_s": v.spec.deadlines.first_progress,
        **v.log_evidence(),
        **v.activity_evidence(),
    }
    return Finding("no_progress_yet", v.first_progress_deadline, remedy, evidence)


def stalled(v: View) -> Finding | None:
    if not v.alive or not v.spec.progress or v.progress is None:
        return None
    gpu = known(v.facts.gpu)
    utilisation = known(gpu.utilisation) if gpu else None
    detail = "" if utilisation is None else ("gpu_spinning" if utilisation >= 50 else "gpu_idle")
    fixes = {
        "gpu_spinning": "the GPUs spin: look for a collective that hangs",
        "gpu_idle": "the GPUs idle: look at the data loader and its storage",
        "": f"it {'uses CPU' if v.busy else 'does nothing'}: see where it hangs (py-spy dump)",
    }
    who = f"Rank {v.progress.rank} of {v.unit}" if v.progress.rank is not None else v.unit
    remedy = f"{who} has stood at {number(v.progress.last)} for more than {v.stall_after:g} s: {fixes[detail]}"
    evidence = {
        "detail": detail,
        "stall_after_s": v.stall_after,
        **v.progress_evidence(),
        **v.log_evidence(),
        **v.activity_evidence(),
    }
    return Finding("stalled", v.pace_deadline, remedy, evidence)


def uploads_stalled(v: View) -> Finding | None:
    if not v.alive or not v.objects_missing or known(v.facts.objects) is None:
        return None
    if v.spec.progress and (v.progress is None or v.progress.changes == 0):
        return None
    need = v.spec.objects
    remedy = f"{v.unit} goes on and {v.new_objects} of {need.min_new} objects came to {need.uri}: check its credentials, the bucket and the network"
    evidence = {
        "uri": need.uri,
        "before": known(v.baseline.objects),
        "now": v.facts.objects.count,
        "needed": need.min_new,
        **v.progress_evidence(),
    }
    return Finding("uploads_stalled", v.objects_deadline, remedy, evidence)


def inconclusive(v: View) -> Finding | None:
    words = [text for _when, text in v.missing]
    since = v.total_deadline
    if v.exit is not None:
        words = [f"no line in {v.path} matches {pattern!r}" for pattern in v.unmatched] or words
        since = min(since, v.death)
    elif v.vanished:
        since = min(since, v.start_deadline)
    elif not words and v.stable_at <= since:
        return None
    words = words or [f"the main process has not lived for {v.spec.process.stable_for:g} s"]
    remedy = f"{v.unit} could not be proved: {words[0]}"
    evidence = {"missing": words, **v.unit_evidence(), **v.exit_evidence(), **v.log_evidence(), **v.progress_evidence()}
    return Finding("inconclusive", since, remedy, evidence)


def proved(v: View) -> Finding | None:
    if v.missing:
        return None
    gpu = known(v.facts.gpu)
    evidence = {
        **v.unit_evidence(),
        "main_pid": v.state.main_pid,
        **v.log_evidence(3),
        **v.progress_evidence(),
        "gpu": gpu.level if gpu else "not_applicable",
    }
    if gpu:
        evidence.update(gpus=dict(gpu.memory), gpu_pids=gpu.pids)
    if v.spec.objects:
        evidence["new_objects"] = v.new_objects
    return Finding("ok_progressing" if v.spec.progress else "ok_started", v.stable_at, "", evidence)


TABLE: tuple[Row, ...] = (
    Row(
        "0",
        ("observer_blind",),
        ("now",),
        "a required source is unreadable",
        "grant the right, or drop that requirement",
        observer_blind,
    ),
    Row(
        "1",
        ("unit_not_found", "unit_invalid"),
        ("now", "start"),
        "LoadState not-found (at the start deadline where somebody else is to start it); bad-setting, error, masked",
        "correct the unit, daemon-reload",
        unit_not_loaded,
    ),
    Row(
        "2",
        ("start_refused",),
        ("now",),
        "Result=resources and no process (a missing EnvironmentFile); a required dependency or a pre-command failed; the start limit "
        "was used up before",
        "name the file, or the dependency",
        start_refused,
    ),
    Row(
        "3",
        ("condition_skipped",),
        ("now",),
        "a Condition or Assert of this start said no (the start job's answer, its timestamp, the journal); Result=exec-condition",
        "name the condition",
        condition_skipped,
    ),
    Row(
        "4",
        ("launcher_self_killed", "launcher_not_delivered", "launcher_syntax"),
        ("now",),
        "no new run, and the launcher's own evidence: died by the signal that its kill pattern sends, or its end mark is missing, while "
        "the pattern matches its own command line; transport code (255, copy failed); shell syntax error",
        "stop by unit, not by pattern",
        launcher_failed,
    ),
    Row(
        "diagnose",
        ("wrong_process",),
        ("now",),
        "what a pattern matched is the observer, its shell or ssh, an ancestor of it, or outside the unit's group",
        "look at the control group",
        wrong_process,
    ),
    Row(
        "diagnose",
        ("glob_unexpanded",),
        ("now",),
        "an argument or a printed name still has *?[ and no such path exists",
        "no such file was ever written",
        glob_unexpanded,
    ),
    Row(
        "5",
        ("never_launched",),
        ("start",),
        "no new invocation, no process newer than the baseline",
        "start it; is this the right host?",
        never_launched,
    ),
    Row(
        "6",
        ("previous_run_alive",),
        ("start",),
        "as never_launched, but a process of the job older than the baseline runs",
        "stop the old run first",
        previous_run_alive,
    ),
    Row(
        "7",
        ("crash_loop",),
        ("now",),
        "the restart count rose twice, or once and the new run died too; the evidence holds the cause (one of 8–15 or 17) and whether "
        "systemd gave up",
        "that of the cause",
        crash_loop,
    ),
    Row(
        "8",
        ("setup_failed",),
        ("now",),
        "exit status of systemd's own (200 chdir, 203 exec, 209 stdout, 217 user, 226 namespace …) and the journal's spawn-failed record, or "
        "no exec seen where the journal cannot tell",
        "one text a number",
        setup_failed,
        cause=True,
    ),
    Row(
        "9",
        ("log_unwritable",),
        ("now", "stall"),
        "ENOSPC, EDQUOT, EROFS, EACCES, ELOOP or no inodes at the log's place, with 209 or no bytes; all but EACCES and ELOOP also where exit ≠ 0 without "
        "another known pattern follows some bytes, or progress is overdue",
        "free space, owner, mount",
        log_unwritable,
        cause=True,
    ),
    Row(
        "10",
        ("oom_killed",),
        ("now",),
        "the group's oom_kill counter rose, or Result=oom-kill; where the job lives on, no progress came after it",
        "lower the batch, or raise MemoryMax",
        oom_killed,
        cause=True,
    ),
    Row(
        "11",
        ("start_timeout", "runtime_limit", "watchdog"),
        ("now",),
        "Result=timeout while activating; Result=timeout from RuntimeMaxSec; Result=watchdog",
        "READY, PIDFile or ExecStartPost missing; the limit; keep-alive missing",
        time_limit,
        cause=True,
    ),
    Row(
        "12",
        ("killed_by_signal", "core_dumped"),
        ("now",),
        "code killed or dumped, or exit 128+n (255 is none); that of a command before the start where there was no main process",
        "who sent it; look at the core",
        killed_by_signal,
        cause=True,
    ),
    Row(
        "13",
        ("crashed_traceback",),
        ("end",),
        "ended, and a forbidden pattern in this run's bytes with no progress after it, whatever the exit code or the done line say",
        "quote the last exception",
        crashed_traceback,
        cause=True,
    ),
    Row(
        "14",
        ("died_before_log",),
        ("end",),
        "exit ≠ 0 and no bytes in this run's log",
        "run the command by hand; here it is",
        died_before_log,
        cause=True,
    ),
    Row(
        "15",
        ("exited_nonzero",),
        ("end",),
        "exit ≠ 0, bytes, no known pattern",
        "show the tail",
        exited_nonzero,
        cause=True,
    ),
    Row(
        "16",
        ("completed",),
        ("end",),
        "exit 0, the done pattern, and every required pattern",
        "– (a success)",
        completed,
        ok=True,
    ),
    Row(
        "17",
        ("exited_early",),
        ("end",),
        "exit 0, no done pattern",
        "it daemonised, or a pipe hid the exit code",
        exited_early,
        cause=True,
    ),
    Row(
        "18",
        ("worker_gone",),
        ("start",),
        "main process alive, expected workers missing or only zombies; or what systemd takes for the main process, by PIDFile=, is older "
        "than the run, and nothing else of it lives",
        "exec the worker, drop the wrapper",
        worker_gone,
    ),
    Row(
        "19",
        ("restarted_in_window",),
        ("now",),
        "the restart count rose once while watching, and the new run is stable (a new invocation without that is an operator's restart)",
        "read the previous exit",
        restarted_in_window,
    ),
    Row(
        "20",
        ("uninterruptible",),
        ("first_log", "stall"),
        "all workers in state D for the whole window",
        "storage or GPU driver",
        uninterruptible,
    ),
    Row(
        "21",
        ("count_mismatch",),
        ("start", "first_log"),
        "instances or logs found ≠ declared",
        "which shard is missing",
        count_mismatch,
    ),
    Row(
        "22",
        ("error_but_alive",),
        ("now",),
        "forbidden pattern in this run's bytes, process alive, no progress after it; the default patterns wait stable_for, an exception "
        "waits for the next progress that is due: it may have been handled",
        "restart; quote the line",
        error_but_alive,
    ),
    Row(
        "23",
        ("log_misrouted",),
        ("first_log",),
        "no process of the unit has the declared log open or wrote to it, while its output goes elsewhere (null, deleted file, another path, "
        "a log that is no regular file)",
        "name where it goes",
        log_misrouted,
    ),
    Row(
        "24",
        ("stale_log",),
        ("first_log",),
        "no bytes since the baseline, while the old content matches a required, progress or done pattern",
        "do not trust old lines",
        stale_log,
    ),
    Row(
        "25",
        ("silent",),
        ("first_log",),
        "no bytes, alive (buffered: CPU or I/O advancing; idle: flat)",
        "PYTHONUNBUFFERED=1; where it hangs",
        silent,
    ),
    Row(
        "26",
        ("gpu_not_engaged",),
        ("deadline",),
        "the GPU proof ladder did not reach its level (no_device, opened_only, context_without_memory, wrong_gpu)",
        "CPU fallback, missing device node, driver mismatch",
        gpu_not_engaged,
    ),
    Row(
        "27",
        ("no_progress_yet",),
        ("first_progress",),
        "bytes, but no progress, alive",
        "the deadline or the pattern",
        no_progress_yet,
    ),
    Row(
        "28",
        ("stalled",),
        ("stall",),
        "progress unchanged for more than k × its own median gap, at least within (gpu_spinning, gpu_idle)",
        "collective hang or data loader",
        stalled,
    ),
    Row(
        "29",
        ("uploads_stalled",),
        ("deadline",),
        "progress advances, objects do not",
        "credentials, bucket, network",
        uploads_stalled,
    ),
    Row(
        "30",
        ("inconclusive",),
        ("end",),
        "time up before the required evidence, none of the above",
        "what was missing",
        inconclusive,
    ),
    Row(
        "31",
        ("ok_started", "ok_progressing"),
        ("now",),
        "every required proof is there, the main process has lived for stable_for, and the unit is active (a oneshot may be activating)",
        "– (a success)",
        proved,
        ok=True,
    ),
)

# Codes of the report that no look at a unit gives.
OUTSIDE: tuple[Row, ...] = (
    Row(
        "–",
        ("unreachable", "preflight_failed", "provision_failed", "not_reached"),
        ("now",),
        "the play never came to the launch; every declared job has exactly one row in the report, with its stage",
        "the failing task's own message",
    ),
    Row("–", ("would_start",), ("–",), "check mode: it would be started", "–"),
    Row(
        "–",
        ("restart_pending",),
        ("–",),
        "launchproof_restart: never, and what runs is not what is declared",
        "restart it when it suits",
    ),
)
