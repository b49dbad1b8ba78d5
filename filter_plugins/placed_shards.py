# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: placed_shards
short_description: The shards that run on this host, of one declaration for many hosts
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Spreads numbered shards over hosts and their GPUs, and gives those of one host. The result depends on the declaration
    alone, so every host knows it without asking another, and check mode too.
  - Loads differ by one shard at most. A host appended to O(hosts) takes over just the shards that even the loads; the
    shards of a host added to O(lost) go to the others. No other shard moves.
  - A host that is gone stays in O(hosts) and is named in O(lost). Removed from O(hosts), it would never have been there,
    and more shards would move than have to.
positional: host, hosts, lost
options:
  _input:
    description: How many shards there are.
    type: int
    required: true
  host:
    description: The host whose shards are asked for, C(inventory_hostname).
    type: str
    required: true
  hosts:
    description:
      - The GPUs of each host by UUID or index, in the order in which the hosts joined. A host with an empty list has one
        place without a GPU.
    type: dict
    required: true
  lost:
    description: Hosts that run nothing any more, in the order in which they were lost.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: The shards of this host
  ansible.builtin.debug:
    msg: "{{ 12 | dflash.launchproof.placed_shards(inventory_hostname, places, ['c3']) }}"
  vars:
    places:
      c1: ["0", "1"]
      c2: ["0", "1"]
      c3: ["0", "1"]
# c1: [{shard: 1, gpu: "0"}, {shard: 3, gpu: "0"}, …]
"""

RETURN = r"""
_value:
  description: One entry for each shard of the host, by number. C(gpu) is null on a host without GPUs.
  type: list
  elements: dict
"""

from ansible.errors import AnsibleFilterError
from ansible_collections.dflash.launchproof.plugins.module_utils.job.placement import place


def placed_shards(shards, host, hosts, lost=()):
    """Shards of one host as dictionaries, sorted by number."""
    if not str(shards).isdecimal() or int(shards) < 1:
        raise AnsibleFilterError(f"placed_shards: {shards!r} is no number of shards. Use a whole number from 1.")
    if host not in hosts:
        raise AnsibleFilterError(f"placed_shards: host {host} is none of the declared hosts: {', '.join(hosts)}.")
    try:
        placed = place(int(shards), {name: [str(gpu) for gpu in gpus] for name, gpus in hosts.items()}, lost)
    except ValueError as error:
        raise AnsibleFilterError(f"placed_shards: {error}") from error
    return [{"shard": shard, "gpu": spot.gpu} for shard, spot in sorted(placed.items()) if spot.host == host]


class FilterModule:
    def filters(self):
        return {"placed_shards": placed_shards}
