# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the cases of ``cases.py`` in one container, several at a time, through the real prover."""

from __future__ import annotations

import copy
import shlex

from tests.integration.cases import Case, steps
from tests.support.container import Container

PRELUDE = """
prop() { systemctl show -P "$1" "$UNIT"; }
until_ok() {
  for _ in $(seq 300); do if "$@" >/dev/null 2>&1; then return 0; fi; sleep 0.05; done
  echo "never: $*" >&2; return 1
}
"""
RUNS = "/var/lib/launchproof/runs"
JOB_SERVICE = """\
ExecStartPre=+/usr/local/bin/launchproof begin-run %n
ExecStopPost=+/usr/local/bin/launchproof end-run %n
StandardOutput=append:{out}
StandardError=inherit
"""
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
    style = JOB_SERVICE if case.style == "job" else FOREIGN_SERVICE
    lines = [
        "[Unit]", f"Description={case.induced_by}", case.unit,
        "[Service]", "Type=exec", f"ExecStart={case.exec_start.format(name=case.name)}",
        "Environment=PYTHONUNBUFFERED=1", style.format(out=out).strip(), case.service,
    ]  # fmt: skip
    for name, value in environment(case).items():
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
    spec["process"] = {"stable_for": 1, **spec.get("process", {})}
    if case.style == "foreign" or case.log:
        spec["log"] = {"path": log_path(case), **spec.get("log", {})}
    if case.launcher:
        spec["launcher"] = case.launcher
    return spec


def shell(container: Container, case: Case, text: str, check: bool = True):
    """Run a shell text of a case in the container."""
    names = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment(case).items())
    names += f"export STEPS={shlex.quote(steps())}\n"
    return container.shell(names + PRELUDE + text, check=check)


def deliver(container: Container, cases: list[Case]) -> None:
    """Write the units and programs of all cases, and make systemd read them."""
    container.shell("mkdir -p /var/log/cases /opt/cases /etc/case")
    for case in cases:
        folder = f"/opt/cases/{case.name}"
        container.write(f"{folder}/.keep", "")
        if case.program:
            container.write(f"{folder}/run", case.program, 0o755)
        if text := unit_text(case):
            container.write(f"/etc/systemd/system/{case.unit_name}", text)
        if case.style == "job":
            container.shell(f"mkdir -p {RUNS}/{case.unit_name}/none; ln -sfn none {RUNS}/{case.unit_name}/current")
    container.shell("systemctl daemon-reload")


def clean_up(container: Container, case: Case) -> None:
    """Stop the unit and undo what ``before`` did."""
    shell(container, case, f"systemctl stop $UNIT; systemctl reset-failed $UNIT\n{case.after}", check=False)
