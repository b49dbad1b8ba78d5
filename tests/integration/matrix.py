# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the cases of ``cases.py`` in one container, several at a time, through the real prover."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.cases import Case, steps
from tests.support.container import SUITE, Container

PRELUDE = """
systemctl() {  # a question is asked again while systemd re-executes itself, which one of the cases makes it do
  case $1 in show | status | is-*) ;; *) command systemctl "$@"; return ;; esac
  for _ in $(seq 25); do
    said=$(command systemctl "$@" 2>&1); rc=$?
    case $said in *"message bus"* | *"not connected"* | *"reset by peer"*) sleep 0.2 ;; *) break ;; esac
  done
  printf '%s' "${said:+$said
}"; return $rc
}
prop() { systemctl show -P "$1" "$UNIT"; }
died_with() {
  [ "$(prop ExecMainStatus)" = "$1" ] || prop ExecStartPre | grep -q "status=$1 " || journalctl -q -u $UNIT | grep -q "status=$1/"
}
restarted() { [ "$(prop NRestarts)" -ge "$1" ]; }
until_ok() {
  for _ in $(seq 300); do if "$@" >/dev/null 2>&1; then return 0; fi; sleep 0.05; done
  echo "never: $*" >&2; return 1
}
"""
RUNS = "/var/lib/launchproof/runs"
SESSIONS = "/var/lib/launchproof/sessions"
# Provers at a time. More only make each other slow: a machine with two cores is kept busy by these.
AT_ONCE = int(os.environ.get("LAUNCHPROOF_AT_ONCE", "10"))
STATES = {"start": "restarted", "prove": "awaited", "observe": "observed"}
JOB_SERVICE = """\
ExecStartPre=+/usr/local/bin/launchproof begin-run %n
ExecStopPost=+/usr/local/bin/launchproof end-run %n
StandardOutput=append:{out}
StandardError=inherit
"""
JOURNAL_SERVICE = "StandardOutput=journal\n"
FOREIGN_SERVICE = """\
StandardOutput=append:{out}
StandardError=inherit
"""


def output_path(case: Case) -> str:
    """Where systemd sends the unit's output."""
    if case.style == "job":
        return f"{RUNS}/{case.unit_name}/current/log"
    return case.log or f"/var/log/cases/{case.name}.log"


def log_path(case: Case) -> str:
    """The log that the proof reads."""
    return case.log or output_path(case)


def unit_text(case: Case) -> str:
    """The unit file of a case, "" when it has none."""
    if case.unit_text is not None:
        return case.unit_text
    out = output_path(case)
    style = {"job": JOB_SERVICE, "foreign": FOREIGN_SERVICE, "journal": JOURNAL_SERVICE}[case.style]
    lines = [
        "[Unit]", f"Description={case.induced_by}", case.unit,
        "[Service]", f"Type={'simple' if case.style == 'job' else 'exec'}", f"ExecStart={case.exec_start.format(name=case.name)}",
        "Environment=PYTHONUNBUFFERED=1", style.format(out=out).strip(), case.service,
    ]  # fmt: skip
    for name, value in {**environment(case), **case.env}.items():
        lines.insert(-1, f"Environment={name}={value}")
    return "\n".join(line for line in lines if line) + "\n"


def environment(case: Case) -> dict[str, str]:
    """What a case's programs and shell texts may name."""
    return {
        "UNIT": case.unit_name, "NAME": case.name, "DIR": f"/opt/cases/{case.name}", "LOG": log_path(case),
        "OUT": output_path(case),
    }  # fmt: skip


def proof(case: Case) -> dict:
    """The proof spec of a case: short where the case does not say otherwise, so that the matrix is quick."""
    spec = copy.deepcopy(case.proof)
    # What is about to die has to be given the time: on a busy machine Python alone takes a second to start.
    spec["process"] = {"stable_for": 1 if case.healthy else 4, **spec.get("process", {})}
    if case.style == "foreign" or case.log:
        spec["log"] = {"path": log_path(case), **spec.get("log", {})}
    if case.launcher:
        spec["launcher"] = case.launcher
    return spec


def job_file(case: Case) -> dict:
    """What role job delivers beside a unit, for begin-run."""
    return {
        "schema": 1,
        "unit": case.unit_name,
        "job": case.unit_name.removesuffix(".service"),
        "digest": "0" * 64,
        "argv": [case.exec_start.format(name=case.name)],
        "env": case.env,
        "user": "root",
        "runs": f"{RUNS}/{case.unit_name}",
        "log": log_path(case),
        "proof": proof(case),
        "secrets_file": f"/etc/launchproof/secrets/{case.unit_name}.env" if case.secrets else None,
    }


def shell(container: Container, case: Case, text: str, check: bool = True):
    """Run a shell text of a case in the container."""
    names = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment(case).items())
    names += f"export STEPS={shlex.quote(steps())}\n"
    return container.shell(names + PRELUDE + text, check=check)


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    case: Case
    got: str | None  # the code; None when the prover gave no verdict at all
    row: dict = field(default_factory=dict)  # the whole row
    faulty: str = ""  # why the case itself is broken: its fact did not hold, or a shell text failed
    said: str = ""  # what the prover printed besides
    decision: dict = field(default_factory=dict)  # what decided: a line of the session's decisions.jsonl

    def as_row(self) -> dict:
        """The row of artifacts/matrix.json; ms is from the start (or the baseline) to the verdict."""
        return {
            "case": self.case.name,
            "induced_by": self.case.induced_by,
            "expected": self.case.expected,
            "got": self.got,
            "ms": round(1000 * self.row.get("seconds", 0)),
            "run_id": self.row.get("run_id"),
        }


def find_program(name: str) -> str | None:
    """Path of a program of the tests' own environment, or of this machine."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def deliver(container: Container, cases: Iterable[Case]) -> None:
    """Install the prover, write the units and programs of all cases, and make systemd read them."""
    container.shell("mkdir -p /var/log/cases /opt/cases /etc/case")
    container.install()
    for program in {case.needs for case in cases} - {""}:
        container.write(f"/usr/local/bin/{program}", Path(find_program(program)).read_bytes(), 0o755)
    for case in cases:
        folder = f"/opt/cases/{case.name}"
        container.write(f"{folder}/proof.json", json.dumps(proof(case)))
        if case.program:
            container.write(f"{folder}/run", case.program, 0o755)
        for name, text in {case.unit_name: unit_text(case), **case.units}.items():
            if text:
                container.write(f"/etc/systemd/system/{name}", text)
        if case.style == "job":
            container.write(f"/etc/launchproof/jobs/{case.unit_name}.json", json.dumps(job_file(case)))
            if case.secrets:
                lines = "".join(f'{name}="{value}"\n' for name, value in case.secrets.items())
                container.write(f"/etc/launchproof/secrets/{case.unit_name}.env", lines, 0o600)
            container.write(f"{RUNS}/{case.unit_name}/none/log", "")
            container.path(f"{RUNS}/{case.unit_name}/current").symlink_to("none")
    container.shell("systemctl daemon-reload")


def clean_up(container: Container, case: Case) -> None:
    """Undo what the case did and stop its unit. In this order: a frozen process cannot be stopped."""
    shell(container, case, f"{case.after}\nsystemctl stop $UNIT; systemctl reset-failed $UNIT", check=False)


def command(case: Case) -> list[str]:
    """The command line that judges the case."""
    if case.mode == "diagnose":
        # In a shell, as people type it: its command line holds the pattern too.
        words = f"launchproof diagnose --json --timeout {case.timeout} {case.unit_name} {case.arguments}; exit $?"
        return ["bash", "-c", words.replace("$DIR", f"/opt/cases/{case.name}")]
    argv = ["launchproof", "prove", "--json", "--quiet", "--state", STATES[case.mode], case.unit_name]
    return [*argv, "--proof", f"/opt/cases/{case.name}/proof.json", "--timeout", str(case.timeout)]


def last_decision(container: Container, case: Case) -> dict:
    """What the newest verdict on the case's unit was decided by; {} where none was kept."""
    found = {}
    for path in sorted(container.path(SESSIONS).glob("*/decisions.jsonl")):
        with contextlib.suppress(FileNotFoundError):  # old sessions are pruned
            for line in path.read_text().splitlines():
                if f'"{case.unit_name}"' in line and (decision := json.loads(line))["unit"] == case.unit_name:
                    found = decision
    return found


def run(container: Container, case: Case) -> Outcome:
    """Induce one case and return what the prover made of it."""
    try:
        shell(container, case, case.before)
        during = case.during
        if case.mode == "prove":
            # Armed, and the baseline taken: what comes now is what the prover is to see.
            armed = f"""
session_armed() {{
  request=$(grep -lF "\\"$UNIT\\"" {SESSIONS}/*/request.json) && test -e "${{request%request.json}}baseline.json"
}}
until_ok session_armed
"""
            during = armed + case.during
        with ThreadPoolExecutor(1) as beside:
            doing = beside.submit(shell, container, case, during, check=False)
            proved = container.run(*command(case), check=False, timeout=case.timeout + 60)
            acted = doing.result()
        try:
            row = json.loads(proved.stdout)
            (row,) = row.get("jobs", [row])
        except (ValueError, KeyError):
            return Outcome(case, None, said=proved.stdout + proved.stderr)
        fact = shell(container, case, case.fact, check=False)
        faulty = ""
        if fact.returncode:
            state = shell(
                container, case, "systemctl status --no-pager $UNIT; tail -n 5 $LOG | cut -c1-200", check=False
            )
            faulty = f"its fact does not hold: {case.fact}\n{fact.stdout}{fact.stderr}{state.stdout}"
        if acted.stderr.startswith("never: "):
            faulty += f"\nduring: {acted.stderr}"
        return Outcome(case, row["code"], row, faulty, proved.stderr, last_decision(container, case))
    except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Outcome(case, None, faulty=str(error))
    finally:
        clean_up(container, case)


def run_all(cases: list[Case], name: str = "lpt-matrix", prepare: str = "", suite: str = SUITE) -> Iterator[Outcome]:
    """Run the cases in one container, AT_ONCE at a time and then those that want to be alone; yields each outcome.

    ``prepare`` is a shell text for the machine itself, run before anything else; ``suite`` its Debian release.
    """
    with Container(name, suite=suite, network=False) as container, ThreadPoolExecutor(AT_ONCE) as pool:
        container.shell(prepare)
        deliver(container, cases)
        alone = [case for case in cases if case.alone]
        yield from pool.map(lambda case: run(container, case), [case for case in cases if not case.alone])
        yield from (run(container, case) for case in alone)
