# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""1, 64 and 512 units proved in one call, and what one look costs.

`launchproof prove --state started` of stopped units that only sleep, from the command to its end. Each proof takes the 5 s
for which a process must stay alive (`process.stable_for`); what many units add to that is looked at: their start by systemd,
a run folder for each, and the watching. 512 units are held against `systemctl start` of the same, which proves nothing.
Then the same command once more, on units that run and are proved by now, against testinfra asking whether they run
(`host.service(…).is_running`, inside the container as well): it can tell no more.
"""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path

from benchmarks.rows import Row, Unmeasured
from benchmarks.target import deliver
from tests.support.container import REPO, Container

MANY, MOST = 64, 512
REPEATS = 3
PEER = """\
import sys, testinfra
host = testinfra.get_host("local://")
sys.exit(not all(host.service(unit).is_running for unit in sys.argv[1:]))
"""
PEER_PACKAGES = ("testinfra", "pytest", "_pytest", "pluggy", "iniconfig", "packaging")


def measure() -> list[Row]:
    instances = [{"id": str(number)} for number in range(MOST)]
    # It writes a line, as the proof asks of every job.
    command = ["/bin/sh", "-c", "echo up; exec sleep infinity"]
    with Container("bench-units") as container:
        units = deliver(container, [{"name": "sleeper", "command": command, "user": "root", "instances": instances}])
        bring_peer(container)
        prove(container, units[:MANY])  # the first call unpacks the program
        times = [(prove(container, units[:MANY]), prove(container, units[:1])) for _repeat in range(REPEATS)]
        many, one = (statistics.median(column) for column in zip(*times))
        looks = [(look(container, found), peer_look(container, found)) for found in (units[:1], units[:MANY])]
        most = prove(container, units)
        container.run("systemctl", "stop", *units, timeout=300)
        alone = timed(container, "systemctl", "start", *units)
    return [
        Row(f"proof of {MANY} units in one call", many, "s", one, "one unit", at_most=1.5, bounds="ratio"),
        Row(f"proof of {MOST} units in one call", most, "s", alone, "systemctl start of them, unproved"),
        Row("a look at one unit", looks[0][0], "s", looks[0][1], "testinfra, is it running"),
        Row(f"a look at {MANY} units in one call", looks[1][0], "s", looks[1][1], "testinfra, are they running"),
    ]


def prove(container: Container, units: list[str]) -> float:
    """Seconds of one proof, which must be good."""
    container.run("systemctl", "stop", *units, timeout=300)
    return timed(container, "launchproof", "prove", "--state", "started", "--quiet", *units)


def look(container: Container, units: list[str]) -> float:
    """Seconds of a proof of what runs."""
    container.run("systemctl", "start", *units)
    time.sleep(6)  # until each has been alive for stable_for: what is measured is the look, not the wait
    return statistics.median(timed(container, "launchproof", "prove", "--quiet", *units) for _repeat in range(REPEATS))


def bring_peer(container: Container) -> None:
    """Copy testinfra, which is Python alone, into the container."""
    (packages,) = (REPO / ".venv-bench/lib").glob("python3.*/site-packages")
    for name in PEER_PACKAGES:
        shutil.copytree(packages / name, container.path("/opt/peer") / name)
    container.write("/opt/peer/peer.py", PEER)


def peer_look(container: Container, units: list[str]) -> float:
    """Seconds of testinfra's look at the same units."""
    words = ("env", "PYTHONPATH=/opt/peer", "python3", "/opt/peer/peer.py", *units)
    return statistics.median(timed(container, *words) for _repeat in range(REPEATS))


def timed(container: Container, *command: str) -> float:
    """Seconds of a command in the container, which must end well."""
    start = time.monotonic()
    done = container.run(*command, check=False, timeout=300)
    if done.returncode != 0:
        raise Unmeasured(
            f"{Path(command[0]).name} ended with {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}"
        )
    return time.monotonic() - start
