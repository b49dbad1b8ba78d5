# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The example of docs/proxmox.md: what pve_container does in it, beside what another collection does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import requests
import yaml
from ansible.plugins.filter.core import combine
from ansible_collections.dflash.launchproof.plugins.modules import pve_container
from jinja2.nativetypes import NativeEnvironment

from tests.support.module import run_module

DOCS = Path(__file__).resolve().parents[4] / "docs/proxmox.md"
(PLAY,) = yaml.safe_load(re.search(r"```yaml\n(.*?)```", DOCS.read_text(), re.S)[1])
OURS = "dflash.launchproof.pve_container"


@pytest.fixture
def play(fakepve, fakepve_cafile, capsys):
    """``play()`` runs the example's tasks and returns the results of pve_container, in order."""
    fakepve.apitokens["launchproof@pve!deploy"] = "s3cret-deploy"
    fakepve.pools["gpu"] = set()
    fakepve.acl = {"launchproof@pve": [
        ("/pool/gpu", ["VM.Audit", "VM.Allocate", "VM.PowerMgmt", "VM.Config.Memory", "VM.Config.Network",
                       "VM.Config.Disk", "VM.Config.Options"]),
        ("/storage", ["Datastore.AllocateSpace", "Datastore.Audit"]), ("/sdn", ["SDN.Use"]),
    ]}  # fmt: skip
    jinja = NativeEnvironment()
    jinja.filters["combine"] = combine
    known = {"pve_api_host": fakepve.host, "pve_api_port": fakepve.port, "pve_api_ca_path": fakepve_cafile,
             "vault_pve_api_token_secret": "s3cret-deploy", "source": PLAY["vars"]["source"]}  # fmt: skip

    def render(value):
        if isinstance(value, dict):
            return {name: render(item) for name, item in value.items()}
        return jinja.from_string(value).render(known) if isinstance(value, str) else value

    known["deploy"] = render(PLAY["vars"]["deploy"])
    session = requests.Session()
    session.trust_env, session.verify = False, fakepve_cafile
    ticket, csrf = fakepve.issue_ticket("root@pam")
    session.headers.update({"Cookie": f"PVEAuthCookie={ticket}", "CSRFPreventionToken": csrf})

    def other(path, **values):
        answer = session.post(f"{fakepve.url}/api2/json/nodes/pve1/lxc/{path}", data=values, timeout=10)
        assert answer.status_code == 200, answer.reason

    def run():
        results = []
        for task in PLAY["tasks"]:
            if OURS in task:
                arguments = {**render(PLAY["module_defaults"][OURS]), **render(task[OURS])}
                results.append(run_module(pve_container, arguments, capsys, secrets=("s3cret",)))
            elif "community.proxmox.proxmox" in task and fakepve.ct(201) is None:
                module = render(task["community.proxmox.proxmox"])
                other(f"{module['clone']}/clone", newid=201, full=1, storage=module["storage"],
                      hostname=module["hostname"], pool=module["pool"])  # fmt: skip
            elif "community.proxmox.proxmox_snap" in task and not fakepve.ct(201).snapshots:
                other("201/snapshot", snapname=task["community.proxmox.proxmox_snap"]["snapname"])
        return results

    return run


def test_the_example_beside_another_collection(play, fakepve):
    source, clone = play()
    assert (source["status"], clone["status"]) == ("stopped", "running")
    assert clone["steps"] == ["config: memory, net0", "start"]
    # The clone keeps the address it was given by Proxmox, and the tag of its source.
    assert (
        fakepve.ct(201).config["net0"].partition("hwaddr=")[2][:17]
        != fakepve.ct(200).config["net0"].partition("hwaddr=")[2][:17]
    )
    assert fakepve.ct(201).config["tags"] == "launchproof"
    assert list(fakepve.ct(201).snapshots) == ["before-upgrade"]
    assert [result["changed"] for result in play()] == [False, False]
