# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Puts jobs onto the machine it runs on: look at everything first, then write.

``Host`` is the one place that touches the machine; ``root`` is another folder in tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from ansible_collections.dflash.launchproof.plugins.module_utils.job import code as code_tree
from ansible_collections.dflash.launchproof.plugins.module_utils.job import units
from ansible_collections.dflash.launchproof.plugins.module_utils.job.spec import Code, Job, Unit
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import envfile, runner
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager, supervisor
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.systemd import SystemdError

# Units of the distribution that a file of the same name in /etc would hide.
VENDOR_UNIT_DIRS = ("/usr/lib/systemd/system", "/lib/systemd/system")
KEY_PATH = f"{units.CONFIG_DIR}/secrets/.digest-key"
# The first start's ExecStartPre= already writes to current/log: without a folder there systemd ends it with 209.
NO_RUN = "none"
STATE = "/var/lib"  # where systemd.exec(5) has the folders of StateDirectory=


class ApplyError(Exception):
    """A change failed half-way; another call completes it."""


class InstallError(Exception):
    """Nothing was changed; ``problems`` has one sentence a problem."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__(" ".join(self.problems))


@dataclass(frozen=True)
class Delivered:
    """What the controller knows of a job's code and lock; ``archive`` is a path on this machine, once it is there."""

    code: Optional[str] = None
    lock: Optional[str] = None
    archive: Optional[str] = None


@dataclass
class Plan:
    """What would change, in the order in which it is to change.

    ``records`` come last, after the manager has read the units: a run takes its digest from its record, and one that starts
    by itself in between must not carry the digest of a configuration that it does not run with.
    """

    steps: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    records: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    diff: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    needs_code: list[str] = field(default_factory=list)
    units_changed: bool = False
    undeclared: list[str] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Whether anything would be written."""
        return bool(self.steps or self.records)

    def has(self, label: str) -> bool:
        """Whether a step of this name is planned already, by another job."""
        return any(label == planned for planned, _step in self.steps)

    def add(
        self, label: str, step: Callable[[], None], before: str = "", after: str = "", record: bool = False
    ) -> None:
        """Note a step with what a reader of the diff sees."""
        (self.records if record else self.steps).append((label, step))
        self.diff.append({"before_header": label, "after_header": label, "before": before, "after": after})


class Host:
    """Reads and writes of this machine."""

    def __init__(self, root: str = "") -> None:
        self.root = root

    def at(self, path: str) -> str:
        """The real path of a path of the target."""
        return self.root + path

    def read(self, path: str) -> Optional[bytes]:
        """Content of a regular file; None where nothing is there."""
        try:
            with open(self.at(path), "rb") as stream:
                return stream.read()
        except FileNotFoundError:
            return None

    def mode(self, path: str) -> int:
        """Permission bits of a path that exists."""
        return os.lstat(self.at(path)).st_mode & 0o7777

    def link(self, path: str) -> Optional[str]:
        """What a link names; None where there is no link."""
        try:
            return os.readlink(self.at(path))
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        """True also for a link that leads nowhere."""
        return os.path.lexists(self.at(path))

    def write(self, path: str, content: bytes, mode: int) -> None:
        """Replace a file in one step; at no moment may more read it than its mode says."""
        folder = os.path.dirname(self.at(path))
        os.makedirs(folder, mode=0o755, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".launchproof-", dir=folder)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                os.fchmod(descriptor, mode)
                os.fsync(descriptor)
            os.rename(temporary, self.at(path))
        except BaseException:
            os.unlink(temporary)
            raise

    def symlink(self, target: str, path: str) -> None:
        """Point a link at ``target`` in one step."""
        folder = os.path.dirname(self.at(path))
        os.makedirs(folder, mode=0o755, exist_ok=True)
        temporary = f"{folder}/.launchproof-{secrets.token_hex(8)}"
        os.symlink(target, temporary)
        os.rename(temporary, self.at(path))

    def folder(self, path: str, mode: int) -> None:
        """Make a folder with this mode, whatever the umask."""
        os.makedirs(self.at(path), exist_ok=True)
        os.chmod(self.at(path), mode)

    def folder_of(self, path: str, user: str) -> None:
        """Make a folder that belongs to a user, and those above it that are missing, as StateDirectory= does."""
        above = os.path.dirname(path)
        if not self.is_dir(above):
            self.folder_of(above, "root")
        self.folder(path, 0o755)
        self.give(path, user)

    def give(self, path: str, user: str) -> None:
        """Make a path a user's."""
        about = pwd.getpwnam(user)
        os.chown(self.at(path), about.pw_uid, about.pw_gid)

    def remove(self, path: str) -> None:
        """Remove one file or link."""
        os.unlink(self.at(path))

    def remove_version(self, path: str) -> None:
        """Remove a version of code; its listing last, so that a removal that was cut off is taken up again."""
        shutil.rmtree(self.at(path), ignore_errors=True)
        self.remove(path + ".list")

    def age(self, path: str) -> float:
        """Seconds since a version arrived."""
        return time.time() - os.lstat(self.at(path) + ".list").st_mtime

    def used(self, folders: Iterable[str]) -> set[str]:
        """Those folders in which a process works, or from which it has opened or mapped a file."""
        paths = set()
        for process in (entry.path for entry in os.scandir("/proc") if entry.name.isdigit()):
            try:
                descriptors = [f"{process}/fd/{number}" for number in os.listdir(f"{process}/fd")]
                with open(f"{process}/maps", encoding="utf-8", errors="surrogateescape") as stream:
                    paths.update(line.rstrip("\n").partition("/")[2] for line in stream)
            except OSError:  # it has ended meanwhile
                continue
            for link in (f"{process}/cwd", f"{process}/exe", *descriptors):
                with contextlib.suppress(OSError):
                    paths.add(os.readlink(link).lstrip("/"))
        return {
            folder
            for folder in folders
            if any((path + "/").startswith(self.at(folder).lstrip("/") + "/") for path in paths)
        }

    def is_root(self) -> bool:
        """Whether this process may write where units lie."""
        return os.geteuid() == 0

    def user_exists(self, name: str) -> bool:
        """Whether NSS knows the user."""
        try:
            pwd.getpwnam(name)
        except KeyError:
            return False
        return True

    def program(self, name: str) -> Optional[str]:
        """The executable that systemd would start; None where there is none."""
        if not name.startswith("/"):
            return shutil.which(name, path=runner.PATH)
        path = self.at(name)
        return name if os.path.isfile(path) and os.access(path, os.X_OK) else None

    def is_dir(self, path: str) -> bool:
        """Whether a folder is there."""
        return os.path.isdir(self.at(path))

    @property
    def systemd(self) -> bool:
        """Whether systemd runs this machine; else supervisor keeps the jobs."""
        return self.is_dir(manager.SYSTEMD_RUNS)

    def stop(self, unit: str) -> None:
        """Stop a unit and wait for its end. Raises ApplyError."""
        if self.systemd:
            self._systemctl("stop", "--", unit)
        else:
            supervisor.stop([unit])

    def reload(self) -> None:
        """Make the manager read its files again. Raises ApplyError."""
        if self.systemd:
            self._systemctl("daemon-reload")
            return
        try:
            supervisor.Manager().reload()
        except (SystemdError, OSError) as error:
            raise ApplyError(str(error)) from error

    def _systemctl(self, *words: str) -> None:
        code, output = self.run(["systemctl", *words])
        if code != 0:
            raise ApplyError(
                f"systemctl {words[0]} {' '.join(words[2:])}".rstrip() + f" ended with {code}: {output.strip()}"
            )

    def run(self, argv: list[str]) -> tuple[int, str]:
        """Exit code and output of a command of systemd."""
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            check=False,
        )
        return done.returncode, done.stdout.decode("utf-8", "replace")


def make_plan(
    jobs: list[Job],
    delivered: Mapping[str, Delivered],
    program: bytes,
    host: Host,
    check_mode: bool = False,
    wanted: str = "auto",
) -> Plan:
    """Look at the machine and say what would change. Writes nothing.

    Args:
        jobs: validated jobs.
        delivered: by name of the job.
        program: bytes of the launchproof zipapp.
        host: the machine.
        check_mode: a missing user, program or folder is then a warning: a step before this one would make it.
        wanted: the manager that is declared: systemd, supervisor, or auto for the one that the machine has.

    Raises:
        InstallError: with every problem found.
    """
    plan = Plan()
    problems: list[str] = []
    known = _known_units(host)
    doubtful = _check_machine(jobs, host, problems, wanted)
    if check_mode:
        plan.warnings += [f"Only known once the steps before have been carried out: {text}" for text in doubtful]
    else:
        problems += doubtful
    _plan_program(program, host, plan, problems)
    if not host.systemd:
        _plan_supervisor(jobs, host, plan, problems)
    for job in jobs:
        given = delivered.get(job.name, Delivered())
        if job.code is not None:
            _plan_code(job.code, given, host, plan, problems)
        _plan_units(job, host, plan, problems)
    key = _plan_key(jobs, host, plan, check_mode)
    for job in jobs:
        given = delivered.get(job.name, Delivered())
        for unit in job.units:
            _plan_unit(job, unit, given, key, known, host, plan)
        if host.systemd:
            _plan_link(job, host, plan, problems)
    if problems:
        raise InstallError(dict.fromkeys(problems))
    plan.undeclared = sorted(set(known) - {unit.name for job in jobs for unit in job.units})
    for job in jobs:
        for unit in plan.undeclared:
            if known[unit].get("job") == job.name:
                _plan_dropped(job, unit, host, plan)
    return plan


def _known_units(host: Host) -> dict[str, dict[str, Any]]:
    """Records of all units that were ever installed here."""
    known = {}
    folder = f"{units.CONFIG_DIR}/jobs"
    if host.is_dir(folder):
        for name in sorted(os.listdir(host.at(folder))):
            if name.endswith(".json"):
                try:
                    known[name[: -len(".json")]] = json.loads(host.read(f"{folder}/{name}") or b"{}")
                except ValueError:
                    known[name[: -len(".json")]] = {}
    return known


def _plan_dropped(job: Job, unit: str, host: Host, plan: Plan) -> None:
    """What becomes of an instance that was installed here and is no longer declared; its runs stay in any case."""
    if job.dropped_instances == "keep":
        plan.warnings.append(
            f"{unit} is no longer declared by job {job.name}. It is left as it is: "
            f"`{stop_command(host)} {unit}` ends it, its runs stay in {units.STATE_DIR}/runs/{unit}."
        )
        return

    plan.add(unit, lambda: host.stop(unit), "installed\n", "stopped and removed: no longer declared here\n")
    # The record last: as long as it is there, a removal that was cut off is taken up again.
    files = (units.dropin_path(unit), supervisor.program_file(unit), units.env_path(unit), units.secrets_path(unit))
    for path in (*files, units.job_path(unit)):
        if host.exists(path):
            plan.steps.append((path, lambda path=path: host.remove(path)))
    plan.units_changed = True


def stop_command(host: Host) -> str:
    """How a person stops a unit on this machine."""
    return "systemctl stop" if host.systemd else f"{supervisor.CONTROL} stop"


def _check_machine(jobs: list[Job], host: Host, problems: list[str], wanted: str) -> list[str]:
    """Note what cannot work here; return what an earlier step of the same deployment may still put right."""
    doubtful = []
    if not host.is_root():
        problems.append("This user is not root. Connect as root, or set become: true.")
    if wanted == "systemd" and not host.systemd:
        problems.append(
            f"manager is systemd, which does not run this machine ({manager.SYSTEMD_RUNS} is missing). Use auto, for "
            "which supervisor keeps the jobs there, or a machine whose PID 1 is systemd."
        )
    elif wanted == "supervisor" and host.systemd:
        problems.append("manager is supervisor, and systemd runs this machine. Use auto, or systemd.")
    if jobs and not host.systemd and host.program(supervisor.SUPERVISORD) is None:
        doubtful.append(
            f"{supervisor.SUPERVISORD} is missing, which keeps jobs where no systemd runs. Role job makes it."
        )
    for job in jobs:
        if not host.user_exists(job.user):
            doubtful.append(f"user of job {job.name}: {job.user} does not exist here. Create it, or name another user.")
        dest = job.code.dest if job.code else None
        inside = dest is not None and (job.command[0] + "/").startswith(dest + "/")
        if not inside and host.program(job.command[0]) is None:
            doubtful.append(
                f"command[0] of job {job.name}: {job.command[0]} is not an executable file here. "
                "Install it, or correct the path."
            )
        folder = job.working_directory
        inside = dest is not None and folder is not None and (folder + "/").startswith(dest + "/")
        if folder and not inside and not host.is_dir(folder):
            doubtful.append(
                f"working_directory of job {job.name}: {folder} is no folder here. Make it, or correct the path."
            )
    return doubtful


def lacking(jobs: list[Job], host: Host, wanted: str) -> dict[str, Any]:
    """What others have to see to before jobs can be installed here: C(users) to create, whether C(supervisor) is needed."""
    return {
        "users": sorted({job.user for job in jobs if not host.user_exists(job.user)}),
        "supervisor": bool(jobs) and not host.systemd and wanted != "systemd",
    }


def _plan_program(program: bytes, host: Host, plan: Plan, problems: list[str]) -> None:
    path, link = units.PROGRAM_FILE, units.PROGRAM
    if host.exists(link) and host.link(link) != path:
        problems.append(f"{link} is there and is not a link to {path}. It is not ours: move it away.")
    before = host.read(path)
    if before != program:
        plan.add(path, lambda: host.write(path, program, 0o755), *(_hashes(before, program)))
    if host.link(link) != path:
        plan.add(link, lambda: host.symlink(path, link), "", f"link to {path}\n")


def _plan_supervisor(jobs: list[Job], host: Host, plan: Plan, problems: list[str]) -> None:
    before = host.read(supervisor.CONFIG)
    if before is not None and not before.startswith(units.MARK.encode()):
        problems.append(f"{supervisor.CONFIG} is there and was not written by us. Move it away.")
    _plan_file(units.File(supervisor.CONFIG, units.SUPERVISOR_TEXT), host, plan)
    for job in jobs:
        # What a job writes into has to be there; of the other options none has a counterpart.
        service = dict(job.unit_options.get("Service", {}))
        for name in (word for value in service.pop("StateDirectory", ()) for word in value.split()):
            path = f"{STATE}/{name}"
            if os.path.normpath(path) != path or (host.exists(path) and not host.is_dir(path)):
                problems.append(
                    f"StateDirectory of job {job.name}: {path} cannot be a folder. Correct it, or move away what is there."
                )
            elif not host.is_dir(path) and not plan.has(path):
                plan.add(
                    path, lambda path=path, user=job.user: host.folder_of(path, user), "", f"folder of {job.user}\n"
                )
        others = service or any(options for section, options in job.unit_options.items() if section != "Service")
        lost = [name for name, given in (("memory_max", job.memory_max), ("unit_options", others)) if given]
        if lost:
            plan.warnings.append(
                f"job {job.name}: {' and '.join(lost)} need systemd, and have no effect on this machine."
            )


def _plan_code(code: Code, given: Delivered, host: Host, plan: Plan, problems: list[str]) -> None:
    versions = code_tree.versions_dir(code.dest)
    version = f"{versions}/{code_tree.version_name(given.code or '')}"
    target = os.path.relpath(version, os.path.dirname(code.dest))
    if plan.has(code.dest) or code.dest in plan.needs_code:
        return  # another job with the same code
    link = host.link(code.dest)
    if host.exists(code.dest) and (link is None or not link.startswith(os.path.basename(versions) + "/")):
        problems.append(
            f"code.dest {code.dest} exists and is not a link of ours. Move it away, or choose another dest: "
            "nothing of it will be overwritten."
        )
        return
    intact = given.code is not None and _content(version, host) == given.code
    if not intact:
        if given.archive is None:
            plan.needs_code.append(code.dest)
        plan.add(version, lambda: _deliver(given, version, host, plan), "", f"code {given.code}\n")
    if link != target or not intact:
        plan.add(
            code.dest,
            lambda: host.symlink(target, code.dest),
            f"link to {link}\n" if link else "",
            f"link to {target}\n",
        )
    _plan_prune(code, version, host, plan)


def _plan_prune(code: Code, version: str, host: Host, plan: Plan) -> None:
    """Remove the oldest versions beyond ``keep``, but none that a process uses, and none that somebody edited."""
    versions = os.path.dirname(version)
    if not host.is_dir(versions):
        return
    listed = [f"{versions}/{name[: -len('.list')]}" for name in os.listdir(host.at(versions)) if name.endswith(".list")]
    others = sorted((path for path in listed if path != version), key=host.age)
    surplus = others[code.keep :]
    used = host.used(surplus) if surplus else set()
    for path in surplus:
        content = _content(path, host)
        edited = content is not None and code_tree.version_name(content) != os.path.basename(path)
        if path not in used and not edited:
            plan.add(path, lambda path=path: host.remove_version(path), f"code {os.path.basename(path)}\n", "")


def _content(version: str, host: Host) -> Optional[str]:
    """Hash of what was delivered as this version, as it is now; None when something of it is missing.

    Files that a job added beside it do not matter.
    """
    listing = host.read(version + ".list")
    if listing is None:
        return None
    entries = [code_tree.Entry.parse(line) for line in listing.decode("utf-8", "surrogateescape").splitlines()]
    try:
        return code_tree.tree_hash(host.at(version), entries)
    except OSError:
        return None


def _deliver(given: Delivered, version: str, host: Host, plan: Plan) -> None:
    versions = os.path.dirname(version)
    host.folder(versions, 0o755)
    temporary = tempfile.mkdtemp(prefix=".new-", dir=host.at(versions))
    try:
        entries = code_tree.unpack(given.archive or "", temporary)
        arrived = code_tree.tree_hash(temporary, entries)
        if arrived != given.code:
            raise code_tree.CodeError(
                f"the code changed while it was sent: {given.code} was announced, {arrived} arrived. Run again."
            )
        os.chmod(temporary, 0o755)
        if host.exists(version):
            kept = f"{version}.edited-{secrets.token_hex(4)}"
            os.rename(host.at(version), host.at(kept))
            plan.warnings.append(f"The code in {version} had been edited here; the edited folder is kept as {kept}.")
        os.rename(temporary, host.at(version))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    listing = "".join(entry.line() + "\n" for entry in entries)
    host.write(version + ".list", listing.encode("utf-8", "surrogateescape"), 0o644)


def _plan_units(job: Job, host: Host, plan: Plan, problems: list[str]) -> None:
    changed = []
    files = units.unit_files(job) if host.systemd else units.program_files(job)
    for file in files:
        name = os.path.basename(file.path)
        before = host.read(file.path)
        if (before is not None and not before.startswith(units.MARK.encode())) or host.link(file.path) is not None:
            problems.append(
                f"job {job.name}: {file.path} is there and was not written by us. Give the job another name."
            )
        elif host.systemd and before is None and ".d/" not in file.path:
            hidden = [f"{folder}/{name}" for folder in VENDOR_UNIT_DIRS if host.exists(f"{folder}/{name}")]
            if hidden:
                problems.append(f"job {job.name}: it would hide {hidden[0]} of the system. Give the job another name.")
        if before != file.text.encode():
            changed.append(file)
    if changed and not problems and host.systemd:
        problems += verify(job, host)
    for file in changed:
        _plan_file(file, host, plan)
        plan.units_changed = True
    # An instance that lost its own arguments keeps no drop-in.
    wanted = {file.path for file in files}
    for unit in job.units if job.templated else ():
        path = units.dropin_path(unit.name)
        before = host.read(path)
        if path not in wanted and before is not None and before.startswith(units.MARK.encode()):
            plan.add(path, lambda path=path: host.remove(path), before.decode("utf-8", "replace"), "")
            plan.units_changed = True


def verify(job: Job, host: Host) -> list[str]:
    """What systemd itself has to say about a job's units, before they are installed."""
    if shutil.which("systemd-analyze") is None or not job.units:
        return []
    with tempfile.TemporaryDirectory(prefix="launchproof-verify-") as folder:
        paths = []
        for unit in job.units:
            content = units.unit_text(units.sections(job), job.name)
            if unit.extra:
                content += units.unit_text(units.instance_sections(unit), job.name)
            path = f"{folder}/{unit.name}"
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(content)
            paths.append(path)
        _code, output = host.run(["systemd-analyze", "verify", "--man=no", *paths])
    return [f"unit of job {job.name}: {line}. Correct unit_options." for line in verify_complaints(output, folder, job)]


def verify_complaints(output: str, folder: str, job: Job) -> list[str]:
    """The lines of systemd-analyze verify that speak about this job's units.

    It looks at everything that these units name too, and at programs, which are checked apart: a step before may
    still have to install them.
    """
    names = "|".join(re.escape(unit.name) for unit in job.units)
    about = re.compile(rf"(?:{re.escape(folder)}/)?(?:{names}):")
    complaints = []
    for line in output.splitlines():
        line = line.strip()
        if about.match(line) and "is not executable" not in line:
            complaints.append(line.replace(folder + "/", "").rstrip("."))
    return list(dict.fromkeys(complaints))


def _plan_key(jobs: list[Job], host: Host, plan: Plan, check_mode: bool) -> Optional[bytes]:
    if not any(unit.secrets for job in jobs for unit in job.units):
        return None
    key = host.read(KEY_PATH)
    if key:
        return key
    new = secrets.token_bytes(32)

    def make() -> None:
        host.folder(os.path.dirname(KEY_PATH), 0o700)
        host.write(KEY_PATH, new, 0o600)

    plan.add(KEY_PATH, make, "", "(a new random key)\n")
    # A digest by a key that nobody keeps would predict nothing.
    return None if check_mode else new


def _plan_unit(
    job: Job,
    unit: Unit,
    given: Delivered,
    key: Optional[bytes],
    known: Mapping[str, Mapping[str, Any]],
    host: Host,
    plan: Plan,
) -> None:
    runs = f"{units.STATE_DIR}/runs/{unit.name}"
    if not host.exists(f"{runs}/current"):

        def first_run() -> None:
            host.folder(f"{units.STATE_DIR}/runs", 0o755)
            # Root's, not the job's: whoever may replace `current` chooses the file that systemd appends to as root.
            host.folder(runs, 0o755)
            host.folder(f"{runs}/{NO_RUN}", 0o755)
            host.symlink(NO_RUN, f"{runs}/current")

        plan.add(f"{runs}/current", first_run, "", f"link to {NO_RUN}\n")
    digest = units.digest(job, unit, key, given.code, given.lock)
    for file in units.job_files(job, unit, units.record(job, unit, digest, given.code, given.lock)):
        _plan_file(file, host, plan)
    stale_secrets = units.secrets_path(unit.name)
    if not any(other.secrets for other in job.units) and host.exists(stale_secrets):
        plan.add(stale_secrets, lambda: host.remove(stale_secrets), "(secrets)\n", "")
    before = known.get(unit.name, {}).get("digest")
    plan.rows.append({"unit": unit.name, "job": job.name, "digest": digest, "digest_before": before})


def _plan_link(job: Job, host: Host, plan: Plan, problems: list[str]) -> None:
    link, target = units.wants_link(job), f"{units.UNIT_DIR}/{units.wanted(job)}"
    current = host.link(link)
    if current is None and host.exists(link):
        problems.append(f"job {job.name}: {link} is there and is not a link. Move it away.")
    elif job.autostart and current != target:
        plan.add(
            link, lambda: host.symlink(target, link), f"link to {current}\n" if current else "", f"link to {target}\n"
        )
        plan.units_changed = True
    elif not job.autostart and current is not None:
        plan.add(link, lambda: host.remove(link), f"link to {current}\n", "")
        plan.units_changed = True


def _plan_file(file: units.File, host: Host, plan: Plan) -> None:
    content = file.text.encode()
    before = host.read(file.path)
    if before == content and host.mode(file.path) == file.mode:
        return

    def step() -> None:
        if file.secret:
            host.folder(os.path.dirname(file.path), 0o700)
        host.write(file.path, content, file.mode)

    if file.secret:
        plan.add(file.path, step, *_hidden(before, content))
    else:
        plan.add(file.path, step, (before or b"").decode("utf-8", "replace"), file.text, record=file.record)


def _hidden(before: Optional[bytes], after: bytes) -> tuple[str, str]:
    """Both sides of a diff of secrets: names, and which of them changed, but no value."""
    old, new = (envfile.parse(content.decode("utf-8", "replace")) for content in (before or b"", after))
    return (
        "".join(f"{name}=(hidden)\n" for name in sorted(old)),
        "".join(
            f"{name}=(hidden{'' if name not in old or old[name] == new[name] else ', changed'})\n"
            for name in sorted(new)
        ),
    )


def _hashes(before: Optional[bytes], after: bytes) -> tuple[str, str]:
    return tuple(
        "" if data is None else f"program sha256:{hashlib.sha256(data).hexdigest()}\n" for data in (before, after)
    )


def needs_reload(jobs: list[Job], host: Host) -> bool:
    """Whether the manager still goes by an older state than the files say, also because an earlier deployment was cut off.

    A unit that systemd has not loaded is read afresh at its start; what a loaded one lacks it says itself.
    """
    if not host.systemd:
        return bool(jobs) and supervisor.needs_reload()
    names = [unit.name for job in jobs for unit in job.units]
    code, output = host.run(["systemctl", "show", "-p", "Id,NeedDaemonReload,Wants", "--", "multi-user.target", *names])
    if code != 0:
        return True
    loaded = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in output.split("\n\n")]
    if any(unit.get("NeedDaemonReload") == "yes" for unit in loaded):
        return True
    wants = set(loaded[0].get("Wants", "").split())
    return any((units.wanted(job) in wants) != job.autostart for job in jobs)


def apply(plan: Plan, host: Host, reload: bool) -> None:
    """Carry out a plan; in its place the manager reads its files again.

    Raises:
        ApplyError, CodeError, OSError: something is written and something is not; another call completes it.
    """
    for _label, step in plan.steps:
        step()
    if reload:
        host.reload()
    for _label, step in plan.records:
        step()
