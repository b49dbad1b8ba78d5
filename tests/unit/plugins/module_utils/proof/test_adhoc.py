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
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import UnitState, Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager, supervisor


@pytest.fixture
def paths(tmp_path, monkeypatch):
    (tmp_path / "units").mkdir()
    (tmp_path / "100%").mkdir()
    monkeypatch.setattr(adhoc, "UNITS", str(tmp_path / "units"))
    monkeypatch.setattr(manager, "SYSTEMD_RUNS", str(tmp_path / "units"))
    return ledger.Paths(str(tmp_path))


def deliver(
    paths,
    name="slammed6",
    command=("/bin/sh", "-c", 'echo $HOME 100% "q" \\'),
    environ=None,
    user="root",
    folder="100%",
):
    directory = os.path.join(os.path.dirname(adhoc.UNITS), folder)
    return adhoc.deliver(
        name, list(command), environ or {"A": "1"}, user, directory, {"done": {"pattern": "x"}}, "/p -IS /q", paths
    )


def test_unit_environment_and_job_file(paths, tmp_path):
    assert deliver(paths, environ={"PATH": "/bin", "API_TOKEN": 's"e$c\\ret'}) == "slammed6.service"
    text = (tmp_path / "units/slammed6.service").read_text()
    assert text.startswith(adhoc.MARK + "\n")
    assert 'ExecStart="/bin/sh" "-c" "echo $$HOME 100%% \\"q\\" \\\\"' in text
    assert "WorkingDirectory=%s/100%%%%" % tmp_path in text
    assert 's"e' not in text and "API_TOKEN" not in text
    settings, secrets = (Path(tmp_path, "etc/launchproof", kind, "slammed6.service.env") for kind in ("env", "secrets"))
    assert settings.read_text() == 'PATH="/bin"\n'
    assert secrets.read_text() == 'API_TOKEN="s\\"e\\$c\\\\ret"\n'
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    job = json.loads(Path(paths.job("slammed6.service")).read_text())
    assert (job["argv"][0], job["proof"], job["secrets_file"]) == ("/bin/sh", {"done": {"pattern": "x"}}, str(secrets))
    assert os.readlink(paths.current("slammed6.service")) == "none"


def test_without_systemd_the_record_alone_says_how_it_runs(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "SYSTEMD_RUNS", str(tmp_path / "absent"))
    deliver(paths)
    assert not list((tmp_path / "units").iterdir())
    job = json.loads(Path(paths.job("slammed6.service")).read_text())
    assert (job["working_directory"], job["restart"], job["timeout_stop"]) == (str(tmp_path / "100%"), "no", 120)
    assert all(os.path.isfile(path) for path in job["environment_files"]) and len(job["environment_files"]) == 2


def test_without_systemd_a_job_keeps_its_name(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "Paths", lambda: paths)
    monkeypatch.setattr(supervisor, "PROGRAMS", str(tmp_path))
    deliver(paths)
    adhoc.check_free("slammed6.service", supervisor.Manager())  # its own
    (tmp_path / "slammed6.service.conf").touch()
    with pytest.raises(
        adhoc.AdhocError, match=r"slammed6.service.conf is there and was not written by launchproof run"
    ):
        adhoc.check_free("slammed6.service", supervisor.Manager())


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


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"command": ["nothing-of-that-name"]}, "nothing-of-that-name: there is no such program"),
        ({"command": ["./none"]}, "./none: there is no such program"),
        ({"command": ["/"]}, "/: there is no such program"),
        ({"command": ["/etc/passwd"]}, "/etc/passwd is not executable"),
        ({"user": "nobody-of-that-name"}, "--user nobody-of-that-name: there is no such user"),
        ({"folder": "absent"}, "there is no such directory"),
    ],
)
def test_what_cannot_run_is_named_before_anything_is_written(paths, wrong, text):
    with pytest.raises(adhoc.AdhocError, match=text):
        deliver(paths, **wrong)
    assert not os.path.exists(paths.jobs) and not os.listdir(adhoc.UNITS)


def test_the_units_own_ending_may_be_part_of_the_name(paths):
    assert deliver(paths, "slammed6.service") == "slammed6.service"


class Shown:
    """A manager that knows one unit."""

    def __init__(self, state):
        self.state = state

    def show(self, units):
        return {unit: (self.state, {}) for unit in units}


def test_a_name_that_systemd_knows_from_elsewhere_is_not_taken(paths):
    adhoc.check_free("x.service", Shown(UnitState(load_state="not-found")))
    adhoc.check_free("x.service", Shown(UnitState(fragment_path=os.path.join(adhoc.UNITS, "x.service"))))
    for state in (UnitState(fragment_path="/run/systemd/generator.late/x.service"), UnitState(load_state="masked")):
        with pytest.raises(adhoc.AdhocError, match="was not written by launchproof run; choose another name"):
            adhoc.check_free("x.service", Shown(state))
    with pytest.raises(adhoc.AdhocError, match="nobody answers"):
        adhoc.check_free("x.service", Shown(Unknown("nobody answers")))


def test_environment():
    inherited = {"PATH": "/bin", "SSH_AUTH_SOCK": "/x", "HOME": "/root"}
    found = adhoc.environment(["A=1=2", "HOME=/h", "E=", "TOKEN"], ["GPU-a", "1"], {**inherited, "TOKEN": "t"})
    assert found == {
        "PATH": "/bin",
        "HOME": "/h",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-a,1",
        "A": "1=2",
        "E": "",
        "TOKEN": "t",
    }


@pytest.mark.parametrize("pair", ["A", "=x", "1A=x", "A B=x", "A=x\ny"])
def test_bad_pairs(pair):
    with pytest.raises(adhoc.AdhocError, match="--env"):
        adhoc.environment([pair], [], {})
