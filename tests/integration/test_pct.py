# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Connection pct into a real container of the embedded node, over ssh and as the node itself."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time

import pytest
from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.playbook.play_context import PlayContext
from ansible.plugins.loader import become_loader, connection_loader

from tests.support import pve
from tests.support.container import Container
from tests.support.deployment import ENVIRONMENT, REPO
from tests.support.ssh import PORT, serve_ssh

pytestmark = [pytest.mark.container, pytest.mark.usefixtures("local_node")]

VMID = 971


@pytest.fixture(scope="module")
def container(tmp_path_factory, local_node):
    client = pve.Client(tmp_path_factory.mktemp("client"))
    declared = pve.declared(VMID)
    client.ensure(declared)
    yield declared
    client.ensure(declared, tasks_from="absent")


def connect(transport="ssh", become=None, password=None, **variables):
    """The connection plugin as a task gets it."""
    context = PlayContext()
    connection = connection_loader.get("dflash.launchproof.pct", context, os.devnull)
    connection.set_options(var_options={
        **pve.connection(), "ansible_pct_vmid": VMID, "ansible_pct_transport": transport, **variables,
    })  # fmt: skip
    if become:
        plugin = become_loader.get(become)
        plugin.set_options(
            var_options={
                "ansible_become_user": "nobody",
                "ansible_become_flags": "-s /bin/sh",
                "ansible_become_pass": password,
            }
        )
        connection.set_become_plugin(plugin)
    return connection


@pytest.fixture(params=["ssh", "local"])
def connection(request, container):
    return connect(request.param)


@pytest.mark.parametrize("code", [0, 1, 2, 127, 137, 255])
def test_exit_codes_and_streams_are_the_commands_own(connection, code):
    rc, out, err = connection.exec_command(f"echo out; echo err >&2; exit {code}")
    assert (rc, out) == (code, b"out\n")
    assert err.startswith(b"err\n")


@pytest.mark.peers("lxc 4203")
def test_a_killed_command_is_told_in_words(connection):
    rc, _out, err = connection.exec_command("kill -9 $$")
    assert rc == 137
    assert b"killed by SIGKILL" in err


@pytest.mark.peers("zamba 22")
def test_text_data_and_environment_arrive_unharmed(connection, monkeypatch):
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("LC_TIME", "de_DE.UTF-8")
    assert connection.exec_command("printf %s 'ünï \"quoted\" $HOME'")[1] == 'ünï "quoted" $HOME'.encode()
    data = bytes(range(256)) * 4096
    assert connection.exec_command("cat", in_data=data)[1] == data
    environment = dict(line.split("=", 1) for line in connection.exec_command("env")[1].decode().splitlines())
    assert environment["LANG"] == "C.UTF-8"
    assert set(environment) <= {"PATH", "HOME", "LANG", "container", "PWD", "TERM", "OLDPWD", "SHLVL", "_"}
    assert connection.exec_command("cat")[1] == b""


@pytest.mark.parametrize("password", [None, "not asked for"])
@pytest.mark.parametrize("transport", ["ssh", "local"])
def test_become(container, transport, password):
    """Who is root is not asked for a password, and the task that brings one goes on all the same."""
    connection = connect(transport, become="su", password=password)
    command = connection.become.build_become_command("id -un; cat", connection._shell)
    rc, out, err = connection.exec_command(command, in_data="dätä".encode())
    assert (rc, out.decode().splitlines()[-2:], err) == (0, ["nobody", "dätä"], b"")


def test_become_that_fails_is_the_commands_failure(connection):
    rc, _out, err = connection.exec_command("su nosuchuser -c true")
    assert rc == 1
    assert b"nosuchuser" in err


@pytest.mark.parametrize("name", ["plain", "ünï 'quoted' \"$(touch x)\"", "-dash", "two\nlines", "x" * 255])
def test_files_of_any_name_go_there_and_back(connection, tmp_path, name):
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(os.urandom(3_000_001))
    source.chmod(0o640)
    connection.exec_command("mkdir /root/there")
    connection.put_file(str(source), f"/root/there/{name}")
    assert connection.exec_command("stat -c %a /root/there/*")[1] == b"640\n"
    connection.fetch_file(f"/root/there/{name}", str(back))
    assert back.read_bytes() == source.read_bytes()
    assert (
        connection.exec_command("ls -A /root/there | wc -l; rm -r /root/there")[1].split()[0]
        == str(1 + name.count("\n")).encode()
    )
    assert {path.name for path in tmp_path.iterdir()} == {"source", "back"}


def test_a_full_disk_here_or_there_is_told_and_leaves_nothing(connection, tmp_path):
    source, small = tmp_path / "source", tmp_path / "small"
    source.write_bytes(os.urandom(3_000_000))
    small.mkdir()
    connection.exec_command("mkdir /run/small && mount -t tmpfs -o size=1M tmpfs /run/small")
    connection.put_file(str(source), "/root/large")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", small], check=True)
    try:
        with pytest.raises(AnsibleError, match="not all of 3000000 bytes arrived, or they could not be stored"):
            connection.put_file(str(source), "/run/small/x")
        assert connection.exec_command("ls -A /run/small")[1] == b""
        with pytest.raises(AnsibleError, match="was not fetched"):
            connection.fetch_file("/root/large", str(small / "x"))
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)
        connection.exec_command("umount /run/small; rmdir /run/small; rm /root/large")


def test_a_large_file_does_not_pass_through_memory(connection, tmp_path):
    source = tmp_path / "large"
    with source.open("wb") as stream:
        for _block in range(64):
            stream.write(os.urandom(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connection.put_file(str(source), "/root/large")
    connection.fetch_file("/root/large", str(tmp_path / "back"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024
    sums = subprocess.run(["sha256sum", source, tmp_path / "back"], capture_output=True, text=True, check=True).stdout
    assert len({line.split()[0] for line in sums.splitlines()}) == 1
    connection.exec_command("rm /root/large")


def test_what_is_no_file_is_told(connection, tmp_path):
    with pytest.raises(AnsibleFileNotFound, match="/root/absent"):
        connection.fetch_file("/root/absent", str(tmp_path / "x"))
    with pytest.raises(AnsibleFileNotFound):
        connection.put_file(str(tmp_path / "absent"), "/root/x")
    (tmp_path / "source").write_text("x")
    with pytest.raises(AnsibleError, match="folder"):
        connection.put_file(str(tmp_path / "source"), "/root")
    assert not (tmp_path / "x").exists()


def test_a_missing_container(connection):
    connection.set_option("vmid", 999)
    with pytest.raises(AnsibleConnectionFailure, match="no such container"):
        connection.exec_command("true")


def test_a_frozen_container_does_not_hang(connection):
    subprocess.run(["lxc-freeze", "-n", str(VMID)], check=True)
    try:
        begun = time.monotonic()
        with pytest.raises(AnsibleConnectionFailure, match="frozen"):
            connection.exec_command("true")
        assert time.monotonic() - begun < 5
    finally:
        subprocess.run(["lxc-unfreeze", "-n", str(VMID)], check=True)


def test_a_node_that_cannot_be_reached(container):
    connection = connect(ansible_port=1)
    with pytest.raises(AnsibleConnectionFailure, match="node cannot be reached over ssh.*refused"):
        connection.exec_command("true")


def test_a_node_whose_host_key_is_not_known(container, tmp_path):
    connection = connect(ansible_ssh_common_args=f"-o UserKnownHostsFile={tmp_path}/none -o ControlPath=none")
    with pytest.raises(AnsibleConnectionFailure, match="Host key verification failed"):
        connection.exec_command("true")


@pytest.mark.long
def test_a_node_with_a_password(tmp_path, sockets):
    """Another node, with stand-ins for LXC's programs: the embedded one takes keys alone."""
    with Container("pct-password") as node:
        node.write("/usr/local/bin/lxc-info", "#!/bin/sh\necho RUNNING\n", 0o755)
        node.write(
            "/usr/local/bin/lxc-attach", '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n', 0o755
        )
        ssh = serve_ssh(node, tmp_path)
        node.write("/etc/ssh/sshd_config.d/odd-port.conf", f"Port {PORT}\nPermitRootLogin yes\n")
        node.shell("echo root:right | chpasswd; systemctl restart ssh")
        password = {"ansible_password": "right", "ansible_control_path_dir": str(sockets / "right")}
        known = {
            "ansible_ssh_private_key_file": None,
            "ansible_ssh_common_args": f"-o UserKnownHostsFile={ssh.known_hosts}",
        }
        variables = {**ssh.hostvars(), **known, **password, "ansible_timeout": 30}
        connection = connect(**variables)
        assert connection.exec_command("echo out")[:2] == (0, b"out\n")
        connection.reset()
        (tmp_path / "source").write_bytes(os.urandom(1 << 20))
        connection.put_file(str(tmp_path / "source"), "/root/copy")
        connection.fetch_file("/root/copy", str(tmp_path / "back"))
        assert (tmp_path / "back").read_bytes() == (tmp_path / "source").read_bytes()
        wrong = {"ansible_password": "wrong", "ansible_control_path_dir": str(sockets / "wrong")}
        with pytest.raises(AnsibleConnectionFailure, match="cannot be reached over ssh.*Permission denied"):
            connect(**variables | wrong).exec_command("true")


def test_a_connection_that_is_cut_is_not_repeated(container, sockets):
    """The master connection is ended while the command runs: its outcome is unknown, so it is run once."""
    connection = connect(ansible_ssh_args="-o ControlMaster=auto -o ControlPersist=60s",
                         ansible_control_path_dir=str(sockets))  # fmt: skip
    connection.exec_command("rm -f /root/runs")
    raised = []

    def run():
        try:
            connection.exec_command("echo run >> /root/runs; sleep 20")
        except AnsibleError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    probe = connect()
    deadline = time.monotonic() + 10
    while probe.exec_command("cat /root/runs")[1] != b"run\n":
        assert time.monotonic() < deadline
    command = connection._build_command("ssh", "ssh", "-O", "exit", connection.host)
    subprocess.run([word.decode() for word in command], check=True, capture_output=True)
    thread.join(10)
    assert not thread.is_alive()
    assert "whether it ended is not known" in str(raised[0])
    assert probe.exec_command("cat /root/runs; pkill sleep; rm /root/runs")[1] == b"run\n"


def pct(*command):
    subprocess.run(["pct", *command], check=True, stdin=subprocess.DEVNULL, capture_output=True)


def test_a_container_that_stops_while_a_command_runs(container):
    """Then it is stopped, and a task waits until it is back."""
    connection = connect("local")
    raised = []

    def run():
        try:
            connection.exec_command("echo on > /run/mark; sleep 60")
        except AnsibleError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    probe = connect("local")
    deadline = time.monotonic() + 10
    while probe.exec_command("cat /run/mark")[1] != b"on\n":
        assert time.monotonic() < deadline
    pct("stop", str(VMID))
    try:
        thread.join(20)
        assert "the container stopped" in str(raised[0])
        with pytest.raises(AnsibleConnectionFailure, match="the container is stopped"):
            connection.exec_command("true")
    finally:
        pct("start", str(VMID))
    assert connection.exec_command("true")[0] == 0


@pytest.mark.parametrize("transport", ["ssh", "local"])
def test_a_container_that_starts_late_is_waited_for(container, tmp_path, transport):
    """It is started once a first look has found it stopped."""
    inventory = tmp_path / "inventory.json"
    variables = {**pve.connection(), "ansible_pct_vmid": VMID, "ansible_pct_transport": transport}
    inventory.write_text(json.dumps({"all": {"hosts": {"late": variables}}}))
    pct("stop", str(VMID))
    with subprocess.Popen(
        [sys.executable, "-m", "ansible", "adhoc", "late", "-i", inventory,
         "-m", "wait_for_connection", "-a", "timeout=60"],
        cwd=REPO, env={**ENVIRONMENT, "ANSIBLE_DEBUG": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as waiting:  # fmt: skip
        lines = []
        try:
            for line in waiting.stdout:
                lines.append(line)
                if "fail (expected), retrying" in line:
                    break
        finally:
            pct("start", str(VMID))
        rest = waiting.stdout.read()
    assert waiting.returncode == 0, "".join(lines)[-3000:] + rest[-3000:]
    assert '"changed": false' in rest
