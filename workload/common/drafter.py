# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The drafter: dflash's own DFlashDraftModel, the blocks it is trained on, and its loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from dflash.model import DFlashDraftModel
from torch.nn import functional
from transformers import Qwen3Config

from common import attention
from common.data import Sample
from common.target import Target


@dataclass(frozen=True)
class Item:
    """One sample with its target features ``[tokens, layers · hidden]``."""

    sample: Sample
    features: torch.Tensor


@dataclass(frozen=True)
class Blocks:
    """A micro-batch as DFlashDraftModel takes it.

    For every sample ``m`` blocks of ``b`` tokens; a block starts with the real token at its anchor, the rest is masked.
    A block sees the target's features of the positions before its anchor, as at inference, and all of itself.
    """

    features: torch.Tensor  # [n, t, layers · hidden]
    tokens: torch.Tensor  # [n, m · b] with masks
    labels: torch.Tensor  # [n, m · b], -100 where nothing is predicted
    position_ids: torch.Tensor  # [n, t + m · b]
    starts: torch.Tensor  # [n, m], the anchors
    context_tokens: int

    def to(self, device: torch.device) -> Blocks:
        """The same on ``device``."""
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved)


def make_blocks(
    items: list[Item], anchors: int, block_size: int, mask_id: int, generator: torch.Generator, multiple: int = 1
) -> Blocks:
    """Draw ``anchors`` blocks from each sample; a sample needs at least three tokens.

    The features are padded to a ``multiple`` of tokens.
    """
    width = -(-max(len(item.sample.tokens) for item in items) // multiple) * multiple
    count, size = len(items), anchors * block_size
    features = items[0].features.new_zeros(count, width, items[0].features.shape[-1], dtype=torch.float32)
    tokens = torch.full((count, size), mask_id)
    labels = torch.full((count, size), -100)
    positions = torch.zeros(count, width + size, dtype=torch.long)
    positions[:, :width] = torch.arange(width)
    starts = torch.zeros(count, anchors, dtype=torch.long)
    for row, item in enumerate(items):
        length = len(item.sample.tokens)
        text = torch.tensor(item.sample.tokens)
        features[row, :length] = item.features
        # At least one token of context before the anchor, and one to predict behind it.
        starts[row] = torch.randint(1, length - 1, (anchors,), generator=generator)
        for block, anchor in enumerate(starts[row].tolist()):
            at, end = block * block_size, min(anchor + block_size, length)
            tokens[row, at] = text[anchor]
            labels[row, at + 1 : at + end - anchor] = text[anchor + 1 : end]
            positions[row, width + at : width + at + block_size] = torch.arange(anchor, anchor + block_size)
    return Blocks(features, tokens, labels, positions, starts, sum(len(item.sample.tokens) for item in items))


def build(target: Target, block_size: int, mask_id: int) -> DFlashDraftModel:
    """A drafter with as many layers as the target gives features, its shape taken from the target's."""
    source = target.model.config.get_text_config()

    def of_target(name: str, default):
        # Qwen3's names; other families lack some of them, or leave them unset.
        return getattr(source, name, None) or default

    heads = source.num_attention_heads
    config = Qwen3Config(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=of_target("intermediate_size", 4 * source.hidden_size),
        num_hidden_layers=len(target.layers),
        num_attention_heads=heads,
        num_key_value_heads=of_target("num_key_value_heads", heads),
        head_dim=of_target("head_dim", source.hidden_size // heads),
        max_position_embeddings=of_target("max_position_embeddings", 4096),
        rms_norm_eps=of_target("rms_norm_eps", 1e-6),
        tie_word_embeddings=False,
    )
    config.num_target_layers = source.num_hidden_layers
    config.dflash_config = {"target_layer_ids": list(target.layers), "block_size": block_size, "mask_token_id": mask_id}
    return DFlashDraftModel(config)


class SharedHead:
    """The target's embedding and output head, frozen, on the drafter's device: the drafter has none of its own."""

    def __init__(self, target: Target, device: torch.device):
        dtype = compute_dtype(device)
        self.embedding = target.model.get_input_embeddings().weight.detach().to(device, dtype)
        self.head = target.model.get_output_embeddings().weight.detach().to(device, dtype)


def compute_dtype(device: torch.device) -> torch.dtype:
    """What matrices are multiplied in: float32 on the CPU, else bfloat16; weights are float32 on both."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def loss(model: DFlashDraftModel, shared: SharedHead, blocks: Blocks, flex: bool = False) -> torch.Tensor:
    """Cross entropy of the masked tokens; early positions of a block weigh more: later ones count only after them."""
    device = blocks.features.device
    make_mask = attention.flex_mask if flex else attention.dense_mask
    with torch.autocast(device.type, compute_dtype(device), enabled=device.type != "cpu"):
        hidden = model(
            position_ids=blocks.position_ids,
            attention_mask=make_mask(blocks.starts, blocks.features.shape[1], model.block_size),
            noise_embedding=functional.embedding(blocks.tokens, shared.embedding),
            target_hidden=blocks.features,
        )
        wanted = blocks.labels != -100
        logits = model.compute_logits(hidden[wanted], lambda states: functional.linear(states, shared.head))
    place = torch.arange(blocks.labels.shape[1], device=device).remainder(model.block_size).expand_as(blocks.labels)
    weight = torch.exp(-(place[wanted].float() - 1) / (model.block_size / 2))
    each = functional.cross_entropy(logits.float(), blocks.labels[wanted], reduction="none")
    return (each * weight).sum() / weight.sum()
