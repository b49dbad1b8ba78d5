# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The places in fakepve that the node puts work into, over its real HTTP front; LXC alone is replaced.

These hold fakepve to the private order of statements that the node relies on: a new version has to pass them.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import re
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from launchproof_node import api as node_api
from launchproof_node import faults as node_faults
from launchproof_node.runtime import Failed
from launchproof_node.settings import Settings

ROLE = Path(__file__).resolve().parents[4] / "roles/local_node"
CREATE = {"vmid": "901", "ostemplate": "local:vztmpl/debian.tar.zst", "rootfs": "local:4", "hostname": "one", "memory": "512",
          "net0": "name=eth0,bridge=lpbr0,ip=198.51.100.2/24", "description": "text", "tags": "Launchproof"}  # fmt: skip


class Lxc:
    """A machine where everything works until told otherwise; it writes down what it was asked to do."""

    def __init__(self, settings):
        self.settings = settings
        self.cpus = 2
        self.active = set()
        self.calls = []
        self.fails = {}
        self.hold = None
        self.deaf = False

    async def _call(self, name, vmid, *rest):
        self.calls.append((name, vmid, *rest))
        if self.hold:
            await self.hold.wait()
        if name in self.fails:
            raise Failed(self.fails[name])

    async def create(self, vmid, config, template, password, ssh_keys):
        await self._call("create", vmid, dict(config), Path(template).name, password, ssh_keys)

    async def start(self, vmid, config):
        await self._call("start", vmid, dict(config))
        self.active.add(vmid)

    async def stop(self, vmid):
        await self._call("stop", vmid)
        if not self.deaf:
            self.active.discard(vmid)

    async def shutdown(self, vmid, timeout):
        await self._call("shutdown", vmid, timeout)
        if not self.deaf:
            self.active.discard(vmid)
        return not self.deaf

    async def grow(self, vmid, volume, size):
        await self._call("grow", vmid, volume, size)

    async def make_volume(self, volume, size):
        await self._call("make_volume", volume, size)

    async def apply_limits(self, vmid, config):
        await self._call("apply_limits", vmid, config["memory"])

    def drop_volume(self, volume):
        self.calls.append(("drop_volume", volume))

    def discard(self, vmid):
        self.calls.append(("discard", vmid))

    def image(self, volume):
        # Volumes of a create exist once it is through; any other has to be made.
        return Path("/etc/passwd") if volume.endswith("disk-0.raw") else Path("/nonexistent")

    def init_pid(self, vmid):
        return 1

    def usage(self, pid):
        return 1234567, 0

    def disk(self, pid):
        return 7654321, 0

    def names(self):
        return [call[0] for call in self.calls]


class Node:
    """The API and a client of it."""

    def __init__(self, folder):
        self.folder = folder

    async def begin(self, lxc=None):
        settings = Settings(self.folder)
        self.lxc = lxc or Lxc(settings)
        self.pve = node_api.RealPve(settings, runtime=self.lxc)
        self.pve.lock_wait = 0.05
        self.pve.restore()
        self.client = TestClient(TestServer(self.pve._build_app()))
        await self.client.start_server()

    async def call(self, method, path, data=None, user="token"):
        """(status, reason, body)."""
        if user == "token":
            headers = {"Authorization": "PVEAPIToken=root@pam!launchproof=token-secret"}
        else:
            ticket, csrf = self.pve.issue_ticket(user)
            headers = {"Cookie": f"PVEAuthCookie={ticket}", "CSRFPreventionToken": csrf}
        url = path if path.startswith("/_") else "/api2/json" + path
        answer = await self.client.request(method, url, data=data, headers=headers)
        return answer.status, answer.reason, json.loads(await answer.text() or "{}")

    async def task(self, *arguments, **options):
        """The exit status of the task that a request began."""
        status, reason, body = await self.call(*arguments, **options)
        assert status == 200, reason
        return await self.ended(body["data"])

    async def ended(self, upid):
        await asyncio.wait_for(asyncio.gather(*self.pve._workers), 5)
        return self.pve.tasks[upid]["exitstatus"]

    async def config(self, vmid=901):
        return (await self.call("GET", f"/nodes/n/lxc/{vmid}/config"))[2]["data"]


@pytest.fixture
def node(tmp_path, monkeypatch):
    settings = {
        "node": "n",
        "api_host": "127.0.0.1",
        "api_port": 1,
        "gateway": "198.51.100.1",
        "nameservers": [],
        "searchdomain": "",
        "faults": True,
        "token_id": "launchproof",
    }
    (tmp_path / "node.json").write_text(json.dumps(settings))
    for name in ("secrets", "log", "run", "storage/images", "storage/template/cache"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secrets/root_password").write_text("root-password\n")
    (tmp_path / "secrets/api_token").write_text("token-secret\n")
    (tmp_path / "storage/template/cache/debian.tar.zst").write_bytes(b"x")
    out = Node(tmp_path)
    monkeypatch.setattr(node_api, "running", lambda: out.lxc.active)
    return out


def run(node, story):
    async def main():
        await node.begin()
        try:
            await story()
        finally:
            await node.client.close()

    asyncio.run(main())


async def created(node, **more):
    assert await node.task("POST", "/nodes/n/lxc", {**CREATE, **more}) == "OK"


def test_the_version_that_these_tests_hold_is_the_one_installed():
    pinned = re.search(r"^fakepve==(\S+)", (ROLE / "files/requirements.txt").read_text(), re.M)[1]
    assert importlib.metadata.version("fakepve") == pinned == "0.5.0"


def test_create_shows_only_its_lock_until_the_work_is_done(node):
    async def story():
        node.lxc.hold = asyncio.Event()
        _status, _reason, body = await node.call(
            "POST", "/nodes/n/lxc", {**CREATE, "password": "hunter22", "ssh-public-keys": "ssh-ed25519 AAAA x"}
        )
        while not node.lxc.calls:
            await asyncio.sleep(0)
        assert set(await node.config()) == {"lock", "digest"}
        record = json.loads((node.folder / "pve/tasks" / body["data"]).read_text())
        assert record["status"] == "running" and "exitstatus" not in record
        assert (await node.call("DELETE", "/nodes/n/lxc/901"))[:2] == (500, "CT is locked (create)")
        node.lxc.hold.set()
        assert await node.ended(body["data"]) == "OK"
        config = await node.config()
        assert (config["hostname"], config["tags"], config["description"]) == ("one", "launchproof", "text\n")
        assert "lock" not in config and config["rootfs"] == "local:901/vm-901-disk-0.raw,size=4G"
        name, vmid, final, template, password, keys = node.lxc.calls[0]
        assert (name, vmid, template, password, keys) == (
            "create",
            901,
            "debian.tar.zst",
            "hunter22",
            "ssh-ed25519 AAAA x",
        )
        assert final["unprivileged"] == 1 and "hwaddr=BC:24:11:" in final["net0"]
        assert "hunter22" not in "".join(
            path.read_text() for path in node.folder.rglob("*") if path.is_file() and path.suffix != ".zst"
        )

    run(node, story)


def test_lists_of_resolv_conf_are_kept_with_blanks(node):
    """PVE::LXC, verify_nameserver_list and verify_searchdomain_list."""

    async def story():
        await created(node, nameserver="192.0.2.1,192.0.2.2", searchdomain=" example.org; example.net")
        config = await node.config()
        assert (config["nameserver"], config["searchdomain"]) == ("192.0.2.1 192.0.2.2", "example.org example.net")
        await node.call("PUT", "/nodes/n/lxc/901/config", {"nameserver": "192.0.2.3;192.0.2.4"})
        assert (await node.config())["nameserver"] == "192.0.2.3 192.0.2.4"

    run(node, story)


def test_a_failed_create_is_taken_back(node):
    async def story():
        node.lxc.fails["create"] = "no space left"
        status = await node.task("POST", "/nodes/n/lxc", CREATE)
        assert status == "unable to create CT 901 - no space left"
        assert ("discard", 901) in node.lxc.calls
        assert not (node.folder / "pve/nodes/n/lxc/901.conf").exists()
        assert (await node.call("GET", "/nodes/n/lxc/901/config"))[0] == 500

    run(node, story)


def test_start_applies_what_is_pending_and_says_what_failed(node):
    async def story():
        await created(node)
        node.lxc.fails["start"] = "Device /dev/nope does not exist"
        assert await node.task("POST", "/nodes/n/lxc/901/status/start") == "Device /dev/nope does not exist"
        assert (await node.call("GET", "/nodes/n/lxc/901/status/current"))[2]["data"]["status"] == "stopped"
        del node.lxc.fails["start"]
        assert await node.task("POST", "/nodes/n/lxc/901/status/start") == "OK"
        data = (await node.call("GET", "/nodes/n/lxc/901/status/current"))[2]["data"]
        assert (data["status"], data["mem"], data["disk"], data["pid"]) == ("running", 1234567, 7654321, 1)
        assert (await node.call("POST", "/nodes/n/lxc/901/status/start"))[:2] == (500, "CT 901 already running")
        assert "does not exist" in await node.task("POST", "/nodes/n/lxc/902/status/start")

    run(node, story)


def test_a_stop_that_did_not_happen_is_no_success(node):
    async def story():
        await created(node, start="1")
        node.lxc.deaf = True
        assert await node.task("POST", "/nodes/n/lxc/901/status/stop") == "container 901 is running, expected stopped"
        node.lxc.deaf = False
        assert await node.task("POST", "/nodes/n/lxc/901/status/stop") == "OK"
        assert (await node.call("POST", "/nodes/n/lxc/901/status/stop"))[:2] == (500, "CT 901 not running")

    run(node, story)


def test_shutdown_waits_its_timeout_and_kills_only_when_told(node):
    async def story():
        await created(node, start="1")
        node.lxc.deaf = True
        assert await node.task("POST", "/nodes/n/lxc/901/status/shutdown", {"timeout": "7"}) == "container did not stop"
        assert ("shutdown", 901, 7) in node.lxc.calls and "stop" not in node.lxc.names()
        await node.task("POST", "/nodes/n/lxc/901/status/shutdown", {"timeout": "7", "forceStop": "1"})
        assert node.lxc.names()[-2:] == ["shutdown", "stop"]

    run(node, story)


def test_reboot_is_a_shutdown_and_a_start(node):
    async def story():
        await created(node, start="1")
        await node.call(
            "PUT",
            "/nodes/n/lxc/901/config",
            {"net0": "name=eth0,bridge=lpbr0,ip=198.51.100.9/24,hwaddr=BC:24:11:00:00:01"},
        )
        assert await node.task("POST", "/nodes/n/lxc/901/status/reboot") == "OK"
        assert node.lxc.names()[-2:] == ["shutdown", "start"]
        assert "198.51.100.9/24" in node.lxc.calls[-1][2]["net0"]

    run(node, story)


def test_destroy(node):
    async def story():
        await created(node, start="1")
        assert (await node.call("DELETE", "/nodes/n/lxc/901"))[:2] == (
            500,
            "unable to destroy CT 901 - container is running",
        )
        assert await node.task("DELETE", "/nodes/n/lxc/901?force=1") == "OK"
        assert "stop" in node.lxc.names() and node.lxc.names()[-1] == "discard"
        assert not list((node.folder / "pve/nodes/n/lxc").iterdir())

    run(node, story)


def test_a_running_container_takes_limits_at_once_and_keeps_the_rest_pending(node):
    async def story():
        await created(node, start="1")
        root = {"user": "root@pam"}
        await node.call(
            "PUT",
            "/nodes/n/lxc/901/config",
            {"memory": "1024", "dev0": "/dev/null,mode=0666", "mp0": "/srv,mp=/srv,ro=1"},
            **root,
        )
        assert ("apply_limits", 901, 1024) in node.lxc.calls
        live = (await node.call("GET", "/nodes/n/lxc/901/config?current=1"))[2]["data"]
        assert live["memory"] == 1024 and "dev0" not in live and "mp0" not in live
        assert (await node.config())["dev0"] == "/dev/null,mode=0666"
        pending = {
            item["key"] for item in (await node.call("GET", "/nodes/n/lxc/901/pending"))[2]["data"] if "pending" in item
        }
        assert pending == {"dev0", "mp0"}

    run(node, story)


def test_a_limit_that_could_not_be_applied_goes_back_to_pending(node):
    async def story():
        await created(node, start="1")
        node.lxc.fails["apply_limits"] = "Device or resource busy"
        assert (await node.call("PUT", "/nodes/n/lxc/901/config", {"memory": "256"}))[0] == 200
        assert (await node.call("GET", "/nodes/n/lxc/901/config?current=1"))[2]["data"]["memory"] == 512
        assert {"key": "memory", "value": 512, "pending": 256} in (await node.call("GET", "/nodes/n/lxc/901/pending"))[
            2
        ]["data"]

    run(node, story)


def test_volumes_are_made_grown_and_removed(node):
    async def story():
        await created(node)
        await node.call("PUT", "/nodes/n/lxc/901/config", {"mp0": "local:2,mp=/data"})
        volume = "local:901/vm-901-disk-1.raw"
        assert node.lxc.calls[-1] == ("make_volume", volume, 2 << 30)
        assert await node.task("PUT", "/nodes/n/lxc/901/resize", {"disk": "rootfs", "size": "+1G"}) == "OK"
        assert node.lxc.calls[-1] == ("grow", 901, "local:901/vm-901-disk-0.raw", 5 << 30)
        assert (await node.config())["rootfs"].endswith("size=5G")
        node.lxc.fails["grow"] = "no"
        assert await node.task("PUT", "/nodes/n/lxc/901/resize", {"disk": "rootfs", "size": "9G"}) == "no"
        assert (await node.config())["rootfs"].endswith("size=5G")
        await node.call("PUT", "/nodes/n/lxc/901/config", {"delete": "mp0"})
        assert (await node.config())["unused0"] == volume and "drop_volume" not in node.lxc.names()
        await node.call("PUT", "/nodes/n/lxc/901/config", {"delete": "unused0"})
        assert node.lxc.calls[-1] == ("drop_volume", volume)

    run(node, story)


@pytest.mark.parametrize(
    ("method", "path", "data"),
    [
        ("POST", "/nodes/n/lxc/901/snapshot", {"snapname": "x"}),
        ("POST", "/nodes/n/lxc/901/clone", {"newid": "902"}),
        ("POST", "/nodes/n/lxc/901/migrate", {"target": "m"}),
        ("POST", "/nodes/n/lxc/901/template", None),
        ("POST", "/nodes/n/lxc/901/status/suspend", None),
        ("POST", "/nodes/n/lxc/901/status/resume", None),
        ("POST", "/nodes/n/vzdump", {"vmid": "901"}),
        ("POST", "/nodes/n/qemu", {"vmid": "700"}),
        ("POST", "/nodes/n/reboot", None),
        ("POST", "/cluster/ha/resources", {"sid": "ct:901"}),
        ("POST", "/pools", {"poolid": "p"}),
        ("POST", "/storage", {"storage": "s", "type": "dir", "path": "/x"}),
        ("POST", "/access/users/root@pam/token/t", None),
        ("PUT", "/access/acl", {"path": "/", "roles": "x"}),
        ("PUT", "/access/password", {"userid": "root@pam", "password": "secret"}),
        ("GET", "/access/users", None),
        ("GET", "/nodes/n/status", None),
        ("GET", "/nodes/n/hardware/pci", None),
        ("GET", "/no/such/path", None),
        ("PATCH", "/nodes/n/lxc/901/config", None),
        ("PUT", "/nodes/n/lxc/901/config", {"hookscript": "local:snippets/x"}),
        ("PUT", "/nodes/n/lxc/901/config", {"net1": "name=eth1,bridge=b,ip=dhcp"}),
        ("POST", "/nodes/n/lxc", {**CREATE, "vmid": "902", "restore": "1"}),
        ("POST", "/nodes/n/lxc", {**CREATE, "vmid": "902", "features": "mount=nfs"}),
    ],
)
def test_what_is_not_done_for_real_answers_501_and_changes_nothing(node, method, path, data):
    async def story():
        await created(node)
        before, calls = await node.config(), list(node.lxc.calls)
        status, _reason, body = await node.call(method, path, data, user="root@pam")
        assert status == 501 and body.get("data") is None
        assert await node.config() == before and node.lxc.calls == calls

    run(node, story)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dev0": "/dev/null,mode=0666"}, "configuring device passthrough is only allowed for root@pam"),
        ({"features": "nesting=1,keyctl=1"}, "changing feature flags (except nesting) is only allowed for root@pam"),
        ({"mp0": "/srv,mp=/srv"}, "mount point type bind is only allowed for root@pam"),
    ],
)
def test_root_only_keys_are_refused_to_roots_own_token(node, change, said):
    async def story():
        await created(node)
        assert (await node.call("PUT", "/nodes/n/lxc/901/config", change))[:2] == (
            403,
            f"Permission check failed ({said})",
        )
        assert (await node.call("PUT", "/nodes/n/lxc/901/config", change, user="root@pam"))[0] == 200

    run(node, story)


def test_answers_as_a_real_node_gives_them(node, monkeypatch):
    async def story():
        await created(node)
        status, reason, body = await node.call("GET", "/nodes/n/lxc/999/config")
        assert (status, reason, body) == (
            500,
            "Configuration file 'nodes/n/lxc/999.conf' does not exist",
            {"data": None},
        )
        status, _reason, body = await node.call("PUT", "/nodes/n/lxc/901/config", {"onboot": "True"})
        assert status == 400 and set(body["errors"]) == {"onboot"}
        assert (await node.call("PUT", "/nodes/n/lxc/901/config"))[0] == 500
        unknown = "UPID:n:00000001:00000002:6B000000:vzstart:901:root@pam:"
        assert (await node.call("GET", f"/nodes/n/tasks/{unknown}/status"))[2]["errors"] == {"upid": "no such task"}
        status, _reason, body = await node.call("GET", f"/nodes/n/tasks/{unknown}/log")
        assert status == 200 and "unable to open file" in body["data"][0]["t"]
        assert (await node.call("GET", "/nodes/n/tasks?source=active"))[2]["data"] == []
        digest = (await node.config())["digest"]
        await node.call("PUT", "/nodes/n/lxc/901/config", {"cores": "2", "digest": digest})
        status, reason, _body = await node.call("PUT", "/nodes/n/lxc/901/config", {"cores": "1", "digest": digest})
        assert status == 500 and "detected modified configuration" in reason
        slept = []
        real_sleep = asyncio.sleep
        monkeypatch.setattr(node_api.asyncio, "sleep", lambda seconds: slept.append(seconds) or real_sleep(0))
        answer = await node.client.get(
            "/api2/json/version", headers={"Authorization": "PVEAPIToken=root@pam!launchproof=wrong"}
        )
        assert answer.status == 401 and slept == [3]
        log = (node.folder / "log/access.log").read_text()
        assert (
            " PUT /api2/json/nodes/n/lxc/901/config 200\n" in log and "token-secret" not in log and "wrong" not in log
        )

    run(node, story)


def test_malformed_json_is_501(node):
    async def story():
        headers = {"Authorization": "PVEAPIToken=root@pam!launchproof=token-secret", "Content-Type": "application/json"}
        answer = await node.client.post("/api2/json/nodes/n/lxc", data="{", headers=headers)
        assert answer.status == 501

    run(node, story)


def test_after_a_crash_of_the_api_everything_is_as_it_was(node):
    async def everything():
        out = [
            (await node.call("GET", f"/nodes/n/lxc/901/{what}"))[2]["data"]
            for what in ("config", "pending", "status/current")
        ]
        del out[2]["uptime"], out[2]["cpu"]
        return out

    async def story():
        await created(node, start="1")
        await node.call(
            "PUT", "/nodes/n/lxc/901/config", {"dev0": "/dev/null,mode=0666", "cpulimit": "1.5"}, user="root@pam"
        )
        before = await everything()
        # A second create is under way when the API dies.
        node.lxc.hold = asyncio.Event()
        _status, _reason, body = await node.call("POST", "/nodes/n/lxc", {**CREATE, "vmid": "902"})
        while node.lxc.names()[-1:] != ["create"]:
            await asyncio.sleep(0)
        await node.client.close()
        for worker in list(node.pve._workers):
            worker.cancel()
        lxc = Lxc(node.lxc.settings)
        lxc.active = node.lxc.active
        # What was on disk at the moment of the crash: the cancelled task above has not changed it.
        (node.folder / "pve/nodes/n/lxc/902.conf").write_text("lock: create\n")
        record = json.loads((node.folder / "pve/tasks" / body["data"]).read_text())
        assert record["status"] == "running"
        await node.begin(lxc)
        assert await everything() == before
        task = (await node.call("GET", f"/nodes/n/tasks/{body['data']}/status"))[2]["data"]
        assert (task["status"], task["exitstatus"]) == ("stopped", "unexpected status")
        assert (await node.call("GET", "/nodes/n/lxc/902/config"))[0] == 500
        assert lxc.calls == [("discard", 902)]

    run(node, story)


def test_onboot_once_a_boot(node):
    async def story():
        await created(node, onboot="1")
        await node.pve.start_on_boot()
        await asyncio.gather(*node.pve._workers)
        assert node.lxc.active == {901}
        node.lxc.active.clear()
        await node.pve.start_on_boot()
        await asyncio.gather(*node.pve._workers)
        assert node.lxc.active == set()

    run(node, story)


def test_faults_are_not_offered_unless_the_settings_say_so(node):
    path = node.folder / "node.json"
    settings = json.loads(path.read_text())
    del settings["faults"]
    path.write_text(json.dumps(settings))

    async def story():
        assert (await node.call("POST", "/_fault", json.dumps({"fault": "heal"})))[0] == 501

    run(node, story)


def test_locks_and_faults(node):
    async def story():
        await created(node)

        async def fault(who="token", **body):
            return (await node.call("POST", "/_fault", json.dumps(body), user=who))[:2]

        assert await fault(fault="lock", vmid=901, lock="backup") == (200, "OK")
        assert (await node.call("PUT", "/nodes/n/lxc/901/config", {"cores": "1"}))[:2] == (500, "CT is locked (backup)")
        await fault(fault="lock", vmid=901, lock=None)
        await fault(fault="hold", vmid=901)
        text = "can't lock file '/run/lock/lxc/pve-config-901.lock' - got timeout"
        assert (await node.call("PUT", "/nodes/n/lxc/901/config", {"cores": "1"}))[:2] == (500, text)
        assert await node.task("POST", "/nodes/n/lxc/901/status/start") == text
        await fault(fault="let_go", vmid=901)
        await fault(fault="fail", method="GET", suffix="/version", status=503, message="busy", times=1)
        assert (await node.call("GET", "/version"))[0] == 503 and (await node.call("GET", "/version"))[0] == 200
        await fault(fault="user", user="ci@pve", password="x")
        await fault(fault="grant", user="ci@pve", path="/vms/901", privileges=["VM.Audit"])
        assert (await node.call("PUT", "/nodes/n/lxc/901/config", {"cores": "1"}, user="ci@pve"))[0] == 403
        assert (await fault(who="ci@pve", fault="heal"))[0] == 403
        assert await fault(fault="nope") == (400, "unknown fault; known: " + ", ".join(node_faults.NAMES))
        assert (await fault(fault="lock"))[0] == 400

    run(node, story)


def test_an_answer_is_lost_after_the_work_and_before_it(node):
    async def story():
        await created(node)

        async def lost(then, **rule):
            await node.call("POST", "/_fault", json.dumps(
                {"fault": "answer", "method": "PUT", "suffix": "/config", "then": then, **rule}))  # fmt: skip
            with pytest.raises(aiohttp.ClientError):
                await node.call("PUT", "/nodes/n/lxc/901/config", {"cores": "2"})
            return (await node.config()).get("cores")

        assert await lost("drop", before=True) is None
        assert await lost("reset", before=True) is None
        assert await lost("cut", before=True) is None
        assert await lost("drop") == 2
        assert (await node.call("PUT", "/nodes/n/lxc/901/config", {"cores": "1"}))[0] == 200
        answered = {"fault": "answer", "method": "GET", "suffix": "/version", "then": "nothing"}
        await node.call("POST", "/_fault", json.dumps(answered))
        assert (await node.call("GET", "/version"))[2] == {}
        assert "data" in (await node.call("GET", "/version"))[2]

    run(node, story)


def test_somebody_else_comes_first(node):
    async def story():
        await created(node)
        digest = (await node.config())["digest"]
        rule = {"fault": "answer", "method": "PUT", "suffix": "/config",
                "meanwhile": {"fault": "change", "vmid": 901, "key": "memory", "value": 300}}  # fmt: skip
        await node.call("POST", "/_fault", json.dumps(rule))
        status, reason, _body = await node.call("PUT", "/nodes/n/lxc/901/config", {"cores": "2", "digest": digest})
        assert (status, reason[:31]) == (500, "detected modified configuration")
        assert (await node.config())["memory"] == 300

    run(node, story)


def test_a_task_is_slow_held_warns_fails_or_is_forgotten(node):
    async def story():
        await created(node)

        async def spoil(**rule):
            await node.call("POST", "/_fault", json.dumps({"fault": "task", "kind": "vzstart", **rule}))
            return await node.call("POST", "/nodes/n/lxc/901/status/start")

        _status, _reason, body = await spoil(result="startup failed", work=False)
        assert await node.ended(body["data"]) == "startup failed"
        assert node.lxc.active == set()
        _status, _reason, body = await spoil(result="WARNINGS: 1")
        assert await node.ended(body["data"]) == "WARNINGS: 1"
        assert node.lxc.active == {901}
        node.lxc.active.clear()
        _status, _reason, body = await spoil(hold=True)
        await asyncio.sleep(0.05)
        listed = (await node.call("GET", "/nodes/n/tasks?vmid=901&source=active"))[2]["data"]
        assert [task["upid"] for task in listed] == [body["data"]]
        await node.call("POST", "/_fault", json.dumps({"fault": "heal"}))
        assert await node.ended(body["data"]) == "OK"
        node.lxc.active.clear()
        _status, _reason, body = await spoil(forget=True)
        await asyncio.gather(*node.pve._workers)
        assert (await node.call("GET", f"/nodes/n/tasks/{body['data']}/status"))[0] == 400

    run(node, story)


def test_pending_tells_the_digest(node):
    async def story():
        await created(node)
        listed = (await node.call("GET", "/nodes/n/lxc/901/pending"))[2]["data"]
        assert {"key": "digest", "value": (await node.config())["digest"]} in listed

    run(node, story)
