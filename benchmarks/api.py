# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""API calls of a run that has nothing to change, from the embedded node's access log.

A container is declared and there; it is declared again, through role container and through community.proxmox.proxmox with
the same values (`update: true`, without which that module does not look at them). The first run does not count.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import node
from benchmarks.rows import Row, Unmeasured
from tests.support.deployment import NODE
from tests.support.pve import outputs

RUNS = 3


def measure() -> list[Row]:
    with node.container() as (client, wanted), tempfile.TemporaryDirectory() as name:
        ours, changed = count(lambda: client.ensure(wanted)["changed"])
        theirs, peer_changed = count(lambda: peer(Path(name), wanted))
    return [
        Row("API calls, nothing to change", ours, "calls", theirs, "community.proxmox.proxmox", at_most=3, hard=True),
        Row(
            "says changed, nothing to change",
            int(changed),
            "of 1",
            int(peer_changed),
            "community.proxmox.proxmox",
            at_most=0,
            hard=True,
        ),
    ]


def count(run: Callable[[], bool]) -> tuple[int, bool]:
    """(API calls, says changed) of a run after the first: the fewest calls, as somebody else may use the node too."""
    log, found = NODE / "log/access.log", []
    for _run in range(RUNS):
        before = log.stat().st_size
        changed = run()
        with open(log, "rb") as stream:
            stream.seek(before)
            found.append((len(stream.readlines()), changed))
    return min(found[1:])


def peer(folder: Path, wanted: dict) -> bool:
    """Run the peer's module once; whether it says that it changed something."""
    api = outputs()["api"]
    network = wanted["networks"][0]
    module = {
        "api_host": api["host"], "api_port": api["port"], "api_user": api["user"], "api_token_id": api["token_id"],
        "validate_certs": True, "node": api["node"], "vmid": wanted["vmid"], "state": "present", "update": True,
        "hostname": wanted["hostname"], "cores": wanted["cores"], "memory": wanted["memory"], "features": ["nesting=1"],
        "netif": {"net0": f"name={network['name']},bridge={network['bridge']},ip={network['ip']},gw={network['gw']}"},
    }  # fmt: skip
    result = folder / "result.json"
    tasks = [
        {"name": "Declare the container again", "community.proxmox.proxmox": module, "register": "result"},
        {
            "name": "Keep the answer",
            "ansible.builtin.copy": {"content": "{{ result | to_json }}", "dest": str(result), "mode": "0600"},
        },
    ]
    inventory = {"ansible_connection": "local", "ansible_python_interpreter": "{{ ansible_playbook_python }}"}
    environment = {
        "PROXMOX_TOKEN_SECRET": Path(api["token_secret_file"]).read_text().strip(),
        "REQUESTS_CA_BUNDLE": api["ca"],
        "NO_PROXY": api["host"],
        "no_proxy": api["host"],
    }
    done = node.play(node.PEERS, *node.playbook(folder, inventory, tasks), environment=environment)
    if done.returncode != 0:
        raise Unmeasured(f"community.proxmox.proxmox failed: {done.stdout[-2000:]}")
    return json.loads(result.read_text())["changed"]
