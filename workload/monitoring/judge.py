# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the facts mean: the state of each unit, and what is to be looked after; pure, but for the series that it keeps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from monitoring.history import Ages, Series
from monitoring.objects import Listing
from monitoring.units import Unit

# A job is slow when it needs this many times its own usual time for a step, and that is longer than a few looks.
SLOW = 3.0
SLOW_AFTER_LOOKS = 2


@dataclass(frozen=True)
class Limits:
    """Seconds: a heartbeat is stale, a job without a ``within`` of its own is stalled, between two looks."""

    stale_after: float
    no_growth: float
    every: float


@dataclass(frozen=True)
class State:
    """``name`` is one of :data:`STATES`; ``why`` says what it was concluded from."""

    name: str
    why: str = ""


# Each state, whether it asks for a person, and its word on the page.
STATES = {
    "running": (False, "Running"),
    "loading": (False, "Loading"),
    "stopping": (False, "Stopping"),
    "finished": (False, "Finished"),
    "never started": (False, "Never started"),
    "slow": (False, "Slow"),
    "stalled": (True, "Stalled"),
    "dead": (True, "Dead"),
    "failed": (True, "Failed"),
    "unknown": (True, "Unknown"),
}


def span(seconds: float) -> str:
    """``12 s``, ``3 min``, ``2.5 h``, ``4 d``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def state(unit: Unit, usual_s: float | None, recent_s: float | None, limits: Limits) -> State:
    """Alive, slow or dead.  ``usual_s`` and ``recent_s`` are seconds a step, over its whole run and lately."""
    if unit.phase == "never started":
        return State("never started")
    if unit.ended is not None:
        return State("finished" if unit.ended_well else "failed", unit.ended)
    if unit.gone:
        return State("dead", "its process is gone, and left no death certificate")
    beat, quiet = unit.beat_age_s, unit.log_age_s
    if beat is not None and beat > limits.stale_after:
        return State("dead", f"no heartbeat for {span(beat)}")
    if unit.unknown and beat is None:
        return State("unknown", unit.unknown)
    if unit.phase == "stop":
        return State("stopping")
    if unit.step is not None and unit.step_age_s is not None:
        return _pace(unit, unit.step_age_s, usual_s, recent_s, limits)
    if beat is not None:
        return State("loading", "no step yet" if unit.phase in ("warmup", "run") else "")
    if quiet is None:
        return State("unknown", "no heartbeat, and nothing in its log")
    if quiet > limits.no_growth:
        return State("unknown", f"no heartbeat, and nothing new in its log for {span(quiet)}")
    # A job that declares no progress is judged by its log alone.
    return State("running", "its log grows") if unit.within_s is None else State("loading", "no step yet")


def _pace(unit: Unit, age: float, usual_s: float | None, recent_s: float | None, limits: Limits) -> State:
    allowed = unit.within_s if unit.within_s is not None else limits.no_growth
    if age > allowed:
        return State("stalled", f"no step for {span(age)}, {span(allowed)} are allowed")
    now_s = max(recent_s or 0.0, age)
    if usual_s is not None and now_s > max(SLOW * usual_s, SLOW_AFTER_LOOKS * limits.every):
        return State("slow", f"a step takes {_time(now_s)}, usually {_time(usual_s)}")
    return State("running")


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else span(seconds)


def reasons(
    units: list[tuple[Unit, State]],
    local: Listing | None,
    s3: Listing | None,
    expected: dict[str, int] | None,
    grown_s: float | None,
    limits: Limits,
) -> list[str]:
    """Why /healthz says 503: one sentence each.

    ``grown_s`` is how long the place where batches end up has not grown; None where it is unknown.
    """
    found = []
    for unit, judged in units:
        if STATES[judged.name][0]:
            found.append(f"{unit.unit} is {judged.name}: {judged.why}")
        elif unit.unknown:
            found.append(f"{unit.unit} is {judged.name}, but not all is known: {unit.unknown}")
    for place, listing in (("in S3", s3), ("on the local disk", local)):
        if listing is not None and listing.unknown:
            found.append(f"batches {place} are unknown: {listing.unknown}")
    final = s3 or local
    if final is not None and not final.unknown and grown_s is not None and grown_s > limits.no_growth:
        done = {shard for shard, counted in final.shards.items() if counted.done}
        if expected is None or not done >= set(expected):
            found.append(f"no new batch for {span(grown_s)}, {span(limits.no_growth)} are allowed")
    return found


class Judge:
    """Judges look after look: it remembers each run's steps and each GPU's use."""

    def __init__(self, limits: Limits, ages: Ages | None = None):
        self._limits = limits
        self._ages = ages or Ages()
        self.steps: dict[tuple[str, str | None], Series] = {}
        self.gpus: dict[str, Series] = {}

    def units(self, units: list[Unit], now: float) -> list[tuple[Unit, State]]:
        """Each unit with its state; keeps the steps of the runs that are still the current ones."""
        runs = {(unit.unit, unit.run_id) for unit in units}
        self.steps = {key: series for key, series in self.steps.items() if key in runs}
        judged = []
        for unit in units:
            if unit.step is not None and unit.ended is None:
                self.steps.setdefault((unit.unit, unit.run_id), Series()).add(now, unit.step)
            series = self.steps.get((unit.unit, unit.run_id))
            judged.append((unit, state(unit, *paces(series), self._limits)))
        devices: dict[str, Any] = {}
        for unit in units:
            if unit.ended is None:
                devices |= {gpu["uuid"]: gpu for gpu in unit.gpus}
        for uuid, gpu in devices.items():
            if gpu["util"] is not None:
                self.gpus.setdefault(uuid, Series()).add(now, gpu["util"])
        # A device that nobody reports any more is not on the page; its series ends with it.
        self.gpus = {uuid: series for uuid, series in self.gpus.items() if uuid in devices}
        return judged

    def grown(self, final: Listing | None, now: float) -> float | None:
        """Seconds since the place where batches end up has grown; None while it is unknown."""
        if final is None or final.unknown:
            return None
        total = sum(counted.batches for counted in final.shards.values())
        stamped = 0.0 if final.last is None else now - final.last
        return self._ages.age("grown", total, stamped)


def paces(series: Series | None) -> tuple[float | None, float | None]:
    """Seconds a step: usual (the median between two changes of the series) and lately (since the last but two)."""
    changes: list[tuple[float, float]] = []
    for at, value in zip(series.times, series.values, strict=True) if series else ():
        if not changes or value > changes[-1][1]:
            changes.append((at, value))
    if series is None or len(changes) < 5:
        return None, None
    # The first point is where the monitor began to look, in the middle of a step.
    gaps = [(later[0] - sooner[0]) / (later[1] - sooner[1]) for sooner, later in zip(changes[1:], changes[2:])]
    at, value = changes[-3]
    return statistics.median(gaps), (series.times[-1] - at) / (changes[-1][1] - value)
