# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The queue between target threads, which compute hidden states, and drafter threads, which train on them."""

from __future__ import annotations

import math
import random
import threading
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Closed(Exception):
    """The queue was closed while, or before, the caller waited."""


def quartile_edges(lengths: list[int]) -> list[int]:
    """Three bucket edges at the quartiles of ``lengths``; fewer where quartiles coincide."""
    ordered = sorted(lengths)
    return sorted({ordered[len(ordered) * quarter // 4] for quarter in (1, 2, 3)})


@dataclass
class Counters:
    """What happened since the start: waits in seconds, items drawn per bucket."""

    put_wait_s: float = 0.0
    get_wait_s: float = 0.0
    drawn: list[int] = field(default_factory=list)


class BucketQueue(Generic[Item]):
    """A bounded queue whose items lie in buckets by length.

    ``put`` blocks at ``max_depth`` in all, and at ``ceil(1.5 · share · max_depth)`` in the item's bucket, where
    share is the bucket's part of the data: a burst of one length cannot fill the queue.  ``get(k)`` waits for
    ``min_ready`` items and draws bucket by bucket, weighted by occupancy; a micro-batch never comes from the longest
    bucket alone while another one has items, because training on such batches degraded.
    """

    def __init__(self, lengths: list[int], edges: list[int], min_ready: int, max_depth: int, producers: int, seed: int):
        """``lengths`` of all samples give the shares; ``edges`` are upper bounds, the last bucket is open."""
        if not 1 <= min_ready <= max_depth:
            raise ValueError(f"min_ready {min_ready} is not between 1 and max_depth {max_depth}")
        self.edges = sorted(edges)
        count = [0] * (len(self.edges) + 1)
        for length in lengths:
            count[self.bucket(length)] += 1
        self.caps = [max(1, math.ceil(1.5 * n / len(lengths) * max_depth)) for n in count]
        self._min_ready, self._max_depth, self._producers = min_ready, max_depth, producers
        self._buckets: list[deque[Item]] = [deque() for _ in count]
        self._random = random.Random(seed)
        self._owed = [0.0] * len(count)
        self._changed = threading.Condition()
        self._blocked_by_cap = 0
        self._closed = False
        self.counters = Counters(drawn=[0] * len(count))

    def bucket(self, length: int) -> int:
        """The bucket of an item of ``length``; an edge belongs to the bucket below it."""
        return bisect_left(self.edges, length)

    def depths(self) -> list[int]:
        """Items in each bucket now."""
        return [len(bucket) for bucket in self._buckets]

    def health(self) -> dict[str, float | list[int]]:
        """Numbers for metrics: depth in all and by bucket, what was drawn, and the seconds waited on both sides."""
        depths, counters = self.depths(), self.counters
        return {
            "queue_depth": sum(depths),
            "bucket_depth": depths,
            "bucket_drawn": list(counters.drawn),
            "put_wait_seconds": counters.put_wait_s,
            "get_wait_seconds": counters.get_wait_s,
        }

    def put(self, item: Item, length: int) -> None:
        """Append, waiting for room; raises Closed."""
        bucket = self.bucket(length)
        began = time.monotonic()
        with self._changed:
            while not self._closed:
                if sum(self.depths()) < self._max_depth:
                    if len(self._buckets[bucket]) < self.caps[bucket]:
                        break
                    # Counted: a get that waits for min_ready while every producer waits here would wait forever.
                    self._blocked_by_cap += 1
                    self._changed.notify_all()
                    self._changed.wait()
                    self._blocked_by_cap -= 1
                else:
                    self._changed.wait()
            self.counters.put_wait_s += time.monotonic() - began
            if self._closed:
                raise Closed
            self._buckets[bucket].append(item)
            self._changed.notify_all()

    def _enough(self, k: int) -> bool:
        depth = sum(self.depths())
        return depth >= max(k, self._min_ready) or (depth > 0 and self._blocked_by_cap >= self._producers)

    def get(self, k: int) -> list[Item]:
        """Up to ``k`` items (fewer only when no producer can add one); raises Closed."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._enough(k))
            self.counters.get_wait_s += time.monotonic() - began
            if self._closed:
                raise Closed
            chosen = [self._draw(allow_last=True) for _ in range(min(k, sum(self.depths())) - 1)]
            # The last draw decides whether all of them come from the longest bucket.
            others = any(bucket != len(self._buckets) - 1 for bucket, _item in chosen)
            chosen.append(self._draw(allow_last=others or not chosen))
            self._changed.notify_all()
            return [item for _bucket, item in chosen]

    def _draw(self, allow_last: bool) -> tuple[int, Item]:
        """One item; each draw adds to what every bucket is owed its part of what is there, and takes one from its own.

        So the parts are kept to within a few draws, and what the longest bucket may not have now it gets later; a plain
        weighted choice would be off by a tenth, now and then, after ten thousand draws.
        """
        depths = self.depths()
        total = sum(depths)
        for bucket, depth in enumerate(depths):
            self._owed[bucket] += depth / total
        if not allow_last and any(depths[:-1]):
            depths[-1] = 0
        weights = [max(owed, 0.0) if depth else 0.0 for owed, depth in zip(self._owed, depths, strict=True)]
        (bucket,) = self._random.choices(range(len(depths)), weights if any(weights) else depths)
        self._owed[bucket] -= 1
        self.counters.drawn[bucket] += 1
        return bucket, self._buckets[bucket].popleft()

    def close(self) -> None:
        """Wake everybody with Closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
