# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What follows the model in extraction: a thread that writes batches to the local disk, and some that commit them."""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.batches import write_batch
from common.data import Sample
from common.handoff import Closed, Handoff, Retry
from common.runtime import INTERNAL, Fatal, Job
from common.store import DONE, Store, batch_name, errors
from common.target import Target, new_stream, on_stream

SCHEMA = 1


@dataclass(frozen=True)
class Staged:
    """A batch on the local disk that waits for its commit."""

    number: int
    path: Path
    record: dict[str, Any]


class Committer:
    """Takes each batch's hidden states and commits them, several at once, beside the model's work on the next ones.

    A batch's file and its record follow one another, so a store that is far away is waited for twice a batch.

    Both queues are bounded, so that a slow store slows the model down and fills neither memory nor disk.
    """

    COMPUTED = 2  # batches whose tensors may wait for the local disk

    def __init__(
        self,
        job: Job,
        args: argparse.Namespace,
        store: Store,
        target: Target,
        batches: dict[int, list[Sample]],
        shard: str,
        done: int,
    ):
        """``batches`` are all of ``shard``, ``done`` of them committed; ``args`` are extraction's."""
        self._job, self._args, self._store, self._target = job, args, store, target
        self._plan, self._shard = batches, shard
        self.batches, self.samples, self.tokens, self.bytes = done, 0, 0, 0
        self._write_s = self._upload_s = self._elapsed_s = 0.0
        self._uploading, self._uploading_since = 0, 0.0
        self._began = time.monotonic()
        self._on_disk = Retry(job, args.max_consecutive_errors, (OSError,))
        self._computed: Handoff[tuple[int, list[torch.Tensor]]] = Handoff(self.COMPUTED)
        self._staged: Handoff[Staged] = Handoff(args.upload_queue)
        job.on_failure(self._abort)
        self._counting = threading.Lock()
        committing = [job.spawn(f"commit-{n}", self._commit) for n in range(args.upload_threads)]
        self._threads = [job.spawn("write", self._write), *committing]

    def put(self, number: int, states: list[torch.Tensor]) -> None:
        """Hand over a batch, one tensor a sample, waiting for room; raises Closed once nothing more is committed."""
        self._computed.put((number, states))

    def drain(self) -> None:
        """Wait until all that was put is committed or given up; raises what a thread died of."""
        self._computed.finish()
        for thread in self._threads:
            thread.join()
        self._job.check()
        self._elapsed_s = time.monotonic() - self._began

    def finish(self, batches: int, samples: int) -> bool:
        """Mark the shard as done; False when a stop was requested while that failed."""
        marker = json.dumps({"batches": batches, "samples": samples}).encode()
        return self._in_store()("finish", lambda: self._store.put_bytes(f"{self._shard}/{DONE}", marker))

    def costs(self) -> dict[str, Any]:
        """Fields of the exit line, after :meth:`drain`: seconds (of uploads side by side each counts once), bytes, tokens/s."""
        return {
            "elapsed_s": self._elapsed_s,
            "write_s": self._write_s,
            "upload_s": self._upload_s,
            "bytes": self.bytes,
            "tok_s": round(self.tokens / self._elapsed_s),
        }

    def _in_store(self) -> Retry:
        """One for each thread: what fails for all of them at once is one failure in a row, not several."""
        return Retry(self._job, self._args.max_consecutive_errors, errors())

    def _abort(self) -> None:
        self._computed.abort()
        self._staged.abort()

    def _write(self) -> None:
        with contextlib.suppress(Closed), on_stream(new_stream(self._target.device)):
            while True:
                number, states = self._computed.take()
                began = time.monotonic()
                staged = self._stage(number, states)
                if staged is None:
                    self._abort()
                    return
                self._write_s += time.monotonic() - began
                self._staged.put(staged)
        self._staged.finish()

    def _stage(self, number: int, states: list[torch.Tensor]) -> Staged | None:
        path = self._args.out_dir / self._shard / f"{batch_name(number)}.safetensors"
        metadata = {
            "run_id": self._args.run_id,
            "shard": self._shard,
            "batch": str(number),
            "layers": json.dumps(list(self._target.layers)),
        }
        record: dict[str, Any] = {}
        written = self._on_disk(
            f"write {path.name}", lambda: record.update(write_batch(path, self._plan[number], states, metadata))
        )
        return Staged(number, path, record) if written else None

    def _commit(self) -> None:
        in_store = self._in_store()
        with contextlib.suppress(Closed):
            while True:
                staged = self._staged.take()
                began = time.monotonic()
                with self._counting:
                    self._uploading_since = self._uploading_since if self._uploading else began
                    self._uploading += 1
                if not self._upload(in_store, staged, f"{self._shard}/{batch_name(staged.number)}"):
                    self._abort()
                    return
                with self._counting:
                    self._count(staged, began)

    def _count(self, staged: Staged, began: float) -> None:
        now = time.monotonic()
        self._uploading -= 1
        if not self._uploading:
            self._upload_s += now - self._uploading_since
        self.batches += 1
        self.tokens += staged.record["tokens"]
        self.samples += len(staged.record["samples"])
        self.bytes += staged.record["bytes"]
        self._job.step(
            self.batches,
            force_line=True,
            of=len(self._plan),
            samples=self.samples,
            tok_s=round(self.tokens / (now - self._began)),
            commit_s=now - began,
            queue=len(self._staged),
        )

    def _upload(self, in_store: Retry, staged: Staged, name: str) -> bool:
        """The file, then the record that makes it count; False when a stop was requested while one of them failed."""
        size = staged.path.stat().st_size
        if size != staged.record["bytes"]:
            raise Fatal(
                INTERNAL,
                "local_file",
                f"{staged.path} has {size} bytes and was written with {staged.record['bytes']}: somebody else changed "
                "it. It is not committed; a run with --resume makes it again.",
            )
        record = json.dumps({"schema": SCHEMA, "batch": staged.number, **staged.record}, sort_keys=True).encode()
        committed = in_store(
            f"upload {name}",
            lambda: self._store.put_file(f"{name}.safetensors", staged.path, lambda _bytes: self._job.advanced()),
        ) and in_store(f"commit {name}", lambda: self._store.put_bytes(f"{name}.json", record))
        if committed and self._args.s3_uri:
            staged.path.unlink()
        return committed
