# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The reference training in a real container: a stuck step is ended by systemd's watchdog, and the proof says so."""

from __future__ import annotations

import pytest

from tests.integration import matrix
from tests.integration.cases import STEP, Case
from tests.support.prepared import Prepared

pytestmark = pytest.mark.container

# The real program; its 20th loss waits as a collective does whose partner is gone: in a thread, for ever.
TRAINING = """#!/usr/bin/python3
import itertools, runpy, sys, threading
sys.path[:0] = ["/opt/workload", "/opt/packages"]
from common import drafter
calls, loss = itertools.count(1), drafter.loss
def stuck(*args, **kwargs):
    if next(calls) == {at}:
        threading.Event().wait()
    return loss(*args, **kwargs)
drafter.loss = stuck
program = "/opt/workload/train_dflash_pipeline.py"
sys.argv = [program, "--data", "/usr/share/common-licenses", "--max-length", "64", "--ckpt-dir", "/var/tmp/{name}"]
runpy.run_path(program, run_name="__main__")
"""
BEAT = """python3 -c '
import json, sys
beat = json.load(open(sys.argv[1]))
assert beat["phase"] == "run" and beat["step"] == 19 and beat["step_age_s"] > 2, beat
' /var/lib/launchproof/runs/$UNIT/current/heartbeat.json"""


def training(name: str, expected: str, at: int, stable_for: int, fact: str) -> Case:
    """A unit as role training declares it, with a shorter watchdog."""
    return Case(
        name,
        expected,
        "a step of the reference training that never ends" if expected == "watchdog" else "the same, without that",
        TRAINING.format(at=at, name=name),
        service="Type=notify\nTimeoutStartSec=infinity\nWatchdogSec=6",
        env={"LAUNCHPROOF_UNIT": f"case-{name}.service"},
        proof={"progress": {**STEP, "within": 30}, "process": {"stable_for": stable_for}},
        fact=fact,
        timeout=180,
    )


CASES = [
    # Long after the watchdog, however long torch takes to load.
    training("stuck-step", "watchdog", 20, 60, f'[ "$(prop Result)" = watchdog ] && {BEAT}'),
    training("no-stuck-step", "ok_progressing", 0, 12, '[ "$(prop ActiveState)" = active ]'),
]


@pytest.fixture(scope="module")
def outcomes():
    with Prepared("lpt-workload", network=False) as container:
        matrix.deliver(container, CASES)
        # One after the other: two imports of torch at once need longer than both in turn.
        yield {case.name: matrix.run(container, case) for case in CASES}


@pytest.mark.shows("W11")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_watchdog_ends_a_stuck_step_and_nothing_else(outcomes, case):
    outcome = outcomes[case.name]
    assert not outcome.faulty, outcome.faulty
    assert outcome.got == case.expected, outcome.row
