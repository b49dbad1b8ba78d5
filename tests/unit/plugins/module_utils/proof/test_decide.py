# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every row of the table over facts as the collectors give them, and what holds for all facts whatever they are."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import facts as f
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.decide import decide
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.render import WORDS, row, sentence
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.setup_codes import SETUP_CODES
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import validate
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.table import OUTSIDE, TABLE
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.view import SUMMARY_LINES, WRAPPER_LINES
from hypothesis import given, settings
from hypothesis import strategies as st

UNIT = "training.service"
LOG = "/var/lib/launchproof/runs/training.service/current/log"
T0 = 1000.0  # the baseline
BEGAN = 1000.5  # the run's start
BEFORE = f.Baseline(taken_at=T0, invocation_id="old")
STEP = {"pattern": r"step=(?P<step>\d+)", "within": 20}
DONE = {"pattern": "ev=exit code=0"}


def up(**changes: Any) -> f.UnitState:
    state = f.UnitState(
        active_state="active",
        sub_state="running",
        invocation_id="new",
        main_pid=70,
        exec_main_pid=70,
        exec_main_started_at=BEGAN,
    )
    return replace(state, **changes)


def down(status: int = 0, code: int = f.EXITED, at: float = BEGAN + 1, **changes: Any) -> f.UnitState:
    clean = status == 0 and code == f.EXITED
    state = f.UnitState(
        active_state="inactive" if clean else "failed",
        sub_state="dead" if clean else "failed",
        result="success" if clean else ("exit-code" if code == f.EXITED else "signal"),
        invocation_id="new",
        exec_main_pid=70,
        exec_main_code=code,
        exec_main_status=status,
        exec_main_started_at=BEGAN,
        exec_main_exited_at=at,
    )
    return replace(state, **changes)


def log(**changes: Any) -> f.Log:
    return replace(f.Log(LOG, new_bytes=100, written_at=BEGAN + 1, tail=("hello", "ev=loading")), **changes)


def progress(changes: int = 3, **more: Any) -> f.Progress:
    return replace(f.Progress(1.0, 1.0 + changes, changes, BEGAN + 1, BEGAN + 1.5, 60), **more)


def match(kind: str = "default", **changes: Any) -> f.Match:
    found = f.Match(
        "CUDA out of memory", "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB", 80, BEGAN + 2, kind
    )
    return replace(found, **changes)


def process(pid: int = 70, **changes: Any) -> f.Process:
    return replace(f.Process(pid, BEGAN, "S", pid == 70, ("python", "train.py")), **changes)


RANKS = {"pattern": r"step=(?P<step>\d+) rank=(?P<rank>\d+)", "ranks": 2, "within": 20}
SILENT = log(new_bytes=0, written_at=None, tail=())
MAIN = (process(),)
NO_START: dict[str, Any] = {
    "systemd": f.UnitState(),
    "run_id": None,
    "run_started_at": None,
    "exec_seen": False,
    "log": f.NOT_READ,
    "processes": (),
}


@dataclass(frozen=True)
class Case:
    name: str
    code: str
    # When the verdict is there, s after the baseline; just before that there is none (unless it is there at once).
    at: float
    facts: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    baseline: f.Baseline = BEFORE
    also: tuple[str, ...] = ()
    # What the evidence must hold, and a text of the remedy.
    evidence: dict[str, Any] = field(default_factory=dict)
    remedy: str = UNIT
    at_once: bool = True

    def look(self) -> f.Facts:
        base: dict[str, Any] = {
            "systemd": up(),
            "run_id": "new",
            "run_started_at": BEGAN,
            "exec_seen": True,
            "processes": MAIN,
            "log": log(),
            "host": "ct901",
            "user": "dflash",
            "command": ("/usr/bin/python3", "train.py"),
        }
        return f.Facts(UNIT, **{"at": T0 + 2, **base, **self.facts})

    def decide(self, at: float, table: Any = TABLE) -> Any:
        return decide(self.baseline, self.look(), validate(self.spec), T0 + at, table)


def died(status: int, **more: Any) -> dict[str, Any]:
    """Facts after an exit with that status."""
    return {"systemd": down(status), "processes": (), **more}


CASES = [
    # 0
    Case("no-systemctl", "observer_blind", 2, {"systemd": f.Unknown("systemctl: EACCES")}, evidence={"why": "systemctl: EACCES"}),
    Case("log-unreadable", "observer_blind", 2, {"log": f.Unknown("EACCES on log")}, evidence={"source": "log"}),
    Case("nvml-unreadable", "observer_blind", 2, {"gpu": f.Unknown("no libnvidia-ml")}, {"gpu": {}}, evidence={"source": "gpu"}),
    Case("s3-unreadable", "observer_blind", 2, {"objects": f.Unknown("403")}, {"objects": {"uri": "s3://b/p"}}, remedy="s3://b/p"),
    Case(
        "s3-unreadable-before",
        "observer_blind",
        2,
        {"objects": f.Objects("s3://b/p", 3)},
        {"objects": {"uri": "s3://b/p"}},
        replace(BEFORE, objects=f.Unknown("403")),
    ),
    Case("group-unreadable", "observer_blind", 2, {"processes": f.Unknown("EACCES")}, {"process": {"count": 2}}),
    Case("heartbeat-unreadable", "observer_blind", 2, {"heartbeat": f.Unknown("EACCES")}, {"heartbeat": {"path": "/h"}}, remedy="/h"),
    # 1
    Case(
        "not-found",
        "unit_not_found",
        0,
        {**NO_START, "systemd": f.UnitState(load_state="not-found"), "start": f.StartAnswer(1, "Unit not found.")},
        remedy="daemon-reload",
    ),
    Case(
        "not-found-and-somebody-else-is-to-make-it",
        "unit_not_found",
        10,
        {**NO_START, "systemd": f.UnitState(load_state="not-found")},
        also=("never_launched",),
        at_once=False,
    ),
    Case(
        "bad-setting",
        "unit_invalid",
        0,
        {**NO_START, "systemd": f.UnitState(load_state="bad-setting", load_error="bad path", fragment_path="/etc/x.service")},
        evidence={"load_error": "bad path"},
        remedy="/etc/x.service: bad path",
    ),
    Case("masked", "unit_invalid", 0, {**NO_START, "systemd": f.UnitState(load_state="masked")}, remedy=f"unmask {UNIT}"),
    # 2
    Case(
        "no-environment-file",
        "start_refused",
        1,
        {
            **NO_START,
            "run_id": "new",
            "processes": (),
            "systemd": f.UnitState(
                active_state="failed", sub_state="failed", result="resources", missing_files=("/etc/launchproof/env/training.service.env",)
            ),
        },
        evidence={"missing_files": ["/etc/launchproof/env/training.service.env"]},
        remedy="/etc/launchproof/env/training.service.env",
    ),
    Case(
        "dependency",
        "start_refused",
        1,
        {**NO_START, "start": f.StartAnswer(job_result="dependency", dependency="data.mount")},
        evidence={"dependency": "data.mount"},
        remedy="data.mount",
    ),
    Case(
        "start-limit-used-up",
        "start_refused",
        1,
        {
            **NO_START,
            "systemd": f.UnitState(active_state="failed", result="start-limit-hit"),
            "start": f.StartAnswer(1, "Job for training.service failed."),
        },
        remedy="reset-failed",
    ),
    Case(
        "systemctl-refused",
        "start_refused",
        1,
        {**NO_START, "start": f.StartAnswer(4, "Failed to start training.service: Operation refused")},
        remedy="Operation refused",
    ),
    Case(
        "pre-command-failed",
        "start_refused",
        2,
        {
            "systemd": f.UnitState(active_state="failed", sub_state="failed", result="exit-code", invocation_id="new",
                                   failed_command="ExecStartPre=/bin/false (exit status 1)"),
            "exits": (f.Exit(BEGAN, 0, 0, "new", result="exit-code", source="certificate"),),
            "processes": (),
            "exec_seen": False,
            "log": SILENT,
        },
        evidence={"failed_command": "ExecStartPre=/bin/false (exit status 1)"},
        remedy="ExecStartPre=/bin/false (exit status 1)",
    ),
    Case("stopped-and-the-command-before-the-start-gave-up", "start_refused", 3.5,
         {"systemd": f.UnitState(active_state="failed", sub_state="failed", result="exit-code", invocation_id="new",
                                 failed_command="ExecStartPre=/bin/c (exit status 3)"),
          "exits": (f.Exit(BEGAN, 0, 3, "new", result="exit-code", stop_requested=True),), "processes": (), "exec_seen": False,
          "log": SILENT}, at_once=False, remedy="asked to stop before"),
    Case("systemd-has-forgotten-which-command-failed", "start_refused", 2,
         {"systemd": f.UnitState(active_state="failed", sub_state="failed", result="exit-code", invocation_id="new"),
          "exits": (f.Exit(BEGAN, 0, 0, "new", result="exit-code"),), "processes": (), "exec_seen": False, "log": SILENT},
         remedy="hand: an ExecStartPre= command failed"),
    Case("condition-command-broke", "start_refused", 2,
         {"systemd": f.UnitState(active_state="failed", sub_state="failed", result="exit-code", invocation_id="new",
                                 failed_command="ExecCondition=/bin/c (exit status 255)"),
          "exits": (f.Exit(BEGAN, 0, 255, "new", result="exit-code"),), "processes": (), "exec_seen": False, "log": SILENT},
         remedy="hand: ExecCondition=/bin/c (exit status 255)"),
    Case(
        "post-command-failed",
        "start_refused",
        2,
        died(15, systemd=down(15, f.KILLED, result="exit-code", failed_post_command="ExecStartPost=/bin/false (exit status 1)")),
        also=("killed_by_signal",),
        remedy="ExecStartPost=/bin/false (exit status 1)",
    ),
    # 3
    Case(
        "condition",
        "condition_skipped",
        1,
        {
            **NO_START,
            "systemd": f.UnitState(condition_result=False, condition_at=T0 + 0.2, failed_condition="ConditionPathExists=/data"),
        },
        evidence={"by": "ConditionResult", "condition": "ConditionPathExists=/data"},
        remedy="ConditionPathExists=/data",
    ),
    Case(
        "condition-of-a-collected-unit",
        "condition_skipped",
        1,
        {**NO_START, "systemd": f.UnitState(condition_result=False), "start": f.StartAnswer(0, "", "skipped")},
    ),
    Case(
        "assert",
        "condition_skipped",
        1,
        {**NO_START, "systemd": f.UnitState(assert_result=False, assert_at=T0 + 0.2)},
        evidence={"by": "AssertResult"},
    ),
    Case(
        "exec-condition",
        "condition_skipped",
        1,
        {
            "systemd": f.UnitState(invocation_id="new", result="exec-condition"),
            "exits": (f.Exit(BEGAN, 0, 0, "new", result="exec-condition"),),
            "exec_seen": False,
            "processes": (),
            "log": SILENT,
        },
        evidence={"by": "ExecCondition"},
    ),
    Case(
        "condition-in-the-journal",
        "condition_skipped",
        1,
        {**NO_START, "journal": ("training.service - x was skipped because of a failed condition check (ConditionPathExists=/d).",)},
        remedy="ConditionPathExists=/d",
    ),
    # 4
    Case(
        "incident-a",
        "launcher_self_killed",
        1,
        NO_START,
        {"launcher": {"script": 'pkill -9 -f "[t]rain.py" || true; nohup run.sh & pgrep -af train.py', "rc": 137}},
        evidence={"signal": "SIGKILL", "pattern": "[t]rain.py", "matched": "train.py"},
        remedy="systemctl stop",
    ),
    Case(
        "incident-b",
        "launcher_self_killed",
        1,
        NO_START,
        {"launcher": {"script": 'pkill -f monitor.py; echo "Launched"', "rc": 143, "end_mark": "Launched"}},
        evidence={"signal": "SIGTERM", "end_mark_missing": True},
    ),
    Case(
        "transport",
        "launcher_not_delivered",
        1,
        NO_START,
        {"launcher": {"script": "pkill -f monitor.py", "rc": 255, "output": "ssh: connect to host x: Connection refused"}},
        remedy="Connection refused",
    ),
    Case(
        "syntax",
        "launcher_syntax",
        1,
        NO_START,
        {"launcher": {"script": "for i in 1", "rc": 2, "output": "bash: line 2: syntax error: unexpected end of file"}},
        remedy="unexpected end of file",
    ),
    # diagnose
    Case(
        "pattern-matched-the-observer",
        "wrong_process",
        1,
        {**NO_START, "wrong_processes": ("pid 9, bash -lc pgrep: the observer's own shell",)},
        remedy="pid 9",
    ),
    Case("glob", "glob_unexpanded", 1, {**NO_START, "unexpanded": ("extract_gpu*.log",)}, remedy="extract_gpu*.log"),
    Case(
        "incident-b-with-its-glob",
        "launcher_self_killed",
        1,
        NO_START,
        {"launcher": {"script": "pkill -f monitor.py; python3 monitor.py", "rc": 143, "output": "wc: extract_gpu*.log: No such file"}},
        also=("glob_unexpanded",),
    ),
    # 5, 6
    Case("nothing-runs", "never_launched", 2, NO_START, baseline=replace(BEFORE, observed=True), at_once=False),
    Case("nothing-started", "never_launched", 10, NO_START, also=(), remedy="ct901", at_once=False),
    Case(
        "start-job-waits",
        "never_launched",
        70,
        {**NO_START, "systemd": f.UnitState(pending_job="start")},
        {"deadlines": {"total": 70}},
        remedy="list-jobs",
        at_once=False,
    ),
    Case(
        "old-run",
        "previous_run_alive",
        10,
        {**NO_START, "systemd": up(invocation_id="old"), "processes": (process(started_at=T0 - 50),)},
        baseline=replace(BEFORE, processes=(process(started_at=T0 - 50),)),
        remedy="pid 70",
        at_once=False,
    ),
    # 7
    Case(
        "loop",
        "crash_loop",
        2,
        {
            "systemd": down(1, n_restarts=1, active_state="activating", sub_state="auto-restart"),
            "exits": (f.Exit(BEGAN - 0.2, 1, 1, "first"), f.Exit(BEGAN + 1, 1, 1, "new")),
            "processes": (),
        },
        also=("exited_nonzero",),
        evidence={"restarts": 1, "deaths": 2, "gave_up": False},
    ),
    Case(
        "loop-that-empties-its-log",
        "crash_loop",
        2,
        {
            "systemd": down(1, n_restarts=1, active_state="activating", sub_state="auto-restart"),
            "exits": (f.Exit(BEGAN - 0.2, 1, 1, "first"), f.Exit(BEGAN + 1, 1, 1, "new")),
            "processes": (), "log": SILENT, "log_before": log(forbidden=(match("traceback", line="ValueError: no batch"),)),
        },
        also=("died_before_log",),
        remedy="ValueError: no batch",
    ),
    Case(
        "loop-alive-just-now",
        "crash_loop",
        2,
        {"systemd": up(n_restarts=3), "exits": (f.Exit(BEGAN, 1, 203, "third", result="exit-code"),), "exec_seen": False, "log": SILENT},
        evidence={"restarts": 3},
        remedy="/usr/bin/python3",
    ),
    Case(
        "gave-up",
        "crash_loop",
        2,
        died(1, systemd=down(1, n_restarts=4), exits=(f.Exit(BEGAN + 1, 1, 1, "new"),), log=SILENT),
        also=("died_before_log",),
        evidence={"gave_up": True, "restarts": 4},
    ),
    # 8
    *[
        Case(
            f"setup-{number}",
            "setup_failed",
            2,
            died(number, exec_seen=False, log=SILENT, working_directory="/srv/absent"),
            also=("died_before_log",),
            evidence={"number": number, "step": step},
            remedy={200: "/srv/absent", 203: "/usr/bin/python3", 209: LOG, 217: "dflash"}.get(number, UNIT),
        )
        for number, (step, _) in SETUP_CODES.items()
    ],
    Case(
        "spawn-failed-in-the-journal",
        "setup_failed",
        2,
        died(203, journal=("Failed at step EXEC spawning /x: No such file",)),
        also=("exited_nonzero",),
    ),
    Case("the-program-s-own-217", "died_before_log", 2,
         died(217, exec_seen=False, log=SILENT, exits=(f.Exit(BEGAN + 1, f.EXITED, 217, "new", setup_error=""),))),
    Case("the-program-s-own-203-in-a-loop", "crash_loop", 2, {"systemd": up(n_restarts=3), "exec_seen": False, "log": SILENT,
         "exits": (f.Exit(BEGAN, f.EXITED, 203, "third", result="exit-code", setup_error=""),)}, remedy="by hand"),
    Case("nobody-knows-whose-217", "setup_failed", 2, died(217, exec_seen=False, log=SILENT,
         exits=(f.Exit(BEGAN + 1, f.EXITED, 217, "new", setup_error=f.Unknown("there is no journalctl")),)), also=("died_before_log",)),
    Case("a-setup-that-failed-before-the-run-that-lives", "crash_loop", 2, {"systemd": up(n_restarts=3), "log": SILENT,
         "exits": (f.Exit(BEGAN, f.EXITED, 203, "third", result="exit-code", setup_error="Failed at step EXEC spawning /x"),)},
         remedy="exist and executable"),
    # 9
    Case(
        "stdout-on-a-full-disk",
        "log_unwritable",
        2,
        died(209, exec_seen=False, log=SILENT, log_place=f.LogPlace(LOG, "ENOSPC", 0, 10, "dflash", "/var")),
        also=("died_before_log",),
        remedy="/var",
    ),
    Case(
        "no-inodes-and-no-bytes",
        "log_unwritable",
        2,
        {"log": SILENT, "log_place": f.LogPlace(LOG, "", 4096, 0, "dflash", "/var")},
        evidence={"place": {"path": LOG, "error": "ENOSPC", "mount": "/var", "free_bytes": 4096, "free_inodes": 0}},
    ),
    Case(
        "died-without-a-byte-anywhere",
        "log_unwritable",
        2,
        died(1, log=SILENT, log_place=f.LogPlace(LOG, "EACCES", user="dflash")),
        also=("died_before_log",),
        remedy="dflash",
    ),
    Case("links-that-lead-to-each-other", "log_unwritable", 2,
         died(209, exec_seen=False, log=SILENT, log_place=f.LogPlace(LOG, "ELOOP", 4096, 10, "dflash", "/var")),
         also=("died_before_log",), remedy="remove the symbolic links"),
    Case(
        "disk-full-after-some-lines-and-died-of-it",
        "log_unwritable",
        2,
        died(1, log_place=f.LogPlace(LOG, "ENOSPC", 0, 10, "dflash", "/var")),
        also=("exited_nonzero",),
        remedy="/var",
    ),
    Case(
        "disk-full-and-progress-overdue",
        "log_unwritable",
        22,
        {"log": log(progress=progress()), "log_place": f.LogPlace(LOG, "EDQUOT", user="dflash", mount="/home")},
        {"progress": STEP},
        also=("stalled",),
        at_once=False,
        remedy="quota of dflash at /home",
    ),
    Case(
        "disk-full-and-another-cause-in-the-log",
        "crashed_traceback",
        2,
        died(1, log=log(forbidden=(match("traceback"),)), log_place=f.LogPlace(LOG, "ENOSPC", 0, 10)),
        also=("exited_nonzero",),
        remedy="CUDA out of memory",
    ),
    # 10
    Case(
        "oom-v1",
        "oom_killed",
        2,
        {"systemd": down(9, f.KILLED, memory_max=1 << 30), "processes": (), "oom_kills": 3, "oom_at": BEGAN + 1},
        baseline=replace(BEFORE, oom_kills=2),
        also=("killed_by_signal",),
        evidence={"oom_kills": 1, "memory_max": 1 << 30},
        remedy="MemoryMax=",
    ),
    Case(
        "oom-behind-a-wrapper", "oom_killed", 2, died(0, oom_kills=1, oom_at=BEGAN + 1), also=("exited_early",), evidence={"oom_kills": 1}
    ),
    Case("oom-v2", "oom_killed", 2, {"systemd": down(15, f.KILLED, result="oom-kill"), "processes": ()}, also=("killed_by_signal",)),
    Case("oom-victim-and-nothing-after", "oom_killed", 6, {"oom_kills": 1, "oom_at": T0 + 1}, at_once=False, evidence={"alive": True}),
    # 11
    Case(
        "never-ready",
        "start_timeout",
        2,
        {"systemd": down(15, f.KILLED, result="timeout", type="notify", timeout_start=1.0), "processes": ()},
        also=("killed_by_signal",),
        remedy="READY=1",
    ),
    Case("hangs-before-the-start", "start_timeout", 2,
         {"systemd": down(0, 0, result="timeout", type="notify", timeout_start=1.0, unfinished_command="ExecStartPre=/bin/sleep 600"),
          "exits": (f.Exit(BEGAN + 1, f.KILLED, 15, "new", result="timeout"),), "exec_seen": False, "processes": (), "log": SILENT},
         also=("killed_by_signal",), evidence={"hung_in": "ExecStartPre=/bin/sleep 600"},
         remedy="(Type=notify): ExecStartPre=/bin/sleep 600 did not finish"),
    Case("hangs-after-it-was-ready", "start_timeout", 2,
         {"systemd": down(15, f.KILLED, result="timeout", type="notify", timeout_start=1.0,
                          unfinished_command="ExecStartPost=/bin/sleep 600"), "processes": ()},
         also=("killed_by_signal",), remedy="(Type=notify): ExecStartPost=/bin/sleep 600 did not finish"),
    Case("never-on-the-bus", "start_timeout", 2,
         {"systemd": down(15, f.KILLED, result="timeout", type="dbus", timeout_start=1.0, bus_name="org.example.x"), "processes": ()},
         also=("killed_by_signal",), remedy="(Type=dbus): its BusName= (org.example.x) never came"),
    Case(
        "runtime-limit",
        "runtime_limit",
        2,
        {"systemd": down(15, f.KILLED, result="timeout", runtime_max=1.0), "processes": (), "was_active": True},
        also=("killed_by_signal",),
        remedy="RuntimeMaxSec= (1 s)",
    ),
    Case(
        "watchdog",
        "watchdog",
        2,
        {"systemd": down(6, f.DUMPED, result="watchdog", watchdog=0.9), "processes": ()},
        also=("core_dumped",),
        remedy="no keep-alive within 0.9 s",
    ),
    Case("watchdog-that-the-program-triggered", "watchdog", 2,
         {"systemd": down(6, f.DUMPED, result="watchdog", watchdog=60.0), "processes": ()}, also=("core_dumped",),
         evidence={"watchdog_s": 60.0, "lived_s": 1.0}, remedy="WATCHDOG=trigger"),
    # 12
    Case("killed", "killed_by_signal", 2, {"systemd": down(9, f.KILLED), "processes": ()}, evidence={"signal": "SIGKILL"}, remedy="pid 70"),
    Case("killed-and-certified-alone", "killed_by_signal", 2, {"systemd": f.UnitState(active_state="inactive"), "processes": (),
         "exits": (f.Exit(BEGAN + 1, f.KILLED, 9, "new", source="certificate"),)}, remedy=f"sent SIGKILL to {UNIT} ("),
    Case("stopped-in-a-command-before-the-start", "killed_by_signal", 4.5,
         {"systemd": f.UnitState(active_state="failed", sub_state="failed", result="signal", invocation_id="new",
                                 unfinished_command="ExecStartPre=/bin/sleep 20"),
          "exits": (f.Exit(BEGAN + 1, f.KILLED, 15, "new", result="signal", stop_requested=True),), "processes": (), "log": SILENT,
          "exec_seen": False}, at_once=False, remedy="asked to stop (SIGTERM) while ExecStartPre=/bin/sleep 20 ran"),
    Case("killed-in-a-command-before-the-start", "killed_by_signal", 2,
         {"systemd": f.UnitState(active_state="failed", sub_state="failed", result="signal", invocation_id="new",
                                 unfinished_command="ExecStartPre=/bin/sleep 20"),
          "exits": (f.Exit(BEGAN + 1, f.KILLED, 9, "new", result="signal"),), "processes": (), "log": SILENT, "exec_seen": False},
         remedy="who sent SIGKILL to training.service while ExecStartPre=/bin/sleep 20 ran"),
    Case("exit-137", "killed_by_signal", 2, died(137), also=("exited_nonzero",), evidence={"signal": "SIGKILL"}),
    Case(
        "hangup-is-success-to-systemd",
        "killed_by_signal",
        2,
        {"systemd": down(1, f.KILLED, active_state="inactive", sub_state="dead", result="success"), "processes": ()},
        evidence={"signal": "SIGHUP"},
    ),
    Case("core", "core_dumped", 2, {"systemd": down(11, f.DUMPED), "processes": ()}, remedy="coredumpctl info 70"),
    Case(
        "stopped-and-not-started-again",
        "killed_by_signal",
        4.5,
        {
            "systemd": down(15, f.KILLED, active_state="inactive", result="success"),
            "exits": (f.Exit(BEGAN + 1, f.KILLED, 15, "new", stop_requested=True),),
            "processes": (),
        },
        at_once=False,
        remedy="asked to stop",
    ),
    # 13
    Case(
        "traceback",
        "crashed_traceback",
        2,
        died(1, log=log(forbidden=(match("traceback", line="ValueError: bad shape"),))),
        also=("exited_nonzero",),
        remedy="ValueError: bad shape",
    ),
    Case(
        "traceback-and-the-exit-handler-says-done",
        "crashed_traceback",
        2,
        died(0, log=log(forbidden=(match("traceback", lines_after=1),), done=match("declared"))),
        {"done": DONE},
        also=("completed",),
    ),
    Case(
        "cuda-oom-after-the-last-step",
        "crashed_traceback",
        2,
        died(1, log=log(forbidden=(match(),), progress=progress())),
        {"progress": STEP},
        also=("exited_nonzero",),
    ),
    *(
        Case(
            f"exception-after-the-last-step-and-{lines}-lines-{said}",
            "crashed_traceback",
            2,
            died(
                status, log=log(forbidden=(match("traceback", lines_after=lines),), progress=progress(), done=done)
            ),
            {"progress": STEP, "done": DONE},
            also=also,
        )
        for said, status, lines, done, also in (
            ("exit-1", 1, 900, None, ("exited_nonzero",)),
            ("exit-0", 0, 900, None, ("exited_early",)),
            ("done-and-exit-1", 1, 900, match("declared"), ("exited_nonzero",)),
            ("done-and-exit-0", 0, WRAPPER_LINES, match("declared"), ("completed",)),
        )
    ),
    Case(
        "exception-long-before-a-failure-without-a-progress-pattern",
        "exited_nonzero",
        2,
        died(1, log=log(forbidden=(match("traceback", lines_after=SUMMARY_LINES + 1),))),
    ),
    # 14, 15
    Case("bin-false", "died_before_log", 2, died(1, log=SILENT), remedy="as dflash: /usr/bin/python3 train.py"),
    Case("errors-elsewhere", "died_before_log", 2,
         died(1, log=SILENT, errors_at="/var/log/x.err", errors_tail=("Traceback", "ValueError: seven is odd")),
         remedy="its errors go to /var/log/x.err, whose last line is 'ValueError: seven is odd': run it by hand",
         evidence={"errors": {"go_to": "/var/log/x.err", "tail": ["Traceback", "ValueError: seven is odd"]}}),
    Case("log-in-a-tmp-of-its-own", "died_before_log", 2, died(1, log=SILENT, own_tmp=True), remedy="(PrivateTmp=)"),
    Case("usage", "exited_nonzero", 2, died(2), remedy="ev=loading"),
    Case("exit-255-is-no-signal", "exited_nonzero", 2, died(255)),
    Case("collected-since", "exited_nonzero", 2, {"systemd": f.UnitState(), "exits": (f.Exit(BEGAN + 1, 1, 3, "new"),), "processes": ()}),
    Case(
        "restart-comes-too-late-to-wait-for",
        "exited_nonzero",
        2,
        died(1, systemd=down(1, active_state="activating", sub_state="auto-restart", restart_sec=60.0)),
    ),
    # 16, 17
    Case("completed", "completed", 2, died(0, log=log(done=match("declared"))), {"done": DONE}, remedy=""),
    Case(
        "completed-oneshot-that-remains",
        "completed",
        2,
        died(0, systemd=down(0, active_state="active", sub_state="exited", type="oneshot"), log=log(done=match("declared"))),
        {"done": DONE},
        remedy="",
    ),
    Case("exited-early", "exited_early", 2, died(0), {"done": DONE}, remedy="ev=exit code=0"),
    Case("daemonised", "exited_early", 2, died(0, processes=(process(71),)), remedy="pid 71"),
    Case("required-line-missing-at-the-end", "inconclusive", 2, died(0, log=log(done=match("declared"), required={"saved": None})),
         {"done": DONE, "log": {"required": ["saved"]}}, remedy="saved"),
    # 18
    Case(
        "worker-zombie",
        "worker_gone",
        10.5,
        {"processes": (process(), process(71, state="Z"))},
        {"process": {"count": 2}},
        at_once=False,
        evidence={"live": 1, "zombies": 1},
    ),
    Case(
        "stale-pid-file",
        "worker_gone",
        10.5,
        {"systemd": up(type="forking", pid_file="/run/x.pid"), "processes": (process(started_at=T0 - 90),)},
        at_once=False,
        remedy="remove /run/x.pid",
    ),
    # 19
    Case(
        "restarted-once",
        "restarted_in_window",
        5.5,
        {"systemd": up(n_restarts=1), "exits": (f.Exit(BEGAN - 0.1, 1, 7, "first"),)},
        at_once=False,
        evidence={"previous_exit": "exit status 7"},
    ),
    Case(
        "restarted-once-after-a-traceback",
        "restarted_in_window",
        5.5,
        {"systemd": up(n_restarts=1), "exits": (f.Exit(BEGAN - 0.1, 1, 1, "first"),),
         "log": log(progress=progress()), "log_before": log(forbidden=(match("traceback", line="ValueError: no batch"),))},
        {"progress": STEP},
        at_once=False,
        remedy="ValueError: no batch",
    ),
    # 20
    Case(
        "state-d-and-silent",
        "uninterruptible",
        60.5,
        {"uninterruptible_since": BEGAN + 1, "processes": (process(state="D"),), "log": SILENT},
        also=("silent",),
        at_once=False,
        remedy="pid 70",
    ),
    Case(
        "state-d-and-no-step",
        "uninterruptible",
        22,
        {"uninterruptible_since": BEGAN + 3, "processes": (process(state="D"),), "log": log(progress=progress())},
        {"progress": STEP},
        also=("stalled",),
        at_once=False,
    ),
    # 21
    Case(
        "shard-missing",
        "count_mismatch",
        10.5,
        {"instances_declared": ("x@0.service", "x@1.service"), "instances_found": ("x@0.service",)},
        at_once=False,
        remedy="x@1.service",
    ),
    Case(
        "log-of-a-shard-missing",
        "count_mismatch",
        60.5,
        {"log": log(files=("/l/0.log",))},
        {"log": {"path": "/l/*.log", "count": 2}},
        at_once=False,
        evidence={"found": ["/l/0.log"], "declared": 2},
    ),
    # 22
    Case("cuda-oom-alive", "error_but_alive", 7.5, {"log": log(forbidden=(match(),))}, at_once=False, remedy="CUDA out of memory"),
    Case("declared-forbidden-alive", "error_but_alive", 2.5, {"log": log(forbidden=(match("declared"),))}, {"log": {"forbidden": ["x"]}}),
    Case(
        "exception-and-no-step-after",
        "error_but_alive",
        22,
        {"log": log(forbidden=(match("traceback"),), progress=progress())},
        {"progress": STEP},
        also=("stalled",),
        at_once=False,
    ),
    Case("exception-ends-the-log", "error_but_alive", 62.5, {"log": log(forbidden=(match("traceback"),))}, at_once=False),
    # 23
    Case(
        "output-to-null",
        "log_misrouted",
        60.5,
        {"log": SILENT, "processes": (process(has_log=False, outputs=("/dev/null",)),)},
        also=("silent",),
        at_once=False,
        remedy="/dev/null",
    ),
    Case(
        "output-to-a-deleted-log",
        "log_misrouted",
        60.5,
        {"log": log(changed="deleted"), "processes": (process(has_log=True, outputs=(f"{LOG} (deleted)",)),)},
        at_once=False,
        evidence={"goes_to": [f"{LOG} (deleted)"]},
        remedy=f"deleted {LOG}",
    ),
    Case(
        "log-of-a-mount-of-its-own",
        "log_misrouted",
        60.5,
        {"log": SILENT, "processes": (process(has_log=False, outputs=(LOG,)),)},
        also=("silent",),
        at_once=False,
        remedy="PrivateTmp=",
    ),
    Case("a-fifo-that-somebody-reads", "log_misrouted", 60.5,
         {"log": replace(SILENT, exists=False, kind="fifo"), "processes": (process(has_log=False, outputs=(LOG,)),)},
         also=("silent",), at_once=False, evidence={"log": {"path": LOG, "exists": True, "new_bytes": 0, "kind": "fifo"}},
         remedy=f"{LOG} is a fifo"),
    # 24
    Case(
        "old-lines",
        "stale_log",
        60.5,
        {"log": replace(SILENT, old_match=match("declared", line="ev=step step=77"))},
        also=("silent",),
        at_once=False,
        remedy="step=77",
    ),
    # 25
    Case(
        "buffered",
        "silent",
        60.5,
        {"log": SILENT, "activity": f.Activity(5.0, 4.9)},
        at_once=False,
        evidence={"detail": "buffered"},
        remedy="PYTHONUNBUFFERED=1",
    ),
    Case(
        "buffered-and-short-of-cpu",
        "silent",
        60.5,
        {"log": SILENT, "activity": f.Activity(5.0, 0.1, 0), "processes": (process(state="R"),)},
        at_once=False,
        evidence={"detail": "buffered"},
        remedy="PYTHONUNBUFFERED=1",
    ),
    Case(
        "idle", "silent", 60.5, {"log": SILENT, "activity": f.Activity(5.0, 0.0, 0)}, at_once=False, evidence={"detail": "idle"}, remedy="hangs"
    ),
    # 26
    Case(
        "wrong-gpu",
        "gpu_not_engaged",
        900.5,
        {"gpu": f.Gpu("none", "wrong_gpu", ("GPU-a",), ("GPU-b",), {"GPU-b": 1 << 30})},
        {"gpu": {"level": "proved"}},
        at_once=False,
        evidence={"detail": "wrong_gpu"},
        remedy="GPU-b",
    ),
    Case(
        "memory-below-the-floor",
        "gpu_not_engaged",
        30.5,
        {"gpu": f.Gpu("proved", "", ("GPU-a",), ("GPU-a",), {"GPU-a": 10})},
        {"gpu": {"within": 30}},
        at_once=False,
        evidence={"detail": "context_without_memory"},
    ),
    # 27
    Case("loading-for-ever", "no_progress_yet", 900.5, {}, {"progress": STEP}, at_once=False, remedy="step="),
    Case("step-on-a-line-too-long", "no_progress_yet", 900.5, {"log": log(cut_at=65536)}, {"progress": {"json_field": "step"}},
         at_once=False, remedy="lines of more than 64 KiB", evidence={"lines_cut_at": 65536}),
    Case("long-lines-and-a-pattern", "no_progress_yet", 900.5, {"log": log(cut_at=65536)}, {"progress": STEP}, at_once=False,
         remedy="correct the pattern"),
    # 28
    Case(
        "stands",
        "stalled",
        22,
        {"log": log(progress=progress()), "gpu": f.Gpu("proved", utilisation=99.0)},
        {"progress": STEP},
        at_once=False,
        evidence={"detail": "gpu_spinning"},
        remedy="collective",
    ),
    Case(
        "slow-job-has-its-own-pace",
        "stalled",
        602,
        {"log": log(progress=progress(median_gap=60.0))},
        {"progress": STEP},
        at_once=False,
        evidence={"stall_after_s": 600.0},
    ),
    Case(
        "one-rank-of-two-never-steps",
        "no_progress_yet",
        900.5,
        {"log": log(ranks=("0",))},
        {"progress": RANKS},
        evidence={"ranks": ["0"]},
        remedy="no progress of 1 of 2 ranks (rank 0 has one)",
        at_once=False,
    ),
    Case(
        "one-rank-of-two-stands",
        "stalled",
        22,
        {"log": log(ranks=("0", "1"), progress=progress(rank="1", ranks={"0": 5.0, "1": 4.0}))},
        {"progress": RANKS},
        remedy="Rank 1 of training.service has stood at 4",
        at_once=False,
    ),
    Case("first-value-only", "stalled", 22, {"log": log(progress=progress(0))}, {"progress": STEP}, at_once=False),
    # 29
    Case(
        "no-uploads",
        "uploads_stalled",
        16.5,  # 15 s after the first progress
        {"log": log(progress=progress()), "objects": f.Objects("s3://b/p", 5)},
        {"progress": STEP, "objects": {"uri": "s3://b/p", "within": 15}},
        replace(BEFORE, objects=5),
        at_once=False,
        remedy="s3://b/p",
    ),
    # 30
    Case(
        "required-line-never-came",
        "inconclusive",
        30,
        {"log": log(required={"ready": None})},
        {"log": {"required": ["ready"]}, "deadlines": {"total": 30}},
        at_once=False,
        remedy="ready",
    ),
    Case("still-activating", "inconclusive", 30, {"systemd": up(active_state="activating", sub_state="start", type="notify"),
         "log": log(progress=progress(changed_at=T0 + 25))}, {"progress": STEP, "deadlines": {"total": 30}}, at_once=False),
    Case("nobody-saw-how-it-ended", "inconclusive", 10.5, {"systemd": f.UnitState(), "processes": ()}, at_once=False),
    # 31
    Case("started", "ok_started", 5.5, at_once=False, remedy=""),
    Case("progressing", "ok_progressing", 5.5, {"log": log(progress=progress())}, {"progress": STEP}, at_once=False, remedy=""),
    Case("a-oneshot-may-be-activating", "ok_started", 5.5, {"systemd": up(active_state="activating", sub_state="start", type="oneshot")},
         at_once=False, remedy=""),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_row(case: Case) -> None:
    if not case.at_once:
        early = case.decide(case.at - 0.01)
        # What stalls later was well before.
        assert isinstance(early, f.Wait) or early.ok, early
        if isinstance(early, f.Wait):
            assert early.missing and T0 + case.at - 0.01 < early.deadline <= T0 + case.at + 0.001
    verdict = case.decide(case.at)
    assert isinstance(verdict, f.Verdict), verdict
    assert verdict.code == case.code, verdict
    assert verdict.also_observed == case.also
    assert verdict.ok is (case.code in ("completed", "ok_started", "ok_progressing"))
    assert case.remedy in verdict.remedy and bool(verdict.remedy) is not verdict.ok
    assert {key: verdict.evidence[key] for key in case.evidence} == case.evidence
    # Plain data, and a sentence that names the unit and the code.
    assert json.loads(json.dumps(row(verdict))) == row(verdict)
    assert UNIT in sentence(row(verdict)) and f"[{case.code}]" in sentence(row(verdict))


def test_every_code_has_a_case_and_words() -> None:
    codes = {code for item in TABLE for code in item.codes}
    assert {case.code for case in CASES} == codes
    assert set(WORDS) == codes | {code for item in OUTSIDE for code in item.codes}


@pytest.mark.parametrize("gone", range(len(TABLE)), ids=lambda number: TABLE[number].codes[0])
def test_no_row_can_be_deleted(gone: int) -> None:
    table = TABLE[:gone] + TABLE[gone + 1 :]
    wrong = [case.name for case in CASES if getattr(case.decide(case.at, table), "code", None) != case.code]
    assert wrong


# --- jobs that are well and look ill, none of which may ever be called sick before a declared deadline

HEALTHY = [
    Case("silent-loading", "", 59, {"log": SILENT, "activity": f.Activity(5.0, 5.0)}),
    Case("silent-loading-longer-deadline", "", 290, {"log": SILENT}, {"deadlines": {"first_log": 300}}),
    Case("no-step-for-minutes", "", 890, {}, {"progress": STEP}),
    Case("state-d-while-loading", "", 890, {"uninterruptible_since": BEGAN, "processes": (process(state="D"),)}, {"progress": STEP}),
    Case("operator-restarts", "", 3, {
        "systemd": up(active_state="inactive", sub_state="dead", main_pid=0, exec_main_code=f.KILLED, exec_main_status=15,
                      pending_job="restart"),
        "exits": (f.Exit(T0 + 2, f.KILLED, 15, "new", stop_requested=True),), "processes": ()}),
    Case("operator-restarts-on-a-busy-machine", "", 30, {
        "systemd": down(15, f.KILLED, at=T0 + 2, active_state="inactive", result="success", pending_job="start"), "processes": (),
        "exits": (f.Exit(T0 + 2, f.KILLED, 15, "new", stop_requested=True),)}),
    Case("operator-restarts-and-the-stop-takes-long", "", 30, {
        "systemd": down(15, f.KILLED, at=T0 + 2, active_state="deactivating", sub_state="stop-post", result="success"),
        "processes": (), "exits": (f.Exit(T0 + 2, f.KILLED, 15, "new", stop_requested=True),)}),
    Case("operator-restarts-and-the-job-is-not-seen-yet", "", 2.4, {
        "systemd": down(15, f.KILLED, at=T0 + 2, active_state="inactive", result="success"), "processes": ()}),
    Case("stopping-with-a-restart-to-come", "", 3, died(1, systemd=down(1, active_state="deactivating", restart="on-failure"))),
    Case("first-restart-is-counted-already", "", 3,
         died(1, systemd=down(1, active_state="activating", sub_state="auto-restart", n_restarts=1),
              exits=(f.Exit(BEGAN + 1, 1, 1, "new"),))),
    Case("auto-restart-to-come", "", 3, died(1, systemd=down(1, active_state="activating", sub_state="auto-restart"))),
    Case("not-asked-since-the-start", "", 3,
         died(1, systemd=down(1, active_state="activating", sub_state="start-pre", restart="on-failure"))),
    Case("next-round-prepares", "", 9,
         died(1, systemd=down(1, active_state="activating", sub_state="start-pre", n_restarts=1, pending_job="start"))),
    Case("exception-handled-while-loading", "", 60, {"log": log(forbidden=(match("traceback"),))}, {"progress": STEP}),
    Case("exception-survived", "ok_progressing", 6, {"log": log(forbidden=(match("traceback", offset=10),), progress=progress())},
         {"progress": STEP}),
    Case("exception-survived-without-a-pattern", "ok_started", 6, {"log": log(forbidden=(match("traceback", lines_after=40),))}),
    Case("cuda-oom-survived", "ok_progressing", 6, {"log": log(forbidden=(match(offset=10),), progress=progress())}, {"progress": STEP}),
    Case("cuda-oom-just-now", "", 6, {"log": log(forbidden=(match(at=T0 + 3),))}),
    Case("handled-exception-and-done", "completed", 3, died(0, log=log(forbidden=(match("traceback", lines_after=60),), done=match())),
         {"done": DONE}),
    Case("exception-handled-after-the-last-step-and-done", "completed", 3,
         died(0, log=log(forbidden=(match("traceback", lines_after=WRAPPER_LINES + 1),), progress=progress(), done=match())),
         {"progress": STEP, "done": DONE}),
    Case("exception-long-before-the-last-step-and-done", "completed", 3,
         died(0, log=log(forbidden=(match("traceback", offset=10),), progress=progress(), done=match())), {"progress": STEP, "done": DONE}),
    Case("resumed-below", "ok_progressing", 6, {"log": log(progress=progress(first=900.0, last=100.0))}, {"progress": STEP}),
    Case("oom-victim-survived", "ok_progressing", 20, {"oom_kills": 1, "oom_at": BEGAN + 1, "log": log(progress=progress())},
         {"progress": STEP}),
    Case("log-open-already", "", 5, {"log": SILENT, "processes": (process(has_log=True),),
                                     "log_place": f.LogPlace(LOG, "EACCES", user="dflash")}),
    Case("deleted-and-made-anew-by-the-job", "ok_started", 61, {"log": log(changed="deleted"),
                                                                "processes": (process(has_log=True, outputs=(LOG,)),)}),
    Case("stale-pid-file-and-the-program-lives", "ok_started", 11, {
        "systemd": up(type="forking", pid_file="/run/x.pid"), "processes": (process(started_at=T0 - 90), process(71))}),
    Case("restarted-after-it-ran-out-of-memory", "", 5, {
        "systemd": up(n_restarts=1), "exits": (f.Exit(BEGAN - 1, f.KILLED, 9, "first"),), "oom_kills": 1, "oom_at": BEGAN - 1}),
    Case("own-file-handler", "ok_started", 61, {"processes": (process(has_log=False, outputs=("/dev/null",)),)}),
    Case("exec-of-a-program-that-exits-with-203", "exited_nonzero", 3, died(203)),
    Case("main-process-gone-from-proc-before-systemd-says-so", "", 6, {"processes": ()}),
    Case("main-process-is-a-zombie-that-systemd-has-not-reaped", "", 6, {"processes": (process(state="Z"),)}),
    Case("processes-cannot-be-read", "ok_started", 6, {"processes": f.Unknown("EACCES")}),
    Case("forking-server-without-a-known-main", "ok_started", 6, {"systemd": up(main_pid=0)}),
    Case("job-without-gpu", "ok_started", 6, {"gpu": None}, {"gpu": {"level": "proved"}}),
    Case("mute-job", "ok_started", 6, {"log": SILENT}, {"log": {"fresh": False}}),
    Case("transient-unit-forgotten", "completed", 3, {"systemd": f.UnitState(load_state="not-found"), "processes": (),
         "exits": (f.Exit(BEGAN + 1, 1, 0, "new"),), "log": log(done=match())}, {"done": DONE}),
    Case("restarts-of-before", "ok_started", 6, {"systemd": up(n_restarts=4)}, baseline=replace(BEFORE, n_restarts=4)),
    Case("stop-zeroed-the-count", "ok_started", 6, {"systemd": up(n_restarts=0)}, baseline=replace(BEFORE, n_restarts=4)),
    Case("failed-before", "", 3, {**NO_START, "systemd": down(1, at=T0 - 5, invocation_id="old", exec_main_started_at=T0 - 9)}),
    Case("exec-main-of-the-run-before", "", 3, {
        "systemd": f.UnitState(active_state="activating", sub_state="start-pre", invocation_id="new", exec_main_code=1,
                               exec_main_status=1, exec_main_started_at=T0 - 9, exec_main_exited_at=T0 - 5), "processes": ()}),
    Case("observed", "ok_started", 1, {"run_id": "old", "run_started_at": T0 - 500, "processes": (process(started_at=T0 - 500),)},
         baseline=replace(BEFORE, observed=True)),
]  # fmt: skip


@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_healthy(case: Case) -> None:
    answer = case.decide(case.at)
    assert getattr(answer, "code", "") == case.code, answer


def test_cause_of_a_crash_loop_is_nested() -> None:
    loop = next(case for case in CASES if case.name == "loop-alive-just-now").decide(3)
    assert loop.evidence["cause"]["code"] == "setup_failed" and loop.evidence["cause"]["number"] == 203
    traceback = log(forbidden=(match("traceback", line="KeyError: 'x'"),))
    facts = replace(CASES[0].look(), systemd=up(n_restarts=2), exits=(f.Exit(BEGAN, 1, 1, "second"),), log=traceback)
    verdict = decide(BEFORE, facts, validate({}), T0 + 3)
    assert verdict.evidence["cause"]["code"] == "crashed_traceback" and "KeyError" in verdict.remedy


def test_objects_of_before_are_not_new_ones() -> None:
    for before in (f.NOT_READ, 9):
        case = Case(
            "", "", 0, {"objects": f.Objects("/o", 9)}, {"objects": {"path": "/o"}}, replace(BEFORE, objects=before)
        )
        answer = case.decide(30)
        assert isinstance(answer, f.Wait) and answer.stage == "objects"


def test_no_success_while_activating() -> None:
    case = Case("", "", 0, {"systemd": up(active_state="activating", sub_state="start", type="notify")})
    answer = case.decide(30)
    assert isinstance(answer, f.Wait) and answer.stage == "starting"


@pytest.mark.parametrize(
    ("facts", "spec", "stage"),
    [
        (NO_START, {}, "starting"),
        ({"log": SILENT}, {}, "first_log"),
        ({"log": log(required={"x": None})}, {"log": {"required": ["x"]}}, "required"),
        ({}, {"progress": STEP}, "first_progress"),
        ({"log": log(progress=progress(0))}, {"progress": STEP}, "progress"),
        ({"gpu": f.NOT_READ}, {"gpu": {}}, "gpu"),
        ({"heartbeat": f.Heartbeat("/h", 900.0)}, {"heartbeat": {"path": "/h"}}, "heartbeat"),
        ({"objects": f.Objects("/o", 0)}, {"objects": {"path": "/o"}}, "objects"),
        ({}, {}, "stable"),
    ],
)
def test_stages(facts: dict[str, Any], spec: dict[str, Any], stage: str) -> None:
    answer = Case("", "", 0, facts, spec).decide(3)
    assert isinstance(answer, f.Wait) and answer.stage == stage, answer
    assert answer.missing and answer.deadline > T0 + 3 and answer.stage_deadline >= answer.stage_began


@pytest.mark.parametrize("facts", [{}, died(1)], ids=["alive", "dead"])
def test_a_heartbeats_telemetry_stands_beside_the_verdict(facts: dict[str, Any]) -> None:
    def evidence(beat: Any) -> Any:
        verdict = Case("", "", 0, {**facts, "heartbeat": beat}, {"heartbeat": {"path": "/h"}}).decide(20)
        assert isinstance(verdict, f.Verdict)
        return verdict.evidence

    said = "off: NVML: the library was not found"
    assert evidence(f.Heartbeat("/h", 1.0, said))["telemetry"] == said
    assert "telemetry" not in evidence(f.Heartbeat("/h", 1.0))


# --- for all facts

times = st.sampled_from([T0 - 20, T0, BEGAN, T0 + 1, T0 + 3, T0 + 30, T0 + 70, T0 + 900])
whys = st.builds(f.Unknown, st.just("EACCES")) | st.just(f.NOT_READ)
numbers = st.sampled_from([0, 1, 2, 9, 15, 127, 137, 143, 200, 203, 209, 226, 255])
unit_states = st.builds(
    f.UnitState,
    load_state=st.sampled_from(["loaded"] * 6 + ["not-found", "bad-setting", "masked", "error"]),
    active_state=st.sampled_from(["active", "inactive", "failed", "activating", "deactivating", "reloading"]),
    sub_state=st.sampled_from(["running", "dead", "failed", "auto-restart", "start-pre", "exited", "stop-sigterm"]),
    result=st.sampled_from(["success", "exit-code", "signal", "timeout", "watchdog", "oom-kill", "resources", "exec-condition",
                            "start-limit-hit", "core-dump"]),
    type=st.sampled_from(["exec", "simple", "notify", "oneshot", "forking"]),
    invocation_id=st.sampled_from(["", "old", "new"]),
    main_pid=st.sampled_from([0, 70]),
    exec_main_code=st.sampled_from([0, 1, 2, 3]),
    exec_main_status=numbers,
    exec_main_started_at=times,
    exec_main_exited_at=times,
    n_restarts=st.integers(0, 3),
    condition_result=st.booleans(),
    condition_at=times,
    pending_job=st.sampled_from(["", "", "start", "stop", "restart"]),
    restart=st.sampled_from(["no", "on-failure", "always"]),
    restart_sec=st.sampled_from([0.1, 60.0]),
    runtime_max=st.none() | st.just(1.0),
)  # fmt: skip
matches = st.builds(
    f.Match, st.just("p"), st.just("a line"), st.integers(0, 100), times, st.sampled_from(["declared", "default", "traceback"]),
    st.integers(0, 300),
)  # fmt: skip
progresses = st.builds(
    f.Progress, st.just(1.0), st.just(9.0) | st.just("epoch"), st.integers(0, 3), times, times, st.integers(0, 100),
    st.none() | st.sampled_from([0.0, 1.0, 100.0]),
)  # fmt: skip
logs = st.builds(
    f.Log,
    st.just(LOG),
    exists=st.booleans(),
    new_bytes=st.sampled_from([0, 100]),
    required=st.fixed_dictionaries({"ready": st.none() | matches}),
    forbidden=st.lists(matches, max_size=2).map(tuple),
    done=st.none() | matches,
    progress=st.none() | progresses,
    tail=st.just(("a", "b")),
    old_match=st.none() | matches,
    files=st.just(("/l/0.log",)),
)
processes = st.lists(
    st.builds(
        f.Process, st.sampled_from([70, 71, 72]), times, st.sampled_from("SDZR"), st.booleans(), has_log=st.booleans() | whys,
        outputs=st.just(("/dev/null",)) | whys,
    ),
    max_size=3,
).map(tuple)  # fmt: skip
exits = st.lists(
    st.builds(f.Exit, times, st.sampled_from([0, 1, 2, 3]), numbers, st.sampled_from(["", "old", "new"]), st.just(70),
              st.sampled_from(["", "success", "timeout", "oom-kill", "exec-condition"]), stop_requested=st.booleans()),
    max_size=3,
).map(tuple)  # fmt: skip
looks = st.builds(
    f.Facts,
    st.just(UNIT),
    st.just(T0 + 1),
    systemd=unit_states | whys,
    start=whys | st.builds(f.StartAnswer, st.none() | st.integers(0, 4), st.sampled_from(["", "Failed to start x"]),
                           st.sampled_from(["", "done", "dependency", "skipped", "failed"])),
    run_id=st.none() | st.sampled_from(["old", "new"]),
    run_started_at=st.none() | times,
    exec_seen=st.booleans(),
    exits=exits,
    restarts_seen=st.integers(0, 2),
    processes=processes | whys,
    strays=processes | whys,
    uninterruptible_since=st.none() | times,
    activity=whys | st.builds(f.Activity, st.just(5.0), st.sampled_from([0.0, 4.0]), st.sampled_from([0, 9]) | whys),
    log=logs | whys,
    log_before=st.none() | logs | whys,
    log_place=whys | st.builds(f.LogPlace, st.just(LOG), st.sampled_from(["", "ENOSPC", "EACCES", "ENOENT"])),
    oom_kills=st.integers(0, 1) | whys,
    oom_at=st.none() | times,
    was_active=st.booleans(),
    instances_declared=st.just(()) | st.just(("a", "b")),
    instances_found=st.just(("a",)),
    gpu=st.none() | whys | st.builds(f.Gpu, st.sampled_from(["none", "consistent", "proved"]), st.sampled_from(["", "no_device"])),
    objects=st.none() | whys | st.builds(f.Objects, st.just("/o"), st.integers(0, 2)),
    heartbeat=st.none() | whys | st.builds(
        f.Heartbeat, st.just("/h"), st.none() | st.sampled_from([1.0, 900.0]), st.none() | st.just("nvml")
    ),
    journal=whys | st.just(("Failed at step EXEC spawning /x",)),
)  # fmt: skip
baselines = st.builds(
    f.Baseline, st.just(T0), st.booleans(), st.just("old") | st.just("") | whys, st.integers(0, 2) | whys, processes=processes | whys,
    oom_kills=st.just(0) | whys, objects=st.none() | st.just(0) | whys,
)  # fmt: skip
specs = st.fixed_dictionaries(
    {},
    optional={
        "process": st.just({"count": 2}),
        "log": st.sampled_from([{"required": ["ready"]}, {"fresh": False}, {"path": "/l/*.log", "count": 2}]),
        "progress": st.just(STEP),
        "gpu": st.just({"level": "proved"}),
        "objects": st.just({"path": "/o"}),
        "heartbeat": st.just({"path": "/h"}),
        "done": st.just(DONE),
        "launcher": st.just({"script": "pkill -f x; x", "rc": 143}),
    },
).map(validate)
BY_TIME = (
    "stalled",
    "uninterruptible",
    "error_but_alive",
    "uploads_stalled",
    "gpu_not_engaged",
    "count_mismatch",
    "worker_gone",
)


@settings(max_examples=200, deadline=None)
@given(baselines, looks, specs)
def test_total_deterministic_and_monotone(baseline: f.Baseline, facts: f.Facts, spec: Any) -> None:
    now, seen = T0 + 1, None
    for _ in range(60):
        answer = decide(baseline, facts, spec, now)
        assert answer == decide(baseline, facts, spec, now)
        if isinstance(answer, f.Wait):
            # Time takes no verdict back, and a wait always says until when.
            assert seen is None
            assert now < answer.deadline < float("inf")
            assert answer.missing
            now = answer.deadline
            continue
        assert answer.code in WORDS
        json.dumps(row(answer), allow_nan=False)
        assert sentence(row(answer))
        if seen is not None:
            assert not answer.ok or seen.ok
            if not seen.ok:
                # A row that comes first in the table and waited longer may overtake; a failure stays one.
                order = [code for item in TABLE for code in item.codes]
                assert order.index(answer.code) <= order.index(seen.code)
        if now > T0 + 20000:
            return
        seen, now = answer, now * 1.01 + 5
    assert seen is not None, "no verdict in 60 waits"


@settings(max_examples=50, deadline=None)
@given(baselines, looks)
def test_facts_read_back_from_json_are_the_same(baseline: f.Baseline, facts: f.Facts) -> None:
    for value in (baseline, facts):
        assert f.from_data(json.loads(json.dumps(f.as_data(value)))) == value


@settings(max_examples=100, deadline=None)
@given(looks, specs)
def test_success_needs_a_new_run_and_fresh_bytes(facts: f.Facts, spec: Any) -> None:
    answer = decide(BEFORE, facts, spec, T0 + 40)
    if isinstance(answer, f.Verdict) and answer.ok:
        assert facts.run_id == "new"
        assert not spec.log.fresh or facts.log.new_bytes > 0 or answer.code == "completed"
        assert all(facts.log.required[pattern] for pattern in spec.log.required)
