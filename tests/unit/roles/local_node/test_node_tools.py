# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""pct and pvesh: arguments, messages and exit codes as seen on a real node; and what the node remembers."""

from __future__ import annotations

import json

import pytest
from launchproof_node import pct, pvesh, state


@pytest.fixture
def node(tmp_path, monkeypatch):
    folder = tmp_path / "pve/nodes/lpnode/lxc"
    folder.mkdir(parents=True)
    (tmp_path / "pve/lxc").symlink_to("nodes/lpnode/lxc")
    settings = {
        "node": "lpnode",
        "api_host": "127.0.0.1",
        "api_port": 1,
        "gateway": "",
        "nameservers": [],
        "searchdomain": "",
        "token_id": "t",
    }
    (tmp_path / "node.json").write_text(json.dumps(settings))
    for vmid in (901, 902):
        (folder / f"{vmid}.conf").write_text(
            f"hostname: ct{vmid}\nmemory: 512\n\n[pve:pending]\ndelete: mp0\nmemory: 1024\n"
        )
    monkeypatch.setattr(pct, "running", lambda: {901})
    return str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["exec", "901", "ls", "-d", "/etc"], 255, "Unknown option: d"),
        (["exec", "901"], 255, "missing command"),
        (["exec", "901", "--"], 255, "missing command"),
        (["exec", "902", "--", "true"], 255, "container '902' not running!"),
        (["exec", "999", "--", "true"], 2, "Configuration file 'nodes/lpnode/lxc/999.conf' does not exist"),
        (["exec", "x", "--", "true"], 255, "type check ('integer') failed - got 'x'"),
        (["status", "999"], 2, "Configuration file 'nodes/lpnode/lxc/999.conf' does not exist"),
        (["push", "902", "/etc/hostname", "/x"], 255, "can only push files to a running CT"),
        (["pull", "902", "/x", "/tmp/x"], 255, "can only pull files from a running CT"),
        (["snapshot", "901", "x"], 255, "unknown command 'pct snapshot'"),
        (["start", "901"], 255, "connection to the API failed"),
    ],
)
def test_messages_and_exit_codes(node, capsys, arguments, code, said):
    assert pct.main(node, arguments) == code
    assert said in capsys.readouterr().err


def test_exec_becomes_lxc_attach(node, monkeypatch):
    seen = {}
    monkeypatch.setattr(pct.os, "execve", lambda path, argv, env: seen.update(path=path, argv=argv, env=env))
    monkeypatch.setenv("SSH_CONNECTION", "leaks in")
    pct.main(node, ["exec", "901", "--", "printf", "%s", "-x"])
    assert seen["argv"] == ["lxc-attach", "-n", "901", "--keep-env", "--", "printf", "%s", "-x"]
    assert seen["env"]["PATH"] == "/sbin:/bin:/usr/sbin:/usr/bin" and seen["env"]["SSH_CONNECTION"] == "leaks in"
    pct.main(node, ["exec", "901", "--keep-env", "0", "--", "env"])
    assert "--clear-env" in seen["argv"] and set(seen["env"]) == {"PATH", "TERM"}


def test_a_failed_push_and_pull_return_0(node, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pct, "_attach", lambda *arguments, **streams: 1)
    assert pct.main(node, ["push", "901", "/etc/hostname", "/no/such/folder/x"]) == 0
    assert "failed to create file: /no/such/folder/x" in capsys.readouterr().err
    target = tmp_path / "target"
    target.write_text("before")
    assert pct.main(node, ["pull", "901", "/no/such", str(target)]) == 0
    assert target.read_text() == ""


def test_reading(node, capsys):
    for command in (["status", "901"], ["list"], ["config", "901"], ["config", "901", "--current"], ["pending", "901"]):
        assert pct.main(node, command) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "status: running\nVMID       Status     Lock         Name\n901        running                 ct901\n902        stopped"
    )
    assert "hostname: ct901\nmemory: 1024\n" in out and "hostname: ct901\nmemory: 512\n" in out
    assert out.endswith("cur hostname: ct901\ncur memory: 512\nnew memory: 1024\ndel mp0\n")


def test_pvesh_as_proxmoxer_calls_it():
    arguments = [
        "set",
        "/nodes/n/lxc/901/config",
        "-dev0",
        "/dev/null,mode=0666",
        "-delete",
        "dev1",
        "--output-format",
        "json",
    ]
    assert pvesh.parse(arguments) == (
        "PUT", "/nodes/n/lxc/901/config", {"dev0": "/dev/null,mode=0666", "delete": "dev1"}, {"output-format": "json"}
    )  # fmt: skip
    assert pvesh.parse(["create", "nodes/n/lxc", "--vmid=7"])[:3] == ("POST", "/nodes/n/lxc", {"vmid": "7"})


@pytest.mark.parametrize("arguments", [[], ["get"], ["patch", "/x"], ["get", "/x", "y"], ["get", "/x", "-y"]])
def test_pvesh_refuses(arguments, capsys):
    with pytest.raises(ValueError, match="usage"):
        pvesh.parse(arguments)
    assert pvesh.main("/nonexistent", arguments) == 255 and "usage" in capsys.readouterr().err


def test_running_is_what_the_kernel_lists(tmp_path):
    sockets = tmp_path / "unix"
    sockets.write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000: 2 0 10000 1 01 11 @/var/lib/lxc/901/command\n0000: 3 0 0 1 03 12 @/var/lib/lxc/901/command\n"
        "0000: 2 0 10000 1 01 13 @/var/lib/lxc/web/command\n0000: 2 0 10000 1 01 14 /run/x\n0000: 2 0 10000 1 01 15 @/tmp/l/902/command\n"
    )
    assert state.running(sockets) == {901}


def test_every_change_is_saved():
    saved = []
    values = state.Saved({"a": 1}, lambda: saved.append(dict(values)))
    values["b"] = 2
    values.pop("a")
    values.update(c=3)
    values.setdefault("d", 4)
    del values["b"]
    assert saved[-1] == values == {"c": 3, "d": 4} and len(saved) == 5
