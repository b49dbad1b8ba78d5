#!/usr/bin/env python3
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Extract a target model's hidden states into batches that are committed one by one; one process a GPU.

Killed at any moment and started again with --resume, every sample is committed exactly once: a batch's samples follow
from run.json alone, and only its commit record, written last, makes it count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import runtime
from common.runtime import Fatal, Job, whole

SCHEMA = 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = runtime.Parser(description=__doc__.splitlines()[0])
    runtime.common_options(p)
    p.add_argument(
        "--target", default="tiny-random", help="tiny-random or a folder with a causal LM (default: %(default)s)"
    )
    p.add_argument("--data", type=Path, required=True, help="JSONL file (text or messages) or a folder of text files")
    p.add_argument("--gpu", type=whole(0), help="index among the visible GPUs; without it: CPU")
    p.add_argument("--threads", type=whole(1), default=1, help="torch threads on the CPU (default: %(default)s)")
    p.add_argument("--shard", type=whole(1), default=1, help="this process's shard, from 1 (default: %(default)s)")
    p.add_argument("--num-shards", type=whole(1), default=1, help="shards in all (default: %(default)s)")
    p.add_argument(
        "--layers", default="auto", help="auto (DFlash's choice) or layer ids like 1,9,17 (default: %(default)s)"
    )
    p.add_argument(
        "--draft-layers", type=whole(1), help="for --layers auto: how many (default: 2 for tiny-random, else 5)"
    )
    p.add_argument(
        "--max-length",
        type=whole(1),
        default=512,
        help="longer samples are cut into pieces (default: %(default)s tokens)",
    )
    p.add_argument("--batch-samples", type=whole(1), default=32, help="samples in one file (default: %(default)s)")
    p.add_argument(
        "--out-dir",
        type=Path,
        required=True,
        help="where batches are written before their upload, or kept without --s3-uri",
    )
    p.add_argument("--s3-uri", help="s3://BUCKET/PREFIX; without it batches are committed in --out-dir")
    p.add_argument("--s3-endpoint", help="URL of an S3 server other than AWS's")
    p.add_argument(
        "--run-id", default="reference", help="name of the run; bound to model, data and layout (default: %(default)s)"
    )
    p.add_argument("--resume", action="store_true", help="continue what this run id has already committed")
    p.add_argument(
        "--upload-queue", type=whole(1), default=4, help="batches that may wait for their upload (default: %(default)s)"
    )
    p.add_argument(
        "--max-consecutive-errors",
        type=whole(1),
        default=8,
        help="failed writes in a row before exit 75 (default: %(default)s)",
    )
    return p


@dataclass(frozen=True)
class Staged:
    """A batch on the local disk that waits for its commit."""

    number: int
    path: Path
    record: dict[str, Any]


class Retry:
    """Attempts with a growing pause; counts failures in a row over all users of one instance."""

    def __init__(self, job: Job, limit: int, errors: tuple[type[Exception], ...], first_pause_s: float = 0.5):
        self._job, self._limit, self._errors, self._first = job, limit, errors, first_pause_s
        self._row = 0
        self._lock = threading.Lock()

    def __call__(self, what: str, action: Callable[[], None]) -> bool:
        """Run ``action`` until it succeeds; False when a stop was requested while it failed; 75 at the limit."""
        while True:
            try:
                action()
            except self._errors as error:
                with self._lock:
                    self._row += 1
                    row = self._row
                self._job.event("error", what=what, row=row, limit=self._limit, msg=str(error)[:300])
                if row >= self._limit:
                    raise Fatal(
                        runtime.TOO_MANY_ERRORS, "too_many_errors", f"{what} failed {row} times in a row: {error}"
                    ) from error
                if self._job.stopping.wait(min(self._first * 2 ** (row - 1), 30)):
                    return False
            else:
                with self._lock:
                    self._row = 0
                return True


def write_batch(path: Path, samples: list, states: list, metadata: dict[str, str]) -> dict[str, Any]:
    """Write one packed safetensors file by rename; returns what its commit record says about it."""
    import torch
    from safetensors.torch import save

    lengths = torch.tensor([0, *(len(sample.tokens) for sample in samples)])
    data = save(
        {
            "hidden_states": torch.cat(states).to(torch.bfloat16).cpu().contiguous(),
            "token_ids": torch.tensor([token for sample in samples for token in sample.tokens], dtype=torch.int32),
            "offsets": lengths.cumsum(0),
        },
        metadata={**metadata, "sample_ids": json.dumps([sample.id for sample in samples])},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    runtime.write_atomic(path, data)
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "samples": [sample.id for sample in samples],
        "tokens": int(lengths.sum()),
    }


def body(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Load, resume, extract, commit; returns the fields of the exit line."""
    from common import store as stores

    if args.shard > args.num_shards:
        raise Fatal(runtime.USAGE, "usage", f"--shard {args.shard} is above --num-shards {args.num_shards}.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.run_id):
        raise Fatal(runtime.USAGE, "usage", f"--run-id {args.run_id}: letters, digits, dot, dash and underscore.")
    job.labels["shard"] = stores.shard_name(args.shard, args.num_shards)
    store = stores.S3Store(args.s3_uri, args.s3_endpoint) if args.s3_uri else stores.LocalStore(args.out_dir)
    store.preflight()
    # Imported late: the first line, the arguments and the store must not wait for torch.
    import torch
    from common import target as targets
    from common.telemetry import Telemetry

    torch.set_num_threads(args.threads)
    job.telemetry = Telemetry(job.warn)
    target, samples, data_sha = targets.load(
        args.target, args.data, args.max_length, args.layers, args.draft_layers, args.gpu
    )
    manifest = {
        "schema": SCHEMA,
        "model": target.fingerprint,
        "layers": list(target.layers),
        "hidden_size": target.hidden_size,
        "dtype": "bfloat16",
        "data_sha256": data_sha,
        "samples": len(samples),
        "max_length": args.max_length,
        "batch_samples": args.batch_samples,
        "num_shards": args.num_shards,
    }
    with stores.available():
        stores.agree(store, args.run_id, manifest, write=not args.check)
    if args.check:
        return {"reason": "check", "samples": len(samples)}

    shard = f"{args.run_id}/{stores.shard_name(args.shard, args.num_shards)}"
    with runtime.exclusive(args.out_dir / shard):
        return extract(job, args, store, target, samples, shard)


def extract(job: Job, args: argparse.Namespace, store, target, samples: list, shard: str) -> dict[str, Any]:
    """Commit every batch of this shard that is not committed yet."""
    from common import store as stores

    mine = samples[args.shard - 1 :: args.num_shards]
    batches = {n + 1: mine[i : i + args.batch_samples] for n, i in enumerate(range(0, len(mine), args.batch_samples))}
    with stores.available():
        aborted = store.abort_dangling(f"{shard}/")
        done = stores.committed(store, shard)
        finished = store.get(f"{shard}/{stores.DONE}") is not None
    job.event(
        "resume",
        batches=len(batches),
        committed=len(done),
        aborted_uploads=aborted,
        layers=",".join(map(str, target.layers)),
    )
    if done and not args.resume:
        raise Fatal(
            runtime.CONFIGURATION,
            "not_empty",
            f"--run-id {args.run_id} already has {len(done)} committed batches here. "
            "Pass --resume or choose another --run-id.",
        )
    if args.s3_uri:
        for number in done:
            # A kill between commit and unlink leaves this copy.
            (args.out_dir / shard / f"{stores.batch_name(number)}.safetensors").unlink(missing_ok=True)
    todo = [number for number in batches if number not in done]
    if not todo and finished:
        job.ready()
        return {"reason": "done", "already": 1, "batches": len(batches)}

    retry = Retry(job, args.max_consecutive_errors, stores.errors())
    queue: stores.Handoff[Staged] = stores.Handoff(args.upload_queue)
    job.on_failure(queue.abort)
    started = time.monotonic()
    count = {"batches": len(done), "tokens": 0, "samples": 0, "bytes": 0}

    def commit() -> None:
        while True:
            try:
                staged = queue.take()
            except stores.Closed:
                return
            name = f"{shard}/{stores.batch_name(staged.number)}"
            began = time.monotonic()
            record = json.dumps({"schema": SCHEMA, "batch": staged.number, **staged.record}, sort_keys=True).encode()
            if not (
                retry(f"upload {name}", lambda name=name, path=staged.path: store.put_file(f"{name}.safetensors", path))
                and retry(f"commit {name}", lambda name=name, record=record: store.put_bytes(f"{name}.json", record))
            ):
                queue.abort()
                return
            if args.s3_uri:
                staged.path.unlink()
            count["batches"] += 1
            count["tokens"] += staged.record["tokens"]
            count["samples"] += len(staged.record["samples"])
            count["bytes"] += staged.record["bytes"]
            now = time.monotonic()
            job.step(
                count["batches"],
                force_line=True,
                of=len(batches),
                samples=count["samples"],
                tok_s=round(count["tokens"] / (now - started)),
                commit_s=now - began,
                queue=len(queue),
            )

    job.loaded()
    committer = job.spawn("commit", commit)
    compute_s = 0.0
    try:
        for number in todo:
            if job.stopping.is_set():
                break
            began = time.monotonic()
            states = target.hidden_states(batches[number])
            path = args.out_dir / shard / f"{stores.batch_name(number)}.safetensors"
            record: dict[str, Any] = {}
            metadata = {
                "run_id": args.run_id,
                "shard": shard,
                "batch": str(number),
                "layers": json.dumps(list(target.layers)),
            }

            def write(number=number, path=path, states=states, metadata=metadata, record=record) -> None:
                record.update(write_batch(path, batches[number], states, metadata))

            written = retry(f"write {path.name}", write)
            compute_s += time.monotonic() - began
            if not written:
                break
            queue.put(Staged(number, path, record))
    except stores.Closed:
        job.check()
    queue.finish()
    committer.join()
    job.check()
    total = {"batches": count["batches"], "samples": count["samples"], "tokens": count["tokens"]}
    if count["batches"] < len(batches):
        return {"reason": "sigterm", **total}
    marker = json.dumps({"batches": len(batches), "samples": len(mine)}).encode()
    if not retry("finish", lambda: store.put_bytes(f"{shard}/{stores.DONE}", marker)):
        return {"reason": "sigterm", **total}
    job.ready()
    elapsed = time.monotonic() - started
    return {
        "reason": "done",
        **total,
        "tok_s": round(count["tokens"] / elapsed),
        "compute_s": compute_s,
        "bytes": count["bytes"],
    }


if __name__ == "__main__":
    runtime.run(parser(), body)
