#!/usr/bin/env python3
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Train a DFlash drafter on hidden states that target threads compute online; everything in one process.

Target threads fill a bucketed queue, drafter threads drain it; --source s3 fills it from extraction's committed batches
instead.  With several drafters each has a replica; their gradients are averaged on the first, which steps and hands its
weights back.  Under torchrun several such processes train as one in the same way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from common import metrics, runtime
from common.place import take_gpus
from common.runtime import Fatal, Job, whole


def numbers(text: str) -> list[int]:
    """An argparse type: ``0,1,2``."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 0 or len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"{text}: different numbers from 0, separated by commas")
    return values


def places(text: str) -> list[int | None]:
    """An argparse type: GPUs like ``0,1``, or ``cpu`` once for each thread there (None)."""
    parts = text.split(",")
    return [None] * len(parts) if set(parts) == {"cpu"} else list(numbers(text))


def bucket_edges(text: str) -> list[int] | None:
    """An argparse type: ``auto`` (None) or upper bounds in tokens."""
    return None if text == "auto" else numbers(text)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = runtime.Parser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    runtime.common_options(p)
    data = p.add_argument_group("target and data")
    data.add_argument("--target", default="tiny-random", help="tiny-random or a folder with a causal LM")
    data.add_argument(
        "--data", type=Path, required=True, help="JSONL file (text or messages) or a folder of text files"
    )
    data.add_argument("--max-length", type=whole(3), default=512, help="tokens; longer samples are cut into pieces")
    data.add_argument("--layers", default="auto", help="target layers: auto (DFlash's choice) or ids like 1,9,17")
    data.add_argument("--draft-layers", type=whole(1), help="for --layers auto; unset: 2 for tiny-random, else 5")
    data.add_argument(
        "--mask-token-id", type=whole(0), help="token that stands for a masked one; unset: the tokenizer's"
    )
    data.add_argument(
        "--source",
        choices=("online", "s3"),
        default="online",
        help="hidden states: computed by target threads, or read from what extraction committed",
    )
    data.add_argument("--s3-uri", help="for --source s3: extraction's s3://BUCKET/PREFIX")
    data.add_argument("--s3-endpoint", help="URL of an S3 server other than AWS's")
    data.add_argument("--run-id", default="reference", help="for --source s3: extraction's run id")
    data.add_argument(
        "--max-consecutive-errors", type=whole(1), default=8, help="failed reads from S3 in a row before exit 75"
    )
    place = p.add_argument_group("devices")
    place.add_argument(
        "--target-gpus", type=places, default="cpu", help="indexes among the visible GPUs, or cpu; one thread each"
    )
    place.add_argument(
        "--drafter-gpus", type=places, default="cpu", help="indexes among the visible GPUs, or cpu; one thread each"
    )
    place.add_argument(
        "--peer-timeout",
        type=whole(1),
        default=300,
        help="under torchrun: seconds that the other ranks may take to join, for a step and for a checkpoint",
    )
    place.add_argument("--threads", type=whole(1), default=1, help="torch threads of one operation on the CPU")
    place.add_argument(
        "--attn", choices=("sdpa", "flex"), help="the drafter's attention; unset: flex on GPUs, sdpa on the CPU"
    )
    place.add_argument(
        "--fx-threadlocal",
        choices=("auto", "on", "off"),
        default="auto",
        help="make torch.fx's tracing flag count for one thread; auto: where several threads compile",
    )
    queue = p.add_argument_group("hidden-state queue")
    queue.add_argument(
        "--min-ready", type=whole(1), default=30, help="items that must be there before a batch is drawn"
    )
    queue.add_argument("--max-depth", type=whole(1), default=90, help="items at which target threads wait")
    queue.add_argument(
        "--bucket-edges", type=bucket_edges, default="auto", help="upper bounds in tokens; auto: quartiles"
    )
    queue.add_argument("--target-batch", type=whole(1), default=8, help="samples in one target forward pass")
    train = p.add_argument_group("training")
    train.add_argument("--block-size", type=whole(2), default=8, help="tokens a draft block has")
    train.add_argument("--anchors", type=whole(1), default=4, help="blocks drawn from one sample")
    train.add_argument("--micro-batch", type=whole(1), default=4, help="samples per drafter and step")
    train.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    train.add_argument("--warmup-steps", type=whole(0), default=20, help="steps of linear warm-up")
    train.add_argument(
        "--max-steps", type=whole(0), default=0, help="steps in all, earlier runs included; 0: until stopped"
    )
    train.add_argument("--seed", type=whole(0), default=0, help="of order, anchors and initial weights")
    keep = p.add_argument_group("checkpoints and metrics")
    keep.add_argument("--ckpt-dir", type=Path, required=True, help="folder of the checkpoints; one process at a time")
    keep.add_argument("--ckpt-every", type=whole(1), default=200, help="steps")
    keep.add_argument("--ckpt-keep", type=whole(1), default=3, help="newest checkpoints to keep")
    keep.add_argument("--resume", default="auto", help="auto, never, or the folder of one checkpoint")
    keep.add_argument(
        "--metrics", type=metrics.sinks, default="jsonl", help="any of jsonl,textfile,wandb (wandb: offline)"
    )
    return p


def body(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Load, resume, train; returns the fields of the exit line."""
    check_arguments(args)
    take_gpus(job.place)
    # Imported late: the first line and the arguments must not wait for torch.
    import torch
    from common import attention, files, fx_guard, ranks, sources
    from common import store as stores
    from common import target as targets
    from common.telemetry import Telemetry

    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    if job.place.rank == 0:
        files.check_folder(args.ckpt_dir)
    job.telemetry = Telemetry(job.warn)
    args.targets = [targets.device_of(gpu) for gpu in args.target_gpus]
    args.drafters = [targets.device_of(gpu) for gpu in args.drafter_gpus]
    on_cpu = [device for device in args.drafters if device.type == "cpu"]
    args.attn = args.attn or ("sdpa" if on_cpu else "flex")
    if args.attn == "flex" and on_cpu:
        raise Fatal(
            runtime.CONFIGURATION,
            "attn",
            "--attn flex: torch has no backward pass of flex attention on the CPU. Pass sdpa, or --drafter-gpus.",
        )
    store = None
    if args.source == "s3":
        store = stores.S3Store(args.s3_uri, args.s3_endpoint)
        store.preflight()
    # With --source s3 the target only lends its embedding and output head.
    place = torch.device("cpu") if store else args.targets[0]
    loaded, samples, data_sha = targets.load(
        args.target, args.data, args.max_length, args.layers, args.draft_layers, place
    )
    committed = sources.Committed(store, args.run_id, loaded.identity(data_sha, args.max_length)) if store else None
    # A block needs a token before its anchor, the anchor, and one to predict.
    usable = [sample for sample in samples if len(sample.tokens) >= 3]
    if committed:
        there = set(committed.samples())
        usable = [sample for sample in usable if sample.id in there]
    if not usable:
        raise Fatal(runtime.BAD_DATA, "bad_data", f"--data {args.data}: no sample has three tokens.")
    producers = job.place.world * len(args.targets)
    if len(usable) < producers:
        raise Fatal(
            runtime.BAD_DATA, "bad_data", f"--data {args.data}: {len(usable)} samples for {producers} target threads."
        )
    mask_id = loaded.mask_token(args.mask_token_id)
    if args.check:
        return {"reason": "check", "samples": len(usable)}
    # Before anything is compiled: torch looks the flag's readers up when it wraps a function.
    args.fx_guard = fx_guard.wanted(args.fx_threadlocal, len(args.drafters) if args.attn == "flex" else 0)
    if args.fx_guard:
        fx_guard.install()
    if args.attn == "flex":
        attention.allow_flex()
    identity = {
        "model": loaded.fingerprint,
        "layers": list(loaded.layers),
        "data_sha256": data_sha,
        "block_size": args.block_size,
        "mask_token_id": mask_id,
    }
    # Rank 0 alone touches the folder.
    with files.exclusive(args.ckpt_dir) if job.place.rank == 0 else contextlib.nullcontext():
        together = (
            ranks.Alone()
            if job.place.alone
            else ranks.Ranks(job, job.place, args.drafters[0], timeout=args.peer_timeout)
        )
        return train(job, args, loaded, usable, mask_id, identity, together, committed)


def check_arguments(args: argparse.Namespace) -> None:
    """What argparse cannot say; raises Fatal."""
    if args.min_ready > args.max_depth:
        raise Fatal(runtime.USAGE, "usage", f"--min-ready {args.min_ready} is above --max-depth {args.max_depth}.")
    if args.source == "s3" and not args.s3_uri:
        raise Fatal(runtime.USAGE, "usage", "--source s3 needs --s3-uri, which extraction was given.")
    if args.source == "online" and args.s3_uri:
        raise Fatal(runtime.USAGE, "usage", f"--s3-uri {args.s3_uri} is read with --source s3 alone.")
    interval = os.environ.get("DFLASH_PROFILE_INTERVAL", "0")
    if not interval.isdecimal():
        raise Fatal(runtime.CONFIGURATION, "profile", f"DFLASH_PROFILE_INTERVAL={interval}: give a number of steps.")
    args.profile_every = int(interval)


def train(
    job: Job, args, loaded, samples: list, mask_id: int, identity: dict[str, Any], ranks, committed=None
) -> dict[str, Any]:
    """Run steps until --max-steps or a stop request; a checkpoint is written either way."""
    import torch
    from common import checkpoint, sources
    from common.attention import FirstCalls
    from common.bucket_queue import BucketQueue, Closed, quartile_edges
    from common.handoff import Retry
    from common.profile import Profile
    from common.replicas import Replicas
    from common.store import errors

    first_calls = FirstCalls(lambda **fields: job.event("compiled", **fields)) if args.attn == "flex" else None
    replicas = Replicas(loaded, args.drafters, args.anchors, args.block_size, mask_id, args.seed, first_calls)
    model = replicas.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    step = 0
    found = checkpoint.find(args.ckpt_dir, args.resume) if ranks.first else None
    if found:
        step = checkpoint.load(found, model, optimizer, identity)["step"]
    step = ranks.begin(model, step)
    job.event(
        "resume",
        step=step,
        checkpoint=found,
        samples=len(samples),
        parameters=sum(p.numel() for p in model.parameters()),
        source=args.source,
        attn=args.attn,
        fx_threadlocal="on" if args.fx_guard else "off",
        targets="/".join(map(str, args.targets)),
        drafters="/".join(map(str, args.drafters)),
    )
    if args.max_steps and step >= args.max_steps:
        job.ready()
        ranks.end()
        return {"reason": "done", "already": 1, "step": step}

    # From the step number: a resumed run neither repeats the first epoch's order nor needs the sampler's state on disk.
    seed = args.seed + step
    replicas.begin(seed, ranks.rank)
    lengths = [len(sample.tokens) for sample in samples]
    edges = args.bucket_edges or quartile_edges(lengths)
    producers = 1 if committed else len(args.targets)
    queue: BucketQueue = BucketQueue(lengths, edges, args.min_ready, args.max_depth, producers, seed)
    if job.place.alone:
        job.on_stop(queue.close)  # of several ranks none stops before the others
    job.on_failure(queue.close)
    if committed:
        retry = Retry(job, args.max_consecutive_errors, errors())
        bodies = [committed.producer(retry, seed, {sample.id for sample in samples}, queue, ranks.rank, ranks.world)]
    else:
        bodies = sources.computing(
            loaded, args.targets, samples, seed, args.target_batch, queue, ranks.rank, ranks.world
        )

    numbers_to = metrics.Metrics(args.metrics if ranks.first else [], args.ckpt_dir)
    profile = Profile(args.profile_every, queue, [*args.targets, *args.drafters])
    saved = step
    asked: list[int] = []  # ranks that were asked to stop
    window: list[float] = []
    tokens, window_began = 0, time.monotonic()

    def save() -> None:
        nonlocal saved
        if not ranks.first:
            return
        began = time.monotonic()
        path = checkpoint.save(args.ckpt_dir, step, model, optimizer, {"identity": identity}, args.ckpt_keep)
        saved = step
        job.event("checkpoint", step=step, path=path, took_s=time.monotonic() - began)

    job.loaded()
    with sources.producing(job, queue, bodies), replicas:
        while not asked and not (args.max_steps and step >= args.max_steps):
            rate = args.lr * min(1.0, (step + 1) / max(args.warmup_steps, 1))
            for group in optimizer.param_groups:
                group["lr"] = rate
            try:
                loss, count = replicas.gradients(lambda: queue.get(args.micro_batch))
            except Closed:
                job.check()
                break
            step += 1
            window.append(loss)
            tokens += count
            depths = queue.depths()
            now = time.monotonic()
            mean, tok_s = sum(window) / len(window), tokens / max(now - window_began, 1e-9)
            if job.step(
                step,
                force_line=step == args.max_steps,
                loss=round(mean, 4),
                tok_s=round(tok_s),
                q_depth=sum(depths),
                q_buckets="/".join(map(str, depths)),
            ):
                numbers_to.write(step, {"loss": mean, "tokens_per_second": tok_s, "lr": rate, **queue.health()})
                window, tokens, window_began = [], 0, now
            # After the line: a rank that does not come this far shows a lower step than those that wait for it here.
            ranks.average(model, job.stopping.is_set())
            if ranks.first:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            optimizer.zero_grad()
            asked = ranks.share(model)
            replicas.share()
            job.check()
            if snapshot := profile.after(step, now):
                job.event("profile", **snapshot)
            if step % args.ckpt_every == 0:
                save()
    if step != saved:
        save()
    numbers_to.close()
    ranks.end()
    if args.max_steps and step >= args.max_steps:
        return {"reason": "done", "step": step}
    if job.stopping.is_set():
        return {"reason": "sigterm", "step": step}
    return {"reason": "peer_stopped", "peers": ",".join(map(str, asked)), "step": step}


if __name__ == "__main__":
    runtime.run(parser(), body)
