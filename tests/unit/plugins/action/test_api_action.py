# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Proxmox modules on the controller run without a process of their own where nothing asks for one.

What they do is tested in ../modules/test_pve.py, once as modules and once as here.
"""

from __future__ import annotations

import datetime

import pytest
from ansible.plugins.action import ActionBase
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import api
from ansible_collections.dflash.launchproof.plugins.modules import pve_container, pve_preflight

from tests.support.module import action

ARGUMENTS = {"api_host": "pve1.example.com", "node": "pve1", "container": {"vmid": 901}}
IN_A_PROCESS = {"changed": False, "from": "a process"}


@pytest.fixture
def calls(monkeypatch):
    """What was handed to a process of the module."""
    calls = []
    monkeypatch.setattr(ActionBase, "_execute_module", lambda _self, **how: calls.append(how) or dict(IN_A_PROCESS))
    return calls


@pytest.mark.parametrize(
    "how",
    [
        {"connection": {"transport": "ssh"}},
        {"connection": {"become": object()}},
        {"environment": [{"HTTPS_PROXY": "http://proxy.example.com:3128"}]},
        {"async_val": 600},
    ],
    ids=lambda how: next(iter(how)),
)
@pytest.mark.parametrize("module", [pve_container, pve_preflight], ids=["container", "preflight"])
def test_another_machine_user_environment_or_time_takes_a_process(calls, module, how):
    result = action(module, ARGUMENTS, **how).run(task_vars={"a": 1})
    assert result["from"] == "a process"
    assert calls == [{"task_vars": {"a": 1}, "wrap_async": how.get("async_val", 0)}]


def test_a_controller_whose_python_lacks_proxmoxer_takes_the_process_of_another(calls, monkeypatch):
    monkeypatch.setattr(api, "IMPORT_ERROR", "no module named requests")
    assert action(pve_container, ARGUMENTS).run(task_vars={})["from"] == "a process"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"node": None}, "missing required arguments: node"),
        ({"api_port": "many"}, "argument 'api_port'"),
        ({"state": "strated"}, "value of state must be one of: present, started, stopped, absent, got: strated"),
        ({"colour": "red"}, "Unsupported parameters for (dflash.launchproof.pve_container) module: colour"),
        ({"container": {"vmid": 901, "net0": "x"}}, "net0"),
    ],
)
def test_wrong_arguments_are_said_as_the_module_says_them(calls, arguments, said):
    given = {key: value for key, value in {**ARGUMENTS, **arguments}.items() if value is not None}
    result = action(pve_container, given).run(task_vars={})
    assert result["failed"] is True and result["changed"] is False
    assert said in result["msg"]
    assert calls == []


def test_a_key_of_proxmox_is_refused_with_its_reason(calls):
    result = action(pve_container, {**ARGUMENTS, "container": {"vmid": 901, "lock": "backup"}}).run(task_vars={})
    assert len(result["msg"].splitlines()) == 2, "the reason, and Ansible's own words"


def test_values_that_are_not_json_reach_it_as_they_reach_a_module(monkeypatch):
    """YAML makes dates of what looks like one."""
    seen = {}
    plugin = action(
        pve_container,
        {
            **ARGUMENTS,
            "container": {"vmid": 901, "description": datetime.datetime(2026, 11, 30, 10, 11), "tags": {"a"}},
        },
    )
    monkeypatch.setattr(
        type(plugin), "WORK", lambda params, _check: seen.update(params["container"]) or {"changed": False}
    )
    plugin.run(task_vars={})
    assert (seen["description"], seen["tags"]) == ("2026-11-30T10:11:00", ["a"])
