# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stopping by name, with systemctl's answers given."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager
from ansible_collections.dflash.launchproof.plugins.modules import job_stop


class Systemd:
    """systemctl show and stop over a dictionary of states."""

    def __init__(self, states, stop=(0, "")):
        self.states, self.stop, self.calls = dict(states), stop, []

    def __call__(self, _module, argv, check_rc=False):
        self.calls.append(argv)
        if argv[1] == "show":
            return 0, "\n\n".join(f"Id={unit}\nActiveState={self.states[unit]}" for unit in argv[5:]) + "\n", ""
        if self.stop[0] == 0:
            self.states.update(dict.fromkeys(argv[3:], "inactive"))
        return self.stop[0], "", self.stop[1]


def call(systemd, monkeypatch, capsys, check=False):
    monkeypatch.setattr(manager, "systemd_runs", lambda: True)
    monkeypatch.setattr(AnsibleModule, "run_command", lambda self, argv, **more: systemd(self, argv, **more))
    with patch_module_args({"units": list(systemd.states), "_ansible_check_mode": check}), pytest.raises(SystemExit):
        job_stop.main()
    return json.loads(capsys.readouterr().out)


def test_all_that_run_are_stopped_by_one_command(monkeypatch, capsys):
    systemd = Systemd(
        {"a.service": "active", "b.service": "activating", "c.service": "failed", "d.service": "inactive"}
    )
    result = call(systemd, monkeypatch, capsys)
    assert [argv for argv in systemd.calls if argv[1] == "stop"] == [
        ["systemctl", "stop", "--", "a.service", "b.service"]
    ]
    assert result["changed"] and result["units"]["b.service"] == {"before": "activating", "after": "inactive"}
    assert result["units"]["c.service"] == {"before": "failed", "after": "failed"}


def test_nothing_to_stop(monkeypatch, capsys):
    systemd = Systemd({"a.service": "inactive"})
    assert call(systemd, monkeypatch, capsys)["changed"] is False
    assert len(systemd.calls) == 1


def test_check_mode_stops_nothing(monkeypatch, capsys):
    systemd = Systemd({"a.service": "active"})
    result = call(systemd, monkeypatch, capsys, check=True)
    assert result["changed"] and result["diff"] == {"before": "a.service: active\n", "after": "a.service: inactive\n"}
    assert systemd.states == {"a.service": "active"}


def test_what_did_not_stop_is_named(monkeypatch, capsys):
    systemd = Systemd({"a.service": "active"}, stop=(1, "Access denied"))
    result = call(systemd, monkeypatch, capsys)
    assert result["failed"]
    assert result["msg"] == "Still running: a.service. The stop ended with 1: Access denied"
