# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The drafter: dflash's own DFlashDraftModel, the blocks it is trained on, and its loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dflash.model import DFlashDraftModel
from torch.nn import functional
from transformers import Qwen3Config

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
    visible: torch.Tensor  # [n, 1, m · b, t + m · b] bool
    context_tokens: int

    def to(self, device: torch.device) -> Blocks:
        """The same on ``device``."""
        moved = {
            name: getattr(self, name).to(device) for name in ("features", "tokens", "labels", "position_ids", "visible")
        }
        return Blocks(**moved, context_tokens=self.context_tokens)


def make_blocks(items: list[Item], anchors: int, block_size: int, mask_id: int, generator: torch.Generator) -> Blocks:
    """Draw ``anchors`` blocks from each sample; a sample needs at least three tokens."""
    width = max(len(item.sample.tokens) for item in items)
    count, size = len(items), anchors * block_size
    features = items[0].features.new_zeros(count, width, items[0].features.shape[-1], dtype=torch.float32)
    tokens = torch.full((count, size), mask_id)
    labels = torch.full((count, size), -100)
    positions = torch.zeros(count, width + size, dtype=torch.long)
    positions[:, :width] = torch.arange(width)
    start = torch.zeros(count, anchors, dtype=torch.long)
    for row, item in enumerate(items):
        length = len(item.sample.tokens)
        text = torch.tensor(item.sample.tokens)
        features[row, :length] = item.features
        # At least one token of context before the anchor, and one to predict behind it.
        start[row] = torch.randint(1, length - 1, (anchors,), generator=generator)
        for block, anchor in enumerate(start[row].tolist()):
            at, end = block * block_size, min(anchor + block_size, length)
            tokens[row, at] = text[anchor]
            labels[row, at + 1 : at + end - anchor] = text[anchor + 1 : end]
            positions[row, width + at : width + at + block_size] = torch.arange(anchor, anchor + block_size)
    block_of = torch.arange(size) // block_size
    sees_context = torch.arange(width)[None, None, :] < start[:, block_of][:, :, None]
    sees_block = (block_of[:, None] == block_of[None, :]).expand(count, size, size)
    visible = torch.cat([sees_context, sees_block], dim=-1)[:, None]
    return Blocks(features, tokens, labels, positions, visible, sum(len(item.sample.tokens) for item in items))


def build(target: Target, block_size: int, mask_id: int) -> DFlashDraftModel:
    """A drafter with as many layers as the target gives features, its shape taken from the target's."""
    source = target.model.config
    config = Qwen3Config(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=len(target.layers),
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads,
        max_position_embeddings=source.max_position_embeddings,
        rms_norm_eps=source.rms_norm_eps,
        tie_word_embeddings=False,
    )
    config.num_target_layers = source.num_hidden_layers
    config.dflash_config = {"target_layer_ids": list(target.layers), "block_size": block_size, "mask_token_id": mask_id}
    return DFlashDraftModel(config)


class SharedHead:
    """The target's embedding and output head, frozen, on the drafter's device: the drafter has none of its own."""

    def __init__(self, target: Target, device: torch.device):
        self.embedding = target.model.get_input_embeddings().weight.detach().to(device, torch.float32)
        self.head = target.model.get_output_embeddings().weight.detach().to(device, torch.float32)


def loss(model: DFlashDraftModel, shared: SharedHead, blocks: Blocks) -> torch.Tensor:
    """Cross entropy of the masked tokens; early positions of a block weigh more: later ones count only after them."""
    hidden = model(
        position_ids=blocks.position_ids,
        attention_mask=blocks.visible,
        noise_embedding=functional.embedding(blocks.tokens, shared.embedding),
        target_hidden=blocks.features,
    )
    wanted = blocks.labels != -100
    logits = model.compute_logits(hidden[wanted], lambda states: functional.linear(states, shared.head))
    place = (
        torch.arange(blocks.labels.shape[1], device=logits.device).remainder(model.block_size).expand_as(blocks.labels)
    )
    weight = torch.exp(-(place[wanted].float() - 1) / (model.block_size / 2))
    each = functional.cross_entropy(logits.float(), blocks.labels[wanted], reduction="none")
    return (each * weight).sum() / weight.sum()
