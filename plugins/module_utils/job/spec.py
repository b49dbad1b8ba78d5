# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a job is: declared data in, frozen jobs and every error out.

Pure, but for the questions about the controller's own files, which the caller asks for with ``controller=True``.
The options are documented in roles/job/meta/argument_specs.yml.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import SpecError
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import validate as validate_proof

DEFAULT_USER = "dflash"
DEFAULT_KEEP = 10
DEFAULT_EXCLUDE = (".git", "__pycache__", "*.pyc", ".pytest_cache", ".ruff_cache")

NAME = re.compile(r"[a-z][a-z0-9-]{0,63}")
INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
USER_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
GPU = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")
MEMORY = re.compile(r"\d+[KMGT]?|\d{1,2}%|100%|infinity")
OPTION_KEY = re.compile(r"[A-Za-z][A-Za-z0-9]*")

# A string of argv or of the environment may take 128 KiB with its NUL: MAX_ARG_STRLEN, include/uapi/linux/binfmts.h.
MAX_STRING = 128 * 1024 - 1

# systemd tells a run who it is by these; a value from an EnvironmentFile= would win over it (systemd.exec(5)).
RESERVED_ENV = frozenset(
    (
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "LISTEN_FDNAMES",
        "LISTEN_FDS",
        "LISTEN_PID",
        "MAINPID",
        "MANAGERPID",
        "NOTIFY_SOCKET",
        "SYSTEMD_EXEC_PID",
        "WATCHDOG_PID",
        "WATCHDOG_USEC",
    )
)

# The proof rests on these; another value would make it look in the wrong place. Key: option to use instead.
OWNED_OPTIONS = {
    "ExecStart": "command",
    "Type": "notify",
    "User": "user",
    "WorkingDirectory": "working_directory",
    "EnvironmentFile": "env or secrets",
    "Environment": "env or secrets",
    "PassEnvironment": "env",
    "StandardOutput": "proof.log.path",
    "StandardError": "proof.log.path",
    "PIDFile": "command (a process that stays in the foreground)",
    "Restart": "restart",
    "TimeoutStopSec": "timeout_stop",
    "MemoryMax": "memory_max",
    "WatchdogSec": "watchdog",
    "Description": "description",
}
SECTIONS = ("Unit", "Service")

# Whatever holds a secret's value is masked in all output: a shorter one would also blank out digests and numbers.
MIN_SECRET = 6


@dataclass(frozen=True)
class Code:
    """A folder of the controller and the path on the target under which a version of it appears."""

    src: str
    dest: str
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    keep: int = DEFAULT_KEEP


@dataclass(frozen=True)
class Unit:
    """One unit that runs: the job itself, or one instance of it.

    ``extra`` is what the instance appends to the job's command; ``gpus`` None means that no GPU is declared.
    """

    name: str
    job: str
    instance: Optional[str]
    argv: tuple[str, ...]
    extra: tuple[str, ...]
    env: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    gpus: Optional[tuple[str, ...]]
    proof: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """A declared job, all defaults filled in."""

    name: str
    description: str
    command: tuple[str, ...]
    working_directory: Optional[str]
    code: Optional[Code]
    lock: Optional[str]
    user: str
    notify: bool
    restart: str
    timeout_stop: int
    memory_max: Optional[str]
    watchdog: Optional[int]
    autostart: bool
    gpus_exclusive: bool
    unit_options: Mapping[str, Mapping[str, tuple[str, ...]]]
    dropped_instances: str
    gang: Optional[str]
    templated: bool
    units: tuple[Unit, ...]


def declared_units(jobs: Any) -> dict[str, Optional[str]]:
    """The gang of each unit that a declaration asks for, as far as it can be read. Never raises."""
    found: dict[str, Optional[str]] = {}
    try:
        for job in jobs:
            try:
                name, gang = str(job["name"]), job.get("gang")
                instances = job.get("instances")
                ids = [None] if instances is None else [str(item["id"]) for item in instances]
            except Exception:  # noqa: BLE001, S112 - an undefined variable in one job must not hide the others
                continue
            found.update((unit_name(name, item), str(gang) if gang else None) for item in ids)
    except Exception:  # noqa: BLE001 - see above
        return found
    return found


def unit_name(job: str, instance: Optional[str] = None) -> str:
    """The systemd name of a job's unit."""
    return f"{job}.service" if instance is None else f"{job}@{instance}.service"


def plain(data: Any, where: str, errors: list[str]) -> Any:
    """Copy data that Ansible templates on access (ansible-core 2.19) and note each value that has no value.

    Older releases template it all before a filter is called and name the variable themselves.
    """
    if isinstance(data, Mapping):
        pairs = ((key, f"{where}.{key}") for key in list(data))
    elif isinstance(data, (list, tuple)):
        pairs = ((index, f"{where}[{index}]") for index in range(len(data)))
    else:
        return data
    copied = {}
    for key, path in pairs:
        try:
            value = data[key]
        except Exception as error:  # noqa: BLE001 - Ansible's private MarkerError, or a failed lookup or decryption
            errors.append(f"{path}: no value ({_one_line(error)}). Define it, or take this entry out.")
            continue
        copied[key] = plain(value, path, errors)
    return copied if isinstance(data, Mapping) else list(copied.values())


def validate(declared: Any, gpus: Any = (), controller: bool = False) -> tuple[list[Job], list[str]]:
    """Read a list of declared jobs.

    Args:
        declared: the value of ``launchproof_jobs``.
        gpus: GPUs of the host by UUID or index (``launchproof_gpus``), empty: not checked; an index of a job
            becomes the UUID at that place.
        controller: also look at ``code.src`` and ``lock``, which are paths of the controller.

    Returns:
        The jobs that could be read, and every error as a sentence with variable, value and fix. No error holds
        the value of a secret.
    """
    errors: list[str] = []
    if not isinstance(declared, (list, tuple)):
        return [], [f"launchproof_jobs: {_show(declared)} is not a list. Write one entry for each job."]
    host_gpus = _gpus(gpus, "launchproof_gpus", errors) or ()
    jobs = []
    for index, entry in enumerate(plain(declared, "launchproof_jobs", errors)):
        reader = _JobReader(entry, index, errors, controller)
        job = reader.job()
        if job is not None:
            jobs.append(job)
    jobs = [_with_uuids(job, host_gpus) for job in jobs]
    _check_names(jobs, errors)
    _check_code(jobs, errors)
    _check_gpus(jobs, host_gpus, errors)
    _check_secrets(jobs, errors)
    return jobs, errors


class _JobReader:
    """Reads one entry; appends to ``errors`` and goes on, so that a user sees all errors at once."""

    KEYS = (
        "name",
        "description",
        "command",
        "working_directory",
        "code",
        "lock",
        "instances",
        "dropped_instances",
        "gang",
        "user",
        "gpus",
        "gpus_exclusive",
        "env",
        "secrets",
        "notify",
        "restart",
        "timeout_stop",
        "memory_max",
        "watchdog",
        "autostart",
        "unit_options",
        "proof",
    )
    INSTANCE_KEYS = ("id", "command", "env", "secrets", "gpus", "proof")

    def __init__(self, entry: Any, index: int, errors: list[str], controller: bool) -> None:
        self.entry = entry
        self.errors = errors
        self.controller = controller
        name = entry.get("name") if isinstance(entry, Mapping) else None
        self.where = f"launchproof_jobs[{index}]" + (f" ({name})" if isinstance(name, str) else "")

    def error(self, path: str, text: str) -> None:
        self.errors.append(f"{self.where}.{path}: {text}" if path else f"{self.where}: {text}")

    def job(self) -> Optional[Job]:
        if not isinstance(self.entry, Mapping):
            self.error("", f"{_show(self.entry)} is not a job. Write a dictionary with at least name and command.")
            return None
        before = len(self.errors)
        self.unknown_keys(self.entry, self.KEYS, "")
        name = self.name()
        command = self.argv("command", self.entry.get("command"), program=True)
        code = self.code()
        if self.controller and code and command:
            self.delivered_program(command[0], code)
        notify = self.flag("notify", False)
        watchdog = self.seconds("watchdog", None)
        if watchdog and not notify:
            self.error(
                "watchdog",
                f"{watchdog} without notify: only a job that speaks sd_notify can feed it. "
                "Set notify: true, or leave watchdog out.",
            )
        job = {
            "name": name,
            "description": self.line("description") or f"Job {name}",
            "command": command,
            "working_directory": self.path("working_directory") or (code.dest if code else None),
            "code": code,
            "lock": self.controller_file("lock"),
            "user": self.user(),
            "notify": notify,
            "restart": self.restart(),
            "timeout_stop": self.seconds("timeout_stop", 120),
            "memory_max": self.memory(),
            "watchdog": watchdog,
            "autostart": self.flag("autostart", True),
            "gpus_exclusive": self.flag("gpus_exclusive", True),
            "unit_options": self.unit_options(),
            "dropped_instances": self.dropped_instances(),
            "gang": self.gang(),
        }
        units = self.units(name, command)
        # A job with an error is still worth cross-checking where its parts could be read.
        if len(self.errors) > before and (not name or not command or units is None):
            return None
        return Job(templated=self.entry.get("instances") is not None, units=tuple(units or ()), **job)

    def unknown_keys(self, data: Mapping[str, Any], known: Any, path: str) -> None:
        for key in data:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f"Did you mean {close[0]}?" if close else f"Known are {', '.join(sorted(known))}."
                self.error(f"{path}{key}", f"unknown option. {hint}")

    def name(self) -> str:
        name = self.entry.get("name")
        if name is None:
            self.error("name", "missing. Give the job a name, such as training.")
            return ""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            self.error(
                "name",
                f"{_show(name)} cannot name a unit. Use a lower case letter first, then also digits and hyphens.",
            )
            return ""
        return name

    def argv(self, path: str, value: Any, program: bool = False) -> tuple[str, ...]:
        if value is None and not program:
            return ()
        if program and value is None:
            self.error(path, "missing. Write the argv as a list: [/usr/bin/python3, train.py].")
            return ()
        if not isinstance(value, (list, tuple)) or (program and not value):
            self.error(
                path,
                f"{_show(value)} is not a list. Write the argv as a list, one element an argument: "
                "[/usr/bin/python3, train.py]; for a shell line: [/bin/sh, -c, 'the line'].",
            )
            return ()
        words = []
        for index, word in enumerate(value):
            if isinstance(word, (Mapping, list, tuple)) or word is None:
                self.error(f"{path}[{index}]", f"{_show(word)} is not an argument. Write a string.")
                continue
            words.append(self.text(f"{path}[{index}]", _string(word)))
        if program and words:
            self.program(f"{path}[0]", words[0])
        return tuple(words)

    def program(self, path: str, program: str) -> None:
        if not program or ("/" in program and not program.startswith("/")) or program.endswith("/"):
            self.error(
                path, f"{_show(program)} is neither an absolute path nor a bare program name. Write its full path."
            )
        # systemd takes these in arguments, but not in the program's path (string_is_safe() in config_parse_exec()).
        elif re.search("[\"'\\\\\x00-\x1f\x7f]", program):
            self.error(path, f"{_show(program)} holds a quote, a backslash or a control character. Rename the program.")

    def delivered_program(self, program: str, code: Code) -> None:
        """A program that comes with the code must be one already here: on the target it would only show at the start."""
        if program.startswith(code.dest + "/"):
            source = Path(code.src, program[len(code.dest) + 1 :])
            if not source.is_file() or not os.access(source, os.X_OK):
                self.error(
                    "command[0]",
                    f"{program} is delivered from {source}, which is no executable file. Correct one of them.",
                )

    def text(self, path: str, value: str) -> str:
        """A string that systemd, the kernel and a UTF-8 file can all carry."""
        problem = _unfit(value)
        if problem:
            self.error(path, f"{problem}. Take it out.")
        return value

    def line(self, key: str) -> Optional[str]:
        value = self.entry.get(key)
        if value is None:
            return None
        text = self.text(key, _string(value))
        if re.search(r"[\x00-\x1f\x7f]|\\$", text) or text != text.strip():
            self.error(
                key,
                f"{_show(text)} does not fit one line of a unit file. "
                "Leave out control characters, surrounding blanks and a final backslash.",
            )
        return text

    def path(self, key: str, data: Optional[Mapping[str, Any]] = None, prefix: str = "") -> Optional[str]:
        value = (self.entry if data is None else data).get(key)
        if value is None:
            return None
        if (
            not isinstance(value, str)
            or not value.startswith("/")
            or re.search(r"[\x00-\x1f\x7f\\]", value)
            or (_unfit(value) or value != value.strip() or ".." in value.split("/"))
        ):
            self.error(
                f"{prefix}{key}", f"{_show(value)} is not an absolute path without '..'. Write one, such as /opt/{key}."
            )
            return None
        return re.sub(r"/+", "/", value).rstrip("/") or "/"

    def controller_file(self, key: str) -> Optional[str]:
        value = self.entry.get(key)
        if not value:
            return None
        if self.controller and not Path(value).is_file():
            self.error(key, f"{_show(value)} is no file on the controller. Correct the path, or leave {key} out.")
        return str(value)

    def code(self) -> Optional[Code]:
        data = self.entry.get("code")
        if not data:
            return None
        if not isinstance(data, Mapping):
            self.error(
                "code", f"{_show(data)} is not a dictionary. Write code: {{src: ./program, dest: /opt/program}}."
            )
            return None
        self.unknown_keys(data, ("src", "dest", "exclude", "keep"), "code.")
        for key in ("src", "dest"):
            if not data.get(key):
                self.error(f"code.{key}", "missing. Write code: {src: ./program, dest: /opt/program}.")
        dest = self.path("dest", data, "code.") if data.get("dest") else None
        if dest and dest.count("/") < 2:
            self.error(
                "code.dest", f"{dest} is a folder of the system itself. Choose one below it, such as /opt/program."
            )
        src = data.get("src")
        if src and self.controller and not Path(src).is_dir():
            self.error("code.src", f"{_show(src)} is no folder on the controller. Correct the path.")
        exclude = data.get("exclude", DEFAULT_EXCLUDE)
        if not isinstance(exclude, (list, tuple)) or not all(isinstance(item, str) for item in exclude):
            self.error("code.exclude", f"{_show(exclude)} is not a list of name patterns. Write one, such as ['*.pt'].")
            exclude = DEFAULT_EXCLUDE
        keep = data.get("keep", DEFAULT_KEEP)
        if isinstance(keep, bool) or not re.fullmatch(r"\d+", str(keep)):
            self.error("code.keep", f"{_show(keep)} is not a number of versions. Write a whole number from 0 up.")
            keep = DEFAULT_KEEP
        return Code(str(src), dest, tuple(exclude), int(keep)) if src and dest else None

    def user(self) -> str:
        user = self.entry.get("user") or DEFAULT_USER
        if not isinstance(user, str) or not USER_NAME.fullmatch(user):
            self.error(
                "user", f"{_show(user)} cannot be the name of a user. Use lower case letters, digits, '_' and '-'."
            )
            return DEFAULT_USER
        return user

    def flag(self, key: str, default: bool) -> bool:
        value = self.entry.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.error(key, f"{_show(value)} is neither true nor false. Write one of them, without quotes.")
            return default
        return value

    def restart(self) -> str:
        value = self.entry.get("restart", "on-failure")
        if value is False:  # YAML reads a bare no as false
            return "no"
        if value not in ("on-failure", "no"):
            self.error("restart", f"{_show(value)} is unknown. Write on-failure or no.")
        return str(value)

    def dropped_instances(self) -> str:
        value = self.entry.get("dropped_instances", "keep")
        if value not in ("keep", "remove"):
            self.error("dropped_instances", f"{_show(value)} is unknown. Write keep or remove.")
        return str(value)

    def gang(self) -> Optional[str]:
        value = self.entry.get("gang")
        if value is not None and (not isinstance(value, str) or not NAME.fullmatch(value)):
            self.error(
                "gang",
                f"{_show(value)} cannot name a gang. Use a lower case letter first, then also digits and hyphens.",
            )
        return value

    def seconds(self, key: str, default: Optional[int]) -> Optional[int]:
        value = self.entry.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d*", str(value)):
            self.error(key, f"{_show(value)} is not a number of seconds. Write a whole number above 0.")
            return default
        return int(value)

    def memory(self) -> Optional[str]:
        value = self.entry.get("memory_max")
        if value in (None, ""):
            return None
        if isinstance(value, bool) or not MEMORY.fullmatch(str(value)):
            self.error("memory_max", f"{_show(value)} is not a size. Write bytes, or a number with K, M, G or T: 24G.")
            return None
        return str(value)

    def env(self, key: str, data: Mapping[str, Any], prefix: str, secret: bool = False) -> dict[str, str]:
        values = data.get(key)
        if values is None:
            return {}
        path = f"{prefix}{key}"
        if not isinstance(values, Mapping):
            shown = "the value" if secret else _show(values)
            self.error(path, f"{shown} is not a dictionary. Write NAME: value pairs.")
            return {}
        read = {}
        for name, value in values.items():
            if not isinstance(name, str) or not ENV_NAME.fullmatch(name):
                self.error(f"{path}.{name}", "not the name of an environment variable. Use letters, digits and '_'.")
                continue
            if name in RESERVED_ENV:
                self.error(f"{path}.{name}", "systemd sets it to tell the run who it is. Take it out.")
                continue
            if value is None or isinstance(value, (Mapping, list, tuple)):
                shown = "it" if secret else _show(value)
                self.error(
                    f"{path}.{name}", f"{shown} is not a string. Write one; for no variable at all leave it out."
                )
                continue
            text = _string(value)
            if secret and not text:
                self.error(f"{path}.{name}", "the secret is empty. Set the variable it comes from, or take it out.")
                continue
            if secret and len(text) < MIN_SECRET:
                self.error(
                    f"{path}.{name}",
                    f"the secret has {len(text)} characters, too few to be told from other text when output is masked. "
                    f"Use {MIN_SECRET} or more, or put what is no secret into env.",
                )
                continue
            problem = _unfit(text, len(name) + 1)
            if problem:
                self.error(f"{path}.{name}", f"{problem}. Take it out.")
                continue
            read[name] = text
        return read

    def unit_options(self) -> dict[str, dict[str, tuple[str, ...]]]:
        data = self.entry.get("unit_options")
        if not data:
            return {}
        if not isinstance(data, Mapping):
            self.error("unit_options", f"{_show(data)} is not a dictionary. Write {{Service: {{Nice: 5}}}}.")
            return {}
        self.unknown_keys(data, SECTIONS, "unit_options.")
        read: dict[str, dict[str, tuple[str, ...]]] = {}
        for section, options in data.items():
            path = f"unit_options.{section}"
            if not isinstance(options, Mapping):
                self.error(path, f"{_show(options)} is not a dictionary. Write {{Nice: 5}}.")
                continue
            for key, value in options.items():
                if not OPTION_KEY.fullmatch(str(key)):
                    self.error(f"{path}.{key}", "not the name of a unit option. See systemd.directives(7).")
                    continue
                if key in OWNED_OPTIONS:
                    self.error(f"{path}.{key}", f"the proof rests on it. Use the job's {OWNED_OPTIONS[key]} instead.")
                    continue
                values = value if isinstance(value, (list, tuple)) else [value]
                texts = []
                for item in values:
                    text = {True: "yes", False: "no"}.get(item) if isinstance(item, bool) else _string(item)
                    if (
                        item is None
                        or isinstance(item, Mapping)
                        or re.search(r"[\x00-\x1f\x7f]|\\$", text)
                        or _unfit(text)
                    ):
                        self.error(f"{path}.{key}", f"{_show(item)} does not fit one line of a unit file. Correct it.")
                        continue
                    texts.append(text)
                read.setdefault(section, {})[key] = tuple(texts)
        return read

    def proof(self, data: Any, path: str) -> dict[str, Any]:
        """A proof spec, checked section by section: validate() stops at its first error, a user wants them all."""
        sections = data.items() if isinstance(data, Mapping) and data else [(None, data)]
        before = len(self.errors)
        for key, value in sections:
            try:
                validate_proof(data if key is None else {key: value}, f"{self.where}.{path}")
            except SpecError as error:
                self.errors.append(str(error))
        return {} if len(self.errors) > before else dict(data or {})

    def units(self, name: str, command: tuple[str, ...]) -> Optional[list[Unit]]:
        entry = self.entry
        env = self.env("env", entry, "")
        secrets = self.env("secrets", entry, "", secret=True)
        gpus = _gpus(entry.get("gpus"), f"{self.where}.gpus", self.errors)
        proof = self.proof(entry.get("proof"), "proof")
        instances = entry.get("instances")
        if instances is None:
            self.check_env(env, secrets, gpus, "")
            return [Unit(unit_name(name), name, None, command, (), env, secrets, gpus, proof)]
        if not isinstance(instances, (list, tuple)):
            self.error(
                "instances",
                f"{_show(instances)} is not a list. Write [{{id: '1'}}, {{id: '2'}}], "
                "or leave it out for a single unit.",
            )
            return None
        shares = self.deal(gpus, instances)
        units, seen = [], set()
        for index, instance in enumerate(instances):
            path = f"instances[{index}]."
            if not isinstance(instance, Mapping):
                self.error(path[:-1], f"{_show(instance)} is not a dictionary. Write {{id: '1'}}.")
                continue
            self.unknown_keys(instance, self.INSTANCE_KEYS, path)
            number = "" if instance.get("id") is None else _string(instance["id"])
            if not INSTANCE_ID.fullmatch(number):
                self.error(
                    f"{path}id", f"{_show(number)} cannot name an instance. Use letters, digits, '.', '_' and '-'."
                )
            if number in seen:
                self.error(f"{path}id", f"{_show(number)} is there twice. Give each instance its own id.")
            seen.add(number)
            extra = self.argv(f"{path}command", instance.get("command"))
            own_gpus = _gpus(instance.get("gpus"), f"{self.where}.{path}gpus", self.errors)
            unit = Unit(
                name=unit_name(name, number),
                job=name,
                instance=number,
                argv=command + extra,
                extra=extra,
                env={**env, **self.env("env", instance, path)},
                secrets={**secrets, **self.env("secrets", instance, path, secret=True)},
                gpus=own_gpus if own_gpus is not None else shares[index],
                proof=self.proof({**proof, **(instance.get("proof") or {})}, f"{path}proof")
                if instance.get("proof")
                else proof,
            )
            self.check_env(unit.env, unit.secrets, unit.gpus, path)
            units.append(unit)
        return units

    def check_env(self, env: Mapping[str, str], secrets: Mapping[str, str], gpus: Any, path: str) -> None:
        for name in sorted(set(env) & set(secrets)):
            self.error(f"{path}env.{name}", "declared as a secret too. Keep one of the two.")
        if gpus is not None and "CUDA_VISIBLE_DEVICES" in {**env, **secrets}:
            self.error(
                f"{path}env.CUDA_VISIBLE_DEVICES", f"gpus already sets it to {','.join(gpus)}. Keep one of the two."
            )

    def deal(self, gpus: Optional[tuple[str, ...]], instances: Any) -> list[Optional[tuple[str, ...]]]:
        """The job's GPUs, dealt evenly and in order to the instances that name none themselves."""
        takers = [
            index for index, item in enumerate(instances) if isinstance(item, Mapping) and item.get("gpus") is None
        ]
        shares: list[Optional[tuple[str, ...]]] = [None] * len(instances)
        if gpus is None or not takers:
            return shares
        each, rest = divmod(len(gpus), len(takers))
        if not each or rest:
            self.error(
                "gpus",
                f"{len(takers)} instances do not fit {len(gpus)} GPUs ({', '.join(gpus)}): GPUs are dealt evenly, at "
                f"least one each. Declare {len(gpus)} instances or {len(takers)} GPUs, or give each its own gpus.",
            )
            return shares
        for turn, index in enumerate(takers):
            shares[index] = gpus[turn * each : (turn + 1) * each]
        return shares


def _check_names(jobs: list[Job], errors: list[str]) -> None:
    names = [job.name for job in jobs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        errors.append(f"launchproof_jobs: {names.count(name)} jobs have the name {name}. Give each its own.")


def _check_code(jobs: list[Job], errors: list[str]) -> None:
    seen: dict[str, tuple[str, Code]] = {}
    for job in jobs:
        if job.code is None:
            continue
        other, code = seen.setdefault(job.code.dest, (job.name, job.code))
        if code != job.code:
            errors.append(
                f"code.dest of job {job.name}: {job.code.dest} is also where job {other} puts other code "
                f"({code.src}). Give each its own dest."
            )


def _with_uuids(job: Job, host_gpus: tuple[str, ...]) -> Job:
    """The job with each index of a GPU as the UUID at that place, where the host's are known by UUID."""

    def named(gpu: str) -> str:
        return host_gpus[int(gpu)] if gpu.isdecimal() and gpu not in host_gpus and int(gpu) < len(host_gpus) else gpu

    units = (replace(unit, gpus=unit.gpus and tuple(map(named, unit.gpus))) for unit in job.units)
    return replace(job, units=tuple(units))


def _check_gpus(jobs: list[Job], host_gpus: tuple[str, ...], errors: list[str]) -> None:
    users: dict[str, tuple[str, bool]] = {}
    for job in jobs:
        for unit in job.units:
            for gpu in unit.gpus or ():
                if host_gpus and gpu not in host_gpus:
                    errors.append(
                        f"gpus of {unit.name}: {gpu} is not in launchproof_gpus ({', '.join(host_gpus)}). "
                        "Declare fewer instances, or GPUs that this host has."
                    )
                other, exclusive = users.setdefault(gpu, (unit.name, job.gpus_exclusive))
                if other != unit.name and (exclusive or job.gpus_exclusive):
                    errors.append(
                        f"gpus of {unit.name}: {gpu} is already taken by {other}. Give each its own, or set "
                        "gpus_exclusive: false on the jobs that share it."
                    )


def _check_secrets(jobs: list[Job], errors: list[str]) -> None:
    secrets = sorted(
        {
            (value, f"{job.name}.secrets.{name}")
            for job in jobs
            for unit in job.units
            for name, value in unit.secrets.items()
        }
    )
    found = []
    for job in jobs:
        for where, text, fix in _public_texts(job):
            for value, source in secrets:
                if value in text:
                    found.append(f"{where} of job {job.name}: holds the value of the secret {source}. {fix}")
    errors += list(dict.fromkeys(found))


def _public_texts(job: Job) -> list[tuple[str, str, str]]:
    """Everything of a job that any user of the target may read."""
    argv = "An argument is visible to every user: let the program read the variable from its environment."
    env = "env is a public file: take it out of env, secrets puts it into the environment too."
    other = "Take it out."
    texts = [(f"command[{index}]", word, argv) for index, word in enumerate(job.command)]
    for unit in job.units:
        label = f"instance {unit.instance} " if unit.instance is not None else ""
        texts += [(f"{label}command[{index}]", word, argv) for index, word in enumerate(unit.extra)]
        texts += [(f"{label}env.{name}", value, env) for name, value in unit.env.items()]
    texts += [
        (f"unit_options.{section}.{key}", value, other)
        for section, options in job.unit_options.items()
        for key, values in options.items()
        for value in values
    ]
    texts += [
        (key, value, other)
        for key, value in (
            ("description", job.description),
            ("working_directory", job.working_directory or ""),
            ("code.dest", job.code.dest if job.code else ""),
        )
    ]
    return texts


def _gpus(value: Any, where: str, errors: list[str]) -> Optional[tuple[str, ...]]:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        errors.append(
            f"{where}: {_show(value)} is not a list. Write [0, 1], or UUIDs, which stay the same after a reboot."
        )
        return None
    read = tuple(_string(item) for item in value)
    for gpu in read:
        if not GPU.fullmatch(gpu):
            errors.append(f"{where}: {_show(gpu)} is no GPU. Write an index or a UUID as nvidia-smi -L shows it.")
    for gpu in sorted({gpu for gpu in read if read.count(gpu) > 1}):
        errors.append(f"{where}: {gpu} is there twice. Name each GPU once.")
    return read


def _unfit(value: str, extra: int = 0) -> Optional[str]:
    """Why a string cannot travel through a unit or environment file into a process; None if it can."""
    if "\0" in value:
        return "it holds a NUL byte"
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    # systemd drops a line with one of these: unichar_is_valid(), src/basic/utf8.c.
    if any(0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE for code in map(ord, value)):
        return "it holds a code point that Unicode reserves as a noncharacter"
    if size + extra > MAX_STRING:
        return f"it takes {size + extra} bytes, the kernel takes {MAX_STRING} at most"
    return None


def _string(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, str) else repr(str(value))
    return text if len(text) <= 120 else text[:117] + "…"


def _one_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
