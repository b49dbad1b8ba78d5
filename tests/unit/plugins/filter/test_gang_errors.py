# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A gang that could never start as a whole is refused, with both numbers."""

from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.filter.gang_errors import gang_errors

MEMBERS = {"c1": ["training"], "c2": ["training"], "c3": ["training"], "c4": []}


@pytest.mark.parametrize("serial", [None, 3, "3", "75%", "100%", [3, 4]])
def test_a_gang_that_fits_has_none(serial):
    assert gang_errors(["training"], MEMBERS, 3, serial) == []


@pytest.mark.parametrize(
    ("forks", "serial", "words"),
    [
        (2, None, "3 hosts and ansible works on 2 at once (forks is 2)"),
        (5, 1, "on 1 at once (serial is 1)"),
        (5, "50%", "on 2 at once (serial is 50%)"),
        (5, [1, "100%"], "on 2 at once (serial is [1, '100%'])"),
        (2, 1, "on 1 at once (serial is 1)"),
    ],
)
def test_both_numbers_are_named(forks, serial, words):
    (error,) = gang_errors(["training"], MEMBERS, forks, serial)
    assert words in error and error.startswith("Gang training has 3 hosts")


def test_a_gang_that_two_batches_part_is_refused():
    members = {"c1": [], "c2": ["training"], "c3": ["training"], "c4": []}
    assert "2 hosts and ansible works on 1 at once (serial is 2)" in gang_errors(["training"], members, 5, 2)[0]
    assert gang_errors(["training"], members, 5, [1, 3]) == gang_errors(["training"], members, 5, [1, 2]) == []


def test_the_way_out_is_named():
    assert "Use --forks 3." in gang_errors(["training"], MEMBERS, 2)[0]


def test_another_hosts_gang_is_not_this_ones():
    assert gang_errors([], MEMBERS, 1) == []
