# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A measured value with its peer and its target, as a table, as JSON and as a page. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class Unmeasured(Exception):
    """Something could not be measured; the text says what and why."""


@dataclass(frozen=True)
class Row:
    """One measured value.

    ``ours`` and ``peer`` are in ``unit``; lower is better. ``at_most`` bounds ``ours``, or with ``bounds="ratio"`` the
    ratio of ours to the peer's. A missed ``hard`` target fails the run: those are the ones that a busy machine does not
    change.
    """

    name: str
    ours: float
    unit: str
    peer: float | None = None
    peer_name: str = ""
    at_most: float | None = None
    bounds: str = "ours"
    hard: bool = False

    @property
    def ratio(self) -> float | None:
        """Ours divided by the peer's; None where there is nothing to divide by."""
        return self.ours / self.peer if self.peer else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.at_most is None:
            return None
        value = self.ours if self.bounds == "ours" else self.ratio
        return value is not None and value <= self.at_most

    @property
    def target(self) -> str | None:
        """The target in words; None without one."""
        if self.at_most is None:
            return None
        what = f"≤ {number(self.at_most)} {self.unit}" if self.bounds == "ours" else f"ratio ≤ {number(self.at_most)}"
        return what + (", hard" if self.hard else "")

    def data(self) -> dict:
        """The row of artifacts/bench.json."""
        return {
            "name": self.name,
            "ours": round(self.ours, 4),
            "peer": None if self.peer is None else round(self.peer, 4),
            "unit": self.unit,
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "target": self.target,
            "met": self.met,
        }


def number(value: float) -> str:
    """A number as people read it: three significant digits, thousands kept whole."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.3g}"


HEAD = ("what", "ours", "peer", "unit", "ratio", "target", "met")
_MET = {True: "yes", False: "NO", None: ""}


def cells(row: Row) -> tuple[str, ...]:
    """The row's texts, one for each column of HEAD."""
    peer = "" if row.peer is None else f"{number(row.peer)} ({row.peer_name})"
    ratio = "" if row.ratio is None else number(row.ratio)
    return row.name, number(row.ours), peer, row.unit, ratio, row.target or "", _MET[row.met]


def table(rows: Sequence[Row]) -> str:
    """The rows for a terminal."""
    lines = [HEAD, *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in lines)


def page(groups: Sequence[tuple[str, str, Sequence[Row]]], machine: str) -> str:
    """docs/benchmarks.md: (title, method, rows) of each group, measured on ``machine``."""
    parts = [
        "<!-- Written by ./bench --docs: run that instead of editing this. -->",
        "# Benchmarks",
        "`./bench` measures what the collection costs and, in the same run on the same machine, what its peers cost. Times are\n"
        "medians unless a row says otherwise. A target that is marked hard fails the run when it is missed; the others depend on\n"
        "how busy the machine is. `./bench GROUP…` measures the named groups alone: "
        + ", ".join(f"`{title}`" for title, _method, _rows in groups)
        + ".",
        f"Measured on {machine}.",
    ]
    for title, method, rows in groups:
        parts += [f"## {title}", method.strip(), markdown(rows)]
    return "\n\n".join(parts) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [HEAD, ("---",) * len(HEAD), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def status(rows: Sequence[Row], failures: Sequence[str]) -> int:
    """The exit status: 2 when something could not be measured, 1 when a hard target was missed, else 0."""
    if failures:
        return 2
    return 1 if any(row.hard and row.met is False for row in rows) else 0
