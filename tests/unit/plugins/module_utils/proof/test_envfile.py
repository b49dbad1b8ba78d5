# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Environment files as the role and launchproof run write them."""

from __future__ import annotations

from ansible_collections.dflash.launchproof.plugins.module_utils.job import units
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import adhoc, envfile
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)
# Neither systemd nor the job's spec lets control characters through, but a secret may have several lines.
VALUES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), include_characters="\n\t"))


@given(st.dictionaries(NAMES, VALUES))
def test_what_the_role_writes_is_read_back(variables):
    assert envfile.parse(units.env_text(variables)) == variables


@given(NAMES, VALUES.filter(lambda value: "\n" not in value))
def test_what_launchproof_run_writes_is_read_back(name, value):
    assert envfile.parse(f"{name}={adhoc.quote_value(value)}\n") == {name: value}


def test_what_people_write():
    text = "# A=1\n; B=2\nC=three four \nD='$x'\nE=\nF=\"\"\nno assignment\n"
    assert envfile.parse(text) == {"C": "three four", "D": "$x", "E": "", "F": ""}
