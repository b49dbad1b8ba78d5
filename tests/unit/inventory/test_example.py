# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inventories say what the roles and modules take; the example is copied by people and run nowhere else."""

from __future__ import annotations

import pytest
from ansible.inventory.manager import InventoryManager
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible.vars.manager import VariableManager
from ansible_collections.dflash.launchproof.plugins.filter.container_errors import container_errors
from ansible_collections.dflash.launchproof.plugins.filter.dealt_gpus import dealt_gpus
from ansible_collections.dflash.launchproof.plugins.filter.gpu_devices import gpu_devices
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import options, plan

SECRETS = {"vault_pve_api_token_secret": "x", "vault_s3_access_key": "x", "vault_s3_secret_key": "x"}


def read(source: str) -> dict[str, dict]:
    """Hosts of group launchproof with the variables that these tests look at."""
    loader = DataLoader()
    inventory = InventoryManager(loader=loader, sources=[source])
    manager = VariableManager(loader=loader, inventory=inventory)
    hosts = {}
    for host in inventory.get_hosts("launchproof"):
        templar = Templar(loader, variables={**manager.get_vars(host=host), **SECRETS})
        names = [
            name
            for name in manager.get_vars(host=host)
            if name.startswith(("ansible_", "pve_", "launchproof_container"))
        ]
        hosts[host.name] = {
            name: templar.template(trust_as_template("{{ %s }}" % name))
            for name in names
            if name != "ansible_python_interpreter"
        }
    return hosts


@pytest.mark.parametrize("inventory", ["inventory/example", "inventory/local"])
def test_each_container_is_one_that_the_module_takes_and_its_host_is_derived_from_it(inventory):
    hosts = read(inventory)
    found = {"why": None, "gpus": []}
    containers = {name: host for name, host in hosts.items() if "launchproof_container" in host}
    assert containers
    for name, host in containers.items():
        declared = host["launchproof_container"]
        wish = declared.get("gpus")
        found["gpus"] = [{"index": n, "uuid": uuid, "minor": n} for n, uuid in enumerate(wish or [])]
        gpus = dealt_gpus(found, name, list(hosts), hosts) if wish else None
        container = gpu_devices(declared, gpus, {"/dev/nvidiactl": "0666"})
        read_as = ArgumentSpecValidator(options.container()).validate({"container": container})
        assert read_as.error_messages == []
        assert plan.validate(read_as.validated_parameters["container"]) == []
        assert host["ansible_pct_vmid"] == declared["vmid"]
        assert container_errors(declared["vmid"], name, list(hosts), hosts) == []


def test_the_example_enters_the_node_that_the_container_is_made_on():
    host = read("inventory/example")["dflash-train"]
    assert host["ansible_host"].partition(".")[0] == host["pve_node"] == host["pve_root_ssh"]["host"].partition(".")[0]
    assert [device["path"] for device in gpu_devices(host["launchproof_container"], [{"minor": 3}], {})["devices"]] == [
        "/dev/nvidia3"
    ]
