# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How tests speak to the embedded node as a client: its inventory variables, its access log, its files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support.deployment import ENVIRONMENT, NODE, REPO


def outputs() -> dict:
    return json.loads((NODE / "outputs.json").read_text())


def variables() -> dict:
    """What an inventory says of the node: API by token, root-only keys and the connection over ssh."""
    said = outputs()
    api, ssh = said["api"], said["ssh"]
    return {
        "pve_api_host": api["host"],
        "pve_api_port": api["port"],
        "pve_api_user": api["user"],
        "pve_api_token_id": api["token_id"],
        "pve_api_token_secret": "{{ lookup('ansible.builtin.file', '" + api["token_secret_file"] + "') }}",
        "pve_api_ca_path": api["ca"],
        "pve_node": api["node"],
        "pve_root_via": "ssh",
        "pve_root_ssh": {
            "host": ssh["host"],
            "port": ssh["port"],
            "key_file": ssh["key"],
            "known_hosts_file": ssh["known_hosts"],
        },
        **connection(),
    }


def connection() -> dict:
    """The variables of connection pct, but for the container's number."""
    ssh = outputs()["ssh"]
    return {
        "ansible_connection": "dflash.launchproof.pct",
        "ansible_host": ssh["host"],
        "ansible_port": ssh["port"],
        "ansible_user": ssh["user"],
        "ansible_ssh_private_key_file": ssh["key"],
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={ssh['known_hosts']}",
        "ansible_python_interpreter": "/usr/bin/python3",
    }


def declared(vmid: int, **options) -> dict:
    """A small container of these tests."""
    api = outputs()["api"]
    prefix = api["gateway"].rpartition(".")[0]
    return {
        "vmid": vmid,
        "hostname": f"t{vmid}",
        "template": api["template"],
        "storage": api["storage"],
        "disk_gib": 2,
        "cores": 1,
        "memory": 256,
        "features": {"nesting": True},
        "networks": [
            {"name": "eth0", "bridge": api["bridge"], "ip": f"{prefix}.{vmid % 100 + 100}/24", "gw": api["gateway"]}
        ],
        **options,
    }


class Client:
    """One container's declaration, run through role container as a playbook would."""

    def __init__(self, folder: Path):
        self.folder = folder

    def begin(self, container: dict, *arguments: str, tasks_from: str = "main", **extra) -> subprocess.Popen:
        """Start the role; ``extra`` are inventory variables."""
        inventory = {"all": {"hosts": {"target": {**variables(), "launchproof_container": container, **extra}}}}
        inventory["all"]["hosts"]["target"]["ansible_pct_vmid"] = container["vmid"]
        play = [
            {
                "hosts": "target",
                "gather_facts": False,
                "tasks": [
                    {
                        "name": "Run the role",
                        "ansible.builtin.include_role": {
                            "name": "dflash.launchproof.container",
                            "tasks_from": tasks_from,
                        },
                    },
                    {
                        "name": "Keep its result",
                        "ansible.builtin.copy": {
                            "content": "{{ container_result | default({}) | to_json }}",
                            "dest": str(self.folder / "result.json"),
                            "mode": "0600",
                        },
                        "delegate_to": "localhost",
                        "check_mode": False,
                        "changed_when": False,
                    },
                ],
            }
        ]
        (self.folder / "inventory.yml").write_text(yaml.safe_dump(inventory))
        (self.folder / "play.yml").write_text(yaml.safe_dump(play))
        (self.folder / "result.json").unlink(missing_ok=True)
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        # A session of its own, so that a test can kill the run with all its workers.
        return subprocess.Popen(
            [program, "-i", str(self.folder / "inventory.yml"), str(self.folder / "play.yml"), *arguments],
            cwd=REPO, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip

    def role(self, container: dict, *arguments: str, **more) -> subprocess.CompletedProcess:
        """Run the role to its end."""
        process = self.begin(container, *arguments, **more)
        output, _none = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def ensure(self, container: dict, *arguments: str, **extra) -> dict:
        """Run the role, which must succeed; returns the module's result."""
        done = self.role(container, *arguments, **extra)
        assert done.returncode == 0, done.stdout
        return json.loads((self.folder / "result.json").read_text())


class AccessLog:
    """What the API's log says from now on of one container, as ``METHOD /path status``; the node may serve others too."""

    def __init__(self, vmid: int):
        self._path, self._mine = NODE / "log/access.log", re.compile(rf"/lxc/{vmid}(/| |$)|^POST \S+/lxc ")
        self._offset = self._path.stat().st_size

    def lines(self) -> list[str]:
        text = self._path.read_bytes()[self._offset :].decode()
        return [line for line in (line.split(" ", 1)[1] for line in text.splitlines()) if self._mine.search(line)]

    def changes(self) -> list[str]:
        return [line for line in self.lines() if not line.startswith("GET ")]


def configuration(vmid: int) -> bytes:
    """The container's configuration file, to the byte."""
    return (NODE / f"pve/lxc/{vmid}.conf").read_bytes()
