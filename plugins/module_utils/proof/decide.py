# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision: baseline, facts, spec and the time give a verdict, or say what is still missing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Baseline, Facts, Verdict, Wait
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import Spec
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.table import TABLE, Finding, Row
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.view import View


def decide(baseline: Baseline, facts: Facts, spec: Spec, now: float, table: Sequence[Row] = TABLE) -> Verdict | Wait:
    """Return the verdict on one unit, or what it waits for.

    ``now`` is CLOCK_BOOTTIME in seconds, never earlier than ``facts.at``. Total and deterministic: the first row of the table that
    holds and may speak decides.
    """
    view = View(baseline, facts, spec)
    found = [(row, finding) for row in table if row.check for finding in [row.check(view)] if finding]
    speaking = [(row, finding) for row, finding in found if finding.since <= now]
    if not speaking:
        return _wait(view, [finding for _row, finding in found], now)
    row, finding = speaking[0]
    # No success beside a failure: it only means that nothing else is missing.
    also = [
        other.code
        for its, other in speaking[1:]
        if other.code not in (finding.code, "inconclusive") and (not its.ok or other.code == "completed")
    ]
    return Verdict(
        unit=facts.unit,
        code=finding.code,
        ok=row.ok,
        stage=_stage(view, now) if not row.ok else ("ended" if finding.code == "completed" else "proved"),
        at=now,
        seconds=round(max(0.0, now - baseline.taken_at), 3),
        remedy=finding.remedy,
        evidence={**finding.evidence, **view.telemetry_evidence(), **view.gpu_evidence()},
        also_observed=tuple(dict.fromkeys(also)),
        run_id=facts.run_id,
        host=facts.host,
    )


def _stage(view: View, now: float) -> str:
    if view.exit is not None:
        return "ended"
    if view.missing:
        return view.missing[0][0]
    return "stable" if now < view.stable_at else "proved"


def _wait(view: View, findings: list[Finding], now: float) -> Wait:
    stage = _stage(view, now)
    ends = {
        "starting": view.start_deadline if view.new_run else view.launch_deadline,
        "stable": view.start_deadline if view.missing else view.stable_at,
        "first_log": view.first_log_deadline,
        "gpu": view.began + view.spec.gpu_within,
        "first_progress": view.first_progress_deadline,
        "progress": view.pace_deadline,
        "objects": view.objects_deadline if view.spec.objects else view.total_deadline,
        "ended": view.death,
    }
    later = [finding.since for finding in findings if now < finding.since < float("inf")]
    # Nothing holds and nothing will by time alone: look again at the hard end, or after a while.
    deadline = min([*later, *([view.total_deadline] if view.total_deadline > now else [])], default=now + 60.0)
    missing = [text for _when, text in view.missing]
    if not missing:
        missing = [f"the main process has not lived for {view.spec.process.stable_for:g} s yet"]
    stage_deadline = ends.get(stage, view.total_deadline)
    if stage_deadline <= now:  # passed rightly (a unit may be activating for long): what counts now is the next one
        stage_deadline = deadline
    began = view.progress.changed_at if stage == "progress" and view.progress else view.began
    return Wait(
        unit=view.unit,
        stage=stage,
        deadline=deadline,
        stage_deadline=stage_deadline if abs(stage_deadline) != float("inf") else view.total_deadline,
        stage_began=began,
        missing=tuple(missing),
        noticed=tuple(
            dict.fromkeys(
                finding.code
                for finding in findings
                if finding.code not in ("inconclusive", "ok_started", "ok_progressing")
            )
        ),
    )
