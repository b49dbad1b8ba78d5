# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The three incidents: the naive launch fails as it did, the project says why, and its own launch succeeds.

A and C went through ``pct exec``, which is lxc-attach; B through ssh to a host with an odd port.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.container import REPO, Container
from tests.support.ssh import PORT, SshHost, playbook, serve_ssh

pytestmark = pytest.mark.container
FILES = REPO / "tests/integration/files/incidents"


@dataclass(frozen=True)
class Incident:
    """One launch as it was typed, and what must be seen."""

    name: str
    via: str  # pct or ssh
    script: str
    rc: int  # what the person who typed it got back
    logs: tuple[str, ...]  # files that the launch should have made
    programs: tuple[str, ...]  # programs that should have run
    pattern: str  # the kill pattern that matched the launcher itself


INCIDENTS = [
    Incident(
        "A",
        "pct",
        'pkill -9 -f "[t]rain_dflash_pipeline.py" || true; sleep 2; DFLASH_PROFILE_INTERVAL=60 nohup /root/run.sh > '
        "/workspace/train_slammed5.log 2>&1 & sleep 5; pgrep -af train_dflash_pipeline.py || true; "
        "tail -n 25 /workspace/train_slammed5.log",
        137,
        ("/workspace/train_slammed5.log",),
        ("train_dflash_pipeline.py",),
        "[t]rain_dflash_pipeline.py",
    ),
    Incident(
        "B",
        "ssh",
        "rm -f extract_gpu*.log; pkill -f monitor.py; sleep 1; nohup python3 monitor.py > monitor.log 2>&1 & "
        "for i in 0 1 2 3; do CUDA_VISIBLE_DEVICES=$i nohup python3 extract_hidden_states.py --gpu 0 --shard $i "
        '--num-shards 4 > extract_gpu$i.log 2>&1 & done; echo "Launched"',
        255,  # sshd reports the shell's SIGTERM as a signal, which ssh turns into 255; the shell itself ended with 143
        ("/root/monitor.log", *(f"/root/extract_gpu{i}.log" for i in range(4))),
        ("monitor.py", "extract_hidden_states.py"),
        "monitor.py",
    ),
    Incident(
        "C",
        "pct",
        'pkill -9 -f python; sleep 1; tmux new -d -s train "python3 /root/train_dflash_pipeline.py 2>&1 | '
        'tee /workspace/train.log"',
        137,
        ("/workspace/train.log",),
        ("train_dflash_pipeline.py", "tmux"),
        "python",
    ),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A host as the incidents had it: programs in /root, an odd ssh port, and the project's one file."""
    with Container("lpt-incidents") as container:
        host = serve_ssh(container, tmp_path_factory.mktemp("ssh"))
        container.shell("mkdir -p /workspace")
        for file in FILES.iterdir():
            container.write(f"/root/{file.name}", file.read_bytes(), 0o755)
        container.install()
        yield host


def launch(host: SshHost, incident: Incident) -> subprocess.CompletedProcess[str]:
    """Type the incident's command line."""
    if incident.via == "pct":
        return host.container.run("bash", "-lc", incident.script, check=False)
    copied = subprocess.run(
        ["scp", *host.options(), "-q", "-i", host.key, "-P", str(PORT),
         FILES / "monitor.py", FILES / "extract_hidden_states.py", f"root@{host.container.address}:"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert copied.returncode == 0, copied.stderr
    return host.ssh(incident.script)


@pytest.mark.peers("ansible 15800", "lxc 554")
@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.name)
def test_the_naive_launch_fails_without_a_word_and_gets_its_name(host, incident):
    began = time.monotonic()
    done = launch(host, incident)
    assert (done.returncode, done.stdout, done.stderr) == (incident.rc, "", "")
    for log in incident.logs:
        assert not host.container.path(log).exists()
    commands = host.container.run("ps", "-eo", "args").stdout
    assert not [program for program in incident.programs if program in commands]

    host.container.write("/tmp/launcher.sh", incident.script)
    named = host.container.run(
        "launchproof", "diagnose", "--json", "--launcher-script", "/tmp/launcher.sh", "--launcher-rc", str(incident.rc),
        check=False,
    )  # fmt: skip
    took = time.monotonic() - began
    assert named.returncode == 1, named.stdout + named.stderr
    verdict = json.loads(named.stdout)
    assert verdict["code"] == "launcher_self_killed", verdict
    assert incident.pattern in json.dumps(verdict["evidence"]), verdict
    assert verdict["remedy"]
    assert took <= 5, f"{took:.2f} s from the launch to its name"


def test_ssh_that_could_not_connect_is_not_taken_for_a_launcher_that_killed_itself(host):
    """The same exit code as B's, 255, and the same script: only what ssh printed tells them apart."""
    host.container.shell("systemctl stop ssh")
    try:
        done = host.ssh(INCIDENTS[1].script)
    finally:
        host.container.shell("systemctl start ssh")
    assert done.returncode == 255 and done.stderr
    host.container.write("/tmp/launcher.sh", INCIDENTS[1].script)
    host.container.write("/tmp/launcher.out", done.stdout + done.stderr)
    named = host.container.run(
        "launchproof", "diagnose", "--json", "--launcher-script", "/tmp/launcher.sh", "--launcher-rc", "255",
        "--launcher-output", "/tmp/launcher.out", check=False,
    )  # fmt: skip
    assert json.loads(named.stdout)["code"] == "launcher_not_delivered", named.stdout + named.stderr


@pytest.mark.parametrize("look", ["ls extract_gpu*.log", "tail -n 1 extract_gpu*.log", "echo extract_gpu*.log"])
def test_a_look_at_logs_that_prints_its_own_glob_is_told_so(host, look):
    """Incident B's second check: the glob came back as it was typed, for no shard had ever written a log."""
    launch(host, INCIDENTS[1])
    done = host.ssh(look)
    printed = done.stdout + done.stderr
    assert "extract_gpu*.log" in printed
    host.container.write("/tmp/looked.out", printed)
    diagnose = ["launchproof", "diagnose", "--json", "--launcher-output", "/tmp/looked.out"]
    alone = host.container.run(*diagnose, check=False)
    assert alone.returncode == 1, alone.stdout + alone.stderr
    verdict = json.loads(alone.stdout)
    assert verdict["code"] == "glob_unexpanded" and verdict["evidence"]["names"] == ["extract_gpu*.log"], verdict
    assert "extract_gpu*.log" in verdict["remedy"]

    # With the script as well, what killed the launcher is the answer, and the glob only goes with it.
    host.container.write("/tmp/launcher.sh", INCIDENTS[1].script)
    both = host.container.run(*diagnose, "--launcher-script", "/tmp/launcher.sh", check=False)
    verdict = json.loads(both.stdout)
    assert verdict["code"] == "launcher_self_killed", both.stdout + both.stderr
    assert "glob_unexpanded" in verdict["also_observed"], verdict


def test_a_check_by_pattern_that_finds_only_itself_is_told_so(host):
    """Incident A's second check: the only match of pgrep -f was the shell that ran pgrep."""
    done = host.container.run(
        "bash", "-c", "launchproof diagnose --json --pattern train_dflash_pipeline.py; exit $?", check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["code"] == "wrong_process"
    assert "bash -c" in json.dumps(verdict["evidence"])


INTERVALS = ("60", "61")


def drop_in_twice(container) -> list[dict]:
    """What is typed on the machine itself instead of A's one-liner; slammed6, edited, and slammed6 again. Returns both rows."""
    command = [
        "launchproof",
        "run",
        "--json",
        "--quiet",
        "--name",
        "slammed6",
        "--progress",
        r"ev=step step=(?P<step>\d+)",
    ]
    runs = []
    for interval in INTERVALS:
        done = container.run(
            *command, "--env", f"DFLASH_PROFILE_INTERVAL={interval}", "--", "/root/run.sh", check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (row,) = json.loads(done.stdout)["jobs"]
        assert row["code"] == "ok_progressing"
        runs.append(row)
    assert runs[0]["run_id"] != runs[1]["run_id"]
    workers = [line for line in container.run("ps", "-eo", "args").stdout.splitlines() if "/root/train" in line]
    assert len(workers) == 1, workers
    return runs


def test_the_drop_in_for_the_one_liner_is_proved_and_its_second_run_replaces_the_first(host):
    runs = drop_in_twice(host.container)
    for interval, row in zip(INTERVALS, runs):
        folder = f"/var/lib/launchproof/runs/{row['unit']}/{row['run_id']}"
        assert f"profile_interval={interval}" in host.container.read(f"{folder}/log")
    host.container.run("systemctl", "stop", runs[0]["unit"])


def test_the_drop_in_names_what_went_wrong(host):
    host.container.write("/root/broken.sh", "#!/bin/sh\necho no data in /data\nexit 3\n", 0o755)
    command = ["launchproof", "run", "--json", "--quiet", "--name", "broken", "--", "/root/broken.sh"]
    done = host.container.run(*command, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["jobs"]
    assert row["code"] == "exited_nonzero" and "no data in /data" in row["remedy"]


def job(name: str, command: list[str], **more) -> dict:
    """A job of the incidents as the project declares it."""
    return {
        "name": name,
        "description": f"{name} of the incidents",
        "command": command,
        "code": {"src": str(FILES), "dest": "/opt/incidents"},
        "proof": {"process": {"stable_for": 1}, "progress": {"pattern": r"ev=step step=(?P<step>\d+)", "within": 10}},
        **more,
    }


OWN_LAUNCH = {
    "A": [job("training", ["/usr/bin/python3", "/opt/incidents/train_dflash_pipeline.py"],
              env={"DFLASH_PROFILE_INTERVAL": "60"})],
    "B": [
        job("extraction", ["/usr/bin/python3", "/opt/incidents/extract_hidden_states.py", "--gpu", "0"],
            instances=[{"id": str(i), "command": ["--shard", str(i), "--num-shards", "4"]} for i in range(4)]),
        job("monitor", ["/usr/bin/python3", "/opt/incidents/monitor.py"]),
    ],
    "C": [job("training", ["/usr/bin/python3", "/opt/incidents/train_dflash_pipeline.py"],
              env={"DFLASH_PROFILE_INTERVAL": "61"})],
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_LAUNCH)
def test_the_projects_own_launch_of_the_same_job_is_proved(host, name, tmp_path):
    inventory = {"launchproof": {"hosts": {"rented": {**host.hostvars(), "launchproof_jobs": OWN_LAUNCH[name]}}}}
    (tmp_path / "inventory.json").write_text(json.dumps(inventory))
    report = tmp_path / "report.json"
    with playbook(["-i", str(tmp_path / "inventory.json"), "tests/integration/launch.yml"], report) as run:
        output = run.communicate(timeout=120)[0]
    assert run.returncode == 0, output
    rows = json.loads(report.read_text())["jobs"]
    units = [f"{job['name']}.service" for job in OWN_LAUNCH[name] if "instances" not in job]
    units += [f"{job['name']}@{i['id']}.service" for job in OWN_LAUNCH[name] for i in job.get("instances", ())]
    assert {row["unit"]: row["code"] for row in rows} == dict.fromkeys(units, "ok_progressing"), output


def test_the_incident_is_named_through_the_play_as_well(host, tmp_path):
    """Incident A's launcher evidence, given to the module for a unit that it was to start."""
    host.container.write("/etc/systemd/system/slammed5.service", "[Service]\nExecStart=/root/run.sh\n")
    host.container.shell("systemctl daemon-reload")
    script = INCIDENTS[0].script
    done = launch(host, INCIDENTS[0])
    play = [{
        "hosts": "rented", "gather_facts": False,
        "vars": {"launchproof_units": ["slammed5.service"], "launchproof_stage": "launch_proof"},
        "tasks": [{"dflash.launchproof.launch_proof": {
            "state": "observed", "jobs": [{"unit": "slammed5.service"}],
            "launcher": {"script": script, "rc": done.returncode, "output": done.stdout},
        }}],
    }]  # fmt: skip
    (tmp_path / "play.json").write_text(json.dumps(play))
    (tmp_path / "inventory.json").write_text(json.dumps({"launchproof": {"hosts": {"rented": host.hostvars()}}}))
    report = Path(tmp_path / "report.json")
    with playbook(["-i", str(tmp_path / "inventory.json"), str(tmp_path / "play.json")], report) as run:
        output = run.communicate(timeout=60)[0]
    assert run.returncode != 0, output
    (row,) = json.loads(report.read_text())["jobs"]
    assert row["code"] == "launcher_self_killed", output
