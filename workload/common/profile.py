# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Snapshots of where a step's time goes, every DFLASH_PROFILE_INTERVAL steps."""

from __future__ import annotations

import time
from typing import Any

import torch

from common.bucket_queue import BucketQueue


class Profile:
    """Time a step and the wait in it, queue health, and memory, since the snapshot before."""

    def __init__(self, every: int, queue: BucketQueue, devices: list[torch.device]):
        """``every`` in steps; 0: no snapshots."""
        self._every, self._queue = every, queue
        self._gpus = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._began, self._waited = time.monotonic(), 0.0

    def after(self, step: int, now: float) -> dict[str, Any] | None:
        """The snapshot's fields where ``step`` ends an interval, at monotonic time ``now``."""
        if not self._every or step % self._every:
            return None
        counters = self._queue.counters
        fields: dict[str, Any] = {
            "step_ms": 1000 * (now - self._began) / self._every,
            "wait_ms": 1000 * (counters.get_wait_s - self._waited) / self._every,
            "put_wait_s": counters.put_wait_s,
            "drawn": "/".join(map(str, counters.drawn)),
            "caps": "/".join(map(str, self._queue.caps)),
            "rss_mib": resident_mib(),
        }
        for gpu in self._gpus:
            statistics = torch.cuda.memory_stats(gpu)
            fields[f"alloc_mib_{gpu.index}"] = statistics["allocated_bytes.all.current"] >> 20
            fields[f"peak_mib_{gpu.index}"] = statistics["allocated_bytes.all.peak"] >> 20
            fields[f"reserved_mib_{gpu.index}"] = statistics["reserved_bytes.all.current"] >> 20
            fields[f"retries_{gpu.index}"] = statistics["num_alloc_retries"]
        self._began, self._waited = now, counters.get_wait_s
        return fields


def resident_mib() -> int:
    """Memory of this process in RAM."""
    with open("/proc/self/statm", encoding="ascii") as handle:
        return int(handle.read().split()[1]) * 4096 >> 20
