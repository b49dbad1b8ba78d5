# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the project as a user does, on the embedded node, and reads what a user could read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
NODE = Path("/var/lib/launchproof-node")
VMID = "901"
UNITS = ("extraction@1.service", "extraction@2.service", "training.service", "monitor.service")
ENVIRONMENT = {**os.environ, "ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1"}


def play(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command in the checkout; stdout and stderr together, as a user sees them."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=REPO,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **more,
    )


def require_no_node() -> None:
    """The tests that call this take the node down at their end: somebody's own deployment must not be in their way.

    On a CI machine there is nobody: a node that is there was left by a run that was killed, and goes.
    """
    if not (NODE / "outputs.json").exists():
        return
    if not os.environ.get("CI"):
        raise AssertionError(
            f"{NODE} holds a node already, and this test takes it down at its end. If nothing on it is needed: "
            "ansible-playbook playbooks/local_node.yml -e local_node_state=absent"
        )
    down = playbook("local_node", "-e", "local_node_state=absent", "-e", "local_node_force=true")
    assert down.returncode == 0, down.stdout


def deploy(*arguments: str) -> subprocess.CompletedProcess[str]:
    return play("./deploy", *arguments)


def playbook(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return play("ansible-playbook", f"playbooks/{name}.yml", *arguments)


def container(**changes: Any) -> dict[str, Any]:
    """The declared container as extra variables, with some fields declared otherwise."""
    shown = play("ansible-inventory", "--host", "trainer").stdout
    declared = json.loads(shown[shown.index("{") :])["launchproof_container"]
    return {"launchproof_container": {**declared, **changes}}


def report() -> dict[str, Any]:
    return json.loads((REPO / "artifacts/launch_report.json").read_text())


def rows() -> dict[str, dict[str, Any]]:
    """The report's rows by unit."""
    return {row["unit"]: row for row in report()["jobs"]}


def changed(output: str) -> int:
    """The sum of changed= over all hosts of a run's recap."""
    counts = re.findall(r"\bchanged=(\d+)", output)
    assert counts, output
    return sum(map(int, counts))


def inside(*command: str, vmid: str = VMID) -> str:
    """A command's output in the container, through the node's own pct."""
    done = subprocess.run(
        ["pct", "exec", vmid, "--", *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.returncode} {done.stderr}"
    return done.stdout


def identities() -> dict[str, tuple[str, str]]:
    """Unit → (InvocationID, MainPID), as systemd in the container says."""
    found = {}
    for unit in UNITS:
        shown = inside("systemctl", "show", unit, "--property=InvocationID,MainPID")
        values = dict(line.split("=", 1) for line in shown.split())
        found[unit] = (values["InvocationID"], values["MainPID"])
    return found


def writes() -> list[str]:
    """Every API request so far that could have changed something."""
    log = NODE / "log/access.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if re.search(r" (POST|PUT|DELETE) ", line) and "/access/ticket" not in line]


def machine() -> dict[str, str]:
    """What the embedded node would leave on this machine: containers, links, firewall rules, listening sockets."""

    def output(*command: str) -> str:
        # A tool that is not installed yet has nothing to show.
        return (
            subprocess.run(command, capture_output=True, text=True, check=False).stdout
            if shutil.which(command[0])
            else ""
        )

    return {
        "containers": output("lxc-ls", "-1"),
        "links": "\n".join(sorted(re.findall(r"^\d+: ([^:@]+)", output("ip", "-o", "link"), re.MULTILINE))),
        "rules": output("nft", "list", "ruleset"),
        "sockets": "\n".join(sorted(line.split()[3] for line in output("ss", "-Hltn").splitlines())),
        "forwarding": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
    }
