# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The controller's half of job_install: what it refuses, what it sends, and that secrets travel apart."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible.plugins.action import ActionBase
from ansible_collections.dflash.launchproof.plugins.action.job_install import ActionModule
from ansible_collections.dflash.launchproof.plugins.module_utils.job import code as code_tree

SECRET = "s3cr3t-value"


class Action(ActionModule):
    """The plugin with the connection cut off: module calls and transfers are recorded, answers given."""

    def __init__(self, args, answers=({"changed": False},)):
        shell = SimpleNamespace(tmpdir="/remote", join_path=lambda *parts: "/".join(parts))
        self._task = SimpleNamespace(args=args)
        self._connection = SimpleNamespace(_shell=shell)
        self.answers, self.calls, self.sent = list(answers), [], {}

    def _execute_module(self, module_name=None, module_args=None, task_vars=None):
        self.calls.append(json.loads(json.dumps(module_args)))
        return dict(self.answers.pop(0))

    def _transfer_file(self, local_path, remote_path):
        self.sent[remote_path] = Path(local_path).read_bytes()

    def _fixup_perms2(self, remote_paths, execute=True):
        pass


@pytest.fixture(autouse=True)
def _base(monkeypatch, tmp_path):
    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})
    monkeypatch.setattr("ansible.constants.DEFAULT_LOCAL_TMP", str(tmp_path))


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "src"
    root.mkdir()
    (root / "main.py").write_text("print(1)\n")
    return root


def test_all_errors_and_no_call():
    action = Action(
        {"jobs": [{"name": "A"}, {"name": "b", "command": ["/bin/true"], "code": {"src": "/no", "dest": "/opt/b"}}]}
    )
    result = action.run()
    assert result["failed"] and not result["changed"] and len(result["errors"]) == 3
    assert all(error in result["msg"] for error in result["errors"])
    assert action.calls == []


def test_secrets_travel_apart():
    job = {
        "name": "a",
        "command": ["/bin/true"],
        "secrets": {"K": SECRET, "N": 1234567},
        "instances": [{"id": 1}, {"id": 2, "secrets": {"K": "own-secret"}}],
    }
    action = Action({"jobs": [job]})
    action.run()
    (call,) = action.calls
    assert call["secrets"] == {
        "a@1.service": {"K": SECRET, "N": "1234567"},
        "a@2.service": {"K": "own-secret", "N": "1234567"},
    }
    public = json.dumps(call["jobs"])
    assert "secret" not in public and "1234567" not in public


def test_code_that_is_there_is_not_sent(source):
    action = Action({"jobs": [{"name": "a", "command": ["/bin/true"], "code": {"src": str(source), "dest": "/opt/a"}}]})
    action.run()
    assert len(action.calls) == 1 and action.sent == {}
    assert action.calls[0]["delivered"]["a"] == {
        "code": code_tree.tree_hash(str(source), code_tree.scan(str(source), ())),
        "lock": None,
    }


def test_code_that_is_missing_is_sent_once_for_all_its_jobs(source, tmp_path):
    code = {"src": str(source), "dest": "/opt/c"}
    jobs = [{"name": name, "command": ["/bin/true"], "code": code} for name in "ab"]
    action = Action({"jobs": jobs}, [{"changed": False, "needs_code": ["/opt/c"]}, {"changed": True}])
    assert action.run() == {"changed": True}
    ((remote, data),) = action.sent.items()
    assert [call["delivered"]["a"].get("archive") for call in action.calls] == [None, remote]
    assert action.calls[1]["delivered"]["a"] == action.calls[1]["delivered"]["b"]
    (tmp_path / "archive").write_bytes(data)
    (tmp_path / "target").mkdir()
    code_tree.unpack(str(tmp_path / "archive"), str(tmp_path / "target"))
    assert (tmp_path / "target" / "main.py").read_text() == "print(1)\n"


def test_the_lock_counts_by_its_content(tmp_path):
    lock = tmp_path / "lock"
    job = {"name": "a", "command": ["/bin/true"], "lock": str(lock)}
    hashes = []
    for content in ("torch==1", "torch==2", "torch==1"):
        lock.write_text(content)
        action = Action({"jobs": [job]})
        action.run()
        hashes.append(action.calls[0]["delivered"]["a"]["lock"])
    assert hashes[0] == hashes[2] != hashes[1]


def test_code_that_cannot_be_sent_stops_before_the_first_call(source):
    (source / "link").symlink_to("/etc/passwd")
    action = Action({"jobs": [{"name": "a", "command": ["/bin/true"], "code": {"src": str(source), "dest": "/opt/a"}}]})
    result = action.run()
    assert result["failed"] and "link is a link to /etc/passwd, out of the folder" in result["msg"]
    assert action.calls == []
