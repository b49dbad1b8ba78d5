# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The drafter on one device or several: each has a replica and a thread; together they take one step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from common import attention, drafter
from common.target import Target, new_stream, on_stream


class Replicas:
    """Replicas whose gradients are averaged on the first, which steps and hands its weights back.

    A context manager: its threads end with it.
    """

    def __init__(
        self,
        target: Target,
        devices: list[torch.device],
        anchors: int,
        block_size: int,
        mask_id: int,
        seed: int,
        first_calls: attention.FirstCalls | None,
    ):
        """``first_calls`` is given where attention is flex, and needed there alone."""
        torch.manual_seed(seed)
        self.models = [drafter.build(target, block_size, mask_id).to(device, torch.float32) for device in devices]
        self._heads = [drafter.SharedHead(target, device) for device in devices]
        self._devices, self._anchors, self._block_size, self._mask_id = devices, anchors, block_size, mask_id
        self._first_calls = first_calls
        self._generators = [torch.Generator() for _ in devices]
        self._streams = [new_stream(device) for device in devices]
        self._threads = ThreadPoolExecutor(max_workers=len(devices), thread_name_prefix="drafter")

    @property
    def model(self) -> torch.nn.Module:
        """The replica that steps and is saved."""
        return self.models[0]

    def begin(self, seed: int, rank: int = 0) -> None:
        """Give every replica the first one's weights, and its anchors' generator a seed of its own among all ranks."""
        for n, generator in enumerate(self._generators, rank * len(self._generators)):
            generator.manual_seed(seed * 1000 + n)
        share(self.models)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *_exc) -> None:
        self._threads.shutdown()

    def gradients(self, draw: Callable[[], list[drafter.Item]]) -> tuple[float, int]:
        """Every replica's loss backward, on a micro-batch that its thread draws; mean loss and context tokens.

        The mean gradient is on the first replica then.
        """
        found = list(self._threads.map(lambda n: self._gradient(n, draw), range(len(self.models))))
        average(self.models)
        return sum(loss for loss, _tokens in found) / len(found), sum(tokens for _loss, tokens in found)

    def share(self) -> None:
        """The first replica's weights to all others."""
        share(self.models)

    def _gradient(self, n: int, draw: Callable[[], list[drafter.Item]]) -> tuple[float, int]:
        items = draw()
        flex = self._first_calls is not None
        with on_stream(self._streams[n]):
            blocks = drafter.make_blocks(
                items,
                self._anchors,
                self._block_size,
                self._mask_id,
                self._generators[n],
                attention.FLEX_MULTIPLE if flex else 1,
            ).to(self._devices[n])
            if self._first_calls is None:
                return self._backward(n, blocks, flex), blocks.context_tokens
            with self._first_calls(self._devices[n], *blocks.features.shape[:2]):
                return self._backward(n, blocks, flex), blocks.context_tokens

    def _backward(self, n: int, blocks: drafter.Blocks, flex: bool) -> float:
        value = drafter.loss(self.models[n], self._heads[n], blocks, flex)
        value.backward()
        # Waits for the device: what this thread's stream still reads is not freed before.
        return value.item()


def average(models: list[torch.nn.Module]) -> None:
    """Mean of all gradients, left on the first; the others' are cleared."""
    first, *others = models
    if not others:
        return
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        for other in parameters[1:]:
            parameters[0].grad += other.grad.to(parameters[0].device)
        parameters[0].grad /= len(models)
    for other in others:
        other.zero_grad()


def share(models: list[torch.nn.Module]) -> None:
    """The first one's weights to all others."""
    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            for other in parameters[1:]:
                other.copy_(parameters[0])
