# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tasks and files in a container, and in forty of them.

The same plays through three connections, with the same ansible-core, over ssh to the embedded node, whose sshd has its
default limits: the connection pct, plain `ansible.builtin.ssh` to the node itself, and
`community.proxmox.proxmox_pct_remote`. One more task is the time between the ends of two pings, the first of a play left
out. The file is copied by `ansible.builtin.copy`; the time is that of its task. The forty containers are pinged at once,
with forty forks; the time is that of the whole play.

The embedded node's `pct` starts in less than the half second that the real one takes on Proxmox VE 8.2 (512 ms, of which
89 ms are the way there), so the peer, which runs it for each command, gets one that waits for the rest of it. The real one
needs the processor in that time, which this one does not.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import node
from benchmarks.rows import Row, Unmeasured
from tests.support.container import REPO
from tests.support.many import containers
from tests.support.pve import connection, outputs

TASKS = 12
# Plays of each way, in turn, so that a busy spell of the machine meets all alike.
REPEATS = {"pct": 10, "ssh": 10, "pct_remote": 1}
MIB = 64
# Apart from the container of the other benchmarks: these are no Proxmox containers, and the node does not know them.
MANY = list(range(1000, 1040))
PCT_SECONDS = 0.42  # what pct exec takes on Proxmox VE 8.2 beyond an empty command over ssh


def measure() -> list[Row]:
    with node.container(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {
            "pct": {**connection(), "ansible_pct_vmid": node.VMID},
            "ssh": {**connection(), "ansible_connection": "ansible.builtin.ssh"},
            "pct_remote": pct_remote(folder, 'exec /usr/local/sbin/pct "$@"', _pct_seconds()),
        }
        times = {way: [] for way in ways}
        for repeat in range(max(REPEATS.values())):
            for way, variables in ways.items():
                if repeat < REPEATS[way]:
                    times[way] += one_more(folder, variables)
        pct, ssh, peer = (statistics.median(times[way]) * 1000 for way in ways)
        copied = {way: copy(folder, variables) for way, variables in ways.items()}
        rows = [
            Row("one more task, connection pct", pct, "ms", ssh, "plain ssh to the node", at_most=1.15, bounds="ratio"),
            Row("one more task, connection pct", pct, "ms", peer, "proxmox_pct_remote", at_most=1 / 12, bounds="ratio"),
            Row(f"copy of {MIB} MiB", copied["pct"], "s", copied["ssh"], "plain ssh to the node"),
            Row(f"copy of {MIB} MiB", copied["pct"], "s", copied["pct_remote"], "proxmox_pct_remote"),
        ]
        return rows + many(folder, ways)


def many(folder: Path, ways: dict[str, dict]) -> list[Row]:
    """Forty containers behind the one sshd, and plain ssh to the node as often."""
    with containers(MANY) as home:
        # The command line of pct, for containers that only LXC knows.
        attach = f'n=$2; shift 3; exec lxc-attach -P {home} -n "$n" --keep-env -- "$@"'
        pct_remote(folder, attach, PCT_SECONDS)
        took, lost = {}, {}
        for way, variables in ways.items():
            took[way], lost[way] = at_once({**variables, "ansible_pct_lxc_path": str(home)}, folder)
    count = len(MANY)
    rows = [Row(f"{count} containers at once", took["pct"], "s", took["pct_remote"], "proxmox_pct_remote", at_most=20)]
    rows += [
        Row(f"{count} at once, unreachable", lost["pct"], f"of {count}", lost[way], label, at_most=0, hard=True)
        for way, label in (("ssh", "plain ssh to the node"), ("pct_remote", "proxmox_pct_remote"))
    ]
    return rows


def at_once(variables: dict, folder: Path) -> tuple[float, int]:
    """(seconds, unreachable hosts) of a play of one ping in all containers at once, over new connections."""
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
        number = "ansible_pct_vmid" if "ansible_pct_vmid" in variables else "proxmox_vmid"
        hosts = {f"c{vmid}": {**variables, number: vmid} for vmid in MANY}
        (folder / "inventory.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        tasks = [{"name": "Ping", "ansible.builtin.ping": {}}]
        (folder / "play.json").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
        start = time.monotonic()
        done = node.play(
            node.PEERS, "-i", str(folder / "inventory.json"), "--forks", str(len(MANY)), str(folder / "play.json"),
            environment={**_environment(folder), "ANSIBLE_SSH_CONTROL_PATH_DIR": sockets},
        )  # fmt: skip
        seconds = time.monotonic() - start
    reached = {event["hosts"] and next(iter(event["hosts"])) for event in _events(done, "v2_runner_on_ok")}
    lost = len(MANY) - len(reached)
    if not reached or (lost == 0) != (done.returncode == 0):
        raise Unmeasured(
            f"{variables['ansible_connection']}, {len(MANY)} at once: {done.stdout[-1500:]}{done.stderr[-500:]}"
        )
    return seconds, lost


def _pct_seconds() -> float:
    """What is missing to the real pct's time in the embedded node's."""
    times = []
    for _run in range(5):
        start = time.monotonic()
        subprocess.run(["pct", "exec", str(node.VMID), "--", "true"], stdin=subprocess.DEVNULL, check=True)
        times.append(time.monotonic() - start)
    return max(0.0, PCT_SECONDS - statistics.median(times))


def pct_remote(folder: Path, command: str, wait: float) -> dict:
    """Variables of the peer, which is copied with a path of pct in it that waits and then runs ``command``."""
    found = list(
        REPO.glob(
            ".venv-bench/lib/python3*/site-packages/ansible_collections/community/proxmox/plugins/connection/proxmox_pct_remote.py"
        )
    )
    text = found[0].read_text() if found else ""
    if text.count("'/usr/sbin/pct', 'exec'") != 1:
        raise Unmeasured("community.proxmox.proxmox_pct_remote is not what this benchmark knows")
    pct = folder / "pct"
    pct.write_text(f"#!/bin/sh\nsleep {wait:.3f}\n{command}\n")
    pct.chmod(0o755)
    plugins = folder / "connection_plugins"
    plugins.mkdir(exist_ok=True)
    (plugins / "proxmox_pct_remote.py").write_text(text.replace("'/usr/sbin/pct', 'exec'", f"'{pct}', 'exec'"))
    # It reads ~/.ssh/known_hosts alone.
    (folder / ".ssh").mkdir(mode=0o700, exist_ok=True)
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
    ends = _ends(folder, variables, [{"name": f"Ping {number}", "ansible.builtin.ping": {}} for number in range(TASKS)])
    return [after - before for before, after in zip(ends, ends[1:])]


def copy(folder: Path, variables: dict) -> float:
    """Seconds of the task that copies a file whose content nothing can compress."""
    source = folder / "source"
    source.write_bytes(os.urandom(MIB << 20))
    target = "/var/tmp/launchproof-bench"
    tasks = [
        {"name": "Ping", "ansible.builtin.ping": {}},
        {"name": "Copy", "ansible.builtin.copy": {"src": str(source), "dest": target, "mode": "0600"}},
        {"name": "Remove it", "ansible.builtin.file": {"path": target, "state": "absent"}},
    ]
    before, after, _removed = _ends(folder, variables, tasks)
    return after - before


def _ends(folder: Path, variables: dict, tasks: list[dict]) -> list[float]:
    """When each task of a play ended, all of which must succeed."""
    done = node.play(node.PEERS, *node.playbook(folder, variables, tasks), environment=_environment(folder))
    events = _events(done, "v2_runner_on_ok")
    if done.returncode != 0 or len(events) != len(tasks):
        raise Unmeasured(f"{variables['ansible_connection']}: {done.stdout[-1500:]}{done.stderr[-500:]}")
    return [datetime.datetime.fromisoformat(event["_timestamp"].rstrip("Z")).timestamp() for event in events]


def _environment(folder: Path) -> dict[str, str]:
    return {
        "HOME": str(folder),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.jsonl",
        "ANSIBLE_CONNECTION_PLUGINS": str(folder / "connection_plugins"),
    }


def _events(done: subprocess.CompletedProcess[str], kind: str) -> list[dict]:
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [event for event in events if event["_event"] == kind]
