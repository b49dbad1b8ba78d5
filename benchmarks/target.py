# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container with real units, and a prover that is watched from outside while it watches them.

The container shares the machine's kernel, so CLOCK_BOOTTIME, files (by /proc/PID/root) and inotify are the same inside.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from ansible_collections.dflash.launchproof.plugins.module_utils.job import install, spec
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import bundle
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import IN_MODIFY, Loop

from benchmarks.rows import Unmeasured
from tests.support.container import Container

SESSIONS = "/var/lib/launchproof/sessions"
PIPES = "/run/bench"


class Inside(install.Host):
    """The container's files as this machine sees them; what the role checks of a machine is settled here."""

    def user_exists(self, name):
        return True

    def program(self, name):
        return name


def deliver(container: Container, jobs: list[dict]) -> list[str]:
    """Install jobs as role job does; the names of their units."""
    declared, errors = spec.validate(jobs)
    if errors:
        raise Unmeasured("; ".join(errors))
    host = Inside(f"/proc/{container.pid}/root")
    install.apply(install.make_plan(declared, {}, bundle.build(), host), host, reload=False)
    container.run("systemctl", "daemon-reload")
    return [unit.name for job in declared for unit in job.units]


class Prover:
    """A proof of ``units`` in the container, whose events are seen as they are written."""

    def __init__(self, container: Container, units: list[str], timeout: float = 60):
        self.container, self.units = container, units
        self._sessions = container.path(SESSIONS)
        before = set(self._folders())
        command = container.argv("launchproof", "prove", "--state", "restarted", "--quiet", "--json", *units)
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + timeout
        while not (
            new := [path for path in self._folders() if path not in before and (path / "events.jsonl").exists()]
        ):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Unmeasured(f"no prover came up for {units[0]} and {len(units) - 1} more")
            time.sleep(0.02)
        (self.folder,) = new
        self._file = open(self.folder / "events.jsonl", encoding="utf-8")  # noqa: SIM115 - closed by finish()
        self._rest = ""
        self._loop = Loop()
        self._loop.watch(str(self.folder / "events.jsonl"), IN_MODIFY, lambda _mask, _name: None)

    def _folders(self) -> list[Path]:
        return list(self._sessions.iterdir()) if self._sessions.exists() else []

    def until(self, wanted: Callable[[dict], bool], timeout: float = 60) -> tuple[float, dict]:
        """The first event from here on that is ``wanted``, and the CLOCK_BOOTTIME at which it could be read."""
        deadline = boottime() + timeout
        while True:
            for line in self._lines():
                event = json.loads(line)
                if wanted(event):
                    return boottime(), event
            if boottime() > deadline:
                raise Unmeasured(f"the prover of {self.units[0]} did not say in {timeout:g} s what was expected")
            self._loop.step(1.0)

    def _lines(self):
        # One line a time: what follows it stays for the next until().
        while True:
            text, newline, rest = self._rest.partition("\n")
            if not newline:
                more = self._file.read()
                if not more:
                    return
                self._rest += more
                continue
            self._rest = rest
            yield text

    def waits(self) -> None:
        """Return once the prover waits for the first progress of every unit: all of them run."""
        missing = set(self.units)
        while missing:
            _at, event = self.until(lambda event: event["event"] in ("stage", "verdict"))
            if event["event"] == "verdict":
                raise Unmeasured(f"{event['unit']} had a verdict too early: {event['row']['code']}")
            if event["run_id"] and event["stage"] == "first_progress":
                missing.discard(event["unit"])

    def verdict(self, unit: str, code: str, timeout: float = 60) -> float:
        """Wait for the verdict of ``unit``, which has to be ``code``; the time at which it could be read."""
        at, event = self.until(lambda event: event["event"] == "verdict" and event["unit"] == unit, timeout)
        if event["row"]["code"] != code:
            raise Unmeasured(f"{unit}: {event['row']['code']} instead of {code}")
        return at

    def usage(self) -> tuple[int, int]:
        """(peak resident memory, bytes read by system calls since it started) of the prover, in bytes."""
        pid = json.loads((self.folder / "armed").read_text())["pid"]
        text = self.container.run("cat", f"/proc/{pid}/status", f"/proc/{pid}/io").stdout
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024, int(fields["rchar"])

    def finish(self) -> dict:
        """Wait until every unit has its verdict; the document."""
        output, _none = self.process.communicate(timeout=60)
        self._file.close()
        self._loop.close()
        return json.loads(output)


def boottime() -> float:
    """Seconds since the boot, the clock of the ledger."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def pipes(container: Container, names: list[str]) -> None:
    """Named pipes in the container, by which its jobs are told what to do."""
    container.run("mkdir", "-p", PIPES)
    container.run("mkfifo", *(f"{PIPES}/{name}" for name in names))


def tell(container: Container, name: str, text: str) -> float:
    """Write a line into a job's pipe; the time just before. Blocks until the job reads."""
    with open(container.path(f"{PIPES}/{name}"), "w") as pipe:
        now = boottime()
        pipe.write(text + "\n")
    return now
