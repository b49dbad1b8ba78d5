# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""C(launchproof run-job UNIT): runs a job where there is no systemd, the way the job's unit would run there.

Supervisor calls it, or C(launchproof run). It makes each run's folder and certificate as systemd's own commands do
elsewhere, starts the job as its user with its environment, keeps its processes together, stops them, and starts the job
again after a failure. What is to be known of the unit it leaves in C(runs/UNIT/state.json), in the words of systemd.

It ends with 0 when the job is not to run any more: whoever called it starts it again after any other end, and then it
goes on where the one before was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import shutil
import signal
import socket
import struct
import sys
import syslog
import uuid
from dataclasses import asdict, replace

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import envfile, ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import DUMPED, EXITED, KILLED, UnitState
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import process
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import Loop

RESTART_SEC = 1.0  # s between a failure and the next start
BURST, INTERVAL = 5, 600.0  # starts within so many s after which there is no next one
NOT_AGAIN = (64, 65, 78)  # usage, data and configuration errors of sysexits(3): the next start would end the same way
CLEAN = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGPIPE,
)  # ends by these are no failure: systemd.service(5)
ENDED = ("inactive", "failed")
# Where systemd looks for a bare program name: DEFAULT_PATH_NORMAL, src/basic/path-util.h.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EXIT_CHDIR, EXIT_EXEC, EXIT_STDOUT, EXIT_USER = 200, 203, 209, 217  # systemd.exec(5), "Process Exit Codes"
# What of a UnitState tells of a run, and not of the job's settings.
OF_A_RUN = (
    "active_state", "sub_state", "result", "invocation_id", "n_restarts", "main_pid", "exec_main_pid", "exec_main_code", "exec_main_status",
    "exec_main_started_at", "exec_main_exited_at",
)  # fmt: skip
WORDS = {EXITED: "exited", KILLED: "killed", DUMPED: "dumped"}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38  # prctl(2)
CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid; unix(7)

_libc = ctypes.CDLL(None, use_errno=True)


def state_path(paths: ledger.Paths, unit: str) -> str:
    return os.path.join(paths.unit_runs(unit), "state.json")


def read_state(paths: ledger.Paths, unit: str) -> tuple:
    """(UnitState, starts, whether its runner lives) as the last runner of I(unit) left it."""
    data = ledger.read_json(state_path(paths, unit))
    if data is None:
        return UnitState(type="simple"), [], False
    told = {name: value for name, value in data["unit"].items() if name in UnitState.__dataclass_fields__}
    state = UnitState(**dict(told, missing_files=tuple(told["missing_files"])))
    return state, data["starts"], lives(data["runner"])


def write_state(paths: ledger.Paths, unit: str, state: UnitState, starts: list) -> None:
    """Leave what is known of I(unit), in the name of this process. Raises OSError."""
    runner = {"pid": os.getpid(), "started_at": process.read_stat(os.getpid())["started_at"]}
    ledger.write_json(state_path(paths, unit), {"schema": 1, "runner": runner, "starts": starts, "unit": asdict(state)})


def lives(runner: dict) -> bool:
    """Whether the very process lives that I(runner) has the pid and the start of."""
    found = process.read_stat(runner["pid"])
    return found is not None and found["state"] not in "ZX" and found["started_at"] == runner["started_at"]


def buried(state: UnitState) -> UnitState:
    """What I(state) is once its runner was killed: the kernel then kills the job."""
    return replace(
        state, active_state="failed", sub_state="failed", result="signal", main_pid=0, pending_job="", exec_main_code=KILLED,
        exec_main_status=signal.SIGKILL, exec_main_exited_at=ledger.boottime(),
    )  # fmt: skip


def descendants(pid: int) -> tuple:
    """Pids of all processes below I(pid)."""
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        found = process.read_stat(int(name))
        if found:
            children.setdefault(found["parent"], []).append(int(name))
    below, found = [pid], []
    while below:
        below = [child for parent in below for child in children.get(parent, ())]
        found += below
    return tuple(found)


def of_run(run_id: str) -> tuple:
    """Pids of all processes that carry the token of a run in their environment."""
    return tuple(
        int(name) for name in os.listdir("/proc") if name.isdigit() and process.invocation_id(int(name)) == run_id
    )


def kill(pids: tuple, number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def verdict_of(status: int) -> tuple:
    """(code, status, result) of what waitpid(2) gave: facts.EXITED …, exit status or signal, systemd's Result=."""
    if os.WIFEXITED(status):
        number = os.WEXITSTATUS(status)
        return EXITED, number, "exit-code" if number else "success"
    number = os.WTERMSIG(status)
    if os.WCOREDUMP(status):
        return DUMPED, number, "core-dump"
    return KILLED, number, "success" if number in CLEAN else "signal"


class Runner:
    """Runs one unit until it is not to run any more."""

    def __init__(self, unit: str, record: dict, paths: ledger.Paths):
        self.unit, self.record, self.paths = unit, record, paths
        self.loop = Loop()
        self.state = UnitState(
            type="notify" if record.get("notify") else "simple",
            restart=record.get("restart") or "no",
            restart_sec=RESTART_SEC,
            watchdog=record.get("watchdog"),
            notify_access="main" if record.get("notify") else "none",
        )
        self.starts = []
        self.stop_asked = self.ready = False
        self.alive_at = 0.0  # CLOCK_BOOTTIME of the last keep-alive
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # whatever the job starts stays below this process
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.loop.add(reader, lambda: os.read(reader, 4096))
        signal.signal(signal.SIGCHLD, lambda *_arguments: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_stop(self, *_arguments) -> None:
        self.stop_asked = True

    def save(self, **changes) -> None:
        """Tell how the unit is. A full disk must not end the job: then the prover sees an older state."""
        self.state = replace(self.state, **changes)
        with contextlib.suppress(OSError):
            write_state(self.paths, self.unit, self.state, self.starts)

    def run(self) -> None:
        before, self.starts, _alive = read_state(self.paths, self.unit)
        asked = before.active_state in ENDED  # else the runner before was killed, and this one goes on
        if asked:
            self.starts = []
        else:
            self._bury(before)
            self.state = replace(self.state, **{name: getattr(buried(before), name) for name in OF_A_RUN})
        while asked or self._again():
            asked = False
            self.starts.append(ledger.boottime())
            self._run_once()
        self.save()

    def _again(self) -> bool:
        """Whether the job is started once more after the end that it has come to; waits until it is time to."""
        now = ledger.boottime()
        self.starts = [at for at in self.starts if 0 <= now - at < INTERVAL]
        final = self.state.exec_main_code == EXITED and self.state.exec_main_status in NOT_AGAIN
        worth = self.state.active_state == "failed" and not final and self.state.restart != "no"
        if self.stop_asked or not worth or len(self.starts) >= BURST:
            return False
        self.save(active_state="activating", sub_state="auto-restart")
        while not self.stop_asked and ledger.boottime() < now + RESTART_SEC:
            self.loop.step(now + RESTART_SEC - ledger.boottime())
        if self.stop_asked:
            self.state = replace(self.state, active_state="inactive", sub_state="dead")
            return False
        self.state = replace(self.state, n_restarts=self.state.n_restarts + 1)
        return True

    def _bury(self, before: UnitState) -> None:
        """Certify the end of a run whose runner was killed, with which the kernel killed the job, and end what is left of it."""
        killed = {"SERVICE_RESULT": "signal", "EXIT_CODE": "killed", "EXIT_STATUS": "KILL"}
        if ledger.valid_run_id(before.invocation_id):
            ledger.end_run(self.unit, before.invocation_id, killed, self.paths, 0)
            kill(of_run(before.invocation_id), signal.SIGKILL)

    # ---- one run ----

    def _run_once(self) -> None:
        run_id = uuid.uuid4().hex
        fresh = {
            "invocation_id": run_id, "result": "success", "main_pid": 0, "exec_main_pid": 0, "exec_main_code": 0, "exec_main_status": 0,
            "exec_main_started_at": 0.0, "exec_main_exited_at": 0.0, "missing_files": (), "failed_command": "", "control_group": "",
        }  # fmt: skip
        oom_before = ledger.oom_kills() or 0
        try:
            ledger.begin_run(self.unit, run_id, self.paths)
        except ledger.LedgerError as error:
            syslog.syslog(syslog.LOG_ERR, str(error))
            if error.status == ledger.EX_CONFIG:  # the record was read, so it is the user that is missing
                ledger.make_run_folder(self.paths, self.unit, run_id, None)
                self._finish(fresh, EXITED, EXIT_USER, "exit-code", 0)
            else:
                command = "launchproof begin-run %s (exit status %d)" % (self.unit, error.status)
                fresh.update(active_state="failed", sub_state="failed", result="exit-code", failed_command=command)
                self.state = replace(self.state, **fresh)
            return
        files = self.record.get("environment_files") or []
        missing = tuple(path for path in files if not os.path.exists(path))
        if missing:
            self._finish(dict(fresh, missing_files=missing), 0, 0, "resources", 0)
            return
        listener = self._listen(run_id)
        pid, failure = self._spawn(run_id, files)
        began = ledger.boottime()
        fresh.update(exec_main_pid=pid, exec_main_started_at=began)
        if failure:
            os.waitpid(pid, 0)
            self._finish(fresh, EXITED, failure, "exit-code", 0)
            return
        own = process.read_stat(os.getpid())["started_at"]
        group = "%d/%s/%s" % (os.getpid(), own, run_id)
        active, sub = ("activating", "start") if self.state.type == "notify" else ("active", "running")
        fresh.update(main_pid=pid, control_group=group, active_state=active, sub_state=sub)
        self.save(**fresh)
        status, why = self._follow(pid)
        code, number, result = verdict_of(status)
        rise = (ledger.oom_kills() or 0) - oom_before
        # The counter is the whole container's: a rise tells of this job only where it was killed, or failed.
        self._finish({}, code, number, why or result, rise if number else 0)
        if listener:
            self.loop.remove(listener.fileno())
            listener.close()

    def _finish(self, more: dict, code: int, status: int, result: str, oom: int) -> None:
        """Certify the end, tell of it, and end what is left of the run. What becomes of the unit then is told by who knows."""
        now = ledger.boottime()
        number = signal.Signals(status).name[3:] if code in (KILLED, DUMPED) else str(status)
        words = {"SERVICE_RESULT": result, "EXIT_CODE": WORDS.get(code), "EXIT_STATUS": number if code else None}
        run_id = more.get("invocation_id") or self.state.invocation_id
        if result != "resources":  # as with systemd, whose state tells of a start that made no process
            with contextlib.suppress(ledger.LedgerError):
                ledger.end_run(self.unit, run_id, words, self.paths, max(oom, 0), self.stop_asked)
        # The certificate first: who sees the end finds there what the state does not hold, a kill for want of memory.
        self.save(active_state="deactivating", sub_state="stop-post",
                  **dict(more, main_pid=0, result=result, exec_main_code=code, exec_main_status=status, exec_main_exited_at=now))  # fmt: skip
        self._sweep()
        failed = result != "success"
        now_is, sub_state = ("failed", "failed") if failed else ("inactive", "dead")
        self.state = replace(self.state, active_state=now_is, sub_state=sub_state, control_group="", pending_job="")

    def _sweep(self) -> None:
        """End all that the job has left behind, and wait for it."""
        while True:
            kill(descendants(os.getpid()), signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def _follow(self, main: int) -> tuple:
        """Wait for the end of the main process. Return (what waitpid(2) gave, the Result= that only we know of, or "")."""
        why, kill_at = "", None
        self.alive_at = ledger.boottime()
        watchdog, patience = self.state.watchdog, self.record.get("timeout_stop") or 120.0
        while True:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(-1, os.WNOHANG)
                while pid:
                    if pid == main:
                        return status, why
                    pid, status = os.waitpid(-1, os.WNOHANG)
            now = ledger.boottime()
            guarded = watchdog and self.state.active_state == "active" and not kill_at
            if self.stop_asked and self.state.pending_job != "stop":
                self.save(active_state="deactivating", sub_state="stop-sigterm", pending_job="stop")
                kill((main,), signal.SIGTERM)
                kill((main,), signal.SIGCONT)
                kill_at = kill_at or now + patience
            elif guarded and now >= self.alive_at + watchdog:
                why, kill_at = "watchdog", now + patience
                kill((main,), signal.SIGABRT)
            elif kill_at and now >= kill_at:
                why, kill_at = why or "timeout", now + patience
                kill((main, *descendants(os.getpid())), signal.SIGKILL)
            limits = [kill_at] if kill_at else [self.alive_at + watchdog] if guarded else [now + 3600.0]
            self.loop.step(min(limits) - now)

    def _spawn(self, run_id: str, files: list) -> tuple:
        """(pid of the main process, 0 or the exit status by which systemd would say what could not be set up)."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            status = 255
            try:
                status = self._become(run_id, files)
            finally:
                os.write(writer, b"%d" % status)
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader, "rb") as handle:
            return pid, int(handle.read() or 0)  # nothing: the exec has closed it

    def _become(self, run_id: str, files: list) -> int:
        """Turn this process into the job; returns only where that fails, and what could not be done."""
        record, step = self.record, EXIT_USER
        try:
            entry = pwd.getpwnam(record.get("user") or "root")
            environ = {
                "PATH": PATH, "LANG": os.environ.get("LANG", "C.UTF-8"), "HOME": entry.pw_dir, "USER": entry.pw_name,
                "LOGNAME": entry.pw_name, "SHELL": entry.pw_shell,
            }  # fmt: skip
            for path in files:
                environ.update(envfile.read(path))
            environ["INVOCATION_ID"] = run_id
            if self.state.notify_access == "main":
                environ["NOTIFY_SOCKET"] = "@" + address(run_id)
            if self.state.watchdog:
                environ.update(WATCHDOG_USEC=str(int(self.state.watchdog * 1e6)), WATCHDOG_PID=str(os.getpid()))
            os.setsid()
            step = EXIT_STDOUT
            output = os.open(
                os.path.join(self.paths.current(self.unit), "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
            )
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (output, 1), (output, 2)):
                os.dup2(source, target)
            step = EXIT_CHDIR
            os.chdir(record.get("working_directory") or "/")
            step = EXIT_USER
            os.initgroups(entry.pw_name, entry.pw_gid)
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
            os.umask(0o022)
            if record.get("no_new_privileges"):
                _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after setuid(2), which takes it back
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP):  # what is ignored stays so over an exec
                signal.signal(number, signal.SIG_DFL)
            step = EXIT_EXEC
            program = shutil.which(record["argv"][0], path=PATH) or record["argv"][0]
            os.execve(program, record["argv"], environ)
        except (OSError, KeyError, ValueError):
            return step

    def _listen(self, run_id: str):
        """A socket for sd_notify(3), where the job speaks it. Its name holds the run's id, and only the main process is heard."""
        if self.state.notify_access != "main":
            return None
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind("\0" + address(run_id))
        self.loop.add(listener.fileno(), lambda: self._on_notify(listener))
        return listener

    def _on_notify(self, listener: socket.socket) -> None:
        data, credentials, _flags, _sender = listener.recvmsg(4096, socket.CMSG_SPACE(CREDENTIALS.size))
        sender = CREDENTIALS.unpack(credentials[0][2])[0] if credentials else 0
        if sender != self.state.main_pid:
            return
        words = data.decode(errors="replace").splitlines()
        if "WATCHDOG=1" in words:
            self.alive_at = ledger.boottime()
        if "READY=1" in words and self.state.active_state == "activating":
            self.alive_at = ledger.boottime()
            self.save(active_state="active", sub_state="running")


def address(run_id: str) -> str:
    """Name of the socket that a run reports to, in the abstract namespace: no file is left behind, and nobody guesses it."""
    return "launchproof/" + run_id


def main(argv: list, paths: ledger.Paths | None = None) -> int:
    """C(run-job UNIT). Returns 0 when the job is not to run any more, also where another runner has it already."""
    paths = paths or ledger.Paths()
    unit = argv[1] if len(argv) == 2 else ""
    record = ledger.read_json(paths.job(unit)) if unit and "/" not in unit else None
    if record is None:
        sys.stderr.write(
            "launchproof run-job %s: %s is missing or is no JSON object\n" % (unit, paths.job(unit or "UNIT"))
        )
        return ledger.EX_CONFIG
    folder = os.path.join(os.path.dirname(paths.locks), "runners")
    os.makedirs(folder, mode=0o755, exist_ok=True)
    lock = os.open(os.path.join(folder, unit), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    os.makedirs(paths.unit_runs(unit), mode=0o755, exist_ok=True)
    Runner(unit, record, paths).run()
    return 0
