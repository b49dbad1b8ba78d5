# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A fleet that is worked on in batches: what one bad host leaves of the others, as serial and max_fail_percentage say.

The tests follow one another: a host that the one before did not come to has no job yet.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.container import REPO
from tests.support.hosts import hosts

pytestmark = pytest.mark.container
UNIT = "stub.service"
PROGRAM = """
import itertools, os, sys, time
if os.path.exists("/var/tmp/bad"):
    sys.exit("no data")
for step in itertools.count(1):
    print(f"step {step}", flush=True)
    time.sleep(0.2)
"""
BATCHES = ("-e", "launchproof_serial=2")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("batches"), "lpt-batch") as found:
        for container in found.containers.values():
            container.write("/opt/stub.py", PROGRAM)
        found.containers["c1"].write("/var/tmp/bad", "")
        job = {"name": "stub", "command": ["/usr/bin/python3", "/opt/stub.py"], "restart": "no"}
        # With a filter, as an inventory changes a job's data: the whole of it is made where it is used.
        found.declare(
            launchproof_jobs=[
                "{{ stub_job | combine({'proof': {'progress': {'pattern': 'step (?P<step>[0-9]+)'}}}, recursive=true) }}"
            ],
            stub_job=job,
        )
        yield found


def codes(site, *more):
    """Deploy, and return (the exit code, each host's code, all that was printed)."""
    rc, output = site.deploy(*more)
    return rc, {host: code for (host, _), code in site.codes().items()}, output


def delivered(site):
    return {
        name for name, container in site.containers.items() if container.path(f"/etc/systemd/system/{UNIT}").exists()
    }


def test_too_many_failures_of_a_batch_end_the_run_before_the_next(site):
    rc, found, output = codes(site, *BATCHES, "-e", "launchproof_max_fail_percentage=40")
    assert rc != 0
    assert found == {"c1": "exited_nonzero", "c2": "ok_progressing", "c3": "not_reached"}, output
    assert delivered(site) == {"c1", "c2", "c3"}  # a stage is over for all hosts before the next begins
    assert site.containers["c3"].run("systemctl", "show", "-P", "ActiveState", UNIT).stdout.strip() == "inactive"


def test_fewer_let_the_run_go_on(site):
    rc, found, output = codes(site, *BATCHES, "-e", "launchproof_max_fail_percentage=50")
    assert rc != 0
    assert found == {"c1": "exited_nonzero", "c2": "ok_progressing", "c3": "ok_progressing"}, output


def test_a_fleet_over_two_workers_has_one_report(site, tmp_path):
    report = tmp_path / "report.json"
    argv = [sys.executable, "examples/fleet/split.py", "-i", str(site.folder / "inventory.json")]
    argv += ["--playbook", "tests/integration/launch.yml", "--workers", "2", "--report", str(report)]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr  # c1 is bad
    found = json.loads(report.read_text())
    assert found["verdict"] == "failed"
    expected = {"c1": "exited_nonzero", "c2": "ok_progressing", "c3": "ok_progressing"}
    assert {job["host"]: job["code"] for job in found["jobs"]} == expected, done.stdout


@pytest.mark.parametrize(
    ("variable", "value"), [("launchproof_serial", "few"), ("launchproof_max_fail_percentage", "101")]
)
def test_what_is_no_batch_is_refused_before_any_change(site, variable, value):
    site.containers["c1"].path("/var/tmp/bad").unlink(missing_ok=True)  # a deployment would change it
    rc, output = site.deploy("-e", f"{variable}={value}")
    assert rc != 0
    assert f"{variable} is {value}: give" in output
    assert site.containers["c1"].run("systemctl", "show", "-P", "ActiveState", UNIT).stdout.strip() == "failed"
