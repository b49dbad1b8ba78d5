# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What systemd knows of units: one C(systemctl show) for many, and the links that it makes and removes by itself."""

from __future__ import annotations

import glob
import os
import re
import shlex
import subprocess
import time

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import (
    DUMPED,
    EXITED,
    KILLED,
    UnitState,
    Unknown,
)

# systemd makes C(invocation:UNIT) here when a unit starts and removes it when the unit is inactive or failed
# (unit_export_invocation_id() of systemd's src/core/unit.c): start and end as inotify events, without D-Bus.
INVOCATIONS = "/run/systemd/units"
PROPERTIES = (
    "Id,LoadState,LoadError,ActiveState,SubState,Result,Type,InvocationID,MainPID,ControlPID,ExecMainPID,ExecMainCode,"
    "ExecMainStatus,ExecMainStartTimestampMonotonic,ExecMainExitTimestampMonotonic,NRestarts,ConditionResult,"
    "ConditionTimestampMonotonic,AssertResult,AssertTimestampMonotonic,ControlGroup,NotifyAccess,PIDFile,Job,Restart,"
    "RestartUSec,RuntimeMaxUSec,TimeoutStartUSec,WatchdogUSec,MemoryMax,FragmentPath,DropInPaths,User,ExecStart,ExecStartPre,ExecStartPost,ExecCondition,"
    "EnvironmentFiles,RemainAfterExit,StandardOutput,WorkingDirectory"
)
UNITS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
    "month": 2629800.0, "y": 31557600.0,
}  # fmt: skip  # format_timespan() of systemd's src/basic/time-util.c
COMMAND_TIMEOUT = 30  # s: a manager that answers nothing for so long is not going to

AWAY_TIMEOUT, AWAY_PAUSE = 10.0, 0.05  # s that a manager may be away, and s between two attempts
AWAY = re.compile(
    r"disconnected from message bus|Connection reset by peer|Transport endpoint is not connected|Connection timed out"
)
NO_MANAGER = re.compile(r"(?i)not been booted with systemd|no such file|permission denied|access denied|not found")


class SystemdError(Exception):
    """systemctl could not be asked at all."""


def systemctl(*arguments: str, timeout: float = COMMAND_TIMEOUT) -> subprocess.CompletedProcess:
    """Run systemctl. Raises SystemdError where it cannot be run or does not answer."""
    environ = {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LC_ALL": "C.UTF-8"}
    environ.update(
        {key: os.environ[key] for key in ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS") if key in os.environ}
    )
    try:
        return subprocess.run(
            ("systemctl",) + arguments, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=timeout, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise SystemdError("there is no systemctl on this machine") from None
    except subprocess.TimeoutExpired:
        raise SystemdError("systemctl %s gave no answer within %d s" % (arguments[0], timeout)) from None


def seconds(text: str) -> float | None:
    """Parse a time span as systemctl prints it ("1min 30s"); None for infinity, nothing or what is none."""
    total = 0.0
    for number, unit in re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text):
        if unit not in UNITS:
            return None
        total += float(number) * UNITS[unit]
    return total or (0.0 if text == "0" else None)


def parse_show(text: str) -> list:
    """Split the output of C(systemctl show A B …) into one {property: value} a unit, in order."""
    blocks = []
    for block in text.split("\n\n"):
        properties = {}
        for line in block.splitlines():
            name, equals, value = line.partition("=")
            if equals:
                # Commands have a line each: ExecStartPre= may come more than once.
                properties[name] = properties[name] + "\n" + value if name in properties else value
        if properties:
            blocks.append(properties)
    return blocks


def unit_state(properties: dict, offset: float) -> UnitState:
    """Turn properties into facts; I(offset) is CLOCK_BOOTTIME - CLOCK_MONOTONIC, s."""

    def number(name: str) -> int:
        value = properties.get(name, "")
        return int(value) if value.isdigit() else 0

    def moment(name: str) -> float:
        value = number(name)
        return value / 1e6 + offset if value else 0.0

    memory = properties.get("MemoryMax", "")
    return UnitState(
        load_state=properties.get("LoadState", ""),
        load_error=re.sub(r'^\S+ "(.*)"$', r"\1", properties.get("LoadError", "")),
        active_state=properties.get("ActiveState", ""),
        sub_state=properties.get("SubState", ""),
        result=properties.get("Result", "success"),
        type=properties.get("Type", ""),
        invocation_id=properties.get("InvocationID", ""),
        main_pid=number("MainPID"),
        exec_main_pid=number("ExecMainPID"),
        exec_main_code=number("ExecMainCode"),
        exec_main_status=number("ExecMainStatus"),
        exec_main_started_at=moment("ExecMainStartTimestampMonotonic"),
        exec_main_exited_at=moment("ExecMainExitTimestampMonotonic"),
        n_restarts=number("NRestarts"),
        condition_result=properties.get("ConditionResult") == "yes",
        condition_at=moment("ConditionTimestampMonotonic"),
        assert_result=properties.get("AssertResult") == "yes",
        assert_at=moment("AssertTimestampMonotonic"),
        control_group=properties.get("ControlGroup", ""),
        notify_access=properties.get("NotifyAccess", "none"),
        pid_file=properties.get("PIDFile", ""),
        pending_job="pending" if number("Job") else "",
        restart=properties.get("Restart", "no"),
        restart_sec=seconds(properties.get("RestartUSec", "")) or 0.0,
        runtime_max=seconds(properties.get("RuntimeMaxUSec", "")),
        timeout_start=seconds(properties.get("TimeoutStartUSec", "")),
        watchdog=seconds(properties.get("WatchdogUSec", "")) or None,
        memory_max=int(memory) if memory.isdigit() and int(memory) < 2**63 else None,
        missing_files=missing_files(properties) if properties.get("Result") == "resources" else (),
        failed_command=failed_command(properties),
        failed_post_command=failed_post_command(properties),
        fragment_path=properties.get("FragmentPath", ""),
    )


def missing_files(properties: dict) -> tuple:
    """Files of EnvironmentFile= that are not there, those left out that may be missing ("-")."""
    found = re.findall(r"^(.*) \(ignore_errors=no\)$", properties.get("EnvironmentFiles", ""), re.MULTILINE)
    return tuple(path for path in found if not glob.glob(path))


def clock_offset() -> float:
    """CLOCK_BOOTTIME - CLOCK_MONOTONIC, s: what suspension took."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


def properties_of(units: list) -> dict:
    """{unit: properties} of I(units), by one exec. Raises SystemdError.

    A manager that is being re-executed drops its connections and answers again soon: it is asked again for a while.
    """
    end = time.monotonic() + AWAY_TIMEOUT
    while True:
        answer = systemctl("show", "--no-pager", "--property=" + PROPERTIES, "--", *units)
        blocks = parse_show(answer.stdout)
        if answer.returncode == 0 and len(blocks) == len(units):
            return dict(zip(units, blocks))
        why = answer.stderr.strip() or "%d answers for %d units" % (len(blocks), len(units))
        if NO_MANAGER.search(why) or time.monotonic() > end:
            raise SystemdError("systemctl show: %s" % why)
        time.sleep(AWAY_PAUSE)


def show(units: list) -> dict:
    """{unit: (UnitState or Unknown, properties)} of I(units), by one exec."""
    try:
        found = properties_of(units)
    except SystemdError as error:
        return {unit: (Unknown(str(error)), {}) for unit in units}
    offset = clock_offset()
    return {unit: (unit_state(properties, offset), properties) for unit, properties in found.items()}


def invocation(unit: str) -> str | None:
    """The id of the invocation that runs now, from systemd's own link; None when there is none."""
    try:
        return os.readlink("%s/invocation:%s" % (INVOCATIONS, unit))
    except OSError:
        return None


def pending_jobs() -> dict:
    """{unit: type of its pending job}: start, stop, restart …"""
    try:
        lines = systemctl("list-jobs", "--no-legend", "--no-pager", "--plain", "--full").stdout.splitlines()
    except SystemdError:
        return {}
    return {fields[1]: fields[2] for fields in map(str.split, lines) if len(fields) >= 4}


def target_of(unit: str) -> str | None:
    """The target that a template instance belongs to by this collection's convention, None for a plain unit."""
    match = re.fullmatch(r"([^@]+)@[^@]+\.service", unit)
    return match.group(1) + ".target" if match else None


def failed_condition(unit: str) -> str:
    """The condition that said no, in the unit file's words; "" when systemctl does not say."""
    try:
        text = systemctl("status", "--no-pager", "--lines=0", "--", unit).stdout
    except SystemdError:
        return ""
    match = re.search(r"((?:Condition|Assert)\w+=.*?) was not met", text)
    return match.group(1) if match else ""


def command(properties: dict) -> tuple:
    """The words of ExecStart=, as far as systemctl's own form keeps them apart."""
    match = re.search(r"argv\[\]=(.*?) ; ignore_errors=", properties.get("ExecStart", ""))
    return tuple(match.group(1).split()) if match else ()


def parent_end(properties: dict) -> tuple:
    """(code, status) with which the parent of a Type=forking unit ended, (0, 0) when it did not.

    ExecMainCode= stays 0 where systemd never came to know a main process.
    """
    found = re.search(r"; code=(exited|killed|dumped) ; status=(\d+)", properties.get("ExecStart", ""))
    return (
        ({"exited": EXITED, "killed": KILLED, "dumped": DUMPED}[found.group(1)], int(found.group(2)))
        if found
        else (0, 0)
    )


def failed_command_status(properties: dict) -> int:
    """Exit status of the ExecStartPre= or ExecCondition= command that failed last, 0 when none did."""
    return _failed_command(properties)[1]


def failed_command(properties: dict) -> str:
    """That command and its exit status for people, "" when none failed."""
    words, status = _failed_command(properties)
    return "%s (exit status %d)" % (words, status) if status else ""


def failed_post_command(properties: dict) -> str:
    """The ExecStartPost= command that failed, with its exit status, "" when none did."""
    words, status = _failed_command(properties, ("ExecStartPost",))
    return "%s (exit status %d)" % (words, status) if status else ""


def _failed_command(properties: dict, names: tuple = ("ExecStartPre", "ExecCondition")) -> tuple:
    text = "\n".join(properties.get(name, "") for name in names)
    found = re.findall(r"argv\[\]=(.*?) ; ignore_errors=.*?code=exited ; status=(\d+)", text)
    return next(((words, int(status)) for words, status in reversed(found) if int(status)), ("", 0))


def failed_dependency(unit: str) -> str:
    """A unit that I(unit) requires and that is not active, "" when there is none."""
    try:
        names = systemctl("show", "--property=Requires,BindsTo,Requisite", "--value", "--", unit).stdout.split()
        states = parse_show(systemctl("show", "--property=Id,ActiveState", "--", *names).stdout) if names else []
    except SystemdError:
        return ""
    return next((state.get("Id", "") for state in states if state.get("ActiveState") in ("failed", "inactive")), "")


def declared_output(unit: str, properties: dict) -> str | None:
    """The file that StandardOutput= of the unit names, None where it names none.

    systemctl shows only the word "append" or "file" (tried with systemd 252), so the unit's files are read.
    """
    files = [properties.get("FragmentPath", "")] + shlex.split(properties.get("DropInPaths", ""))
    found = None
    for path in filter(None, files):
        try:
            with open(path, encoding="utf-8", errors="replace") as handle:
                for line in handle:
                    match = re.match(r"\s*StandardOutput\s*=\s*(.*?)\s*$", line)
                    if match:
                        found = match.group(1)
        except OSError:
            continue
    kind, _colon, path = (found or "").partition(":")
    if kind not in ("append", "file", "truncate") or not path:
        return None
    name = unit.rsplit(".", 1)[0]
    prefix, _at, instance = name.partition("@")
    values = {"n": unit, "N": name, "p": prefix, "i": instance, "I": instance, "%": "%"}
    return re.sub(r"%([nNpiI%])", lambda match: values[match.group(1)], path)


def journal(unit: str, invocation_id: str, lines: int = 20) -> tuple | Unknown:
    """Messages of the manager and the unit for one invocation, oldest first; Unknown where there is no journal."""
    matches = (
        ["_SYSTEMD_INVOCATION_ID=" + invocation_id, "+", "INVOCATION_ID=" + invocation_id]
        if invocation_id
        else ["UNIT=" + unit]
    )
    command = ["journalctl", "--no-pager", "--quiet", "--output=cat", "--lines=%d" % lines]
    try:
        answer = subprocess.run(
            command + matches,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=False,
        )
    except FileNotFoundError:
        return Unknown("there is no journalctl")
    except subprocess.TimeoutExpired:
        return Unknown("journalctl gave no answer within 5 s")
    if answer.returncode != 0:
        return Unknown("journalctl: %s" % (answer.stderr.strip() or "exit status %d" % answer.returncode))
    return tuple(answer.stdout.splitlines())
