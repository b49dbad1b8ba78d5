# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A verdict as people and programs read it: one sentence, a table, a JSON row, JUnit. Redaction happens before."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Verdict, Wait, number

Row = Mapping[str, Any]

# What a code says, in the words of a colleague; {unit} and a few evidence values are filled in.
WORDS: Mapping[str, str] = {
    "observer_blind": "could not be judged: the observer cannot read {source} ({why})",
    "unit_not_found": "does not exist",
    "unit_invalid": "cannot be loaded",
    "start_refused": "was refused by systemd before any process ran",
    "condition_skipped": "was skipped by systemd: {condition} said no",
    "launcher_self_killed": "was never started: the launcher killed itself",
    "launcher_not_delivered": "was never started: the launcher did not reach the host",
    "launcher_syntax": "was never started: the launcher is no valid script",
    "wrong_process": "is not what the pattern matched",
    "glob_unexpanded": "never wrote the files that were looked for",
    "never_launched": "was never started",
    "previous_run_alive": "was not started anew: an older run is still alive",
    "crash_loop": "crashes again and again",
    "setup_failed": "could not be set up by systemd ({step}, {number})",
    "log_unwritable": "cannot write its log",
    "oom_killed": "ran out of memory",
    "start_timeout": "did not come up in time",
    "runtime_limit": "reached its time limit",
    "watchdog": "stopped sending keep-alives",
    "killed_by_signal": "was killed",
    "core_dumped": "crashed and dumped core",
    "crashed_traceback": "crashed",
    "died_before_log": "died before it wrote a line",
    "exited_nonzero": "failed",
    "completed": "completed its work",
    "exited_early": "ended too early",
    "worker_gone": "lost its workers",
    "restarted_in_window": "died once and was restarted",
    "uninterruptible": "hangs in the kernel",
    "count_mismatch": "is not complete",
    "error_but_alive": "reported a fatal error and lives on",
    "log_misrouted": "writes its output elsewhere",
    "stale_log": "has written nothing; its log is an old one",
    "silent": "has written nothing ({detail})",
    "gpu_not_engaged": "does not use its GPU ({detail})",
    "no_progress_yet": "writes, but makes no progress",
    "stalled": "has stopped making progress",
    "uploads_stalled": "works, but its objects do not arrive",
    "inconclusive": "could not be proved in time",
    "ok_started": "is started",
    "ok_progressing": "is started and progressing",
    "would_start": "would be started",
    "restart_pending": "runs an older configuration; the restart is pending",
    "unreachable": "was not launched: the host is unreachable",
    "preflight_failed": "was not launched: the checks before it failed",
    "provision_failed": "was not launched: its machine could not be prepared",
    "not_reached": "was not launched: the play stopped before",
}


def row(verdict: Verdict, host: str | None = None) -> dict[str, Any]:
    """Return the verdict as a row of the report; ``host`` overrides the verdict's own."""
    return {
        "host": verdict.host if host is None else host,
        "unit": verdict.unit,
        "run_id": verdict.run_id,
        "stage": "launch_proof",
        "code": verdict.code,
        "ok": verdict.ok,
        "seconds": verdict.seconds,
        "remedy": verdict.remedy,
        "evidence": {"decided_in": verdict.stage, **verdict.evidence},
        "also_observed": list(verdict.also_observed),
    }


def sentence(row_: Row) -> str:
    """Return one row as a sentence: what happened, by which evidence, what to do."""
    code, evidence = row_.get("code") or "no code", row_.get("evidence") or {}
    words = WORDS.get(code, "")
    # Values of the evidence that the words ask for; one that is not there costs its parenthesis, not the sentence.
    for name in re.findall(r"\{(\w+)\}", words):
        value = evidence.get(name)
        words = words.replace(f"{{{name}}}", str(value)) if value not in (None, "") else _without(words, name)
    text = f"{row_['unit']} {words} [{code}]" if words else f"{row_['unit']}: {code}"
    facts = _evidence_words(evidence)
    if facts:
        text += f": {facts}"
    text += "."
    remedy = (row_.get("remedy") or "").strip()
    if remedy:
        text += f" Remedy: {remedy}{'' if remedy.endswith(('.', '!', '?')) else '.'}"
    return text


def _without(words: str, name: str) -> str:
    return re.sub(rf"\s*\([^)]*\{{{name}\}}[^)]*\)|:?\s*\{{{name}\}}", "", words)


def _evidence_words(evidence: Mapping[str, Any]) -> str:
    parts: list[str] = []
    cause = evidence.get("cause")
    if isinstance(cause, Mapping) and cause.get("code"):
        parts.append(f"cause {cause['code']}, restarts {evidence.get('restarts', '?')}")
        if evidence.get("gave_up"):
            parts.append("systemd gave up")
        evidence = {**cause, **{key: value for key, value in evidence.items() if key != "cause"}}
    if isinstance(evidence.get("exit"), Mapping):
        lived = evidence["exit"].get("lived_s")
        parts.append(f"{evidence['exit'].get('how')}" + ("" if lived is None else f" after {lived:.1f} s"))
    if isinstance(evidence.get("progress"), Mapping):
        progress = evidence["progress"]
        parts.append(f"progress {number(progress.get('first'))} → {number(progress.get('last'))}")
    if isinstance(evidence.get("match"), Mapping):
        parts.append(f"its log says {evidence['match'].get('line', '').strip()!r}")
    log = evidence.get("log")
    if isinstance(log, Mapping) and "match" not in evidence:
        if log.get("tail"):
            parts.append(f"last line {log['tail'][-1].strip()!r}")
        elif log.get("new_bytes") is not None:
            parts.append(f"{log['new_bytes']} bytes in {log.get('path')}")
    return ", ".join(parts)


def waiting(wait: Wait, now: float, line: str = "") -> str:
    """Return one live line: stage, how much of its time has passed, what is missing, the log's last line."""
    elapsed, allowed = max(0.0, now - wait.stage_began), max(0.0, wait.stage_deadline - wait.stage_began)
    text = f"{wait.unit}: {wait.stage} {elapsed:.0f} of {allowed:.0f} s"
    if wait.missing:
        text += f", {wait.missing[0]}"
    return f"{text} | {line.strip()}" if line.strip() else text


def table(rows: Sequence[Row]) -> str:
    """Return many rows as a table for a terminal, the failed ones explained below it."""
    head = ("HOST", "UNIT", "VERDICT", "CODE", "SECONDS")
    cells = [
        (
            str(item.get("host") or "-"),
            str(item["unit"]),
            "ok" if item.get("ok") else ("-" if item.get("ok") is None else "FAILED"),
            str(item.get("code") or "-"),
            f"{item['seconds']:.1f}" if isinstance(item.get("seconds"), (int, float)) else "-",
        )
        for item in rows
    ]
    widths = [max(len(line[column]) for line in (head, *cells)) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in (head, *cells)]
    failed = [item for item in rows if item.get("ok") is False]
    if failed:
        lines += ["", *(sentence(item) for item in failed)]
    return "\n".join(lines)


def junit(rows: Sequence[Row], name: str = "launch_proof") -> str:
    """Return rows as a JUnit document, one test case a unit."""
    failed = [item for item in rows if not item.get("ok")]
    seconds = sum(item.get("seconds") or 0 for item in rows)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuite name={_attribute(name)} tests="{len(rows)}" failures="{len(failed)}" errors="0" time="{seconds:.3f}">',
    ]
    for item in rows:
        case = f"  <testcase classname={_attribute(item.get('host') or name)} name={_attribute(item['unit'])}"
        case += f' time="{item.get("seconds") or 0:.3f}"'
        if item.get("ok"):
            lines.append(f"{case}/>")
            continue
        text = sentence(item)
        lines.append(f"{case}>")
        lines.append(
            f"    <failure type={_attribute(item.get('code') or 'none')} message={_attribute(text)}>{_text(text)}</failure>"
        )
        lines.append("  </testcase>")
    return "\n".join([*lines, "</testsuite>", ""])


def _printable(text: Any) -> str:
    # XML 1.0 has no way to write most control characters.
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(text))


def _attribute(text: Any) -> str:
    value = _text(text).replace('"', "&quot;").replace("\n", "&#10;").replace("\t", "&#9;").replace("\r", "&#13;")
    return f'"{value}"'


def _text(text: Any) -> str:
    # xml.sax.saxutils would do, and imports urllib and email for it: 20 ms of every start.
    return _printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
