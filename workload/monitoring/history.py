# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ages and series that the monitor keeps from look to look, immune to clocks that differ or jump; bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

# Points of one chart. A full series drops every second point, so it covers any time in bounded memory.
POINTS = 240


@dataclass
class Series:
    """Values over time; ``times`` are Unix seconds."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        """Append a value. A clock that was set back begins the series anew: its order would be lost."""
        if self.times and at < self.times[-1]:
            self.times, self.values = [], []
        self.times.append(at)
        self.values.append(value)
        if len(self.times) > POINTS:
            # The newest stays.
            self.times, self.values = self.times[::-2][::-1], self.values[::-2][::-1]


class Ages:
    """How long ago a value changed, by this process's own monotonic clock.

    What a time stamp says is believed at the first look alone, and never beyond what is possible: other machines' clocks
    are wrong, and this one's may be set while it runs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen: dict[Hashable, tuple[object, float, float]] = {}

    def age(self, key: Hashable, value: object, stamped_age: float) -> float:
        """Seconds since ``value`` of ``key`` appeared; ``stamped_age`` is what its own time stamp says."""
        now = self._clock()
        known, since, looked = self._seen.get(key, (None, 0.0, 0.0))
        if key not in self._seen:
            since = now - max(0.0, stamped_age)
        elif known != value:
            since = now - min(max(0.0, stamped_age), now - looked)
        self._seen[key] = (value, since, now)
        return now - since

    def keep(self, keys: Iterable[Hashable]) -> None:
        """Forget all other keys."""
        wanted = set(keys)
        for key in self._seen.keys() - wanted:
            del self._seen[key]
