# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The API client over a stand-in for proxmoxer's resource: every kind of error, retries, tasks."""

from __future__ import annotations

import pytest
import requests
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import api as pve_api
from proxmoxer import ResourceException

UPID = "UPID:pve1:0000A1B2:00C3D4E5:66000000:vzcreate:901:root@pam!t:"


class Answers:
    """A resource that answers with what it was given, one after the other; exceptions are raised."""

    def __init__(self, *answers):
        self.answers, self.sent = list(answers), []

    def __call__(self, path):
        def method(name):
            def call(**params):
                self.sent.append((name, path, params))
                answer = self.answers.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return answer

            return call

        return type("At", (), {name: staticmethod(method(name)) for name in ("get", "post", "put", "delete")})


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def __call__(self):
        return self.now


@pytest.fixture
def client():
    def make(*answers, **options):
        resource, clock = Answers(*answers), Clock()
        api = pve_api.Api(resource, "https://node:8006", sleep=clock.sleep, clock=clock, **options)
        api.test_sent, api.test_clock = resource.sent, clock
        return api

    return make


def refused(status, text, errors=None):
    return ResourceException(status, "HTTP words", text, errors=errors)


LOCKED = refused(500, "CT is locked (backup)")


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (refused(401, "permission denied - invalid PVE ticket"), "unauthorized", "invalid PVE ticket"),
        (refused(403, "Permission check failed (/vms/901, VM.Allocate)"), "forbidden", "VM.Allocate"),
        (
            refused(400, "Parameter verification failed.", {"memory": "type check failed\n"}),
            "bad_request",
            "memory: type",
        ),
        (refused(500, "Configuration file 'nodes/n/lxc/901.conf' does not exist"), "absent", "does not exist"),
        (refused(500, "CT is locked (create)"), "locked", "locked"),
        (refused(500, "can't lock file '/run/lock/lxc/pve-config-901.lock' - got timeout"), "locked", "got timeout"),
        (refused(500, "cluster not ready - no quorum?"), "no_quorum", "quorum"),
        (refused(500, "hostname lookup 'x' failed - failed to get address"), "node_unreachable", "lookup"),
        (refused(595, "No route to host"), "node_unreachable", "No route"),
        (refused(500, "detected modified configuration - file changed by other user?"), "conflict", "modified"),
        (refused(500, "CT 901 already exists on node 'n'"), "exists", "already exists"),
        (refused(500, "lvcreate: not enough free space"), "storage_full", "space"),
        (refused(501, "Method 'PUT /x' not implemented"), "refused", "501"),
        (requests.exceptions.SSLError("self-signed certificate"), "tls", "self-signed"),
        (requests.exceptions.ConnectTimeout(), "unreachable", "no answer"),
        (requests.exceptions.ReadTimeout(), "timeout", "not known"),
        (requests.exceptions.ConnectionError("Connection refused"), "unreachable", "refused"),
        (requests.exceptions.ConnectionError("('Connection aborted.', RemoteDisconnected())"), "dropped", "aborted"),
        (requests.exceptions.TooManyRedirects("30"), "not_proxmox", "30"),
        (KeyError("data"), "not_proxmox", "no Proxmox API"),
    ],
)
def test_errors_are_told_apart(client, raised, kind, words):
    with pytest.raises(pve_api.ApiError, match=words) as caught:
        client(raised, lock_timeout=0).change("PUT", "nodes/n/lxc/901/config", "a change", memory=1)
    assert caught.value.kind == kind
    assert "PUT nodes/n/lxc/901/config at https://node:8006" in str(caught.value)


def test_a_page_that_is_not_json_is_no_success(client):
    with pytest.raises(pve_api.ApiError) as caught:
        client({"errors": b"<html>login</html>"}).get("version")
    assert caught.value.kind == "not_proxmox"


def test_booleans_travel_as_numbers(client):
    api = client(None)
    api.change("PUT", "x", "a change", onboot=True, protection=False, memory=512)
    assert api.test_sent == [("put", "x", {"onboot": 1, "protection": 0, "memory": 512})]


def test_a_read_is_repeated_when_the_connection_breaks(client):
    api = client(requests.exceptions.ReadTimeout(), refused(595, "No route to host"), {"version": "8"})
    assert api.get("version") == {"version": "8"}
    assert len(api.calls) == 3


def test_a_read_gives_up_in_the_end(client):
    api = client(*[requests.exceptions.ReadTimeout()] * 3)
    with pytest.raises(pve_api.ApiError):
        api.get("version")
    assert len(api.calls) == 3


def test_a_change_is_not_repeated_after_a_timeout(client):
    api = client(requests.exceptions.ReadTimeout(), None)
    with pytest.raises(pve_api.ApiError):
        api.change("POST", "nodes/n/lxc", "creation", vmid=901)
    assert api.calls == ["POST nodes/n/lxc"]


def test_a_change_waits_for_a_lock_and_no_longer_than_it_may(client):
    # A lock refuses the call, or lets its task fail.
    in_task = {"status": "stopped", "exitstatus": "CT is locked (backup)"}
    api = client(LOCKED, LOCKED, UPID, in_task, [], UPID, {"status": "stopped", "exitstatus": "OK"})
    api.change("POST", "x", "creation")
    assert api.upids == [UPID, UPID]
    api = client(*[LOCKED] * 100, lock_timeout=30)
    with pytest.raises(pve_api.ApiError) as caught:
        api.change("POST", "x", "creation")
    assert caught.value.kind == "locked"
    assert api.test_clock.now <= 30


@pytest.mark.parametrize("result", ["OK", "WARNINGS: 1"])
def test_a_task_that_ends_well(client, result):
    api = client({"status": "running"}, requests.exceptions.ReadTimeout(), {"status": "stopped", "exitstatus": result},
                 [{"n": 1, "t": "starting"}, {"n": 2, "t": "WARN: no swap"}])  # fmt: skip
    api.follow(UPID, "creation")
    assert api.warnings == ([] if result == "OK" else ["WARN: no swap"])
    assert api.test_sent[0][1].startswith("nodes/pve1/tasks/UPID%3Apve1%3A")


@pytest.mark.parametrize("result", [{"exitstatus": "unable to create CT 901"}, {}, {"exitstatus": "unexpected status"}])
def test_a_stopped_task_is_not_yet_a_success(client, result):
    log = [{"n": number, "t": f"line {number}"} for number in range(1, 40)]
    with pytest.raises(pve_api.ApiError, match="creation failed") as caught:
        client({"status": "stopped", **result}, log).follow(UPID, "creation")
    assert caught.value.kind == "task_failed"
    assert "line 39" in str(caught.value)
    assert "line 3\n" not in str(caught.value)


def test_a_task_that_never_ends(client):
    with pytest.raises(pve_api.ApiError, match="goes on") as caught:
        client(*[{"status": "running"}] * 200, task_timeout=20).follow(UPID, "creation")
    assert caught.value.kind == "task_timeout"


OPTIONS = {
    "api_host": "127.0.0.1", "api_port": 1, "api_user": "a@pve", "api_token_id": "t", "api_token_secret": "s",
    "api_timeout": 5, "lock_timeout": 1, "task_timeout": 1, "root_via": "none",
}  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        ({"status": "stopped", "exitstatus": "unable to create CT 901: No space left on device"}, "storage_full"),
        ({"status": "stopped", "exitstatus": "CT 901 already running"}, "already"),
        (refused(400, "Parameter verification failed.", {"upid": "no such task"}), "task_lost"),
        (refused(403, "Permission check failed (/nodes/n, Sys.Audit)"), "forbidden"),
    ],
)
def test_how_a_task_ends_is_told_apart(client, seen, kind):
    with pytest.raises(pve_api.ApiError) as caught:
        client(seen, []).follow(UPID, "creation")
    assert caught.value.kind == kind
    assert caught.value.ended is isinstance(seen, dict)
    assert UPID in str(caught.value)


@pytest.mark.parametrize(
    ("raised", "uncertain", "look_again"),
    [
        (requests.exceptions.ReadTimeout(), True, True),
        (requests.exceptions.ConnectionError("('Connection aborted.', RemoteDisconnected())"), True, True),
        (requests.exceptions.ChunkedEncodingError("IncompleteRead(3 bytes read)"), True, True),
        (refused(502, "Bad Gateway"), True, True),
        (refused(500, "detected modified configuration"), False, True),
        (refused(403, "Permission check failed"), False, False),
        (refused(500, "cluster not ready - no quorum?"), False, False),
        (requests.exceptions.ConnectionError("Connection refused"), False, False),
    ],
)
def test_after_which_failures_of_a_change_the_container_is_looked_at_again(client, raised, uncertain, look_again):
    with pytest.raises(pve_api.ApiError) as caught:
        client(raised).change("POST", "x", "start")
    assert (caught.value.uncertain, caught.value.look_again) == (uncertain, look_again)
    with pytest.raises(pve_api.ApiError) as caught:
        client(*[raised] * 3).get("x")
    assert caught.value.look_again is False


def test_an_expired_ticket_is_renewed_once(client):
    logins = []
    expired = refused(401, "permission denied - invalid PVE ticket")
    api = client({"version": "8"}, expired, {"version": "8"}, expired, expired, login=logins.append)
    assert api.get("version") == {"version": "8"}
    assert len(logins) == 1
    assert api.get("version") == {"version": "8"}
    assert len(logins) == 2
    with pytest.raises(pve_api.ApiError) as caught:
        api.get("version")
    assert (caught.value.kind, len(logins)) == ("unauthorized", 3)


def test_a_user_with_a_second_factor_is_told_to_use_a_token():
    ticket = pve_api.Ticket("a@pam", "p")
    with pytest.raises(pve_api.ApiError, match="use an API token"):
        ticket.login(lambda *call: {"NeedTFA": 1, "ticket": "PVE:!tfa!x"})


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"api_ca_path": "/nonexistent.pem"}, "no_ca"),
        ({"api_token_secret": None}, "no_credentials"),
        ({"api_token_secret": ""}, "no_credentials"),
        ({"api_user": None}, "no_credentials"),
        ({"api_via": "node"}, "no_root_way"),
        ({"api_fingerprint": "AB:CD"}, "bad_fingerprint"),
    ],
)
def test_what_is_needed_to_begin(options, kind):
    with pytest.raises(pve_api.ApiError) as caught:
        pve_api.connect({**OPTIONS, **options})
    assert caught.value.kind == kind


def test_nobody_at_home():
    with pytest.raises(pve_api.ApiError, match="refused") as caught:
        pve_api.connect(OPTIONS).get("version")
    assert caught.value.kind == "unreachable"


def test_nobody_at_home_at_an_ipv6_address():
    with pytest.raises(pve_api.ApiError, match=r"at https://\[::1\]:1: ") as caught:
        pve_api.connect({**OPTIONS, "api_host": "::1"}).get("version")
    assert caught.value.kind == "unreachable"


@pytest.mark.parametrize(
    ("options", "who"),
    [
        ({}, "a@pve!t"),
        ({"api_token_id": "a@pve!t"}, "a@pve!t"),
        ({"api_password": "p", "api_user": "root@pam"}, "root@pam"),
        ({"api_via": "node"}, "root@pam"),
    ],
)
def test_identity(options, who):
    assert pve_api.identity({**OPTIONS, **options}) == who


@pytest.fixture
def pvesh(tmp_path, monkeypatch):
    """``pvesh(script)`` puts a program of that name, or of another, on PATH."""

    def program(script, name="pvesh"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return program


def test_pvesh_takes_what_only_root_may_set(pvesh, tmp_path):
    pvesh(f'printf "%s|" "$@" > {tmp_path}/argv; echo "update CT 901" >&2')
    root = pve_api.connect_root({**OPTIONS, "root_via": "local"})
    root.change("PUT", "nodes/n/lxc/901/config", "config", dev0="/dev/null,mode=0666", digest="abc")
    assert (tmp_path / "argv").read_text() == (
        "set|/nodes/n/lxc/901/config|-dev0|/dev/null,mode=0666|-digest|abc|--output-format|json|"
    )


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("echo '403 Permission check failed (user != root@pam)' >&2; exit 2", "forbidden"),
        ("printf '400 Parameter verification failed.\\ndev0: format error\\n' >&2; exit 255", "bad_request"),
        ("echo \"Configuration file 'nodes/n/lxc/901.conf' does not exist\" >&2; exit 255", "absent"),
        ("exit 3", "refused"),
    ],
)
def test_pvesh_fails_by_its_exit_code(pvesh, script, kind):
    pvesh(script)
    with pytest.raises(pve_api.ApiError) as caught:
        pve_api.connect_root({**OPTIONS, "root_via": "local"}).change(
            "PUT", "nodes/n/lxc/901/config", "config", dev0="x"
        )
    assert caught.value.kind == kind


TURNED_AWAY = "kex_exchange_identification: read: Connection reset by peer"


@pytest.mark.parametrize("way", ["session", "look"])
def test_a_node_that_turns_connections_away_is_asked_again(pvesh, tmp_path, monkeypatch, way):
    monkeypatch.setattr(pve_api.time, "sleep", lambda _seconds: None)
    pvesh(
        f"echo >> {tmp_path}/times; [ $(wc -l < {tmp_path}/times) = 3 ] || {{ echo '{TURNED_AWAY}' >&2; exit 255; }}",
        "ssh",
    )
    if way == "session":
        pve_api.connect_root({**OPTIONS, "root_via": "ssh"}).change("PUT", "nodes/n/lxc/901/config", "config", dev0="x")
    else:
        assert pve_api.run_on_node(["ssh", "node"], 9).returncode == 0
    assert (tmp_path / "times").read_text() == "\n" * 3


def test_a_node_that_turns_all_connections_away_is_unreachable(pvesh, monkeypatch):
    monkeypatch.setattr(pve_api.time, "sleep", lambda _seconds: None)
    pvesh(f"echo '{TURNED_AWAY}' >&2; exit 255", "ssh")
    with pytest.raises(pve_api.ApiError, match="ssh to the node failed: kex_exchange") as caught:
        pve_api.connect_root({**OPTIONS, "root_via": "ssh", "api_timeout": 0.2, "task_timeout": 0.2}).change(
            "PUT", "nodes/n/lxc/901/config", "config", dev0="x"
        )
    assert caught.value.kind == "unreachable"


def test_a_program_that_fails_on_the_node_is_not_run_again(pvesh, tmp_path):
    pvesh(f"echo >> {tmp_path}/times; echo '500 {TURNED_AWAY}' >&2; exit 2", "ssh")
    assert pve_api.run_on_node(["ssh", "node"], 9).returncode == 2
    assert (tmp_path / "times").read_text() == "\n"


def test_ssh_to_the_node_verifies_its_host_key():
    command = pve_api.ssh_prefix({"port": 2222, "key_file": "/k", "known_hosts_file": "/h", "user": "root"}, "node")
    assert "StrictHostKeyChecking=yes" in command
    assert "UserKnownHostsFile=/h" in command
    assert command[-2:] == ["root@node", "--"]


def test_without_a_root_way_there_is_none():
    assert pve_api.connect_root(OPTIONS) is None
