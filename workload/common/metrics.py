# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the numbers of a logged step go besides the log."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from common.files import write_atomic
from common.runtime import CONFIGURATION, Fatal

SINKS = ("jsonl", "textfile", "wandb")


def sinks(text: str) -> list[str]:
    """An argparse type: some of jsonl, textfile, wandb, separated by commas."""
    names = [part for part in text.split(",") if part]
    for name in names:
        if name not in SINKS:
            raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(SINKS)}")
    return names


class Metrics:
    """``metrics.jsonl``, ``metrics.prom`` for node_exporter's textfile collector, and an offline wandb run."""

    def __init__(self, names: list[str], folder: Path):
        self._jsonl = open(folder / "metrics.jsonl", "a", buffering=1) if "jsonl" in names else None  # noqa: SIM115
        self._textfile = folder / "metrics.prom" if "textfile" in names else None
        self._wandb = _offline_wandb(folder) if "wandb" in names else None

    def write(self, step: int, values: dict[str, float | list[int]]) -> None:
        """One record; a list has one number a bucket."""
        if self._jsonl:
            self._jsonl.write(json.dumps({"time": round(time.time(), 3), "step": step, **values}) + "\n")
        if self._textfile:
            write_atomic(self._textfile, textfile({"step": step, **values}).encode())
        if self._wandb:
            self._wandb.log(dict(flat(values)), step=step)

    def close(self) -> None:
        """Finish what has an end; the files have none."""
        if self._wandb:
            self._wandb.finish()


def flat(values: dict[str, float | list[int]]) -> Iterator[tuple[str, float]]:
    """One name a number; the numbers of a list are ``name/0``, ``name/1``, …"""
    for name, value in values.items():
        if isinstance(value, list):
            yield from ((f"{name}/{n}", number) for n, number in enumerate(value))
        else:
            yield name, value


def textfile(values: dict[str, float | list[int]]) -> str:
    """Prometheus' text format; a list becomes one line a bucket."""
    lines = []
    for name, value in flat(values):
        name, _slash, bucket = name.partition("/")
        labels = f'{{bucket="{bucket}"}}' if bucket else ""
        lines.append(f"dflash_training_{name}{labels} {value:.9g}\n")
    return "".join(lines)


def _offline_wandb(folder: Path):
    os.environ["WANDB_MODE"] = "offline"
    try:
        import wandb
    except ImportError as error:
        raise Fatal(CONFIGURATION, "wandb", f"--metrics wandb: {error}. Install it or drop it.") from None
    return wandb.init(project="dflash", dir=str(folder))
