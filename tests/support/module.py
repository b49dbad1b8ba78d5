# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a module of the collection in this process, as Ansible would on the controller: itself, or by its action plugin."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace

import pytest
from ansible.module_utils.testing import patch_module_args

ACTIONS = "ansible_collections.dflash.launchproof.plugins.action."


def run_module(module, arguments: dict, capsys, *, check: bool = False, secrets: tuple[str, ...] = ()) -> dict:
    """Its result. ``secrets`` are texts that must stand nowhere in it."""
    capsys.readouterr()
    arguments = {**arguments, "_ansible_check_mode": check, "_ansible_diff": True}
    with patch_module_args(arguments), pytest.raises(SystemExit) as ended:
        module.main()
    text = capsys.readouterr().out
    assert not [secret for secret in secrets if secret in text]
    result = json.loads(text)
    assert bool(result.get("failed")) == (ended.value.code != 0)
    return result


def run_action(module, arguments: dict, _capsys, *, check: bool = False, secrets: tuple[str, ...] = ()) -> dict:
    """The same by the action plugin of the module's name, for a task on the controller."""
    result = json.loads(json.dumps(action(module, arguments, check=check).run(task_vars={})))
    assert not [secret for secret in secrets if secret in json.dumps(result)]
    return result


def action(module, arguments: dict, *, check: bool = False, connection: dict | None = None, **task):
    """The action plugin of a task, with a connection to the controller unless ``connection`` says otherwise."""
    name = module.__name__.rpartition(".")[2]
    defaults = {"check_mode": check, "diff": True, "async_val": 0, "environment": None, "delegate_to": "localhost"}
    plugin = import_module(ACTIONS + name).ActionModule
    return plugin(
        task=SimpleNamespace(action=f"dflash.launchproof.{name}", args=arguments, **{**defaults, **task}),
        connection=SimpleNamespace(
            **{"transport": "local", "become": None, "_shell": SimpleNamespace(tmpdir=None), **(connection or {})}
        ),
        play_context=SimpleNamespace(check_mode=check), loader=None, templar=None, shared_loader_obj=None,
    )  # fmt: skip
