# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What systemd knows of units and does with them, over D-Bus: no process for each question, and it says what changes.

Sources: org.freedesktop.systemd1(5) for methods, properties and signals; the sockets are those that systemctl uses.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import subprocess
import time

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import EXITED, UnitState, Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import dbus

PRIVATE_SOCKET = "/run/systemd/private"  # the manager's own, for root: it is there without any bus
BUS_SOCKET = "/run/dbus/system_bus_socket"  # for everybody
SYSTEMD = "org.freedesktop.systemd1"
MANAGER, UNIT = SYSTEMD + ".Manager", SYSTEMD + ".Unit"
OBJECT = "/org/freedesktop/systemd1"
PROPERTIES_INTERFACE = "org.freedesktop.DBus.Properties"
BUS = "org.freedesktop.DBus"
# With one of these set, a process that fails between them and the exec may not reach the journal any more, or not be kept there.
MAY_MUTE_SETUP = (
    "LogLevelMax", "LogNamespace", "RootDirectory", "RootImage", "TemporaryFileSystem", "InaccessiblePaths", "SystemCallFilter",
    "RestrictAddressFamilies", "AppArmorProfile", "SELinuxContext",
)  # fmt: skip
PROPERTIES = {
    "LoadState", "LoadError", "ActiveState", "SubState", "Result", "Type", "InvocationID", "MainPID", "ControlPID", "ExecMainPID", "ExecMainCode",
    "ExecMainStatus", "ExecMainStartTimestampMonotonic", "ExecMainExitTimestampMonotonic", "NRestarts", "ConditionResult",
    "ConditionTimestampMonotonic", "Conditions", "AssertResult", "AssertTimestampMonotonic", "Asserts", "ControlGroup", "NotifyAccess", "PIDFile",
    "Job", "Restart", "RestartUSec", "RuntimeMaxUSec", "TimeoutStartUSec", "WatchdogUSec", "MemoryMax", "FragmentPath", "DropInPaths", "User",
    "ExecStart", "ExecStartPre", "ExecStartPost", "ExecCondition", "EnvironmentFiles", "StandardOutput", "WorkingDirectory", "BusName",
    "StandardError", "PrivateTmp",
    *MAY_MUTE_SETUP,
}  # fmt: skip
UNSET = (None, "", [], (False, []), (False, ""), -1)
# sd-messages.h: "Failed at step …" of the process that was to become the command, and systemd's "… exited, code=…".
SPAWN_FAILED, PROCESS_EXITED = "641257651c1b4ec9a8624d7a40a9e1e7", "98e322203f7a4ed290d09fe03c09fe15"
JOURNAL_TIMEOUT = 5.0  # s for an answer of journalctl
# How often the journal is asked for what is on its way, and s between two looks where it cannot be told to hurry.
LOOKS, LOOK_PAUSE = 4, 0.05
DEPENDENCIES = {"Requires", "BindsTo", "Requisite"}
INFINITY = 2**64 - 1  # of a time or a size
TIMEOUT = 90.0  # s without any answer: one that starts hundreds of units answers late
AWAY_TIMEOUT, AWAY_PAUSE = 10.0, 0.05  # s that a manager may be away (re-executed), and s between two attempts
# What the bus says of a manager that is just away.
AWAY = ("Error.NoReply", "Error.Disconnected", "Error.ServiceUnknown", "Error.NameHasNoOwner", "Error.Timeout")
AT_ONCE = 64  # questions that are sent before the first answer is read: no buffer overflows


class SystemdError(Exception):
    """systemd cannot be asked, or refuses. C(lasting): asking again would not help."""

    def __init__(self, message: str, lasting: bool = False):
        super().__init__(message)
        self.lasting = lasting


def unit_path(unit: str) -> str:
    """The object path of a unit: all but letters and digits is escaped, bus_label_escape() of systemd."""
    label = re.sub(r"[^A-Za-z0-9]|^[0-9]", lambda match: "".join("_%02x" % byte for byte in match[0].encode()), unit)
    return "%s/unit/%s" % (OBJECT, label or "_")


def unit_of_path(path: str) -> str:
    """The unit of an object path, "" for another object."""
    head, _slash, label = path.rpartition("/")
    if head != OBJECT + "/unit":
        return ""
    return re.sub(rb"_([0-9a-f]{2})", lambda match: bytes([int(match[1], 16)]), label.encode()).decode(errors="replace")


class Manager:
    """A connection to systemd that comes back when systemd was away. Raises SystemdError.

    With a I(loop), C(changed(unit)) is called for each unit of which systemd says that something is new (None: any may
    have changed), and C(job_ended(path, unit, result)) at the end of each job.
    """

    def __init__(self, loop=None, changed=None, job_ended=None):
        self._loop, self._on_changed, self._on_job_ended = loop, changed, job_ended
        self._connection = None
        self._changed, self._ended = {}, []  # what signals said and nobody was told yet; a dict keeps the order

    def __enter__(self):
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def close(self) -> None:
        if self._connection:
            if self._loop:
                self._loop.remove(self._connection.fileno())
            self._connection.close()
            self._connection = None

    # ---- the connection ----

    def _connect(self):
        """The connection, made where there is none. Root has the manager's own socket, which needs no bus."""
        if self._connection:
            return self._connection
        sockets = ((PRIVATE_SOCKET,) if os.geteuid() == 0 else ()) + (BUS_SOCKET,)
        failures = []
        for path in sockets:
            try:
                self._connection = dbus.Connection(path, TIMEOUT)
                break
            except dbus.DBusError as error:
                failures.append(str(error))
        else:
            lasting = not any(map(os.path.exists, sockets))
            raise SystemdError("systemd does not answer (%s)" % "; ".join(failures), lasting)
        if path == BUS_SOCKET:
            self._call(BUS, "/org/freedesktop/DBus", BUS, "Hello")
        if self._loop:
            if path == BUS_SOCKET:
                for rule in (
                    "sender='%s'" % SYSTEMD,
                    "sender='%s',member='NameOwnerChanged',arg0='%s'" % (BUS, SYSTEMD),
                ):
                    self._call(BUS, "/org/freedesktop/DBus", BUS, "AddMatch", "s", ("type='signal'," + rule,))
            self._loop.add(self._connection.fileno(), self._on_readable)
            self._ask([(SYSTEMD, OBJECT, MANAGER, "Subscribe")])  # else it says nothing of units
            self._changed[None] = True
        return self._connection

    def _on_readable(self) -> None:
        try:
            for message in self._connection.messages():
                if message.type == dbus.SIGNAL:
                    self._on_signal(message)
        except dbus.DBusError:
            self.close()
            self._changed[None] = True  # what is asked next connects anew
        self.tell()

    def _on_signal(self, message) -> None:
        path, member = message.fields.get(dbus.PATH, ""), message.fields.get(dbus.MEMBER)
        if member == "PropertiesChanged":
            # The type's own properties come first, the general ones follow: with those it is complete.
            unit = unit_of_path(path)
            if unit and message.body.read("s") == UNIT:
                self._changed[unit] = True
        elif member == "JobNew":
            self._changed[message.values()[2]] = True
        elif member == "JobRemoved":
            _number, job, unit, result = message.values()
            self._changed[unit] = True
            self._ended.append((job, unit, result))
        elif member == "Reloading" and message.values() == [False]:
            self._changed[None] = True
        elif member == "NameOwnerChanged":
            self._changed[None] = True  # a manager that is new on the bus

    def tell(self) -> None:
        """Pass on what signals said that came before an answer."""
        ended, self._ended = self._ended, []
        for job in ended:
            if self._on_job_ended:
                self._on_job_ended(*job)
        changed, self._changed = self._changed, {}
        for unit in changed:
            if self._on_changed:
                self._on_changed(unit)

    def _ask(self, calls: list, on_answer=None) -> list:
        """The answers to I(calls), (destination, path, interface, member, signature, values) each, in their order."""
        connection = self._connect()
        found = []
        try:
            for start in range(0, len(calls), AT_ONCE):
                serials = [connection.send(*each) for each in calls[start : start + AT_ONCE]]
                first = serials[0] - start

                def count(serial: int, first: int = first) -> None:
                    if on_answer:
                        on_answer(serial - first)

                answers = connection.answers(serials, self._on_signal, count)
                found.extend(answers[serial] for serial in serials)
        except dbus.DBusError as error:
            self.close()
            raise SystemdError(str(error)) from error
        for answer in found:
            if answer.error and answer.error[0].endswith(AWAY):
                raise SystemdError(answer.error[1])
        return found

    def _call(self, *call) -> list:
        """The values that one method returns."""
        (answer,) = self._ask([call])
        if answer.error:
            raise SystemdError(answer.error[1], lasting=True)
        return answer.values()

    # ---- questions ----

    def show(self, units: list) -> dict:
        """{unit: (UnitState or Unknown, properties)} of I(units); systemd loads what is not loaded.

        A manager that is away is asked again for a while: one that is being re-executed answers again soon.
        """
        end = time.monotonic() + AWAY_TIMEOUT
        while True:
            try:
                found, jobs = self._look(units)
                break
            except SystemdError as error:
                if error.lasting or time.monotonic() > end:
                    return {unit: (Unknown(str(error)), {}) for unit in units}
            time.sleep(AWAY_PAUSE)
        offset = clock_offset()
        return {
            unit: (properties, {})
            if isinstance(properties, Unknown)
            else (unit_state(properties, offset, jobs.get(unit, "")), properties)
            for unit, properties in found.items()
        }

    def _look(self, units: list) -> tuple:
        """({unit: properties or Unknown}, {unit: type of its job})."""
        # A signal that comes before the answer is in that already.
        answers = self._ask(
            [(SYSTEMD, unit_path(unit), PROPERTIES_INTERFACE, "GetAll", "s", ("",)) for unit in units],
            lambda index: self._changed.pop(units[index], None),
        )
        found = {
            unit: Unknown(answer.error[1]) if answer.error else answer.body.properties(PROPERTIES)
            for unit, answer in zip(units, answers)
        }
        jobs = {}
        if any(not isinstance(each, Unknown) and each.get("Job", (0,))[0] for each in found.values()):
            (rows,) = self._call(SYSTEMD, OBJECT, MANAGER, "ListJobs")
            jobs = {unit: kind for _number, unit, kind, _state, _path, _unit_path in rows}
        return found, jobs

    def failed_dependency(self, unit: str) -> str:
        """A unit that I(unit) requires and that is not active, "" when there is none or nobody says."""
        try:
            (answer,) = self._ask([(SYSTEMD, unit_path(unit), PROPERTIES_INTERFACE, "GetAll", "s", (UNIT,))])
            names = [] if answer.error else sum(answer.body.properties(DEPENDENCIES).values(), [])
            if not names:
                return ""
            (rows,) = self._call(SYSTEMD, OBJECT, MANAGER, "ListUnitsByNames", "as", (names,))
        except SystemdError:
            return ""
        return next((row[0] for row in rows if row[3] in ("failed", "inactive")), "")

    # ---- orders ----

    def order(self, method: str, units: list) -> dict:
        """Ask for a job of each unit, by StartUnit or StopUnit: {unit: its job's path, or SystemdError where it is refused}.

        A target is started alone: what it wants is asked for by name, and an instance that has completed must not run again.
        Raises SystemdError where the manager went away meanwhile: some may have been asked for.
        """
        modes = ["ignore-dependencies" if unit.endswith(".target") else "replace" for unit in units]
        answers = self._ask([(SYSTEMD, OBJECT, MANAGER, method, "ss", pair) for pair in zip(units, modes)])
        return {
            unit: SystemdError(answer.error[1], lasting=True) if answer.error else answer.values()[0]
            for unit, answer in zip(units, answers)
        }

    def reset_failed(self, units: list) -> None:
        """Forget the failures, and the starts that the start limit counts; units that are not loaded have none."""
        with contextlib.suppress(SystemdError):
            self._ask([(SYSTEMD, OBJECT, MANAGER, "ResetFailedUnit", "s", (unit,)) for unit in units])

    def reload(self) -> None:
        """Make systemd read its unit files again."""
        self._call(SYSTEMD, OBJECT, MANAGER, "Reload")


def show(units: list) -> dict:
    """{unit: (UnitState or Unknown, properties)} of I(units), by a connection that is closed again."""
    with Manager() as manager:
        return manager.show(units)


def unit_state(properties: dict, offset: float, job: str) -> UnitState:
    """Turn properties into facts; I(offset) is CLOCK_BOOTTIME - CLOCK_MONOTONIC, s, I(job) the type of the unit's job."""

    def moment(name: str) -> float:
        value = properties.get(name, 0)
        return value / 1e6 + offset if value else 0.0

    def span(name: str) -> float | None:
        value = properties.get(name, INFINITY)
        return None if value == INFINITY else value / 1e6

    memory = properties.get("MemoryMax", INFINITY)
    return UnitState(
        load_state=properties.get("LoadState", ""),
        load_error=properties.get("LoadError", ("", ""))[1],
        active_state=properties.get("ActiveState", ""),
        sub_state=properties.get("SubState", ""),
        result=properties.get("Result", "success"),
        type=properties.get("Type", ""),
        invocation_id=properties.get("InvocationID", b"").hex(),
        main_pid=properties.get("MainPID", 0),
        exec_main_pid=properties.get("ExecMainPID", 0),
        exec_main_code=properties.get("ExecMainCode", 0),
        exec_main_status=properties.get("ExecMainStatus", 0),
        exec_main_started_at=moment("ExecMainStartTimestampMonotonic"),
        exec_main_exited_at=moment("ExecMainExitTimestampMonotonic"),
        n_restarts=properties.get("NRestarts", 0),
        condition_result=properties.get("ConditionResult", False),
        condition_at=moment("ConditionTimestampMonotonic"),
        assert_result=properties.get("AssertResult", False),
        assert_at=moment("AssertTimestampMonotonic"),
        failed_condition=failed_condition(properties),
        control_group=properties.get("ControlGroup", ""),
        notify_access=properties.get("NotifyAccess", "none"),
        pid_file=properties.get("PIDFile", ""),
        bus_name=properties.get("BusName", ""),
        pending_job=job,
        restart=properties.get("Restart", "no"),
        restart_sec=span("RestartUSec") or 0.0,
        runtime_max=span("RuntimeMaxUSec"),
        timeout_start=span("TimeoutStartUSec"),
        watchdog=span("WatchdogUSec") or None,
        memory_max=memory if memory < 2**63 else None,
        missing_files=missing_files(properties) if properties.get("Result") == "resources" else (),
        failed_command=failed_command(properties, "ExecStartPre", "ExecCondition"),
        failed_post_command=failed_command(properties, "ExecStartPost"),
        unfinished_command=unfinished_command(properties)[0],
        fragment_path=properties.get("FragmentPath", ""),
    )


def missing_files(properties: dict) -> tuple:
    """Files of EnvironmentFile= that are not there, those left out that may be missing ("-")."""
    return tuple(path for path, may in properties.get("EnvironmentFiles", ()) if not may and not glob.glob(path))


def failed_condition(properties: dict) -> str:
    """The condition or assertion that said no, in the unit file's words; "" where none did."""
    for name, trigger, negate, parameter, state in properties.get("Conditions", []) + properties.get("Asserts", []):
        if state < 0:
            return "%s=%s%s%s" % (name, "|" if trigger else "", "!" if negate else "", parameter)
    return ""


def clock_offset() -> float:
    """CLOCK_BOOTTIME - CLOCK_MONOTONIC, s: what suspension took."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


def command(properties: dict) -> tuple:
    """The words of ExecStart=."""
    return tuple(properties["ExecStart"][0][1]) if properties.get("ExecStart") else ()


def ends(properties: dict, *names: str) -> list:
    """(command, code, status) of the commands of these properties that have ended, in their order, without those that may fail."""
    return [
        (in_words(name, entry), entry[8], entry[9])
        for name in names
        for entry in properties.get(name, ())
        if entry[8] and not entry[2]
    ]


def in_words(name: str, entry: tuple) -> str:
    """An entry of ExecStart= and the like as its line in the unit file."""
    return "%s=%s" % (name, " ".join(entry[1]))


def parent_end(properties: dict) -> tuple:
    """(code, status) with which the parent of a Type=forking unit ended, (0, 0) when it did not.

    ExecMainCode= stays 0 where systemd never came to know a main process.
    """
    return next((each[1:] for each in ends(properties, "ExecStart")), (0, 0))


def failed_command_status(properties: dict) -> int:
    """Exit status of the ExecStartPre= or ExecCondition= command that failed last, 0 when none did."""
    return _failed(properties, "ExecStartPre", "ExecCondition")[1]


def failed_command(properties: dict, *names: str) -> str:
    """The command of these properties that failed last, with its exit status, for people; "" when none failed."""
    return "%s (exit status %d)" % found if (found := _failed(properties, *names))[1] else ""


def unfinished_command(properties: dict) -> tuple:
    """(line, signal) of the command before or after the main one that began last, where it did not end by itself; else ("", 0).

    The signal is 0 where it still runs, and where it may fail (a dash before it): then that is no end of the start.
    """
    began = [
        (name, entry)
        for name in ("ExecCondition", "ExecStartPre", "ExecStart", "ExecStartPost")
        for entry in properties.get(name, ())
        if entry[3]
    ]
    name, last = began[-1] if began else ("ExecStart", None)
    if name == "ExecStart" or last[8] == EXITED:
        return "", 0
    return in_words(name, last), last[9] if last[8] and not last[2] else 0


def _failed(properties: dict, *names: str) -> tuple:
    failed = [(line, status) for line, code, status in ends(properties, *names) if code == EXITED and status]
    return failed[-1] if failed else ("", 0)


def target_of(unit: str) -> str | None:
    """The target that a template instance belongs to by this collection's convention, None for a plain unit."""
    match = re.fullmatch(r"([^@]+)@[^@]+\.service", unit)
    return match.group(1) + ".target" if match else None


def declared_output(unit: str, properties: dict, name: str = "StandardOutput") -> str | None:
    """The file that StandardOutput= (or another setting of that kind) of the unit names, None where it names none.

    The property holds only the word "append" or "file" (tried with systemd 252), so the unit's files are read.
    """
    files = [properties.get("FragmentPath", "")] + properties.get("DropInPaths", [])
    found = None
    for path in filter(None, files):
        try:
            with open(path, encoding="utf-8", errors="replace") as handle:
                for line in handle:
                    match = re.match(r"\s*%s\s*=\s*(.*?)\s*$" % name, line)
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


def journal_closed() -> str:
    """Why this user sees nothing of the system's journal, "" where he does: journalctl shows less then, and says nothing."""
    files = [path for top in ("/var/log/journal", "/run/log/journal") for path in glob.glob(top + "/*/system.journal")]
    if not files or any(os.access(path, os.R_OK) for path in files):
        return ""
    return "%s: Permission denied; the group systemd-journal may read it" % files[0]


def journal(unit: str, invocation_id: str, lines: int = 20) -> tuple | Unknown:
    """Messages of the manager and the unit for one invocation, oldest first; Unknown where there is no journal."""
    matches = (
        ["_SYSTEMD_INVOCATION_ID=" + invocation_id, "+", "INVOCATION_ID=" + invocation_id]
        if invocation_id
        else ["UNIT=" + unit]
    )
    return journalctl("--no-pager", "--output=cat", "--lines=%d" % lines, *matches)


def in_namespace(namespace: str) -> tuple:
    """What makes journalctl read the journal of a LogNamespace=; "" is the one that is everybody's."""
    return ("--namespace=" + namespace,) if namespace else ()


def journalctl(*words: str) -> tuple | Unknown:
    """The lines that journalctl prints; Unknown where it cannot."""
    try:
        answer = subprocess.run(
            ("journalctl", "--quiet", *words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=JOURNAL_TIMEOUT,
            check=False,
        )
    except FileNotFoundError:
        return Unknown("there is no journalctl")
    except subprocess.TimeoutExpired:
        return Unknown("journalctl gave no answer within %g s" % JOURNAL_TIMEOUT)
    if answer.returncode != 0:
        return Unknown("journalctl: %s" % (answer.stderr.strip() or "exit status %d" % answer.returncode))
    return tuple(answer.stdout.splitlines())


def setup_error(run_id: str, status: int, properties: dict) -> str | Unknown:
    """What systemd wrote of a process that it could not set up, of a run that ended with I(status); "" where it wrote nothing.

    The process writes it before it exits, and systemd writes of that exit afterwards, into the same queue: where the exit has come
    and the other has not, it never will. Where the exit has not come, or the process may have been kept from writing, nobody knows.
    """
    if not command(properties):
        return Unknown("systemd has forgotten the unit")
    hidden = [name for name in MAY_MUTE_SETUP if properties.get(name) not in UNSET]
    if hidden:
        return Unknown("%s= may keep a failed setup out of the journal" % hidden[0])
    ids = ["MESSAGE_ID=" + each for each in (SPAWN_FAILED, PROCESS_EXITED)]
    for look in range(LOOKS):
        lines = journalctl("--no-pager", "--output=json", "INVOCATION_ID=" + run_id, *ids)
        if isinstance(lines, Unknown):
            return lines
        entries = [json.loads(line) for line in lines]
        failed = [str(each.get("MESSAGE")) for each in entries if each.get("MESSAGE_ID") == SPAWN_FAILED]
        if failed:
            return failed[-1]
        if any(each.get("EXIT_STATUS") == str(status) for each in entries):
            return ""
        if look < LOOKS - 1 and isinstance(journalctl("--sync"), Unknown):
            time.sleep(LOOK_PAUSE)  # root alone may ask for that
    return Unknown("the journal has nothing of an exit with the status %d" % status)
