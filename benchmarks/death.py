# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the death of a job's process to the verdict that names it.

Real units in a real container, all watched by one prover. Each job ends with exit code 3 when it is told to, at a random
moment, and the clock runs until the prover's verdict can be read by another process. The peer looks at the same units
with `systemctl is-active` and sleeps a second in between, as `until`/`retries` or a shell loop do.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import threading
import time

from benchmarks.rows import Row
from benchmarks.target import PIPES, Prover, boottime, deliver, pipes, tell
from tests.support.container import Container

DEATHS = 16
NEVER = {"progress": {"pattern": r"never=(?P<step>\d+)", "within": 600}}
SCRIPT = f'echo up; read -r word <"{PIPES}/$1"; exit 3'


class Poller(threading.Thread):
    """Notes when a loop that looks once a second first saw each unit dead."""

    def __init__(self, container: Container, units: list[str]):
        super().__init__(daemon=True)
        self.units, self.seen = units, {}
        loop = 'while :; do systemctl is-active "$@" | tr "\\n" " "; echo; sleep 1; done'
        self._process = subprocess.Popen(
            container.argv("sh", "-c", loop, "poll", *units),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self) -> None:
        for line in self._process.stdout:
            now = boottime()
            for unit, state in zip(self.units, line.split()):
                # A unit that still runs its ExecStopPost= is dead too.
                if state not in ("active", "activating"):
                    self.seen.setdefault(unit, now)

    def end(self) -> None:
        # The loop inside goes on, and with it this thread, until the container is gone: a killed client ends no command.
        self._process.kill()
        self._process.wait()


def measure() -> list[Row]:
    ids = [str(number) for number in range(DEATHS)]
    instances = [{"id": number, "command": [number]} for number in ids]
    job = {
        "name": "mortal",
        "command": ["/bin/sh", "-c", SCRIPT, "sh"],
        "user": "root",
        "restart": "no",
        "instances": instances,
        "proof": NEVER,
    }
    chance = random.Random(1)
    with Container("bench-death") as container:
        units = deliver(container, [job])
        pipes(container, ids)
        prover = Prover(container, units)
        prover.waits()
        poller = Poller(container, units)
        poller.start()
        ours, peer = [], []
        for number, unit in zip(ids, units):
            time.sleep(chance.uniform(0.2, 1.2))
            died = tell(container, number, "die")
            ours.append((prover.verdict(unit, "exited_nonzero") - died) * 1000)
            deadline = time.monotonic() + 5
            while unit not in poller.seen and time.monotonic() < deadline:
                time.sleep(0.01)
            peer.append((poller.seen[unit] - died) * 1000)
        poller.end()
        prover.finish()
    return [
        Row(
            "death to verdict, median",
            statistics.median(ours),
            "ms",
            statistics.median(peer),
            "polling at 1 s",
            at_most=20,
        ),
        Row("death to verdict, slowest", max(ours), "ms", max(peer), "polling at 1 s", at_most=60),
    ]
