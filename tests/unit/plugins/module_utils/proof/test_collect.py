# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is read from files that a job writes as it likes. The rest of the collector is shown on real units."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import collect, facts, ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import cgroup, events
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import validate


@pytest.mark.parametrize(
    ("content", "telemetry"),
    [
        (b'{"telemetry": "off: NVML: no library", "step": 3}\n', "off: NVML: no library"),
        (b'{"telemetry": "nvml"}', "nvml"),
        (b'{"telemetry": "%s"}' % (b"x" * 900), "x" * 300),
        (b'{"telemetry": 7}', None),
        (b'{"step": 3}', None),
        (b'["telemetry"]', None),
        (b"", None),
        (b'{"half', None),
        (b"\xff\xfe", None),
        (b"[" * 60000, None),
        (b'{"telemetry": "nvml", "more": "%s"}' % (b"x" * 70000), None),
    ],
)
def test_a_heartbeat_may_say_something_about_telemetry(tmp_path, content, telemetry):
    (tmp_path / "beat").write_bytes(content)
    assert collect.telemetry_of(str(tmp_path / "beat")) == telemetry


def test_a_heartbeat_that_is_no_file_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in ("fifo", "absent", "."):
        assert collect.telemetry_of(str(tmp_path / path)) is None


def test_a_clock_that_steps_makes_no_heartbeat_older_or_younger(tmp_path, monkeypatch):
    path = tmp_path / "beat"
    path.write_text("{}")
    unit = object.__new__(collect.UnitWatch)
    unit.spec = validate({"heartbeat": {"path": str(path), "max_age": 30}})
    unit.run_started_at, unit._beat, unit.redact = ledger.boottime() - 100, (None, 0.0), str
    os.utime(path, (time.time() - 20, time.time() - 20))
    assert 19 < unit._heartbeat().age < 25
    real = time.time
    for step in (3600, -3600):
        monkeypatch.setattr(collect.time, "time", lambda step=step: real() + step)
        assert 19 < unit._heartbeat().age < 25, "the same beat as before"
        os.utime(path, (real() + step, real() + step))
        assert unit._heartbeat().age < 5, "a new one"
        unit._beat = (unit._beat[0], ledger.boottime() - 20)
    monkeypatch.setattr(collect.time, "time", real)
    unit._beat = (None, 0.0)
    os.utime(path, (real() - 500, real() - 500))
    assert unit._heartbeat().age is None, "of the run before"


RUN = "0" * 31 + "1"


def test_the_journal_of_a_namespace_is_another_one():
    assert not any("namespace" in word for word in collect.journal_output(RUN, ""))
    assert "--namespace=x" in collect.journal_output(RUN, "x")


@pytest.mark.parametrize(
    ("lines", "properties", "path", "found"),
    [
        ("", {"StandardError": "inherit", "StandardOutput": "append"}, "/l", {"own_tmp": False}),
        ("StandardOutput=append:/l\n", {"StandardError": "inherit", "StandardOutput": "append"}, "/l", {"own_tmp": False}),
        ("StandardOutput=append:/o\n", {"StandardError": "inherit", "StandardOutput": "append"}, "/l",
         {"errors_at": "/o", "errors_tail": (), "own_tmp": False}),
        ("StandardError=file:/e\n", {"StandardError": "file", "StandardOutput": "append"}, "/l",
         {"errors_at": "/e", "errors_tail": (), "own_tmp": False}),
        ("", {"StandardError": "null"}, "/l", {"errors_at": "/dev/null", "errors_tail": (), "own_tmp": False}),
        ("", {"StandardError": "journal"}, "/l",
         {"errors_at": "the journal (journalctl _SYSTEMD_INVOCATION_ID=%s)" % RUN, "own_tmp": False}),
        ("", {"StandardError": "inherit", "StandardOutput": "journal"}, "journal", {"own_tmp": False}),
        ("StandardOutput=append:/tmp/l\n", {"StandardError": "inherit", "PrivateTmp": True}, "/tmp/l", {"own_tmp": False}),
        ("", {"StandardError": "inherit", "PrivateTmp": True}, "/tmp/l", {"own_tmp": True}),
        ("", {"StandardError": "inherit", "PrivateTmp": False}, "/tmp/l", {"own_tmp": False}),
    ],
)  # fmt: skip
def test_where_else_to_look_for_the_errors_of_a_run_that_wrote_no_log(tmp_path, lines, properties, path, found):
    (tmp_path / "a.service").write_text("[Service]\n" + lines)
    unit = object.__new__(collect.UnitWatch)
    unit.unit, unit.paths, unit.redact, unit.run_started_at = "a.service", ledger.Paths(str(tmp_path)), str, 1.0
    unit.properties, unit.run_id = {"FragmentPath": str(tmp_path / "a.service"), **properties}, RUN
    unit.exits = [facts.Exit(2.0, facts.EXITED, 1, RUN)]
    assert unit._errors(facts.Log(path)) == found
    assert unit._errors(facts.Log(path, new_bytes=1)) == {}, "it wrote"
    unit.exits = []
    assert unit._errors(facts.Log(path)) == {}, "it lives"


PARENT_ENDED = {"ExecStart": [("/bin/d", ["/bin/d"], False, 0, 0, 0, 0, 70, 1, 0)]}
FAILED = facts.UnitState(
    load_state="loaded", active_state="failed", sub_state="failed", type="forking", result="protocol", invocation_id=RUN
)


@pytest.mark.parametrize(
    ("answers", "ends"),
    [
        # The run came and went after systemd had looked at the unit, before its answer was read.
        (
            [
                (replace(FAILED, active_state="inactive", result="success", invocation_id=""), {}),
                (FAILED, PARENT_ENDED),
            ],
            [1],
        ),
        # systemd has forgotten the unit: the certificate is all there is.
        ([(facts.UnitState(), {})] * 2, [0]),
    ],
)
def test_a_certificate_that_does_not_say_how_a_run_ended_waits_for_what_systemd_knows(tmp_path, answers, ends):
    paths = ledger.Paths(str(tmp_path))
    with contextlib.closing(events.Loop()) as loop:
        unit = collect.UnitWatch("a.service", validate({}), loop, cgroup.Groups(), str, paths)
        unit.apply(facts.UnitState(), {}, ledger.boottime())
        unit.take_baseline(False, ledger.boottime())
        with contextlib.suppress(ledger.LedgerError):  # there is no job file: what ran was not delivered
            ledger.begin_run("a.service", RUN, paths)
        ledger.end_run("a.service", RUN, {"SERVICE_RESULT": "protocol"}, paths, oom_kill=0)
        for state, properties in answers:
            assert unit.exits == []
            unit.apply(state, properties, ledger.boottime())
            assert unit.need_show == (not unit.exits), "it is asked again until there is an end"
        unit.close()
    assert [(end.code, end.status, end.result) for end in unit.exits] == [(code, 0, "protocol") for code in ends]
