# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small chart as inline SVG, which says in words what it shows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, EDGE = 240, 56, 2


def clock(at: float, span_s: float) -> str:
    """``14:05`` in UTC; with seconds where the chart's whole span is short, with the date where it is long."""
    form = "%H:%M:%S" if span_s < 600 else "%H:%M" if span_s < 86400 else "%m-%d %H:%M"
    return time.strftime(form, time.gmtime(at))


def chart(
    what: str, times: Sequence[float], values: Sequence[float], top: float | None = None, steps: bool = False
) -> str:
    """A line over its own time; an empty string for less than two points.

    The scale begins at the least value, or at 0 where ``top`` gives its end.  ``steps``: the value stays until the next.
    """
    if len(times) < 2 or times[-1] <= times[0]:
        return ""
    low, high = (0.0, max(top, *values)) if top is not None else (min(values), max(values))
    width, height = WIDTH - 2 * EDGE, HEIGHT - 2 * EDGE

    def point(at: float, value: float) -> str:
        x = EDGE + width * (at - times[0]) / (times[-1] - times[0])
        y = EDGE + height * (1 - ((value - low) / (high - low) if high > low else 0.5))
        return f"{x:.1f},{y:.1f}"

    points = [point(times[0], values[0])]
    for n in range(1, len(times)):
        if steps:
            points.append(point(times[n], values[n - 1]))
        points.append(point(times[n], values[n]))
    bottom = f"{HEIGHT - EDGE}"
    begin, end = (clock(at, times[-1] - times[0]) for at in (times[0], times[-1]))
    words = (
        f"{what}: {values[0]:,g} at {begin}, {values[-1]:,g} at {end} UTC, "
        f"least {min(values):,g}, most {max(values):,g}"
    )
    return (
        f'<figure class="chart"><svg role="img" aria-label="{escape(words)}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'preserveAspectRatio="none"><polygon points="{EDGE},{bottom} {" ".join(points)} {WIDTH - EDGE},{bottom}"/>'
        f'<polyline points="{" ".join(points)}"/></svg><figcaption aria-hidden="true"><span>{begin}</span>'
        f"<span>{end} UTC</span></figcaption></figure>"
    )
