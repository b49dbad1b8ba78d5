# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""deploy.yml of a stub job whose controller is killed at a random moment: the next run makes everything good.

The moments are drawn over the time that an undisturbed run takes, from a seed that is printed;
LAUNCHPROOF_KILL_SEED=N draws the same again. A round begins with no container, or with what the round before has left
and a job that is declared otherwise.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import subprocess
import time

import pytest

from tests.support.deployment import NODE
from tests.support.kill import kill_with_children
from tests.support.stub import UNIT, Deployment

pytestmark = [pytest.mark.container, pytest.mark.usefixtures("local_node")]

VMID = 961
SEED = int(os.environ.get("LAUNCHPROOF_KILL_SEED") or secrets.randbelow(1_000_000))


@pytest.fixture
def deployment(tmp_path):
    stub = Deployment(tmp_path, [VMID])
    stub.destroy()
    yield stub
    stub.destroy()


def inside(*command):
    done = subprocess.run(
        ["pct", "exec", str(VMID), "--", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def assert_converged(stub, done, pause):
    """The container, the job and its proof are what is declared, and nothing is left of the killed run."""
    assert done.returncode == 0, done.stdout
    (row,) = json.loads(stub.report.read_text())["jobs"]
    assert (row["unit"], row["code"]) == (UNIT, "ok_progressing"), row
    config = (NODE / f"pve/lxc/{VMID}.conf").read_text()
    assert f"hostname: t{VMID}" in config
    assert "lock:" not in config
    shown = dict(
        line.split("=", 1)
        for line in inside("systemctl", "show", UNIT, "--property=ActiveState,MainPID,InvocationID").splitlines()
    )
    assert shown["ActiveState"] == "active"
    assert inside("pgrep", "-f", "stub.py").split() == [shown["MainPID"]]
    assert f"PAUSE={pause}" in inside("cat", f"/proc/{shown['MainPID']}/environ").split("\0")
    # Code arrives under a temporary name, files are replaced in a rename: of neither is anything left half done.
    assert (
        inside(
            "sh",
            "-c",
            "ls -A /opt/stub /opt/stub/.src.versions /etc/systemd/system | grep -E '^.(launchproof|new)-' || true",
        )
        == ""
    )
    return shown["InvocationID"]


def everything(process):
    kill_with_children(process.pid)


def process_group(process):
    """Ansible's workers have sessions of their own: what they are at goes on while the next run begins."""
    os.killpg(process.pid, signal.SIGKILL)


def kill_after(stub, seconds, kill):
    """Begin a run and kill its controller; the exit code and the last task that it had begun."""
    process = stub.begin()
    try:
        output, _none = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as cut:
        kill(process)
        process.wait()
        process.stdout.close()  # what a surviving worker still prints is not waited for
        output = (cut.output or b"").decode()
    tasks = re.findall(r"^TASK \[(.*?)\]", output, re.MULTILINE)
    return process.returncode, tasks[-1] if tasks else "(no task yet)"


def seconds(stub, pause):
    """How long a run takes that nothing disturbs, and which converges."""
    begun = time.monotonic()
    stub.declare(pause)
    assert_converged(stub, stub.run(), pause)
    return time.monotonic() - begun


@pytest.mark.parametrize("moments", [pytest.param(3), pytest.param(50, marks=pytest.mark.long)])
def test_a_run_that_is_killed_at_any_moment_is_made_good_by_the_next(deployment, moments, capsys):
    draw = random.Random(SEED)
    durations = {"from nothing": seconds(deployment, "0.1"), "job changed": seconds(deployment, "0.2")}
    for number in range(1, moments + 1):
        start, kill = draw.choice(list(durations)), draw.choice([everything, process_group])
        moment, pause = draw.uniform(0, durations[start]), f"0.{2 - number % 2}"
        if start == "from nothing":
            deployment.destroy()
        deployment.declare(pause)
        code, task = kill_after(deployment, moment, kill)
        with capsys.disabled():
            print(f"\nseed {SEED}, {number} of {moments}: {start}, {kill.__name__} killed after {moment:.2f} of "
                  f"{durations[start]:.1f} s, {code}, in: {task}", end="", flush=True)  # fmt: skip
        invocation = assert_converged(deployment, deployment.run(), pause)
    again = deployment.run()
    assert re.findall(r"changed=(\d+)", again.stdout) == ["0"], again.stdout
    assert assert_converged(deployment, again, pause) == invocation
