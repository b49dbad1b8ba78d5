# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How verdicts read for people and programs."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Verdict, Wait
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.render import (
    WORDS,
    junit,
    row,
    sentence,
    table,
    waiting,
)
from hypothesis import given
from hypothesis import strategies as st


def verdict(code: str = "exited_nonzero", ok: bool = False, **evidence: Any) -> Verdict:
    remedy = "" if ok else "read /log"
    return Verdict("t.service", code, ok, "ended", 12.0, 1.25, remedy, evidence, ("silent",), "run", "ct901")


def test_row_is_the_reports_schema() -> None:
    assert row(verdict(exit={"how": "exit status 3"})) == {
        "host": "ct901",
        "unit": "t.service",
        "run_id": "run",
        "stage": "launch_proof",
        "code": "exited_nonzero",
        "ok": False,
        "seconds": 1.25,
        "remedy": "read /log",
        "evidence": {"decided_in": "ended", "exit": {"how": "exit status 3"}},
        "also_observed": ["silent"],
    }
    assert row(verdict(), host="other")["host"] == "other"


def test_sentence_says_what_by_which_evidence_and_what_to_do() -> None:
    failed = row(
        verdict(
            exit={"how": "exit status 3", "lived_s": 0.4},
            log={"path": "/log", "new_bytes": 9, "tail": ["a", "no data "]},
        )
    )
    assert (
        sentence(failed)
        == "t.service failed [exited_nonzero]: exit status 3 after 0.4 s, last line 'no data'. Remedy: read /log."
    )
    loop = row(
        verdict(
            "crash_loop", restarts=2, gave_up=True, cause={"code": "setup_failed", "exit": {"how": "exit status 203"}}
        )
    )
    assert sentence(loop).startswith(
        "t.service crashes again and again [crash_loop]: cause setup_failed, restarts 2, systemd gave up, exit status 203. "
    )
    assert sentence(row(verdict("silent", detail="buffered"))).startswith(
        "t.service has written nothing (buffered) [silent]."
    )
    large = row(verdict("stalled", progress={"first": "warm-up", "last": 1234567.0}))
    assert "progress warm-up → 1234567." in sentence(large)
    good = row(verdict("ok_progressing", True, progress={"first": 1.0, "last": 12.0}))
    assert sentence(good) == "t.service is started and progressing [ok_progressing]: progress 1 → 12."


def test_a_row_without_evidence_still_reads() -> None:
    for code in WORDS:
        text = sentence({"unit": "t.service", "code": code, "ok": False})
        assert text.startswith("t.service ") and text.endswith(f"[{code}].") and "{" not in text, text
    assert sentence({"unit": "t.service", "code": "new_code"}) == "t.service: new_code."


def test_table() -> None:
    lines = table(
        [row(verdict("ok_started", True)), row(verdict()), {"unit": "x.service", "code": None, "ok": None}]
    ).splitlines()
    assert lines[0].split() == ["HOST", "UNIT", "VERDICT", "CODE", "SECONDS"]
    assert lines[1].split() == ["ct901", "t.service", "ok", "ok_started", "1.2"]
    assert lines[2].split() == ["ct901", "t.service", "FAILED", "exited_nonzero", "1.2"]
    assert lines[3].split() == ["-", "x.service", "-", "-", "-"]
    assert lines[5] == sentence(row(verdict()))
    assert len({line.index("t.service") for line in lines[1:3]}) == 1


def test_live_line() -> None:
    wait = Wait("t.service", "first_log", 60.0, 60.0, 0.0, ("nothing written to /log yet",))
    assert waiting(wait, 12.3) == "t.service: first_log 12 of 60 s, nothing written to /log yet"
    assert waiting(wait, 12.3, " loading \n").endswith(" | loading")


@given(st.text(), st.text())
def test_junit_is_xml_whatever_the_text(line: str, unit: str) -> None:
    bad = {**row(verdict(log={"path": "/l", "tail": [line], "new_bytes": 1})), "unit": unit}
    suite = ET.fromstring(junit([bad, row(verdict("ok_started", True))]))
    assert suite.attrib["tests"] == "2" and suite.attrib["failures"] == "1"
    cases = suite.findall("testcase")
    assert [len(case.findall("failure")) for case in cases] == [1, 0]
    assert cases[0].find("failure").attrib["type"] == "exited_nonzero"
