# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which shard runs on which host and GPU, from the declaration alone: the same everywhere, and known before a host is asked.

The hosts are read as a history. Each in turn joins and takes shards from the fullest places until the loads differ by one
at most; then each lost host's shards go to the emptiest places left. So another host at the end moves only what it takes,
and a lost one only what it had. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Place:
    """Where one shard at a time finds room: a GPU of a host, or a host without GPUs (``gpu`` None)."""

    host: str
    gpu: Optional[str]


def place(shards: int, hosts: Mapping[str, Sequence[str]], lost: Iterable[str] = ()) -> dict[int, Place]:
    """The place of each shard, by its number from 1.

    Args:
        shards: how many, at least 1.
        hosts: the GPUs of each host, in the order in which the hosts joined; no GPU: one place without.
        lost: hosts of these that take no shards any more, in the order in which they were lost.

    Raises:
        ValueError: with a sentence that names the wrong value.
    """
    lost = list(lost)
    unknown = [host for host in lost if host not in hosts]
    if unknown:
        raise ValueError(f"lost names {', '.join(unknown)}, which is none of the hosts {', '.join(hosts)}.")
    if set(hosts) <= set(lost):
        raise ValueError(f"no host is left for the {shards} shards: hosts are {list(hosts)}, lost are {lost}.")
    loads: dict[Place, list[int]] = {}
    for host, gpus in hosts.items():
        joining = {Place(host, gpu): [] for gpu in gpus or [None]}
        if len(joining) < len(gpus):
            raise ValueError(f"a GPU of host {host} is there twice: {', '.join(gpus)}.")
        if loads:
            _take(loads, joining)
        else:
            for shard in range(1, shards + 1):
                _emptiest(joining).append(shard)
        loads.update(joining)
    for host in lost:
        left = [shard for spot in list(loads) if spot.host == host for shard in loads.pop(spot)]
        for shard in sorted(left):
            _emptiest(loads).append(shard)
    return {shard: spot for spot, held in loads.items() for shard in held}


def _emptiest(loads: Mapping[Place, list[int]]) -> list[int]:
    return min(loads.values(), key=len)


def _take(loads: Mapping[Place, list[int]], joining: Mapping[Place, list[int]]) -> None:
    """Move the last shards of the fullest places to the joining ones, as long as that evens the loads."""
    while True:
        fullest, emptiest = max(loads.values(), key=len), _emptiest(joining)
        if len(fullest) - len(emptiest) < 2:
            return
        emptiest.append(fullest.pop())
