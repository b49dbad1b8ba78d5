# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`./deploy` when nothing has changed: the embedded default, container, Python environment, jobs and their proof.

A first run deploys it, or takes up what has changed in the checkout; the second is measured, and must change nothing and
restart nothing. What was not deployed before is removed again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from benchmarks import node
from benchmarks.rows import Row, Unmeasured
from tests.support import deployment


def measure() -> list[Row]:
    with node.node(), container():
        before = deployment.identities()
        start = time.monotonic()
        output = deployed()
        seconds = time.monotonic() - start
        after = deployment.identities()
    # By the run's id: a shard that came to its end meanwhile has lost its process, and was not begun anew.
    moved = [unit for unit in before if before[unit][0] != after[unit][0]]
    return [
        Row("./deploy, nothing to change", seconds, "s", at_most=15),
        Row(
            "./deploy, nothing to change: tasks that changed something",
            deployment.changed(output),
            "tasks",
            at_most=0,
            hard=True,
        ),
        Row("./deploy, nothing to change: jobs restarted", len(moved), "units", at_most=0, hard=True),
    ]


@contextlib.contextmanager
def container() -> Iterator[None]:
    """The embedded default is deployed; gone again afterwards when it was not there before."""
    was_there = (deployment.NODE / f"pve/lxc/{deployment.VMID}.conf").exists()
    try:
        deployed()
        yield
    finally:
        if not was_there:
            node.play(node.OURS, "-i", "inventory/local", "playbooks/destroy.yml", "-e", "launchproof_destroy=true")


def deployed() -> str:
    """Run ./deploy, which must succeed; its output."""
    done = deployment.deploy()
    if done.returncode != 0:
        raise Unmeasured(f"./deploy ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout
