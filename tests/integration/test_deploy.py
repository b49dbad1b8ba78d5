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
    container,
    deploy,
    identities,
    inside,
    machine,
    playbook,
    report,
    require_no_node,
    rows,
    writes,
)

pytestmark = pytest.mark.container

GOOD = {"ok_started", "ok_progressing", "completed"}


@pytest.fixture(scope="module", autouse=True)
def untouched():
    """The machine before the story, which begins without a node."""
    require_no_node()
    yield machine()
    playbook("destroy", "-e", "launchproof_destroy=true")
    playbook("local_node", "-e", "local_node_state=absent")


def test_check_mode_on_a_fresh_machine_predicts_and_creates_nothing(untouched):
    caches = sorted(NODE.rglob("*"))
    done = deploy("--check")
    assert done.returncode == 0, done.stdout
    assert report()["verdict"] == "predicted"
    assert {row["unit"] for row in report()["jobs"]} == set(UNITS)
    assert "cannot be predicted before it exists" in " ".join(done.stdout.split())
    assert all("not_predicted" in row["evidence"] for row in report()["jobs"])
    assert machine() == untouched
    assert sorted(NODE.rglob("*")) == caches


def test_the_first_deployment_is_proved():
    done = deploy()
    assert done.returncode == 0, done.stdout
    assert report()["verdict"] == "ok"
    found = rows()
    assert set(found) == set(UNITS)
    assert found["training.service"]["code"] in {"ok_progressing", "completed"}
    assert found["extraction@1.service"]["code"] in {"ok_progressing", "completed"}
    assert found["extraction@2.service"]["code"] in {"ok_progressing", "completed"}
    assert all(row["ok"] and row["code"] in GOOD and row["run_id"] for row in found.values())
    # The container has no NVML, and the report says so.
    assert re.match(r"off: .+", found["training.service"]["evidence"]["telemetry"]), found["training.service"]


def test_a_second_run_changes_nothing_while_jobs_run():
    before = identities()
    done = deploy()
    assert done.returncode == 0, done.stdout
    assert changed(done.stdout) == 0, done.stdout
    for unit, (run_id, pid) in identities().items():
        # A shard may have come to its end meanwhile; nothing may have begun anew.
        ended = pid == "0" and rows()[unit]["code"] == "completed"
        assert (run_id, pid) == before[unit] or (run_id == before[unit][0] and ended), (unit, before)


def test_the_bucket_holds_committed_batches_and_the_loss_falls():
    for unit in ("extraction@1.service", "extraction@2.service"):
        wait_for_end(unit)
    records = sorted((NODE / "s3").rglob("batch-*.json"))
    assert records, "no commit record in the bucket"
    for record in records:
        batch = record.with_suffix(".safetensors")
        assert batch.stat().st_size == json.loads(record.read_text())["bytes"]
    assert len(list((NODE / "s3").rglob("_DONE"))) == 2
    losses = [float(x) for x in re.findall(r" loss=([0-9.]+)", run_log("training.service"))]
    tenth = max(1, len(losses) // 10)
    assert sum(losses[-tenth:]) / tenth < sum(losses[:tenth]) / tenth - 0.2, (losses[:3], losses[-3:])


def test_a_run_after_extraction_has_completed_changes_nothing():
    before = identities()
    # With a job's data through a filter, as an inventory changes it: what the data needs of its role is there where it is made.
    jobs = [
        "{{ extraction_job | combine({'name': 'extraction'}, recursive=true) }}",
        "{{ training_job }}",
        "{{ monitor_job }}",
    ]
    done = deploy("-e", json.dumps({"launchproof_jobs": jobs}))
    assert done.returncode == 0, done.stdout
    assert changed(done.stdout) == 0, done.stdout
    assert identities() == before
    assert rows()["extraction@1.service"]["code"] == "completed"


def test_prove_observes_and_never_restarts():
    before = identities()
    done = playbook("prove")
    assert done.returncode == 0, done.stdout
    assert report()["verdict"] == "ok"
    assert identities() == before


def test_tags_and_limit_narrow_the_run_and_its_report():
    before = identities()
    done = deploy("--tags", "training", "--limit", "trainer", "-e", json.dumps({"training_env": {"NARROW": "1"}}))
    assert done.returncode == 0, done.stdout
    assert set(rows()) == {"training.service"}
    after = identities()
    assert {unit for unit in UNITS if after[unit][0] != before[unit][0]} == {"training.service"}
    (REPO / "artifacts/launch_report.json").unlink()
    assert deploy("--tags", "python_env").returncode == 0
    assert not (REPO / "artifacts/launch_report.json").exists()  # nothing was to be proved


def test_a_tag_that_selects_nothing_is_refused():
    done = deploy("--tags", "slammed")
    assert done.returncode != 0
    assert "launchproof_only" in done.stdout


def test_a_job_that_dies_is_named_within_ten_seconds():
    done = deploy("-e", json.dumps({"training_command": ["/bin/false"]}))
    assert done.returncode != 0
    row = rows()["training.service"]
    assert row["code"] in {"exited_nonzero", "died_before_log", "crash_loop"}
    assert row["seconds"] <= 10
    assert row["remedy"] in done.stdout.replace("\n", " ") or row["code"] in done.stdout
    assert set(rows()) == set(UNITS)


def test_a_run_killed_between_the_unit_and_its_start_is_made_good_by_the_next():
    """The new unit lies there, nobody started it: a handler would have been lost, the digest is not."""
    steps = json.dumps({"training_env": {"DFLASH_PROFILE_INTERVAL": "50"}})
    first = subprocess.Popen(
        ["./deploy", "-e", steps],
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("PLAY [Start the jobs"):
            os.killpg(first.pid, signal.SIGKILL)
            break
    first.stdout.read()
    assert first.wait() == -signal.SIGKILL
    done = deploy("-e", steps)
    assert done.returncode == 0, done.stdout
    manifest = json.loads(inside("cat", "/var/lib/launchproof/runs/training.service/current/manifest.json"))
    spec = json.loads(inside("cat", "/etc/launchproof/jobs/training.service.json"))
    assert manifest["digest"] == spec["digest"]
    assert "DFLASH_PROFILE_INTERVAL=50" in inside(
        "sh", "-c", "tr '\\0' '\\n' < /proc/$(systemctl show -P MainPID training.service)/environ"
    )


def test_a_secret_is_found_nowhere():
    """The S3 secret is a real one; -vvv --diff is the most that Ansible prints."""
    secret = (NODE / "s3/secret_key").read_text().strip()
    assert len(secret) >= 16
    done = deploy("-vvv", "--diff", "-e", json.dumps({"extraction_env": {"SEEDED": "1"}}))
    assert done.returncode == 0, done.stdout[-4000:]
    assert secret not in done.stdout
    for path in (REPO / "artifacts").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    places = ["/etc/systemd", "/etc/launchproof", "/var/lib/launchproof", "/var/lib/dflash", "/var/log"]
    # grep's 1 is "nowhere"; the pattern comes by stdin, so that the search itself shows the secret to nobody.
    search = ["pct", "exec", VMID, "--", "grep", "-rlF", "--exclude-dir=secrets", "-f", "-", *places]
    found = subprocess.run(search, input=secret + "\n", capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, ""), found
    assert secret not in inside("systemctl", "show", *UNITS)
    assert inside("stat", "-c", "%a %U", "/etc/launchproof/secrets/extraction@1.service.env").split() == ["600", "root"]


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ({"ansible_port": 1}, "unreachable", "127.0.0.1 port 1"),
        ({"pve_api_port": 1}, "preflight_failed", "pve_api_host"),
    ],
    ids=["node-without-sshd", "node-without-api"],
)
def test_an_unreachable_node_still_gives_one_row_a_job_and_changes_nothing(wrong, code, words):
    """The container is one that is not there yet: nothing may make it before the way into it is known to work."""
    before = writes()
    done = deploy("--skip-tags", "local_node", "-e", json.dumps({**wrong, **container(vmid=902)}))
    assert done.returncode != 0
    assert report()["verdict"] == "failed"
    assert {row["unit"] for row in report()["jobs"]} == set(UNITS)
    assert {(row["code"], row["stage"]) for row in report()["jobs"]} == {(code, "preflight")}
    assert words in report()["jobs"][0]["remedy"]
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
