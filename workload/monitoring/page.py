# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page, from one Status; pure.  Style and script are within it, named by hash in its Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import time
from html import escape
from pathlib import Path

from monitoring.chart import chart
from monitoring.history import Series
from monitoring.judge import STATES, State, span
from monitoring.look import Status
from monitoring.objects import Count, Listing
from monitoring.units import Unit

STYLE = (Path(__file__).parent / "page.css").read_text()
SCRIPT = (Path(__file__).parent / "page.js").read_text()

# A count is as old as its listing; one that is older than people expect says so.
LISTED_LONG_AGO_S = 15

# Shapes, so that a state is not told by colour alone; 16 by 16.
SHAPES = {
    "running": '<path class="fill" d="M5 3.2v9.6L13 8z"/>',
    "loading": '<path d="M8 2.5a5.5 5.5 0 1 1-5.5 5.5"/>',
    "stopping": '<path class="fill" d="M4 4h8v8H4z"/>',
    "finished": '<path d="m3 8.6 3.4 3.4L13 4.6"/>',
    "never started": '<circle cx="8" cy="8" r="4.5"/>',
    "slow": '<circle cx="8" cy="8" r="5.5"/><path d="M8 4.8V8l2.2 1.6"/>',
    "stalled": '<path class="fill" d="M4 3h3v10H4zM9 3h3v10H9z"/>',
    "dead": '<path d="m4 4 8 8M12 4l-8 8"/>',
    "failed": '<path d="M8 2.8v6.4M8 12.4v.6"/>',
    "unknown": '<path d="M5.6 6a2.4 2.4 0 1 1 3.7 2c-.9.6-1.3 1-1.3 2M8 12.6v.5"/>',
}


def policy() -> str:
    """The page's Content-Security-Policy: its own style and script, its own server, nothing else."""

    def named(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {named(STYLE)}; script-src {named(SCRIPT)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def age(seconds: float | None) -> str:
    """``12 s ago``; a dash for None."""
    return "–" if seconds is None else f"{span(seconds)} ago"


def pill(name: str, word: str) -> str:
    """A state with its shape."""
    return (
        f'<span class="pill {name.replace(" ", "-")}"><svg aria-hidden="true" viewBox="0 0 16 16">{SHAPES[name]}</svg>'
        f"{escape(word)}</span>"
    )


def fact(name: str, value: str, note: str = "", css: str = "") -> str:
    """One pair of a description list; ``value`` is HTML already."""
    small = f'<small class="note">{escape(note)}</small>' if note else ""
    css = css or ("empty" if value == "–" else "")
    return f'<div class="{css}"><dt>{escape(name)}</dt><dd>{value}{small}</dd></div>'


def unknown() -> str:
    """What stands wherever something is not known."""
    return '<span class="nothing-known">unknown</span>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def _rate(series: Series | None) -> str:
    """How fast it went over the last points: ``12.3 / s``, ``4.0 / min``."""
    if series is None or len(series.times) < 3:
        return ""
    first = max(0, len(series.times) - 7)
    taken, done = series.times[-1] - series.times[first], series.values[-1] - series.values[first]
    if taken <= 0 or done <= 0:
        return ""
    return f"{done / taken:.1f} / s" if done / taken >= 1 else f"{60 * done / taken:.1f} / min"


def _unit(unit: Unit, state: State, series: Series | None) -> str:
    going = unit.ended is None
    step = "–" if unit.step is None else _number(unit.step)
    sign, sign_name = (unit.beat_age_s, "Heartbeat") if unit.log_age_s is None else (unit.log_age_s, "Last output")
    verdict = "–"
    if unit.verdict is not None:
        verdict = f'<code class="{"good" if unit.verdict_ok else "bad"}">{escape(unit.verdict)}</code>'
    facts = [fact("Step", step, _rate(series) if going else "")]
    if going:
        facts += [fact("Last step", age(unit.step_age_s)), fact(sign_name, "none" if sign is None else age(sign))]
    else:
        ran = None
        if unit.started_age_s is not None and unit.ended_age_s is not None:
            ran = max(0.0, unit.started_age_s - unit.ended_age_s)
        facts += [fact("Ran for", "–" if ran is None else span(ran)), fact("Ended", age(unit.ended_age_s))]
    facts.append(fact("Last proof", verdict, "" if unit.verdict_age_s is None else age(unit.verdict_age_s)))
    why = state.why
    if state.name == "loading" and unit.started_age_s is not None:
        why = f"for {span(unit.started_age_s)}{', ' + why if why else ''}"
    notes = [f'<p class="why">{escape(why)}</p>' if why else ""]
    if unit.unknown and state.name != "unknown":
        notes.append(f'<p class="why bad">not all is known: {escape(unit.unknown)}</p>')
    remedy = ""
    if unit.remedy and unit.verdict_ok is False:
        remedy = f'<p class="remedy"><b>Remedy</b> {escape(unit.remedy)}</p>'
    drawn = chart(f"Steps of {unit.unit}", series.times, series.values) if series else ""
    return (
        f'<li class="unit {state.name.replace(" ", "-")}"><div><h3>{escape(unit.unit)}</h3>{"".join(notes)}</div>'
        f'<div class="judged">{pill(state.name, STATES[state.name][1])}</div>'
        f'<dl class="facts">{"".join(facts)}</dl>{drawn}{remedy}</li>'
    )


def _units(status: Status) -> str:
    rows = "".join(_unit(unit, state, status.steps.get((unit.unit, unit.run_id))) for unit, state in status.units)
    return (
        '<section aria-labelledby="jobs"><h2 id="jobs">Jobs</h2>'
        + (f'<ul class="units">{rows}</ul>' if rows else "<p>No unit has a run folder yet.</p>")
        + "</section>"
    )


def _of(counted: int, wanted: int | None) -> str:
    return f"{counted:,}" if wanted is None else f"{counted:,} <small>of {wanted:,}</small>"


def _tile(status: Status, title: str, listing: Listing, wanted: int | None) -> str:
    if listing.unknown:
        before = listing.before
        note = "" if before is None else f"last known {age(status.at - before.at)}: {before.committed:,} committed"
        return fact(title, unknown(), note, "tile nothing-known")
    last = "no batch yet" if listing.last is None else f"last one {age(max(0.0, status.at - listing.last))}"
    if status.at - listing.at > LISTED_LONG_AGO_S:
        last += f", counted {age(status.at - listing.at)}"
    return fact(title, _of(listing.committed, wanted), last, "tile")


def _shard(status: Status, name: str) -> str:
    wanted = (status.expected or {}).get(name)
    job = next((pill(state.name, STATES[state.name][1]) for unit, state in status.units if unit.shard == name), "–")

    def cells(listing: Listing | None, final: bool) -> str:
        if listing is None:
            return ""
        if listing.unknown:
            return f'<td class="n">{unknown()}</td><td class="n">{unknown()}</td>'
        counted = listing.shards.get(name, Count())
        shown = counted.committed if final else counted.batches
        last = age(None if counted.last is None else max(0.0, status.at - counted.last))
        return f'<td class="n">{_of(shown, wanted if final else None)}</td><td class="n">{last}</td>'

    final = status.final
    bar = ""
    if final is not None and not final.unknown and wanted:
        committed = final.shards.get(name, Count()).committed
        bar = f'<progress aria-label="committed of {escape(name)}" max="{wanted}" value="{committed}"></progress>'
    if final is not None and not final.unknown and final.shards.get(name, Count()).done:
        job = pill("finished", "Done")
    short = name.removeprefix("shard-").replace("-of-", " of ")
    places = cells(status.s3, True) + cells(status.local, status.s3 is None)
    return f'<tr><th scope="row">{escape(short)}</th><td>{job}</td>{places}<td class="bar">{bar}</td></tr>'


def _extraction(status: Status) -> str:
    final = status.final
    if final is None:
        return ""
    wanted = sum(status.expected.values()) if status.expected else None
    tiles = _tile(status, "Committed in S3", status.s3, wanted) if status.s3 else ""
    if status.local:
        title = "Waiting on the local disk" if status.s3 else "Committed on the local disk"
        local = status.local
        if status.s3 and not local.unknown:
            waiting = sum(counted.batches for counted in local.shards.values())
            note = "nothing to upload" if local.last is None else f"last one {age(max(0.0, status.at - local.last))}"
            tiles += fact(title, f"{waiting:,}", note, "tile")
        else:
            tiles += _tile(status, title, local, wanted)
    drawn = ""
    if not final.unknown and final.commits:
        times, values = zip(*final.commits, strict=True)
        if wanted is None or final.committed < wanted:
            # A line that goes on to now shows that nothing came since.
            times, values = (*times, max(status.at, times[-1])), (*values, values[-1])
        drawn = chart("Batches committed", times, values, steps=True)
    problems = "".join(
        f'<p class="problem">{pill("unknown", "Unknown")} {place}: {escape(listing.unknown)}</p>'
        for place, listing in (("S3", status.s3), ("Local disk", status.local))
        if listing is not None and listing.unknown
    )
    names = sorted({*(status.expected or ()), *final.shards, *(status.local.shards if status.local else ())})
    table = ""
    if names:
        columns = [("S3", "in S3")] if status.s3 else []
        columns += [("local", "waiting" if status.s3 else "on disk")] if status.local else []
        head = "".join(
            f'<th scope="col" class="n">{title}</th><th scope="col" class="n">last</th>' for _key, title in columns
        )
        rows = "".join(_shard(status, name) for name in names)
        table = (
            '<table><caption class="unseen">Batches by shard</caption><thead><tr><th scope="col">Shard</th>'
            f'<th scope="col">State</th>{head}<th scope="col" class="bar"><span class="unseen">Progress</span></th>'
            f"</tr></thead><tbody>{rows}</tbody></table>"
        )
    return (
        f'<section aria-labelledby="batches"><h2 id="batches">Batches of {escape(status.run_id)}</h2>'
        f'<div class="tiles"><dl>{tiles}</dl>{drawn}</div>{problems}{table}</section>'
    )


def _gpus(status: Status) -> str:
    users: dict[str, list[str]] = {}
    devices: dict[str, dict] = {}
    for unit, _state in status.units:
        for gpu in unit.gpus if unit.ended is None else ():
            users.setdefault(gpu["uuid"], []).append(unit.unit)
            devices[gpu["uuid"]] = gpu
    rows = []
    for uuid, gpu in sorted(devices.items()):
        series = status.gpus.get(uuid)
        util, memory, power, heat = (gpu[name] for name in ("util", "mem_mib", "power_w", "temp_c"))
        facts = [
            fact("Use", unknown() if util is None else f"{util:g} %"),
            fact("Memory", unknown() if memory is None else f"{memory / 1024:.1f} GiB"),
            fact("Power", unknown() if power is None else f"{power:g} W"),
            fact("Heat", unknown() if heat is None else f"{heat:g} °C"),
        ]
        drawn = chart(f"Use of {uuid} in percent", series.times, series.values, top=100) if series else ""
        rows.append(
            f'<li class="gpu"><div><h3 title="{escape(uuid)}">{escape(uuid[:12])}</h3>'
            f'<p class="why">{escape(", ".join(users[uuid]))}</p></div><dl class="facts">{"".join(facts)}</dl>{drawn}</li>'
        )
    off: dict[str, list[str]] = {}
    for unit, _state in status.units:
        if unit.telemetry and unit.telemetry.startswith("off") and unit.ended is None:
            off.setdefault(unit.telemetry.removeprefix("off: "), []).append(unit.unit)
    if not rows and not off:
        return ""
    return (
        '<section aria-labelledby="gpus"><h2 id="gpus">GPUs</h2>'
        + (f'<ul class="units">{"".join(rows)}</ul>' if rows else "")
        + "".join(
            f'<p class="why">No readings from {escape(", ".join(who))}: {escape(why)}</p>' for why, who in off.items()
        )
        + "</section>"
    )


def summary(status: Status) -> tuple[str, str]:
    """The worst state of all as a name of SHAPES, and its words."""
    names = {state.name for _unit, state in status.units}
    if not status.unhealthy:
        if any(unit.verdict_ok is False and unit.ended is None for unit, _state in status.units):
            return "slow", "Not all is proved"
        return ("slow", "Slow") if "slow" in names else ("running", "All well")
    wrong = names & {"dead", "failed", "stalled"} or any("no new batch" in reason for reason in status.unhealthy)
    return ("failed", "Needs attention") if wrong else ("unknown", "Not all is known")


def page(status: Status, every: int) -> str:
    """The whole page; its script fetches it anew every ``every`` seconds, and without scripts it reloads itself."""
    name, words = summary(status)
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in status.unhealthy)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(status.at))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f'<noscript><meta http-equiv="refresh" content="{every}"></noscript>'
        f"<title>{escape(words)} – {escape(status.host)}</title><style>{STYLE}</style></head>"
        f'<body data-every="{every}"><header><div><h1>Jobs on {escape(status.host)}</h1>'
        f'<p class="stamp">as of <time id="stamp">{stamp}</time></p></div>'
        '<button type="button" id="pause" aria-pressed="false" hidden>Pause</button></header>'
        f'<main><p id="lost" class="problem" role="alert" hidden></p><div id="summary" role="status" class="summary {name}">'
        f"{pill(name, words)}{'<ul>' + reasons + '</ul>' if reasons else ''}</div>"
        f'<div id="live">{_units(status)}{_extraction(status)}{_gpus(status)}</div></main>'
        '<footer><nav aria-label="The same for programs"><a href="api/status">JSON</a> <a href="healthz">Health</a> '
        f'<a href="metrics">Metrics</a></nav></footer><script>{SCRIPT}</script></body></html>'
    )
