# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`./deploy` from nothing to proved jobs, in a machine of its own made of namespaces, so that a node that is up here does
not notice.

Debian packages are installed already; the node's template and its Python environment are built, the container is made,
torch is installed in it, the jobs are started and proved. Then the container is destroyed and deployed once more, with the
template and the caches there.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.rows import Row, Unmeasured
from tests.support.machine import Machine


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        machine = Machine(Path(name) / "machine")
        report = {"LAUNCHPROOF_REPORT": f"{name}/report.json", "ANSIBLE_SSH_CONTROL_PATH_DIR": f"{name}/cp"}
        machine.boot()
        try:
            fresh = run(machine, report, "./deploy")
            run(
                machine, report, ".venv/bin/ansible-playbook", "playbooks/destroy.yml", "-e", "launchproof_destroy=true"
            )
            again = run(machine, report, "./deploy")
        finally:
            machine.discard()
    return [
        Row("./deploy from nothing, packages there", fresh, "s", at_most=180),
        Row("./deploy of a new container, template and caches there", again, "s", at_most=60),
    ]


def run(machine: Machine, environment: dict[str, str], *command: str) -> float:
    """Seconds of a command in the machine, which must succeed."""
    start = time.monotonic()
    done = machine.run(*command, check=False, environment=environment)
    if done.returncode != 0:
        raise Unmeasured(
            f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-1000:]}"
        )
    return time.monotonic() - start
