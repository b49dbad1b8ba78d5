# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the monitor knows: counts, ages and verdicts, each known, or unknown with a reason; never a guess, never 0."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import store as stores

BATCH = re.compile(r"(shard-\d+-of-\d+)/batch-\d{6}\.safetensors")
RECORD = re.compile(r"(shard-\d+-of-\d+)/batch-\d{6}\.json")
DONE = re.compile(rf"(shard-\d+-of-\d+)/{stores.DONE}")


@dataclass(frozen=True)
class Count:
    """One shard's batches in one place; ``last`` is the newest batch's Unix time."""

    batches: int = 0
    committed: int = 0
    bytes: int = 0
    last: float | None = None
    done: bool = False


@dataclass(frozen=True)
class Listing:
    """One place: shard to count, or ``unknown`` with the reason; then ``shards`` says nothing."""

    shards: dict[str, Count] = field(default_factory=dict)
    unknown: str | None = None


@dataclass(frozen=True)
class Unit:
    """The current run of one unit, as its run folder tells it; ages in seconds."""

    unit: str
    run_id: str | None = None
    phase: str = "unknown"
    step: int | None = None
    step_age_s: float | None = None
    beat_age_s: float | None = None
    telemetry: str | None = None
    shard: str | None = None
    gpus: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None
    verdict: str | None = None
    verdict_ok: bool | None = None
    unknown: str | None = None


@dataclass(frozen=True)
class Status:
    """One scan."""

    at: float
    run_id: str
    batches_expected: dict[str, int] | None
    local: Listing | None
    s3: Listing | None
    units: list[Unit]
    unhealthy: list[str]

    def data(self) -> dict[str, Any]:
        """As JSON types, with ages beside the times."""
        data = asdict(self)
        for place in ("local", "s3"):
            for count in (data[place] or {"shards": {}})["shards"].values():
                count["last_age_s"] = None if count["last"] is None else round(max(0.0, self.at - count["last"]), 1)
        return {"schema": 1, "healthy": not self.unhealthy, **data}


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


def list_local(folder: Path) -> Listing:
    """Batches below the run's local folder.  A folder that is not there is unknown, too: it may be the wrong one."""
    try:
        objects = {}
        for shard in folder.iterdir():
            for path in shard.iterdir() if shard.is_dir() else ():
                if not path.name.startswith("."):
                    objects[f"{shard.name}/{path.name}"] = _stat(path)
    except OSError as error:
        return Listing(unknown=f"{folder}: {error.strerror}")
    return Listing(count({key: found for key, found in objects.items() if found}))


def _stat(path: Path) -> tuple[int, float] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        # Committed and removed between the listing and this look.
        return None
    return status.st_size, status.st_mtime


def list_s3(store: stores.S3Store, run_id: str) -> Listing:
    """Batches of the run in S3."""
    try:
        found = store.objects(f"{run_id}/")
    except stores.errors() as error:
        return Listing(unknown=str(error)[:300])
    return Listing(count({key.removeprefix(f"{run_id}/"): value for key, value in found.items()}))


def expected(manifest: bytes | None) -> dict[str, int] | None:
    """Batches that each shard will have, from run.json; None when it cannot be read."""
    try:
        run = json.loads(manifest or b"")
        samples, shards, size = run["samples"], run["num_shards"], run["batch_samples"]
        return {
            stores.shard_name(shard, shards): -(-len(range(shard - 1, samples, shards)) // size)
            for shard in range(1, shards + 1)
        }
    except (ValueError, KeyError, TypeError):
        return None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return data


def read_unit(folder: Path, now: float) -> Unit:
    """The unit whose runs lie in ``folder``."""
    try:
        run = (folder / "current").resolve(strict=True)
        if run.name == "none":
            return Unit(folder.name, phase="never started")
        beat, end, verdict = (_json(run / f"{name}.json") for name in ("heartbeat", "exit", "verdict"))
    except (OSError, ValueError) as error:
        return Unit(folder.name, unknown=str(error))
    fields: dict[str, Any] = {"run_id": run.name}
    if beat:
        age = max(0.0, now - beat["time"])
        step_age = beat.get("step_age_s")
        fields |= {"phase": str(beat.get("phase")), "step": beat.get("step"), "beat_age_s": round(age, 1)}
        fields |= {"step_age_s": None if step_age is None else round(step_age + age, 1)}
        fields |= {"telemetry": beat.get("telemetry"), "shard": beat.get("shard"), "gpus": beat.get("gpus", [])}
    if end:
        fields["ended"] = f"{end.get('service_result')} ({end.get('exit_code')} {end.get('exit_status')})"
    elif beat and "exit_code" in beat:
        fields["ended"] = f"exit {beat['exit_code']}"
    if fields.get("ended"):
        fields["phase"] = "ended"
    if verdict:
        fields |= {"verdict": str(verdict.get("code")), "verdict_ok": bool(verdict.get("ok"))}
    return Unit(folder.name, **fields)


def read_units(runs: Path, now: float) -> list[Unit]:
    """Every unit below ``runs``; one that says why when the folder itself cannot be read."""
    try:
        return [read_unit(folder, now) for folder in sorted(runs.iterdir()) if folder.is_dir()]
    except OSError as error:
        return [Unit(str(runs), unknown=error.strerror)]


def judge(
    now: float,
    units: list[Unit],
    listings: dict[str, Listing | None],
    expected_shards: dict[str, int] | None,
    since: float,
    stale_after: float,
    no_growth: float,
) -> list[str]:
    """Why /healthz says 503: one sentence each.  ``since`` is when the monitor began to look (Unix s)."""
    found = []
    for unit in units:
        if unit.unknown:
            found.append(f"{unit.unit}: unknown ({unit.unknown})")
        elif unit.ended is None and unit.beat_age_s is not None and unit.beat_age_s > stale_after:
            found.append(f"{unit.unit}: no heartbeat for {unit.beat_age_s:.0f} s (limit {stale_after:.0f} s)")
    for name, listing in listings.items():
        if listing is not None and listing.unknown:
            found.append(f"{name}: unknown ({listing.unknown})")
    final = listings.get("s3") or listings.get("local")
    if final is not None and not final.unknown:
        done = [shard for shard, counted in final.shards.items() if counted.done]
        complete = expected_shards is not None and set(done) >= set(expected_shards)
        last = max([counted.last for counted in final.shards.values() if counted.last] + [since])
        if not complete and now - last > no_growth:
            found.append(f"no new batch for {now - last:.0f} s (limit {no_growth:.0f} s)")
    return found


def scan(
    runs: Path,
    local_dir: Path | None,
    store: stores.S3Store | None,
    run_id: str,
    since: float,
    limits: tuple[float, float],
) -> Status:
    """Look at everything once; ``limits`` are stale_after and no_growth in seconds."""
    local = list_local(local_dir / run_id) if local_dir else None
    s3 = list_s3(store, run_id) if store else None
    manifest = None
    try:
        place = store or (stores.LocalStore(local_dir) if local_dir else None)
        manifest = place.get(f"{run_id}/{stores.RUN}") if place else None
    except stores.errors():
        pass  # The listing just said so.
    now = time.time()
    shards = expected(manifest)
    units = read_units(runs, now)
    return Status(
        now, run_id, shards, local, s3, units, judge(now, units, {"local": local, "s3": s3}, shards, since, *limits)
    )
