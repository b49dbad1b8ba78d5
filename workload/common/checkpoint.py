# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checkpoints that are whole or absent: ``step-N.tmp`` → fsync → rename → ``latest``."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from common.runtime import CONFIGURATION, Fatal

LATEST = "latest"
STEP = re.compile(r"step-(\d{8})")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(
    folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int
) -> Path:
    """Write the checkpoint of ``step``, point ``latest`` at it, and remove all but the ``keep`` newest; its path.

    ``model.safetensors`` and ``config.json`` are what DFlashDraftModel.from_pretrained reads.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f"{final.name}.tmp"
    for leftover in folder.glob("step-*.tmp"):
        shutil.rmtree(leftover)
    if final.exists():
        # Left by a kill between the rename and `latest`; the same step again replaces it.
        shutil.rmtree(final)
    temporary.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, temporary / "model.safetensors"
    )
    model.config.save_pretrained(temporary)
    torch.save(optimizer.state_dict(), temporary / "optimizer.pt")
    (temporary / "state.json").write_text(json.dumps({"step": step, **state}, indent=1, sort_keys=True) + "\n")
    for path in temporary.iterdir():
        _sync(path)
    _sync(temporary)
    temporary.rename(final)
    _sync(folder)
    link = folder / f".{LATEST}.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(folder / LATEST)
    _sync(folder)
    steps = sorted(path for path in folder.iterdir() if STEP.fullmatch(path.name))
    for old in steps[:-keep]:
        shutil.rmtree(old)
    return final


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint to go on from: ``auto`` = latest if there is one, ``never`` = none, else a folder.

    Raises Fatal (78) for a folder that is no checkpoint, and for ``never`` where checkpoints would be written over.
    """
    latest = folder / LATEST
    if resume == "never":
        if latest.is_symlink():
            raise Fatal(
                CONFIGURATION, "not_empty", f"{folder} has checkpoints. Pass --resume auto or another --ckpt-dir."
            )
        return None
    if resume == "auto" and not latest.is_symlink():
        return None
    path = latest.resolve() if resume == "auto" else Path(resume)
    missing = [name for name in ("model.safetensors", "optimizer.pt", "state.json") if not (path / name).is_file()]
    if missing or path.name.endswith(".tmp"):
        raise Fatal(
            CONFIGURATION,
            "checkpoint",
            f"{path} is no finished checkpoint (missing: {', '.join(missing) or 'rename'}).",
        )
    return path


def load(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> dict[str, Any]:
    """Restore strictly and return ``state.json``; 78 when the checkpoint was made from something else."""
    state = json.loads((path / "state.json").read_text())
    fields = sorted(name for name in identity if state.get("identity", {}).get(name) != identity[name])
    if fields:
        raise Fatal(
            CONFIGURATION,
            "checkpoint_mismatch",
            f"{path} was made from something else: {', '.join(fields)} differ. Choose another --ckpt-dir.",
        )
    model.load_state_dict(load_file(path / "model.safetensors"), strict=True)
    optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
    return state
