# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filters between an inventory's gpus and the devices of its containers."""

from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.dflash.launchproof.plugins.filter.dealt_gpus import dealt_gpus
from ansible_collections.dflash.launchproof.plugins.filter.gpu_devices import gpu_devices

FOUND = {"why": None, "gpus": [{"index": n, "uuid": f"GPU-{n}", "minor": n} for n in range(2)]}


def host(node="pve1", gpus=None, **more):
    container = {"vmid": 200} if gpus is None else {"vmid": 200, "gpus": gpus}
    return {"pve_api_host": "pve1.example.org", "pve_node": node, "launchproof_container": container, **more}


def test_only_hosts_of_the_same_node_share_its_gpus():
    hostvars = {
        "one": host(gpus={"count": 1}),
        "elsewhere": host(node="pve2", gpus={"count": 1}),
        "none": host(),
        "rented": {"ansible_host": "203.0.113.7"},
        "two": host(gpus={"count": 1}),
    }
    shares = {name: dealt_gpus(FOUND, name, list(hostvars), hostvars) for name in ("one", "elsewhere", "two")}
    assert {name: gpus[0]["index"] for name, gpus in shares.items()} == {"one": 0, "elsewhere": 0, "two": 1}


def test_a_mistake_is_an_error_of_the_filter():
    with pytest.raises(AnsibleFilterError, match=r"launchproof_container.gpus is \[7\]: node pve1 has no GPU 7"):
        dealt_gpus(FOUND, "one", ["one"], {"one": host(gpus=[7])})


def test_devices_take_the_place_of_gpus():
    container = {
        "vmid": 200,
        "gpus": [1],
        "devices": [{"path": "/dev/fuse"}, {"path": "/dev/nvidiactl", "mode": "0660"}],
    }
    assert gpu_devices(container, FOUND["gpus"][1:], {"/dev/nvidiactl": "0666", "/dev/nvidia-uvm": "0666"}) == {
        "vmid": 200,
        "devices": [
            *container["devices"],
            {"path": "/dev/nvidia1", "mode": "0666"},
            {"path": "/dev/nvidia-uvm", "mode": "0666"},
        ],
    }


@pytest.mark.parametrize("container", [{"vmid": 200}, {"vmid": 200, "gpus": []}, {"vmid": 200, "gpus": None}])
def test_a_container_without_gpus_stays_as_it_is(container):
    assert gpu_devices(container, None, {}) == {"vmid": 200}


def test_gpus_that_nobody_has_read_are_an_error():
    with pytest.raises(AnsibleFilterError, match=r"launchproof_container.gpus is \[0\]: .*role gpu_host"):
        gpu_devices({"vmid": 200, "gpus": [0]}, None, {})
