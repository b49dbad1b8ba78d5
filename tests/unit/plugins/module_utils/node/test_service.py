# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the node says without a machine: its settings checked, its outputs free of secrets, daemons told apart."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.node import parts
from ansible_collections.dflash.launchproof.plugins.module_utils.node.service import Outputs, Service

SETTINGS = {
    "node": "lpnode", "bridge": "lpbr0", "network": "198.51.100.0/24", "api_port": 18006, "ssh_port": 12222, "s3_port": 19000,
    "s3_bucket": "b", "token_id": "t", "faults": False, "template": "x.tar.zst", "suite": "bookworm", "packages": ["systemd"], "machine_packages": [],
}  # fmt: skip


def service(folder, **more):
    return Service({**SETTINGS, "dir": str(folder), **more}, environment={})


@pytest.mark.parametrize("network", ["foo", "198.51.100.1/24", "2001:db8::/64", "10.0.0.0/8", "198.51.100.0/30"])
def test_a_network_that_cannot_be_is_named_with_the_fix(tmp_path, network):
    with pytest.raises(parts.NodeError, match=r"local_node_network=.*give"):
        service(tmp_path, network=network)


def test_outputs_name_files_of_secrets_only(tmp_path):
    node = service(tmp_path)
    for name in ("secrets/api_token", "secrets/root_password", "s3/access_key", "s3/secret_key"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a-seeded-secret\n")
    text = json.dumps(node.outputs())
    assert "a-seeded-secret" not in text and str(tmp_path / "secrets/api_token") in text
    commands = [daemon.command() for daemon in node.daemons if daemon.name != "sshd"]
    assert "a-seeded-secret" not in str(commands)


SEEDED = "a-seeded-password"


@pytest.fixture
def behind_passwords(tmp_path):
    """A node on a machine whose index and proxy want a password."""
    index, proxy = f"https://user:{SEEDED}@index.example.org/simple", f"http://user:{SEEDED}@proxy.example.org:3128"
    # A network, bridge and ports that no node on this machine has.
    own = {"network": "203.0.113.0/24", "bridge": "lpunit0", "api_port": 0, "ssh_port": 0, "s3_port": 0}
    settings = {**SETTINGS, **own, "dir": str(tmp_path)}
    return Service(settings, environment={"PIP_INDEX_URL": index, "HTTPS_PROXY": proxy})


def test_a_password_in_an_index_or_proxy_url_is_in_outputs_json_alone_and_for_root_alone(behind_passwords, tmp_path):
    assert SEEDED not in json.dumps(behind_passwords.up(dry=True))
    files = Outputs(behind_passwords)
    files.up()
    holding = [path for path in tmp_path.rglob("*") if path.is_file() and SEEDED in path.read_text()]
    assert holding == [tmp_path / "outputs.json"]
    assert oct(holding[0].stat().st_mode)[-3:] == "600"
    secret = json.loads(holding[0].read_text())["secret_environment"]
    assert set(secret) == {"PIP_INDEX_URL", "UV_DEFAULT_INDEX", "HTTPS_PROXY"}
    assert files.look() == "up"
    holding[0].chmod(0o644)
    assert files.look() == "differs"


def test_a_password_in_apts_proxy_is_on_no_command_line(behind_passwords, tmp_path, monkeypatch):
    proxy = f'Acquire::http::Proxy "http://user:{SEEDED}@proxy.example.org:3128/";'
    begun = []
    monkeypatch.setattr(parts, "run", lambda *argv: proxy + "\n")
    monkeypatch.setattr(parts, "_begin", lambda node, name, command: begun.append(command))
    for part in behind_passwords.built:
        part.begin()
    assert [command[0] for command in begun] == ["sh", "mmdebstrap"]
    assert SEEDED not in str(begun)
    options = tmp_path / "run/apt.conf"
    assert f"--aptopt={options}" in begun[1]
    assert options.read_text() == proxy + "\n" and oct(options.stat().st_mode)[-3:] == "600"
    # What the build leaves in the template, by the hook's own command.
    inside = tmp_path / "root/etc/apt/apt.conf.d/99mmdebstrap"
    inside.parent.mkdir(parents=True)
    inside.write_text(options.read_text() + 'Acquire::Check-Date "false";\n')
    hook = next(word for word in begun[1] if "sed" in word).split("=", 1)[1]
    subprocess.run(["sh", "-c", hook, "sh", str(tmp_path / "root")], check=True)
    assert inside.read_text() == 'Acquire::Check-Date "false";\n'


class Sleeper(parts.Daemon):
    name = "sleeper"
    port_variable = "local_node_sleeper_port"

    def address(self):
        return "127.0.0.1", 1

    def command(self):
        return ["sleep", "60"]

    def identity(self):
        return "one"

    def answers(self):
        return self.pid() is not None


@pytest.fixture
def sleeper(tmp_path):
    node = service(tmp_path).node
    node.run.mkdir()
    node.logs.mkdir()
    daemon = Sleeper(node)
    yield daemon
    daemon.down()


def test_a_daemon_is_up_when_its_process_lives_and_answers(sleeper):
    assert sleeper.look() == "down"
    sleeper.up()
    assert sleeper.look() == "up"
    sleeper.identity = lambda: "two"
    assert sleeper.look() == "outdated"
    sleeper.answers = lambda: False
    sleeper.identity = lambda: "one"
    assert sleeper.look() == "no answer"


def test_another_process_with_the_id_is_not_the_daemon(sleeper):
    record = {"pid": os.getpid(), "start": 1, "identity": "one"}
    sleeper.file.write_text(json.dumps(record))
    assert sleeper.look() == "down"
    sleeper.down()  # and it is not killed
    assert not sleeper.file.exists()


def test_a_daemon_that_ends_at_once_is_an_error_with_its_last_words(sleeper):
    sleeper.command = lambda: ["sh", "-c", "echo cannot bind >&2; exit 3"]
    sleeper.answers = lambda: False
    with pytest.raises(parts.NodeError, match=r"sleeper ended with 3, see .*\ncannot bind"):
        sleeper.up()


def test_what_was_changed_is_written_down_and_forgotten(tmp_path):
    node = service(tmp_path).node
    node.remember(ip_forward="0")
    node.remember(other="x")
    assert node.machine == {"ip_forward": "0", "other": "x"}
    node.forget("other")
    assert service(tmp_path).node.machine == {"ip_forward": "0"}
    assert oct((tmp_path / "run/machine.json").stat().st_mode)[-3:] == "600"


def test_parts_that_take_long_are_made_together_and_the_first_failure_is_told(tmp_path):
    class Part:
        def __init__(self, name, command):
            self.name, self.command, self.finished = name, command, False
            self.log = tmp_path / f"{name}.log"

        def begin(self):
            with open(self.log, "w") as out:
                return subprocess.Popen(["sh", "-c", self.command], stdout=out), self.log

        def finish(self):
            self.finished = True

    good, bad = Part("good", "true"), Part("bad", "echo no space; exit 7")
    with pytest.raises(parts.NodeError, match=r"bad: .*7.*\nno space"):
        parts.finish_together([bad, good])
    assert good.finished and not bad.finished
