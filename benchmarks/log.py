# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From a log line to its effect, and what is read for it, behind 1 MB and behind 2 GB of older log.

The job appends a line that its proof forbids; the clock runs until the verdict can be read. The peer is
`ansible.builtin.wait_for` with `search_regex` on the same file, as a bare process (no Ansible around it) that has looked
at the file at least once before the line comes. It maps the whole file each time; what the prover reads is counted by the
kernel over its whole life, its program and /proc included.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from pathlib import Path

from benchmarks.death import NEVER
from benchmarks.rows import Row, Unmeasured
from benchmarks.target import PIPES, Prover, boottime, deliver, pipes, tell
from tests.support.container import REPO, Container

SIZES = {"1 MB": 1_000_000, "2 GB": 2_000_000_000}
LINES = 8
PEER_LINES = 3
MIB = 1024**2
SCRIPT = f'exec >>"$1"; echo up; while read -r line; do echo "$line"; done <>"{PIPES}/$2"'
FILLER = b"2026-01-01 00:00:00 step loss=2.345678 lr=0.000100 grad_norm=0.98 tokens=131072 time=0.41 memory=71.2\n"


def measure() -> list[Row]:
    rows, read = [], {}
    with Container("bench-log") as container:
        for label, size in SIZES.items():
            log = f"/var/log/bench-{size}.log"
            fill(container.path(log), size)
            ours, peak, read[label] = prove(container, f"writer-{size}", log)
            theirs, peer_peak = zip(*(wait_for(container, log, number) for number in range(PEER_LINES)))
            rows += [
                Row(
                    f"log line to verdict, {label} log",
                    statistics.median(ours),
                    "ms",
                    statistics.median(theirs),
                    "wait_for",
                    at_most=20,
                ),
                Row(
                    f"resident at most, {label} log",
                    peak / MIB,
                    "MiB",
                    max(peer_peak) / MIB,
                    "wait_for",
                    at_most=45,
                    hard=True,
                ),
            ]
            container.path(log).unlink()
    small, large = SIZES
    more = max(read[large] - read[small], 0) / MIB
    # Both provers live equally long, but for what the machine makes of it: a look at /proc here and there.
    rows.append(
        Row(
            "read more for 2 GB than for 1 MB",
            more,
            "MiB",
            (SIZES[large] - SIZES[small]) / MIB,
            "wait_for, each look",
            at_most=1,
            hard=True,
        )
    )
    return rows


def fill(path: Path, size: int) -> None:
    """A real log of ``size`` bytes, no holes."""
    block = FILLER * (MIB // len(FILLER))
    with open(path, "wb") as stream:
        while stream.tell() < size:
            stream.write(block[: size - stream.tell()])


def prove(container: Container, name: str, log: str) -> tuple[list[float], int, int]:
    """(milliseconds of each line, peak resident bytes, bytes read) of one prover."""
    ids = [f"{name}-{number}" for number in range(LINES)]
    instances = [
        {"id": each, "command": [each], "proof": {**NEVER, "log": {"path": log, "forbidden": [f"fatal {each}$"]}}}
        for each in ids
    ]
    command = ["/bin/sh", "-c", SCRIPT, "sh", log]
    units = deliver(
        container, [{"name": name, "command": command, "user": "root", "restart": "no", "instances": instances}]
    )
    pipes(container, ids)
    prover = Prover(container, units)
    prover.waits()
    found = []
    for number, (each, unit) in enumerate(zip(ids, units)):
        if number == LINES - 1:
            peak, read = prover.usage()  # before its last verdict, with which it ends
        found.append((-tell(container, each, f"fatal {each}") + prover.verdict(unit, "error_but_alive")) * 1000)
    prover.finish()
    container.run("systemctl", "stop", f"{name}.target")
    return found, peak, read


PEER = """\
import json, sys
from ansible.module_utils.testing import patch_module_args
from ansible.modules import wait_for
with patch_module_args(json.loads(sys.argv[1])):
    wait_for.main()
"""


def wait_for(container: Container, log: str, number: int) -> tuple[float, int]:
    """(milliseconds, peak resident bytes) of wait_for from a line to its end."""
    path = container.path(log)
    arguments = {"path": str(path), "search_regex": f"peer fatal {number}$", "timeout": 120}
    reads = REPO / ".venv-bench/bin/python"
    process = subprocess.Popen(
        [str(reads), "-c", PEER, json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    watched = Path(f"/proc/{process.pid}/syscall")
    deadline = time.monotonic() + 60
    # It sleeps between two looks: it has looked at the whole file once when it does. 230: clock_nanosleep, x86-64.
    while not watched.read_text().startswith(("230 ", "35 ")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise Unmeasured(f"wait_for did not look: {process.stderr.read().decode(errors='replace')[-500:]}")
        time.sleep(0.05)
    time.sleep((number + 0.5) / PEER_LINES)  # at another phase of its second each time
    with open(path, "ab") as stream:
        now = boottime()
        stream.write(b"peer fatal %d\n" % number)
    _pid, status, used = os.wait4(process.pid, 0)
    ended = boottime()
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stderr.close()
    if process.returncode != 0:
        raise Unmeasured(f"wait_for ended with {process.returncode}")
    return (ended - now) * 1000, used.ru_maxrss * 1024
