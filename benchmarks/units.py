# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""64 units proved in one call, and one unit.

`launchproof prove --state started` of stopped units that only sleep, from the command to its end. Each proof takes the 5 s
for which a process must stay alive (`process.stable_for`); what 64 units add to that is looked at: their start by systemd,
64 run folders, and the watching.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.rows import Row, Unmeasured
from benchmarks.target import deliver
from tests.support.container import Container

MANY = 64
REPEATS = 3


def measure() -> list[Row]:
    instances = [{"id": str(number)} for number in range(MANY)]
    # It writes a line, as the proof asks of every job.
    command = ["/bin/sh", "-c", "echo up; exec sleep infinity"]
    with Container("bench-units") as container:
        units = deliver(container, [{"name": "sleeper", "command": command, "user": "root", "instances": instances}])
        prove(container, units)  # the first call unpacks the program
        times = [(prove(container, units), prove(container, units[:1])) for _repeat in range(REPEATS)]
    many, one = (statistics.median(column) for column in zip(*times))
    return [Row(f"proof of {MANY} units in one call", many, "s", one, "one unit", at_most=1.5, bounds="ratio")]


def prove(container: Container, units: list[str]) -> float:
    """Seconds of one proof, which must be good."""
    container.run("systemctl", "stop", *units)
    start = time.monotonic()
    done = container.run("launchproof", "prove", "--state", "started", "--quiet", *units, check=False, timeout=120)
    if done.returncode != 0:
        raise Unmeasured(f"the proof of {len(units)} units ended with {done.returncode}: {done.stdout[-1000:]}")
    return time.monotonic() - start
