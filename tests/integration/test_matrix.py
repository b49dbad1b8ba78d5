# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fault matrix: every case of ``cases.py`` for real in one container, and what the prover called it.

``python -m pytest tests/integration/test_matrix.py`` runs them all, several at a time, and writes artifacts/matrix.json and
artifacts/matrix-decisions.jsonl, what each was decided by; ``-k NAME`` runs some and writes nothing.
"""

from __future__ import annotations

import json

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.table import TABLE

from tests.integration.cases import CASES, PEERS
from tests.integration.matrix import find_program, run_all
from tests.support.container import REPO, SUITE, SUITES, Container, can_make
from tests.support.replay import code, needed_by, replay

pytestmark = pytest.mark.container
ARTIFACTS = REPO / "artifacts"
# Some need a program that ./test installs and that a machine without a network may lack.
POSSIBLE = [case for case in CASES if not case.needs or find_program(case.needs)]


@pytest.fixture(scope="module")
def outcomes(request):
    """Outcomes by case, of the cases that this run of pytest has collected."""
    names = {item.callspec.params["case"].name for item in request.session.items if hasattr(item, "callspec")
             and "case" in item.callspec.params}  # fmt: skip
    chosen = [case for case in POSSIBLE if case.name in names]
    found = {outcome.case.name: outcome for outcome in run_all(chosen)}
    if chosen == POSSIBLE:
        ARTIFACTS.mkdir(exist_ok=True)
        rows = [outcome.as_row() for outcome in found.values()]
        (ARTIFACTS / "matrix.json").write_text(json.dumps(rows, indent=1) + "\n")
        decisions = [{"case": name, **outcome.decision} for name, outcome in found.items()]
        (ARTIFACTS / "matrix-decisions.jsonl").write_text("".join(json.dumps(item) + "\n" for item in decisions))
    return found


def judge(outcome):
    """Fail unless the case came out as declared, with its evidence, its nested cause and a remedy."""
    case = outcome.case
    facts = json.dumps(outcome.row, indent=1, sort_keys=True) + "\n" + outcome.said
    assert not outcome.faulty, f"the case itself is broken: {outcome.faulty}\n{facts}"
    assert outcome.got == case.expected, f"{case.induced_by}\n{facts}"
    assert outcome.row["ok"] is case.healthy
    told = json.dumps(outcome.row["evidence"]) + (outcome.row["remedy"] or "")
    for text in case.evidence:
        assert text in told, facts
    if case.nested:
        assert outcome.row["evidence"]["cause"]["code"] == case.nested, facts
    if not case.healthy:
        assert outcome.row["remedy"], facts
    for secret in case.secrets.values():
        assert secret not in facts + json.dumps(outcome.decision), "a secret was said"


def param(case):
    marks = [pytest.mark.peers(*PEERS[case.name])] if case.name in PEERS else []
    if case.needs:
        marks.append(pytest.mark.skipif(case not in POSSIBLE, reason=f"there is no {case.needs}"))
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [param(case) for case in CASES])
def test_case(outcomes, case):
    judge(outcomes[case.name])


def test_every_code_of_the_table_is_induced_and_names_are_unique():
    codes = {code for row in TABLE for code in row.codes}
    assert codes == {case.expected for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_row_of_the_table_is_needed_by_a_case(outcomes, capsys):
    """Each case is decided again from what it was decided by, with each row of the table deleted in turn."""
    if len(outcomes) < len(POSSIBLE):
        pytest.skip("only the whole matrix can tell")
    decisions = [(name, outcome.decision) for name, outcome in outcomes.items()]
    again = {name: code(replay(decision)) for name, decision in decisions}
    assert again == {name: outcome.got for name, outcome in outcomes.items()}
    needed = needed_by(decisions)
    with capsys.disabled():
        print(
            f"\n{sum(map(bool, needed.values()))} of {len(needed)} rows of the table are needed by a case of the matrix"
        )
    assert [row for row, names in needed.items() if not names] == []


# The cases that the journal could help with, and a few of each other kind.
WITHOUT_JOURNAL = """
    condition-path assert-path exec-condition no-environment-file failed-dependency no-folder no-program no-user
    sigkill sighup oom oom-wrapped traceback silent-exit usage daemonised loop-gave-up h-steps h-completed h-completed-at-once
"""
STOP_JOURNALD = """
set -e
for unit in systemd-journald.socket systemd-journald-dev-log.socket systemd-journald-audit.socket systemd-journald.service; do
  ln -s /dev/null /run/systemd/system/$unit
done
systemctl daemon-reload
systemctl stop 'systemd-journald*'
rm -rf /run/log/journal /var/log/journal
"""


def all_are_right(cases, name, **more):
    """Run cases in a container of their own; every one that is wrong is named."""
    wrong = []
    for outcome in run_all(cases, name, **more):
        try:
            judge(outcome)
        except AssertionError as error:
            wrong.append(f"{outcome.case.name}: {error}")
    assert not wrong, "\n\n".join(wrong)


def named(names):
    """The cases of these names."""
    found = [case for case in CASES if case.name in names.split()]
    assert len(found) == len(names.split())
    return found


def test_without_a_journal_the_names_are_the_same():
    all_are_right(named(WITHOUT_JOURNAL), "lpt-no-journal", prepare=STOP_JOURNALD)


OTHER_SUITES = [
    pytest.param(
        suite,
        marks=pytest.mark.skipif(not can_make(suite), reason=f"there is neither a template of {suite} nor mmdebstrap"),
    )
    for suite in SUITES
    if suite != SUITE
]
# What systemd's versions could differ in: answers of a start, properties, jobs, the journal, control groups.
ON_OTHER_SUITES = """
    no-unit masked no-environment-file failed-dependency pre-command-fails condition-path exec-condition loop-gave-up no-program no-user
    oom time-limit sighup core traceback daemonised no-child worker-zombie one-restart silent-exit
    h-steps h-completed h-forking h-oneshot-long h-operator-restart h-journal h-delegated h-daemon-reexec
"""


@pytest.mark.parametrize("suite", OTHER_SUITES)
def test_other_versions_of_systemd(suite):
    all_are_right(named(ON_OTHER_SUITES), f"lpt-{suite}", suite=suite)


@pytest.mark.long
@pytest.mark.parametrize("suite", OTHER_SUITES)
def test_the_whole_matrix_with_other_versions_of_systemd(suite):
    all_are_right(POSSIBLE, f"lpt-{suite}", suite=suite)


def test_sixty_four_shards_are_proved_in_one_call_by_one_prover():
    shard = """[Service]
Type=exec
ExecStart=/bin/sh -c 'for i in $(seq 999); do echo ev=step step=$$i; sleep 1; done'
StandardOutput=append:/var/log/shard-%i.log
"""
    units = [f"shard@{number}.service" for number in range(64)]
    with Container("lpt-many", network=False) as container:
        container.install()
        container.write("/etc/systemd/system/shard@.service", shard)
        spec = {"process": {"stable_for": 1}, "progress": {"pattern": r"step=(?P<step>\d+)", "within": 20}}
        container.write("/tmp/proof.json", json.dumps(spec))
        container.shell("systemctl daemon-reload")
        done = container.run(
            "launchproof", "prove", "--json", "--quiet", "--state", "started", "--proof", "/tmp/proof.json", *units,
            check=False, timeout=90,
        )  # fmt: skip
        rows = json.loads(done.stdout)["jobs"]
        assert {row["unit"]: row["code"] for row in rows} == dict.fromkeys(units, "ok_progressing")
        sessions = list(container.path("/var/lib/launchproof/sessions").iterdir())
        assert len(sessions) == 1
        assert container.run("systemctl", "is-active", *units).stdout.split() == ["active"] * len(units)
