# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One verdict over a gang: units on several hosts of which none works without the others, such as the ranks of a training.

When one member dies, the others wait for it, or complain that it went away. Their own rows are right (stalled, a traceback
of a lost connection) and point away from the cause. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

Row = Mapping[str, Any]

#: Codes of a member that lives and does not advance: it may be the one that is waited for, or one that waits.
WAITING = frozenset(("no_progress_yet", "stalled", "silent", "inconclusive", "uninterruptible", "uploads_stalled"))

#: What a member says when another has gone: gloo, NCCL, torch's store and its elastic rendezvous (PyTorch 2.x).
PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Socket closed|ncclRemoteError|remote process exited"
    r"|NCCL.{0,80}(?:timed? ?out|abort)|Watchdog caught collective operation timeout|Timed out waiting .{0,40}for (?:recv|send)"
    r"|reason=(?:peer_lost|peer_stopped|rendezvous_incomplete)"
    r"|DistStoreError|DistNetworkError|Rendezvous(?:Timeout|Connection|Closed|Graceful)\w*|TCPStore",
    re.IGNORECASE,
)

#: What a member says that does not come to the place where all meet.
UNREACHED = re.compile(r"reason=rendezvous_unreachable|trying to connect to|RendezvousConnectionError")

#: EX_UNAVAILABLE of sysexits(3): something outside was not there. A row of a run that was started again has no more than this.
UNAVAILABLE = 69


def judge(gang: str, rows: Sequence[Row]) -> dict[str, Any]:
    """What holds a gang up.

    Args:
        gang: its name.
        rows: the report's rows of all its members.

    Returns:
        C(gang), C(ok), C(held_up_by) and C(waiting) (members as C(host), C(unit), C(code)), and C(sentence) for people.
        Where no member stands out, C(held_up_by) is empty.
    """
    failed = [row for row in rows if row["ok"] is False]
    about_others = {
        id(row): bool(PEER_LOST.search(_said(row)) or UNREACHED.search(_said(row)) or _status(row) == UNAVAILABLE)
        for row in failed
    }
    causes = [row for row in failed if row["code"] not in WAITING and not about_others[id(row)]]
    apart = [row for row in failed if UNREACHED.search(_said(row))]
    why = ""
    if not causes and apart:
        # Where only one is left, it is the one that nobody reaches.
        rest = [row for row in rows if row not in apart]
        alone = len(rest) == 1 and len(apart) > 1
        causes = rest if alone else apart
        why = (
            ", which the others do not reach" if alone else ", which does not reach the rendezvous that others wait at"
        )
    if not causes:
        causes = _furthest_back(failed)
    waiting = [row for row in failed if row not in causes]
    return {
        "gang": gang,
        "ok": not failed,
        "held_up_by": list(map(_member, causes)),
        "waiting": list(map(_member, waiting)),
        "sentence": f"Gang {gang}, {len(rows)} members on {_hosts(rows)}: {_what(causes, waiting, failed, why)}",
    }


def _said(row: Row) -> str:
    """The member's own last words."""
    evidence = row.get("evidence") or {}
    said = [evidence.get("match"), (evidence.get("log") or {}).get("tail"), (evidence.get("cause") or {})]
    return json.dumps(said, ensure_ascii=False, default=str)


def _status(row: Row) -> Optional[int]:
    """The exit status of a member that has ended, None where it has none."""
    evidence = row.get("evidence") or {}
    return ((evidence.get("cause") or evidence).get("exit") or {}).get("status")


def _step(row: Row) -> Optional[float]:
    """How far a member came, None where it never advanced."""
    return ((row.get("evidence") or {}).get("progress") or {}).get("last")


def _furthest_back(failed: Sequence[Row]) -> list[Row]:
    """Of members that all live, or all complain about others: those that came less far than the rest."""
    steps = {id(row): _step(row) for row in failed}
    least = min((-1.0 if step is None else step for step in steps.values()), default=None)
    behind = [row for row in failed if (-1.0 if steps[id(row)] is None else steps[id(row)]) == least]
    return behind if len(behind) < len(failed) else []


def _member(row: Row) -> dict[str, Any]:
    return {"host": row["host"], "unit": row["unit"], "code": row["code"]}


def _hosts(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(str(row["host"]) for row in rows))


def _named(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row['unit']} on {row['host']} [{row['code']}]" for row in rows)


def _what(causes: Sequence[Row], waiting: Sequence[Row], failed: Sequence[Row], why: str) -> str:
    if not failed:
        return "all are well."
    if not causes:
        return (
            f"{_named(failed)}; none is behind the others, so look at what is between them: network, ports, rendezvous."
        )
    words = f"held up by {_named(causes)}{why}"
    rest = [row for row in causes if row["code"] in WAITING]
    if rest and not why:
        words += (
            f", which came no further than step {_step(rest[0]):g}"
            if _step(rest[0]) is not None
            else ", which never took a step"
        )
    return f"{words}; {_hosts(waiting)} only {'wait' if len(waiting) != 1 else 'waits'}." if waiting else f"{words}."
