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
import re
import time
from pathlib import Path
from typing import Any

from common import runtime
from common.runtime import Fatal, Job, whole

SCHEMA = 1


def parser() -> argparse.ArgumentParser:
    """The command committer."""
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
        "--upload-threads", type=whole(1), default=2, help="batches that are uploaded at once (default: %(default)s)"
    )
    p.add_argument(
        "--max-consecutive-errors",
        type=whole(1),
        default=8,
        help="failed writes of one thread in a row before exit 75 (default: %(default)s)",
    )
    return p


def body(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Load, resume, extract, commit; returns the fields of the exit committer."""
    from common import files
    from common import store as stores

    if args.shard > args.num_shards:
        raise Fatal(runtime.USAGE, "usage", f"--shard {args.shard} is above --num-shards {args.num_shards}.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", args.run_id):
        raise Fatal(runtime.USAGE, "usage", f"--run-id {args.run_id}: letters, digits, dot, dash and underscore.")
    job.labels["shard"] = stores.shard_name(args.shard, args.num_shards)
    files.check_folder(args.out_dir)
    store = stores.S3Store(args.s3_uri, args.s3_endpoint) if args.s3_uri else stores.LocalStore(args.out_dir)
    store.preflight()
    # Imported late: the first line, the arguments and the store must not wait for torch.
    import torch
    from common import target as targets
    from common.telemetry import Telemetry

    torch.set_num_threads(args.threads)
    job.telemetry = Telemetry(job.warn)
    target, samples, data_sha = targets.load(
        args.target, args.data, args.max_length, args.layers, args.draft_layers, targets.device_of(args.gpu)
    )
    manifest = {
        "schema": SCHEMA,
        **target.identity(data_sha, args.max_length),
        "hidden_size": target.hidden_size,
        "dtype": "bfloat16",
        "samples": len(samples),
        "batch_samples": args.batch_samples,
        "num_shards": args.num_shards,
    }
    with stores.available():
        stores.agree(store, args.run_id, manifest, write=not args.check)
    if args.check:
        return {"reason": "check", "samples": len(samples)}

    shard = f"{args.run_id}/{stores.shard_name(args.shard, args.num_shards)}"
    with files.exclusive(args.out_dir / shard):
        files.remove_unfinished(args.out_dir / shard)
        return extract(job, args, store, target, samples, shard)


def extract(job: Job, args: argparse.Namespace, store, target, samples: list, shard: str) -> dict[str, Any]:
    """Commit every batch of this shard that is not committed yet."""
    from common import store as stores
    from common.committer import Committer
    from common.handoff import Closed

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

    committer = Committer(job, args, store, target, batches, shard, len(done))
    job.loaded()
    computed_s = 0.0
    try:
        for number in todo:
            if job.stopping.is_set():
                break
            began = time.monotonic()
            states = target.hidden_states(batches[number])
            computed_s += time.monotonic() - began
            committer.put(number, states)
    except Closed:
        job.check()
    committer.drain()
    fields = {"batches": committer.batches, "samples": committer.samples, "tokens": committer.tokens}
    if committer.batches < len(batches) or not committer.finish(len(batches), len(mine)):
        return {"reason": "sigterm", **fields}
    job.ready()
    return {"reason": "done", **fields, "compute_s": computed_s, **committer.costs()}


if __name__ == "__main__":
    runtime.run(parser(), body)
