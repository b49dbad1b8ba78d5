#!/usr/bin/env python3
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Train a DFlash drafter on hidden states that target threads compute online; everything in one process.

Target threads fill a bucketed queue, drafter threads drain it.  With several drafters each has a replica; their
gradients are averaged on the first, which steps and hands its weights back.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import runtime
from common.runtime import Fatal, Job, whole

METRICS = ("jsonl", "textfile", "wandb")
TARGET_ENDS_WITHIN_S = 30


def numbers(text: str) -> list[int]:
    """An argparse type: ``0,1,2``."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 0 or len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"{text}: different numbers from 0, separated by commas")
    return values


def metric_names(text: str) -> list[str]:
    """An argparse type: some of jsonl, textfile, wandb."""
    names = [part for part in text.split(",") if part]
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(METRICS)}")
    return names


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
    place = p.add_argument_group("devices")
    place.add_argument(
        "--target-gpus", type=numbers, help="indexes among the visible GPUs, one thread each; unset: CPU"
    )
    place.add_argument(
        "--drafter-gpus", type=numbers, help="indexes among the visible GPUs, one thread each; unset: CPU"
    )
    place.add_argument("--threads", type=whole(1), default=1, help="torch threads of one operation on the CPU")
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
        "--metrics", type=metric_names, default="jsonl", help="any of jsonl,textfile,wandb (wandb: offline)"
    )
    return p


class Metrics:
    """Where numbers of a logged step go besides the log."""

    def __init__(self, names: list[str], folder: Path):
        self._jsonl = open(folder / "metrics.jsonl", "a", buffering=1) if "jsonl" in names else None  # noqa: SIM115
        self._textfile = folder / "metrics.prom" if "textfile" in names else None
        self._wandb = None
        if "wandb" in names:
            os.environ["WANDB_MODE"] = "offline"
            try:
                import wandb
            except ImportError as error:
                raise Fatal(
                    runtime.CONFIGURATION, "wandb", f"--metrics wandb: {error}. Install it or drop it."
                ) from None
            self._wandb = wandb.init(project="dflash", dir=str(folder))

    def write(self, step: int, values: dict[str, float]) -> None:
        """One record of numbers."""
        if self._jsonl:
            self._jsonl.write(json.dumps({"time": round(time.time(), 3), "step": step, **values}) + "\n")
        if self._textfile:
            # node_exporter's textfile collector reads whole files, hence the rename.
            lines = [f"dflash_training_{name} {value:.9g}\n" for name, value in {"step": step, **values}.items()]
            runtime.write_atomic(self._textfile, "".join(lines).encode())
        if self._wandb:
            self._wandb.log(values, step=step)


def endless(samples: list, seed: int, thread: int, threads: int) -> Iterator[Any]:
    """This thread's part of every epoch, each epoch in another order that all threads agree on."""
    for epoch in itertools.count():
        order = list(samples)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        yield from order[thread::threads]


def body(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Load, resume, train; returns the fields of the exit line."""
    if args.min_ready > args.max_depth:
        raise Fatal(runtime.USAGE, "usage", f"--min-ready {args.min_ready} is above --max-depth {args.max_depth}.")
    args.profile_every = profile_interval()
    # Imported late: the first line and the arguments must not wait for torch.
    import torch
    from common import target as targets
    from common.telemetry import Telemetry

    torch.set_num_threads(args.threads)
    job.telemetry = Telemetry(job.warn)
    devices = {
        "target": [targets.device_of(gpu) for gpu in args.target_gpus or [None]],
        "drafter": [targets.device_of(gpu) for gpu in args.drafter_gpus or [None]],
    }
    loaded, samples, data_sha = targets.load(
        args.target, args.data, args.max_length, args.layers, args.draft_layers, (args.target_gpus or [None])[0]
    )
    # A block needs a token before its anchor, the anchor, and one to predict.
    usable = [sample for sample in samples if len(sample.tokens) >= 3]
    if not usable:
        raise Fatal(runtime.BAD_DATA, "bad_data", f"--data {args.data}: no sample has three tokens.")
    mask_id = loaded.tokenizer.mask_token_id if args.mask_token_id is None else args.mask_token_id
    if mask_id is None or mask_id >= loaded.model.config.vocab_size:
        raise Fatal(
            runtime.CONFIGURATION,
            "mask_token",
            f"mask token {mask_id}: pass --mask-token-id, a token below {loaded.model.config.vocab_size} "
            "that no text has.",
        )
    if args.check:
        return {"reason": "check", "samples": len(usable)}
    identity = {
        "model": loaded.fingerprint,
        "layers": list(loaded.layers),
        "data_sha256": data_sha,
        "block_size": args.block_size,
        "mask_token_id": mask_id,
    }
    with runtime.exclusive(args.ckpt_dir):
        return train(job, args, loaded, usable, mask_id, identity, devices)


def train(job: Job, args, loaded, samples: list, mask_id: int, identity: dict[str, Any], devices) -> dict[str, Any]:
    """Run steps until --max-steps or a stop request; a checkpoint is written either way."""
    import torch
    from common import checkpoint, drafter
    from common.bucket_queue import BucketQueue, Closed, quartile_edges
    from common.target import replicate

    first, *others = devices["drafter"]
    torch.manual_seed(args.seed)
    model = drafter.build(loaded, args.block_size, mask_id).to(first, torch.float32)
    replicas = [
        model,
        *(drafter.build(loaded, args.block_size, mask_id).to(device, torch.float32) for device in others),
    ]
    heads = [drafter.SharedHead(loaded, device) for device in devices["drafter"]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = (lambda step: min(1.0, (step + 1) / args.warmup_steps)) if args.warmup_steps else (lambda step: 1.0)
    step = 0
    found = checkpoint.find(args.ckpt_dir, args.resume)
    if found:
        step = checkpoint.load(found, model, optimizer, identity)["step"]
    job.event(
        "resume",
        step=step,
        checkpoint=found,
        samples=len(samples),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    if args.max_steps and step >= args.max_steps:
        job.ready()
        return {"reason": "done", "already": 1, "step": step}

    # From the step number: a resumed run neither repeats the first epoch's order nor needs the sampler's state on disk.
    seed = args.seed + step
    lengths = [len(sample.tokens) for sample in samples]
    edges = args.bucket_edges or quartile_edges(lengths)
    threads = len(devices["target"])
    queue: BucketQueue = BucketQueue(lengths, edges, args.min_ready, args.max_depth, producers=threads, seed=seed)
    job.on_stop(queue.close)
    job.on_failure(queue.close)

    def produce(thread: int) -> None:
        source = endless(samples, seed, thread, threads)
        mine = replicate(loaded, devices["target"][thread])
        try:
            while True:
                batch = list(itertools.islice(source, args.target_batch))
                for sample, features in zip(batch, mine.hidden_states(batch), strict=True):
                    queue.put(drafter.Item(sample, features), len(sample.tokens))
        except Closed:
            pass

    generators = [torch.Generator().manual_seed(seed * 1000 + n) for n in range(len(replicas))]

    def gradient(n: int) -> tuple[float, int]:
        """Forward and backward of replica ``n`` on its own micro-batch: loss, context tokens."""
        items = queue.get(args.micro_batch)
        blocks = drafter.make_blocks(items, args.anchors, args.block_size, mask_id, generators[n])
        value = drafter.loss(replicas[n], heads[n], blocks.to(devices["drafter"][n]))
        value.backward()
        return value.item(), blocks.context_tokens

    metrics = Metrics(args.metrics, args.ckpt_dir)
    profile_every = args.profile_every
    saved = step
    window: list[float] = []
    tokens, window_began = 0, time.monotonic()
    profile_began, profile_waited = time.monotonic(), 0.0

    def save() -> None:
        nonlocal saved
        began = time.monotonic()
        path = checkpoint.save(args.ckpt_dir, step, model, optimizer, {"identity": identity}, args.ckpt_keep)
        saved = step
        job.event("checkpoint", step=step, path=path, took_s=time.monotonic() - began)

    drafters = ThreadPoolExecutor(max_workers=len(replicas), thread_name_prefix="drafter")
    job.loaded()
    with producing(job, queue, threads, produce), drafters as pool:
        while not job.stopping.is_set() and not (args.max_steps and step >= args.max_steps):
            for group in optimizer.param_groups:
                group["lr"] = args.lr * schedule(step)
            try:
                results = list(pool.map(gradient, range(len(replicas))))
            except Closed:
                job.check()
                break
            average(replicas)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            share(replicas)
            step += 1
            window.append(sum(value for value, _tokens in results) / len(results))
            tokens += sum(count for _value, count in results)
            job.check()
            depths = queue.depths()
            now = time.monotonic()
            mean, rate = sum(window) / len(window), tokens / max(now - window_began, 1e-9)
            if job.step(
                step,
                force_line=step == args.max_steps,
                loss=round(mean, 4),
                tok_s=round(rate),
                q_depth=sum(depths),
                q_buckets="/".join(map(str, depths)),
            ):
                values = {
                    "loss": mean,
                    "tokens_per_second": rate,
                    "queue_depth": sum(depths),
                    "lr": args.lr * schedule(step - 1),
                }
                values |= {"put_wait_seconds": queue.counters.put_wait_s, "get_wait_seconds": queue.counters.get_wait_s}
                metrics.write(step, values)
                window, tokens, window_began = [], 0, now
            if profile_every and step % profile_every == 0:
                job.event(
                    "profile", **profile(torch, queue, profile_every, now - profile_began, profile_waited, devices)
                )
                profile_began, profile_waited = now, queue.counters.get_wait_s
            if step % args.ckpt_every == 0:
                save()
    if step != saved:
        save()
    if args.max_steps and step >= args.max_steps:
        return {"reason": "done", "step": step}
    return {"reason": "sigterm", "step": step}


@contextlib.contextmanager
def producing(job: Job, queue, count: int, produce: Callable[[int], None]) -> Iterator[None]:
    """Run ``count`` target threads during the block; then close the queue and wait for them.

    A thread that is inside torch when the interpreter ends aborts the process.
    """
    threads = [job.spawn(f"target-{n}", lambda n=n: produce(n)) for n in range(count)]
    try:
        yield
    finally:
        queue.close()
        for thread in threads:
            thread.join(TARGET_ENDS_WITHIN_S)


def profile_interval() -> int:
    """Steps between two profile lines, from DFLASH_PROFILE_INTERVAL; 0: none."""
    text = os.environ.get("DFLASH_PROFILE_INTERVAL", "0")
    if not text.isdecimal():
        raise Fatal(runtime.CONFIGURATION, "profile", f"DFLASH_PROFILE_INTERVAL={text}: give a number of steps.")
    return int(text)


def average(replicas: list) -> None:
    """Mean of all replicas' gradients, left on the first; the others' are cleared."""
    first, *others = replicas
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        for other in parameters[1:]:
            parameters[0].grad += other.grad.to(parameters[0].device)
        parameters[0].grad /= len(replicas)
    for other in others:
        other.zero_grad()


def share(replicas: list) -> None:
    """The first replica's weights to all others."""
    import torch

    with torch.no_grad():
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            for other in parameters[1:]:
                other.copy_(parameters[0])


def profile(torch, queue, steps: int, elapsed: float, waited: float, devices: dict[str, list]) -> dict[str, Any]:
    """A snapshot: where the time of the last ``steps`` steps went, queue health, allocator statistics (MiB)."""
    fields: dict[str, Any] = {
        "step_ms": 1000 * elapsed / steps,
        "wait_ms": 1000 * (queue.counters.get_wait_s - waited) / steps,
        "put_wait_s": queue.counters.put_wait_s,
        "drawn": "/".join(map(str, queue.counters.drawn)),
        "caps": "/".join(map(str, queue.caps)),
    }
    for device in dict.fromkeys([*devices["target"], *devices["drafter"]]):
        if device.type == "cuda":
            fields[f"alloc_mib_{device.index}"] = torch.cuda.memory_allocated(device) >> 20
            fields[f"reserved_mib_{device.index}"] = torch.cuda.memory_reserved(device) >> 20
    return fields


if __name__ == "__main__":
    runtime.run(parser(), body)
