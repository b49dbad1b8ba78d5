# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a unit's run folder tells about its current run.  Each file counts by itself: a broken one spoils no other."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monitoring.history import Ages

# No file that is read as a whole is larger; a job may write what it likes into its run folder.
LARGEST = 1 << 20
# The part of a log that is looked at when it is first seen, and at most in one look.
LOG_PIECE = 256 << 10
LONGEST_LINE = 4096
# A process that ended leaves its death certificate within a moment.
CERTIFICATE_WITHIN_S = 5.0


@dataclass(frozen=True)
class Unit:
    """The current run of one unit; ages in seconds.  ``unknown`` says what could not be read."""

    unit: str
    run_id: str | None = None
    phase: str | None = None
    step: float | None = None
    step_age_s: float | None = None
    beat_age_s: float | None = None
    log_age_s: float | None = None
    started_age_s: float | None = None
    gone: bool = False
    within_s: float | None = None
    telemetry: str | None = None
    shard: str | None = None
    gpus: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None
    ended_well: bool | None = None
    ended_age_s: float | None = None
    verdict: str | None = None
    verdict_ok: bool | None = None
    verdict_age_s: float | None = None
    remedy: str | None = None
    unknown: str | None = None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, None where there is none; ValueError or OSError for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as handle:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is no regular file")
        data = handle.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError(f"{path.name} is larger than {LARGEST} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def text(value: Any) -> str | None:
    """Something to show, or None."""
    return None if value is None else str(value)[:300]


def since(stamp: Any, now: float) -> float | None:
    """Seconds since a time stamp of the ledger (UTC, ISO 8601); None for one that cannot be read."""
    from datetime import datetime

    try:
        return max(0.0, now - datetime.fromisoformat(str(stamp)).timestamp())
    except ValueError:
        return None


class Log:
    """The newest number that a job's own progress pattern finds in its log, reading only what is new."""

    def __init__(self, path: Path, progress: dict[str, Any]):
        self._path, self._offset, self._rest, self.value = path, -1, b"", None
        self._field = progress.get("json_field")
        self._pattern = re.compile(str(progress["pattern"])) if progress.get("pattern") else None

    def read(self) -> float | None:
        """The newest number so far."""
        with open(self._path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if self._offset < 0 or size < self._offset or size - self._offset > LOG_PIECE:
                # At first, when it was emptied, or more than a look's worth: only its newest part tells where the job is.
                self._offset, self._rest = max(0, size - LOG_PIECE), b""
            handle.seek(self._offset)
            data = handle.read(LOG_PIECE)
        self._offset += len(data)
        # Progress bars end their lines with \r.
        *lines, rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[-LONGEST_LINE:]
        for line in reversed(lines):
            found = self._number(line[:LONGEST_LINE].decode(errors="replace"))
            if found is not None:
                self.value = found
                break
        return self.value

    def _number(self, line: str) -> float | None:
        try:
            if self._field:
                return number(json.loads(line).get(self._field))
            match = self._pattern.search(line) if self._pattern else None
            return number(float(next(iter(match.groupdict().values())))) if match else None
        except (ValueError, AttributeError, StopIteration, TypeError):
            return None


def process_gone(pid: Any) -> bool:
    """Whether this machine has no such process; False where /proc hides those of others."""
    return isinstance(pid, int) and not Path(f"/proc/{pid}").exists() and Path("/proc/1").exists()


class Reader:
    """Reads all units below ``runs``, look after look."""

    def __init__(self, runs: Path, clock: Callable[[], float] = time.monotonic):
        self._runs = runs
        self._ages = Ages(clock)
        self._logs: dict[tuple[str, str], Log] = {}

    def look(self, now: float) -> list[Unit]:
        """Every unit; one that says why when the folder itself cannot be read.  ``now`` in Unix seconds."""
        try:
            folders = sorted(folder for folder in self._runs.iterdir() if folder.is_dir())
        except OSError as error:
            return [Unit(str(self._runs), unknown=error.strerror)]
        units = [self._unit(folder, now) for folder in folders]
        runs = {(unit.unit, unit.run_id) for unit in units}
        self._logs = {key: log for key, log in self._logs.items() if key in runs}
        self._ages.keep((*run, kind) for run in runs for kind in ("beat", "step"))
        return units

    def _unit(self, folder: Path, now: float) -> Unit:
        try:
            run = (folder / "current").resolve(strict=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
            return Unit(folder.name, unknown=str(error))
        if run.name == "none":
            return Unit(folder.name, phase="never started")
        troubles: list[str] = []

        def read(name: str) -> dict[str, Any]:
            try:
                return read_object(run / name) or {}
            except (OSError, ValueError) as error:
                troubles.append(str(error))
                return {}

        manifest, beat, end, verdict = map(read, ("manifest.json", "heartbeat.json", "exit.json", "verdict.json"))
        proof = manifest.get("proof")
        progress = proof.get("progress") if isinstance(proof, dict) else None
        progress = progress if isinstance(progress, dict) else {}
        fields: dict[str, Any] = {
            "run_id": run.name,
            "started_age_s": since(manifest.get("started_at"), now),
            "within_s": number(progress.get("within")),
        }
        key = (folder.name, run.name)
        if beat and number(beat.get("time")) is None:
            troubles.append("heartbeat.json has no time")
        elif beat:
            fields |= self._beat(key, beat, now)
        else:
            fields |= self._log(key, run / "log", progress, now)
        fields |= _end(end, beat, now)
        if verdict:
            fields |= {"verdict": text(verdict.get("code")), "verdict_ok": verdict.get("ok") is True}
            fields |= {"verdict_age_s": since(verdict.get("at"), now), "remedy": text(verdict.get("remedy"))}
        return Unit(folder.name, unknown="; ".join(troubles)[:300] or None, **fields)

    def _beat(self, key: tuple[str, str], beat: dict[str, Any], now: float) -> dict[str, Any]:
        age = self._ages.age((*key, "beat"), beat["time"], now - beat["time"])
        step_age = number(beat.get("step_age_s"))
        return {
            "phase": text(beat.get("phase")),
            "step": number(beat.get("step")),
            "step_age_s": None if step_age is None else max(0.0, step_age) + age,
            "beat_age_s": age,
            "gone": age > CERTIFICATE_WITHIN_S and process_gone(beat.get("pid")),
            "telemetry": text(beat.get("telemetry")),
            "shard": text(beat.get("shard")),
            "gpus": _gpus(beat.get("gpus")),
        }

    def _log(self, key: tuple[str, str], path: Path, progress: dict[str, Any], now: float) -> dict[str, Any]:
        """A job without a heartbeat: what its log tells."""
        try:
            status = path.stat()
            log = self._logs.setdefault(key, Log(path, progress))
            step = log.read()
        except (OSError, re.error):
            return {}
        quiet = self._ages.age((*key, "beat"), status.st_size, now - status.st_mtime)
        age = None if step is None else self._ages.age((*key, "step"), step, now - status.st_mtime)
        return {"step": step, "step_age_s": age, "log_age_s": quiet if status.st_size else None}


def _gpus(found: Any) -> list[dict[str, Any]]:
    """The devices of a heartbeat: those with a UUID, and of each the numbers that are some; at most 64."""
    devices = [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []
    devices = [gpu for gpu in devices if isinstance(gpu.get("uuid"), str)]
    names = ("util", "mem_mib", "power_w", "temp_c")
    return [{"uuid": text(gpu["uuid"]), **{name: number(gpu.get(name)) for name in names}} for gpu in devices[:64]]


def _end(end: dict[str, Any], beat: dict[str, Any], now: float) -> dict[str, Any]:
    """How a run ended: by its death certificate, else by its own last words."""
    if end:
        result, code, value = (end.get(name) for name in ("service_result", "exit_code", "exit_status"))
        how = (
            f"exit {value}"
            if code == "exited"
            else f"signal {value}"
            if code in ("killed", "dumped")
            else "not started"
        )
        well = result == "success"
        ended = how if well or result in ("exit-code", "signal") else f"{result}, {how}"
        return {"ended": ended, "ended_well": well, "ended_age_s": since(end.get("ended_at"), now)}
    if "exit_code" in beat:
        return {"ended": f"exit {text(beat['exit_code'])}", "ended_well": beat["exit_code"] == 0}
    return {}
