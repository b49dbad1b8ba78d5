# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line of the scripts beside it that generate a page from a table in the code."""

from __future__ import annotations

import sys
from pathlib import Path


def publish(arguments: list[str], target: Path, text: str, source: str) -> int:
    """Write I(text) as I(target), or with --check compare the two; return the exit status. I(source) has the table."""
    script = f"generate_{target.stem.replace('-', '_')}.py"
    if arguments == ["--check"]:
        if target.is_file() and target.read_text(encoding="utf-8") == text:
            return 0
        print(f"{target} is not what {source} says: run {script}", file=sys.stderr)
        return 1
    if arguments:
        print(f"usage: {script} [--check]", file=sys.stderr)
        return 2
    target.write_text(text, encoding="utf-8")
    return 0
