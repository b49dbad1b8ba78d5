# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A plain ssh host with systemd and an odd port takes the same roles; what a launch survives; where a secret is not."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.container import REPO, Container
from tests.support.ssh import playbook, serve_ssh

pytestmark = pytest.mark.container
UNIT = "small.service"
SECRET = "s3cr3t-" + secrets.token_hex(12)
RUNS = f"/var/lib/launchproof/runs/{UNIT}"


class Site:
    """The host, its inventory, and the playbook that is run against it again and again."""

    def __init__(self, container: Container, folder: Path):
        self.container = container
        self.folder = folder
        self.report_path = folder / "report" / "launch_report.json"
        self.host = serve_ssh(container, folder)
        self.seen = folder / "everything-printed.log"  # output of all runs, for the search for the secret

    def declare(self, level: str = "1", command: list[str] | None = None, stable_for: float = 1) -> None:
        """Write the inventory: one small job, with these settings."""
        job = {
            "name": "small",
            "description": "A small job",
            "command": command or ["/usr/bin/python3", "/opt/small/small.py"],
            "code": {"src": str(REPO / "tests/integration/files/small"), "dest": "/opt/small"},
            "env": {"LEVEL": level},
            "secrets": {"SEEDED_SECRET": SECRET},
            "proof": {
                "process": {"stable_for": stable_for},
                "log": {"required": ["secret=set"]},
                "progress": {"pattern": r"ev=step step=(?P<step>\d+)", "within": 10},
            },
        }
        variables = {**self.host.hostvars(), "launchproof_jobs": [job]}
        (self.folder / "inventory.json").write_text(json.dumps({"launchproof": {"hosts": {"rented": variables}}}))

    def start(self, *more: str) -> subprocess.Popen[str]:
        self.report_path.unlink(missing_ok=True)
        argv = ["-i", str(self.folder / "inventory.json"), "tests/integration/launch.yml", *more]
        return playbook(argv, self.report_path)

    def finish(self, run: subprocess.Popen[str], read: str = "") -> tuple[int, str]:
        """Wait for a run; returns (exit code, all it printed, with ``read`` in front)."""
        output = read + run.communicate(timeout=120)[0]
        with open(self.seen, "a") as seen:
            seen.write(output)
        return run.returncode, output

    def deploy(self, *more: str) -> tuple[int, str]:
        return self.finish(self.start(*more))

    def row(self) -> dict:
        """The one row of the last report."""
        (row,) = json.loads(self.report_path.read_text())["jobs"]
        return row

    def prop(self, key: str) -> str:
        return self.container.run("systemctl", "show", "-P", key, UNIT).stdout.strip()

    def identity(self) -> tuple[str, str]:
        return self.prop("InvocationID"), self.prop("MainPID")

    def until(self, run: subprocess.Popen[str], text: str) -> str:
        """Read a run's output up to the line that has ``text``; returns what was read."""
        read = ""
        for line in run.stdout:
            read += line
            if text in line:
                return read
        raise AssertionError(f"the run ended before it printed {text!r}:\n{read}")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with Container("lpt-ssh") as container:
        site = Site(container, tmp_path_factory.mktemp("site"))
        site.declare()
        yield site


def changed(output: str) -> int:
    """The number of changed tasks in the play recap."""
    return int(re.search(r"rented\s*: .*changed=(\d+)", output).group(1))


def test_check_mode_on_a_fresh_host_predicts_and_makes_nothing(site):
    before = site.container.run("find", "/etc", "/usr", "/opt", "/var/lib", "-xdev").stdout
    rc, output = site.deploy("--check", "--diff")
    assert rc == 0, output
    assert json.loads(site.report_path.read_text())["verdict"] == "predicted"
    assert site.row()["code"] == "would_start"
    assert site.container.run("find", "/etc", "/usr", "/opt", "/var/lib", "-xdev").stdout == before


def test_the_same_roles_prove_a_job_over_plain_ssh(site):
    rc, output = site.deploy("-vvv", "--diff")
    assert rc == 0, output
    row = site.row()
    assert (row["unit"], row["code"], row["ok"]) == (UNIT, "ok_progressing", True)
    assert row["run_id"] == site.prop("InvocationID")
    assert site.prop("ActiveState") == "active"


def test_the_second_run_changes_nothing(site):
    before = site.identity()
    rc, output = site.deploy("--diff")
    assert rc == 0, output
    assert changed(output) == 0, output
    assert site.identity() == before
    assert site.row()["run_id"] == before[0]


def test_a_run_killed_between_the_unit_and_the_start_is_made_good_by_the_next(site):
    """Not a handler but the digest decides: the new settings run, though nobody was left to notify."""
    before = site.identity()
    site.declare(level="2")
    run = site.start()
    read = site.until(run, "PLAY [Start the jobs and prove their launch]")
    os.killpg(run.pid, signal.SIGKILL)
    site.finish(run, read)
    assert "LEVEL=2" in site.container.read(f"/etc/launchproof/env/{UNIT}.env").replace('"', "")
    assert site.identity() == before, "the kill came after the start: this run shows nothing"

    rc, output = site.deploy()
    assert rc == 0, output
    assert site.identity()[0] != before[0]
    assert "level=2" in site.container.shell(f"cat {RUNS}/current/log").stdout
    assert site.row()["code"] == "ok_progressing"


def test_a_killed_ssh_master_stops_neither_the_job_nor_the_proof(site):
    site.declare(level="3", stable_for=6)
    before = site.identity()
    run = site.start()
    site.until(run, "PLAY [Start the jobs and prove their launch]")
    deadline = time.monotonic() + 30
    while site.identity()[0] in (before[0], ""):
        assert time.monotonic() < deadline and run.poll() is None, "the new run never began"
        time.sleep(0.05)
    invocation, pid = site.identity()
    verdict = site.container.path(f"{RUNS}/{invocation}/verdict.json")
    assert not verdict.exists()
    masters = site.host.masters()
    assert masters, "no ssh master of this test was found"
    os.killpg(run.pid, signal.SIGKILL)
    for master in masters:
        os.kill(master, signal.SIGKILL)
    site.finish(run)

    while not verdict.exists():
        assert time.monotonic() < deadline, "the prover wrote no verdict"
        time.sleep(0.05)
    assert json.loads(verdict.read_text())["code"] == "ok_progressing"
    assert site.identity() == (invocation, pid)

    rc, output = site.deploy()
    assert rc == 0, output
    assert changed(output) == 0, output
    assert site.row()["run_id"] == invocation
    assert site.identity() == (invocation, pid)


def test_only_the_ssh_master_dies_and_the_play_still_comes_to_the_verdict(site):
    site.declare(level="4", stable_for=6)
    before = site.identity()
    run = site.start()
    read = site.until(run, "PLAY [Start the jobs and prove their launch]")
    deadline = time.monotonic() + 30
    while site.identity()[0] in (before[0], ""):
        assert time.monotonic() < deadline and run.poll() is None, "the new run never began"
        time.sleep(0.05)
    masters = site.host.masters()
    assert masters, "no ssh master of this test was found"
    for master in masters:
        os.kill(master, signal.SIGKILL)
    rc, output = site.finish(run, read)
    assert rc == 0, output
    assert site.row()["code"] == "ok_progressing"
    assert site.row()["run_id"] == site.prop("InvocationID")


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        (["/bin/false"], {"died_before_log", "crash_loop"}),
        (["/bin/sh", "-c", "echo usage: small; exit 64"], {"exited_nonzero"}),
    ],
    ids=["false", "usage"],
)
def test_a_job_that_fails_fails_the_play_with_its_name(site, command, codes):
    site.declare(command=command)
    rc, output = site.deploy()
    assert rc != 0, output
    row = site.row()
    assert row["code"] in codes, row
    assert row["seconds"] <= 10
    assert row["remedy"] and row["evidence"]
    assert row["code"] in output and row["remedy"] in " ".join(output.split())


def test_the_seeded_secret_is_nowhere_but_in_its_file(site):
    """Looked for in everything printed (-vvv --diff included), the reports, and all that the host holds or tells."""
    site.declare()
    assert site.deploy("-vvv", "--diff")[0] == 0
    assert SECRET not in site.seen.read_text()
    for path in site.report_path.parent.rglob("*"):
        assert SECRET not in path.read_text(errors="replace"), path
    found = site.container.run(
        "grep", "-rlaF", "--exclude-dir=proc", "--exclude-dir=sys", "-e", SECRET, "/", check=False
    ).stdout.split()  # fmt: skip
    assert found == [f"/etc/launchproof/secrets/{UNIT}.env"]
    assert site.container.path(found[0]).stat().st_mode & 0o777 == 0o600
    told = site.container.shell(
        f"for verb in show cat status; do systemctl $verb {UNIT}; done; ps axww -o args; journalctl --no-pager -a"
    )
    assert SECRET not in told.stdout + told.stderr
    assert f"SEEDED_SECRET={SECRET}" in site.container.read(f"/proc/{site.prop('MainPID')}/environ")
