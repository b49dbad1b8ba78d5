# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The run ledger: one folder for each invocation of a unit.

systemd calls C(begin-run) as C(ExecStartPre=+) and C(end-run) as C(ExecStopPost=+), so both are on the path of every
start: this file imports little and prints nothing. What it has to say goes to syslog, because its own standard output
is the log of the run before (C(current) is swapped only by begin-run itself).
"""

from __future__ import annotations

import json
import os
import time

RUN_ID_LENGTH = 32  # INVOCATION_ID is a 128-bit id in hexadecimal: systemd.exec(5)
EX_USAGE, EX_CANTCREAT, EX_CONFIG = 64, 73, 78  # sysexits(3)
MANIFEST_KEYS = ("job", "digest", "argv", "env", "user", "versions", "code_hash", "proof")


class LedgerError(Exception):
    """The ledger could not be written. C(status) is the exit status to end with."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Paths:
    """Where things lie on a target; C(root) is another directory in tests.

    Jobs and runs lie in one place. An ordinary user's proofs are his own, so their sessions lie in I(own), a folder of his.
    """

    def __init__(self, root: str = "/", own: str | None = None):
        self.jobs = os.path.join(root, "etc/launchproof/jobs")
        self.state = os.path.join(root, "var/lib/launchproof")
        self.runs = os.path.join(self.state, "runs")
        self.sessions = os.path.join(own or self.state, "sessions")
        self.locks = os.path.join(root, "run/launchproof/locks")

    def job(self, unit: str) -> str:
        return os.path.join(self.jobs, unit + ".json")

    def unit_runs(self, unit: str) -> str:
        return os.path.join(self.runs, unit)

    def run(self, unit: str, run_id: str) -> str:
        return os.path.join(self.runs, unit, run_id)

    def current(self, unit: str) -> str:
        return os.path.join(self.runs, unit, "current")


def read_json(path: str) -> dict | None:
    """Return the object in I(path), or None where there is none that can be read (absent, torn, not an object)."""
    try:
        with open(path, encoding="utf-8") as handle:
            data = json.load(handle)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def write_json(path: str, data: dict, mode: int = 0o644, replace: bool = True) -> bool:
    """Write I(data) to I(path) in one step. Return False, and write nothing, where it exists and I(replace) is false.

    The folder may belong to the job's user, so a name that was prepared as a link is never followed: the temporary
    file is created exclusively, and the final name is renamed or linked over.
    """
    temporary = "%s.%d.tmp" % (path, os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, mode)
    except FileExistsError:  # left over by a writer of the same pid before a reboot
        os.unlink(temporary)
        descriptor = os.open(temporary, flags, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            json.dump(data, handle, sort_keys=True, ensure_ascii=False)
            handle.write("\n")
        if replace:
            os.rename(temporary, path)
            return True
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        return True
    finally:
        if not replace or os.path.lexists(temporary):
            os.unlink(temporary)


def write_verdict(paths: Paths, unit: str, run_id: str, row: dict) -> None:
    """Leave the newest verdict on a run in its folder, where there is one that can be written."""
    folder = paths.run(unit, run_id)
    if os.path.isdir(folder):
        try:  # noqa: SIM105 - contextlib would be one import more at every start of a unit
            write_json(os.path.join(folder, "verdict.json"), dict(row, schema=1, at=timestamp()))
        except OSError:
            pass  # an ordinary user looks, and leaves nothing


def point_current(paths: Paths, unit: str, run_id: str) -> None:
    """Make C(runs/UNIT/current) name I(run_id), in one step, as a relative link."""
    link = paths.current(unit)
    temporary = link + ".new"
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(run_id, temporary)
    os.rename(temporary, link)


def current_run(paths: Paths, unit: str) -> str | None:
    """The id of the run that C(current) names, or None."""
    try:
        return os.readlink(paths.current(unit))
    except OSError:
        return None


def valid_run_id(run_id: str) -> bool:
    return len(run_id) == RUN_ID_LENGTH and all(character in "0123456789abcdef" for character in run_id)


def timestamp(seconds: float | None = None) -> str:
    """UTC wall clock, for people; decisions use CLOCK_BOOTTIME."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def make_run_folder(paths: Paths, unit: str, run_id: str, user: str | None) -> str:
    """Create the folder of a run with an empty log, owned by I(user), and return its path; keep one that exists."""
    owner = (-1, -1)
    if user:
        import pwd  # not needed for units that run as root without a job file

        try:
            entry = pwd.getpwnam(user)
        except KeyError:
            raise LedgerError("the job's user %r does not exist" % user, EX_CONFIG) from None
        owner = (entry.pw_uid, entry.pw_gid)
    folder = paths.run(unit, run_id)
    try:
        os.makedirs(paths.unit_runs(unit), mode=0o755, exist_ok=True)
        try:
            os.mkdir(folder, 0o755)
        except FileExistsError:
            return folder
        log = os.open(os.path.join(folder, "log"), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.fchown(log, *owner)
        finally:
            os.close(log)
        os.chown(folder, *owner)
    except OSError as error:
        raise LedgerError("cannot make the run folder %s: %s" % (folder, error.strerror), EX_CANTCREAT) from error
    return folder


def begin_run(unit: str, run_id: str, paths: Paths) -> None:
    """Make the folder of run I(run_id), write its manifest, point C(current) at it.

    Raises LedgerError. A missing or broken job file still gets its folder first, so that what is said about it lands
    in the log of this run and not in that of the run before.
    """
    path = paths.job(unit)
    job = read_json(path)
    user = job.get("user") if job else None
    folder = make_run_folder(paths, unit, run_id, user)
    manifest = {
        "schema": 1,
        "unit": unit,
        "run_id": run_id,
        "started_at": timestamp(),
        "boottime": round(boottime(), 3),
    }
    manifest.update((key, job[key]) for key in MANIFEST_KEYS if job and key in job)
    try:
        write_json(os.path.join(folder, "manifest.json"), manifest, replace=False)
        point_current(paths, unit, run_id)
        if job is None:
            message = "begin-run %s: %s is missing or is no JSON object; deliver the job again" % (unit, path)
            with open(os.path.join(folder, "log"), "a", encoding="utf-8") as log:
                log.write("launchproof: %s\n" % message)
            raise LedgerError(message, EX_CONFIG)
    except OSError as error:
        raise LedgerError("cannot write the run folder %s: %s" % (folder, error.strerror), EX_CANTCREAT) from error


def oom_kills(proc_self_cgroup: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> int | None:
    """Kernel OOM kills counted in this process's own control group, or None where no counter can be read.

    ExecStopPost= runs inside the unit's group, the last moment at which its counter exists: the group is removed
    before systemd reports the end.
    """
    try:
        with open(proc_self_cgroup, encoding="utf-8") as handle:
            lines = handle.read().splitlines()
    except OSError:
        return None
    candidates = []
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            candidates.append(mount + "/memory" + path + "/memory.oom_control")
        elif not controllers:
            candidates.append(mount + path + "/memory.events")
    for candidate in candidates:
        try:
            count = oom_kill_counter(candidate)
        except OSError:
            continue
        if count is not None:
            return count
    return None


def oom_kill_counter(path: str) -> int | None:
    """The C(oom_kill) count of a memory.events (v2) or memory.oom_control (v1) file; None where it has no such line."""
    with open(path, encoding="ascii") as handle:
        for line in handle:
            name, _space, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None


def end_run(
    unit: str, run_id: str, environ: dict, paths: Paths, oom_kill: int | None = None, stopped: bool | None = None
) -> None:
    """Write the death certificate of run I(run_id), once; the variables are those of systemd.exec(5).

    I(oom_kill) is how many the kernel killed for memory, where this process's own control group does not tell that;
    I(stopped) whether the run was asked to stop, which systemd does not tell here.
    """
    folder = make_run_folder(paths, unit, run_id, None)
    certificate = {
        "schema": 1,
        "unit": unit,
        "run_id": run_id,
        "service_result": environ.get("SERVICE_RESULT"),
        "exit_code": environ.get("EXIT_CODE"),
        "exit_status": environ.get("EXIT_STATUS"),
        "oom_kill": oom_kills() if oom_kill is None else oom_kill,
        "stop_requested": stopped,
        "ended_at": timestamp(),
        "boottime": round(boottime(), 3),
    }
    try:
        write_json(os.path.join(folder, "exit.json"), certificate, replace=False)
    except OSError as error:
        raise LedgerError("cannot write %s/exit.json: %s" % (folder, error.strerror), EX_CANTCREAT) from error


def main(argv: list, environ: dict | None = None, paths: Paths | None = None) -> int:
    """C(begin-run UNIT) and C(end-run UNIT), for systemd. Returns the exit status, says why in syslog alone."""
    environ = dict(os.environ) if environ is None else environ
    paths = paths or Paths()
    try:
        if len(argv) != 2 or "/" in argv[1] or argv[1].startswith("."):
            raise LedgerError("usage: launchproof begin-run|end-run UNIT", EX_USAGE)
        command, unit = argv
        run_id = environ.get("INVOCATION_ID", "")
        if not valid_run_id(run_id):
            raise LedgerError(
                "%s %s: INVOCATION_ID is not set; this is for systemd to call" % (command, unit), EX_USAGE
            )
        if command == "begin-run":
            begin_run(unit, run_id, paths)
        else:
            end_run(unit, run_id, environ, paths)
    except LedgerError as error:
        import syslog  # only when there is something to say

        syslog.openlog("launchproof", 0, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_ERR, str(error))
        return error.status
    return 0
