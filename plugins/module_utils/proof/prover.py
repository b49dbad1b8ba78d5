# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The prover: a detached process that proves the units of one session and leaves the verdict in its folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import traceback
from dataclasses import asdict, replace

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import envfile, ledger, render, session
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.collect import UnitWatch
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import (
    Baseline,
    StartAnswer,
    UnitState,
    Unknown,
    Verdict,
    as_data,
    known,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.redact import Redactor
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager, systemd
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import NAMES, Loop
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.gpu import GpuSource
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.objects import ObjectsSource
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import validate
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.watch import Watch


def read_environment_file(path: str | None) -> dict:
    """{name: value} of an environment file, {} where it cannot be read."""
    try:
        return envfile.read(path) if path else {}
    except OSError:
        return {}


ATTEMPTS = 3  # at a stop or a start while the manager is away


def redactor_of(job: dict) -> Redactor:
    """What masks the secrets of one unit."""
    return Redactor(read_environment_file(job.get("secrets_file")))


def make_units(request: dict, redactors: dict, loop: Loop, paths: ledger.Paths) -> list:
    """The collectors of a request's units; I(redactors) has what masks the secrets of each."""
    groups, siblings = manager.groups(), {}
    for job in request["units"]:
        target = systemd.target_of(job["unit"])
        siblings.setdefault(target, []).append(job["unit"])
    siblings = {target: tuple(units) if target else () for target, units in siblings.items()}
    return [
        _make_unit(job, request, siblings[systemd.target_of(job["unit"])], loop, groups, redactors[job["unit"]], paths)
        for job in request["units"]
    ]


def _make_unit(
    job: dict, request: dict, siblings: tuple, loop: Loop, groups, redact: Redactor, paths: ledger.Paths
) -> UnitWatch:
    """The collector of one unit, with the sources that its spec asks for."""
    spec = validate(job["proof"])
    item = UnitWatch(
        job["unit"], spec, loop, groups, redact, paths,
        user=job.get("user") or "", log=job.get("log"), host=request.get("host") or socket.gethostname(), declared=siblings,
    )  # fmt: skip
    item.wrong_processes = tuple(map(redact, job.get("wrong_processes") or ()))
    item.unexpanded = tuple(map(redact, job.get("unexpanded") or ()))
    environ = dict(job.get("env") or {})
    if spec.gpu:
        item.gpu_source = GpuSource(spec.gpu, environ)
    if spec.objects:
        environ.update(read_environment_file(job.get("secrets_file")))
        item.objects_source = ObjectsSource(spec.objects, environ, loop, item.touch)
    return item


class Prover:
    """Proves the units of one session. Everything it learns goes into the session's folder."""

    def __init__(self, folder: str, paths: ledger.Paths | None = None):
        self.folder = folder
        self.paths = paths or ledger.Paths()
        self.request = ledger.read_json(os.path.join(folder, "request.json"))
        if self.request is None:
            raise session.SessionError("%s/request.json cannot be read" % folder)
        self.session_id = self.request["session"]
        self.loop = Loop()
        self.rows = {}
        self.locks = []
        self._released = False
        self._stages = {}
        self._status_at = 0.0
        self._status = {}
        self.began = ledger.boottime()
        self.events = open(os.path.join(folder, "events.jsonl"), "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.redactors = {job["unit"]: redactor_of(job) for job in self.request["units"]}
        self._lines = {job["unit"]: [] for job in self.request["units"]}
        self.units = make_units(self.request, self.redactors, self.loop, self.paths)
        self._start_jobs = {}  # path of a start job -> its unit
        self.watch = Watch(self.loop, self.units, self._report, self._on_job_ended)
        self.manager = self.watch.manager
        self.loop.watch(folder, NAMES, self._on_session)

    def _on_session(self, _mask: int, name: str) -> None:
        if name == "release":
            self._released = True

    def emit(self, event: str, unit: str | None = None, clean: bool = False, **data) -> None:
        """Append one event; C(seconds) counts from the prover's start. I(clean) data has been redacted already."""
        record = {"event": event, "at": ledger.timestamp(), "seconds": round(ledger.boottime() - self.began, 3)}
        if unit:
            record["unit"] = unit
            data = data if clean else self.redactors[unit].data(data)
        record.update(data)
        line = json.dumps(record, sort_keys=True, ensure_ascii=False) + "\n"
        self.events.write(line)
        if unit:
            self._lines[unit].append(line)

    def run(self) -> dict:
        """Prove all units and return the final document."""
        self._lock()
        ledger.write_json(os.path.join(self.folder, "armed"), {"session": self.session_id, "pid": os.getpid()})
        self.emit("armed", units=[item.unit for item in self.units])
        saved = ledger.read_json(os.path.join(self.folder, "baseline.json"))
        self.watch.show(self.units)
        if saved is None:
            self._stop()
            if self._released:
                return self._finish()
            self._take_baselines()
            self.watch.count_instances()
            self._start()
        else:
            self.emit("resumed")
            self._restore_baselines(saved)
            self.watch.count_instances()
            if not os.path.exists(os.path.join(self.folder, "ordered")):
                self._start()
        self._watch()
        return self._finish()

    def _actions(self, *wanted: str) -> list:
        actions = {job["unit"]: job["action"] for job in self.request["units"]}
        return [item for item in self.units if actions[item.unit] in wanted]

    def _lock(self) -> None:
        for item in sorted(self._actions("start", "restart"), key=lambda item: item.unit):
            path = os.path.join(self.paths.locks, item.unit)
            try:
                descriptor = session.take_lock(path, self.session_id, session.LOCK_TIMEOUT)
            except PermissionError as error:
                raise session.SessionError(
                    "starting %s takes root (%s: %s); state observed looks and starts nothing"
                    % (item.unit, error.filename, error.strerror)
                ) from None
            if descriptor is None:
                raise session.SessionError(
                    "%s is being proved by session %s"
                    % (item.unit, session.lock_holder(self.paths, item.unit) or "of another prover")
                )
            self.locks.append(descriptor)

    def _stop(self) -> None:
        """Stop what is to be restarted, and wait until its groups are empty."""
        stopping = self._actions("restart")
        for item in stopping:
            self.emit("stopping", item.unit)
        for _attempt in range(ATTEMPTS if stopping else 0):
            with contextlib.suppress(systemd.SystemdError):
                self.manager.order("StopUnit", [item.unit for item in stopping])
                break
        while stopping and not self._released:
            self.watch.show(stopping)
            stopping = [item for item in stopping if isinstance(item.state, UnitState) and item.state.pending_job]
            self.loop.step(1.0 if stopping else 0.0)
        starting = self._actions("start", "restart")
        if starting and not self._released:
            # Else the start limit, which counts the starts before as well, refuses this one.
            self.manager.reset_failed([item.unit for item in starting])
            self.watch.show(starting)

    def _take_baselines(self) -> None:
        observed = set(self._actions("observe", "pending"))
        now = ledger.boottime()
        for item in self.units:
            item.take_baseline(item in observed, now)
        self._save_baselines()

    def _save_baselines(self) -> None:
        document = {}
        for item in self.units:
            fields = {
                key: value for key, value in asdict(replace(item.baseline, processes=())).items() if key != "processes"
            }
            unknown = [key for key in fields if isinstance(getattr(item.baseline, key), Unknown)]
            document[item.unit] = {key: value for key, value in fields.items() if key not in unknown}
        ledger.write_json(os.path.join(self.folder, "baseline.json"), document)

    def _restore_baselines(self, saved: dict) -> None:
        """Go on after a prover that was killed: with its baseline, whatever has happened since."""
        for item in self.units:
            fields = saved[item.unit]
            fields["logs"] = {path: tuple(about) for path, about in fields.get("logs", {}).items()}
            item.restore_baseline(Baseline(**fields), ledger.boottime())

    def _start(self) -> None:
        starting = self._actions("start", "restart")
        if not starting:
            return
        names = [item.unit for item in starting]
        targets = sorted({systemd.target_of(name) for name in names} - {None})
        shown = self.manager.show(targets)
        names += [name for name in targets if getattr(shown[name][0], "load_state", "") == "loaded"]
        for item in starting:
            self.emit("starting", item.unit)
        # From here on a prover that takes over must not start anything a second time.
        ledger.write_json(os.path.join(self.folder, "ordered"), {"units": names})
        self._order(starting, names)

    def _order(self, starting: list, names: list) -> None:
        """Ask for the starts, again for what has not begun where the manager went away meanwhile (re-executed)."""
        by_name = {item.unit: item for item in starting}
        for _attempt in range(ATTEMPTS):
            try:
                answers = self.manager.order("StartUnit", names)
                break
            except systemd.SystemdError as error:
                answers = dict.fromkeys(names, error)
            self.watch.show(starting)
            waits = [
                item.unit for item in starting if item.run_id is None and not known(item.state, UnitState()).pending_job
            ]
            names = [name for name in names if name in waits or name not in by_name]
        for name, answer in answers.items():
            item = by_name.get(name)
            if isinstance(answer, systemd.SystemdError):
                if item:
                    item.answer = StartAnswer(rc=1, text="Failed to start %s: %s" % (name, answer))
            elif item:
                self._start_jobs[answer] = item
        for item in starting:
            item.ask()

    def _on_job_ended(self, path: str, unit: str, result: str) -> None:
        """Take what came of the job that was asked for here."""
        item = self._start_jobs.pop(path, None)
        if item is None:
            return
        dependency = self.manager.failed_dependency(unit) if result == "dependency" else ""
        good = result in ("done", "skipped")
        text = "" if good else "the start job of %s ended with the result %r" % (unit, result)
        item.answer = StartAnswer(rc=0 if good else 1, text=text, job_result=result, dependency=dependency)
        item.ask()

    def _watch(self) -> None:
        while not self._released:
            active = [item for item in self.units if item.unit not in self.rows]
            if not active:
                return
            self.watch.turn(active, ledger.boottime() + session.STATUS_EVERY)
            self._write_status(active)

    def _report(self, item: UnitWatch, answer) -> None:
        if isinstance(answer, Verdict):
            row = self.redactors[item.unit].data(self._row(item, answer))
            self.rows[item.unit] = row
            self.emit("verdict", item.unit, clean=True, row=row)
            self._record(item, answer)
            self._write_run(item, row)
            item.close()
            return
        stage = (answer.stage, item.run_id, answer.noticed)
        if self._stages.get(item.unit) != stage:
            self._stages[item.unit] = stage
            self.emit(
                "stage",
                item.unit,
                stage=answer.stage,
                run_id=item.run_id,
                missing=list(answer.missing),
                noticed=list(answer.noticed),
            )
        log = item.last_log
        self._status[item.unit] = {
            "stage": answer.stage,
            "run_id": item.run_id,
            "elapsed": round(ledger.boottime() - answer.stage_began, 1),
            "allowed": round(answer.stage_deadline - answer.stage_began, 1),
            "seconds": round(ledger.boottime() - item.baseline.taken_at, 3),
            "missing": list(answer.missing),
            "noticed": list(answer.noticed),
            "line": log.tail[-1] if log and log.tail else "",
            "progress": log.progress.last if log and log.progress else None,
        }

    def _record(self, item: UnitWatch, verdict: Verdict) -> None:
        """Keep what decided, as a line of decisions.jsonl: a verdict that somebody doubts can be decided again, elsewhere."""
        seen = item.seen
        if seen.instances_found == seen.instances_declared:  # of no effect, and as long as there are instances
            seen = replace(seen, instances_declared=(), instances_found=())
        record = {
            "unit": item.unit,
            "code": verdict.code,
            "now": verdict.at,
            "baseline": as_data(item.baseline),
            "facts": as_data(seen),
            "spec": item.spec.as_dict(),
        }
        line = json.dumps(self.redactors[item.unit].data(record), ensure_ascii=False)
        with open(os.path.join(self.folder, "decisions.jsonl"), "a", encoding="utf-8") as handle:
            handle.write(line + "\n")

    def _row(self, item: UnitWatch, verdict: Verdict) -> dict:
        row = render.row(verdict)
        job = next(job for job in self.request["units"] if job["unit"] == item.unit)
        if job["action"] == "pending" and verdict.ok:
            row["evidence"].update(
                observed=verdict.code, running_digest=job["before"]["digest"], declared_digest=job["digest"]
            )
            row.update(
                code="restart_pending",
                remedy="It runs an older configuration; restart it when it suits, with restart: when_changed.",
            )
        return row

    def _write_status(self, active: list) -> None:
        now = ledger.boottime()
        if now - self._status_at < session.STATUS_EVERY:
            return
        self._status_at = now
        units = {
            item.unit: self._status[item.unit]
            for item in active
            if item.unit in self._status and item.unit not in self.rows
        }
        ledger.write_json(os.path.join(self.folder, "status.json"), {"units": units})

    def _write_run(self, item: UnitWatch, row: dict) -> None:
        """Leave the verdict and this unit's events in the run's folder, where the ledger is kept for it."""
        if not item.run_id:
            return
        folder = self.paths.run(item.unit, item.run_id)
        if not os.path.isdir(folder):
            return
        more = {"session": self.session_id, "objects_before": known(item.baseline.objects)}
        ledger.write_verdict(self.paths, item.unit, item.run_id, dict(row, **more))
        with contextlib.suppress(OSError):
            descriptor = os.open(
                os.path.join(folder, "events.jsonl"),
                os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o644,
            )
            with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
                handle.writelines(self._lines[item.unit])

    def _finish(self) -> dict:
        host = self.request.get("host") or socket.gethostname()
        release = ledger.read_json(os.path.join(self.folder, "release")) or {}
        heir = release.get("by", self.session_id)
        rows = [
            self.rows.get(item.unit) or session.undecided_row(item.unit, self._status, host, heir)
            for item in self.units
        ]
        document = {
            "schema": 1,
            "session": self.session_id,
            "verdict": "ok" if all(row["ok"] for row in rows) else "failed",
            "jobs": rows,
            "finished_at": ledger.timestamp(),
        }
        self.emit("finished", verdict=document["verdict"])
        self.events.close()
        ledger.write_json(os.path.join(self.folder, "verdict.json"), document)
        return document


def main(folder: str) -> int:
    """The detached process. Always leaves a verdict.json, whatever happens to it short of SIGKILL."""
    lock = session.take_lock(os.path.join(folder, "lock"), str(os.getpid()), session.PROBE_TIMEOUT)
    if lock is None or os.path.exists(os.path.join(folder, "verdict.json")):
        return 0
    request = ledger.read_json(os.path.join(folder, "request.json")) or {
        "units": [],
        "session": os.path.basename(folder),
    }
    try:
        document = Prover(folder).run()
    except Exception as error:  # the follower must learn of it, whatever it was
        traceback.print_exc()
        why = "%s: %s" % (type(error).__name__, error) if not isinstance(error, session.SessionError) else str(error)
        document = failure(request, why)
        ledger.write_json(os.path.join(folder, "verdict.json"), document)
    return 0 if document["verdict"] == "ok" else 1


def failure(request: dict, why: str) -> dict:
    """The document of a session that could not look: every unit has its row."""
    rows = [
        {
            "host": request.get("host") or socket.gethostname(),
            "unit": job["unit"],
            "run_id": None,
            "stage": "launch_proof",
            "code": "observer_blind",
            "ok": False,
            "seconds": 0.0,
            "remedy": "The prover could not look: %s" % why,
            "evidence": {"error": why},
            "also_observed": [],
        }
        for job in request["units"]
    ]
    return {
        "schema": 1,
        "session": request["session"],
        "verdict": "failed",
        "jobs": rows,
        "error": why,
        "finished_at": ledger.timestamp(),
    }
