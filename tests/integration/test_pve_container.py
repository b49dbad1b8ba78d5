# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Role container and module pve_container against the embedded node: real containers behind a Proxmox API."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.support import pve
from tests.support.kill import kill_with_children

pytestmark = [pytest.mark.container, pytest.mark.usefixtures("local_node")]

VMID = 921


@pytest.fixture
def client(tmp_path):
    return pve.Client(tmp_path)


@pytest.fixture
def container(client):
    """A declaration whose container is gone before and after the test."""
    declared = pve.declared(VMID)
    client.ensure(declared, tasks_from="absent")
    yield declared
    client.ensure(declared, tasks_from="absent")


def inside(command: str) -> str:
    done = subprocess.run(["pct", "exec", str(VMID), "--", "sh", "-c", command], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=True)  # fmt: skip
    return done.stdout


@pytest.mark.peers("community.proxmox 98", "community.proxmox 510", "community.proxmox 192", "lxc 2168")
def test_from_nothing_to_a_started_init_and_then_left_alone(client, container):
    log = pve.AccessLog(VMID)
    predicted = client.ensure(container, "--check")
    assert predicted["changed"] is True
    assert log.changes() == []
    done = client.ensure(container)
    assert done["steps"] == predicted["steps"]
    address = container["networks"][0]["ip"].partition("/")[0]
    assert done["addresses"]["eth0"] == [address]
    assert address in inside("ip -o -4 addr show dev eth0")
    assert inside("systemctl is-system-running || true").strip() in ("running", "degraded")
    before, born, log = pve.configuration(VMID), inside("stat -c %Y /proc/1"), pve.AccessLog(VMID)
    again = client.ensure(container)
    assert again["changed"] is False
    assert 0 < len(log.lines()) == len(again["api_calls"]) <= 3
    assert (pve.configuration(VMID), inside("stat -c %Y /proc/1")) == (before, born)


@pytest.fixture
def shared():
    """A folder that root of an unprivileged container can reach: pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        (Path(name) / "mark").write_text("seen")
        yield name


def test_a_device_and_a_bind_mount_reach_a_running_container_by_one_restart(client, container, shared):
    client.ensure(container)
    wanted = {
        **container,
        "devices": [{"path": "/dev/full", "mode": "0666"}],
        "mounts": [{"source": shared, "target": "/srv/shared", "read_only": True}],
    }
    done = client.ensure(wanted)
    assert done["steps"] == ["config as root@pam: dev0, mp0", "reboot"]
    assert done["pending"] == []
    assert inside("cat /srv/shared/mark; echo; stat -c %a,%t,%T /dev/full").split() == ["seen", "666,1,7"]
    assert client.ensure(wanted)["changed"] is False
    gone = client.ensure({**container, "devices": [], "mounts": []})
    assert gone["changed"] is True
    assert "dev0" not in pve.configuration(VMID).decode()
    assert inside("ls /srv/shared 2>/dev/null || echo none").strip() in ("none", "")


def test_a_volume_is_added_to_a_running_container_by_one_restart_and_kept(client, container):
    client.ensure(container)
    mount = {"target": "/data", "storage": container["storage"], "size_gib": 1}
    done = client.ensure({**container, "mounts": [mount]})
    assert [step.partition(":")[0] for step in done["steps"]] == ["config", "reboot"]
    inside("touch /data/mark")
    assert client.ensure({**container, "mounts": [mount]})["changed"] is False
    assert inside("ls /data/mark").strip() == "/data/mark"


def test_a_container_that_is_not_ours_keeps_its_configuration_to_the_byte(client, container):
    client.ensure(container, container_state="present")
    path = f"/nodes/{pve.outputs()['api']['node']}/lxc/{VMID}/config"
    subprocess.run(
        ["pvesh", "set", path, "-tags", "prod", "-hostname", "precious"], check=True, stdin=subprocess.DEVNULL
    )
    before, log = pve.configuration(VMID), pve.AccessLog(VMID)
    try:
        tried = [
            ({}, {}),
            ({}, {"tasks_from": "preflight"}),
            ({}, {"tasks_from": "absent"}),
            ({}, {"container_state": "stopped"}),
            ({"disk_gib": 3, "memory": 300, "networks": []}, {}),
        ]
        for changed, arguments in tried:
            refused = client.role({**container, **changed}, **arguments)
            assert refused.returncode != 0
            assert f"launchproof_container.vmid is {VMID}" in refused.stdout
            assert "precious" in refused.stdout
        assert log.changes() == []
        assert pve.configuration(VMID) == before
    finally:
        subprocess.run(["pvesh", "set", path, "-tags", "launchproof"], check=True, stdin=subprocess.DEVNULL)


def test_the_node_itself_is_an_identity_over_ssh(client, container):
    """No token, no password: pvesh on the node makes it, with a root-only key, and removes it."""
    node = {"pve_api_via": "node", "pve_api_user": "", "pve_api_token_id": "", "pve_api_token_secret": ""}
    wanted = {**container, "devices": [{"path": "/dev/full", "mode": "0666"}]}
    assert client.ensure(wanted, tasks_from="preflight", **node) == {}
    done = client.ensure(wanted, container_state="present", **node)
    assert (done["status"], len(done["steps"])) == ("stopped", 1)
    assert client.ensure(wanted, container_state="present", **node)["changed"] is False
    assert client.ensure(wanted, tasks_from="absent", **node)["status"] == "absent"


@pytest.mark.parametrize(
    ("options", "extra", "words"),
    [
        ({"template": "local:vztmpl/nowhere.tar.zst"}, {}, "launchproof_container.template"),
        ({"disk_gib": 900000}, {}, "launchproof_container.disk_gib"),
        ({"storage": "nowhere"}, {}, "launchproof_container.storage"),
        pytest.param(
            {"devices": [{"path": "/dev/nowhere0"}]},
            {},
            "launchproof_container.devices[].path",
            marks=pytest.mark.peers("remz1337 8"),
        ),
        ({"devices": [{"path": "/dev/null"}]}, {"pve_root_via": "none"}, "pve_root_via"),
        ({}, {"pve_api_token_secret": "wrong"}, "pve_api_token_secret"),
        ({}, {"pve_api_port": 1}, "pve_api_host"),
        ({}, {"pve_node": "elsewhere"}, "pve_node"),
        ({}, {"pve_api_ca_path": "/etc/ssl/certs/ca-certificates.crt"}, "pve_api_ca_path"),
        ({}, {"pve_api_ca_path": "", "pve_api_fingerprint": "AB" * 32}, "pve_api_fingerprint"),
        ({}, {"pve_api_fingerprint": "AB:CD"}, "pve_api_fingerprint"),
        ({"lxc": {"apparmor.profile": "unconfined"}}, {}, "cannot be declared: raw lxc.* lines"),
    ],
)
def test_bad_input_stops_in_preflight_and_nothing_is_sent(client, options, extra, words):
    log = pve.AccessLog(VMID + 1)
    refused = client.role(pve.declared(VMID + 1, **options), tasks_from="preflight", **extra)
    assert refused.returncode != 0
    assert (words if " " in words else f"{words} is ") in refused.stdout
    assert log.changes() == []


@pytest.mark.parametrize("kill", [kill_with_children, lambda pid: os.kill(pid, signal.SIGKILL)], ids=["all", "parent"])
def test_an_interrupted_creation_is_taken_up_by_the_next_run(client, container, kill):
    log = pve.AccessLog(VMID)
    process = client.begin(container)
    deadline = time.monotonic() + 60
    while not log.changes():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kill(process.pid)
    process.wait()
    assert client.ensure(container)["status"] == "running"
    assert client.ensure(container)["changed"] is False
