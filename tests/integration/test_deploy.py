# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From a machine without a node to a proven deployment, again, broken, interrupted and taken down.

The tests tell one story, in order, on one embedded node: each starts where the one before it ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

import pytest

from tests.support.deployment import (
    NODE,
    REPO,
    UNITS,
    VMID,
    changed,
    deploy,
    identities,
    inside,
    machine,
    playbook,
    report,
    rows,
    writes,
)

pytestmark = pytest.mark.container

GOOD = {"ok_started", "ok_progressing", "completed"}


@pytest.fixture(scope="module", autouse=True)
def untouched():
    """The machine before the story. It begins without a node, so that somebody's own deployment is never in its way."""
    if (NODE / "outputs.json").exists():
        pytest.fail(
            f"{NODE} holds a node already. This stage takes it down at its end, so it starts only without one: "
            "ansible-playbook playbooks/local_node.yml -e local_node_state=absent"
        )
    yield machine()
    playbook("destroy", "-e", "launchproof_destroy=true")
    playbook("local_node", "-e", "local_node_state=absent")


def test_check_mode_on_a_fresh_machine_predicts_and_creates_nothing(untouched):
    done = deploy("--check")
    assert done.returncode == 0, done.stdout
    assert report()["verdict"] == "predicted"
    assert {row["unit"] for row in report()["jobs"]} == set(UNITS)
    assert "predict" in done.stdout.lower()
    assert machine() == untouched
    assert not NODE.exists()


def test_the_first_deployment_is_proved():
    done = deploy()
    assert done.returncode == 0, done.stdout
    assert report()["verdict"] == "ok"
    places = ["/etc/systemd", "/etc/launchproof", "/var/lib/launchproof", "/var/lib/dflash", "/var/log"]
    # grep's 1 is "nowhere"; the pattern comes by stdin, so that the search itself shows the secret to nobody.
    search = ["pct", "exec", VMID, "--", "grep", "-rlF", "--exclude-dir=secrets", "-f", "-", *places]
    found = subprocess.run(search, input=secret + "\n", capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, ""), found
    assert secret not in inside("systemctl", "show", *UNITS)
    assert inside("stat", "-c", "%a %U", "/etc/launchproof/secrets/extraction@1.service.env").split() == ["600", "root"]


@pytest.mark.parametrize(
    ("wrong", "code", "stage"),
    [
        ({"ansible_port": 1}, "unreachable", "container"),
        ({"pve_api_port": 1}, "preflight_failed", "preflight"),
    ],
    ids=["node-without-sshd", "node-without-api"],
)
def test_an_unreachable_node_still_gives_one_row_a_job(wrong, code, stage):
    before = writes()
    done = deploy("--skip-tags", "local_node", "-e", json.dumps(wrong))
    assert done.returncode != 0
    assert report()["verdict"] == "failed"
    assert {row["unit"] for row in report()["jobs"]} == set(UNITS)
    assert {row["code"] for row in report()["jobs"]} == {code}
    assert writes() == before


def test_stop_ends_the_jobs_and_keeps_their_logs():
    done = playbook("stop")
    assert done.returncode == 0, done.stdout
    for unit in UNITS:
        assert inside("systemctl", "show", "-P", "MainPID", unit).strip() == "0"
    assert "ev=exit code=0" in run_log("training.service")


def test_destroy_refuses_without_an_explicit_word():
    before = writes()
    done = playbook("destroy")
    assert done.returncode != 0
    assert "launchproof_destroy" in done.stdout
    assert writes() == before


def test_down_leaves_nothing(untouched):
    assert playbook("destroy", "-e", "launchproof_destroy=true").returncode == 0
    done = playbook("local_node", "-e", "local_node_state=absent")
    assert done.returncode == 0, done.stdout
    assert machine() == untouched


def run_log(unit: str) -> str:
    return inside("cat", f"/var/lib/launchproof/runs/{unit}/current/log")


def wait_for_end(unit: str) -> None:
    """Blocks until the unit's process has ended: tail follows the log and leaves with it."""
    pid = inside("systemctl", "show", "-P", "MainPID", unit).strip()
    if pid != "0":
        inside("timeout", "300", "tail", "--pid", pid, "-f", "/dev/null")
