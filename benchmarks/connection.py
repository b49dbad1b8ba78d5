# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One more task in a container.

The same play of pings through three connections, with the same ansible-core, over ssh to the embedded node: the
connection pct, plain `ansible.builtin.ssh` to the node itself, and `community.proxmox.proxmox_pct_remote`. Measured is the
time between the ends of two tasks, the first of a play left out. The peer's path of pct, /usr/sbin/pct, is replaced by
that of the embedded node, whose pct starts in a tenth of the half second that the real one takes: on a Proxmox node the
peer is slower than here.
"""

from __future__ import annotations

import datetime
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks import node
from benchmarks.rows import Row, Unmeasured
from tests.support.container import REPO
from tests.support.pve import connection, outputs

TASKS = 12
# Plays of each way, in turn, so that a busy spell of the machine meets all alike.
REPEATS = {"pct": 4, "ssh": 4, "pct_remote": 2}


def measure() -> list[Row]:
    with node.container(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {
            "pct": {**connection(), "ansible_pct_vmid": node.VMID},
            "ssh": plain_ssh(),
            "pct_remote": pct_remote(folder),
        }
        times = {way: [] for way in ways}
        for repeat in range(max(REPEATS.values())):
            for way, variables in ways.items():
                if repeat < REPEATS[way]:
                    times[way] += one_more(folder, variables)
    pct, ssh, peer = (statistics.median(times[way]) * 1000 for way in ways)
    return [
        Row("one more task, connection pct", pct, "ms", ssh, "plain ssh to the node", at_most=1.15, bounds="ratio"),
        Row("one more task, connection pct", pct, "ms", peer, "proxmox_pct_remote"),
    ]


def plain_ssh() -> dict:
    """Variables of ansible.builtin.ssh to the node."""
    return {**connection(), "ansible_connection": "ansible.builtin.ssh"}


def pct_remote(folder: Path) -> dict:
    """Variables of the peer, which is copied with the embedded node's path of pct in it."""
    found = list(
        REPO.glob(
            ".venv-bench/lib/python3*/site-packages/ansible_collections/community/proxmox/plugins/connection/proxmox_pct_remote.py"
        )
    )
    text = found[0].read_text() if found else ""
    if text.count("'/usr/sbin/pct', 'exec'") != 1:
        raise Unmeasured("community.proxmox.proxmox_pct_remote is not what this benchmark knows")
    plugins = folder / "connection_plugins"
    plugins.mkdir()
    (plugins / "proxmox_pct_remote.py").write_text(
        text.replace("'/usr/sbin/pct', 'exec'", "'/usr/local/sbin/pct', 'exec'")
    )
    # It reads ~/.ssh/known_hosts alone.
    (folder / ".ssh").mkdir(mode=0o700)
    (folder / ".ssh/known_hosts").write_text(Path(outputs()["ssh"]["known_hosts"]).read_text())
    keep = (
        "ansible_host",
        "ansible_port",
        "ansible_user",
        "ansible_ssh_private_key_file",
        "ansible_python_interpreter",
    )
    return {
        **{key: value for key, value in connection().items() if key in keep},
        "ansible_connection": "proxmox_pct_remote",
        "proxmox_vmid": node.VMID,
    }


def one_more(folder: Path, variables: dict) -> list[float]:
    """Seconds from the end of one task to the end of the next, of one play."""
    tasks = [{"name": f"Ping {number}", "ansible.builtin.ping": {}} for number in range(TASKS)]
    environment = {
        "HOME": str(folder),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.jsonl",
        "ANSIBLE_CONNECTION_PLUGINS": str(folder / "connection_plugins"),
    }
    done = node.play(node.PEERS, *node.playbook(folder, variables, tasks), environment=environment)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ends = [
        datetime.datetime.fromisoformat(event["_timestamp"].rstrip("Z"))
        for event in events
        if event["_event"] == "v2_runner_on_ok"
    ]
    if done.returncode != 0 or len(ends) != TASKS:
        raise Unmeasured(f"{variables['ansible_connection']}: {done.stdout[-1500:]}{done.stderr[-500:]}")
    return [(after - before).total_seconds() for before, after in zip(ends, ends[1:])]
