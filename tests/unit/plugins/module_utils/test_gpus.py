# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs a container gets: by UUID, index and count, beside other hosts of the same node; and each mistake in words."""

from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils import gpus

# A node whose minors are not in NVML's order, as after a card was added.
FOUND = {"why": None, "gpus": [{"index": n, "uuid": f"GPU-{name}", "minor": minor}
                               for n, (name, minor) in enumerate(zip("abcd", (2, 0, 1, 3)))]}  # fmt: skip


def dealt(value, others=None, found=FOUND):
    """UUIDs' letters of host "h", which comes after the others in the inventory."""
    return "".join(gpu["uuid"][-1] for gpu in gpus.deal({**(others or {}), "h": value}, "h", found, "pve1"))


@pytest.mark.parametrize(
    ("value", "others", "expected"),
    [
        (["GPU-c"], {}, "c"),
        ([2], {}, "c"),
        (["2", "GPU-a"], {}, "ac"),
        ({"count": 2}, {}, "ab"),
        ([{"count": 1}, "GPU-a"], {}, "ab"),
        ([{"count": 1}, {"count": "1"}], {}, "ab"),
        ({"count": 2}, {"g": ["GPU-a"]}, "bc"),
        ({"count": 2}, {"g": [0, {"count": 1}]}, "cd"),
        ({"count": 2}, {"f": {"count": 1}, "g": {"count": 1}}, "cd"),
        (["GPU-a"], {"g": ["GPU-a"]}, "a"),
        (["GPU-a"], {"g": {"count": 3}}, "a"),
        ({"count": 1}, {"g": "nonsense"}, "a"),
    ],
)
def test_what_a_host_gets(value, others, expected):
    assert dealt(value, others) == expected


def test_hosts_of_one_node_do_not_meet_but_by_name():
    declared = {"a": {"count": 1}, "b": ["GPU-a"], "c": [{"count": 1}, 3]}
    shares = [{gpu["uuid"] for gpu in gpus.deal(declared, host, FOUND, "pve1")} for host in declared]
    assert shares == [{"GPU-b"}, {"GPU-a"}, {"GPU-c", "GPU-d"}]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("GPU-a", ["not a list", "[0, 1]"]),
        (2, ["not a list"]),
        ([True], ["True is neither an index nor a UUID"]),
        (["nvidia0"], ["'nvidia0' is neither"]),
        ([-1], ["-1 is neither"]),
        (["MIG-4"], ["part of a GPU", "GPU-"]),
        ([{"count": 0}], ["{'count': 0} is no count"]),
        ({"count": True}, ["is no count"]),
        ({"count": 1, "kind": "H200"}, ["is no count"]),
        ({}, ["{} is no count"]),
        ([{"count": "²"}], ["{'count': '²'} is no count"]),
        (["²"], ["'²' is neither an index nor a UUID"]),
        (["GPU-x"], ["node pve1 has no GPU GPU-x", "It has GPU-a (0), GPU-b (1), GPU-c (2), GPU-d (3)"]),
        ([4], ["node pve1 has no GPU 4"]),
        ([0, "GPU-a"], ["GPU-a, index 0, is there twice"]),
        (
            [{"count": 5}],
            ["of the 4 GPUs of node pve1 the other hosts leave GPU-a, GPU-b, GPU-c, GPU-d", "Ask for 4 at most"],
        ),
    ],
)
def test_each_mistake_names_variable_value_and_fix(value, words):
    with pytest.raises(gpus.GpuError) as error:
        dealt(value)
    assert str(error.value).startswith(f"launchproof_container.gpus is {value!r}: ")
    for word in words:
        assert word in str(error.value)


def test_what_others_took_is_told():
    with pytest.raises(gpus.GpuError, match="the other hosts leave GPU-d. Ask for 1 at most"):
        dealt({"count": 2}, {"g": {"count": 3}})


@pytest.mark.parametrize(
    ("why", "fix"),
    [
        ("libnvidia-ml.so.1: cannot open shared object file", "Install and load the NVIDIA driver"),
        ("nvmlInit_v2: Driver/library version mismatch (18); the kernel's driver is 550.1", "reboot the node"),
    ],
)
def test_a_node_without_a_driver(why, fix):
    with pytest.raises(gpus.GpuError) as error:
        dealt([0], found={"why": why, "gpus": []})
    assert f"node pve1 shows no GPU ({why})" in str(error.value) and fix in str(error.value)


def test_devices_are_those_gpus_and_the_control_nodes_that_are_there():
    nodes = {"/dev/nvidia0": "0666", "/dev/nvidia2": "0666", "/dev/nvidiactl": "0666", "/dev/nvidia-uvm": "0600",
             "/dev/nvidia-caps/nvidia-cap2": "0444"}  # fmt: skip
    assert gpus.devices(FOUND["gpus"][:1], nodes) == [
        {"path": "/dev/nvidia2", "mode": "0666"},
        {"path": "/dev/nvidiactl", "mode": "0666"},
        {"path": "/dev/nvidia-uvm", "mode": "0666"},
        {"path": "/dev/nvidia-caps/nvidia-cap2", "mode": "0444"},
    ]
