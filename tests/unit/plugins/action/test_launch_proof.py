# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's half of launch_proof: which calls it makes, when it stops waiting, and what a lost connection does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible_collections.dflash.launchproof.plugins.action import launch_proof

A, B = "a.service", "b.service"
PLAN = {"changed": True, "started": [A], "verdict": None, "jobs": [{"unit": A}, {"unit": B}]}


def row(unit, code="ok_started", ok=True):
    return {
        "host": "h", "unit": unit, "run_id": "1" * 32, "stage": "launch_proof", "code": code, "ok": ok, "seconds": 1.0,
        "remedy": "" if ok else "mend it", "evidence": {}, "also_observed": [],
    }  # fmt: skip


def decided(*rows):
    return [{"event": "verdict", "unit": item["unit"], "row": item} for item in rows]


def news(events=(), status=None, rows=None, offset=10, **more):
    document = {"verdict": "ok", "jobs": rows} if rows else None
    return {
        "events": list(events),
        "offset": offset,
        "status": status or {},
        "verdict": document,
        "session": "s",
        **more,
    }


class Action(launch_proof.ActionModule):
    """The plugin with the connection cut off: answers are given, an exception among them is raised."""

    def __init__(self, answers, check_mode=False, **args):
        self._task = SimpleNamespace(args=args, check_mode=check_mode)
        self.resets = 0
        self._connection = SimpleNamespace(reset=self.reset)
        self.answers, self.calls = list(answers), []

    def reset(self):
        self.resets += 1

    def _execute_module(self, module_name=None, module_args=None, task_vars=None):
        assert module_name == "dflash.launchproof.launch_proof"
        self.calls.append(dict(module_args))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    lines = []
    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr(launch_proof.display, "display", lambda text, *args, **kwargs: lines.append(text))
    monkeypatch.setattr(launch_proof.time, "sleep", lambda pause: None)
    return lines


@pytest.fixture
def clock(monkeypatch):
    """Each look at the clock is 1.5 s later than the one before: there are two to a call."""
    now = [0.0]

    def tick():
        now[0] += 1.5
        return now[0]

    monkeypatch.setattr(launch_proof.time, "monotonic", tick)


def run(action):
    result = action.run(task_vars={"inventory_hostname": "h"})
    assert action.answers == [], "it stopped asking too early"
    return result


def test_one_call_is_enough_where_the_verdict_is_there():
    action = Action([news(plan=PLAN, rows=[row(B), row(A)])], state="started")
    result = run(action)
    assert (result["verdict"], result["changed"], [item["unit"] for item in result["jobs"]]) == ("ok", True, [A, B])
    (call,) = action.calls
    assert (call["phase"], call["state"], call["host"]) == ("arm", "started", "h")
    assert not result.get("failed")


def test_it_follows_from_the_offset_to_the_last_verdict():
    action = Action([news(plan=PLAN), news(decided(row(A)), offset=20), news(decided(row(B)), offset=30)])
    assert run(action)["verdict"] == "ok"
    assert [(call["phase"], call.get("offset")) for call in action.calls] == [
        ("arm", None),
        ("follow", 10),
        ("follow", 20),
    ]
    assert {call["session"] for call in action.calls[1:]} == {"s"}


def test_a_failure_ends_it_after_a_grace_and_every_unit_has_its_row(clock):
    status = {
        B: {
            "stage": "first_log",
            "missing": ["nothing yet"],
            "noticed": [],
            "allowed": 60,
            "elapsed": 1,
            "progress": None,
            "line": "",
        }
    }
    action = Action(
        [news(plan=PLAN), news(decided(row(A, "exited_nonzero", ok=False)), status), *[news((), status)] * 2]
    )
    result = run(action)
    assert (result["failed"], result["verdict"], result["changed"]) == (True, "failed", True)
    assert [(item["unit"], item["code"], item["ok"]) for item in result["jobs"]] == [
        (A, "exited_nonzero", False),
        (B, "inconclusive", False),
    ]
    assert "exited_nonzero" in result["msg"] and "mend it" in result["msg"]
    assert "session s" in result["jobs"][1]["remedy"]


def test_a_live_line_while_it_waits(clock, shown):
    status = {
        A: {
            "stage": "first_progress",
            "missing": [],
            "noticed": [],
            "allowed": 900,
            "elapsed": 7,
            "progress": 4,
            "line": "step=4\n",
        }
    }
    run(Action([news(plan=PLAN), news(status=status), news(rows=[row(A), row(B)])]))
    assert "h: a.service: first_progress 7 of 900 s, progress 4 | step=4" in shown


@pytest.mark.parametrize("way", [0.1, 0.3, 3.5], ids="{} s a call".format)
def test_a_line_comes_at_least_every_five_seconds(monkeypatch, way):
    """On connections of any speed: a call takes what it waits and the way there."""
    now, at = [0.0], []
    monkeypatch.setattr(launch_proof.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(launch_proof.display, "display", lambda text, *args, **kwargs: at.append(now[0]))

    class Timed(Action):
        def _execute_module(self, module_name=None, module_args=None, task_vars=None):
            now[0] += module_args["wait"] + way
            return super()._execute_module(module_name, module_args, task_vars)

    run(Timed([news(plan=PLAN), *[news() for _call in range(20)], news(rows=[row(A), row(B)])]))
    gaps = [later - earlier for earlier, later in zip([0.0, *at], at)]
    assert len(at) == 21 and max(gaps[2:]) <= 5.0 + 1e-9 and max(gaps) <= 8, gaps


@pytest.mark.parametrize(
    "lost",
    [
        AnsibleConnectionFailure("gone"),
        {"failed": True, "module_stdout": "", "module_stderr": "", "msg": "MODULE FAILURE", "rc": 255},
    ],
)
def test_a_lost_connection_is_taken_up_again_with_the_same_session(lost, shown):
    action = Action([lost, news(plan=PLAN), lost, lost, news(rows=[row(A), row(B)])])
    assert run(action)["verdict"] == "ok"
    arms = [call for call in action.calls if call["phase"] == "arm"]
    assert len({call["session"] for call in arms}) == 1 and len(arms) == 2, (
        "armed again under the same id: nothing is started twice"
    )
    assert [call["offset"] for call in action.calls if call["phase"] == "follow"] == [10, 10, 10]
    assert action.resets == 3
    assert any("connection lost" in line for line in shown)


def test_a_host_that_stays_away_is_unreachable():
    attempts = len(launch_proof.RECONNECT) + 1
    with pytest.raises(AnsibleConnectionFailure):
        run(Action([AnsibleConnectionFailure("gone")] * attempts))


def test_a_module_that_fails_is_no_lost_connection():
    action = Action([{"failed": True, "msg": "jobs is empty"}])
    assert run(action)["msg"] == "jobs is empty"


def test_check_mode_is_one_call_that_arms_nothing():
    action = Action([{"changed": True, "verdict": "predicted", "jobs": []}], check_mode=True, state="started")
    assert run(action)["verdict"] == "predicted"
    assert "phase" not in action.calls[0] and "session" not in action.calls[0]
