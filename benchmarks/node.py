# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The embedded node and a small container of the benchmark's own on it; both are left as they were found."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.rows import Unmeasured
from tests.support.container import REPO
from tests.support.deployment import NODE
from tests.support.pve import Client, declared

VMID = 897
OURS, PEERS = REPO / ".venv/bin", REPO / ".venv-bench/bin"


def play(program: Path, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ansible-playbook of one of the environments, its output as text."""
    more = {"ANSIBLE_CONFIG": str(REPO / "benchmarks/ansible.cfg"), **(environment or {})}
    return subprocess.run(
        [str(program / "ansible-playbook"), *arguments],
        cwd=REPO, env={**os.environ, **more}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def _local_node(*arguments: str) -> None:
    done = play(OURS, "-i", "inventory/local", "playbooks/local_node.yml", *arguments)
    if done.returncode != 0:
        raise Unmeasured(
            f"playbooks/local_node.yml {' '.join(arguments)} failed: {done.stdout[-2000:]}{done.stderr[-1000:]}"
        )


@contextlib.contextmanager
def node() -> Iterator[None]:
    """The embedded node is up; taken down again when it was not up before."""
    was_up = (NODE / "outputs.json").exists()
    _local_node()
    try:
        yield
    finally:
        if not was_up:
            _local_node("-e", "local_node_state=absent")


@contextlib.contextmanager
def container() -> Iterator[tuple[Client, dict[str, Any]]]:
    """A running container of our own on the node: its client and its declaration."""
    with node(), tempfile.TemporaryDirectory() as folder:
        client, wanted = Client(Path(folder)), declared(VMID, hostname="bench")
        client.ensure(wanted)
        try:
            yield client, wanted
        finally:
            client.role(wanted, tasks_from="absent")


def playbook(folder: Path, inventory: dict, tasks: list[dict]) -> list[str]:
    """Write a play for host ``target``; the arguments that run it."""
    (folder / "inventory.json").write_text(json.dumps({"all": {"hosts": {"target": inventory}}}))
    (folder / "play.json").write_text(json.dumps([{"hosts": "target", "gather_facts": False, "tasks": tasks}]))
    return ["-i", str(folder / "inventory.json"), str(folder / "play.json")]
