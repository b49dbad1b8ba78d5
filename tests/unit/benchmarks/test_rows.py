# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ./bench says of its measurements: ratios, targets, the exit status, and the page."""

from __future__ import annotations

import pytest

from benchmarks.rows import Row, number, page, status, table

FAST = Row("death to verdict", 12.5, "ms", 478, "polling", at_most=20)
SLOW = Row("one more task", 150, "ms", 100, "ssh", at_most=1.15, bounds="ratio")
CALLS = Row("calls", 4, "calls", 9, "peer", at_most=3, hard=True)
BARE = Row("seconds", 7, "s")


@pytest.mark.parametrize(
    ("row", "ratio", "target", "met"),
    [
        (FAST, 12.5 / 478, "≤ 20 ms", True),
        (SLOW, 1.5, "ratio ≤ 1.15", False),
        (CALLS, 4 / 9, "≤ 3 calls, hard", False),
        (BARE, None, None, None),
        (Row("at the limit", 3, "calls", at_most=3), None, "≤ 3 calls", True),
        (Row("none of none", 0, "tasks", 0, "peer", at_most=0), None, "≤ 0 tasks", True),
        (Row("no ratio to be had", 1, "s", at_most=2, bounds="ratio"), None, "ratio ≤ 2", False),
    ],
)
def test_a_row_judges_itself(row, ratio, target, met):
    assert (row.ratio, row.target, row.met) == (pytest.approx(ratio) if ratio else ratio, target, met)


def test_the_data_has_the_documented_keys():
    assert FAST.data() == {
        "name": "death to verdict", "ours": 12.5, "peer": 478, "unit": "ms", "ratio": 0.0262, "target": "≤ 20 ms", "met": True,
    }  # fmt: skip
    assert BARE.data()["met"] is None


@pytest.mark.parametrize(
    ("rows", "failures", "expected"),
    [
        ([FAST, BARE], [], 0),
        ([SLOW], [], 0),
        ([CALLS], [], 1),
        ([FAST], ["log: no disk"], 2),
        ([CALLS], ["x: y"], 2),
        ([], [], 0),
    ],
)
def test_only_a_missed_hard_target_or_a_missing_measurement_fails_the_run(rows, failures, expected):
    assert status(rows, failures) == expected


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (3.0, "3"), (0.02649, "0.0265"), (478.2, "478"), (1234567.8, "1 234 568")]
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_a_missed_target_stands_out_in_the_table():
    lines = table([FAST, SLOW]).splitlines()
    assert (
        lines[0].startswith("what")
        and "478 (polling)" in lines[1]
        and lines[1].endswith("yes")
        and lines[2].endswith("NO")
    )


def test_the_page_holds_machine_method_and_every_row():
    text = page([("death", "How it dies.", [FAST]), ("api", "Counted.", [CALLS])], "2 cores")
    assert "Measured on 2 cores." in text and "## death\n\nHow it dies." in text and "| calls | 4 | 9 (peer) |" in text
