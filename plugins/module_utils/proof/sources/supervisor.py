# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Units where there is no systemd: their runners tell what they are, supervisor keeps the runners.

The states come from C(runs/UNIT/state.json), which each unit's runner writes, so that nobody has to be asked, and a change
is an event of a folder that is watched anyway. Supervisor is asked to start a runner, over XML-RPC on its own socket. A unit
of C(launchproof run) is nobody's to keep: its runner is a process of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger, runner
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import UnitState
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import Loop
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.process import open_pidfd
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.systemd import SystemdError

SUPERVISORD = "/opt/launchproof/supervisor/bin/supervisord"
SUPERVISORCTL = "/opt/launchproof/supervisor/bin/supervisorctl"
CONFIG = "/etc/launchproof/supervisor.conf"
CONTROL = "%s -c %s" % (SUPERVISORCTL, CONFIG)
PROGRAMS = "/etc/launchproof/supervisor.d"
SOCKET = "/run/launchproof/supervisor.sock"
# Faults of supervisor's XML-RPC: xmlrpc.py, class Faults.
ALREADY_ADDED, ALREADY_STARTED, NOT_RUNNING, STILL_RUNNING = 90, 60, 70, 91
COME_UP = 10.0  # s in which a runner that was started must have begun a run


class SupervisorError(SystemdError):
    """Supervisor cannot be asked, or refuses."""


def program_file(unit: str) -> str:
    """What tells supervisor of a unit's runner."""
    return "%s/%s.conf" % (PROGRAMS, unit)


class Manager:
    """The units of this machine, with the methods of systemd.Manager. Raises SupervisorError.

    I(job_ended) is told of the starts that were asked for here, I(changed) of runners that have ended: all else changes in the
    folders of the runs.
    """

    def __init__(self, loop=None, changed=None, job_ended=None, paths: ledger.Paths | None = None):
        self.paths = paths or ledger.Paths()
        self._loop, self._on_changed, self._on_job_ended = loop, changed, job_ended
        self._asked = {}  # unit -> (start or stop, id of the run before, CLOCK_BOOTTIME)
        self._ended = []
        self._killed = {}  # (unit, run id) -> UnitState: of runners that were killed

    def __enter__(self):
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def close(self) -> None:
        """There is no connection that stays."""

    def tell(self) -> None:
        """Pass on which of the starts and stops that were asked for have come to an end."""
        ended, self._ended = self._ended, []
        for job in ended:
            if self._on_job_ended:
                self._on_job_ended(*job)

    # ---- questions ----

    def show(self, units: list) -> dict:
        """{unit: (UnitState, properties)} of I(units), the latter as far as the prover asks for them."""
        return {unit: self._look(unit) for unit in units}

    def _look(self, unit: str) -> tuple:
        record = ledger.read_json(self.paths.job(unit))
        if record is None:
            return UnitState(load_state="not-found", control=CONTROL), {}
        state, _starts, alive = runner.read_state(self.paths, unit)
        path = program_file(unit)
        kept = os.path.exists(path)
        state = replace(state, fragment_path=path if kept else self.paths.job(unit), control=CONTROL if kept else "")
        if not alive and state.active_state not in runner.ENDED:
            state = self._killed.setdefault((unit, state.invocation_id), runner.buried(state))
        kind = self._pending(unit, state, alive)
        if kind:
            state = replace(state, pending_job=kind)
        properties = {
            "User": record.get("user") or "root",
            "WorkingDirectory": record.get("working_directory") or "/",
            # Times, pid and end of it stand in the state alone.
            "ExecStart": [("", record.get("argv") or [], False, 0, 0, 0, 0, 0, 0, 0)],
        }
        return state, properties

    def _pending(self, unit: str, state: UnitState, alive: bool) -> str:
        """What was asked of a unit here and has not happened yet, start or stop, else ""."""
        if unit not in self._asked:
            return ""
        kind, before, at = self._asked[unit]
        late = not alive and ledger.boottime() - at > COME_UP
        if not late and (alive if kind == "stop" else state.invocation_id == before):
            return kind
        del self._asked[unit]
        self._ended.append((kind + " " + unit, unit, "failed" if late and kind == "start" else "done"))
        return ""

    def failed_dependency(self, unit: str) -> str:
        """There are no dependencies here."""
        return ""

    # ---- orders ----

    def order(self, method: str, units: list) -> dict:
        """Start or stop, by StartUnit or StopUnit: {unit: a name of the request, or SupervisorError where it is refused}."""
        act = self._start if method == "StartUnit" else self._stop
        answers = {}
        for unit in units:
            state, _starts, alive = runner.read_state(self.paths, unit)
            try:
                asked = act(unit, state, alive)
            except SupervisorError as error:
                answers[unit] = error
                continue
            kind = "start" if act == self._start else "stop"
            answers[unit] = "%s %s" % (kind, unit)
            if asked:
                self._asked[unit] = (kind, state.invocation_id, ledger.boottime())
            else:
                self._ended.append((answers[unit], unit, "done"))
        return answers

    def _start(self, unit: str, state: UnitState, alive: bool) -> bool:
        if alive:
            return False
        if ledger.read_json(self.paths.job(unit)) is None:
            raise SupervisorError("%s is not there" % self.paths.job(unit), lasting=True)
        if state.active_state not in runner.ENDED:
            # Else its next runner would take itself for one that goes on where this one was killed.
            runner.write_state(self.paths, unit, runner.buried(state), [])
        if not os.path.exists(program_file(unit)):
            detach(unit)
            return True
        server = supervisord(start=True).supervisor
        try:
            if not _but(server.startProcess, unit, ALREADY_STARTED):
                # The runner before has ended just now, and supervisor is yet to notice it: this waits until it has.
                _but(server.stopProcess, unit, NOT_RUNNING)
                _but(server.startProcess, unit, ALREADY_STARTED)
        except OSError as error:
            raise SupervisorError("supervisor went away: %s" % error) from error
        return True

    def _stop(self, unit: str, _state: UnitState, alive: bool) -> bool:
        """The runner ends with 0 then, after which supervisor does not start it again."""
        data = ledger.read_json(runner.state_path(self.paths, unit)) if alive else None
        if not data:
            return False
        descriptor = open_pidfd(data["runner"]["pid"]) if self._loop else None
        if descriptor is not None:
            self._loop.add(descriptor, lambda: self._on_runner_end(descriptor, unit))
        runner.kill((data["runner"]["pid"],), signal.SIGTERM)
        return True

    def _on_runner_end(self, descriptor: int, unit: str) -> None:
        self._loop.remove(descriptor)
        os.close(descriptor)
        self._on_changed(unit)

    def reset_failed(self, units: list) -> None:
        """Each start that is asked for counts the restarts anew."""

    def reload(self) -> None:
        """Make supervisor take the programs that are declared now. None is started, and none that runs is stopped."""
        if os.path.exists(CONFIG):
            server = supervisord(start=True).supervisor
            added, changed, removed = server.reloadConfig()[0]
            for name in changed + removed:
                _but(server.removeProcessGroup, name, STILL_RUNNING)
            for name in added + changed:
                _but(server.addProcessGroup, name, ALREADY_ADDED)


def _but(method, name: str, expected: int) -> bool:
    """Call a method of supervisor's whose fault I(expected) is no error. Return whether there was none."""
    from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import xmlrpc_unix

    try:
        method(name)
        return True
    except xmlrpc_unix.Fault as fault:
        if fault.faultCode != expected:
            raise SupervisorError(
                "supervisor does not take %s: %s" % (name, fault.faultString), lasting=True
            ) from fault
        return False


def needs_reload() -> bool:
    """Whether supervisor does not run, or knows other programs than are declared."""
    server = supervisord(start=False)
    return server is None or any(server.supervisor.reloadConfig()[0])


def stop(units: list) -> None:
    """Stop I(units), side by side, and return when all have ended."""
    loop = Loop()
    manager = Manager(loop, lambda _unit: None)
    manager.order("StopUnit", units)
    while any(state.pending_job for state, _properties in manager.show(units).values()):
        loop.step(1.0)
    loop.close()


def supervisord(start: bool):
    """A way to call supervisor, which is started where it does not run and I(start) asks for it; else None then."""
    # Here, for it takes 30 ms of each module of a host that systemd runs.
    from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import xmlrpc_unix

    server = xmlrpc_unix.server(SOCKET)
    try:
        server.supervisor.getPID()
        return server
    except OSError:
        if not start:
            return None
    os.makedirs(os.path.dirname(SOCKET), mode=0o755, exist_ok=True)
    try:
        # It listens before it goes into the background, so it can be called when this ends.
        done = subprocess.run(
            [SUPERVISORD, "-c", CONFIG], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            cwd="/", env={"PATH": runner.PATH, "LANG": "C.UTF-8"}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise SupervisorError("%s: %s; deliver the job again" % (SUPERVISORD, error.strerror), lasting=True) from error
    if done.returncode:
        said = done.stdout.decode(errors="replace").strip()
        raise SupervisorError("supervisord ended with %d: %s" % (done.returncode, said), lasting=True)
    return server


def detach(unit: str) -> None:
    """Start the runner of a unit as a process of its own."""
    command = [sys.executable or "/usr/bin/python3", "-IS", os.path.realpath(sys.argv[0]), "run-job", unit]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen(command, start_new_session=True, cwd="/", env={"PATH": runner.PATH, "LANG": "C.UTF-8"}, **quiet)


class Groups:
    """The processes of a unit, with the methods of cgroup.Groups; a group is named RUNNER'S PID/ITS START/RUN ID.

    How many the kernel killed for memory only the certificate of a run tells: the counter that there is counts for all jobs.
    """

    def pids(self, group: str) -> tuple:
        """All below the runner, from which nothing can escape while it lives; then whatever carries the run's token."""
        if not group:
            return ()
        pid, started, run_id = group.split("/")
        if runner.lives({"pid": int(pid), "started_at": float(started)}):
            return runner.descendants(int(pid))
        return runner.of_run(run_id)

    def events_path(self, _group: str) -> None:
        return None

    def oom_path(self, _group: str) -> None:
        return None

    def oom_kills(self, _group: str) -> int:
        return 0

    def oom_event(self, _group: str) -> None:
        return None
