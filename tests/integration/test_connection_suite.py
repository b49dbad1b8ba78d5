# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""ansible-core's own integration suite for connections, from the source release of the version that runs here.

It is fetched from the package index and cached; nothing of it is kept in this repository.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version

import pytest

from tests.support import pve
from tests.support.container import CACHE
from tests.support.deployment import ENVIRONMENT, REPO
from tests.support.many import containers

pytestmark = [pytest.mark.container, pytest.mark.usefixtures("local_node")]

VMID = 970


@pytest.fixture
def suite(tmp_path):
    """The folder test/integration/targets of ansible-core's source release, with its two for connections in it."""
    name = f"ansible_core-{version('ansible-core')}"
    release = CACHE / f"{name}.tar.gz"
    if not release.exists():
        lock = (REPO / "requirements/test.txt").read_text()
        wanted = tmp_path / "requirements.txt"
        wanted.write_text(re.search(r"^ansible-core==.*\n(?: +--hash.*\n)+", lock, re.MULTILINE).group())
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=ansible-core",
             "--require-hashes", "--requirement", wanted, "--dest", tmp_path],
            check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        shutil.move(tmp_path / release.name, release)
    with tarfile.open(release) as archive:
        targets = f"{name}/test/integration/targets"
        archive.extractall(
            tmp_path, [member for member in archive if member.name.startswith(f"{targets}/connection/")], filter="data"
        )
    return tmp_path / targets / "connection"


def test_ansible_cores_suite(suite, tmp_path):
    hosts = {
        "ssh": {"ansible_pipelining": True},
        "ssh-without-pipelining": {"ansible_pipelining": False},
        "local": {"ansible_pct_transport": "local"},
    }
    with containers([VMID]) as home:
        variables = {**pve.connection(), "ansible_pct_vmid": VMID, "ansible_pct_lxc_path": str(home)}
        inventory = tmp_path / "inventory.json"
        inventory.write_text(json.dumps({"pct": {"hosts": hosts, "vars": variables}}))
        (tmp_path / "ansible.cfg").write_text("")
        done = subprocess.run(
            ["bash", "test.sh", "-e", "target_hosts=pct", "-e", "action_prefix=",
             "-e", f"local_tmp={tmp_path}/local", "-e", "remote_tmp=/tmp/remote"],
            cwd=suite, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            env={
                **ENVIRONMENT, "INVENTORY": str(inventory), "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
                "ANSIBLE_COLLECTIONS_PATH": str(REPO / "collections"),
            },
        )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "SUCCESS: Connection vars not found" in done.stdout
    recap = re.findall(r"^(\S+) +: ok=(\d+) .* unreachable=0 +failed=0", done.stdout, re.MULTILINE)
    assert {host for host, ok in recap if int(ok) >= 10} == set(hosts), done.stdout
