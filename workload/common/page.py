# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The monitor's page and metrics, from one Status; pure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape

from common.status import Count, Listing, Status, Unit

STYLE = """
:root{color-scheme:light dark;--ok:#15703a;--bad:#b3261e;--line:#8884}
body{font:16px/1.45 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.3rem;margin:.2rem 0}h2{font-size:1.05rem;margin:1.4rem 0 .3rem}
table{border-collapse:collapse;width:100%}caption{text-align:left;padding:.2rem 0}
th,td{text-align:left;padding:.35rem .5rem;border-bottom:1px solid var(--line);vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
.ok{color:var(--ok);font-weight:600}.bad{color:var(--bad);font-weight:600}
.state{padding:.5rem .8rem;border:2px solid currentColor;border-radius:.4rem}
progress{width:100%;min-width:5rem}
@media(prefers-color-scheme:dark){:root{--ok:#7bd88f;--bad:#ff8a80}}
@media(max-width:40rem){thead{position:absolute;left:-999rem}
tr{display:block;padding:.5rem 0;border-bottom:2px solid var(--line)}
td,td.n,tbody th{display:flex;justify-content:space-between;gap:1rem;text-align:right;border:0;padding:.15rem 0}
td::before{content:attr(data-label);text-align:left;opacity:.75}tbody th{text-align:left}}
"""


def age(seconds: float | None) -> str:
    """``12 s``, ``3 min``, ``2.5 h``; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _cell(label: str, content: str, number: bool = False) -> str:
    css = ' class="n"' if number else ""
    return f'<td{css} data-label="{escape(label)}">{content}</td>'


def _unknown(why: str) -> str:
    return f'<span class="bad">unknown</span> {escape(why)}'


def _unit(unit: Unit) -> str:
    name = f'<th scope="row">{escape(unit.unit)}</th>'
    if unit.unknown:
        return f"<tr>{name}{_cell('phase', _unknown(unit.unknown))}<td></td><td></td><td></td><td></td></tr>"
    verdict = "–"
    if unit.verdict is not None:
        verdict = f'<span class="{"ok" if unit.verdict_ok else "bad"}">{escape(unit.verdict)}</span>'
    phase = f"{unit.phase}: {unit.ended}" if unit.ended else unit.phase
    step = "–" if unit.step is None else f"{unit.step} ({age(unit.step_age_s)} ago)"
    cells = [
        _cell("phase", escape(phase)),
        _cell("step", escape(step), number=True),
        _cell("heartbeat", age(unit.beat_age_s), number=True),
        _cell("last verdict", verdict),
        _cell("telemetry", escape(unit.telemetry or "–")),
    ]
    return f"<tr>{name}{''.join(cells)}</tr>"


def _shard(at: float, shard: str, counted: Count, wanted: int | None, unit: Unit | None) -> str:
    bar = (
        ""
        if not wanted
        else f'<progress max="{wanted}" value="{counted.committed}">{counted.committed} of {wanted}</progress>'
    )
    total = f" of {wanted}" if wanted else ""
    phase = "done" if counted.done else (unit.phase if unit else "–")
    cells = [
        _cell("committed", f"{counted.committed}{total}", number=True),
        _cell("files", str(counted.batches), number=True),
        _cell("last file", age(None if counted.last is None else max(0.0, at - counted.last)), number=True),
        _cell("phase", escape(phase)),
        _cell("progress", bar),
    ]
    return f'<tr><th scope="row">{escape(shard)}</th>{"".join(cells)}</tr>'


def _place(status: Status, title: str, listing: Listing | None, final: bool) -> str:
    """One place's table; ``final``: batches are to end up here, so what is missing is shown as well."""
    if listing is None:
        return ""
    if listing.unknown:
        return f"<h2>{title}</h2><p>{_unknown(listing.unknown)}</p>"
    wanted = (status.batches_expected or {}) if final else {}
    by_shard = {unit.shard: unit for unit in status.units if unit.shard}
    shards = dict.fromkeys(wanted, Count()) | listing.shards
    total = sum(counted.batches for counted in listing.shards.values())
    if not shards:
        return f"<h2>{title}</h2><p>0 files</p>"
    rows = [
        _shard(status.at, shard, counted, wanted.get(shard), by_shard.get(shard))
        for shard, counted in sorted(shards.items())
    ]
    head = _head("shard", "committed", "files", "last file", "phase", "progress")
    return f"<h2>{title}</h2><table><caption>{total} files</caption>{head}<tbody>{''.join(rows)}</tbody></table>"


def _head(*names: str) -> str:
    return "<thead><tr>" + "".join(f'<th scope="col">{name}</th>' for name in names) + "</tr></thead>"


def page(status: Status, refresh_s: int) -> str:
    """The whole page; reloads itself without a script."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.at))
    if status.unhealthy:
        items = "".join(f"<li>{escape(reason)}</li>" for reason in status.unhealthy)
        state = f'<div class="state bad" role="status">needs attention<ul>{items}</ul></div>'
    else:
        state = '<div class="state ok" role="status">healthy</div>'
    head = _head("unit", "phase", "step", "heartbeat", "last verdict", "telemetry")
    local = "Waiting on the local disk" if status.s3 else "On the local disk"
    units = "".join(map(_unit, status.units)) or '<tr><td colspan="6">no unit has a run folder</td></tr>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="refresh" content="{refresh_s}"><title>{escape(status.run_id)}: '
        f"{'needs attention' if status.unhealthy else 'healthy'}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>DFlash run {escape(status.run_id)}</h1><p>as of <time>{stamp}</time></p>{state}"
        f"<h2>Units</h2><table>{head}<tbody>{units}</tbody></table>"
        f"{_place(status, 'In S3', status.s3, True)}{_place(status, local, status.local, status.s3 is None)}"
        "</main></body></html>"
    )


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _samples(status: Status) -> Iterator[tuple[str, dict[str, str], float]]:
    yield "healthy", {}, not status.unhealthy
    for place, listing in (("local", status.local), ("s3", status.s3)):
        if listing is None:
            continue
        yield "listing_known", {"where": place}, not listing.unknown
        for shard, counted in listing.shards.items():
            labels = {"where": place, "shard": shard}
            yield "batches", labels, counted.batches
            yield "batches_committed", labels, counted.committed
            yield "batch_bytes", labels, counted.bytes
            yield "shard_done", labels, counted.done
            if counted.last is not None:
                yield "last_batch_timestamp_seconds", labels, counted.last
    for unit in status.units:
        labels = {"unit": unit.unit}
        yield "unit_known", labels, not unit.unknown
        for name, value in (
            ("step", unit.step),
            ("step_age_seconds", unit.step_age_s),
            ("heartbeat_age_seconds", unit.beat_age_s),
        ):
            if value is not None:
                yield name, labels, value
        if unit.verdict is not None:
            yield "verdict_ok", {**labels, "code": unit.verdict}, bool(unit.verdict_ok)


def metrics(status: Status) -> str:
    """Prometheus text; what is unknown has no sample, and listing_known or unit_known says 0."""
    lines: dict[str, list[str]] = {}
    for name, labels, value in _samples(status):
        text = ",".join(f'{key}="{_label(content)}"' for key, content in labels.items())
        lines.setdefault(name, []).append(f"dflash_{name}{{{text}}} {float(value):.17g}\n")
    return "".join(f"# TYPE dflash_{name} gauge\n{''.join(samples)}" for name, samples in lines.items())
