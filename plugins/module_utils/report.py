# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The launch report: one row for every declared job, whatever happened and however early.

Pure: the callback plugin feeds it what a run shows (declared units, failed stages, proven rows) and writes what it
returns. A row says either what launch_proof found, or why the play never came to the launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.dflash.launchproof.plugins.module_utils.gang import judge

SCHEMA = 1

#: The code of a job whose host failed in this stage without a row of launch_proof's: the play never came to it, or it
#: could not look at all (a host without systemd). No failure, or a stage that is not here, gives not_reached.
CODE_OF_STAGE = {
    "preflight": "preflight_failed",
    "local_node": "provision_failed",
    "container": "provision_failed",
    "python_env": "provision_failed",
    "job": "provision_failed",
    "launch_proof": "observer_blind",
}


@dataclass(frozen=True)
class Failure:
    """Why a host left the play.

    host: inventory name. stage: the play's stage. task: name of the failing task. message: its own words.
    unreachable: the connection failed, not the task.
    """

    host: str
    stage: str
    task: str
    message: str
    unreachable: bool = False


@dataclass
class Report:
    """What a run has shown so far; rows() and as_dict() can be asked at any moment.

    check: the run only predicts, so that a job which nothing was seen of is predicted, not missing.
    """

    check: bool = False
    declared: list[tuple[str, str]] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    proven: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    gang_of: dict[tuple[str, str], str] = field(default_factory=dict)

    def declare(self, host: str, unit: str, gang: Optional[str] = None) -> None:
        """A job that this run is meant to prove, and the gang that it belongs to."""
        if (host, unit) not in self.declared:
            self.declared.append((host, unit))
        if gang:
            self.gang_of[host, unit] = gang

    def fail(self, failure: Failure) -> None:
        """A host left the play. The first reason counts: what comes after it is a consequence."""
        self.failures.setdefault(failure.host, failure)

    def prove(self, host: str, rows: list[dict[str, Any]]) -> None:
        """What launch_proof found on a host; the last word on a unit wins."""
        for row in rows:
            unit = str(row.get("unit"))
            self.declare(host, unit)
            self.proven[host, unit] = {**row, "host": host}

    def rows(self) -> list[dict[str, Any]]:
        """One row for each declared unit, proven or not."""
        return [self.proven.get(key) or self._unproven(*key) for key in self.declared]

    def verdict(self) -> str:
        """``failed`` where a row is not ok; else ``predicted`` in check mode, ``ok`` otherwise."""
        if any(row["ok"] is False for row in self.rows()):
            return "failed"
        return "predicted" if self.check else "ok"

    def gangs(self) -> list[dict[str, Any]]:
        """One verdict for each gang, over its members on all hosts."""
        members: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows():
            gang = self.gang_of.get((row["host"], row["unit"]))
            if gang:
                members.setdefault(gang, []).append(row)
        return [judge(gang, rows) for gang, rows in members.items()]

    def as_dict(self) -> dict[str, Any]:
        """The report; ``gangs`` is there where a job belongs to one."""
        found = {"schema": SCHEMA, "verdict": self.verdict(), "jobs": self.rows()}
        return {**found, "gangs": self.gangs()} if self.gang_of else found

    def _cause(self, host: str) -> Optional[Failure]:
        """The failure that kept this host from its launch: its own, or else one of a host that others stand on.

        A deployment ends when the play that brings the local node up fails; the hosts that never had a turn then show
        that failure. One job host's failure says nothing of another.
        """
        if host in self.failures:
            return self.failures[host]
        job_hosts = {name for name, _unit in self.declared}
        return next((failure for name, failure in self.failures.items() if name not in job_hosts), None)

    def _unproven(self, host: str, unit: str) -> dict[str, Any]:
        cause = self._cause(host)
        evidence: dict[str, Any] = {}
        if cause is not None:
            code = "unreachable" if cause.unreachable else CODE_OF_STAGE.get(cause.stage, "not_reached")
            stage, remedy = cause.stage, cause.message
            evidence = {"failed_host": cause.host, "task": cause.task, "message": cause.message}
        elif self.check:
            code, stage, remedy = None, "launch_proof", ""
            evidence = {"not_predicted": "the host is not there yet; its launch can be predicted once it is"}
        else:
            code, stage = "not_reached", "launch_proof"
            remedy = "The play ended before this job's launch was proved; run it again without leaving steps out."
        return {
            "host": host,
            "unit": unit,
            "run_id": None,
            "stage": stage,
            "code": code,
            "ok": code is None,
            "seconds": 0.0,
            "remedy": remedy,
            "evidence": evidence,
            "also_observed": [],
        }
