# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import math
from collections import Counter

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.dflash.launchproof.plugins.filter.placed_shards import placed_shards
from ansible_collections.dflash.launchproof.plugins.module_utils.job.placement import Place, place
from hypothesis import given
from hypothesis import strategies as st

FLEETS = st.lists(st.integers(0, 4), min_size=1, max_size=8).map(
    lambda sizes: {f"h{number}": [str(gpu) for gpu in range(size)] for number, size in enumerate(sizes)}
)


def spots(hosts):
    return sum(max(len(gpus), 1) for gpus in hosts.values())


@given(st.integers(1, 60), FLEETS)
def test_every_shard_has_one_place_and_the_loads_are_even(shards, hosts):
    placed = place(shards, hosts)
    assert sorted(placed) == list(range(1, shards + 1))
    loads = Counter(placed.values())
    assert max(loads.values()) == math.ceil(shards / spots(hosts))
    assert len(loads) == min(shards, spots(hosts))


@given(st.integers(1, 60), FLEETS, st.integers(0, 4))
def test_a_host_that_joins_moves_only_what_it_takes(shards, hosts, gpus):
    joined = {**hosts, "new": [str(gpu) for gpu in range(gpus)]}
    before, after = place(shards, hosts), place(shards, joined)
    moved = [shard for shard in before if before[shard] != after[shard]]
    assert all(after[shard].host == "new" for shard in moved)
    assert len(moved) <= math.ceil(shards / spots(joined)) * max(gpus, 1)


@given(st.integers(1, 60), FLEETS.filter(lambda hosts: len(hosts) > 1), st.data())
def test_a_lost_host_moves_only_what_it_had_and_the_loads_stay_even(shards, hosts, data):
    lost = data.draw(st.sampled_from(sorted(hosts)))
    before, after = place(shards, hosts), place(shards, hosts, [lost])
    assert {shard for shard in before if before[shard] != after[shard]} == {
        shard for shard in before if before[shard].host == lost
    }
    loads = Counter(after.values())
    left = spots({host: gpus for host, gpus in hosts.items() if host != lost})
    assert max(loads.values()) == math.ceil(shards / left)


def test_the_hosts_of_one_declaration_share_its_shards():
    hosts = {"c1": ["0", "1"], "c2": ["0"], "c3": []}
    every = [item["shard"] for host in hosts for item in placed_shards(7, host, hosts)]
    assert sorted(every) == list(range(1, 8))
    assert place(1, hosts)[1] == Place("c1", "0")
    assert {item["gpu"] for item in placed_shards(7, "c3", hosts)} == {None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, "a", {"a": []}), "0 is no number of shards"),
        (("many", "a", {"a": []}), "'many' is no number of shards"),
        ((2, "b", {"a": []}), "host b is none of the declared hosts: a"),
        ((2, "a", {"a": []}, ["z"]), "lost names z, which is none of the hosts a"),
        ((2, "a", {"a": []}, ["a"]), "no host is left for the 2 shards"),
        ((2, "a", {"a": ["0", "0"]}), "a GPU of host a is there twice: 0, 0"),
    ],
)
def test_a_wrong_declaration_is_named(arguments, words):
    with pytest.raises(AnsibleFilterError, match=words):
        placed_shards(*arguments)
