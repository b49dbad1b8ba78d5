# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Prometheus text of one Status; pure."""

from __future__ import annotations

from collections.abc import Iterator

from monitoring.judge import STATES
from monitoring.look import Status


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _samples(status: Status) -> Iterator[tuple[str, dict[str, str], float]]:
    yield "healthy", {}, not status.unhealthy
    yield "look_timestamp_seconds", {}, status.at
    for place, listing in (("local", status.local), ("s3", status.s3)):
        if listing is None:
            continue
        yield "listing_known", {"where": place}, not listing.unknown
        yield "listing_seconds", {"where": place}, listing.took_s
        for shard, counted in listing.shards.items():
            labels = {"where": place, "shard": shard}
            yield "batches", labels, counted.batches
            yield "batches_committed", labels, counted.committed
            yield "batch_bytes", labels, counted.bytes
            yield "shard_done", labels, counted.done
            if counted.last is not None:
                yield "last_batch_timestamp_seconds", labels, counted.last
    for unit, state in status.units:
        labels = {"unit": unit.unit}
        yield "unit_known", labels, not unit.unknown
        for name in STATES:
            yield "unit_state", {**labels, "state": name}, name == state.name
        for name, value in (
            ("step", unit.step),
            ("step_age_seconds", unit.step_age_s),
            ("heartbeat_age_seconds", unit.beat_age_s),
        ):
            if value is not None:
                yield name, labels, value
        if unit.verdict is not None:
            yield "verdict_ok", {**labels, "code": unit.verdict}, bool(unit.verdict_ok)
    for uuid, series in status.gpus.items():
        yield "gpu_utilization_percent", {"uuid": uuid}, series.values[-1]


def metrics(status: Status) -> str:
    """What is unknown has no sample, and listing_known or unit_known says 0."""
    lines: dict[str, list[str]] = {}
    for name, labels, value in _samples(status):
        text = ",".join(f'{key}="{_label(content)}"' for key, content in labels.items())
        lines.setdefault(name, []).append(f"dflash_{name}{{{text}}} {float(value):.17g}\n")
    return "".join(f"# TYPE dflash_{name} gauge\n{''.join(samples)}" for name, samples in lines.items())
