# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Prover sessions: plan, arm a detached prover, follow it, find it again.

A session is a folder. C(request.json) says what to prove, C(armed) that the prover holds the locks, C(baseline.json) how
things were before the start and that it was ordered, C(events.jsonl) and C(status.json) how it goes, C(verdict.json) how
it ended, C(decisions.jsonl) what each verdict was decided by. The prover is a transient unit of its own, so it outlives
whoever asked; it holds C(lock) while it lives, so that a killed prover is seen and replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger, render
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import (
    Unknown,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.scan import Scanner
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import logfile, manager
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import NAMES, Loop
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import Spec, validate

ARM_TIMEOUT = 20.0  # s until the prover must have armed
LOCK_TIMEOUT = 5.0  # s that a prover which was told to let go may take
STOP_SLACK = 1200.0  # s that systemd gives the prover beyond the proof's own hard end, for the stop of the old runs
PROBE_TIMEOUT = 1.0  # s: whoever only tries whether a lock is held holds it for an instant
STATUS_EVERY = 0.5  # s between writes of status.json
KEEP_SESSIONS = 50  # finished sessions that stay readable
NEVER_A_JOB = re.compile(r"\.(?:timer|socket|path|mount|automount|swap|device)$")
ACTIVE = ("active", "reloading", "activating", "deactivating")


class SessionError(Exception):
    """The proof could not be begun or followed: nobody could look. Not a statement about the job."""


# ---- requests ----


def unit_name(name: str) -> str:
    """A unit's full name: systemctl takes "training" for "training.service", file names do not."""
    return (
        name if re.search(r"\.(service|target|scope|slice)$", name) or NEVER_A_JOB.search(name) else name + ".service"
    )


def triggered(unit: str) -> str:
    """The units that a timer, a socket or a path starts, "" where nobody knows."""
    try:
        answer = subprocess.run(
            ("systemctl", "show", "--property=Triggers", "--value", "--", unit),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def job_unit(name: str, paths: ledger.Paths) -> str:
    """The unit of a job that is called I(name). Raises SessionError where it is a unit that runs nothing itself."""
    unit = unit_name(name)
    if not NEVER_A_JOB.search(unit):
        return unit
    if os.path.exists(paths.job(unit + ".service")):  # a job may be called so
        return unit + ".service"
    starts = triggered(unit)
    raise SessionError(
        "%s is no service, and only services are proved%s"
        % (unit, ": name %s, which it starts" % starts if starts else "")
    )


def complete_job(job: dict, paths: ledger.Paths, launcher: dict | None = None, timeout: float | None = None) -> dict:
    """Fill a unit's request from its delivered job file, and validate its proof. Raises SpecError."""
    unit = job_unit(job["unit"], paths)
    delivered = ledger.read_json(paths.job(unit)) or {}
    proof = job.get("proof")
    if proof is None:
        proof = delivered.get("proof") or {}
    proof = dict(proof)
    if launcher:
        proof["launcher"] = launcher
    if timeout:
        proof["deadlines"] = dict(proof.get("deadlines") or {}, total=timeout)
    validate(proof, "jobs[%s].proof" % unit)
    return {
        "unit": unit,
        "digest": job.get("digest") or (delivered.get("digest") if job.get("proof") is None else None),
        "proof": proof,
        "log": job.get("log") or None,
        "user": job.get("user") or delivered.get("user") or "",
        "secrets_file": delivered.get("secrets_file"),
        "env": delivered.get("env") or {},
    }


def declared_jobs(paths: ledger.Paths) -> list:
    """Every unit whose job file was delivered to this machine."""
    try:
        names = sorted(os.listdir(paths.jobs))
    except FileNotFoundError:
        return []
    return [{"unit": name[: -len(".json")]} for name in names if name.endswith(".json")]


# ---- plan ----


def running_digest(paths: ledger.Paths, unit: str, run_id: str | None) -> str | None:
    """Digest of the job that run I(run_id) was started from, from its manifest."""
    if not run_id:
        return None
    manifest = ledger.read_json(os.path.join(paths.run(unit, run_id), "manifest.json")) or {}
    return manifest.get("digest")


def completed_run(paths: ledger.Paths, unit: str, spec: Spec) -> str | None:
    """Id of the last run when it ended well by its own certificate and its log says that the work is done."""
    run_id = ledger.current_run(paths, unit)
    if not run_id or spec.done is None:
        return None
    folder = paths.run(unit, run_id)
    certificate = ledger.read_json(os.path.join(folder, "exit.json")) or {}
    if (certificate.get("exit_code"), certificate.get("exit_status")) != ("exited", "0"):
        return None
    path = spec.log.path or os.path.join(folder, "log")
    scanner = Scanner(spec)
    try:
        size = os.stat(path).st_size
        for piece in [logfile.old_bytes(path, logfile.identity(path))] if size else []:
            scanner.feed(piece, 0.0)
    except OSError:
        return None
    scanner.settle(0.0, ended=True)
    return run_id if scanner.log(path).done else None


def plan_action(
    state: str, restart: str, wanted: str | None, active: bool, running: str | None, completed: bool
) -> tuple:
    """Return (action, why) for one unit. Pure.

    I(wanted) is the declared digest or None, I(running) that of the current run; action is one of observe,
    await, start, restart, pending. C(restart=always) restarts what runs, C(never) leaves it and says that it is pending.
    """
    if state == "observed":
        return "observe", "state is observed"
    if state == "awaited":
        return "await", "somebody else starts it"
    if state == "restarted":
        return ("restart", "state is restarted") if active else ("start", "it does not run")
    same = wanted is None or wanted == running
    if active:
        if restart == "always":
            return "restart", "restart is always"
        if same:
            return "observe", "it runs with this configuration"
        if restart == "never":
            return "pending", "it runs with another configuration and restart is never"
        return "restart", "it runs with another configuration"
    if completed and restart != "always" and wanted is not None and wanted == running:
        return "observe", "it completed with this configuration"
    return "start", "it does not run"


def plan(request: dict, paths: ledger.Paths) -> list:
    """Decide what each unit of the request needs; adds C(action), C(why), C(before), C(run_id) to its entries."""
    units = [job["unit"] for job in request["units"]]
    shown = manager.show(units)
    for job in request["units"]:
        state, _properties = shown[job["unit"]]
        if isinstance(state, Unknown):
            raise SessionError(state.why)
        spec = validate(job["proof"])
        active = state.active_state in ACTIVE
        run_id = state.invocation_id or ledger.current_run(paths, job["unit"])
        running = running_digest(paths, job["unit"], run_id)
        completed = not active and completed_run(paths, job["unit"], spec) is not None
        action, why = plan_action(request["state"], request["restart"], job["digest"], active, running, completed)
        job.update(
            action=action, why=why, run_id=run_id, before={"active_state": state.active_state, "digest": running}
        )
    return request["units"]


# ---- locks ----


def held(path: str) -> bool:
    """Whether some process holds the lock file I(path)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def lock_holder(paths: ledger.Paths, unit: str) -> str | None:
    """Id of the session whose prover holds the lock of I(unit)."""
    path = os.path.join(paths.locks, unit)
    if not held(path):
        return None
    try:
        with open(path, encoding="ascii") as handle:
            return handle.read().strip() or None
    except OSError:
        return None


def _flock(descriptor: int, timeout: float) -> bool:
    """Lock an open file, waiting at most I(timeout) s. Return whether it is locked."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True

    def give_up(_signal, _frame):
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except (
        TimeoutError
    ):  # also when it comes between the lock and the end of the timer: whoever closes the file lets go
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return True


def take_lock(path: str, text: str, timeout: float) -> int | None:
    """Lock the file I(path) and write I(text) into it; None when somebody else holds it for longer than I(timeout) s."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    if not _flock(descriptor, timeout):
        os.close(descriptor)
        return None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    return descriptor


# ---- the controlling side ----


def new_session_id() -> str:
    return time.strftime("%Y%m%dT%H%M%S", time.gmtime()) + "-" + secrets.token_hex(4)


def session_folder(paths: ledger.Paths, session: str) -> str:
    if not re.fullmatch(r"[0-9A-Za-z-]{1,64}", session):
        raise SessionError("%r is no session id" % session)
    return os.path.join(paths.sessions, session)


def find_session(request: dict, paths: ledger.Paths) -> str | None:
    """A running session that already proves what the request asks for: the same units, the same digests, a start."""
    if request["state"] != "started" or request["restart"] == "always":
        return None
    holders = {lock_holder(paths, job["unit"]) for job in request["units"]}
    if len(holders) != 1 or None in holders:
        return None
    session = holders.pop()
    other = ledger.read_json(os.path.join(session_folder(paths, session), "request.json"))
    if other is None:
        return None
    digests = {job["unit"]: job["digest"] for job in other["units"]}
    return session if all(digests.get(job["unit"], "") == job["digest"] for job in request["units"]) else None


def ask_to_let_go(request: dict, paths: ledger.Paths) -> None:
    """Tell the provers that hold a unit of this request to end: the newest request counts."""
    for job in request["units"]:
        holder = lock_holder(paths, job["unit"])
        if holder and job["action"] != "observe":
            with contextlib.suppress(OSError):
                ledger.write_json(os.path.join(session_folder(paths, holder), "release"), {"by": request["session"]})


def make_request(parameters: dict, paths: ledger.Paths) -> dict:
    """A session's request out of the module's or the command line's parameters. Raises SessionError and SpecError."""
    jobs = parameters.get("jobs")
    if not jobs:
        if parameters["state"] != "observed":
            raise SessionError(
                "jobs is empty: name at least one unit, or use state=observed for all that were delivered"
            )
        jobs = declared_jobs(paths)
        if not jobs:
            raise SessionError("jobs is empty and %s holds no job: name the units" % paths.jobs)
    launcher = {key: value for key, value in (parameters.get("launcher") or {}).items() if value is not None}
    units = [complete_job(job, paths, launcher, parameters.get("timeout")) for job in jobs]
    names = [job["unit"] for job in units]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SessionError("jobs names %s more than once: keep one" % twice[0])
    return {
        "schema": 1,
        "session": parameters.get("session") or new_session_id(),
        "state": parameters["state"],
        "restart": parameters.get("restart") or "when_changed",
        "host": parameters.get("host") or socket.gethostname(),
        "units": units,
    }


def begin(request: dict, paths: ledger.Paths, install) -> dict:
    """Arm the request's session, or take the one that already proves the same. Return the request that counts.

    I(install)() puts the prover's program in place and returns its path.
    """
    folder = session_folder(paths, request["session"])
    existing = ledger.read_json(os.path.join(folder, "request.json"))
    if existing is None:
        running = find_session(request, paths)
        if running is not None:
            for job in request["units"]:
                job.update(action="observe", why="session %s proves it already" % running)
            return dict(request, session=running)
    else:
        request = existing
    arm(request, paths, request.get("program") or install())
    return request


def predicted_rows(request: dict) -> list:
    """Rows of check mode: what would be done, nothing that was seen."""
    return [
        {
            "host": request["host"],
            "unit": job["unit"],
            "run_id": job["run_id"] if job["action"] == "observe" else None,
            "stage": "launch_proof",
            "code": {"observe": None, "pending": "restart_pending"}.get(job["action"], "would_start"),
            "ok": True,
            "seconds": 0.0,
            "remedy": "",
            "evidence": {"action": job["action"], "why": job["why"]},
            "also_observed": [],
        }
        for job in request["units"]
    ]


def result(request: dict, document: dict | None, diff: bool) -> dict:
    """What the module returns: the plan's part, and the document's where there is one."""
    changes = [job for job in request["units"] if job["action"] in ("start", "restart")]
    names = {job["unit"] for job in request["units"]}
    found = {
        "changed": bool(changes),
        "started": [job["unit"] for job in changes],
        "verdict": document["verdict"] if document else None,
        "jobs": [row for row in document["jobs"] if row["unit"] in names]
        if document
        else [{"unit": job["unit"]} for job in request["units"]],
    }
    if document and document["verdict"] != "predicted":
        found["session"] = request["session"]
        found["verdict"] = "ok" if all(row["ok"] for row in found["jobs"]) else "failed"
    if diff and changes:
        before = [
            "%s: %s, digest %s\n" % (job["unit"], job["before"]["active_state"], job["before"]["digest"])
            for job in changes
        ]
        after = ["%s: %sed, digest %s\n" % (job["unit"], job["action"], job["digest"]) for job in changes]
        found["diff"] = {"before": "".join(before), "after": "".join(after)}
    return found


def spawn(folder: str, request: dict, program: str) -> None:
    """Start the prover of a session, outside of the caller's control group and terminal."""
    unit = "launchproof-prover-%s" % request["session"]
    errors = os.path.join(folder, "prover.err")
    command = [sys.executable or "/usr/bin/python3", "-IS", program, "prover", folder]
    hard_end = max(validate(job["proof"]).total for job in request["units"]) + STOP_SLACK
    systemd_run = [
        "systemd-run", "--quiet", "--no-ask-password", "--collect", "--unit=" + unit, "--description=Proof of a launch",
        "--property=Type=exec", "--property=StandardOutput=null", "--property=StandardError=append:" + errors,
        "--property=RuntimeMaxSec=%d" % hard_end, "--property=OOMScoreAdjust=-500",
        # A unit that another one names is not collected at its end, so its exit stays readable (tried, systemd 252);
        # Before=, because with After= the prover would wait for a unit that is still starting.
        "--property=Before=" + " ".join(job["unit"] for job in request["units"]),
    ]  # fmt: skip
    try:
        answer = subprocess.run(
            systemd_run + command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
        if answer.returncode == 0:
            return
        why = answer.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    with open(errors, "a", encoding="utf-8") as handle:
        handle.write("launchproof: no transient unit (%s); the prover runs as a process of its own\n" % why)
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=handle,
            start_new_session=True,
            close_fds=True,
            cwd="/",
        )


def wait_for(folder: str, ready, timeout: float) -> bool:
    """Wait until I(ready)() holds, looking whenever something in I(folder) changes. Return whether it does."""
    loop = Loop()
    end = ledger.boottime() + timeout
    try:
        loop.watch(folder, NAMES | 0x2, lambda _mask, _name: None)
        while not ready():
            left = end - ledger.boottime()
            if left <= 0:
                return False
            loop.step(min(left, 0.1 if loop.blind else 1.0))
        return True
    finally:
        loop.close()


def arm(request: dict, paths: ledger.Paths, program: str) -> None:
    """Write the session, start its prover, return when it is armed. A session that exists is left as it is.

    Raises SessionError when the prover does not come up.
    """
    folder = session_folder(paths, request["session"])
    armed, verdict = os.path.join(folder, "armed"), os.path.join(folder, "verdict.json")
    if not os.path.isdir(folder):
        ask_to_let_go(request, paths)
        os.makedirs(paths.sessions, mode=0o755, exist_ok=True)
        prune(paths)
        os.mkdir(folder, 0o700)
        ledger.write_json(os.path.join(folder, "request.json"), dict(request, program=program), mode=0o600)
        spawn(folder, request, program)
    if not wait_for(folder, lambda: os.path.exists(armed) or os.path.exists(verdict), ARM_TIMEOUT):
        raise SessionError(
            "the prover of session %s did not arm within %d s%s"
            % (request["session"], ARM_TIMEOUT, prover_errors(folder))
        )


def prover_errors(folder: str) -> str:
    """What the prover said on its standard error, as the end of a sentence."""
    try:
        with open(os.path.join(folder, "prover.err"), encoding="utf-8", errors="replace") as handle:
            text = handle.read().strip()
    except OSError:
        return ""
    return ": " + text.splitlines()[-1] if text else ""


def prune(paths: ledger.Paths) -> None:
    """Remove the sessions that finished first beyond those kept."""
    finished = []
    for name in os.listdir(paths.sessions):
        with contextlib.suppress(OSError):
            finished.append((os.stat(os.path.join(paths.sessions, name, "verdict.json")).st_mtime, name))
    for _at, name in sorted(finished)[: max(len(finished) - KEEP_SESSIONS, 0)]:
        folder = os.path.join(paths.sessions, name)
        if not held(os.path.join(folder, "lock")):
            with contextlib.suppress(FileNotFoundError):  # another call prunes too
                for entry in os.listdir(folder):
                    os.unlink(os.path.join(folder, entry))
                os.rmdir(folder)


def read_from(path: str, offset: int) -> bytes:
    """Bytes of I(path) from I(offset) on, b"" where there are none."""
    try:
        with open(path, "rb") as handle:
            handle.seek(offset)
            return handle.read()
    except FileNotFoundError:
        return b""


def follow(session: str, offset: int, timeout: float, paths: ledger.Paths) -> dict:
    """Return what happened in a session since I(offset), waiting at most I(timeout) s for something to happen.

    The answer has C(events), C(offset), C(status) ({unit: how it stands}) and C(verdict) (the final document or None).
    A prover that died without a verdict is replaced by one that goes on with the same baseline.
    """
    folder = session_folder(paths, session)
    events, verdict = os.path.join(folder, "events.jsonl"), os.path.join(folder, "verdict.json")
    if not os.path.isdir(folder):
        raise SessionError("there is no session %s on this machine any more" % session)

    def news() -> bool:
        """Only a verdict is worth an early answer; the rest can wait for the next call."""
        return os.path.exists(verdict) or b'"event": "verdict"' in read_from(events, offset)

    if not wait_for(folder, news, timeout) and not held(os.path.join(folder, "lock")) and not os.path.exists(verdict):
        request = ledger.read_json(os.path.join(folder, "request.json"))
        if request is None:
            raise SessionError("session %s has no readable request" % session)
        spawn(folder, dict(request, session="%s-%s" % (session, secrets.token_hex(2))), request["program"])
    document = ledger.read_json(verdict)  # before the events, so that none of them is missed
    lines = read_from(events, offset)
    lines = lines[: lines.rfind(b"\n") + 1]
    status = ledger.read_json(os.path.join(folder, "status.json")) or {}
    return {
        "events": [json.loads(line) for line in lines.splitlines()],
        "offset": offset + len(lines),
        "status": status.get("units", {}),
        "verdict": document,
    }


def summary(rows: list) -> str:
    """The failed rows as sentences, for a task's message."""
    return "\n".join(render.sentence(row) for row in rows if not row["ok"])


def live_line(host: str, rows: dict, status: dict) -> str:
    """One line on how a host's proof stands: what is decided, then the unit whose deadline is nearest."""
    decided = ["%s %s" % (unit, row["code"]) for unit, row in sorted(rows.items())]
    waiting = sorted(
        ((now["allowed"] - now["elapsed"], unit, now) for unit, now in status.items() if unit not in rows),
        key=lambda item: item[:2],
    )
    parts = ["%d decided: %s" % (len(decided), ", ".join(decided[:3]))] if decided else []
    for _left, unit, now in waiting[:1]:
        text = "%s: %s %.0f of %.0f s" % (unit, now["stage"], now["elapsed"], now["allowed"])
        if now["progress"] is not None:
            text += ", progress %s" % now["progress"]
        elif now["missing"]:
            text += ", %s" % now["missing"][0]
        parts.append(text + (" | %s" % now["line"].strip() if now["line"].strip() else ""))
    if len(waiting) > 1:
        parts.append("%d more wait" % (len(waiting) - 1))
    return "%s: %s" % (host, "; ".join(parts) or "the prover is at work")


def undecided_row(unit: str, status: dict, host: str, session: str) -> dict:
    """The row of a unit that still waits for evidence when the call ends, because another unit failed."""
    now = status.get(unit, {})
    return {
        "host": host,
        "unit": unit,
        "run_id": now.get("run_id"),
        "stage": "launch_proof",
        "code": "inconclusive",
        "ok": False,
        "seconds": now.get("seconds", 0.0),
        "remedy": "Its proof goes on in session %s; run the play again to see how it ended." % session,
        "evidence": {"missing": now.get("missing", []), "proof_stage": now.get("stage")},
        "also_observed": now.get("noticed", []),
    }
