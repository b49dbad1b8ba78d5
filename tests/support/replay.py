# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decides again what a prover has decided, from the decisions.jsonl of its session: without the machine, and with other tables.

    python -m tests.support.replay /var/lib/launchproof/sessions/ID/decisions.jsonl

prints for each verdict what was said then and what this checkout's table says of the same facts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.decide import decide
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Verdict, Wait, from_data
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.render import row, sentence
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import validate
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.table import TABLE, Row


def replay(decision: dict, table: Sequence[Row] = TABLE) -> Verdict | Wait:
    """Decide a recorded decision again."""
    facts = (from_data(decision["baseline"]), from_data(decision["facts"]), validate(decision["spec"]))
    return decide(*facts, decision["now"], table)


def code(answer: Verdict | Wait) -> str | None:
    """The code of an answer, None when it goes on waiting."""
    return answer.code if isinstance(answer, Verdict) else None


def needed_by(decisions: Iterable[tuple[str, dict]], table: Sequence[Row] = TABLE) -> dict[str, list[str]]:
    """For each row, by its codes: the names of the decisions that come out otherwise when the row is deleted."""
    found: dict[str, list[str]] = {" / ".join(item.codes): [] for item in table}
    for name, decision in decisions:
        was = code(replay(decision, table))
        for gone, item in enumerate(table):
            if code(replay(decision, [*table[:gone], *table[gone + 1 :]])) != was:
                found[" / ".join(item.codes)].append(name)
    return found


def main(paths: list[str]) -> int:
    for path in paths:
        for line in Path(path).read_text().splitlines():
            decision = json.loads(line)
            answer = replay(decision)
            now = sentence(row(answer)) if isinstance(answer, Verdict) else f"waits: {', '.join(answer.missing)}"
            print(f"{decision['unit']}: {decision['code']} then, {code(answer)} now: {now}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
