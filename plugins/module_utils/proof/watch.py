# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One epoll loop over all units of a call: wait for an event or a deadline, look, decide."""

from __future__ import annotations

from dataclasses import replace

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import UnitState, Verdict
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import systemd
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import NAMES, Loop

TICK = 1.0  # s between samples of what sends no events
STORM = 32  # units from which on a pause as long as the asking took comes after it
FRESH = 0.05  # s: a look that is younger than this needs no second one before a success


class Watch:
    """The loop over all units of a call. C(report(unit_watch, answer)) is called after each decision."""

    def __init__(self, loop: Loop, units: list, report):
        self.loop, self.units, self.report = loop, units, report
        self._by_name = {item.unit: item for item in units}
        self._next_tick = ledger.boottime() + TICK
        self._show_free_at = 0.0
        loop.watch(systemd.INVOCATIONS, NAMES, self._on_invocation)

    def _on_invocation(self, _mask: int, name: str) -> None:
        unit = self._by_name.get(name.partition(":")[2])
        if unit:
            unit.ask()

    def show(self, units: list) -> None:
        """Read I(units) from systemd by one exec, and give each its part."""
        if not units:
            return
        began = ledger.boottime()
        answers = systemd.show([item.unit for item in units])
        ending = [
            s
            for s, _p in answers.values()
            if isinstance(s, UnitState) and s.pending_job and s.active_state == "deactivating"
        ]
        jobs = systemd.pending_jobs() if ending else {}
        now = ledger.boottime()
        # Storms of events of many units are answered together: at most half of the time goes into asking.
        self._show_free_at = now + (now - began) * min(len(units) / STORM, 1.0)
        for item in units:
            state, properties = answers[item.unit]
            if isinstance(state, UnitState) and state.pending_job:
                state = replace(state, pending_job=jobs.get(item.unit, "" if ending else "start"))
            item.apply(state, properties, now)
        self.count_instances()

    def count_instances(self) -> None:
        """Tell each instance of a template how many of the declared ones have run."""
        for item in self.units:
            if item.declared:
                item.instances_found = tuple(
                    name for name in item.declared if name in self._by_name and self._by_name[name].run_id
                )

    def turn(self, active: list, limit: float) -> None:
        """One round: wait for an event, a deadline or I(limit), then look, then decide."""
        now = ledger.boottime()
        times = [limit, self._next_tick]
        for item in active:
            if item.need_show:
                times.append(self._show_free_at)
            elif item.dirty:
                times.append(now)
            if item.look_at:
                times.append(max(item.look_at, self._show_free_at))
            if item.wait:
                times.append(item.wait.deadline)
        self.loop.step(min(times) - now)
        now = ledger.boottime()
        if now >= self._next_tick:
            self._next_tick = now + TICK
            for item in active:
                item.tick(now)
        if now >= self._show_free_at:
            self.show([item for item in active if item.need_show or (item.look_at and item.look_at <= now)])
        proved = []
        for item in active:
            now = ledger.boottime()
            if item.dirty or (item.wait and item.wait.deadline <= now):
                more = item.read_logs(now)
                was_ok = item.verdict is not None and item.verdict.ok
                answer = item.decide(now)
                if isinstance(answer, Verdict) and answer.ok and not was_ok and now - item.shown_at > FRESH:
                    item.verdict = None  # not yet
                    proved.append(item)
                else:
                    self.report(item, answer)
                item.dirty = item.dirty or more
        # systemd may know better since: no success by an old look.
        self.show(proved)
        for item in proved:
            now = ledger.boottime()
            item.read_logs(now)
            self.report(item, item.decide(now))
