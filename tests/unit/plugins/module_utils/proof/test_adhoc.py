# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""launchproof run: what it writes, and what it refuses to overwrite."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import adhoc, ledger


@pytest.fixture
def paths(tmp_path, monkeypatch):
    (tmp_path / "units").mkdir()
    monkeypatch.setattr(adhoc, "UNITS", str(tmp_path / "units"))
    return ledger.Paths(str(tmp_path))


def deliver(paths, name="slammed6", command=("/bin/sh", "-c", 'echo $HOME 100% "q" \\'), environ=None):
    return adhoc.deliver(
        name, list(command), environ or {"A": "1"}, "root", "/tmp/100%", {"done": {"pattern": "x"}}, "/p -IS /q", paths
    )


def test_unit_environment_and_job_file(paths, tmp_path):
    assert deliver(paths, environ={"PATH": "/bin", "API_TOKEN": 's"e$c\\ret'}) == "slammed6.service"
    text = (tmp_path / "units/slammed6.service").read_text()
    assert text.startswith(adhoc.MARK + "\n")
    assert 'ExecStart="/bin/sh" "-c" "echo $$HOME 100%% \\"q\\" \\\\"' in text
    assert "WorkingDirectory=/tmp/100%%" in text
    assert 's"e' not in text and "API_TOKEN" not in text
    settings, secrets = (Path(tmp_path, "etc/launchproof", kind, "slammed6.service.env") for kind in ("env", "secrets"))
    assert settings.read_text() == 'PATH="/bin"\n'
    assert secrets.read_text() == 'API_TOKEN="s\\"e\\$c\\\\ret"\n'
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    job = json.loads(Path(paths.job("slammed6.service")).read_text())
    assert (job["argv"][0], job["proof"], job["secrets_file"]) == ("/bin/sh", {"done": {"pattern": "x"}}, str(secrets))
    assert os.readlink(paths.current("slammed6.service")) == "none"


def test_its_own_unit_is_replaced_and_the_ledger_kept(paths):
    deliver(paths)
    ledger.point_current(paths, "slammed6.service", "a" * 32)
    deliver(paths, command=("/bin/true",))
    assert ledger.current_run(paths, "slammed6.service") == "a" * 32


def test_somebody_elses_unit_is_left_alone(paths, tmp_path):
    theirs = tmp_path / "units/slammed6.service"
    theirs.write_text("[Service]\nExecStart=/bin/true\n")
    with pytest.raises(adhoc.AdhocError, match="was not written by launchproof run"):
        deliver(paths)
    assert theirs.read_text() == "[Service]\nExecStart=/bin/true\n"
    assert not os.path.exists(paths.jobs), "refused before anything is written"


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-x", "a b", "x\n"])
def test_bad_names(paths, name):
    with pytest.raises(adhoc.AdhocError, match="--name"):
        deliver(paths, name)


@pytest.mark.parametrize("command", [["nothing-of-that-name"], ["/etc/passwd"], ["./none"]])
def test_a_program_that_cannot_run_is_named(paths, command):
    with pytest.raises(adhoc.AdhocError, match="no such program"):
        deliver(paths, command=command)


def test_environment():
    inherited = {"PATH": "/bin", "SSH_AUTH_SOCK": "/x", "HOME": "/root"}
    found = adhoc.environment(["A=1=2", "HOME=/h", "E="], ["GPU-a", "1"], inherited)
    assert found == {
        "PATH": "/bin",
        "HOME": "/h",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-a,1",
        "A": "1=2",
        "E": "",
    }


@pytest.mark.parametrize("pair", ["A", "=x", "1A=x", "A B=x", "A=x\ny"])
def test_bad_pairs(pair):
    with pytest.raises(adhoc.AdhocError, match="--env"):
        adhoc.environment([pair], [], {})
