# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import rights


@pytest.mark.parametrize(
    ("key", "old", "new", "unprivileged", "reason"),
    [
        ("dev0", None, "/dev/null", True, "device passthrough"),
        ("dev0", "/dev/null", None, True, "device passthrough"),
        ("hookscript", None, "local:snippets/x", True, "a hook script"),
        ("mp0", None, "/srv/a,mp=/a", True, "a bind mount"),
        ("mp0", None, "/dev/sdb,mp=/a", True, "a device mount"),
        ("mp0", None, "local:8,mp=/a", True, None),
        ("mp0", "/srv/a,mp=/a", None, True, None),
        ("features", None, "nesting=1", True, None),
        ("features", None, "nesting=1", False, "features of a privileged container (nesting)"),
        ("features", "nesting=1", "nesting=1,keyctl=1", True, "features other than nesting (keyctl)"),
        ("features", "nesting=1,fuse=1", None, True, "features other than nesting (fuse)"),
        ("features", "keyctl=1,nesting=1", "keyctl=1", True, None),
        ("memory", "512", "1024", False, None),
    ],
)
def test_root_only_keys_are_known_with_their_reason(key, old, new, unprivileged, reason):
    assert rights.root_only(key, old, new, unprivileged) == reason


def test_each_change_asks_for_its_own_right():
    wanted = rights.needed(
        901,
        {"rootfs": "fast:8", "net0": "name=eth0,bridge=vmbr0", "memory": "512", "tags": "a", "dev0": "/dev/null"},
        create=True,
        power=True,
        template="local:vztmpl/x",
    )
    assert {(right.path, right.privileges[0]) for right in wanted} == {
        ("/vms/901", "VM.Allocate"),
        ("/vms/901", "VM.Audit"),
        ("/vms/901", "VM.PowerMgmt"),
        ("/vms/901", "VM.Config.Disk"),
        ("/vms/901", "VM.Config.Network"),
        ("/vms/901", "VM.Config.Memory"),
        ("/vms/901", "VM.Config.Options"),
        ("/storage/fast", "Datastore.AllocateSpace"),
        ("/storage/local", "Datastore.AllocateSpace"),
        ("/sdn/zones/localnetwork/vmbr0", "SDN.Use"),
    }


BRIDGE = "/sdn/zones/localnetwork/vmbr0"


@pytest.mark.parametrize(
    ("new", "old", "paths"),
    [
        ("name=eth0,bridge=vmbr0", None, [BRIDGE]),
        ("name=eth0,bridge=vmbr0,tag=7", None, [f"{BRIDGE}/7"]),
        ("name=eth0,bridge=vmbr0,trunks=10;20", None, [f"{BRIDGE}/10", f"{BRIDGE}/20"]),
        ("name=eth0,bridge=vmbr0,tag=7,trunks=10;7", None, [f"{BRIDGE}/7", f"{BRIDGE}/10"]),
        # Proxmox asks for what an interface leaves, too.
        ("name=eth0,bridge=vmbr0", "name=eth0,bridge=vmbr0,tag=7", [f"{BRIDGE}/7", BRIDGE]),
        ("name=eth0,bridge=vmbr1", "name=eth0,bridge=vmbr0", [BRIDGE, "/sdn/zones/localnetwork/vmbr1"]),
        (None, "name=eth0,bridge=vmbr0", [BRIDGE]),
    ],
)
def test_an_interface_takes_the_right_of_each_vlan_or_of_its_bridge(new, old, paths):
    wanted = rights.needed(901, {"net0": new}, current={"net0": old} if old else {})
    assert [right.path for right in wanted if right.privileges == ("SDN.Use",)] == paths


@pytest.mark.parametrize(
    ("permissions", "held"),
    [
        ({BRIDGE: {"SDN.Use": 1}}, True),
        ({BRIDGE: {"SDN.Use": 0}}, False),
        ({BRIDGE: {"SDN.Use": 0}, f"{BRIDGE}/7": {"SDN.Use": 0}}, True),
        ({f"{BRIDGE}/8": {"SDN.Use": 1}}, False),
        # A vnet is in a zone of its own, which the rights on it tell.
        ({"/sdn/zones/tenants/vmbr0": {"SDN.Use": 1}}, True),
        ({"/sdn/zones/tenants/vmbr0/7": {"SDN.Use": 1}}, True),
        ({"/sdn/zones/tenants/vmbr0/8": {"SDN.Use": 1}}, False),
        ({"/sdn/zones/tenants/vmbr1": {"SDN.Use": 1}}, False),
    ],
)
def test_the_right_of_a_vlan_is_inherited_from_its_bridge_in_any_zone(permissions, held):
    (right,) = rights.needed(901, {"net0": "name=eth0,bridge=vmbr0,tag=7"})[1:]
    assert rights.missing(permissions, [right]) == ([] if held else [right])


def test_a_privileged_container_takes_one_more_right_where_the_node_asks_for_it():
    def paths(guarded):
        wanted = rights.needed(901, {}, create=True, unprivileged=False, privileged_is_guarded=guarded)
        return [right.path for right in wanted]

    assert "/" in paths(True)
    assert "/" not in paths(False)


@pytest.mark.parametrize(
    ("permissions", "held"),
    [
        ({"/": {"VM.Audit": 1}}, True),
        ({"/": {"VM.Audit": 0}}, False),
        ({"/": {"VM.Audit": 1}, "/vms": {}}, False),
        ({"/vms/901": {"VM.Audit": 0}}, True),
        ({"/vms/902": {"VM.Audit": 1}}, False),
        ({}, False),
    ],
)
def test_rights_are_inherited_along_the_path(permissions, held):
    right = rights.Right("/vms/901", ("VM.Audit",), "a test")
    assert rights.missing(permissions, [right]) == ([] if held else [right])


def test_one_of_several_privileges_is_enough():
    right = rights.Right("/storage/local", ("Datastore.AllocateSpace", "Datastore.Audit"), "a test")
    assert rights.missing({"/storage/local": {"Datastore.Audit": 1}}, [right]) == []


def test_rights_on_the_pool_of_a_new_container_do_as_well():
    wanted = rights.needed(901, {"memory": "512", "rootfs": "fast:8"}, create=True, pool="gpu")
    held = {"/pool/gpu": {"VM.Allocate": 1, "VM.Audit": 1, "VM.Config.Memory": 1, "VM.Config.Disk": 1}}
    (left,) = rights.missing(held, wanted)
    assert (left.path, left.pool) == ("/storage/fast", None)
    (first, *_rest) = rights.missing({}, wanted)
    assert (first.where, first.words()) == ("/vms/901 or /pool/gpu", "VM.Allocate for creating container 901")
    assert first.grant("a@pve") == "pveum acl modify /pool/gpu --users 'a@pve' --roles PVEVMAdmin"


def test_a_container_that_is_there_is_in_no_pool_because_of_its_declaration():
    """Proxmox counts the rights of the pool that it is in among those on the container itself."""
    (right,) = rights.needed(901, {"memory": "512"}, pool="gpu")
    assert (right.where, right.pool) == ("/vms/901", None)
    assert rights.missing({"/pool/gpu": {"VM.Config.Memory": 1}}, [right]) == [right]


def test_removing_a_container_takes_its_rights():
    wanted = rights.needed(901, {}, destroy=True, power=True)
    assert [(right.path, right.privileges) for right in wanted] == [
        ("/vms/901", ("VM.Allocate",)),
        ("/vms/901", ("VM.PowerMgmt",)),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("403 Permission check failed (/vms/901, VM.Audit)", ("/vms/901", ("VM.Audit",))),
        ("Permission check failed (/storage/s, Datastore.AllocateSpace|Datastore.Audit)",
         ("/storage/s", ("Datastore.AllocateSpace", "Datastore.Audit"))),
        ("Permission check failed (user != root@pam)", None),
        ("Permission check failed", None),
    ],
)  # fmt: skip
def test_a_refusal_says_which_right_it_wants(text, expected):
    right = rights.refused(text)
    assert (right and (right.path, right.privileges)) == expected


def test_the_remedy_is_a_command():
    right = rights.Right("/vms/901", ("VM.Config.Disk",), "rootfs")
    assert right.grant("a@pve!t") == "pveum acl modify /vms/901 --users 'a@pve' --tokens 'a@pve!t' --roles PVEVMAdmin"
    assert right.grant("a@pve") == "pveum acl modify /vms/901 --users 'a@pve' --roles PVEVMAdmin"
