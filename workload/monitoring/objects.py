# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Batches per shard, locally and in S3: counted, or unknown with a reason; never a guess, never 0."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import store as stores

BATCH = re.compile(r"(shard-\d+-of-\d+)/batch-\d{6}\.safetensors")
RECORD = re.compile(r"(shard-\d+-of-\d+)/batch-\d{6}\.json")
DONE = re.compile(rf"(shard-\d+-of-\d+)/{stores.DONE}")

# A listing may take this part of the time, so that many objects cost no more than few.
LISTING_SHARE = 0.1


@dataclass(frozen=True)
class Count:
    """One shard's batches in one place; ``last`` is the newest batch's Unix time by that place's clock."""

    batches: int = 0
    committed: int = 0
    bytes: int = 0
    last: float | None = None
    done: bool = False


@dataclass(frozen=True)
class Listing:
    """One place: shard to count, or ``unknown`` with the reason; then ``shards`` says nothing.

    ``commits`` are the Unix times of the commit records, in order, at most a chart's worth of them.  ``before`` is the
    last answer of a place that is unknown now.  ``at`` is the time of the answer, ``took_s`` what it cost.
    """

    shards: dict[str, Count] = field(default_factory=dict)
    unknown: str | None = None
    at: float = 0.0
    took_s: float = 0.0
    commits: tuple[tuple[float, int], ...] = ()
    before: Listing | None = None

    @property
    def committed(self) -> int:
        return sum(counted.committed for counted in self.shards.values())

    @property
    def last(self) -> float | None:
        return max((counted.last for counted in self.shards.values() if counted.last is not None), default=None)


def count(objects: dict[str, tuple[int, float]]) -> dict[str, Count]:
    """Counts per shard from (bytes, Unix time) by key relative to the run."""
    shards: dict[str, dict[str, Any]] = {}
    for key, (size, modified) in objects.items():
        for pattern, name in ((BATCH, "batches"), (RECORD, "committed"), (DONE, "done")):
            match = pattern.fullmatch(key)
            if not match:
                continue
            shard = shards.setdefault(match[1], {"batches": 0, "committed": 0, "bytes": 0, "last": None, "done": False})
            if name == "done":
                shard["done"] = True
            else:
                shard[name] += 1
            if name == "batches":
                shard["bytes"] += size
                shard["last"] = max(modified, shard["last"] or 0.0)
    return {shard: Count(**fields) for shard, fields in sorted(shards.items())}


def commits(objects: dict[str, tuple[int, float]], points: int) -> tuple[tuple[float, int], ...]:
    """(Unix time, batches committed by then), at most one more than ``points`` of them, the first and the last included."""
    times = sorted(modified for key, (_size, modified) in objects.items() if RECORD.fullmatch(key))
    step = -(-len(times) // points) or 1
    return tuple((times[n], n + 1) for n in sorted({*range(0, len(times), step), len(times) - 1}) if n >= 0)


def listed(objects: dict[str, tuple[int, float]], at: float, took_s: float) -> Listing:
    """A listing of objects by key relative to the run."""
    return Listing(count(objects), at=at, took_s=took_s, commits=commits(objects, 120))


def list_local(folder: Path, waiting: bool = False) -> Listing:
    """Batches below the run's local folder.  A folder that is not there is unknown, too: it may be the wrong one.

    Where batches only wait for their upload (``waiting``), the folder of the run comes with the first of them.
    """
    began = time.monotonic()
    objects = {}
    try:
        for shard in os.scandir(folder):
            for file in os.scandir(shard.path) if shard.is_dir() else ():
                if file.name.startswith("."):
                    continue
                try:
                    status = file.stat()
                except FileNotFoundError:
                    continue  # Committed and removed between the listing and this look.
                objects[f"{shard.name}/{file.name}"] = (status.st_size, status.st_mtime)
    except OSError as error:
        if not (waiting and isinstance(error, FileNotFoundError) and folder.parent.is_dir()):
            return Listing(unknown=f"{folder}: {error.strerror}", at=time.time())
    return listed(objects, time.time(), time.monotonic() - began)


def said(error: Exception) -> str:
    """An error's words without what must not be on a page: keys, and a user and password in an address."""
    text = re.sub(r"://[^/@\s]*@", "://", str(error))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        if os.environ.get(name):
            text = text.replace(os.environ[name], f"({name})")
    return text[:300]


def list_s3(store: stores.S3Store, run_id: str) -> Listing:
    """Batches of the run in S3."""
    began = time.monotonic()
    try:
        found = store.objects(f"{run_id}/")
    except stores.errors() as error:
        return Listing(unknown=said(error), at=time.time(), took_s=time.monotonic() - began)
    objects = {key.removeprefix(f"{run_id}/"): value for key, value in found.items()}
    return listed(objects, time.time(), time.monotonic() - began)


def expected(manifest: bytes | None) -> dict[str, int] | None:
    """Batches that each shard will have, from run.json; None when it cannot be read."""
    try:
        run = json.loads(manifest or b"")
        samples, shards, size = run["samples"], run["num_shards"], run["batch_samples"]
        return {
            stores.shard_name(shard, shards): -(-len(range(shard - 1, samples, shards)) // size)
            for shard in range(1, shards + 1)
        }
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def planned(store: stores.Store, run_id: str) -> dict[str, int] | None:
    """:func:`expected` of the run in this place; a place that does not answer is None, and its listing says why."""
    try:
        return expected(store.get(f"{run_id}/{stores.RUN}"))
    except stores.errors():
        return None


def pause(took_s: float) -> float:
    """Seconds to wait after a listing, so that all listings together take no more than their share of the time."""
    return took_s * (1 / LISTING_SHARE - 1)


class S3Watch:
    """Lists the bucket in a thread of its own, so that a slow S3 delays nothing else that the monitor knows."""

    def __init__(self, store: stores.S3Store, run_id: str, every: float, patience: float):
        self._store, self._run_id, self._every, self._patience = store, run_id, every, patience
        self._began = time.monotonic()
        self._running = True
        self._newest = Listing(unknown="the first listing is still running")
        self._good: Listing | None = None
        self.expected: dict[str, int] | None = None
        self.answered = threading.Event()

    def look(self) -> float:
        """List once; returns the seconds to wait before the next time."""
        self._began, self._running = time.monotonic(), True
        newest = list_s3(self._store, self._run_id)
        # A run id is bound to its run.json, so one answer is enough.
        if self.expected is None and newest.unknown is None:
            self.expected = planned(self._store, self._run_id)
        self._newest, self._running = newest, False
        if newest.unknown is None:
            self._good = newest
        self.answered.set()
        return max(self._every, pause(newest.took_s))

    @property
    def listing(self) -> Listing:
        """The newest answer; unknown when the one that is asked for now has been out for longer than ``patience``."""
        newest, waited = self._newest, time.monotonic() - self._began
        why = newest.unknown
        if why is None and self._running and waited > self._patience:
            why = f"no answer for {waited:.0f} s"
        return newest if why is None else Listing(unknown=why, at=newest.at, before=self._good)
