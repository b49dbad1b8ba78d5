# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where training's hidden states come from: target threads that compute them, or batches that extraction committed."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from common import store as stores
from common.batches import read_batch
from common.bucket_queue import BucketQueue, Closed
from common.data import Sample
from common.drafter import Item
from common.handoff import Retry
from common.runtime import CONFIGURATION, UNAVAILABLE, Fatal, Job
from common.target import Target, new_stream, on_stream, replicate

Producer = Callable[[], None]
PRODUCER_ENDS_WITHIN_S = 30


@contextlib.contextmanager
def producing(job: Job, queue: BucketQueue, producers: list[Producer]) -> Iterator[None]:
    """Run each producer in a thread during the block; then close the queue and wait for them.

    A thread that is inside torch when the interpreter ends aborts the process.
    """

    def until_closed(producer: Producer) -> None:
        with contextlib.suppress(Closed):
            producer()

    threads = [job.spawn(f"source-{n}", lambda p=p: until_closed(p)) for n, p in enumerate(producers)]
    try:
        yield
    finally:
        queue.close()
        for thread in threads:
            thread.join(PRODUCER_ENDS_WITHIN_S)


def endless(items: list, seed: int, thread: int, threads: int) -> Iterator[Any]:
    """This thread's part of every epoch, each epoch in another order that all threads agree on."""
    for epoch in itertools.count():
        order = list(items)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        yield from order[thread::threads]


def computing(
    target: Target,
    devices: list[torch.device],
    samples: list[Sample],
    seed: int,
    batch: int,
    queue: BucketQueue,
    rank: int = 0,
    world: int = 1,
) -> list[Producer]:
    """One producer a device: it runs the target on ``batch`` samples at a time. ``world`` ranks share an epoch."""

    def producer(n: int) -> None:
        source = endless(samples, seed, rank * len(devices) + n, world * len(devices))
        mine = replicate(target, devices[n])
        with on_stream(new_stream(devices[n])):
            while True:
                chosen = list(itertools.islice(source, batch))
                for sample, features in zip(chosen, mine.hidden_states(chosen), strict=True):
                    queue.put(Item(sample, features), len(sample.tokens))

    return [lambda n=n: producer(n) for n in range(len(devices))]


class Committed:
    """The committed batches of one extraction, of every shard that has some."""

    def __init__(self, store: stores.S3Store, run_id: str, identity: dict[str, Any]):
        """Raises Fatal: 78 when the run was made from something else, 69 when it has nothing yet."""
        self._store, self._run_id = store, run_id
        with stores.available():
            manifest = stores.manifest(store, run_id)
            if manifest is None:
                raise Fatal(
                    UNAVAILABLE, "no_extraction", f"there is no {run_id}/{stores.RUN} in {store.uri}: start extraction."
                )
            fields = sorted(name for name, value in identity.items() if manifest.get(name) != value)
            if fields:
                raise Fatal(
                    CONFIGURATION,
                    "run_mismatch",
                    f"{run_id} in {store.uri} was extracted from something else: {', '.join(fields)} differ. "
                    "Give the same --target, --data, --layers and --max-length.",
                )
            shards = int(manifest["num_shards"])
            self._shards = [f"{run_id}/{stores.shard_name(n, shards)}" for n in range(1, shards + 1)]
            self.records = self.listing()
        if not self.records:
            raise Fatal(
                UNAVAILABLE, "no_batches", f"{run_id} in {store.uri} has no committed batch yet: wait for extraction."
            )

    def listing(self) -> dict[str, dict[str, Any]]:
        """Batch name to commit record."""
        return {
            f"{shard}/{stores.batch_name(number)}": record
            for shard in self._shards
            for number, record in stores.committed(self._store, shard).items()
        }

    def samples(self) -> list[str]:
        """The ids of what is committed."""
        return [sample for record in self.records.values() for sample in record["samples"]]

    def producer(
        self, retry: Retry, seed: int, usable: set[str], queue: BucketQueue, rank: int = 0, world: int = 1
    ) -> Producer:
        """Read batch after batch, each epoch in another order; what was committed meanwhile is in the next one.

        ``world`` ranks share an epoch; of fewer batches than ranks each reads all.
        """

        def read(name: str) -> list:
            found: list = []

            def once() -> None:
                key = f"{name}.safetensors"
                found[:] = read_batch(key, self._store.get(key), self.records[name])

            attempt(f"read {name}", once)
            return found

        def attempt(what: str, action: Callable[[], None]) -> None:
            if not retry(what, action):
                raise Closed  # a stop was requested

        def produce() -> None:
            for epoch in itertools.count():
                names = sorted(self.records)
                mixed = random.Random(f"{seed}:{epoch}")
                mixed.shuffle(names)
                for name in names[rank::world] if len(names) >= world else names:
                    pairs = read(name)
                    mixed.shuffle(pairs)
                    for sample, features in pairs:
                        if sample.id in usable:
                            queue.put(Item(sample, features), len(sample.tokens))
                attempt("list batches", lambda: self.records.update(self.listing()))

        return produce
