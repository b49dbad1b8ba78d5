# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connection pct without a node: how connections are shared, and what is tried again. ssh is a stand-in."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import tempfile

import pytest
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.playbook.play_context import PlayContext
from ansible.plugins.loader import connection_loader

VMID = 901
BUSY = b"kex_exchange_identification: Connection closed by remote host\n"


@pytest.fixture
def connect():
    """The plugin with a stand-in for ssh, which first gives the refusals; its commands are kept in ``ran``."""
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:

        def make(refusals=(), **variables):
            connection = connection_loader.get("dflash.launchproof.pct", PlayContext(), os.devnull)
            given = {"ansible_host": "node", "ansible_pct_vmid": VMID, "ansible_control_path_dir": sockets, **variables}
            connection.set_options(var_options=given)
            connection.ran, left = [], list(refusals)

            def run(command, in_data, sudoable=True, checkrc=True):
                connection.ran.append([word.decode() for word in command])
                if left:
                    return left.pop(0)
                return (0, b"", b"") if connection.ran[-1][-1] == "true" else answer(connection.ran[-1][-1])

            connection._bare_run = run
            return connection

        make.sockets = sockets
        yield make


def answer(script):
    """What the node says of a command that succeeded."""
    nonce = re.search(r"036([0-9a-f]{16}) ", script).group(1)
    marks = "".join(f"\x1e{nonce} {mark}\x1e\n" for mark in ("begin", "end 0", "node 0 RUNNING"))
    return 0, b"out\n", marks.encode()


def listening(path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    return server


def busy_places(path, count):
    """Another process that holds the first ``count`` places; its end frees them."""
    ready, told = os.pipe()
    stop, stopped = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(stopped)
        with open(path, "ab") as places:
            for place in range(count):
                fcntl.lockf(places, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            os.write(told, b"x")
            os.read(stop, 1)
        os._exit(0)
    os.read(ready, 1)

    def free():
        os.close(stopped)
        os.waitpid(child, 0)

    return free


def used(command):
    (path,) = [word for word in command if word.startswith("ControlPath=")]
    return path.partition("=")[2].strip('"')


@pytest.mark.parametrize(
    ("variables", "shares"),
    [
        ({}, True),
        ({"ansible_ssh_common_args": "-o UserKnownHostsFile=/x"}, True),
        ({"ansible_ssh_args": "-o ControlMaster=no"}, False),
        ({"ansible_ssh_args": ""}, False),
        ({"ansible_ssh_args": "-o ControlMaster=auto -o ControlPersist=no"}, False),
        ({"ansible_ssh_common_args": "-o ControlPath=/tmp/own"}, False),
        ({"ansible_control_path": "%(directory)s/own"}, False),
    ],
)
def test_connections_are_shared_where_ansible_names_them(connect, variables, shares):
    connection = connect(**variables)
    assert connection.exec_command("true") == (0, b"out\n", b"")
    opened = [command for command in connection.ran if command[-1] == "true"]
    assert len(opened) == (1 if shares else 0)
    assert any(name.endswith(".places") for name in os.listdir(connect.sockets)) is shares


def test_the_first_connection_is_the_one_of_plain_ssh(connect):
    connection = connect()
    connection.exec_command("true")
    plain = connection_loader.get("ansible.builtin.ssh", PlayContext(), os.devnull)
    plain.set_options(var_options={"ansible_host": "node", "ansible_control_path_dir": connect.sockets})
    plain.host = "node"
    ours = {used(command) for command in connection.ran}
    assert ours == {used([word.decode() for word in plain._build_command("ssh", "ssh", "node")])}


def test_a_connection_that_is_up_is_not_made_again(connect):
    connection = connect()
    connection.host = "node"
    with listening(connection._socket()):
        connection.exec_command("true")
        assert len(connection.ran) == 1


@pytest.mark.parametrize(("busy", "shared"), [(0, 0), (7, 0), (8, 1), (39, 4)])
def test_the_first_place_that_is_free_is_taken(connect, busy, shared):
    connection = connect()
    free = busy_places(connection._socket() + ".places", busy)
    try:
        connection.exec_command("true")
    finally:
        free()
    assert connection._shared == shared
    connection.exec_command("true")
    assert connection._shared == 0


def test_a_node_that_is_busy_is_asked_again_and_what_it_refuses_is_not(connect, monkeypatch):
    pauses = []
    monkeypatch.setattr("time.sleep", pauses.append)
    connection = connect([(255, b"", BUSY), (255, b"", BUSY)])
    assert connection.exec_command("true")[0] == 0
    assert len(pauses) == 2
    assert 0.5 <= pauses[0] <= 1.5
    assert 1 <= pauses[1] <= 3

    connection = connect([(255, b"", b"ssh: connect to host node port 22: Connection refused\n")] * 9)
    with pytest.raises(AnsibleConnectionFailure, match="cannot be reached over ssh.*refused"):
        connection.exec_command("true")
    assert len(connection.ran) == 1
    assert len(pauses) == 2


def test_asking_again_ends(connect, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    connection = connect([(255, b"", BUSY)] * 9, ansible_ssh_retries=2)
    with pytest.raises(AnsibleConnectionFailure, match="container 901 on node: the node cannot be reached over ssh"):
        connection.exec_command("true")
    assert len(connection.ran) == 3


def test_a_command_that_had_begun_is_not_repeated(connect):
    def cut(command):
        nonce = re.search(r"036([0-9a-f]{16}) ", command[-1].decode()).group(1)
        return 255, b"", f"\x1e{nonce} begin\x1e\nConnection reset by peer\n".encode()

    connection = connect(ansible_ssh_args="-o ControlMaster=no")
    connection._bare_run = lambda command, _data, **_more: connection.ran.append(1) or cut(command)
    with pytest.raises(AnsibleConnectionFailure, match="whether it ended is not known"):
        connection.exec_command("true")
    assert len(connection.ran) == 1


def test_a_command_that_is_too_long_is_told_before_it_is_sent(connect):
    connection = connect()
    with pytest.raises(AnsibleError, match="limited to 131072"):
        connection.exec_command("x" * (1 << 17))
