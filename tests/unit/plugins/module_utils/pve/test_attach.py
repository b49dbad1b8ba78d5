# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The scripts of connection pct, run by a real shell with stand-ins for LXC's programs on PATH."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import attach
from hypothesis import given, settings
from hypothesis import strategies as st

NONCE = "0123456789abcdef"
ATTACH = """#!/bin/sh
while [ "$1" != -- ]; do case $1 in -v) export "$2"; shift;; esac; shift; done; shift
exec "$@"
"""


@pytest.fixture
def node(tmp_path):
    """A folder for PATH; ``node(name, script)`` puts a program into it."""

    def program(name, script):
        path = tmp_path / name
        path.write_text(script)
        path.chmod(0o755)

    program("lxc-info", "#!/bin/sh\necho RUNNING\n")
    program("lxc-attach", ATTACH)
    program.path = tmp_path
    return program


def run(node, cmd, data=None, **options):
    script = attach.node_script(901, cmd, NONCE, stdin=data is not None, **options)
    done = subprocess.run(
        ["/bin/sh", "-c", script], input=data if data is not None else b"unread", capture_output=True, check=False,
        env={"PATH": f"{node.path}:/usr/bin:/bin", "FROM_THE_NODE": "1"},
    )  # fmt: skip
    return attach.read(NONCE, done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("code", [0, 1, 2, 126, 127, 137, 255])
def test_every_exit_code_comes_back_as_the_commands_own(node, code):
    outcome = run(node, f"echo out; echo err >&2; exit {code}")
    assert outcome == attach.Outcome(code, b"out\n", b"err\n")


def test_a_command_that_a_signal_killed_is_told(node):
    outcome = run(node, "kill -9 $$")
    assert (outcome.rc, outcome.failure) == (137, None)
    assert "SIGKILL" in outcome.words()


def test_stdin_is_dev_null_unless_there_is_data(node):
    assert run(node, "cat").stdout == b""
    assert run(node, "cat", data=b"\x00\xff data").stdout == b"\x00\xff data"


def test_the_nodes_environment_does_not_leak_in(node):
    node("lxc-attach", ATTACH.replace('exec "$@"', 'exec env -i HOME="$HOME" PATH="$PATH" LANG="$LANG" "$@"'))
    lines = run(node, "env").stdout.decode().split()
    assert "HOME=/root" in lines
    assert "LANG=C.UTF-8" in lines
    assert not [line for line in lines if line.startswith("FROM_THE_NODE")]


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60))
def test_any_text_survives_the_quoting(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("bin")
    for name, script in (("lxc-info", "#!/bin/sh\necho RUNNING\n"), ("lxc-attach", ATTACH)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)

    def program():
        return None

    program.path = folder
    outcome = run(program, f"printf %s {shlex.quote(text)}")
    assert outcome == attach.Outcome(0, text.encode(), b"")


@pytest.mark.parametrize(
    ("info", "pct", "failure"),
    [
        ("echo STOPPED", None, "stopped"),
        ("echo STOPPING", None, "stopped"),
        ("echo STARTING", None, "starting"),
        ("echo FROZEN", None, "frozen"),
        ('echo "901 doesn\'t exist" >&2; exit 1', None, "missing"),
        ("exit 1", "echo \"Configuration file 'nodes/n/lxc/901.conf' does not exist\" >&2; exit 2", "missing"),
        ("exit 1", "echo status: stopped", "stopped"),
        ("echo 'Permission denied' >&2; exit 1", None, "no_state"),
    ],
)
def test_why_a_container_cannot_be_used(node, info, pct, failure):
    node("lxc-info", f"#!/bin/sh\n{info}\n")
    if pct:
        node("pct", f"#!/bin/sh\n{pct}\n")
    outcome = run(node, "echo never")
    assert (outcome.failure, outcome.stdout) == (failure, b"")


def test_an_attach_that_fails_is_not_the_command(node):
    node("lxc-attach", "#!/bin/sh\necho 'lxc-attach: 901: no init' >&2\nexit 1\n")
    outcome = run(node, "true")
    assert outcome.failure == "attach_failed"
    assert "no init" in outcome.words()


def test_a_container_that_stops_meanwhile_is_not_the_command(node):
    node("lxc-attach", ATTACH.replace('exec "$@"', '"$@" & sleep 0.3; kill -9 $!; exit 137'))
    outcome = run(node, "sleep 1")
    assert outcome.failure == "gone"


def test_pct_exec_gets_its_own_grammar(node):
    node("pct", '#!/bin/sh\n[ "$1 $2 $3 $4 $5" = "exec 901 --keep-env 0 --" ] || exit 99\nshift 5\nexec "$@"\n')
    assert run(node, "echo $HOME; exit 3", method="pct") == attach.Outcome(3, b"/root\n", b"")


def test_a_folder_for_lxc_is_passed_on(node):
    node("lxc-info", '#!/bin/sh\n[ "$1 $2" = "-P /srv/a b" ] && echo RUNNING\n')
    assert run(node, "true", lxc_path="/srv/a b").failure is None


@pytest.mark.parametrize(
    ("rc", "stderr", "failure", "passing"),
    [
        (255, b"ssh: connect to host n port 22: Connection refused\n", "node_unreachable", False),
        (255, b"root@n: Permission denied (publickey).\n", "node_unreachable", False),
        (255, b"kex_exchange_identification: Connection closed by remote host\n", "node_unreachable", True),
        (255, b"\x1e" + NONCE.encode() + b" begin\x1e\nConnection reset by peer\n", "cut", False),
        (1, b"", "cut_before", False),
    ],
)
def test_a_failed_connection_is_not_the_command(rc, stderr, failure, passing):
    outcome = attach.read(NONCE, rc, b"", stderr)
    assert (outcome.failure, outcome.passing) == (failure, passing)


def test_marks_of_another_execution_stay():
    other = b"\x1efedcba9876543210 end 0\x1e\n"
    outcome = attach.read(NONCE, 255, b"", other)
    assert (outcome.failure, outcome.stderr) == ("node_unreachable", other)


@pytest.mark.parametrize("name", ["plain", "with 'quotes' and \"spaces\"", "ünïcode", "-dash", "$(touch x)"])
def test_a_file_arrives_whole_and_with_its_mode(node, tmp_path, name):
    target = tmp_path / name
    target.write_text("old")
    data = bytes(range(256)) * 300
    assert run(node, attach.receive(str(target), len(data), 0o640), data=data).rc == 0
    assert target.read_bytes() == data
    assert target.stat().st_mode & 0o7777 == 0o640
    assert run(node, attach.send(str(target))).stdout == data
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(f"{name}.")]


def test_a_file_that_was_cut_off_leaves_the_old_one(node, tmp_path):
    target = tmp_path / "file"
    target.write_text("old")
    outcome = run(node, attach.receive(str(target), 10, 0o600), data=b"short")
    assert outcome.rc == 1
    assert b"not all of 10 bytes" in outcome.stderr
    assert target.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "lxc-info", "lxc-attach"}


def test_a_folder_is_no_target_and_no_source(node, tmp_path):
    assert run(node, attach.receive(str(tmp_path), 1, 0o600), data=b"x").rc == 65
    assert run(node, attach.send(str(tmp_path))).rc == attach.NO_SUCH_FILE
    assert run(node, attach.send(str(tmp_path / "absent"))).rc == attach.NO_SUCH_FILE
