# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the GPU proof of one unit costs here, in ms, as JSON: python3 costs.py UNIT. Each number with the prover's own code."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

sys.path.insert(0, "/usr/local/lib/launchproof/launchproof")

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import (  # noqa: E402
    cgroup,
    gpu,
    nvml,
    process,
    systemd,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import validate  # noqa: E402

ROUNDS = 200


def timed(call):
    """(ms, result) of one call."""
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


def main() -> None:
    unit = sys.argv[1]
    with open("/etc/launchproof/jobs/%s.json" % unit, encoding="utf-8") as handle:
        environ = json.load(handle)["env"]
    state, properties = systemd.show([unit])[unit]
    group = properties["ControlGroup"]
    spec = validate({"gpu": {"level": "proved"}}).gpu

    def processes() -> tuple:
        found = (process.process(pid, state.main_pid, None, detailed=False) for pid in cgroup.Groups().pids(group))
        return tuple(item for item in found if item)

    def join(source=None):
        """From the unit's control group to the verdict on its GPUs."""
        source = source or gpu.GpuSource(spec, environ)
        source.sample(processes())
        return source, source.facts({})

    cold, (source, facts) = timed(join)
    warm = [timed(lambda: join(source))[0] for _ in range(ROUNDS)]
    seen = processes()
    poll = [timed(lambda: source.sample(seen))[0] for _ in range(ROUNDS)]
    one = nvml.Nvml()
    uuid = next(iter(one.devices))
    lists = [timed(lambda: one.processes(uuid))[0] for _ in range(ROUNDS)]
    memory = [timed(lambda: one.used(uuid))[0] for _ in range(ROUNDS)]
    with open("/proc/self/status", encoding="ascii") as handle:
        rss = int(next(line for line in handle if line.startswith("VmRSS")).split()[1])
    numbers = {
        "cold_join": cold, "join_median": statistics.median(warm), "join_max": max(warm), "poll_median": statistics.median(poll),
        "poll_max": max(poll), "list_median": statistics.median(lists), "memory_median": statistics.median(memory),
    }  # fmt: skip
    print(json.dumps({
        "unit": unit, "processes": len(seen), "gpus": len(source.nvml.devices), "level": facts.level, "pids": facts.pids,
        "memory": dict(facts.memory), "ms": {name: round(value, 3) for name, value in numbers.items()},
        "rss_kib": rss, "uid": os.getuid(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
