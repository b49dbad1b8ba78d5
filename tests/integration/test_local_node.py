# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The local node's life on a machine of its own: up, again, parts killed, power lost, down. In the order of the file."""

from __future__ import annotations

import json
import re
from urllib.parse import urlsplit

import pytest

from tests.support.machine import STATE, Machine

pytestmark = pytest.mark.container

TEMPLATE = "local:vztmpl/debian-12-launchproof_amd64.tar.zst"
# What the node may leave on a machine: nothing of this.
FOOTPRINT = """lxc-ls -1; ip -brief link | sed 's/@.*//'; nft list ruleset; ss -tlnH | sort; cat /proc/sys/net/ipv4/ip_forward
cat /etc/subuid /etc/subgid; ls -A /usr/local/sbin /var/lib/lxc; ls -d /etc/pve 2>&1
find /sys/fs/cgroup -name 'lxc.payload.*' -o -name 'lxc.monitor.*' -o -name launchproof-node
ps -eo args= | grep -vE '^(ps|sh|grep|sed) '"""
CREATE = f"pvesh create /nodes/lpnode/lxc -ostemplate {TEMPLATE} -rootfs local:2 -tags launchproof"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    machine = Machine(tmp_path_factory.mktemp("machine"))
    machine.boot()
    machine.footprint = machine.sh(FOOTPRINT, check=False)
    yield machine
    machine.discard()


def changed(done):
    return int(re.search(r"changed=(\d+)", done.stdout)[1])


def pids(machine):
    return {name: json.loads(machine.sh(f"cat {STATE}/run/{name}.json"))["pid"] for name in ("api", "sshd", "s3")}


def resolves_a_name(machine):
    """Whether the container finds the address of a host that this machine gets its packages from."""
    sites = machine.sh("apt-get indextargets --format '$(SITE)'").splitlines()
    name = next(filter(None, (urlsplit(site).hostname for site in sites)))
    asked = machine.run("pct", "exec", "970", "--", "getent", "ahosts", name, check=False)
    return asked.returncode == 0


def test_check_on_a_fresh_machine_predicts_and_touches_nothing(machine):
    assert changed(machine.playbook("--check")) > 0
    assert machine.sh(f"ls -A {STATE}") == ""
    assert machine.sh(FOOTPRINT, check=False) == machine.footprint


def test_check_does_not_need_the_tools_it_would_install(machine):
    hidden = "/usr/bin/lxc-start /usr/bin/mmdebstrap /usr/sbin/nft /usr/sbin/sshd /usr/bin/openssl"
    machine.sh(f"for f in {hidden}; do mount --bind /dev/null $f; done")
    try:
        assert changed(machine.playbook("--check")) > 0
    finally:
        machine.sh(f"umount {hidden}")


def test_up_and_again(machine):
    machine.seed()
    assert changed(machine.playbook()) > 0
    before = pids(machine)
    assert changed(machine.playbook()) == 0
    assert pids(machine) == before


def test_a_container_has_systemd_network_and_its_device(machine):
    net = "-net0 name=eth0,bridge=lpbr0,ip=198.51.100.70/24,gw=198.51.100.1"
    machine.sh(f"{CREATE} -vmid 970 -hostname first -onboot 1 {net} -dev0 /dev/fuse,mode=0666 -start 1")
    assert (
        machine.sh(
            "pct exec 970 -- sh -c 'until systemctl is-system-running --wait >/dev/null 2>&1; do :; done; systemctl is-system-running'"
        )
        == "running"
    )
    assert machine.sh("pct exec 970 -- stat -c '%a %t' /dev/fuse") == "666 a"
    assert machine.sh("pct exec 970 -- cat /etc/hostname") == "first"
    # Out through NAT, to the S3 server on the bridge, and by name.
    assert "400" in machine.sh(
        "pct exec 970 -- python3 -c 'import urllib.request as r; r.urlopen(\"http://198.51.100.1:19000/\")' 2>&1",
        check=False,
    )
    assert resolves_a_name(machine)


def test_over_ssh_with_verified_host_key(machine):
    ssh = f"ssh -i {STATE}/ssh/id_ed25519 -o UserKnownHostsFile={STATE}/ssh/known_hosts -o StrictHostKeyChecking=yes -o BatchMode=yes"
    assert "uid=0" in machine.sh(f"{ssh} -p 12222 root@127.0.0.1 pct exec 970 -- id")


@pytest.mark.parametrize("part", ["api", "sshd", "s3"])
def test_a_killed_part_comes_back_alone(machine, part):
    before = pids(machine)
    machine.sh(f"kill -9 {before[part]}")
    assert changed(machine.playbook()) == 1
    after = pids(machine)
    assert {name for name in after if after[name] != before[name]} == {part}
    assert machine.sh("pct status 970") == "status: running"


def test_lost_network_and_tools_come_back(machine):
    machine.sh("nft delete table ip launchproof_node; echo 0 >/proc/sys/net/ipv4/ip_forward; rm /usr/local/sbin/pct")
    before = pids(machine)
    assert changed(machine.playbook()) == 1
    assert pids(machine) == before
    assert resolves_a_name(machine)


def test_a_create_that_the_api_did_not_survive_leaves_nothing(machine):
    api = pids(machine)["api"]
    # The kill comes when the template is being unpacked: tar is a process then.
    machine.sh(
        f"{CREATE} -vmid 971 >/dev/null 2>&1 & until pgrep -x tar >/dev/null; do :; done; kill -9 {api}; while pgrep -x tar >/dev/null; do :; done"
    )
    machine.playbook()
    assert machine.sh(f"ls /var/lib/lxc {STATE}/storage/images | grep -c 971", check=False) == "0"
    assert machine.sh("losetup --noheadings --output BACK-FILE | grep -c vm-971", check=False) == "0"
    assert "971" not in machine.sh("pct list")
    assert machine.sh("pct status 970") == "status: running"


def test_power_loss(machine):
    before = machine.sh("pct config 970")
    machine.crash()
    machine.boot()
    # The kernel is this machine's and was not started anew, so its boot id is the same one.
    machine.sh(f"rm {STATE}/run/boot_id")
    machine.footprint = re.sub(r"lpm\d+g", machine.name + "g", machine.footprint)
    assert changed(machine.playbook()) == 1
    assert machine.sh("pct config 970") == before
    # onboot, as on a real node
    machine.sh("until [ \"$(pct status 970)\" = 'status: running' ]; do :; done")


def test_down_refuses_what_is_not_ours(machine):
    machine.sh("pct set 970 -tags somebody")
    done = machine.playbook("-e", "local_node_state=absent", check=False)
    assert done.returncode != 0 and "container 970 of this node does not carry the tag launchproof" in done.stdout
    machine.sh("pct set 970 -tags launchproof")
    machine.sh("ip link add foreign type veth peer name foreign2; ip link set foreign master lpbr0")
    done = machine.playbook("-e", "local_node_state=absent", check=False)
    assert done.returncode != 0 and "interface foreign on lpbr0" in done.stdout
    assert machine.sh("pct status 970") == "status: running"
    machine.sh("ip link delete foreign")


def test_down_leaves_nothing_and_keeps_the_caches(machine):
    assert changed(machine.playbook("-e", "local_node_state=absent", "--check")) == 1
    assert machine.sh("pct status 970") == "status: running"
    assert changed(machine.playbook("-e", "local_node_state=absent")) == 1
    assert machine.sh(FOOTPRINT, check=False) == machine.footprint
    assert machine.sh(f"ls {STATE}/storage/template/cache").split() == [
        "debian-12-launchproof_amd64.tar.key",
        "debian-12-launchproof_amd64.tar.zst",
    ]
    assert changed(machine.playbook("-e", "local_node_state=absent")) == 0


def test_a_port_in_use_is_said_before_anything_is_changed(machine):
    machine.sh(
        "python3 -m http.server 18006 --bind 127.0.0.1 >/dev/null 2>&1 & echo $! >/run/http; until ss -tlnH | grep -q :18006; do :; done"
    )
    done = machine.playbook(check=False)
    machine.sh("kill $(cat /run/http)")
    assert "local_node_api_port=18006: another process listens there; choose another port" in done.stdout
    assert "lpbr0" not in machine.sh("ip -brief link")


def test_purge(machine):
    machine.playbook()
    machine.playbook("-e", "local_node_state=absent", "-e", "local_node_purge=true")
    assert machine.sh(f"ls -A {STATE}", check=False) == ""
    assert machine.sh(FOOTPRINT, check=False) == machine.footprint
