# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One epoll loop over all units of a call: wait for an event or a deadline, look, decide."""

from __future__ import annotations

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Verdict
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import Loop, allow_many_files

TICK = 1.0  # s between samples of what sends no events
SAMPLING = 4  # times as long as the sampling of all units took it pauses, where they are hundreds
STORM = 32  # units from which on a pause as long as the asking took comes after it
FRESH = 0.05  # s: a look that is younger than this needs no second one before a success


class Watch:
    """The loop over all units of a call. C(report(unit_watch, answer)) is called after each decision.

    C(job_ended(path, unit, result)) is called at the end of each of systemd's jobs.
    """

    def __init__(self, loop: Loop, units: list, report, job_ended=None):
        allow_many_files()
        self.loop, self.units, self.report = loop, units, report
        self.manager = manager.connect(loop, self._on_change, job_ended)
        self._by_name = {item.unit: item for item in units}
        self._next_tick = ledger.boottime() + TICK
        self._show_free_at = 0.0

    def _on_change(self, unit: str | None) -> None:
        """systemd says that a unit has changed, or (None) that any may have."""
        for item in self.units if unit is None else filter(None, [self._by_name.get(unit)]):
            item.ask()

    def show(self, units: list) -> None:
        """Read I(units) from systemd, all at once, and give each its part."""
        if not units:
            return
        began = ledger.boottime()
        answers = self.manager.show([item.unit for item in units])
        now = ledger.boottime()
        # Storms of events of many units are answered together: at most half of the time goes into asking.
        self._show_free_at = now + (now - began) * min(len(units) / STORM, 1.0)
        for item in units:
            item.apply(*answers[item.unit], now)
        self.count_instances()

    def count_instances(self) -> None:
        """Tell each instance of a template how many of the declared ones have run, or are in systemd's queue."""
        here = {item.unit for item in self.units if item.run_id or item.queued}
        found = {}  # of each job, whose instances share what is declared
        for item in self.units:
            if item.declared not in found:
                there = tuple(name for name in item.declared if name in here)
                found[item.declared] = item.declared if there == item.declared else there
            item.instances_found = found[item.declared]

    def turn(self, active: list, limit: float) -> None:
        """One round: wait for an event, a deadline or I(limit), then look, then decide."""
        self.manager.tell()
        now = ledger.boottime()
        times = [limit, self._next_tick]
        for item in active:
            if item.need_show:
                times.append(self._show_free_at)
            elif item.dirty:
                times.append(now)
            if item.wait:
                times.append(item.wait.deadline)
        self.loop.step(min(times) - now)
        began = now = ledger.boottime()
        sampling = now >= self._next_tick
        if sampling:
            for item in active:
                item.tick(now)
        if now >= self._show_free_at:
            self.show([item for item in active if item.need_show])
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
        if sampling:
            self._next_tick = began + max(TICK, SAMPLING * (ledger.boottime() - began))
