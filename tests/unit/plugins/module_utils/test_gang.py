# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.gang import judge
from ansible_collections.dflash.launchproof.plugins.module_utils.report import Failure, Report

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [198.51.100.43]:44512"
NCCL = (
    "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=93, OpType=ALLREDUCE) ran for 600000 ms"
)
STORE = "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 2/3 clients joined."

LOST = 'ts=x ev=exit code=69 reason=peer_lost peers=1 msg="rank 1 on c2 (step 40): gone" rank=0'
APART = "ts=x ev=exit code=69 reason=rendezvous_unreachable node=1 endpoint=c1:29400"
INCOMPLETE = "ts=x ev=exit code=69 reason=rendezvous_incomplete node=0 endpoint=c1:29400"


def row(host, code="ok_progressing", step=None, said=None):
    evidence = {"progress": {"last": step}} if step is not None else {}
    if said:
        evidence["match"] = {"line": said}
    return {"host": host, "unit": "training.service", "code": code, "ok": code.startswith("ok"), "evidence": evidence}


def restarted(host, status):
    return {**row(host, "restarted_in_window"), "evidence": {"cause": {"exit": {"status": status}}}}


@pytest.mark.parametrize(
    ("rows", "held_up_by", "waiting"),
    [
        ([row("c1"), row("c2"), row("c3")], [], []),
        ([row("c1", "stalled", 40), row("c2", "killed_by_signal", 40), row("c3", "stalled", 40)], ["c2"], ["c1", "c3"]),
        ([row("c1", "crashed_traceback", 40, GLOO), row("c2", "oom_killed", 39), row("c3")], ["c2"], ["c1"]),
        (
            [row("c1", "crash_loop", 40, GLOO), row("c2", "unreachable"), row("c3", "error_but_alive", 40, NCCL)],
            ["c2"],
            ["c1", "c3"],
        ),
        (
            [row("c1", "no_progress_yet"), row("c2", "setup_failed"), row("c3", "exited_nonzero", said=STORE)],
            ["c2"],
            ["c1", "c3"],
        ),
        # all live: the one that came less far is waited for
        ([row("c1", "stalled", 41), row("c2", "stalled", 40), row("c3", "stalled", 41)], ["c2"], ["c1", "c3"]),
        ([row("c1", "stalled", 41), row("c2", "no_progress_yet"), row("c3", "stalled", 41)], ["c2"], ["c1", "c3"]),
        # all complain about others: the same
        ([row("c1", "crashed_traceback", 41, GLOO), row("c2", "crashed_traceback", 40, GLOO)], ["c2"], ["c1"]),
        # none stands out
        ([row("c1", "stalled", 40), row("c2", "stalled", 40)], [], ["c1", "c2"]),
        ([row("c1", "no_progress_yet"), row("c2", "no_progress_yet")], [], ["c1", "c2"]),
        (
            [row("c1", "crash_loop", 41, LOST), row("c2", "killed_by_signal", 41), row("c3", "crash_loop", 41, LOST)],
            ["c2"],
            ["c1", "c3"],
        ),
        ([restarted("c1", 69), row("c2", "oom_killed", 3), restarted("c3", 69)], ["c2"], ["c1", "c3"]),
        ([restarted("c1", 69), restarted("c2", 70), row("c3", "stalled", 3)], ["c2"], ["c1", "c3"]),
        ([restarted("c1", 69), restarted("c2", 69)], [], ["c1", "c2"]),
        # one does not come to the rendezvous; or nobody does, and the one who waits there is it
        (
            [row("c1", "crash_loop", said=INCOMPLETE), row("c2", "crash_loop", said=APART), row("c3", "silent")],
            ["c2"],
            ["c1", "c3"],
        ),
        ([row("c1", "crash_loop", said=INCOMPLETE), row("c2", "crash_loop", said=APART)], ["c2"], ["c1"]),
        (
            [row("c1", "no_progress_yet"), row("c2", "crash_loop", said=APART), row("c3", "crash_loop", said=APART)],
            ["c1"],
            ["c2", "c3"],
        ),
        (
            [row("c1", "unreachable"), row("c2", "crash_loop", said=APART), row("c3", "crash_loop", said=APART)],
            ["c1"],
            ["c2", "c3"],
        ),
        # two causes are two causes
        ([row("c1", "oom_killed", 3), row("c2", "killed_by_signal", 3), row("c3", "stalled", 3)], ["c1", "c2"], ["c3"]),
    ],
)
def test_the_member_that_is_waited_for_is_named(rows, held_up_by, waiting):
    found = judge("ranks", rows)
    assert [item["host"] for item in found["held_up_by"]] == held_up_by
    assert [item["host"] for item in found["waiting"]] == waiting
    assert found["ok"] == (not held_up_by and not waiting)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("c1"), row("c2")], "Gang ranks, 2 members on c1, c2: all are well."),
        (
            [row("c1", "stalled", 40), row("c2", "killed_by_signal")],
            "held up by training.service on c2 [killed_by_signal]; c1 only waits.",
        ),
        ([row("c1", "stalled", 41), row("c2", "stalled", 40)], "which came no further than step 40; c1 only waits."),
        ([row("c1", "stalled", 41), row("c2", "silent")], "which never took a step; c1 only waits."),
        ([row("c1", "stalled", 40), row("c2", "stalled", 40)], "none is behind the others"),
        (
            [row("c1", "crash_loop", said=INCOMPLETE), row("c2", "crash_loop", said=APART), row("c3", "silent")],
            "on c2 [crash_loop], which does not reach the rendezvous that others wait at; c1, c3 only wait.",
        ),
    ],
)
def test_it_is_said_in_a_sentence(rows, words):
    assert words in judge("ranks", rows)["sentence"]


def test_the_report_has_a_verdict_over_each_gang_whatever_happened_to_a_host():
    report = Report()
    for host in ("c1", "c2"):
        report.declare(host, "training.service", "ranks")
        report.declare(host, "monitor.service")
    report.fail(Failure("c2", "job", "Gather", "no route to host", unreachable=True))
    report.prove("c1", [{**row("c1", "no_progress_yet"), "seconds": 1.0}])
    (gang,) = report.as_dict()["gangs"]
    assert gang["gang"] == "ranks" and not gang["ok"]
    assert gang["held_up_by"] == [{"host": "c2", "unit": "training.service", "code": "unreachable"}]


def test_a_report_without_gangs_says_nothing_of_them():
    report = Report()
    report.declare("c1", "training.service")
    assert "gangs" not in report.as_dict()
