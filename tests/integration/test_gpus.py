# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container's GPUs from declaration to job, on real containers of the embedded node, and a node that starts anew.

There need not be a GPU: NVML's answers come from a stand-in of the driver's library. Device nodes are real, of minor
numbers that no machine has.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import pve
from tests.support.container import Container
from tests.support.deployment import ENVIRONMENT, NODE, REPO
from tests.support.nvml import standin

pytestmark = pytest.mark.container

VMID = 930
GPUS = [standin.Gpu("GPU-aaaa", minor=241), standin.Gpu("GPU-bbbb", minor=240), standin.Gpu("GPU-cccc", minor=242)]
# Each another device of the kernel's memory driver, so that inside one sees which is which: null, zero, full, random.
NODES = {"nvidia240": 3, "nvidia241": 5, "nvidia242": 7, "nvidiactl": 8, "nvidia-uvm": 9}


def playbooks(folder: Path, hosts: dict, *names: str, **more) -> subprocess.CompletedProcess[str]:
    """Run playbooks of the project on hosts of the group launchproof."""
    inventory = folder / "inventory.yml"
    inventory.write_text(yaml.safe_dump({"all": {"children": {"launchproof": {"hosts": hosts}}}}))
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    argv = [program, "-i", str(inventory), *(f"playbooks/{name}.yml" for name in names), *more.get("arguments", [])]
    environment = {**ENVIRONMENT, "LAUNCHPROOF_REPORT": str(folder / "report.json")}
    return subprocess.run(argv, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)  # fmt: skip


@pytest.fixture(scope="module")
def gpu_node(local_node, tmp_path_factory):
    """The embedded node with device nodes: called with what NVML answers there, it gives an inventory's variables."""
    folder = tmp_path_factory.mktemp("gpu-node")
    made = []
    for name, minor in NODES.items():
        path, device = f"/dev/{name}", os.makedev(1, minor)
        if not os.path.exists(path):
            os.mknod(path, stat.S_IFCHR | 0o600, device)
        if os.stat(path).st_rdev == device:  # made here, or left by a run that was killed
            made.append(path)

    def variables(state: standin.State) -> dict:
        python = folder / f"python-{len(list(folder.iterdir()))}"
        state.write(python.with_suffix(".state"))
        settings = f"LD_LIBRARY_PATH={standin.built()} NVML_STANDIN={python.with_suffix('.state')}"
        python.write_text(f'#!/bin/sh\n{settings} exec /usr/bin/python3 "$@"\n')
        python.chmod(0o755)
        return {"gpu_host_python": str(python), "gpu_host_boot_unit": False, **pve.variables()}

    yield variables
    for path in made:
        os.unlink(path)


@pytest.fixture
def client(tmp_path):
    """The node's containers VMID and VMID + 1 are gone afterwards."""
    yield
    client = pve.Client(tmp_path)
    for vmid in (VMID, VMID + 1):
        if (NODE / f"pve/lxc/{vmid}.conf").exists():
            client.ensure(pve.declared(vmid), tasks_from="absent")


def host(node: dict, vmid: int, gpus, **more) -> dict:
    declared = pve.declared(vmid, gpus=gpus, unprivileged=True)
    return {**node, "launchproof_container": declared, "ansible_pct_vmid": vmid, **more}


def inside(vmid: int, command: str) -> str:
    argv = ["pct", "exec", str(vmid), "--", "sh", "-c", command]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout


def devices(vmid: int) -> dict[str, str]:
    """The driver's device nodes inside: {name: minor number, in hexadecimal}."""
    return dict(line.split() for line in inside(vmid, "cd /dev; stat -c '%n %T' nvidia*").splitlines())


def give_driver(vmid: int, folder: Path, version: str) -> None:
    """Put the driver's libraries of a version into a running container, as its installer would."""
    for library in ("libcuda", "libnvidia-ml"):
        built = standin.build(folder, version=version) / f"{library}.so.{version}"
        target = f"/usr/lib/x86_64-linux-gnu/{library}.so"
        inside(vmid, f"rm -f {target}.*")
        subprocess.run(["pct", "push", str(vmid), str(built), f"{target}.{version}"], check=True)
    inside(vmid, "ldconfig")


@pytest.mark.peers("bpg 1721", "ProxmoxVE 10579")
def test_exactly_the_declared_gpus_reach_the_container_and_its_job(gpu_node, client, tmp_path):
    node = gpu_node(standin.State(gpus=GPUS))
    job = {"name": "gpu", "command": ["/bin/sleep", "600"], "user": "root", "gpus": [0]}
    hosts = {"target": host(node, VMID, ["GPU-aaaa"], launchproof_jobs=[job])}
    # Created with the devices, not only changed to have them: they are there from the first start on.
    without = playbooks(tmp_path, hosts, "preflight", "container")
    assert without.returncode != 0
    version = standin.VERSION
    for words in ("launchproof_container.gpus is ['GPU-aaaa']", f"runs version {version}", "no libcuda.so.1"):
        assert words in " ".join(without.stdout.split()), without.stdout
    assert devices(VMID) == {"nvidia241": "5", "nvidiactl": "8", "nvidia-uvm": "9"}

    give_driver(VMID, tmp_path / "old", "550.54.14")
    other = playbooks(tmp_path, hosts, "container")
    assert other.returncode != 0
    assert "/usr/lib/x86_64-linux-gnu/libcuda.so.550.54.14" in other.stdout

    give_driver(VMID, tmp_path / "same", version)
    same = playbooks(tmp_path, hosts, "preflight", "container", "job")
    assert same.returncode == 0, same.stdout
    assert "CUDA_VISIBLE_DEVICES=GPU-aaaa" in inside(VMID, "cat /etc/launchproof/env/gpu.service.env").replace('"', "")
    log = pve.AccessLog(VMID)
    again = playbooks(tmp_path, hosts, "preflight", "container")
    assert again.returncode == 0 and "changed=0" in again.stdout, again.stdout
    assert log.changes() == []


@pytest.mark.long
def test_counts_of_two_containers_do_not_meet(gpu_node, client, tmp_path):
    node = gpu_node(standin.State(gpus=GPUS))
    hosts = {"one": host(node, VMID, {"count": 1}), "two": host(node, VMID + 1, [{"count": 1}, "GPU-aaaa"])}
    predicted = playbooks(tmp_path, hosts, "preflight", "container", arguments=["--check"])
    assert predicted.returncode == 0, predicted.stdout
    playbooks(tmp_path, hosts, "preflight", "container")
    shares = [{name for name in devices(vmid) if name[6:].isdigit()} for vmid in (VMID, VMID + 1)]
    assert shares == [{"nvidia240"}, {"nvidia241", "nvidia242"}]


@pytest.mark.peers("ProxmoxVE 10579")
def test_what_a_node_cannot_give_is_said_before_anything_is_made(gpu_node, tmp_path):
    there = gpu_node(standin.State(gpus=GPUS))
    cases = [
        (there, ["GPU-dddd"], "has no GPU GPU-dddd. It has GPU-aaaa (0), GPU-bbbb (1), GPU-cccc (2)"),
        (there, ["all"], "'all' is neither an index nor a UUID"),
        (there, {"count": 4}, "of the 3 GPUs of node lpnode the other hosts leave GPU-aaaa, GPU-bbbb, GPU-cccc"),
        (gpu_node(standin.State(init=9)), [0], "Install and load the NVIDIA driver there"),
        (gpu_node(standin.State(init=18)), [0], "reboot the node"),
    ]
    # Each on a node of its own, by name; none is asked for containers, as it does not come to that.
    hosts = {
        f"h{n}": {**host(node, VMID + 2 + n, gpus), "pve_api_host": f"{n}"}
        for n, (node, gpus, _words) in enumerate(cases)
    }
    logs = [pve.AccessLog(VMID + 2 + n) for n in range(len(cases))]
    refused = playbooks(tmp_path, hosts, "preflight")
    assert refused.returncode != 0
    told = " ".join(refused.stdout.split())
    for _node, gpus, words in cases:
        assert f"launchproof_container.gpus is {gpus!r}: " in told and words in told
    assert re.findall(r"failed=(\d)", refused.stdout) == ["1"] * len(cases)
    assert [log.lines() for log in logs] == [[]] * len(cases)


# ------------------------------------------------------------------ a node that starts anew

MODPROBE = """#!/bin/sh
# What nvidia-modprobe does for these arguments: it makes the device nodes, if they are not there.
make() { [ -e /dev/$1 ] || mknod -m 0666 /dev/$1 c 1 3; }
case "$*" in
  -c=255) make nvidiactl ;;
  "-u -c=0") make nvidia-uvm; make nvidia-uvm-tools ;;
  -c=*) make nvidia${1#-c=} ;;
  *) exit 1 ;;
esac
"""
# As Proxmox starts its guests: whoever needs a device then must find it.
GUESTS = """[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'ls /dev > /root/found-at-start'
[Install]
WantedBy=multi-user.target
"""
PLAY = """
- hosts: node
  gather_facts: false
  roles: [dflash.launchproof.gpu_host]
"""
MADE = {"nvidia241", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}


def found_at_start(container: Container) -> set[str]:
    return {name for name in container.read("/root/found-at-start").split() if name.startswith("nvidia")}


@pytest.mark.peers("jammsen 7", "ProxmoxVE 5740")
def test_after_a_nodes_restart_the_device_nodes_are_there_before_its_guests_start(tmp_path):
    unit = "/etc/systemd/system/launchproof-gpu-nodes.service"
    state = standin.State(gpus=GPUS[:1])
    with Container("93000") as node:  # a number, so that connection pct leads into it

        def role(*arguments):
            way = {"ansible_connection": "dflash.launchproof.pct", "ansible_pct_vmid": node.name,
                   "ansible_pct_transport": "local", "ansible_pct_lxc_path": str(node.home),
                   "ansible_python_interpreter": "/usr/bin/python3"}  # fmt: skip
            declared = {"pve_node": "pve1", "pve_api_host": "pve1", "launchproof_container": {"vmid": 200, "gpus": [0]}}
            hosts = {"node": {**way, **declared}}
            inventory = {"all": {"children": {"launchproof": {"hosts": hosts}}}}
            (tmp_path / "inventory.json").write_text(json.dumps(inventory))
            (tmp_path / "play.yml").write_text(PLAY)
            program = str(Path(sys.executable).with_name("ansible-playbook"))
            argv = [program, "-i", str(tmp_path / "inventory.json"), str(tmp_path / "play.yml"), *arguments]
            return subprocess.run(
                argv, cwd=REPO, env=ENVIRONMENT, stdin=subprocess.DEVNULL, capture_output=True, text=True
            )

        standin.install(node, state, nodes=[])
        missing = role()
        assert missing.returncode != 0
        assert "node pve1 has no nvidia-modprobe" in " ".join(missing.stdout.split())
        node.write("/usr/bin/nvidia-modprobe", MODPROBE, 0o755)
        node.write("/etc/systemd/system/pve-guests.service", GUESTS)
        node.shell("systemctl enable pve-guests.service")
        # The fault itself: after a restart nothing is there, until somebody uses the driver.
        node.stop()
        node.start()
        assert found_at_start(node) == set()

        standin.install(node, state, nodes=[])
        predicted = role("--check", "--diff")
        assert predicted.returncode == 0, predicted.stdout
        assert "changed=1" in predicted.stdout and "Before=pve-guests.service" in predicted.stdout
        assert not node.path(unit).exists() and not node.path("/dev/nvidiactl").exists()
        done = role()
        assert done.returncode == 0 and "changed=2" in done.stdout, done.stdout
        assert all(node.path(f"/dev/{name}").is_char_device() for name in MADE)
        again = role()
        assert again.returncode == 0 and "changed=0" in again.stdout, again.stdout

        node.path("/dev/nvidia-uvm").unlink()
        repaired = role()
        assert repaired.returncode == 0 and "changed=1" in repaired.stdout, repaired.stdout
        assert node.path("/dev/nvidia-uvm").is_char_device()

        node.stop()
        node.start()
        assert found_at_start(node) == MADE
