# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`deploy.yml` for forty containers, and, when nothing has changed, for one, for ten and for forty.

Each has a stub for a job, a program that counts, and a small Python environment. The first is made alone on the embedded
node, then the others at once, which takes some minutes; then some of them are deployed again, with a fork for each. Ten may
take three times what is granted to one, 15 s. What they take against the one beside them is told and not bounded: it grows
with each second that one alone gets faster.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks import node
from benchmarks.rows import Row, Unmeasured
from tests.support.deployment import NODE, changed
from tests.support.stub import Deployment

FIRST, SIZES = 850, (1, 10, 40)
ONE_AT_MOST = 15  # s


def measure() -> list[Row]:
    with node.node(), tempfile.TemporaryDirectory() as name:
        deployment = Deployment(Path(name), list(range(FIRST, FIRST + max(SIZES))))
        try:
            first, rest = (deployed(deployment, size)[0] for size in (1, max(SIZES)))
            found = {size: deployed(deployment, size) for size in SIZES}
        finally:
            deployment.destroy()
    one, ten, forty = (found[size][0] for size in SIZES)
    more = max(SIZES) - 1
    return [
        Row("1 container made, deployed and proved", first, "s"),
        Row(f"{more} more at once, each", rest / more, "s", first, "1 container"),
        Row("1 container, nothing to change", one, "s", at_most=ONE_AT_MOST),
        Row("10 containers, nothing to change", ten, "s", one, "1 container", at_most=3 * ONE_AT_MOST),
        Row("40 containers, nothing to change", forty, "s", one, "1 container"),
        Row("each container from 1 to 10", (ten - one) / 9, "s", one, "1 container"),
        Row("each container from 10 to 40", (forty - ten) / 30, "s", (ten - one) / 9, "1 to 10"),
        Row("API calls for 1 container, preflight included", found[1][1], "calls"),
        Row(
            "tasks that changed something, nothing to change",
            sum(found[size][2] for size in SIZES),
            "tasks",
            at_most=0,
            hard=True,
        ),
    ]


def deployed(deployment: Deployment, size: int) -> tuple[float, int, int]:
    """(seconds, API calls, changes) of a deployment of the first ``size`` containers, which must succeed."""
    before, start = _calls(), time.monotonic()
    done = deployment.run("--limit", ",".join(f"stub{number}" for number in deployment.numbers[:size]))
    seconds = time.monotonic() - start
    if done.returncode != 0:
        raise Unmeasured(f"deploy.yml ended with {done.returncode}: {done.stdout[-2000:]}")
    return seconds, _calls() - before, changed(done.stdout)


def _calls() -> int:
    return len((NODE / "log/access.log").read_bytes().splitlines())
