# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sessions without a systemd: what is planned, who holds a lock, what a follower reads. The prover itself is tested in containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger, prover, session
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import UnitState
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import SpecError, validate

UNIT = "training.service"
RUN = "a" * 32


@pytest.fixture
def paths(tmp_path):
    found = ledger.Paths(str(tmp_path))
    for folder in (found.jobs, found.sessions, found.locks, found.unit_runs(UNIT)):
        os.makedirs(folder)
    return found


def deliver(paths, unit=UNIT, **more):
    ledger.write_json(paths.job(unit), {"unit": unit, "digest": "new", "user": "dflash", "proof": {}, **more})


def run_of(paths, log="", certificate=None, digest="new"):
    folder = paths.run(UNIT, RUN)
    os.makedirs(folder)
    ledger.write_json(os.path.join(folder, "manifest.json"), {"digest": digest})
    with open(os.path.join(folder, "log"), "w") as handle:
        handle.write(log)
    if certificate:
        ledger.write_json(os.path.join(folder, "exit.json"), certificate)
    ledger.point_current(paths, UNIT, RUN)


@pytest.mark.parametrize(
    ("state", "restart", "wanted", "active", "running", "completed", "action"),
    [
        ("observed", "always", "new", True, "old", False, "observe"),
        ("awaited", "when_changed", "new", False, None, False, "await"),
        ("restarted", "never", "new", True, "new", False, "restart"),
        ("restarted", "never", "new", False, None, False, "start"),
        ("started", "when_changed", "new", True, "new", False, "observe"),
        ("started", "when_changed", None, True, "old", False, "observe"),
        ("started", "when_changed", "new", True, "old", False, "restart"),
        ("started", "when_changed", "new", True, None, False, "restart"),
        ("started", "never", "new", True, "old", False, "pending"),
        ("started", "never", "new", False, "old", False, "start"),
        ("started", "always", "new", True, "new", False, "restart"),
        ("started", "when_changed", "new", False, "new", True, "observe"),
        ("started", "when_changed", "new", False, "old", True, "start"),
        ("started", "when_changed", None, False, None, True, "start"),
        ("started", "when_changed", "new", False, "new", False, "start"),
        ("started", "always", "new", False, "new", True, "start"),
    ],
)
def test_plan_action(state, restart, wanted, active, running, completed, action):
    assert session.plan_action(state, restart, wanted, active, running, completed)[0] == action


DONE = validate({"done": {"pattern": "all done"}})
ENDED_WELL = {"exit_code": "exited", "exit_status": "0"}


@pytest.mark.parametrize(
    ("log", "certificate", "spec", "completed"),
    [
        ("step\nall done\n", ENDED_WELL, DONE, True),
        ("all done", ENDED_WELL, DONE, True),
        ("step\n", ENDED_WELL, DONE, False),
        ("all done\n", {"exit_code": "exited", "exit_status": "1"}, DONE, False),
        ("all done\n", None, DONE, False),
        ("all done\n", ENDED_WELL, validate({}), False),
    ],
)
def test_a_run_has_completed_by_certificate_and_log(paths, log, certificate, spec, completed):
    run_of(paths, log, certificate)
    assert session.completed_run(paths, UNIT, spec) == (RUN if completed else None)


def show(monkeypatch, **states):
    answers = {name.replace("_", ".") + "": state for name, state in states.items()}
    monkeypatch.setattr(manager, "show", lambda units: {unit: (answers[unit], {}) for unit in units})


def test_the_plan_compares_the_running_digest_with_the_declared_one(paths, monkeypatch):
    deliver(paths)
    run_of(paths, digest="old")
    show(monkeypatch, training_service=UnitState(active_state="active", invocation_id=RUN))
    request = session.make_request({"state": "started", "jobs": [{"unit": "training"}]}, paths)
    (job,) = session.plan(request, paths)
    assert (job["action"], job["before"]) == ("restart", {"active_state": "active", "digest": "old"})
    (row,) = session.predicted_rows(request)
    assert (row["code"], row["ok"], row["unit"]) == ("would_start", True, UNIT)
    result = session.result(request, {"verdict": "predicted", "jobs": [row]}, diff=True)
    assert result["changed"] is True
    assert result["diff"] == {
        "before": "training.service: active, digest old\n",
        "after": "training.service: restarted, digest new\n",
    }


def test_a_satisfied_unit_is_no_change(paths, monkeypatch):
    deliver(paths)
    run_of(paths)
    show(monkeypatch, training_service=UnitState(active_state="active", invocation_id=RUN))
    request = session.make_request({"state": "started", "jobs": [{"unit": UNIT}]}, paths)
    session.plan(request, paths)
    (row,) = session.predicted_rows(request)
    assert (row["code"], row["run_id"]) == (None, RUN)
    assert session.result(request, None, diff=True)["changed"] is False


def test_the_delivered_job_fills_what_the_request_leaves_out(paths):
    deliver(paths, proof={"deadlines": {"start": 3}}, secrets_file="/x", env={"A": "1"})
    (job,) = session.make_request({"state": "observed", "jobs": [{"unit": "training"}], "timeout": 7}, paths)["units"]
    assert (job["unit"], job["digest"], job["user"], job["secrets_file"], job["env"]) == (
        UNIT,
        "new",
        "dflash",
        "/x",
        {"A": "1"},
    )
    assert job["proof"]["deadlines"] == {"start": 3, "total": 7}


def test_observed_without_jobs_means_all_that_were_delivered(paths):
    deliver(paths)
    deliver(paths, unit="shard@1.service")
    request = session.make_request({"state": "observed"}, paths)
    assert [job["unit"] for job in request["units"]] == ["shard@1.service", UNIT]


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ({"state": "started"}, session.SessionError, "jobs is empty"),
        ({"state": "observed"}, session.SessionError, "holds no job"),
        (
            {"state": "started", "jobs": [{"unit": "a"}, {"unit": "a.service"}]},
            session.SessionError,
            "a.service more than once",
        ),
        (
            {"state": "started", "jobs": [{"unit": "a", "proof": {"log": {"required": ["("]}}}]},
            SpecError,
            r"jobs\[a.service\].proof.log.required",
        ),
    ],
)
def test_bad_requests_are_named(paths, parameters, error, text):
    with pytest.raises(error, match=text):
        session.make_request(parameters, paths)


@pytest.mark.parametrize(
    ("unit", "starts", "said"),
    [
        ("clean.timer", "clean-up.service", "clean.timer is no service, and only services are proved: name clean-up.service, which it starts"),
        ("dbus.socket", "", "dbus.socket is no service, and only services are proved"),
        ("home.mount", "", "home.mount is no service, and only services are proved"),
    ],
)  # fmt: skip
def test_what_starts_a_service_is_none(paths, monkeypatch, unit, starts, said):
    monkeypatch.setattr(session, "triggered", lambda unit: starts)
    with pytest.raises(session.SessionError) as raised:
        session.make_request({"state": "observed", "jobs": [{"unit": unit}]}, paths)
    assert str(raised.value) == said


def test_a_job_may_be_called_like_a_timer(paths):
    deliver(paths, unit="clean.timer.service")
    request = session.make_request({"state": "observed", "jobs": [{"unit": "clean.timer"}]}, paths)
    assert request["units"][0]["unit"] == "clean.timer.service"


@pytest.mark.parametrize("session_id", ["", "../x", "a/b", "x" * 65])
def test_what_is_no_session_id_is_refused(paths, session_id):
    with pytest.raises(session.SessionError, match="no session id"):
        session.session_folder(paths, session_id)


def hold(path, text=""):
    """Hold a lock in another process until its stdin is closed."""
    code = "import sys; from %s import take_lock; take_lock(%r, %r, 1) or sys.exit(1); print('held', flush=True); sys.stdin.read()" % (
        session.__name__, path, text,
    )  # fmt: skip
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert child.stdout.readline() == b"held\n"
    return child


def test_two_provers_of_one_unit_exclude_each_other(paths):
    path = os.path.join(paths.locks, UNIT)
    with hold(path, "session-1") as child:
        assert session.lock_holder(paths, UNIT) == "session-1"
        began = time.monotonic()
        assert session.take_lock(path, "session-2", 0.2) is None
        assert time.monotonic() - began < 5
        child.stdin.close()
        child.wait()
    descriptor = session.take_lock(path, "session-2", 0.2)
    assert descriptor is not None, "a lock ends with its holder, however that ended"
    os.close(descriptor)
    assert session.lock_holder(paths, UNIT) is None


def test_a_session_that_proves_the_same_is_found(paths):
    deliver(paths)
    request = session.make_request({"state": "started", "jobs": [{"unit": UNIT}]}, paths)
    folder = os.path.join(paths.sessions, "other")
    os.mkdir(folder)
    ledger.write_json(os.path.join(folder, "request.json"), dict(request, session="other"))
    assert session.find_session(request, paths) is None, "nobody holds the unit"
    with hold(os.path.join(paths.locks, UNIT), "other") as child:
        assert session.find_session(request, paths) == "other"
        assert session.find_session(dict(request, restart="always"), paths) is None
        changed = json.loads(json.dumps(request))
        changed["units"][0]["digest"] = "newer"
        assert session.find_session(changed, paths) is None, "another configuration is another launch"
        child.stdin.close()


def make_session(paths, name="s1"):
    folder = os.path.join(paths.sessions, name)
    os.mkdir(folder)
    ledger.write_json(os.path.join(folder, "request.json"), {"session": name, "units": [], "program": "/nowhere"})
    return folder


def test_follow_gives_whole_events_from_an_offset(paths):
    folder = make_session(paths)
    ledger.write_json(os.path.join(folder, "verdict.json"), {"verdict": "ok"})
    events = os.path.join(folder, "events.jsonl")
    with open(events, "w") as handle:
        handle.write('{"event": "armed"}\n{"event": "sta')
    news = session.follow("s1", 0, 0.1, paths)
    assert ([event["event"] for event in news["events"]], news["verdict"]) == (["armed"], {"verdict": "ok"})
    with open(events, "a") as handle:
        handle.write('rting"}\n')
    news = session.follow("s1", news["offset"], 0.1, paths)
    assert [event["event"] for event in news["events"]] == ["starting"]


def test_follow_returns_as_soon_as_a_verdict_comes(paths):
    folder = make_session(paths)
    with hold(os.path.join(folder, "lock")) as child:

        def later():
            with open(os.path.join(folder, "events.jsonl"), "a") as handle:
                handle.write('{"event": "verdict", "unit": "x"}\n')

        timer = threading.Timer(0.3, later)
        timer.start()
        began = time.monotonic()
        news = session.follow("s1", 0, 30, paths)
        assert time.monotonic() - began < 5
        assert [event["event"] for event in news["events"]] == ["verdict"]
        child.stdin.close()
        timer.join()


def test_follow_replaces_a_prover_that_died_without_a_verdict(paths, monkeypatch):
    make_session(paths)
    spawned = []
    monkeypatch.setattr(session, "spawn", lambda folder, request, program: spawned.append((folder, program)))
    session.follow("s1", 0, 0.05, paths)
    assert spawned == [(os.path.join(paths.sessions, "s1"), "/nowhere")]


def test_follow_says_that_a_session_is_gone(paths):
    with pytest.raises(session.SessionError, match="no session s9"):
        session.follow("s9", 0, 0.1, paths)


def test_old_finished_sessions_are_removed_and_running_ones_kept(paths):
    for number in range(session.KEEP_SESSIONS + 3):
        folder = make_session(paths, "s%03d" % number)
        if number != 1:
            ledger.write_json(os.path.join(folder, "verdict.json"), {})
    session.prune(paths)
    left = sorted(os.listdir(paths.sessions))
    assert left[:2] == ["s001", "s003"]


def test_a_broken_session_still_gets_a_document(paths, capsys):
    folder = make_session(paths)
    ledger.write_json(os.path.join(folder, "request.json"), {"session": "s1", "host": "h", "units": [{"unit": UNIT}]})
    assert prover.main(folder) == 1
    document = ledger.read_json(os.path.join(folder, "verdict.json"))
    (row,) = document["jobs"]
    assert (row["unit"], row["code"], row["ok"]) == (UNIT, "observer_blind", False)
    assert row["remedy"]


def test_secrets_files_are_read_as_systemd_reads_them(tmp_path):
    path = tmp_path / "x.env"
    path.write_text('# comment\nA=plain\nB="with \\"quotes\\" and \\\\"\nC=\'single\'\nD=\n\nnonsense\n')
    assert prover.read_environment_file(str(path)) == {
        "A": "plain",
        "B": 'with "quotes" and \\',
        "C": "single",
        "D": "",
    }
    assert prover.read_environment_file(None) == {}
    assert prover.read_environment_file(str(tmp_path / "none")) == {}


def test_the_live_line_names_the_unit_whose_time_runs_out_first():
    status = {
        "a.service": {
            "allowed": 900.0,
            "elapsed": 12.0,
            "stage": "first_progress",
            "progress": None,
            "missing": ["no value"],
            "line": "loading\n",
        },
        "b.service": {
            "allowed": 60.0,
            "elapsed": 55.0,
            "stage": "first_log",
            "progress": None,
            "missing": ["nothing"],
            "line": "",
        },
    }
    line = session.live_line("h", {"c.service": {"code": "ok_started"}}, status)
    assert line == "h: 1 decided: c.service ok_started; b.service: first_log 55 of 60 s, nothing; 1 more wait"
