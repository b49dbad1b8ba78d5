# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One look at everything, as data."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import store as stores

from monitoring import judge, objects, units
from monitoring.history import Series
from monitoring.judge import Judge, Limits, State
from monitoring.objects import Listing, S3Watch
from monitoring.units import Unit


@dataclass(frozen=True)
class Status:
    """One look; ``at`` in Unix seconds.  ``local`` and ``s3`` are None where they are not watched."""

    at: float
    run_id: str
    expected: dict[str, int] | None
    local: Listing | None
    s3: Listing | None
    units: list[tuple[Unit, State]]
    unhealthy: list[str]
    steps: dict[tuple[str, str | None], Series] = field(default_factory=dict)
    gpus: dict[str, Series] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)

    @property
    def final(self) -> Listing | None:
        """The place where batches end up."""
        return self.s3 or self.local

    def data(self) -> dict[str, Any]:
        """As JSON types, with ages beside the times; what is unknown is null, beside the reason."""
        return {
            "schema": 1,
            "host": self.host,
            "at": round(self.at, 3),
            "healthy": not self.unhealthy,
            "unhealthy": self.unhealthy,
            "units": [
                {**_rounded(asdict(unit)), "state": state.name, "state_why": state.why} for unit, state in self.units
            ],
            "run_id": self.run_id,
            "batches_expected": self.expected,
            "local": self._place(self.local),
            "s3": self._place(self.s3),
        }

    def _place(self, listing: Listing | None) -> dict[str, Any] | None:
        if listing is None:
            return None
        shards = {
            name: {
                **asdict(counted),
                "last_age_s": None if counted.last is None else round(max(0.0, self.at - counted.last), 1),
            }
            for name, counted in listing.shards.items()
        }
        return {
            "unknown": listing.unknown,
            "shards": None if listing.unknown else shards,
            "age_s": round(max(0.0, self.at - listing.at), 1) if listing.at else None,
            "took_s": round(listing.took_s, 3),
        }


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 1) if isinstance(value, float) else value for name, value in fields.items()}


class Watcher:
    """Looks at the run folders and the local disk itself, and takes what the S3 thread knows."""

    def __init__(self, runs: Path, local_dir: Path | None, s3: S3Watch | None, run_id: str, limits: Limits):
        self._local_dir, self._s3, self._run_id, self._limits = local_dir, s3, run_id, limits
        self._reader = units.Reader(runs)
        self._judge = Judge(limits)
        self._local: Listing | None = None
        self._local_due = 0.0

    def look(self) -> Status:
        """Look at everything once."""
        if self._local_dir and time.monotonic() >= self._local_due:
            self._local = objects.list_local(self._local_dir / self._run_id, waiting=self._s3 is not None)
            self._local_due = time.monotonic() + objects.pause(self._local.took_s)
        local = self._local
        s3 = self._s3.listing if self._s3 else None
        expected = None
        if self._s3:
            expected = self._s3.expected
        elif self._local_dir:
            expected = objects.planned(stores.LocalStore(self._local_dir), self._run_id)
        now = time.time()
        judged = self._judge.units(self._reader.look(now), now)
        # With S3 the local folder only holds what waits for its upload; it may rightly be gone.
        grown = self._judge.grown(s3 or local, now)
        found = judge.reasons(judged, local, s3, expected, grown, self._limits)
        steps = {key: Series(list(series.times), list(series.values)) for key, series in self._judge.steps.items()}
        gpus = {key: Series(list(series.times), list(series.values)) for key, series in self._judge.gpus.items()}
        return Status(now, self._run_id, expected, local, s3, judged, found, steps, gpus)
