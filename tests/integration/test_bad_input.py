# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bad input stops in preflight, before any change, naming the variable, its value and the fix."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.deployment import NODE, UNITS, container, deploy, playbook, report, require_no_node, writes

pytestmark = pytest.mark.container

FOREIGN = 950


@pytest.fixture(scope="module", autouse=True)
def node():
    """A node that is up, with one container on it that is not ours."""
    require_no_node()
    up = playbook("local_node")
    assert up.returncode == 0, up.stdout
    create = ["pvesh", "create", f"/nodes/{node_name()}/lxc", "-vmid", str(FOREIGN), "-hostname", "foreign"]
    create += ["-ostemplate", outputs()["api"]["template"], "-rootfs", "local:1"]
    subprocess.run(create, check=True, stdin=subprocess.DEVNULL)
    yield
    subprocess.run(["pvesh", "delete", f"/nodes/{node_name()}/lxc/{FOREIGN}"], check=True, stdin=subprocess.DEVNULL)
    down = playbook("local_node", "-e", "local_node_state=absent")
    assert down.returncode == 0, down.stdout


def outputs():
    return json.loads((NODE / "outputs.json").read_text())


def node_name():
    return outputs()["api"]["node"]


CASES = {
    "template that the storage does not have": (
        lambda: container(template="local:vztmpl/not-there.tar.zst"),
        ["launchproof_container.template", "not-there.tar.zst"],
    ),
    "vmid of somebody else's container": (
        lambda: container(vmid=FOREIGN),
        ["launchproof_container.vmid", str(FOREIGN)],
    ),
    "number of another container than the declared one": (
        lambda: {"ansible_pct_vmid": FOREIGN},
        ["ansible_pct_vmid", str(FOREIGN), "launchproof_container.vmid 901"],
    ),
    "more disk than the storage has": (
        lambda: container(disk_gib=1_000_000),
        ["launchproof_container.disk_gib", "1000000"],
    ),
    "shards that do not fit the GPUs": (
        lambda: {"extraction_shards": 3, "extraction_gpus": ["0", "1"], "launchproof_gpus": ["0", "1"]},
        ["extraction@3.service", "already taken by extraction@1.service"],
    ),
    "missing secret": (
        lambda: {"extraction_s3_secret_key": ""},
        ["AWS_SECRET_ACCESS_KEY"],
    ),
    "bad pattern": (
        lambda: {"training_proof": {"progress": {"pattern": "step=(?P<step>"}}},
        ["proof.progress.pattern", "step=(?P<step>"],
    ),
    "two that are said together": (
        lambda: {"python_env_imports": ["torch", "a b"], "training_proof": {"progress": {"pattern": "("}}},
        ["python_env_imports has 'a b'", "proof.progress.pattern"],
    ),
    "lock that is not there": (
        lambda: {"python_env_requirements": "/no/such.lock"},
        ["python_env_requirements is /no/such.lock"],
    ),
    "restart that there is not": (
        lambda: {"launchproof_restart": "sometimes"},
        ["launchproof_restart", "sometimes", "when_changed"],
    ),
    "node that does not answer": (
        lambda: {"pve_api_port": 1},
        ["pve_api_host", "127.0.0.1"],
    ),
    "wrong token": (
        lambda: {"pve_api_token_secret": "00000000-0000-0000-0000-000000000000"},
        ["pve_api_token"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_stops_before_any_change(case):
    wrong, words = CASES[case]
    before = writes()
    done = deploy("--skip-tags", "local_node", "-e", json.dumps(wrong()))
    assert done.returncode != 0, done.stdout
    assert writes() == before
    rows = report()["jobs"]
    assert {row["code"] for row in rows} == {"preflight_failed"}, rows
    assert len(rows) >= len(UNITS)
    for word in words:
        assert word in rows[0]["remedy"], rows[0]["remedy"]
    assert "00000000-0000" not in done.stdout
