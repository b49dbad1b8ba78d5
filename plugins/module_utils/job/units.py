# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Jobs into the files that systemd or supervisor and the prover read, and into the digest that decides a restart. Pure."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from ansible_collections.dflash.launchproof.plugins.module_utils.job.spec import Job, Unit
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import supervisor

UNIT_DIR = "/etc/systemd/system"
CONFIG_DIR = "/etc/launchproof"
STATE_DIR = "/var/lib/launchproof"
PROGRAM = "/usr/local/bin/launchproof"
PROGRAM_FILE = "/usr/local/lib/launchproof/launchproof"

# First line of every unit file of ours: what lacks it belongs to somebody else and is never replaced.
MARK = "# Written by dflash.launchproof"

# Nothing of a job is in its program but the name, so that a change of the job never makes supervisor end it. The runner itself
# ends the job when its time to stop is over, long before supervisor would end the runner; it starts it again after a failure.
PROGRAM_TEXT = """\
{mark} for job {job}; the next deployment replaces changes made here.
[program:{unit}]
command={program} run-job {unit}
autostart=false
autorestart=unexpected
exitcodes=0
startsecs=0
stopwaitsecs=604800
stdout_logfile=NONE
redirect_stderr=true
"""
SUPERVISOR_TEXT = f"""\
{MARK}; the next deployment replaces changes made here.
[supervisord]
logfile={STATE_DIR}/supervisord.log
logfile_maxbytes=1MB
logfile_backups=1
pidfile=/run/launchproof/supervisord.pid
umask=022
user=root

[unix_http_server]
file={supervisor.SOCKET}
chmod=0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{supervisor.SOCKET}

[include]
files={supervisor.PROGRAMS}/*.conf
"""

# In double quotes systemd unescapes these and nothing else: SHELL_NEED_ESCAPE, src/basic/escape.h.
ENV_ESCAPES = str.maketrans({character: "\\" + character for character in '"\\`$'})
ARG_ESCAPES = str.maketrans(
    {
        **{chr(code): f"\\x{code:02x}" for code in (*range(1, 32), 127)},
        "\n": "\\n",
        "\t": "\\t",
        '"': '\\"',
        "\\": "\\\\",
        "%": "%%",
    }
)

Sections = dict[str, dict[str, tuple[str, ...]]]


@dataclass(frozen=True)
class File:
    """A file to be on the target: owner root; ``secret`` content never shown; ``record``: written last."""

    path: str
    text: str
    mode: int = 0o644
    secret: bool = False
    record: bool = False


def quote(argument: str) -> str:
    """One word of an ExecStart= line that systemd reads back as exactly this string."""
    return '"' + argument.translate(ARG_ESCAPES) + '"'


def exec_line(argv: Iterable[str]) -> str:
    """The value of ExecStart=. The prefix ``:`` turns off the replacement of $VARIABLES (systemd 244)."""
    return ":" + " ".join(quote(word) for word in argv)


def specifiers(text: str) -> str:
    """A value in which systemd expands % and that is to be read literally."""
    return text.replace("%", "%%")


def env_text(variables: Mapping[str, str]) -> str:
    """An EnvironmentFile= that gives exactly these variables."""
    return "".join(f'{name}="{value.translate(ENV_ESCAPES)}"\n' for name, value in sorted(variables.items()))


def environment(unit: Unit) -> dict[str, str]:
    """The public variables of a unit; what the job declares wins over what we add."""
    added = {"PYTHONUNBUFFERED": "1", "LAUNCHPROOF_UNIT": unit.name}
    if unit.gpus is not None:
        added["CUDA_VISIBLE_DEVICES"] = ",".join(unit.gpus)
    return {**added, **unit.env}


def sections(job: Job) -> Sections:
    """The unit file's content as data. %n is the full unit name, of an instance too."""
    runs = f"{STATE_DIR}/runs/%n/current"
    unit: dict[str, tuple[str, ...]] = {
        "Description": (specifiers(job.description) + (" (%i)" if job.templated else ""),),
        # After multi-user.target: a boot is not held up until a job that loads for minutes is ready.
        "After": ("network-online.target multi-user.target",),
        # Five ends within ten minutes: the limit trips for whatever dies within two minutes of its start.
        "StartLimitBurst": ("5",),
        "StartLimitIntervalSec": ("600",),
    }
    if job.templated:
        unit["PartOf"] = (f"{job.name}.target",)
    service: dict[str, tuple[str, ...]] = {
        # Not exec: where a program ends at once and an ExecStopPost= follows, it sends pid 1 of systemd 247 into an endless
        # loop (tried). What it would tell, the proof tells.
        "Type": ("notify" if job.notify else "simple",),
        "User": (job.user,),
        "ExecStartPre": (f"+{PROGRAM} begin-run %n",),
        "ExecStart": (exec_line(job.command),),
        "ExecStopPost": (f"+{PROGRAM} end-run %n",),
        "EnvironmentFile": (f"{CONFIG_DIR}/env/%n.env",),
        "StandardInput": ("null",),
        "StandardOutput": (f"append:{runs}/log",),
        "StandardError": ("inherit",),
        "Restart": (job.restart,),
        "RestartSec": ("1",),
        # Usage, data and configuration errors of sysexits(3): the next start would end the same way.
        "RestartPreventExitStatus": ("64 65 78",),
        "KillMode": ("mixed",),
        "TimeoutStopSec": (str(job.timeout_stop),),
        "NoNewPrivileges": ("yes",),
    }
    if any(unit.secrets for unit in job.units):
        service["EnvironmentFile"] += (f"{CONFIG_DIR}/secrets/%n.env",)
    if job.notify:
        # Loading blocks for as long as it takes; the proof's deadlines are the clock of a start.
        service["TimeoutStartSec"] = ("infinity",)
        service["NotifyAccess"] = ("main",)
    if job.working_directory:
        service["WorkingDirectory"] = (specifiers(job.working_directory),)
    if job.watchdog:
        service["WatchdogSec"] = (str(job.watchdog),)
    if job.memory_max:
        service["MemoryMax"] = (job.memory_max,)
    merged = {"Unit": unit, "Service": service}
    for section, options in job.unit_options.items():
        for key, values in options.items():
            added = key in ("ExecStartPre", "ExecStopPost", "After")
            merged[section][key] = (merged[section].get(key, ()) if added else ()) + values
    return merged


def unit_text(content: Mapping[str, Mapping[str, Iterable[str]]], job: str) -> str:
    """A unit file."""
    lines = [f"{MARK} for job {job}; the next deployment replaces changes made here.", ""]
    for section, options in content.items():
        lines.append(f"[{section}]")
        lines += [f"{key}={value}" for key, values in options.items() for value in values]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def unit_files(job: Job) -> list[File]:
    """The unit, or template, drop-ins and target, of a job."""
    content = sections(job)
    if not job.templated:
        return [File(f"{UNIT_DIR}/{job.name}.service", unit_text(content, job.name))]
    target = {
        "Unit": {
            "Description": (f"All instances of {specifiers(job.description)}",),
            # systemd keeps the last state of what a loaded unit names; without it a clean exit is forgotten at once.
            "Wants": tuple(unit.name for unit in job.units),
        }
    }
    files = [
        File(f"{UNIT_DIR}/{job.name}@.service", unit_text(content, job.name)),
        File(f"{UNIT_DIR}/{job.name}.target", unit_text(target, job.name)),
    ]
    for unit in job.units:
        dropin = instance_sections(unit)
        if dropin:
            files.append(File(dropin_path(unit.name), unit_text(dropin, job.name)))
    return files


def program_files(job: Job) -> list[File]:
    """What tells supervisor of a job's runners, one file a unit."""
    return [
        File(
            supervisor.program_file(unit.name),
            PROGRAM_TEXT.format(mark=MARK, job=job.name, unit=unit.name, program=PROGRAM),
        )
        for unit in job.units
    ]


def instance_sections(unit: Unit) -> Sections:
    """What an instance has of its own in its unit; the empty ExecStart= takes back the template's."""
    return {"Service": {"ExecStart": ("", exec_line(unit.argv))}} if unit.extra else {}


def dropin_path(unit: str) -> str:
    """The drop-in of an instance."""
    return f"{UNIT_DIR}/{unit}.d/launchproof.conf"


def wanted(job: Job) -> str:
    """The unit that a boot starts."""
    return f"{job.name}.target" if job.templated else f"{job.name}.service"


def wants_link(job: Job) -> str:
    """The link by which a boot starts the job, as systemctl enable makes it."""
    return f"{UNIT_DIR}/multi-user.target.wants/{wanted(job)}"


def env_path(unit: str) -> str:
    """The file of a unit's public variables."""
    return f"{CONFIG_DIR}/env/{unit}.env"


def secrets_path(unit: str) -> str:
    """The file of a unit's secrets."""
    return f"{CONFIG_DIR}/secrets/{unit}.env"


def job_path(unit: str) -> str:
    """The file that tells begin-run and the prover what a unit is."""
    return f"{CONFIG_DIR}/jobs/{unit}.json"


def digest(
    job: Job, unit: Unit, key: Optional[bytes] = None, code: Optional[str] = None, lock: Optional[str] = None
) -> Optional[str]:
    """What a run of this unit depends on, as one hash; None when there are secrets and no key yet.

    The key stays on the target: without it nobody can try secrets against a digest that reports and logs show.
    The description, the target and the proof do not change a process and are left out.

    Args:
        key: 32 bytes of the target.
        code: hash of the delivered code.
        lock: hash of the lock of the environment that the job runs in.
    """
    if unit.secrets and key is None:
        return None
    content = sections(job)
    del content["Unit"]["Description"]
    secrets = {
        name: hmac.new(key or b"", f"{name}\0{value}".encode(), hashlib.sha256).hexdigest()
        for name, value in unit.secrets.items()
    }
    parts = {
        "unit": content,
        "instance": instance_sections(unit),
        "env": environment(unit),
        "secrets": secrets,
        "code": code,
        "lock": lock,
    }
    return "sha256:" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def record(
    job: Job, unit: Unit, unit_digest: Optional[str], code: Optional[str] = None, lock: Optional[str] = None
) -> dict[str, Any]:
    """The content of jobs/UNIT.json. All of ``env`` is public: it lies in a file that everybody may read."""
    return {
        "schema": 1,
        "unit": unit.name,
        "job": job.name,
        "digest": unit_digest,
        "argv": list(unit.argv),
        "env": environment(unit),
        "user": job.user,
        "runs": f"{STATE_DIR}/runs/{unit.name}",
        "log": f"{STATE_DIR}/runs/{unit.name}/current/log",
        "proof": dict(unit.proof),
        "secrets_file": secrets_path(unit.name) if unit.secrets else None,
        # What the runner does where no unit file says it.
        "working_directory": job.working_directory or "/",
        "environment_files": [env_path(unit.name)] + ([secrets_path(unit.name)] if unit.secrets else []),
        "notify": job.notify,
        "watchdog": job.watchdog,
        "restart": job.restart,
        "timeout_stop": job.timeout_stop,
        "no_new_privileges": True,
        "autostart": job.autostart,
        "gpus": None if unit.gpus is None else list(unit.gpus),
        "code_hash": code,
        "versions": {"lock": lock} if lock else {},
    }


def job_files(job: Job, unit: Unit, unit_record: Mapping[str, Any]) -> list[File]:
    """The files of one unit besides the unit; its secrets file is there, empty, when only a sibling has secrets."""
    files = [File(env_path(unit.name), env_text(environment(unit)))]
    if any(other.secrets for other in job.units):
        files.append(File(secrets_path(unit.name), env_text(unit.secrets), mode=0o600, secret=True))
    text = json.dumps(unit_record, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    files.append(File(job_path(unit.name), text, record=True))
    return files
