# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""deploy.yml with a stub for a job: containers on the embedded node, a small locked environment, a program that counts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import pve
from tests.support.deployment import ENVIRONMENT, NODE, REPO

UNIT = "stub.service"
PROGRAM = """\
import itertools
import os
import time

for step in itertools.count(1):
    print(f"step {step}", flush=True)
    time.sleep(float(os.environ["PAUSE"]))
"""


class Deployment:
    """A deployment of containers with these numbers; its files and its report are in ``folder``."""

    def __init__(self, folder: Path, numbers: list[int], **options: Any):
        """``options`` are fields of the containers' declaration."""
        self.folder, self.numbers, self.options = folder, numbers, options
        (folder / "code").mkdir()
        (folder / "code/stub.py").write_text(PROGRAM)
        self.inventory, self.report = folder / "inventory.json", folder / "report.json"
        self.declare()

    def declare(self, pause: str = "0.2") -> None:
        """Write the inventory; another ``pause`` makes it another job, which is restarted."""
        said, lock = pve.outputs(), (REPO / "workload/requirements.lock").read_text()
        (self.folder / "lock.txt").write_text(re.search(r"^nvidia-ml-py==.*\n(?: +--hash.*\n)+", lock, re.M).group())
        mounts = said["wheel_mounts"]
        job = {
            "name": "stub",
            "command": ["/usr/bin/python3", "stub.py"],
            "code": {"src": str(self.folder / "code"), "dest": "/opt/stub/src"},
            "env": {"PAUSE": pause},
            "proof": {"progress": {"pattern": r"step (?P<step>\d+)", "within": 20}},
        }
        variables = {
            **pve.variables(),
            "ansible_pct_vmid": "{{ launchproof_container.vmid }}",
            "python_env_requirements": str(self.folder / "lock.txt"),
            "python_env_extra_requirements": [],
            "python_env_imports": ["pynvml"],
            "python_env_find_links": said["find_links"],
            "python_env_environment": said["pip_environment"],
            "python_env_secret_environment": said["secret_environment"],
            "launchproof_jobs": [job],
        }
        hosts = {
            f"stub{number}": {"launchproof_container": pve.declared(number, mounts=mounts, **self.options)}
            for number in self.numbers
        }
        inventory = {"all": {"children": {"launchproof": {"hosts": hosts, "vars": variables}}}}
        self.inventory.write_text(json.dumps(inventory))

    def begin(self, *arguments: str, **environment: str) -> subprocess.Popen:
        """Start deploy.yml, in a session of its own so that all of it can be killed."""
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        return subprocess.Popen(
            [program, "-i", str(self.inventory), "--forks", str(len(self.numbers)), "deploy.yml", *arguments],
            cwd=REPO, env={**ENVIRONMENT, "LAUNCHPROOF_REPORT": str(self.report), **environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Run deploy.yml to its end."""
        process = self.begin(*arguments, **environment)
        output, _none = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def destroy(self) -> None:
        """Remove the containers, whatever state they are in: by the node's own tools, not by what is tested."""
        for number in self.numbers:
            if (NODE / f"pve/lxc/{number}.conf").exists():
                subprocess.run(["pct", "stop", str(number)], stdin=subprocess.DEVNULL, capture_output=True, check=False)
                subprocess.run(["pct", "destroy", str(number)], stdin=subprocess.DEVNULL, check=True, timeout=120)
