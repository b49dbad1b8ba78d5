# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""C(launchproof run): a command becomes a unit with a run ledger, without inventory or role.

Where there is no systemd, the record that the runner reads is all there is of the unit.
The unit has what a job of the role has where it matters for the proof: its own log for each run, a death certificate, no
process that outlives it. It is not enabled: after a reboot it is there and does not run.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager

MARK = "# Written by launchproof run; the next launchproof run of this name replaces it."
UNITS = "/etc/systemd/system"
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "USER", "LOGNAME", "SHELL")
SECRET = re.compile(
    r"(?i)secret|token|passw|key|credential"
)  # names whose values are masked in all that the prover says
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,199}")
TIMEOUT_STOP = 120  # s between SIGTERM and SIGKILL
UNIT = """\
{mark}
[Unit]
Description=launchproof run {name}
StartLimitIntervalSec=0

[Service]
Type=simple
User={user}
WorkingDirectory={directory}
ExecStartPre=+{program} begin-run %n
ExecStart={command}
ExecStopPost=+{program} end-run %n
EnvironmentFile={environment}
EnvironmentFile={secrets}
StandardOutput=append:{runs}/current/log
StandardError=inherit
KillMode=mixed
TimeoutStopSec={timeout_stop}
"""


class AdhocError(Exception):
    """The command cannot become a unit; the message names what to change."""


def quote(word: str) -> str:
    """A word of ExecStart=: systemd.service(5), "Command lines". Nothing in it is expanded."""
    text = (
        word.replace("\\", "\\\\")
        .replace('"', '\\"')
        .replace("\n", "\\n")
        .replace("\t", "\\t")
        .replace("%", "%%")
        .replace("$", "$$")
    )
    return '"%s"' % text


def quote_value(value: str) -> str:
    """A value of an EnvironmentFile=: systemd.exec(5)."""
    return '"%s"' % re.sub(r'(["\\$`])', r"\\\1", value)


def path_setting(path: str) -> str:
    return path.replace("%", "%%")


def environment(pairs: list, gpus: list, inherited: dict) -> dict:
    """Environment of the command: a few of the caller's own variables, then what was given. Raises AdhocError."""
    found = {name: inherited[name] for name in INHERITED if name in inherited}
    found["PYTHONUNBUFFERED"] = "1"  # else Python writes nothing until about 8 KiB were printed
    if gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise AdhocError("--env %s: write NAME=VALUE, the name in letters, digits and underscores" % pair)
        if not equals:
            if name not in inherited:
                raise AdhocError("--env %s: it is not in your environment; write %s=VALUE" % (name, name))
            value = inherited[name]
        if "\n" in value:
            raise AdhocError("--env %s: a value of several lines cannot be passed on; put it into a file" % name)
        found[name] = value
    return found


def write(path: str, text: str, mode: int) -> None:
    """Replace a file in one step."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as handle:
            handle.write(text)
        os.rename(temporary, path)
    except OSError as error:
        raise AdhocError("%s cannot be written: %s" % (path, error.strerror)) from error


def unit_of(name: str) -> str:
    """The unit of a run's name. Raises AdhocError."""
    name = name[: -len(".service")] if name.endswith(".service") else name
    if not NAME.fullmatch(name):
        raise AdhocError("--name %s: use letters, digits, dot, dash and underscore" % name)
    return name + ".service"


def check_free(unit: str, connection) -> None:
    """Refuse a unit that the manager of this machine knows from somebody else: from a file, a generator, or as a transient unit."""
    state, _properties = connection.show([unit])[unit]
    if isinstance(state, Unknown):
        raise AdhocError(state.why)
    where = state.fragment_path or unit
    if state.load_state != "not-found" and where not in (os.path.join(UNITS, unit), ledger.Paths().job(unit)):
        raise AdhocError(
            "--name %s: %s is there and was not written by launchproof run; choose another name" % (unit, where)
        )


def deliver(
    name: str, command: list, environ: dict, user: str, directory: str, proof: dict, program: str, paths: ledger.Paths
) -> str:
    """Write the unit, its environment file and its job file, and return the unit's name. Raises AdhocError.

    A unit of that name that somebody else wrote is left alone.
    """
    unit = unit_of(name)
    name = unit[: -len(".service")]
    path = os.path.join(UNITS, unit)
    try:
        pwd.getpwnam(user)
    except KeyError:
        raise AdhocError(
            "--user %s: there is no such user on this machine; create it, or name another" % user
        ) from None
    if not os.path.isdir(directory):
        raise AdhocError("--directory %s: there is no such directory; create it, or name another" % directory)
    for folder in (
        UNITS,
        "/run/systemd/system",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
        "/lib/systemd/system",
    ):
        found = os.path.join(folder, unit)
        if os.path.lexists(found) and not (found == path and _ours(path)):
            raise AdhocError(
                "--name %s: %s exists and was not written by launchproof run; choose another name" % (name, found)
            )
    argv = list(command)
    if "/" not in argv[0]:
        argv[0] = shutil.which(argv[0], path=environ.get("PATH")) or argv[0]
    elif not argv[0].startswith("/"):
        argv[0] = os.path.join(directory, argv[0])
    if not os.path.isfile(argv[0]):
        raise AdhocError("%s: there is no such program" % command[0])
    if not os.access(argv[0], os.X_OK):
        raise AdhocError("%s is not executable: chmod +x it, or name its interpreter before it" % command[0])
    base = os.path.dirname(paths.jobs)
    settings, secrets = (os.path.join(base, folder, unit + ".env") for folder in ("env", "secrets"))
    runs = paths.unit_runs(unit)
    for folder in (paths.jobs, os.path.dirname(settings), os.path.join(runs, "none")):
        os.makedirs(folder, mode=0o755, exist_ok=True)
    os.makedirs(os.path.dirname(secrets), mode=0o700, exist_ok=True)
    if not os.path.lexists(paths.current(unit)):
        ledger.point_current(paths, unit, "none")  # systemd opens the log before begin-run has made this run's folder
    hidden = {key for key in environ if SECRET.search(key)}
    write(settings, _lines(environ, environ.keys() - hidden), 0o600)
    write(secrets, _lines(environ, hidden), 0o600)
    public = {
        key: environ[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in environ
    }  # the GPUs that are to be proved
    job = {
        "schema": 1, "unit": unit, "job": name, "digest": None, "argv": argv, "env": public, "user": user,
        "runs": runs, "log": None, "proof": proof, "secrets_file": secrets,
        "working_directory": directory, "environment_files": [settings, secrets], "timeout_stop": TIMEOUT_STOP, "restart": "no",
    }  # fmt: skip
    ledger.write_json(paths.job(unit), job)
    text = UNIT.format(
        mark=MARK, name=name.replace("%", "%%"), user=user, directory=path_setting(directory), program=program,
        command=" ".join(map(quote, argv)), environment=path_setting(settings), secrets=path_setting(secrets),
        runs=path_setting(runs), timeout_stop=TIMEOUT_STOP,
    )  # fmt: skip
    if manager.systemd_runs():
        write(path, text, 0o644)
    return unit


def _lines(environ: dict, names) -> str:
    return "".join("%s=%s\n" % (name, quote_value(environ[name])) for name in sorted(names))


def _ours(path: str) -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.readline().rstrip("\n") == MARK
    except OSError:
        return False
