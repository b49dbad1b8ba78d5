# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The run ledger, in a folder instead of a machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger

UNIT = "training.service"
RUN, NEXT = "a" * 32, "b" * 32


@pytest.fixture
def paths(tmp_path):
    found = ledger.Paths(str(tmp_path))
    os.makedirs(found.jobs)
    return found


def deliver(paths, **more):
    job = {
        "schema": 1,
        "unit": UNIT,
        "job": "training",
        "digest": "d1",
        "argv": ["/bin/x"],
        "env": {"A": "1"},
        "user": None,
        **more,
    }
    ledger.write_json(paths.job(UNIT), job)


def begin(paths, run_id=RUN):
    return ledger.main(["begin-run", UNIT], {"INVOCATION_ID": run_id}, paths)


def end(paths, run_id=RUN, **environ):
    return ledger.main(["end-run", UNIT], {"INVOCATION_ID": run_id, **environ}, paths)


def read(paths, name, run_id=RUN):
    return json.loads(text(paths, name, run_id))


def text(paths, name="log", run_id=RUN):
    return Path(paths.run(UNIT, run_id), name).read_text()


def test_begin_makes_the_folder_the_manifest_and_current(paths, capfd):
    deliver(paths)
    assert begin(paths) == 0
    manifest = read(paths, "manifest.json")
    assert (manifest["run_id"], manifest["digest"], manifest["argv"], manifest["env"]) == (
        RUN,
        "d1",
        ["/bin/x"],
        {"A": "1"},
    )
    assert manifest["boottime"] == pytest.approx(ledger.boottime(), abs=5)
    assert os.readlink(paths.current(UNIT)) == RUN, "a relative link, so that the folder can be moved"
    assert os.path.getsize(os.path.join(paths.run(UNIT, RUN), "log")) == 0
    assert capfd.readouterr() == ("", ""), "its output would land in the log of the run before"


def test_a_second_run_leaves_the_first_as_it_is(paths):
    deliver(paths)
    begin(paths)
    log = os.path.join(paths.run(UNIT, RUN), "log")
    with open(log, "w") as handle:
        handle.write("kept")
    begin(paths, NEXT)
    assert ledger.current_run(paths, UNIT) == NEXT
    assert text(paths) == "kept"


def test_begin_again_with_the_same_id_overwrites_nothing(paths):
    deliver(paths)
    begin(paths)
    first = read(paths, "manifest.json")
    with open(os.path.join(paths.run(UNIT, RUN), "log"), "w") as handle:
        handle.write("kept")
    deliver(paths, digest="d2")
    assert begin(paths) == 0
    assert read(paths, "manifest.json") == first
    assert text(paths) == "kept"


def test_without_a_job_file_the_reason_is_in_the_new_runs_own_log(paths):
    assert begin(paths) == ledger.EX_CONFIG
    assert paths.job(UNIT) in text(paths)
    assert ledger.current_run(paths, UNIT) == RUN


def test_a_user_that_does_not_exist_is_named(paths):
    deliver(paths, user="nobody-of-that-name")
    with pytest.raises(ledger.LedgerError, match="nobody-of-that-name") as caught:
        ledger.begin_run(UNIT, RUN, paths)
    assert caught.value.status == ledger.EX_CONFIG


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which is root's alone")
def test_the_run_belongs_to_the_jobs_user(paths):
    deliver(paths, user="nobody")
    assert begin(paths) == 0
    for name in ("", "log"):
        assert os.stat(os.path.join(paths.run(UNIT, RUN), name)).st_uid != 0
    assert os.stat(paths.unit_runs(UNIT)).st_uid == 0, (
        "else the user could point current elsewhere, and systemd appends as root"
    )


def test_a_link_prepared_by_the_jobs_user_is_not_followed(paths, tmp_path):
    deliver(paths)
    begin(paths)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = paths.run(UNIT, RUN)
    os.symlink(victim, os.path.join(folder, "verdict.json"))
    ledger.write_json(os.path.join(folder, "verdict.json"), {"code": "x"})
    assert victim.read_text() == "precious"
    assert read(paths, "verdict.json") == {"code": "x"}


def test_the_certificate_is_written_once(paths):
    deliver(paths)
    begin(paths)
    assert end(paths, SERVICE_RESULT="signal", EXIT_CODE="killed", EXIT_STATUS="KILL") == 0
    assert end(paths, SERVICE_RESULT="success", EXIT_CODE="exited", EXIT_STATUS="0") == 0
    certificate = read(paths, "exit.json")
    assert (certificate["service_result"], certificate["exit_code"], certificate["exit_status"]) == (
        "signal",
        "killed",
        "KILL",
    )


def test_a_run_that_never_began_gets_its_certificate_too(paths):
    assert end(paths, SERVICE_RESULT="exit-code") == 0
    assert read(paths, "exit.json")["service_result"] == "exit-code"


@pytest.mark.parametrize("argv", [["begin-run"], ["begin-run", "a/b"], ["end-run", "../x"]])
def test_what_is_no_unit_name_is_refused(paths, argv):
    assert ledger.main(argv, {"INVOCATION_ID": RUN}, paths) == ledger.EX_USAGE
    assert not os.path.exists(paths.runs)


@pytest.mark.parametrize("run_id", ["", "../../etc", "A" * 32, "a" * 31])
def test_what_is_no_invocation_id_is_refused(paths, run_id):
    deliver(paths)
    assert begin(paths, run_id) == ledger.EX_USAGE
    assert not os.path.exists(paths.runs)


def test_a_full_disk_is_an_exit_status_and_no_traceback(paths, monkeypatch):
    deliver(paths)

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger.os, "mkdir", full)
    assert begin(paths) == ledger.EX_CANTCREAT


@pytest.mark.parametrize(
    ("cgroup", "path", "text", "kills"),
    [
        ("0::/system.slice/x.service", "system.slice/x.service/memory.events", "low 0\noom 1\noom_kill 3\n", 3),
        ("7:memory:/x\n0::/x", "memory/x/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", 2),
        ("0::/gone", "other/memory.events", "oom_kill 3\n", None),
    ],
)
def test_oom_kills_of_both_versions(tmp_path, cgroup, path, text, kills):
    (tmp_path / "self").write_text(cgroup + "\n")
    target = tmp_path / "cgroup" / path
    target.parent.mkdir(parents=True)
    target.write_text(text)
    assert ledger.oom_kills(str(tmp_path / "self"), str(tmp_path / "cgroup")) == kills


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_torn_file_reads_as_none(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert ledger.read_json(str(path)) is None
