# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What users of other tools have reported, and the tests that show that it does not happen here, or is named.

``pytest -m peers`` runs them all. A test anywhere carries the marker ``peers`` with the ids of the reports that it is
about, as cases of the fault matrix do (``PEERS`` in cases.py); here are the lists of the reports, and what no other test shows.
"""

from __future__ import annotations

import ast
import os
import re
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.integration.cases import CASES, PEERS
from tests.integration.test_pct import connect
from tests.support import pve
from tests.support.deployment import NODE
from tests.support.proxy import Proxy

TESTS = Path(__file__).parents[1]

PROVISIONING = {
    "bpg 1721": "passthrough is applied on update, not on create",
    "Telmate 1138": "device majors that were copied by hand break after a reboot",
    "Telmate 155": "403 without saying which key",
    "UdelaRInterior 16": "403 without saying which right",
    "proxcenter-ui 9": "a token with separated privileges has no rights at all",
    "community.general 4487": "bind mounts and features need root@pam",
    "mieweb 156": "features need root@pam",
    "community.proxmox 98": "cannot start right after create",
    "community.proxmox 510": "a fresh container has no name yet",
    "community.proxmox 69": "update says ok and changes nothing",
    "community.proxmox 192": "a new MAC address in every run",
    "community.proxmox 49": "deleting a running container succeeds, and it is still there",
    "community.proxmox 45": "5 s of read timeout on a loaded cluster",
    "Telmate 677": "CT is locked (disk)",
    "Telmate 1069": "can't lock file",
    "Telmate 163": "the size is shown, and the volume has the old one",
    "jammsen 7": "CUDA error 999 after the node's reboot while nvidia-smi works",
    "ProxmoxVE 5740": "/dev/nvidia-uvm is absent until the driver was used",
    "remz1337 8": "a container does not start because one listed device is missing",
    "ProxmoxVE 10579": "NVML's library and the driver are of different versions",
    "systemd 17866": "226/NAMESPACE in LXC",
    "lxc 4052": "226/NAMESPACE in LXC",
    "zamba 22": "the locale of the host leaks into the container",
    "lxc 2168": "failed to connect to bus after attach",
}
PROOF = {
    "ansible 79436": "a nohup child dies with the task",
    "ansible 33410": "a nohup child dies with the task",
    "ansible 24450": "a unit of /bin/false is reported as changed",
    "ansible 20278": "active (exited) counts as started",
    "ansible 15800": "pkill -f kills its own shell",
    "lxc 4203": "attach returns 0 for a killed command",
    "lxc 4507": "attach hangs on a background child",
    "lxc 554": "tmux dies under attach",
    "ansible 65282": "wait_for matches lines of the run before",
    "logrotate 34": "copytruncate leaves holes of NUL bytes",
    "logrotate 363": "copytruncate loses the reader's place",
    "moby 12447": "an empty log because of buffering",
    "transformers 28683": "progress bars end their lines with carriage returns",
    "ansible 12903": "a pipe hides the exit code",
    "systemd 3038": "203 for a bad first line of a script",
    "systemd 27591": "209 for a log folder that is not there",
    "EveryVoice 178": "CUDA out of memory, and still alive",
    "VIAME 146": "CUDA out of memory, and exit 0",
    "verl 1158": "NCCL hangs, the process lives",
    "psutil 1008": "a zombie counts as running",
    "nvidia-docker 1483": "NVML lists the host's process ids",
    "nvitop 44": "packages overwrite each other's pynvml",
}
WORKLOAD = {
    "SpecForge 426": "one file a sample is slow and huge",
    "speculators 279": "silently wrong hidden states",
}
VMID = 932


def shown() -> set[str]:
    """The ids that markers name, read from the tests' sources, and those of the matrix."""
    found = {report for reports in PEERS.values() for report in reports}
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "peers":
                found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found


def test_every_report_has_a_test_and_every_test_a_report():
    assert shown() == {*PROVISIONING, *PROOF, *WORKLOAD}
    assert set(PEERS) <= {case.name for case in CASES}


# ------------------------------------------------------------------ on a container of the embedded node


DEVICE = Path("/dev/launchproof-peer")


def make_device(minor: int) -> None:
    DEVICE.unlink(missing_ok=True)
    os.mknod(DEVICE, stat.S_IFCHR | 0o666, os.makedev(1, minor))


def inside(command: str) -> str:
    argv = ["pct", "exec", str(VMID), "--", "sh", "-c", command]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout


def node(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def client(tmp_path_factory, local_node):
    return pve.Client(tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def container(client):
    """One declared container, which runs, with a device and a feature that only root@pam may give; yields its declaration."""
    make_device(3)
    declared = pve.declared(
        VMID,
        devices=[{"path": str(DEVICE), "mode": "0666"}],
        features={"nesting": True, "keyctl": True},
    )
    client.ensure(declared)
    yield declared
    client.ensure(declared, tasks_from="absent")
    DEVICE.unlink()


def told(done: subprocess.CompletedProcess) -> str:
    return " ".join(done.stdout.split())


@pytest.mark.container
@pytest.mark.peers("Telmate 1138")
def test_a_device_that_comes_back_with_another_number_is_that_device_after_the_next_start(container):
    assert inside(f"stat -c '%t %T' {DEVICE}").split() == ["1", "3"]
    node("pct", "stop", str(VMID))
    make_device(5)
    node("pct", "start", str(VMID))
    assert inside(f"stat -c '%t %T' {DEVICE}; head -c 4 {DEVICE} | od -An -tx1").split() == [
        "1",
        "5",
        "00",
        "00",
        "00",
        "00",
    ]


@pytest.mark.container
@pytest.mark.peers("Telmate 163", "community.proxmox 69", "community.proxmox 192")
def test_a_change_is_one_to_the_disk_and_to_what_is_no_longer_declared_and_the_mac_address_stays(client, container):
    def address() -> str:
        return re.search(r"hwaddr=([0-9A-F:]+)", pve.configuration(VMID).decode())[1]

    before = address()
    other = {**container, "disk_gib": 3, "features": {"nesting": True}}
    node("pct", "stop", str(VMID))  # this machine may not let a mounted disk grow, see docs/local-node.md
    done = client.ensure(other)
    assert done["changed"] is True
    config = pve.configuration(VMID).decode()
    assert "keyctl" not in config and "size=3G" in config
    kib = int(inside("df --output=size / | tail -n 1"))
    assert 2.7 * 1024**2 < kib <= 3 * 1024**2
    assert (NODE / f"storage/images/{VMID}/vm-{VMID}-disk-0.raw").stat().st_size == 3 * 1024**3
    assert inside("cat /sys/class/net/eth0/address").strip().upper() == before == address()
    log = pve.AccessLog(VMID)
    assert client.ensure(other)["changed"] is False
    assert (log.changes(), address()) == ([], before)
    container.update(other)


@pytest.mark.container
@pytest.mark.peers("community.proxmox 49")
def test_a_running_container_is_not_deleted_without_a_word(client, container):
    born = inside("stat -c %Y /proc/1")
    refused = client.role(container, container_state="absent")
    assert refused.returncode != 0
    assert (
        f"launchproof_container.vmid is {VMID}: this container is running. Stop it first, or say force: true"
        in told(refused)
    )
    assert inside("stat -c %Y /proc/1") == born


@pytest.mark.container
@pytest.mark.peers("community.proxmox 45")
def test_an_answer_that_takes_longer_than_five_seconds_is_waited_for(client, container):
    with Proxy(pve.outputs()["api"]["port"]) as proxy:
        proxy.freeze()
        thaw = threading.Timer(6, proxy.thaw)
        thaw.start()
        done = client.ensure(container, pve_api_port=int(proxy.endpoint.rpartition(":")[2]))
        assert not thaw.is_alive()
        assert done["changed"] is False


@pytest.mark.container
@pytest.mark.peers("community.general 4487", "mieweb 156")
def test_each_key_that_root_alone_may_set_is_named_before_anything_is_sent(client, container):
    log = pve.AccessLog(VMID)
    wanted = {
        **container,
        "features": {"nesting": True, "fuse": True},
        "mounts": [{"source": "/srv", "target": "/srv"}],
    }
    refused = client.role(wanted, pve_root_via="none")
    assert refused.returncode != 0
    for key in ("mp0", "features"):
        assert re.search(rf"pve_root_via is 'none': {key} is .* which Proxmox lets root@pam alone set", told(refused))
    assert log.changes() == []


@pytest.mark.container
@pytest.mark.peers("lxc 4507")
def test_a_background_child_holds_up_no_command_and_outlives_the_connection(container):
    connection = connect("ssh", ansible_pct_vmid=VMID)
    began = time.monotonic()
    rc, pid, _err = connection.exec_command("sleep 600 </dev/null >/dev/null 2>&1 & echo $!")
    assert rc == 0 and time.monotonic() - began < 300
    connection.reset()
    inside(f"kill {int(pid)}")


# ------------------------------------------------------------------ a declared address is a postcondition


@pytest.mark.container
def test_a_declared_address_that_is_missing_is_a_failure_when_its_time_is_up(client, container):
    address = container["networks"][0]["ip"]
    inside(f"ip address delete {address} dev eth0; ip address add 169.254.7.7/16 dev eth0")
    try:
        refused = client.role(container, container_ready_timeout=2)
    finally:
        inside(f"ip address flush dev eth0; ip address add {address} dev eth0")
    assert refused.returncode != 0
    assert (
        f"launchproof_container.networks[eth0].ip is '{address}': the running container has no address there"
        in told(refused)
    )


@pytest.mark.container
def test_a_declared_address_that_comes_late_is_waited_for(client, container):
    address = container["networks"][0]["ip"]
    log = pve.AccessLog(VMID)
    inside(f"ip address delete {address} dev eth0")
    run = client.begin(container)
    asked = threading.Event()

    def give() -> None:
        while sum("/interfaces" in line for line in log.lines()) < 2 and not asked.wait(0.1):
            pass
        inside(f"ip address add {address} dev eth0")

    giver = threading.Thread(target=give)
    giver.start()
    output, _none = run.communicate(timeout=60)
    asked.set()
    giver.join()
    assert run.returncode == 0, output
    assert sum("/interfaces" in line for line in log.lines()) > 2
