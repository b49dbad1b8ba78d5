# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ends a run as a power cut would."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_with_children(pid: int) -> None:
    """Kill a process and all below it: Ansible's workers have sessions of their own and outlive their parent otherwise."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    doomed = {pid}
    while more := {child for child, parent in parents.items() if parent in doomed} - doomed:
        doomed |= more
    for one in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
