# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One training over three hosts, on the CPU: a rank hangs, a node loses its power, all is well, a process is killed, a host looks
for the others in the wrong place.

The tests follow one another: each begins with what the one before left.
"""

from __future__ import annotations

import re

import pytest

from tests.support.hosts import hosts
from tests.support.prepared import PACKAGES_INSIDE, PROGRAMS_INSIDE
from tests.support.ssh import playbook

pytestmark = pytest.mark.container
UNIT, HOSTS = "training.service", ["c1", "c2", "c3"]
LOG = f"/var/lib/launchproof/runs/{UNIT}/current/log"
# The real program. Where this file is, its fifth loss does not come back, as where a data loader hangs; the process lives on.
HANGS = "/var/tmp/hangs"
PROGRAM = f"""
import itertools, os, runpy, sys, threading
sys.path.insert(0, "{PROGRAMS_INSIDE}")
from common import drafter
calls, loss = itertools.count(1), drafter.loss
def hangs(*args, **kwargs):
    if next(calls) == 5:
        threading.Event().wait()
    return loss(*args, **kwargs)
if os.path.exists("{HANGS}"):
    drafter.loss = hangs
sys.argv[0] = "{PROGRAMS_INSIDE}/train_dflash_pipeline.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PROOF = {
    "log": {"required": [r"ev=step step=\d\d"]},
    "progress": {"pattern": r"ev=step step=(?P<step>\d+)", "within": 12},
    "deadlines": {"first_progress": 240},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with hosts(tmp_path_factory.mktemp("gang"), "lpt-gang", tuple(HOSTS)) as found:
        for container in found.containers.values():
            prepare(container)
        declare(found)
        yield found


def prepare(container):
    container.write("/opt/training/train_dflash_pipeline.py", PROGRAM)
    container.shell(
        f"ln -s {PROGRAMS_INSIDE}/torchrun.py /opt/training; mkdir -p /opt/venv/bin; ln -s /usr/bin/python3 /opt/venv/bin/python"
    )


def declare(site, **more):
    site.declare(
        **{
            "launchproof_jobs": ["{{ training_job }}"],
            "training_hosts": HOSTS,
            "training_code_src": "",
            "training_lock": "",
            "training_code_dest": "/opt/training",
            "training_python_env_dir": "/opt/venv",
            "training_env": {"PYTHONPATH": PACKAGES_INSIDE},
            "training_arguments": ["--max-length", "64", "--target-batch", "2"],
            "training_max_steps": 1000000,
            "training_ckpt_every": 20,
            "training_proof": PROOF,
            **more,
        }
    )


def prove(site):
    """Look at what runs; returns (the report, all that was printed)."""
    site.report_path.unlink(missing_ok=True)
    run = playbook(["-i", str(site.folder / "inventory.json"), "playbooks/prove.yml"], site.report_path)
    output = run.communicate(timeout=300)[0]
    return site.report(), output


def named(gang):
    return [item["host"] for item in gang["held_up_by"]], [item["host"] for item in gang["waiting"]]


def show(container, name):
    return container.run("systemctl", "show", "-P", name, UNIT).stdout.strip()


def said(site, host, log=LOG):
    return site.containers[host].run("cat", log).stdout


def steps(site, host):
    return [int(step) for step in re.findall(r"ev=step step=(\d+)", said(site, host))]


def test_a_gang_that_ansible_would_not_start_as_a_whole_is_refused(site):
    rc, output = site.deploy("--forks", "2")
    assert rc != 0
    assert "Gang training has 3 hosts and ansible works on 2 at once (forks is 2)" in output
    assert not any(container.path("/etc/launchproof").exists() for container in site.containers.values())


def test_a_rank_that_hangs_is_named_by_its_step(site):
    site.containers["c2"].write(HANGS, "")
    rc, output = site.deploy()
    assert rc != 0
    assert set(site.codes().values()) == {"stalled"}, output
    assert named(site.report()["gangs"][0]) == (["c2"], ["c1", "c3"]), output
    assert "on c2 [stalled], which came no further than step 4; c1, c3 only wait." in output
    assert {host: steps(site, host)[-1] for host in HOSTS} == {"c1": 5, "c2": 4, "c3": 5}


@pytest.mark.long
def test_a_node_that_loses_its_power_is_named_while_the_others_wait(site):
    others = {host: container for host, container in site.containers.items() if host != "c2"}
    ran = {
        host: (show(container, "MainPID"), container.run("readlink", "-f", LOG).stdout.strip())
        for host, container in others.items()
    }
    # A boot that waits for the rendezvous would not end before the gang is there.
    site.containers["c2"].shell(f"rm /etc/systemd/system/multi-user.target.wants/{UNIT}")
    site.containers["c2"].stop()
    # The others end, start again, and wait for c2: they are asked where they are, not given time to come.
    for host, (pid, _log) in ran.items():
        others[host].wait_for_end(pid, timeout=100)
    declare(site, training_proof={**PROOF, "deadlines": {"first_progress": 10}})
    report, output = prove(site)
    rows = {row["host"]: row for row in report["jobs"]}
    assert rows["c2"]["code"] == "unreachable" and not any(row["ok"] for row in rows.values()), output
    assert named(report["gangs"][0]) == (["c2"], ["c1", "c3"]), output
    assert "on c2 [unreachable]; c1, c3 only wait." in output
    for host, (_pid, log) in ran.items():
        words = r"ev=exit code=69 reason=peer_lost peers=1 .*rank 1 on lpt-gang-c2 \(step 4\): gone"
        assert re.search(words, said(site, host, log))


@pytest.mark.long
def test_all_is_well_when_the_node_is_back(site):
    c2 = site.containers["c2"]
    c2.start()
    c2.shell(f"rm {HANGS}; systemctl reset-failed ssh; systemctl start ssh")
    declare(site)
    rc, output = site.deploy()
    assert rc == 0, output
    assert site.codes() == {(host, UNIT): "ok_progressing" for host in HOSTS}
    (gang,) = site.report()["gangs"]
    assert gang["ok"] and "Gang training, 3 members on c1, c2, c3: all are well." in output
    for rank, host in enumerate(HOSTS):
        assert set(re.findall(r" ev=step .* rank=(\d+)$", said(site, host), re.M)) == {str(rank)}


@pytest.mark.long
def test_a_rank_that_is_killed_is_named_and_the_gang_goes_on_from_its_checkpoint(site):
    c1, c2 = site.containers["c1"], site.containers["c2"]
    pid, log = show(c1, "MainPID"), c1.run("readlink", "-f", LOG).stdout.strip()
    c2.shell("grep -om1 'ev=start .*' %s | sed 's/.* pid=\\([0-9]*\\) .*/\\1/' | xargs kill -KILL" % LOG)
    c1.wait_for_end(pid, timeout=100)
    assert re.search(r"reason=peer_lost peers=1 .*rank 1 on lpt-gang-c2 \(step \d+\): gone", said(site, "c1", log))
    rc, output = site.deploy()
    assert rc == 0, output
    assert {int(step) >= 20 for step in re.findall(r"ev=resume step=(\d+)", said(site, "c1"))} == {True}
    ended = c2.run("sh", "-c", "cat /var/lib/launchproof/runs/training.service/*/exit.json").stdout
    assert '"exit_status": "137"' in ended, "torchrun's exit status is its rank's"


@pytest.mark.long
def test_a_host_that_does_not_come_to_the_rendezvous_is_named(site):
    elsewhere = "{{ '198.18.10.1' if inventory_hostname == 'c2' else hostvars.c1.ansible_host }}"
    # Longer than the time for the rendezvous: a run that was started again and waits anew is no sign of health.
    proof = {**PROOF, "process": {"stable_for": 90}}
    declare(site, training_rendezvous_address=elsewhere, training_rendezvous_timeout=20, training_proof=proof)
    rc, output = site.deploy()
    assert rc != 0
    assert named(site.report()["gangs"][0]) == (["c2"], ["c1", "c3"]), output
    assert "which does not reach the rendezvous that others wait at; c1, c3 only wait." in output
