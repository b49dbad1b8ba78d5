# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Environment files in the form of systemd's C(EnvironmentFile=), as far as this collection writes it."""

from __future__ import annotations

import re

# A quoted value may hold line breaks; in double quotes a backslash makes the next character a literal: systemd.exec(5).
ASSIGNMENT = re.compile(
    r"""^[ \t]*([A-Za-z_]\w*)=(?:"((?:[^"\\]|\\.)*)"[ \t]*$|'([^']*)'[ \t]*$|([^\n]*)$)""", re.MULTILINE | re.DOTALL
)


def parse(text: str) -> dict:
    """{name: value} of NAME=value, NAME="value" with escapes, and NAME='value'; comments and other lines are left out."""
    found = {}
    for name, double, single, bare in ASSIGNMENT.findall(text):
        found[name] = re.sub(r"\\(.)", r"\1", double, flags=re.DOTALL) or single or bare.strip()
    return found


def read(path: str) -> dict:
    """{name: value} of the file I(path). Raises OSError."""
    with open(path, encoding="utf-8", errors="surrogateescape") as handle:
        return parse(handle.read())
