# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What systemctl prints, as captured from systemd 252, turned into facts."""

from __future__ import annotations

import subprocess

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import systemd

SHOW = """\
Type=exec
Restart=on-failure
NotifyAccess=none
RestartUSec=100ms
TimeoutStartUSec=1min 30s
RuntimeMaxUSec=1h
WatchdogUSec=infinity
MainPID=0
Result=exit-code
NRestarts=2
ExecMainStartTimestampMonotonic=1000000
ExecMainExitTimestampMonotonic=1500000
ExecMainPID=77
ExecMainCode=1
ExecMainStatus=3
ExecStartPre={ path=/bin/a ; argv[]=/bin/a x ; ignore_errors=no ; pid=5 ; code=exited ; status=0 }
ExecStartPre={ path=/bin/b ; argv[]=/bin/b ; ignore_errors=no ; pid=6 ; code=exited ; status=200 }
ExecStart={ path=/bin/sh ; argv[]=/bin/sh -c echo a=b; exit 3 ; ignore_errors=no ; start_time=[n/a] ; pid=77 ; code=exited ; status=3 }
ControlGroup=/system.slice/a.service
MemoryMax=104857600
Id=a.service
LoadState=loaded
ActiveState=failed
SubState=failed
ConditionResult=yes
ConditionTimestampMonotonic=900000
InvocationID=9f226d5633a648729523155d5d07a4fc
Job=

LoadState=not-found
ActiveState=inactive
SubState=dead
LoadError=org.freedesktop.systemd1.NoSuchUnit "Unit b.service not found."
MemoryMax=infinity
Job=12
"""


def test_show_of_two_units():
    first, second = systemd.parse_show(SHOW)
    state = systemd.unit_state(first, offset=10.0)
    assert (state.active_state, state.result, state.n_restarts) == ("failed", "exit-code", 2)
    assert (state.exec_main_pid, state.exec_main_code, state.exec_main_status) == (77, 1, 3)
    assert (state.exec_main_started_at, state.exec_main_exited_at) == (11.0, 11.5), (
        "CLOCK_MONOTONIC moved to CLOCK_BOOTTIME"
    )
    assert (state.timeout_start, state.runtime_max, state.watchdog, state.restart_sec) == (90.0, 3600.0, None, 0.1)
    assert state.memory_max == 104857600
    assert systemd.command(first) == ("/bin/sh", "-c", "echo", "a=b;", "exit", "3")
    assert systemd.failed_command(first) == "/bin/b (exit status 200)"
    state = systemd.unit_state(second, offset=0.0)
    assert (state.load_state, state.load_error) == ("not-found", "Unit b.service not found.")
    assert (state.memory_max, state.pending_job, state.condition_at) == (None, "pending", 0.0)


def test_the_end_of_a_parent_that_left_no_main_process():
    words = "{ path=/bin/d ; argv[]=/bin/d ; ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; pid=7 ; code=%s }"
    assert systemd.parent_end({"ExecStart": words % "exited ; status=3"}) == (1, 3)
    assert systemd.parent_end({"ExecStart": words % "killed ; status=9/KILL"}) == (2, 9)
    assert systemd.parent_end({"ExecStart": words % "(null) ; status=0/0"}) == (0, 0)


def test_a_post_command_that_failed():
    words = "{ path=/bin/%s ; argv[]=/bin/%s x ; ignore_errors=no ; pid=7 ; code=exited ; status=%d }"
    assert systemd.failed_post_command({"ExecStartPost": words % ("a", "a", 0)}) == ""
    assert systemd.failed_post_command({"ExecStartPost": words % ("a", "a", 2)}) == "/bin/a x (exit status 2)"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("infinity", None), ("", None), ("0", 0.0), ("5s", 5.0), ("1min 30s", 90.0), ("1d 2h", 93600.0),
        ("1.500s", 1.5), ("250us", 0.00025), ("1w 3parsec", None),
    ],
)  # fmt: skip
def test_time_spans(text, value):
    assert systemd.seconds(text) == pytest.approx(value) if value else systemd.seconds(text) == value


@pytest.mark.parametrize(
    ("unit", "target"),
    [
        ("shard@1.service", "shard.target"),
        ("training.service", None),
        ("a-b@x-1.service", "a-b.target"),
        ("x@.service", None),
    ],
)
def test_the_target_of_an_instance(unit, target):
    assert systemd.target_of(unit) == target


def test_the_last_output_of_the_units_files_counts(tmp_path):
    unit, drop_in = tmp_path / "a@.service", tmp_path / "a b.conf"
    unit.write_text("[Service]\nStandardOutput=append:/var/log/%p-%i.log\n")
    properties = {"FragmentPath": str(unit), "DropInPaths": ""}
    assert systemd.declared_output("a@7.service", properties) == "/var/log/a-7.log"
    drop_in.write_text("[Service]\nStandardOutput = file:/x/%n/100%%\n")
    assert (
        systemd.declared_output("a@7.service", {**properties, "DropInPaths": "'%s'" % drop_in}) == "/x/a@7.service/100%"
    )
    drop_in.write_text("[Service]\nStandardOutput=journal\n")
    assert systemd.declared_output("a@7.service", {**properties, "DropInPaths": "'%s'" % drop_in}) is None


def test_without_systemctl_a_unit_is_unknown_and_says_why(monkeypatch):
    def missing(*_args, **_kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(systemd.subprocess, "run", missing)
    state, _properties = systemd.show(["a.service"])["a.service"]
    assert state == Unknown("there is no systemctl on this machine")


def test_fewer_answers_than_units_are_an_error(monkeypatch):
    answer = subprocess.CompletedProcess([], 1, "", "Failed to connect to bus: No such file or directory\n")
    monkeypatch.setattr(systemd.subprocess, "run", lambda *_args, **_kwargs: answer)
    state, _properties = systemd.show(["a.service"])["a.service"]
    assert "Failed to connect to bus" in state.why


def test_a_manager_that_is_away_for_a_moment_is_asked_again(monkeypatch):
    away = subprocess.CompletedProcess([], 1, "", "Message recipient disconnected from message bus without replying\n")
    answers = [away, away, subprocess.CompletedProcess([], 0, "LoadState=loaded\nActiveState=active\n", "")]
    monkeypatch.setattr(systemd.subprocess, "run", lambda *_args, **_kwargs: answers.pop(0))
    monkeypatch.setattr(systemd.time, "sleep", lambda pause: None)
    state, _properties = systemd.show(["a.service"])["a.service"]
    assert (state.active_state, answers) == ("active", [])
