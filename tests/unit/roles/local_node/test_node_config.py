# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from launchproof_node import config, inside

FULL = {
    "arch": "amd64",
    "cores": 2,
    "cpulimit": 1.5,
    "description": "first 100 %\n#second\tline\n",
    "features": "nesting=1",
    "hostname": "trainer.example.org",
    "memory": 2048,
    "net0": "name=eth0,bridge=lpbr0,gw=198.51.100.1,hwaddr=BC:24:11:00:00:01,ip=198.51.100.41/24,type=veth",
    "onboot": 1,
    "ostype": "debian",
    "rootfs": "local:901/vm-901-disk-0.raw,size=8G",
    "swap": 512,
    "tags": "a;launchproof",
    "unprivileged": 1,
}


def test_a_configuration_survives_its_file():
    pending = {"cores": 4, "dev0": "/dev/null,mode=0666", "mp0": None, "description": "later\n50 %\n"}
    assert config.load(config.dump(FULL, pending)) == (FULL, pending)


def test_the_file_is_proxmox_format():
    text = config.dump({"memory": 512, "description": "one\ntwo\n"}, {"mp0": None, "cores": 2})
    assert text == "#one\n#two\nmemory: 512\n\n[pve:pending]\ndelete: mp0\ncores: 2\n"


def test_the_digest_is_the_same_after_a_restart_of_the_api():
    assert config.digest(*config.load(config.dump(FULL, {"cores": 4}))) == config.digest(FULL, {"cores": 4})
    assert config.digest(FULL, {}) != config.digest({**FULL, "cores": 3}, {})


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("hookscript", "local:snippets/x", "hookscript=local:snippets/x"),
        ("startup", "order=1", "startup=order=1"),
        ("features", "nesting=1,mount=nfs", "features=mount=nfs"),
        ("net0", "name=eth0,bridge=b,ip=dhcp", "no DHCP"),
        ("net0", "name=eth0,bridge=b,rate=10", "rate=10"),
        ("net1", "name=eth0,bridge=b,tag=7", "tag=7"),
        ("mp0", "/dev/sdb1,mp=/x", "device mount /dev/sdb1"),
        ("mp0", "local:1,mp=/x,quota=1", "quota=1"),
        ("rootfs", "local:0", "without a size"),
    ],
)
def test_what_would_have_no_effect_is_refused(option, value, said):
    with pytest.raises(config.Unsupported, match=said):
        config.check({option: value})


def test_what_has_an_effect_is_not_refused():
    config.check(
        {
            **FULL,
            "dev0": "/dev/null,mode=0666,uid=1,gid=2,deny-write=1",
            "mp1": "/srv,mp=/srv,ro=1",
            "features": "fuse=1,keyctl=0,mknod=0",
        }
    )


def lxc(options=None, cgroup2=False, devices=(), mounts=()):
    return config.lxc_config(901, {**FULL, **(options or {})}, "/r", 2, cgroup2, devices, mounts).splitlines()


def test_unprivileged_ids_are_mapped_and_volumes_with_them():
    lines = lxc(mounts=[("/v", "data", [], True), ("/srv", "srv", ["ro"], False)])
    assert "lxc.idmap = u 0 100000 65536" in lines and "lxc.rootfs.options = idmap=container" in lines
    assert "lxc.mount.entry = /v data none bind,create=dir,idmap=container 0 0" in lines
    assert "lxc.mount.entry = /srv srv none bind,create=dir,ro 0 0" in lines


def test_privileged_has_no_map():
    lines = lxc({"unprivileged": 0}, mounts=[("/v", "data", [], True)])
    assert not [line for line in lines if "idmap" in line]


def test_limits_in_both_versions_of_control_groups():
    assert {
        "lxc.cgroup.memory.limit_in_bytes = 2048M",
        "lxc.cgroup.memory.memsw.limit_in_bytes = 2560M",
        "lxc.cgroup.cpu.cfs_quota_us = 150000",
    } <= set(lxc())
    assert {
        "lxc.cgroup2.memory.max = 2048M",
        "lxc.cgroup2.memory.swap.max = 512M",
        "lxc.cgroup2.cpu.max = 150000 100000",
    } <= set(lxc(cgroup2=True))


def test_more_cores_than_there_are():
    assert "lxc.cgroup.cpuset.cpus = 0,1" in lxc({"cores": 64})


def test_containers_are_spread_over_the_cpus():
    spread = [config.cpu_limits(vmid, {"cores": 2}, 3, True)["cpuset.cpus"] for vmid in (900, 901, 902)]
    assert spread == ["0,1", "1,2", "0,2"]


def test_network_and_device():
    lines = lxc(devices=[("/s/null", "dev/null0", "c", 1, 3, "rw")])
    assert {
        "lxc.net.0.veth.pair = veth901i0",
        "lxc.net.0.ipv4.address = 198.51.100.41/24",
        "lxc.net.0.ipv4.gateway = 198.51.100.1",
    } <= set(lines)
    assert {
        "lxc.cgroup.devices.allow = c 1:3 rw",
        "lxc.cgroup2.devices.allow = c 1:3 rw",
        "lxc.mount.entry = /s/null dev/null0 none bind,create=file 0 0",
    } <= set(lines)


def test_names_and_resolvers_inside():
    assert config.hosts_body(FULL, 901) == "198.51.100.41 trainer.example.org trainer\n"
    assert config.hosts_body({"net0": "name=eth0,ip=manual"}, 7) == "127.0.1.1 CT7\n"
    assert config.resolv_text({}, ["192.0.2.1"], "example.org") == "search example.org\nnameserver 192.0.2.1\n"
    assert (
        config.resolv_text({"nameserver": "192.0.2.8 192.0.2.9"}, ["192.0.2.1"], "")
        == "nameserver 192.0.2.8\nnameserver 192.0.2.9\n"
    )


def test_only_the_nodes_section_of_a_file_is_replaced():
    first = inside.with_section("127.0.0.1 localhost", "198.51.100.2 a\n")
    assert first == "127.0.0.1 localhost\n# --- BEGIN PVE ---\n198.51.100.2 a\n# --- END PVE ---\n"
    assert inside.with_section(first + "192.0.2.9 mine\n", "198.51.100.3 b\n") == (
        "127.0.0.1 localhost\n# --- BEGIN PVE ---\n198.51.100.3 b\n# --- END PVE ---\n192.0.2.9 mine\n"
    )
