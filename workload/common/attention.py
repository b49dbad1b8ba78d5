# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which positions a draft block sees, as a dense mask for sdpa or a block mask for flex attention."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Contexts are padded to a multiple of this for flex attention, whose kernels are compiled for each shape.
FLEX_MULTIPLE = 128


def rule(starts: torch.Tensor, width: int, block_size: int) -> Callable[..., torch.Tensor]:
    """``(sample, head, query, key) -> bool``: a block sees the ``width`` features before its anchor, and all of itself.

    ``starts`` are the anchors ``[samples, blocks]``.  Queries are the blocks' tokens one after another, keys are the
    features and then the same tokens.
    """

    def sees(sample, head, query, key):
        block = query // block_size
        return (key < starts[sample, block]) | ((key >= width) & ((key - width) // block_size == block))

    return sees


def dense_mask(starts: torch.Tensor, width: int, block_size: int) -> torch.Tensor:
    """The rule as ``[samples, 1, queries, keys]`` bool."""
    samples, blocks = starts.shape
    queries = blocks * block_size

    def indexes(count: int, dimension: int) -> torch.Tensor:
        shape = [1, 1, 1, 1]
        shape[dimension] = count
        return torch.arange(count, device=starts.device).view(shape)

    return rule(starts, width, block_size)(indexes(samples, 0), None, indexes(queries, 2), indexes(width + queries, 3))


def flex_mask(starts: torch.Tensor, width: int, block_size: int) -> BlockMask:
    """The rule for flex attention: what no query sees is never computed."""
    samples, blocks = starts.shape
    queries = blocks * block_size
    return create_block_mask(
        rule(starts, width, block_size), samples, None, queries, width + queries, device=str(starts.device)
    )


def allow_flex() -> None:
    """Let a block mask select flex attention.

    DFlashDraftModel always asks transformers for its "sdpa"; so that name is given a function that looks at the mask.
    Nothing but :func:`flex_mask` makes such a mask here: the target's attention stays what it was.
    """
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(plain, "knows_block_masks", False):
        return

    def by_mask(module, query, key, value, attention_mask, **kwargs):
        if not isinstance(attention_mask, BlockMask):
            return plain(module, query, key, value, attention_mask, **kwargs)
        # Under autocast the norms of queries and keys leave float32 behind; flex attention wants one type.
        return flex_attention_forward(
            module,
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            attention_mask,
            scaling=kwargs.get("scaling"),
            dropout=kwargs.get("dropout", 0.0),
        )

    by_mask.knows_block_masks = True
    ALL_ATTENTION_FUNCTIONS.register("sdpa", by_mask)


class FirstCalls:
    """One thread at a time through the first call of each shape: torch.compile works there, and not in two threads."""

    def __init__(self, done: Callable[..., None]):
        """``done(shape=…, took_s=…)`` hears of each shape once."""
        self._lock = threading.Lock()
        self._seen: set[Hashable] = set()
        self._done = done

    @contextlib.contextmanager
    def __call__(self, *shape: Any) -> Iterator[None]:
        if shape in self._seen:
            yield
            return
        with self._lock:
            began = time.monotonic()
            yield
            if shape not in self._seen:
                self._seen.add(shape)
                self._done(shape="/".join(map(str, shape)), took_s=time.monotonic() - began)
