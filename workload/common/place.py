# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which of several processes that work as one this is, as torchrun's environment says; usable before torch is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass

from common.contract import CONFIGURATION, Fatal


@dataclass(frozen=True)
class Place:
    """One of ``world`` processes, and one of ``local_world`` on this machine; alone where there is no torchrun."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @property
    def alone(self) -> bool:
        return self.world == 1


def place() -> Place:
    """The place of this process."""
    names = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    return Place(*(int(os.environ.get(name, default)) for name, default in names))


def take_gpus(mine: Place) -> None:
    """Leave this process its part of the visible GPUs, so that index 0 is the first of its own; before torch is imported."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mine.local_world == 1 or not visible:
        return
    gpus = visible.split(",")
    if len(gpus) % mine.local_world:
        raise Fatal(
            CONFIGURATION,
            "gpus",
            f"CUDA_VISIBLE_DEVICES={visible} has {len(gpus)} GPUs for {mine.local_world} processes. Give each as many.",
        )
    each = len(gpus) // mine.local_world
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[mine.local_rank * each : (mine.local_rank + 1) * each])
