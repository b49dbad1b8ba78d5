# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a runner leaves behind, and what is made of it. Runners themselves are tested in containers."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger, runner
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import DUMPED, EXITED, KILLED, UnitState
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import supervisor

UNIT = "x.service"


@pytest.fixture
def paths(tmp_path, monkeypatch):
    found = ledger.Paths(str(tmp_path))
    os.makedirs(found.unit_runs(UNIT))
    os.makedirs(found.jobs)
    monkeypatch.setattr(supervisor, "PROGRAMS", str(tmp_path / "supervisor.d"))
    ledger.write_json(found.job(UNIT), {"user": "dflash", "argv": ["/bin/true"], "working_directory": "/opt"})
    return found


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, (EXITED, 0, "success")),
        (3 << 8, (EXITED, 3, "exit-code")),
        (signal.SIGKILL, (KILLED, 9, "signal")),
        (signal.SIGTERM, (KILLED, 15, "success")),
        (signal.SIGSEGV | 0x80, (DUMPED, 11, "core-dump")),
    ],
)
def test_ends_in_systemds_words(status, expected):
    assert runner.verdict_of(status) == expected


def test_processes_are_found_by_descent_and_by_token():
    token = uuid.uuid4().hex
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"],
        env={"INVOCATION_ID": token, "PATH": runner.PATH},
        stdout=subprocess.PIPE,
    ) as shell:
        sleeper = int(shell.stdout.readline())
        assert {shell.pid, sleeper} <= set(runner.descendants(os.getpid()))
        assert set(runner.of_run(token)) == {shell.pid, sleeper}
        about = {"pid": shell.pid, "started_at": runner.process.read_stat(shell.pid)["started_at"]}
        assert runner.lives(about) and not runner.lives({**about, "started_at": 1.0})
        groups = supervisor.Groups()
        assert groups.pids(f"{shell.pid}/{about['started_at']}/{token}") == (sleeper,)
        assert set(groups.pids(f"{shell.pid}/1.0/{token}")) == {shell.pid, sleeper}, (
            "the runner is gone, its job is not"
        )
        runner.kill((sleeper, shell.pid), signal.SIGKILL)
        shell.wait()
        assert not runner.lives(about) and runner.of_run(token) == ()


def test_a_unit_without_a_record_and_one_that_never_ran(paths):
    manager = supervisor.Manager(paths=paths)
    assert manager.show(["y.service"])["y.service"][0].load_state == "not-found"
    state, properties = manager.show([UNIT])[UNIT]
    assert (state.load_state, state.active_state, state.invocation_id) == ("loaded", "inactive", "")
    assert (properties["User"], properties["WorkingDirectory"]) == ("dflash", "/opt")


def test_a_state_is_read_back_and_that_of_a_killed_runner_is_a_death(paths, monkeypatch):
    state = UnitState(type="simple", active_state="active", invocation_id="a" * 32, main_pid=77, missing_files=("/x",))
    runner.write_state(paths, UNIT, state, [1.0])
    assert runner.read_state(paths, UNIT) == (state, [1.0], True)
    manager = supervisor.Manager(paths=paths)
    monkeypatch.setattr(runner, "lives", lambda _runner: False)
    first, again = (manager.show([UNIT])[UNIT][0] for _look in range(2))
    assert (first.active_state, first.exec_main_code, first.exec_main_status, first.main_pid) == (
        "failed",
        KILLED,
        9,
        0,
    )
    assert first == again, "it has died once, at one time"


def test_a_start_is_pending_until_a_run_begins(paths, monkeypatch):
    ended = []
    manager = supervisor.Manager(job_ended=lambda *job: ended.append(job), paths=paths)
    monkeypatch.setattr(supervisor, "detach", lambda _unit: None)
    (request,) = manager.order("StartUnit", [UNIT]).values()
    assert manager.show([UNIT])[UNIT][0].pending_job == "start"
    runner.write_state(paths, UNIT, UnitState(active_state="active", invocation_id="b" * 32), [])
    assert manager.show([UNIT])[UNIT][0].pending_job == ""
    manager.tell()
    assert ended == [(request, UNIT, "done")]
    # What runs is not started a second time.
    monkeypatch.setattr(supervisor, "detach", lambda _unit: pytest.fail("a second runner"))
    manager.order("StartUnit", [UNIT])


def test_a_unit_that_nobody_delivered_is_not_started(paths):
    (answer,) = supervisor.Manager(paths=paths).order("StartUnit", ["y.service"]).values()
    assert (
        isinstance(answer, supervisor.SupervisorError)
        and answer.lasting
        and "y.service.json is not there" in str(answer)
    )


def test_whoever_sees_the_end_finds_the_certificate(paths, monkeypatch):
    made = object.__new__(runner.Runner)  # its constructor takes the signals of this process
    made.unit, made.paths, made.state, made.stop_asked = UNIT, paths, UnitState(invocation_id="c" * 32), True
    seen = []
    monkeypatch.setattr(made, "_sweep", lambda: None, raising=False)
    monkeypatch.setattr(
        made,
        "save",
        lambda **_state: seen.append(ledger.read_json(f"{paths.run(UNIT, 'c' * 32)}/exit.json")),
        raising=False,
    )
    made._finish({}, KILLED, 9, "signal", 1)
    assert [(certificate["oom_kill"], certificate["stop_requested"]) for certificate in seen] == [(1, True)]
