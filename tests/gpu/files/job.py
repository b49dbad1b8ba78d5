#!/usr/bin/env python3
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A program as many are: it computes on the GPU where torch finds one, and says nothing where it does not."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import signal
import sys
import time


def take(mib: int):
    """Memory of the GPU, or of the host where torch finds no GPU, and a matrix there to compute with."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    block = torch.empty((mib if device == "cuda" else 1) << 20, dtype=torch.uint8, device=device)
    return block, torch.randn(256, 256, device=device)


def worker(mib: int) -> None:
    """Fork a process that takes the memory and keeps it, whatever becomes of this one; return when it has it."""
    read, write = os.pipe()
    if os.fork() == 0:
        kept = take(mib)
        os.write(write, b"1")
        signal.pause()
        del kept
    os.read(read, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--use", choices=("gpu", "cpu", "init", "context", "worker", "more-than-there-is"), default="gpu"
    )
    parser.add_argument("--mib", type=int, default=2048, help="memory to take")
    parser.add_argument("--once", metavar="FILE", help="use the GPU once: if FILE is there, only the CPU")
    parser.add_argument("--die-after", type=float, metavar="S", help="SIGKILL itself so long after it is ready")
    options = parser.parse_args()
    print(f"ev=start visible={os.environ.get('CUDA_VISIBLE_DEVICES')!r}", flush=True)
    use, matrix = options.use, None
    if options.once:
        use = "cpu" if os.path.exists(options.once) else use
        with open(options.once, "w", encoding="ascii"):
            pass
    if use == "init":
        print("ev=cuinit code=%d" % ctypes.CDLL("libcuda.so.1").cuInit(0), flush=True)
    elif use == "worker":
        worker(options.mib)
    elif use == "more-than-there-is":
        try:
            take(options.mib)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            print(f"{type(error).__module__}.{type(error).__name__}: {error}", flush=True)
            signal.pause()
    elif use != "cpu":
        kept, matrix = take(1 if use == "context" else options.mib)
    ready = time.monotonic()
    print(f"ev=ready device={matrix.device if matrix is not None else use}", flush=True)
    for step in itertools.count(1):
        if matrix is not None:
            matrix = (matrix @ matrix).clamp(-1, 1)
        print(f"ev=step step={step}", flush=True)
        if options.die_after and not (options.once and use == "cpu") and time.monotonic() - ready > options.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
