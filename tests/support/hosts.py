# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several hosts over plain ssh that one declaration is spread over: containers with the reference programs and their packages."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.container import Container
from tests.support.prepared import Prepared
from tests.support.ssh import playbook, serve_ssh


class Hosts:
    """The containers by their inventory names, the inventory, and the playbook that is run against it."""

    def __init__(self, folder: Path, containers: dict[str, Container]):
        self.folder, self.containers = folder, containers
        self.ssh = {}
        for name, container in containers.items():
            (folder / name).mkdir()
            self.ssh[name] = serve_ssh(container, folder / name)
        self.report_path = folder / "launch_report.json"

    def declare(self, **variables: Any) -> None:
        """Write the inventory: the same variables for all."""
        hosts = {name: ssh.hostvars() for name, ssh in self.ssh.items()}
        inventory = {"launchproof": {"hosts": hosts, "vars": variables}}
        (self.folder / "inventory.json").write_text(json.dumps(inventory))

    def start(self, *more: str) -> subprocess.Popen[str]:
        """Begin to deliver, start and prove."""
        self.report_path.unlink(missing_ok=True)
        argv = ["-i", str(self.folder / "inventory.json"), "tests/integration/launch.yml", *more]
        return playbook(argv, self.report_path)

    def deploy(self, *more: str) -> tuple[int, str]:
        """The same to its end; returns (exit code, all it printed)."""
        run = self.start(*more)
        output = run.communicate(timeout=300)[0]
        return run.returncode, output

    def report(self) -> dict[str, Any]:
        return json.loads(self.report_path.read_text())

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The report's rows by host and unit."""
        return {(row["host"], row["unit"]): row for row in self.report()["jobs"]}

    def codes(self) -> dict[tuple[str, str], str]:
        return {key: row["code"] for key, row in self.rows().items()}


@contextlib.contextmanager
def hosts(folder: Path, prefix: str, names: tuple[str, ...] = ("c1", "c2", "c3")) -> Iterator[Hosts]:
    """Containers PREFIX-NAME, up and reachable; gone afterwards."""
    with contextlib.ExitStack() as stack:
        containers = {name: stack.enter_context(Prepared(f"{prefix}-{name}")) for name in names}
        yield Hosts(folder, containers)
