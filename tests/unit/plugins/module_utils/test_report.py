# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.report import Failure, Report

PROVEN = {"unit": "a.service", "run_id": "1f", "stage": "launch_proof", "code": "ok_started", "ok": True}


def declared(**more):
    report = Report(**more)
    report.declare("box", "a.service")
    report.declare("box", "b.service")
    return report


def test_one_row_for_each_declared_unit_in_its_order():
    report = declared()
    report.declare("box", "a.service")
    report.prove("box", [PROVEN])
    assert [(row["host"], row["unit"], row["code"]) for row in report.rows()] == [
        ("box", "a.service", "ok_started"),
        ("box", "b.service", "not_reached"),
    ]
    assert report.verdict() == "failed"


def test_a_unit_that_was_proved_without_being_declared_has_a_row_too():
    report = declared()
    report.prove("box", [{**PROVEN, "unit": "c.service"}])
    assert [row["unit"] for row in report.rows()] == ["a.service", "b.service", "c.service"]


@pytest.mark.parametrize(
    ("stage", "unreachable", "code"),
    [
        ("preflight", False, "preflight_failed"),
        ("local_node", False, "provision_failed"),
        ("container", False, "provision_failed"),
        ("python_env", False, "provision_failed"),
        ("job", False, "provision_failed"),
        ("launch_proof", False, "observer_blind"),
        ("something_else", False, "not_reached"),
        ("job", True, "unreachable"),
    ],
)
def test_a_host_that_left_early_gives_the_stage_and_the_failing_tasks_words(stage, unreachable, code):
    report = declared()
    report.fail(Failure("box", stage, "Try it", "the disk is full", unreachable))
    row = report.rows()[0]
    assert (row["code"], row["stage"], row["remedy"]) == (code, stage, "the disk is full")
    assert row["evidence"]["task"] == "Try it"


def test_the_first_failure_of_a_host_counts():
    report = declared()
    report.fail(Failure("box", "preflight", "First", "first"))
    report.fail(Failure("box", "job", "Second", "second"))
    assert report.rows()[0]["remedy"] == "first"


def test_a_failure_elsewhere_explains_a_host_that_never_had_its_turn():
    report = declared()
    report.fail(Failure("localhost", "local_node", "Bring the node up", "port 18006 is taken"))
    row = report.rows()[0]
    assert (row["code"], row["evidence"]["failed_host"]) == ("provision_failed", "localhost")


def test_a_proof_outweighs_a_failure_before_it():
    """A rescued or ignored failure is no reason to hide what was found."""
    report = declared()
    report.fail(Failure("box", "job", "Try it", "first try"))
    report.prove("box", [PROVEN, {**PROVEN, "unit": "b.service"}])
    assert report.verdict() == "ok"


def test_check_mode_predicts_what_it_could_not_see_and_still_fails_on_failure():
    report = declared(check=True)
    assert {(row["code"], row["ok"]) for row in report.rows()} == {(None, True)}
    assert report.verdict() == "predicted"
    report.fail(Failure("box", "preflight", "Look", "no such template"))
    assert report.verdict() == "failed"


def test_one_job_hosts_failure_says_nothing_of_another():
    report = declared(check=True)
    report.declare("other", "a.service")
    report.fail(Failure("box", "preflight", "Look", "no such template"))
    assert [row["code"] for row in report.rows()] == ["preflight_failed", "preflight_failed", None]
