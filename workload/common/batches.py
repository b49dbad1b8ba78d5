# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One batch of hidden states: the packed file, and what its commit record says about it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from common.data import Sample
from common.files import write_atomic
from common.runtime import BAD_DATA, Fatal


def write_batch(
    path: Path, samples: list[Sample], states: list[torch.Tensor], metadata: dict[str, str]
) -> dict[str, Any]:
    """Write ``hidden_states`` [tokens, layers · hidden] bf16, ``token_ids`` and ``offsets``; the record's fields.

    ``states`` are one tensor a sample, in order; ``metadata`` goes into the file's header, with the samples' ids.
    """
    lengths = torch.tensor([0, *(len(sample.tokens) for sample in samples)])
    data = save(
        {
            "hidden_states": torch.cat([rows.to(torch.bfloat16) for rows in states]).cpu().contiguous(),
            "token_ids": torch.tensor([token for sample in samples for token in sample.tokens], dtype=torch.int32),
            "offsets": lengths.cumsum(0),
        },
        metadata={**metadata, "sample_ids": json.dumps([sample.id for sample in samples])},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "bytes": len(data),
        "samples": [sample.id for sample in samples],
        "tokens": int(lengths.sum()),
    }


def read_batch(name: str, data: bytes | None, record: dict[str, Any]) -> list[tuple[Sample, torch.Tensor]]:
    """The samples of a batch with their hidden states ``[tokens, layers · hidden]``; 65 when it is not what was committed."""
    found = hashlib.sha256(data or b"").hexdigest()
    if found != record["sha256"]:
        raise Fatal(
            BAD_DATA,
            "bad_batch",
            f"{name} has sha256 {found[:12]}…, its commit record says {record['sha256'][:12]}…: it was changed since. "
            f"Remove its .json and run extraction with --resume.",
        )
    tensors = load(data)
    tokens, ends = tensors["token_ids"].tolist(), tensors["offsets"].tolist()
    return [
        (Sample(sample, tuple(tokens[start:end])), tensors["hidden_states"][start:end])
        for sample, start, end in zip(record["samples"], ends[:-1], ends[1:], strict=True)
    ]
