# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The deployment from Python, through ansible-runner: events while it runs, the verdict at its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import ansible_runner
import pytest

from tests.support.deployment import NODE, REPO, UNITS, playbook, require_no_node

pytestmark = pytest.mark.container


@pytest.fixture(scope="module", autouse=True)
def node_of_its_own():
    require_no_node()
    yield
    playbook("destroy", "-e", "launchproof_destroy=true")
    playbook("local_node", "-e", "local_node_state=absent")


def test_a_deployment_from_python_hands_over_events_and_the_verdict(tmp_path):
    proofs, plays = [], []

    def on_event(event):
        data = event.get("event_data", {})
        if event["event"] == "playbook_on_play_start":
            plays.append(data["play"])
        if event["event"] == "runner_on_ok" and str(data.get("task_action", "")).endswith("launch_proof"):
            proofs.extend(data["res"]["jobs"])
        return True  # keep the event in the artifacts

    run = ansible_runner.run(
        private_data_dir=str(tmp_path),
        project_dir=str(REPO),
        inventory=str(REPO / "inventory/local"),
        playbook="deploy.yml",
        envvars={"LAUNCHPROOF_REPORT": str(tmp_path / "report.json")},
        event_handler=on_event,
        quiet=True,
    )
    assert (run.status, run.rc) == ("successful", 0)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "ok"
    assert {row["unit"] for row in report["jobs"]} == {row["unit"] for row in proofs} == set(UNITS)
    assert plays[-1] == "Start the jobs and prove their launch"
    secret = (NODE / "s3/secret_key").read_bytes().strip()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes(), path


def test_the_readme_says_it_rightly():
    """Its lines as they stand there, on the deployment that the test before this one left."""
    (code,) = re.findall(r"```python\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["0 ok"], done.stdout + done.stderr
