# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Properties of systemd 252 turned into facts, and a manager that answers, goes away, refuses and tells of changes."""

from __future__ import annotations

import os
import socket
import struct
import threading

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import dbus, systemd
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import Loop
from hypothesis import given
from hypothesis import strategies as st


def command(path, *words, code=0, status=0, may_fail=False, began=0):
    """An entry of ExecStart= and the like, a(sasbttttuii)."""
    return (path, [path, *words], may_fail, began, began, 0, 0, 7, code, status)


ENDED = {
    "Type": "exec", "Restart": "on-failure", "NotifyAccess": "none", "RestartUSec": 100000, "TimeoutStartUSec": 90000000,
    "RuntimeMaxUSec": 3600000000, "WatchdogUSec": 0, "MainPID": 0, "Result": "exit-code", "NRestarts": 2,
    "ExecMainStartTimestampMonotonic": 1000000, "ExecMainExitTimestampMonotonic": 1500000, "ExecMainPID": 77,
    "ExecMainCode": 1, "ExecMainStatus": 3, "ControlGroup": "/system.slice/a.service", "MemoryMax": 104857600,
    "ExecStartPre": [command("/bin/a", "x", code=1), command("/bin/o", code=1, status=5, may_fail=True),
                     command("/bin/b", code=1, status=200)],
    "ExecStart": [command("/bin/sh", "-c", "echo a=b; exit 3", code=1, status=3)],
    "LoadState": "loaded", "LoadError": ("", ""), "ActiveState": "failed", "SubState": "failed", "ConditionResult": True,
    "ConditionTimestampMonotonic": 900000, "InvocationID": bytes.fromhex("9f226d5633a648729523155d5d07a4fc"), "Job": (0, "/"),
    "Conditions": [("ConditionPathExists", False, True, "/no", -1), ("ConditionPathExists", False, False, "/yes", 1)],
}  # fmt: skip
ABSENT = {
    "LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead", "MemoryMax": 2**64 - 1, "WatchdogUSec": 2**64 - 1,
    "LoadError": ("org.freedesktop.systemd1.NoSuchUnit", "Unit b.service not found."), "InvocationID": b"",
}  # fmt: skip


def test_properties_become_facts():
    state = systemd.unit_state(ENDED, offset=10.0, job="")
    assert (state.active_state, state.result, state.n_restarts) == ("failed", "exit-code", 2)
    assert (state.exec_main_pid, state.exec_main_code, state.exec_main_status) == (77, 1, 3)
    assert (state.exec_main_started_at, state.exec_main_exited_at) == (11.0, 11.5), (
        "CLOCK_MONOTONIC moved to CLOCK_BOOTTIME"
    )
    assert (state.timeout_start, state.runtime_max, state.watchdog, state.restart_sec) == (90.0, 3600.0, None, 0.1)
    assert (state.memory_max, state.invocation_id) == (104857600, "9f226d5633a648729523155d5d07a4fc")
    assert state.failed_condition == "ConditionPathExists=!/no"
    assert state.failed_command == "ExecStartPre=/bin/b (exit status 200)"
    assert systemd.command(ENDED) == ("/bin/sh", "-c", "echo a=b; exit 3")
    state = systemd.unit_state(ABSENT, offset=0.0, job="start")
    assert (state.load_state, state.load_error) == ("not-found", "Unit b.service not found.")
    assert (state.memory_max, state.watchdog, state.pending_job, state.condition_at) == (None, None, "start", 0.0)
    assert (state.failed_condition, state.failed_command, state.invocation_id) == ("", "", "")


def test_the_end_of_a_parent_that_left_no_main_process():
    assert systemd.parent_end({"ExecStart": [command("/bin/d", code=1, status=3)]}) == (1, 3)
    assert systemd.parent_end({"ExecStart": [command("/bin/d", code=2, status=9)]}) == (2, 9)
    assert systemd.parent_end({"ExecStart": [command("/bin/d")]}) == (0, 0)


def test_a_command_that_failed():
    properties = {"ExecStartPost": [command("/bin/a", "x", code=1, status=2), command("/bin/b")]}
    assert systemd.failed_command(properties, "ExecStartPost") == "ExecStartPost=/bin/a x (exit status 2)"
    assert systemd.failed_command({"ExecStartPost": [command("/bin/a", code=1)]}, "ExecStartPost") == ""
    refused = {"ExecCondition": [command("/bin/c", code=1, status=255)], "ExecStartPre": [command("/bin/a")]}
    assert systemd.unit_state(refused, 0.0, "").failed_command == "ExecCondition=/bin/c (exit status 255)"
    allowed = {"ExecStartPre": [command("/bin/a", code=1, status=2, may_fail=True)]}
    assert systemd.failed_command_status(allowed) == 0, "a command with a dash before it may fail"


@pytest.mark.parametrize(
    ("properties", "found"),
    [
        (
            {"ExecStartPre": [command("/bin/a", code=1, began=5), command("/bin/s", "9", began=6)]},
            ("ExecStartPre=/bin/s 9", 0),
        ),
        (
            {"ExecStartPre": [command("/bin/s", "9", code=2, status=15, began=6), command("/b")]},
            ("ExecStartPre=/bin/s 9", 15),
        ),
        ({"ExecStartPre": [command("/bin/s", code=2, status=15, began=6, may_fail=True)]}, ("ExecStartPre=/bin/s", 0)),
        (
            {
                "ExecStartPre": [
                    command("/s", code=2, status=9, began=5, may_fail=True),
                    command("/b", code=1, status=1, began=6),
                ]
            },
            ("", 0),
        ),
        (
            {
                "ExecStartPre": [command("/s", code=2, status=9, began=5, may_fail=True)],
                "ExecStart": [command("/x", began=6)],
            },
            ("", 0),
        ),
        (
            {"ExecStartPre": [command("/b", code=1, began=5)], "ExecStartPost": [command("/p", began=6)]},
            ("ExecStartPost=/p", 0),
        ),
        ({"ExecCondition": [command("/c", code=3, status=6, began=5)]}, ("ExecCondition=/c", 6)),
        ({"ExecStartPre": [command("/b", code=1, status=1, began=5)], "ExecStart": [command("/x", began=6)]}, ("", 0)),
        ({"ExecStartPost": [command("/p")]}, ("", 0)),
    ],
)
def test_a_command_that_did_not_end_by_itself(properties, found):
    assert systemd.unfinished_command(properties) == found


SPAWN = '{"MESSAGE_ID": "%s", "MESSAGE": "Failed at step USER spawning /x: No such process"}' % systemd.SPAWN_FAILED
EXIT_217 = '{"MESSAGE_ID": "%s", "EXIT_STATUS": "217"}' % systemd.PROCESS_EXITED
EXIT_1 = '{"MESSAGE_ID": "%s", "EXIT_STATUS": "1"}' % systemd.PROCESS_EXITED


@pytest.mark.parametrize(
    ("looks", "more", "found"),
    [
        ([[SPAWN, EXIT_217]], {}, "Failed at step USER spawning /x: No such process"),
        ([[SPAWN]], {}, "Failed at step USER spawning /x: No such process"),
        ([[EXIT_217]], {}, ""),
        # What is on its way is waited for: first another command's exit is there, then the one that is meant.
        ([[], [EXIT_1], [EXIT_1, EXIT_217]], {}, ""),
        ([[], [SPAWN, EXIT_217]], {}, "Failed at step USER spawning /x: No such process"),
        # A journal that keeps nothing of systemd, or that this user may not read.
        ([[EXIT_1]] * systemd.LOOKS, {}, Unknown("the journal has nothing of an exit with the status 217")),
        ([Unknown("there is no journalctl")], {}, Unknown("there is no journalctl")),
        # What fails after these may not reach the journal.
        ([], {"RootDirectory": "/srv"}, Unknown("RootDirectory= may keep a failed setup out of the journal")),
        ([], {"SystemCallFilter": (True, [])}, Unknown("SystemCallFilter= may keep a failed setup out of the journal")),
        ([], {"LogLevelMax": 2}, Unknown("LogLevelMax= may keep a failed setup out of the journal")),
        ([], {"ExecStart": []}, Unknown("systemd has forgotten the unit")),
    ],
)
@pytest.mark.parametrize("root", [True, False])
def test_whether_it_was_systemd_that_exited_so(monkeypatch, looks, more, found, root):
    left, syncs = list(looks), []

    def journalctl(*words):
        if words == ("--sync",):
            syncs.append(1)
            return () if root else Unknown("journalctl: Operation not permitted")
        assert "INVOCATION_ID=" + "7" * 32 in words
        return left.pop(0)

    monkeypatch.setattr(systemd, "journalctl", journalctl)
    monkeypatch.setattr(systemd, "LOOK_PAUSE", 0.0)
    plain = {
        "ExecStart": [command("/x")], "LogLevelMax": -1, "RootDirectory": "", "SystemCallFilter": (False, []),
        "RestrictAddressFamilies": (False, []), "InaccessiblePaths": [], "AppArmorProfile": (False, ""),
    }  # fmt: skip
    assert systemd.setup_error("7" * 32, 217, {**plain, **more}) == found
    assert not left and len(syncs) == max(len(looks) - 1, 0)


def test_environment_files_that_are_missing(tmp_path):
    (tmp_path / "there").touch()
    files = [(str(tmp_path / "there"), False), (str(tmp_path / "may*"), True), (str(tmp_path / "must"), False)]
    assert systemd.missing_files({"EnvironmentFiles": files}) == (str(tmp_path / "must"),)


@pytest.mark.parametrize(
    ("unit", "label"),
    [
        ("training.service", "training_2eservice"),
        ("shard@1.service", "shard_401_2eservice"),
        ("7up.service", "_37up_2eservice"),
        ("a-b_c.service", "a_2db_5fc_2eservice"),
        ("\u00e9.service", "_c3_a9_2eservice"),
    ],
)
def test_the_object_path_of_a_unit(unit, label):
    assert systemd.unit_path(unit) == "/org/freedesktop/systemd1/unit/" + label
    assert systemd.unit_of_path(systemd.unit_path(unit)) == unit


@given(st.text(st.characters(blacklist_categories=("Cs",)), min_size=1))
def test_any_name_has_a_path_of_its_own(unit):
    path = systemd.unit_path(unit)
    assert path.isascii() and path.replace("/", "").replace("_", "").isalnum()
    assert systemd.unit_of_path(path) == unit


def test_other_objects_are_no_units():
    assert systemd.unit_of_path("/org/freedesktop/systemd1/job/7") == ""
    assert systemd.unit_of_path("/org/freedesktop/systemd1") == ""


@pytest.mark.parametrize(
    ("unit", "target"),
    [
        ("shard@1.service", "shard.target"),
        ("training.service", None),
        ("a-b@x-1.service", "a-b.target"),
        ("x@.service", None),
    ],
)
def test_the_target_of_an_instance(unit, target):
    assert systemd.target_of(unit) == target


def test_the_last_output_of_the_units_files_counts(tmp_path):
    unit, drop_in = tmp_path / "a@.service", tmp_path / "a b.conf"
    unit.write_text("[Service]\nStandardOutput=append:/var/log/%p-%i.log\n")
    properties = {"FragmentPath": str(unit), "DropInPaths": []}
    assert systemd.declared_output("a@7.service", properties) == "/var/log/a-7.log"
    drop_in.write_text("[Service]\nStandardOutput = file:/x/%n/100%%\n")
    assert (
        systemd.declared_output("a@7.service", {**properties, "DropInPaths": [str(drop_in)]}) == "/x/a@7.service/100%"
    )
    drop_in.write_text("[Service]\nStandardOutput=journal\n")
    assert systemd.declared_output("a@7.service", {**properties, "DropInPaths": [str(drop_in)]}) is None


class Systemd(threading.Thread):
    """A manager on a socket. I(script)(client, number of the connection, member, values, path) returns the answer's type, signature, values."""

    def __init__(self, path, script):
        super().__init__(daemon=True)
        self.script, self.calls, self.clients = script, [], []
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen()
        self.start()

    def run(self):
        while True:
            try:
                client, _address = self.server.accept()
            except OSError:
                return
            self.clients.append(client)
            self.serve(client, len(self.clients))

    def serve(self, client, number):
        data = bytearray()
        while True:
            more = client.recv(65536)
            if not more:
                return
            data += more
            if data.endswith(b"BEGIN\r\n"):
                client.sendall(b"OK 0\r\n")
                data.clear()
            end = 0
            while True:
                start = end
                message, end = dbus.parse(data, end)
                if message is None:
                    break
                (serial,) = struct.unpack_from("<I", data, start + 8)
                member, path = message.fields[dbus.MEMBER], message.fields[dbus.PATH]
                values = message.values()
                self.calls.append((member, *values))
                answer = self.script(client, number, member, values, path)
                if answer is None:
                    client.close()
                    return
                kind, signature, values = answer
                self.send(client, kind, signature, values, [(dbus.REPLY_SERIAL, ("u", serial))])
            del data[:end]

    @staticmethod
    def send(client, kind, signature, values, fields):
        body = dbus.marshal(signature, values)
        if kind == dbus.ERROR:
            fields = [*fields, (dbus.ERROR_NAME, ("s", "org.freedesktop.systemd1.Refused"))]
        if signature:
            fields = [*fields, (dbus.SIGNATURE, ("g", signature))]
        head = dbus.marshal("yyyyuua(yv)", (0x6C, kind, 0, 1, len(body), 1, fields))
        client.sendall(head + bytes(-len(head) % 8) + body)

    def signal(self, member, signature="", values=(), path="/org/freedesktop/systemd1"):
        self.send(
            self.clients[-1], dbus.SIGNAL, signature, values, [(dbus.PATH, ("o", path)), (dbus.MEMBER, ("s", member))]
        )


def state_of(active, job=0):
    return "a{sv}", [{"LoadState": ("s", "loaded"), "ActiveState": ("s", active), "Job": ("(uo)", (job, "/j"))}]


def healthy(client, number, member, values, path):
    """Every unit is active, a.service has a job."""
    if member == "GetAll":
        return (dbus.ANSWER, *state_of("active", job=4 if "/a_2e" in path else 0))
    if member == "ListJobs":
        return dbus.ANSWER, "a(usssoo)", [[(4, "a.service", "start", "waiting", "/j", "/u")]]
    return dbus.ANSWER, "", ()


@pytest.fixture
def serve(tmp_path, monkeypatch):
    made = []

    def make(script):
        monkeypatch.setattr(systemd, "PRIVATE_SOCKET", str(tmp_path / "private"))
        monkeypatch.setattr(systemd, "BUS_SOCKET", str(tmp_path / "bus"))
        monkeypatch.setattr(systemd.os, "geteuid", lambda: 0)
        made.append(Systemd(tmp_path / "private", script))
        return made[-1]

    yield make
    for server in made:
        server.server.close()


def test_without_a_manager_a_unit_is_unknown_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(systemd, "PRIVATE_SOCKET", str(tmp_path / "private"))
    monkeypatch.setattr(systemd, "BUS_SOCKET", str(tmp_path / "bus"))
    state, _properties = systemd.show(["a.service"])["a.service"]
    assert isinstance(state, Unknown)
    assert "systemd does not answer" in state.why and str(tmp_path / "bus") + ": No such file" in state.why


def test_many_units_are_asked_about_at_once(serve):
    server = serve(healthy)
    units = ["a.service", *("u%d.service" % number for number in range(200))]
    shown = systemd.show(units)
    assert list(shown) == units
    assert {state.active_state for state, _properties in shown.values()} == {"active"}
    assert [unit for unit, (state, _properties) in shown.items() if state.pending_job] == ["a.service"]
    assert shown["a.service"][0].pending_job == "start"
    assert [call[0] for call in server.calls].count("ListJobs") == 1


def test_a_manager_that_is_away_for_a_moment_is_asked_again(serve):
    serve(lambda client, number, *call: None if number < 3 else healthy(client, number, *call))
    state, _properties = systemd.show(["b.service"])["b.service"]
    assert state.active_state == "active"


def test_a_manager_that_stays_away_is_not_asked_for_ever(serve, monkeypatch):
    monkeypatch.setattr(systemd, "AWAY_TIMEOUT", 0.2)
    serve(lambda *call: None)
    state, _properties = systemd.show(["b.service"])["b.service"]
    assert "the connection is lost" in state.why


def test_a_refusal_is_told_in_systemds_words(serve):
    serve(lambda client, number, member, values, path: (dbus.ERROR, "s", ["Unit name bad name.service is not valid."]))
    state, _properties = systemd.show(["bad name.service"])["bad name.service"]
    assert state == Unknown("Unit name bad name.service is not valid.")


def test_orders_give_jobs_or_say_why_not(serve):
    def script(client, number, member, values, path):
        if values[0] == "masked.service":
            return dbus.ERROR, "s", ["Unit masked.service is masked."]
        return dbus.ANSWER, "o", ["/job/1"]

    server = serve(script)
    with systemd.Manager() as manager:
        found = manager.order("StartUnit", ["a.service", "masked.service"])
    assert found["a.service"] == "/job/1" and str(found["masked.service"]) == "Unit masked.service is masked."
    assert server.calls == [("StartUnit", "a.service", "replace"), ("StartUnit", "masked.service", "replace")]


def test_changes_and_the_ends_of_jobs_are_told(serve):
    server = serve(healthy)
    loop, changed, ended = Loop(), [], []
    manager = systemd.Manager(loop, changed.append, lambda *job: ended.append(job))
    manager.show(["b.service"])
    manager.tell()
    assert changed == [None], "a new connection: who knows what happened before"
    changed.clear()
    path = systemd.unit_path("b.service")
    server.signal("PropertiesChanged", "sa{sv}as", ("org.freedesktop.systemd1.Service", {}, []), path)
    server.signal("PropertiesChanged", "sa{sv}as", ("org.freedesktop.systemd1.Unit", {}, []), path)
    server.signal("JobNew", "uos", (5, "/job/5", "c.service"))
    server.signal("JobRemoved", "uoss", (5, "/job/5", "d.service", "failed"))
    while len(changed) < 3:
        assert loop.step(5)
    assert (changed, ended) == (["b.service", "c.service", "d.service"], [("/job/5", "d.service", "failed")])
    server.signal("Reloading", "b", (True,))
    server.signal("Reloading", "b", (False,))
    while len(changed) < 4:
        assert loop.step(5)
    assert changed[3:] == [None]
    server.clients[-1].shutdown(socket.SHUT_RDWR)
    while len(changed) < 5:
        assert loop.step(5)
    assert changed[4:] == [None], "a lost connection: all is asked anew"
    assert manager.show(["b.service"])["b.service"][0].active_state == "active"
    manager.close()
    loop.close()


def test_what_an_answer_holds_already_is_not_told_as_news(serve):
    """A signal that comes before the answer is in it; one that comes after it is news."""
    paths = {name: systemd.unit_path(name) for name in ("before.service", "after.service")}

    def script(client, number, member, values, path):
        if path == paths["after.service"]:
            for each in paths.values():
                news = ("org.freedesktop.systemd1.Unit", {}, [])
                server.signal("PropertiesChanged", "sa{sv}as", news, each)
        return healthy(client, number, member, values, path)

    server = serve(script)
    loop, changed = Loop(), []
    manager = systemd.Manager(loop, changed.append)
    manager.show(["x.service"])
    manager.tell()
    changed.clear()
    manager.show(["before.service", "after.service"])
    manager.tell()
    assert changed == ["before.service"]
    manager.close()
    loop.close()


def test_the_dependency_that_failed_is_named(serve):
    def script(client, number, member, values, path):
        if member == "GetAll":
            return dbus.ANSWER, "a{sv}", [{"Requires": ("as", ["sysinit.target", "db.service"]), "BindsTo": ("as", [])}]
        rows = [(name, "", "", state, "", "", "/", 0, "", "/") for name, state in zip(values[0], ("active", "failed"))]
        return dbus.ANSWER, "a(ssssssouso)", [rows]

    serve(script)
    with systemd.Manager() as manager:
        assert manager.failed_dependency("a.service") == "db.service"


def test_whom_the_private_socket_is_closed_to_asks_the_bus(tmp_path, monkeypatch):
    monkeypatch.setattr(systemd, "PRIVATE_SOCKET", str(tmp_path / "private"))
    monkeypatch.setattr(systemd, "BUS_SOCKET", str(tmp_path / "bus"))
    monkeypatch.setattr(systemd.os, "geteuid", lambda: 1000)
    server = Systemd(tmp_path / "bus", healthy)
    loop = Loop()
    manager = systemd.Manager(loop)
    assert manager.show(["b.service"])["b.service"][0].active_state == "active"
    assert [call[0] for call in server.calls][:4] == ["Hello", "AddMatch", "AddMatch", "Subscribe"]
    assert not os.path.exists(systemd.PRIVATE_SOCKET)
    manager.close()
    loop.close()
    server.server.close()
