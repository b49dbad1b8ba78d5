# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module around planning and applying: what it answers, and when systemd is told."""

from __future__ import annotations

import json
import os

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dflash.launchproof.plugins.module_utils.job import install
from ansible_collections.dflash.launchproof.plugins.modules import job_install

SECRET = "s3cr3t-value"
JOB = {"name": "a", "command": ["/bin/true"]}


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the module against a folder; returns its answer. C(reloads) counts daemon-reloads."""
    root = str(tmp_path / "root")
    os.makedirs(root + "/run/systemd/system")
    reloads = []

    class Machine(install.Host):
        def __init__(self):
            super().__init__(root)

        def is_root(self):
            return True

        def user_exists(self, name):
            return True

        def program(self, name):
            return name

        def run(self, argv):
            if argv == ["systemctl", "daemon-reload"]:
                reloads.append(argv)
                return 0, ""
            wanted = "" if not os.path.lexists(root + "/etc/systemd/system/a.service") else "a.service"
            return 0, f"Id=multi-user.target\nNeedDaemonReload=no\nWants={wanted}\n"

    monkeypatch.setattr(install, "Host", Machine)

    def run(check=False, **params):
        args = {"jobs": [JOB], "_ansible_check_mode": check, "_ansible_diff": True, **params}
        with patch_module_args(args), pytest.raises(SystemExit):
            job_install.main()
        return json.loads(capsys.readouterr().out)

    run.root, run.reloads = root, reloads
    return run


def test_first_and_second_call(call):
    first = call()
    assert first["changed"] and first["reloaded"] and call.reloads == [["systemctl", "daemon-reload"]]
    assert first["units"][0]["unit"] == "a.service" and first["units"][0]["digest"].startswith("sha256:")
    second = call()
    assert (second["changed"], second["reloaded"], second["diff"]) == (False, False, [])
    assert len(call.reloads) == 1


def test_what_is_lacking_is_said_before_anything_is_installed(call, monkeypatch):
    monkeypatch.setattr(install.Host, "user_exists", lambda _self, name: name != "ada")
    first = call(jobs=[JOB, {**JOB, "name": "b", "user": "ada"}], look_first=True)
    assert first["lacking"] == {"users": ["ada"], "supervisor": False} and first["changed"] is False
    assert not os.path.exists(call.root + "/etc")


def test_where_nothing_lacks_one_call_does_it(call):
    first = call(look_first=True)
    assert first["changed"] and "lacking" not in first


def test_check_mode_says_the_same_and_writes_nothing(call):
    predicted = call(check=True)
    assert predicted["changed"] and not os.path.exists(call.root + "/etc") and call.reloads == []
    assert predicted["diff"] == call()["diff"]


def test_a_change_of_the_proof_alone_needs_no_reload(call):
    call()
    changed = call(jobs=[{**JOB, "proof": {"deadlines": {"start": 7}}}])
    assert changed["changed"] and not changed["reloaded"] and len(call.reloads) == 1


def test_missing_code_is_asked_for_before_any_write(call):
    job = {**JOB, "code": {"src": "/src", "dest": "/opt/c"}}
    answer = call(jobs=[job], delivered={"a": {"code": "1" * 64}})
    assert (answer["changed"], answer["needs_code"]) == (False, ["/opt/c"])
    assert not os.path.exists(call.root + "/etc")
    predicted = call(check=True, jobs=[job], delivered={"a": {"code": "1" * 64}})
    assert predicted["changed"] and "needs_code" not in predicted


def test_errors_change_nothing(call):
    answer = call(jobs=[{"name": "a", "command": "x"}])
    assert answer["failed"] and answer["msg"].startswith("Nothing was changed:\n- ") and len(answer["errors"]) == 1
    os.rmdir(call.root + "/run/systemd/system")
    answer = call(manager="systemd")
    assert answer["failed"] and "manager is systemd, which does not run this machine" in answer["errors"][0]


def test_the_answer_holds_no_secret(call):
    for secrets in ({"K": SECRET}, {"K": "another-secret"}):
        answer = json.dumps(call(secrets={"a.service": secrets}))
        assert SECRET not in answer and "another-secret" not in answer
    with open(call.root + "/etc/launchproof/secrets/a.service.env") as stream:
        assert stream.read() == 'K="another-secret"\n'


def test_a_failure_half_way_says_that_another_call_completes_it(call, monkeypatch):
    monkeypatch.setattr(install.Host, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    answer = call()
    assert answer["failed"] and "running it again completes it" in answer["msg"] and "No space left" in answer["msg"]
