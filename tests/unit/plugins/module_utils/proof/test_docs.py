# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/diagnoses.md is what the table says, and --check would notice if not."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.table import OUTSIDE, TABLE

GENERATOR = (
    next(parent for parent in Path(__file__).resolve().parents if (parent / "galaxy.yml").is_file())
    / "docs/generate_diagnoses.py"
)


@pytest.fixture(name="generator")
def load_generator() -> dict:
    return runpy.run_path(str(GENERATOR))


def test_the_document_is_up_to_date(generator: dict) -> None:
    assert generator["main"](["--check"]) == 0


def test_check_notices_a_difference(generator: dict, tmp_path: Path) -> None:
    target = tmp_path / "diagnoses.md"
    generator["main"].__globals__["TARGET"] = target
    assert generator["main"](["--check"]) == 1
    assert generator["main"]([]) == 0 and generator["main"](["--check"]) == 0
    target.write_text(target.read_text() + "more\n")
    assert generator["main"](["--check"]) == 1
    assert generator["main"](["--fix"]) == 2


def test_every_code_is_documented(generator: dict) -> None:
    text = generator["render"]()
    assert all(f"`{code}`" in text for row in (*TABLE, *OUTSIDE) for code in row.codes)
    assert (
        len(
            {
                len(line.replace("\\|", "").split("|"))
                for line in text.splitlines()
                if line.startswith("| ") and " | `" in line
            }
        )
        == 1
    )
