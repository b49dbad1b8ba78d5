# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a module of the collection in this process, as Ansible would on the controller."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.testing import patch_module_args


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
