# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Forty containers at once behind the node's one sshd, which has its default limits."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.support import pve
from tests.support.deployment import ENVIRONMENT, NODE, REPO
from tests.support.many import containers

pytestmark = [pytest.mark.container, pytest.mark.usefixtures("local_node")]

VMIDS = list(range(1000, 1040))


@pytest.fixture
def home():
    with containers(VMIDS) as folder:
        yield folder


@pytest.fixture
def play(home, tmp_path):
    """Runs a command in all of them at once: (process, file names of the shared connections)."""

    def run(sockets, **variables):
        (tmp_path / "inventory.json").write_text(
            json.dumps(
                {
                    "all": {
                        "vars": {**pve.connection(), "ansible_pct_lxc_path": str(home), **variables},
                        "hosts": {f"c{vmid}": {"ansible_pct_vmid": vmid} for vmid in VMIDS},
                    }
                }
            )
        )
        done = subprocess.run(
            [sys.executable, "-m", "ansible", "adhoc", "all", "-i", tmp_path / "inventory.json",
             "--forks", str(len(VMIDS)), "-m", "raw", "-a", "hostname"],
            cwd=REPO, env={**ENVIRONMENT, "ANSIBLE_SSH_CONTROL_PATH_DIR": str(sockets)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done, [path for path in sockets.iterdir() if path.is_socket()]

    return run


def limits():
    """What sshd says that it allows at once."""
    effective = subprocess.run(
        ["/usr/sbin/sshd", "-T", "-f", NODE / "ssh/sshd_config"], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"^(?:maxstartups|maxsessions) .*", effective, re.MULTILINE)


def test_forty_containers_are_reached_at_once_over_five_connections(play, sockets):
    assert limits() == ["maxsessions 10", "maxstartups 10:30:100"]
    done, connections = play(sockets)
    assert done.returncode == 0, done.stdout
    assert "UNREACHABLE" not in done.stdout
    assert set(re.findall(r"^(\d+)$", done.stdout, re.MULTILINE)) == set(map(str, VMIDS))
    assert len(connections) <= 5


def test_without_shared_connections_a_busy_node_is_asked_again(play, sockets):
    """Forty connections made at once, of which sshd turns some away: who was turned away tries again."""
    done, connections = play(sockets, ansible_ssh_args="-o ControlMaster=no -o ControlPath=none")
    assert done.returncode == 0, done.stdout
    assert set(re.findall(r"^(\d+)$", done.stdout, re.MULTILINE)) == set(map(str, VMIDS))
    assert connections == []
