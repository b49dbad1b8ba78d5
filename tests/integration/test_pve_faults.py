# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""pve_container when the API, its node or the network fails: each case ends in the declared state or in one clear error.

Each is a real exchange with the embedded node's API over real containers, or a real fault of TCP and TLS. After an error
the node is healed and the same declaration brought about, to show that nothing was left half done unsaid. The table of
cases and results is printed at the end.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import ipaddress
import shlex
import socket
import ssl
import struct
import threading
from dataclasses import dataclass, field

import pytest
from ansible_collections.dflash.launchproof.plugins.modules import pve_container, pve_preflight

from tests.support import pve
from tests.support.module import run_module
from tests.support.own_api import PROGRAMS, OwnApi, free_port

pytestmark = [pytest.mark.container, pytest.mark.usefixtures("local_node")]

#: The container that most cases work on, and the one that others create and remove.
VMID, OTHER = 911, 912
BOOM = {"status": 500, "message": "unable to open file '/etc/pve/nodes': Input/output error"}


@pytest.fixture(scope="module")
def api(local_node):
    api = OwnApi()
    api.begin()
    yield api
    api.end()


@pytest.fixture(scope="module")
def table(request):
    """Rows of (case, result), printed when the file is through."""
    rows = []
    yield rows
    manager = request.config.pluginmanager.getplugin("capturemanager")
    with manager.global_and_fixture_disabled():
        print(f"\n{len(rows)} faults")
        for name, result in rows:
            print(f"  {name:<64} {result}")


@pytest.fixture
def run(api, capsys):
    """``run(vmid, state, options, **declared)``: the module's result, with short time limits."""

    def execute(vmid, state, options=None, module=pve_container, check=False, **declared):
        container = {key: value for key, value in {**base(vmid), **declared}.items() if value is not None}
        arguments = {
            "api_host": "127.0.0.1", "api_port": api.port, "api_user": "root@pam", "api_token_id": api.token_id,
            "api_token_secret": api.token_secret, "api_ca_path": str(api.ca), "node": api.node, "container": container,
            "api_timeout": 4, "lock_timeout": 1, "task_timeout": 30, **(options or {}),
        }  # fmt: skip
        if module is pve_container:
            arguments = {"state": state, "force": state == "absent", "shutdown_timeout": 1, **arguments}
        secrets = (api.token_secret, api.password)
        return run_module(module, arguments, capsys, check=check, secrets=secrets)

    return execute


def base(vmid):
    return {**pve.declared(vmid), "template": OwnApi.template, "memory": 256, "disk_gib": 1}


def grown(api):
    """The root disk's size and one GiB more."""
    text = api.configuration(VMID).decode()
    return int(text.partition("rootfs: ")[2].partition("size=")[2].partition("G")[0]) + 1


#: What a run is to do: state before, declared state, declared options, and the request that does it.
ACTIONS = {
    "config": ("stopped", "present", {"memory": 300}, "PUT", "/config"),
    "start": ("stopped", "started", {}, "POST", "/status/start"),
    "stop": ("started", "stopped", {}, "POST", "/status/shutdown"),
    "restart": ("started", "started", {"nameserver": "192.0.2.53"}, "POST", "/status/reboot"),
    "resize": ("stopped", "present", {"disk_gib": grown}, "PUT", "/resize"),
    "create": (None, "present", {}, "POST", "/lxc"),
    "destroy": ("present", "absent", {}, "DELETE", f"/lxc/{OTHER}"),
}
TASKS = {
    "start": "vzstart", "stop": "vzshutdown", "restart": "vzreboot", "resize": "resize", "create": "vzcreate",
    "destroy": "vzdestroy",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A fault and what has to come of it.

    ``error`` is the variable that the one problem names, None where the declared state is reached all the same;
    ``words`` are in the message. ``sends``: how many changing requests the run made. ``warns``: what the result warns of.
    ``changed``: whether this run did it, and not somebody else.
    """

    name: str
    action: str = "config"
    faults: tuple[dict, ...] = ()
    error: str | None = None
    words: str = ""
    options: dict = field(default_factory=dict)
    sends: int | None = None
    warns: str = ""
    changed: bool = True


def answer(action, then=None, **more):
    """The fault that loses the answer to the request of an action."""
    _before, _state, _declared, method, suffix = ACTIONS[action]
    return {"fault": "answer", "method": method, "suffix": suffix, "then": then, **more}


def read(then, suffix="/pending", **more):
    return {"fault": "answer", "method": "GET", "suffix": suffix, "then": then, **more}


def fail(action, status, message, **more):
    _before, _state, _declared, method, suffix = ACTIONS[action]
    return {"fault": "fail", "method": method, "suffix": suffix, "status": status, "message": message, **more}


def task(action, **more):
    return {"fault": "task", "kind": TASKS[action], **more}


SHORT = {"api_timeout": 1}
HOST, VARIABLE = "pve_api_host", "container.vmid"

CASES = [
    # ---------------------------------------------------------------- reads
    Case("a read is dropped", faults=(read("drop"),)),
    Case("a read is reset", faults=(read("reset"),)),
    Case("a read hangs", faults=(read("hang"),), options=SHORT),
    Case("a read is cut off in its body", faults=(read("cut"),)),
    Case("a read meets a 503", faults=({"fault": "fail", "method": "GET", "suffix": "/pending", "status": 503, "message": "busy", "times": 1},)),
    Case("every read is dropped", faults=(read("drop", times=9),), error=HOST, words="pending", sends=0),
    Case("every read meets a proxy's 502 page", error=HOST, words="502", sends=0,
         faults=({"fault": "fail", "method": "GET", "suffix": "/pending", "status": 502, "message": "<h1>no</h1>", "html": True},)),
    Case("a read answers a page with 200", faults=(read("page"),), error=HOST, words="not JSON", sends=0),
    Case("a read answers no data", faults=(read("nothing"),), error=HOST, words="no data", sends=0),
    Case("a read fails on the node", error=VARIABLE, words="Input/output", sends=0,
         faults=({"fault": "fail", "method": "GET", "suffix": "/pending", **BOOM},)),
    Case("all answers are late", faults=({"fault": "network", "latency": 0.2},)),
    # ---------------------------------------------------------------- the answer to a change is lost
    *[
        Case(f"{action}: the answer is dropped, it was done", action, (answer(action, "drop"),),
             sends=2 if action == "restart" else 1)
        for action in ACTIONS
    ],
    Case("config: dropped before it was done", faults=(answer("config", "drop", before=True),), sends=2),
    Case("start: dropped before it was done", "start", (answer("start", "drop", before=True),), sends=2),
    Case("config: reset, it was done", faults=(answer("config", "reset"),), sends=1),
    Case("config: cut off in its body", faults=(answer("config", "cut", before=True),), sends=2),
    Case("config: hangs, it was done", faults=(answer("config", "hang"),), options=SHORT, sends=1),
    Case("start: hangs, it was done", "start", (answer("start", "hang"),), options=SHORT, sends=1),
    Case("config: a page with 200, it was done", faults=(answer("config", "page"),), sends=1),
    Case("config: a 504 of a proxy", faults=(fail("config", 504, "Gateway Timeout", times=1),), sends=2),
    Case("config: dropped again and again", faults=(answer("config", "drop", before=True, times=9),), error=HOST,
         words="config: memory (begun)"),
    Case("config: nobody home between two calls", faults=(fail("config", 502, "Bad Gateway", times=9),), error=HOST, words="502"),
    # ---------------------------------------------------------------- the node refuses
    Case("config: fails on the node", faults=(fail("config", 500, BOOM["message"]),), error=VARIABLE, words="Input/output"),
    Case("config: fails with a Perl error page", faults=(fail("config", 500, "<h1>no</h1>", html=True),), error=VARIABLE, words="500"),
    Case("config: not implemented", faults=(fail("config", 501, "Method 'PUT' not implemented"),), error=VARIABLE, words="501"),
    Case("config: 401 in the middle, by token", faults=(fail("config", 401, "permission denied"),), error="pve_api_token_secret",
         words="401"),
    Case("no quorum", faults=({"fault": "quorum", "quorate": False},), error="pve_node", words="no quorum"),
    Case("start: no quorum", "start", ({"fault": "quorum", "quorate": False},), error="pve_node", words="no quorum"),
    Case("the node is off the cluster", faults=({"fault": "node", "online": False},), error="pve_node", words="No route", sends=0),
    Case("the node cannot be looked up", error="pve_node", words="lookup", sends=0, faults=(
        {"fault": "fail", "method": "GET", "suffix": "/pending", "status": 500, "message": "hostname lookup 'lpfaults' failed - x"},)),
    # ---------------------------------------------------------------- locks
    Case("locked by a backup", faults=({"fault": "lock", "vmid": VMID, "lock": "backup"},), error="pve_lock_timeout",
         words="CT is locked (backup)"),
    Case("start: locked by a snapshot", "start", ({"fault": "lock", "vmid": VMID, "lock": "snapshot"},),
         error="pve_lock_timeout", words="CT is locked (snapshot)"),
    Case("locked for a moment", faults=(fail("config", 500, "CT is locked (backup)", times=1),), sends=2),
    Case("the file lock is held for a moment", faults=({"fault": "hold", "vmid": VMID, "seconds": 0.5},), sends=1),
    Case("the file lock stays", faults=({"fault": "hold", "vmid": VMID, "wait": 0.2},), error="pve_lock_timeout", words="got timeout"),
    Case("start: its task meets the file lock for a moment", "start", ({"fault": "hold", "vmid": VMID, "seconds": 0.6, "wait": 0.2},)),
    Case("stop: its task meets the file lock, which stays", "stop", ({"fault": "hold", "vmid": VMID, "wait": 0.2},),
         error="pve_lock_timeout", words="got timeout"),
    # ---------------------------------------------------------------- other people
    Case("somebody else changes another key meanwhile", sends=2, faults=(
        answer("config", meanwhile={"fault": "change", "vmid": VMID, "key": "cpuunits", "value": 77}),)),
    Case("somebody else changes it again and again", error=VARIABLE, words="detected modified configuration", faults=tuple(
        answer("config", meanwhile={"fault": "change", "vmid": VMID, "key": "cpuunits", "value": n}) for n in (78, 79))),
    Case("somebody else makes the same change first", sends=1, changed=False, faults=(
        answer("config", meanwhile={"fault": "change", "vmid": VMID, "key": "memory", "value": 300}),)),
    Case("start: somebody else starts it first", "start", (
        answer("start", meanwhile={"fault": "power", "vmid": VMID, "running": True}),), sends=1, changed=False),
    Case("stop: somebody else stops it first", "stop", (
        answer("stop", meanwhile={"fault": "power", "vmid": VMID, "running": False}),), sends=1, changed=False),
    Case("create: the number is taken meanwhile, and free again", "create", (
        fail("create", 500, f"CT {OTHER} already exists on node 'lpfaults'", times=1),), sends=2),
    # ---------------------------------------------------------------- tasks
    Case("start: TASK ERROR", "start", (task("start", result="startup for container '911' failed", work=False),),
         error=VARIABLE, words="startup for container '911' failed"),
    Case("stop: TASK ERROR", "stop", (task("stop", result="container did not stop", work=False),), error=VARIABLE, words="did not stop"),
    Case("resize: TASK ERROR", "resize", (task("resize", result="command 'resize2fs' failed: exit code 1", work=False),),
         error=VARIABLE, words="resize2fs"),
    Case("restart: TASK ERROR, it did not come back", "restart", (task("restart", result="lxc-start failed", work=False),),
         error=VARIABLE, words="config: nameserver"),
    Case("create: the storage is full", "create", ({"fault": "storage", "avail": 1000},), error="container.vmid", words="No space left"),
    Case("create: the storage is off", "create", ({"fault": "storage", "active": False},), error="container.vmid", words="not online"),
    Case("start: WARNINGS", "start", (task("start", result="WARNINGS: 1"),), warns="WARNINGS: 1"),
    Case("start: the task is slow", "start", (task("start", seconds=1),), sends=1),
    Case("start: ended well, and it does not run", "start", (task("start", result="OK", work=False),), error=VARIABLE,
         words="does not run"),
    Case("start: the worker vanished", "start", (task("start", result="unexpected status", work=False),), error=VARIABLE,
         words="unexpected status"),
    Case("start: the node forgets its task, which was done", "start", (task("start", forget=True),), sends=1),
    Case("start: the node forgets its task, which was not done", "start", (task("start", forget=True, work=False),), sends=2),
    Case("start: the task's polls fail", "start", (
        task("start", seconds=0.5), read("drop", "/status", times=2), read("page", "/status"), read("reset", "/status"),
        {"fault": "fail", "method": "GET", "suffix": "/status", "status": 500, "message": "worker busy", "times": 2}), sends=1),
    Case("start: a poll hangs", "start", (read("hang", "/status"),), options=SHORT, sends=1),
    Case("start: the polls are no longer allowed", "start", (
        {"fault": "fail", "method": "GET", "suffix": "/status", "status": 403,
         "message": "Permission check failed (/nodes/lpfaults, Sys.Audit)", "times": 1},),
         error="pve_api_user", words="cannot be watched"),
    Case("start: TASK ERROR, and its log cannot be read", "start", (
        task("start", result="startup failed", work=False),
        {"fault": "fail", "method": "GET", "suffix": "/log", "status": 500, "message": "unable to open file"}),
         error=VARIABLE, words="its log cannot be read"),
]  # fmt: skip


def prepare(api, run, action):
    """Bring the containers to where an action begins; what is declared for it, and the number of its container."""
    before, state, declared, _method, _suffix = ACTIONS[action]
    vmid = OTHER if action in ("create", "destroy") else VMID
    plain = {"nameserver": "", "cpuunits": 50, "disk_gib": None} if vmid == VMID and api.configuration(VMID) else {}
    ready = run(vmid, before or "absent", **plain)
    assert not ready.get("failed"), ready["msg"]
    asked = {name: value(api) if callable(value) else value for name, value in declared.items()}
    return vmid, state, asked if "disk_gib" in asked or vmid == OTHER else {"disk_gib": None, **asked}


def summary(result):
    if result.get("failed"):
        return f"error: {result['problems'][0]['variable']}: {result['problems'][0]['problem'].splitlines()[0][-90:]}"
    return f"{'changed' if result['changed'] else 'ok'}: {'; '.join(result['steps'])}"


def changes(lines):
    return [line for line in lines if not line.startswith("GET ") and "access/ticket" not in line]


# Reports of other tools' users that cases are about, see test_peers.py.
PEERS = {
    "locked by a backup": pytest.mark.peers("Telmate 677"),
    "the file lock is held for a moment": pytest.mark.peers("Telmate 1069"),
    "the file lock stays": pytest.mark.peers("Telmate 1069"),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=PEERS.get(case.name, ())) for case in CASES])
def test_fault(api, run, table, case):
    vmid, state, declared = prepare(api, run, case.action)
    before, ran = api.configuration(vmid), api.runs(vmid)
    for fault in case.faults:
        api.fault(**fault)
    try:
        result = run(vmid, state, case.options, **declared)
    finally:
        api.fault("heal")
        if any(fault["fault"] == "lock" for fault in case.faults):
            api.fault("lock", vmid=vmid, lock=None)
        if any(fault["fault"] == "hold" for fault in case.faults):
            api.fault("let_go", vmid=vmid)
    table.append((case.name, summary(result)))

    if case.error is None:
        assert not result.get("failed"), result["msg"]
        assert result["changed"] is case.changed
    else:
        assert result["failed"] is True, result
        assert [problem["variable"] for problem in result["problems"]] == [case.error], result["msg"]
        assert result["problems"][0]["fix"]
        if not result["changed"] and not any("meanwhile" in fault for fault in case.faults):
            # Nothing was done, as it says.
            assert (api.configuration(vmid), api.runs(vmid)) == (before, ran)
    assert case.words in result.get("msg", "")
    assert case.warns in str(result.get("warnings", "")) + str(result.get("task_warnings", ""))
    if case.sends is not None:
        assert len(changes(result["api_calls"])) == case.sends, result["api_calls"]

    # Healed, the declared state is reached, and then there is nothing to do.
    if case.error is not None:
        healed = run(vmid, state, **declared)
        assert not healed.get("failed"), healed["msg"]
    assert run(vmid, state, **declared)["changed"] is False
    assert api.runs(vmid) is (state == "started")


# ------------------------------------------------------------ runs that end before their task does


@pytest.mark.parametrize("action", TASKS)
def test_an_interrupted_run_is_taken_up_by_the_next(api, run, table, action):
    vmid, state, declared = prepare(api, run, action)
    api.fault(**task(action, hold=True))
    first = run(vmid, state, {"task_timeout": 1}, **declared)
    assert [problem["variable"] for problem in first["problems"]] == ["pve_task_timeout"]
    assert "it goes on, and the next run takes it up" in first["msg"]
    assert "(begun)" in first["msg"]
    seen = len(api.log())
    healer = threading.Timer(0.3, api.fault, ["heal"])
    healer.start()
    second = run(vmid, state, **declared)
    healer.join()
    assert not second.get("failed"), second["msg"]
    # It followed the task that was there, and did not ask for the same again.
    assert first["upids"][-1] in second["upids"]
    _before, _state, _declared, method, suffix = ACTIONS[action]
    assert not [line for line in changes(api.log()[seen:]) if line.startswith(f"{method} ") and f"{suffix} " in line]
    assert run(vmid, state, **declared)["changed"] is False
    table.append((f"{action}: interrupted while its task runs", f"{summary(first)[:60]}… then {summary(second)}"))


def test_a_task_that_an_interrupted_run_left_fails_and_the_next_run_does_it(api, run, table):
    vmid, state, declared = prepare(api, run, "start")
    api.fault(**task("start", hold=True, result="startup failed", work=False))
    assert run(vmid, state, {"task_timeout": 1}, **declared)["failed"] is True
    healer = threading.Timer(0.3, api.fault, ["heal"])
    healer.start()
    second = run(vmid, state, **declared)
    healer.join()
    assert (second["status"], second["steps"]) == ("running", ["start"])
    assert "startup failed" in str(second["task_warnings"])
    table.append(("start: interrupted, and its task fails", summary(second)))


def test_an_api_that_dies_in_the_middle_of_a_task(api, run, table):
    vmid, state, declared = prepare(api, run, "start")
    api.fault(**task("start", hold=True))
    crash = threading.Timer(0.5, lambda: (api.crash(), api.begin()))
    crash.start()
    result = run(vmid, state, **declared)
    crash.join()
    assert result["failed"] is True
    assert "unexpected status" in result["msg"]
    assert run(vmid, state, **declared)["status"] == "running"
    table.append(("start: the API dies and comes back while its task runs", summary(result)))


def test_a_half_created_container_is_named(api, run, table):
    vmid, state, declared = prepare(api, run, "create")
    api.fault(**task("create", result="unexpected status", work=False))
    first = run(vmid, state, **declared)
    assert "unexpected status" in first["msg"]
    seen = len(api.log())
    for wanted in (state, "absent"):
        second = run(vmid, wanted, **declared)
        assert [problem["variable"] for problem in second["problems"]] == ["container.vmid"]
        assert f"pct unlock {vmid} && pct destroy {vmid}" in second["msg"]
    assert changes(api.log()[seen:]) == []
    api.fault("lock", vmid=vmid, lock=None)
    api.call("DELETE", f"nodes/{api.node}/lxc/{vmid}")
    api.fault("heal")
    table.append(("create: the worker vanished, half a container is left", summary(second)))


# ------------------------------------------------------------ rights

GUEST = ("VM.Audit", "VM.Allocate", "VM.PowerMgmt", "VM.Config.CPU", "VM.Config.Memory", "VM.Config.Network",
         "VM.Config.Disk", "VM.Config.Options")  # fmt: skip
RIGHTS = [
    # What is done, the right that is taken away, its path.
    ("config", {"memory": 300}, "VM.Config.Memory", "/vms/911"),
    ("config", {"cores": 2}, "VM.Config.CPU", "/vms/911"),
    ("config", {"hostname": "other"}, "VM.Config.Network", "/vms/911"),
    ("config", {"networks": []}, "VM.Config.Network", "/vms/911"),
    ("config", {"description": "a note"}, "VM.Config.Options", "/vms/911"),
    ("config", {"features": {"nesting": False}}, "VM.Allocate", "/vms/911"),
    ("config", {"mounts": [{"target": "/m", "storage": "local", "size_gib": 1}]}, "VM.Config.Disk", "/vms/911"),
    ("config", {"mounts": [{"target": "/m", "storage": "local", "size_gib": 1}]}, "Datastore.AllocateSpace", "/storage/local"),
    ("config", {"memory": 300}, "VM.Audit", "/vms/911"),
    ("resize", {"disk_gib": grown}, "VM.Config.Disk", "/vms/911"),
    ("resize", {"disk_gib": grown}, "VM.Config.Options", "/vms/911"),
    ("resize", {"disk_gib": grown}, "Datastore.AllocateSpace", "/storage/local"),
    ("start", {}, "VM.PowerMgmt", "/vms/911"),
    ("stop", {}, "VM.PowerMgmt", "/vms/911"),
    ("create", {}, "VM.Allocate", "/vms/912"),
    ("create", {}, "Datastore.AllocateSpace", "/storage/local"),
    ("create", {}, "SDN.Use", "/sdn/zones/localnetwork/lpbr0"),
]  # fmt: skip


@pytest.mark.peers("Telmate 155", "UdelaRInterior 16")
@pytest.mark.parametrize(("action", "declared", "lacking", "path"), RIGHTS)
def test_a_missing_right_is_named_before_anything_changes(api, run, table, action, declared, lacking, path):
    vmid, state, plain = prepare(api, run, action)
    declared = {**plain, **{name: value(api) if callable(value) else value for name, value in declared.items()}}
    before, ran, seen = api.configuration(vmid), api.runs(vmid), len(api.log())
    who = "ci@pve!t"
    api.fault("token", token=who, secret=api.token_secret)
    for where, names in (
        (f"/vms/{vmid}", GUEST),
        ("/storage/local", ("Datastore.AllocateSpace", "Datastore.Audit")),
        ("/sdn/zones/localnetwork/lpbr0", ("SDN.Use",)),
    ):
        api.fault(
            "grant", user=who, path=where, privileges=[name for name in names if (name, where) != (lacking, path)]
        )
    try:
        result = run(vmid, state, {"api_user": "ci@pve", "api_token_id": "t"}, **declared)
    finally:
        api.fault("revoke", user=who)
    assert result["failed"] is True
    assert result["changed"] is False
    assert {problem["variable"] for problem in result["problems"]} == {"pve_api_user"}
    assert lacking in result["msg"]
    assert f"pveum acl modify {path} --users 'ci@pve' --tokens '{who}' --roles " in result["msg"]
    assert (api.configuration(vmid), api.runs(vmid), changes(api.log()[seen:])) == (before, ran, [])
    table.append(
        (f"{', '.join(declared) if action == 'config' else action}: no {lacking} on {path}"[:64], summary(result))
    )


def test_a_right_that_is_taken_at_the_last_moment(api, run, table):
    vmid, state, declared = prepare(api, run, "config")
    who, before = "ci@pve!t", api.configuration(VMID)
    api.fault("token", token=who, secret=api.token_secret)
    api.fault("grant", user=who, path=f"/vms/{vmid}", privileges=list(GUEST))
    api.fault(**answer("config", meanwhile={"fault": "revoke", "user": who}))
    result = run(vmid, state, {"api_user": "ci@pve", "api_token_id": "t"}, **declared)
    assert "403" in result["msg"]
    assert f"pveum acl modify /vms/{vmid} --users 'ci@pve'" in result["msg"]
    assert (result["changed"], api.configuration(vmid)) == (False, before)
    table.append(("config: the right is taken between question and change", summary(result)))


# ------------------------------------------------------------ identity


def test_an_expired_ticket_is_renewed_in_the_middle(api, run, table):
    vmid, state, declared = prepare(api, run, "config")
    # Between the first read and the second, of which the run knows nothing.
    api.fault(**read(None, meanwhile={"fault": "revoke_tickets"}))
    by_password = {"api_token_id": None, "api_token_secret": None, "api_password": api.password}
    first = run(vmid, state, by_password, **declared)
    assert (first.get("failed"), first["changed"]) == (None, True)
    assert first["api_calls"].count("POST access/ticket") == 2
    assert run(vmid, state, by_password, **declared)["changed"] is False
    table.append(("the ticket expires in the middle", summary(first)))


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        ({"api_token_secret": "00000000-0000-0000-0000-000000000000"}, "pve_api_token_secret"),
        ({"api_token_id": None, "api_token_secret": None, "api_password": "wrong"}, "pve_api_password"),
    ],
    ids=["token", "password"],
)
def test_a_refused_identity(api, run, table, options, variable):
    result = run(VMID, "present", options)
    assert [problem["variable"] for problem in result["problems"]] == [variable]
    assert "401" in result["msg"]
    assert len(result["api_calls"]) == 1  # each costs three seconds
    table.append((f"401 for the {variable.removeprefix('pve_api_')}, after 3 s", summary(result)))


# ------------------------------------------------------------ the root way


@pytest.fixture
def pvesh(api, tmp_path, monkeypatch):
    """``pvesh(script)``: the program of that name in PATH; None is the API's own."""

    def program(script=None):
        call = f"import sys; from launchproof_node import pvesh; sys.exit(pvesh.main('{api.folder}', sys.argv[1:]))"
        own = f'PYTHONPATH={PROGRAMS} exec python3 -B -c {shlex.quote(call)} "$@"'
        path = tmp_path / "pvesh"
        path.write_text(f"#!/bin/sh\n{script or own}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return program


DEVICE = {"devices": [{"path": "/dev/full", "mode": "0666"}]}


@pytest.mark.parametrize(
    ("script", "options", "variable", "words"),
    [
        (None, {"root_via": "none"}, "pve_root_via", "device passthrough"),
        ("echo '403 Permission check failed (user != root@pam)' >&2; exit 255", {}, "pve_api_user", "403"),
        ("sleep 30", {"api_timeout": 1, "task_timeout": 1}, HOST, "no answer"),
        ("echo 'ipcc_send_rec failed: Connection refused' >&2; exit 255", {}, VARIABLE, "ipcc_send_rec"),
    ],
    ids=["none", "refused", "hangs", "no cluster"],
)
def test_the_root_way_fails(api, run, table, pvesh, script, options, variable, words):
    vmid, state, declared = prepare(api, run, "config")
    before = api.configuration(vmid)
    pvesh(script)
    result = run(vmid, state, {"root_via": "local", **options}, **declared, **DEVICE)
    assert [problem["variable"] for problem in result["problems"]] == [variable], result["msg"]
    assert words in result["msg"]
    if options.get("root_via") == "none":
        assert api.configuration(vmid) == before
    else:
        # The ordinary half is done, and the message says so.
        assert "Until then, of container 911: config: memory" in result["msg"]
        assert result["changed"] is True
    pvesh()
    assert not run(vmid, state, {"root_via": "local"}, **declared, **DEVICE).get("failed")
    assert run(vmid, state, {"root_via": "local"}, **declared, **DEVICE)["changed"] is False
    assert run(vmid, state, {"root_via": "local"}, devices=[], **declared)["changed"] is True
    table.append((f"pvesh: {words}", summary(result)))


def test_the_node_itself_as_identity_from_nothing_to_nothing(api, run, pvesh, table):
    vmid, state, declared = prepare(api, run, "create")
    pvesh()
    node = {"api_via": "node", "root_via": "local", "api_user": None, "api_token_id": None, "api_token_secret": None,
            "api_port": 1}  # fmt: skip
    first = run(vmid, "started", node, **declared, **DEVICE)
    assert not first.get("failed"), first["msg"]
    assert (first["status"], first["steps"]) == ("running", [first["steps"][0], "start"])
    assert run(vmid, "started", node, **declared, **DEVICE)["changed"] is False
    assert run(vmid, "absent", node)["status"] == "absent"
    refused = run(vmid, state, node, password="not on a command line")
    assert refused["problems"][0]["variable"] == "container.password"
    table.append(("no credentials: pvesh on the node", summary(first)))


# ------------------------------------------------------------ TCP and TLS


@contextlib.contextmanager
def server(behave, host="127.0.0.1"):
    """A TCP server that hands each connection to ``behave``; its port."""
    listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _peer = listening.accept()
                with contextlib.suppress(OSError), connection:
                    behave(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(5)


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def silent(connection):
    while connection.recv(4096):
        pass


def plain(connection):
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def tls(certificate, key, reply=b""):
    """A server that speaks TLS with this certificate and answers so."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def behave(connection):
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(4096)
            secure.sendall(reply)

    return behave


PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>"


def certificate(folder, names, days):
    """A self-signed certificate for names and addresses, valid for so many days from a week ago: (file, key file)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    begin = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=7)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(begin).not_valid_after(begin + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name)) for name in names]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                           serialization.NoEncryption()))  # fmt: skip
    return files


@pytest.mark.parametrize(
    ("name", "behave", "words"),
    [
        ("nobody listens", None, "refused"),
        ("it accepts and says nothing", silent, "no answer in time"),
        ("it resets every connection", reset, "at https"),
        ("it closes every connection", lambda connection: None, "at https"),
        ("it speaks HTTP without TLS", plain, "does not speak TLS"),
    ],
)
def test_what_listens_is_no_api(run, table, name, behave, words):
    if behave is None:
        result = run(VMID, "present", {"api_port": free_port(), "api_timeout": 1})
    else:
        with server(behave) as port:
            result = run(VMID, "present", {"api_port": port, "api_timeout": 1})
    assert [problem["variable"] for problem in result["problems"]] == [HOST], result["msg"]
    assert words in result["msg"]
    table.append((name, summary(result)))


def test_a_name_that_does_not_resolve(run, table):
    result = run(VMID, "present", {"api_host": "nowhere.invalid"})
    assert [problem["variable"] for problem in result["problems"]] == [HOST]
    table.append(("the name does not resolve", summary(result)))


@pytest.mark.parametrize(
    ("name", "host", "names", "days", "options", "variable"),
    [
        ("the certificate is of another authority", "127.0.0.1", ["127.0.0.1"], 30, {}, "pve_api_ca_path"),
        ("the certificate is for another name", "127.0.0.2", ["127.0.0.1"], 30, {"trusted": True}, "pve_api_ca_path"),
        ("the certificate has expired", "127.0.0.1", ["127.0.0.1"], 3, {"trusted": True}, "pve_api_ca_path"),
        ("the certificate has another fingerprint", "127.0.0.1", ["127.0.0.1"], 30, {"api_fingerprint": "AB" * 32}, "pve_api_fingerprint"),
        ("a trusted server is no Proxmox", "127.0.0.1", ["127.0.0.1"], 30, {"trusted": True}, HOST),
        ("a trusted server by its IPv6 address is no Proxmox", "::1", ["::1"], 30, {"trusted": True}, HOST),
    ],
)  # fmt: skip
def test_a_server_that_is_not_the_expected_one_gets_no_token(
    run, api, table, tmp_path, name, host, names, days, options, variable
):
    files = certificate(tmp_path, names, days)
    options = {"api_ca_path": str(files[0] if options.get("trusted") else api.ca), **options}
    options.pop("trusted", None)
    if "api_fingerprint" in options:
        options["api_ca_path"] = None
    heard = []
    with server(lambda connection: heard.append(tls(*files, PAGE)(connection)), host) as port:
        result = run(VMID, "present", {"api_host": host, "api_port": port, **options})
    assert [problem["variable"] for problem in result["problems"]] == [variable], result["msg"]
    # Where the certificate was not the expected one, the request was never sent.
    assert bool(heard) is (variable == HOST)
    table.append((name, summary(result)))


@pytest.mark.parametrize("credential", ["token", "password"])
def test_a_fingerprint_is_trust_enough(run, api, table, credential):
    vmid, state, declared = prepare(api, run, "config")
    certificate = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", api.port)))
    digits = hashlib.sha256(certificate).hexdigest().upper()
    shown = ":".join(digits[at : at + 2] for at in range(0, 64, 2))
    by = {} if credential == "token" else {"api_token_id": None, "api_token_secret": None, "api_password": api.password}
    result = run(vmid, state, {"api_ca_path": None, "api_fingerprint": shown, **by}, **declared)
    assert result["changed"] is True
    table.append((f"no CA file, the right fingerprint, by {credential}", summary(result)))


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"])
def test_variables_of_the_environment_never_override_an_explicit_choice(
    run, api, table, tmp_path, variable, monkeypatch
):
    """Neither to trust less than was said, nor to trust more; the host is no loopback name, which requests treats alike."""
    files = certificate(tmp_path, ["127.0.0.1"], 30)
    monkeypatch.setenv(variable, str(files[0]))
    assert run(VMID, "present", {"api_ca_path": str(api.ca)}, disk_gib=None, check=True).get("failed") is None
    pinned = {"api_ca_path": None, "api_fingerprint": "AB" * 32}
    with server(tls(*files, PAGE)) as port:
        by_file = run(VMID, "present", {"api_port": port, "api_ca_path": str(api.ca)})
        by_print = run(VMID, "present", {"api_port": port, **pinned})
    assert by_file["problems"][0]["variable"] == "pve_api_ca_path"
    assert by_print["problems"][0]["variable"] == "pve_api_fingerprint"
    table.append((f"{variable} names another authority", summary(by_file)))


# ------------------------------------------------------------ preflight


@pytest.mark.parametrize(
    ("faults", "variable"),
    [
        ([{"fault": "storage", "avail": 10**8}], "container.disk_gib"),
        ([{"fault": "storage", "active": False}], "container.storage"),
        ([{"fault": "node", "online": False}], "pve_node"),
        ([read("drop", "/nodes", times=9)], HOST),
        ([read("page", "/permissions")], HOST),
    ],
)
def test_preflight_finds_it_before(api, run, table, faults, variable):
    prepare(api, run, "create")
    for fault in faults:
        api.fault(**fault)
    try:
        result = run(OTHER, None, {"api_user": "root@pam"}, module=pve_preflight)
    finally:
        api.fault("heal")
    assert variable in [problem["variable"] for problem in result["problems"]], result["msg"]
    assert run(OTHER, None, module=pve_preflight).get("failed") is None
    table.append((f"preflight: {faults[0]['fault']} {faults[0].get('suffix', '')}", summary(result)))


# ------------------------------------------------------------ what is not ours


def test_a_container_that_is_not_ours_keeps_its_configuration_to_the_byte(api, run, table):
    vmid, _state, _declared = prepare(api, run, "stop")
    path = f"nodes/{api.node}/lxc/{vmid}/config"
    api.call("PUT", path, tags="prod", hostname="precious", description="hands off")
    try:
        before, seen = api.configuration(vmid), len(api.log())
        tried = [
            *[(state, {}) for state in ("present", "started", "stopped", "absent")],
            ("present", {"memory": 300, "networks": []}),
            ("started", {"disk_gib": grown(api)}),
            ("started", {"nameserver": "192.0.2.53"}),
            ("present", {"tags": ["launchproof"]}),
        ]
        for check in (False, True):
            for state, declared in tried:
                result = run(vmid, state, check=check, **declared)
                assert [problem["variable"] for problem in result["problems"]] == ["container.vmid"]
                assert "precious" in result["msg"]
        refused = run(vmid, None, module=pve_preflight)
        assert "precious" in refused["msg"]
        # Only its removal can be asked for, in so many words.
        kept = run(vmid, "present", {"unmarked_ok": True}, memory=300)
        assert "precious" in kept["msg"]
        assert changes(api.log()[seen:]) == []
        assert (api.configuration(vmid), api.runs(vmid)) == (before, True)
    finally:
        api.call("PUT", path, tags="launchproof", delete="description")
    table.append(("a container that is not ours, tried in 17 ways", summary(result)))


def test_what_proxmox_writes_otherwise_is_no_change(api, run, table):
    prepare(api, run, "config")
    lists = {"nameserver": "192.0.2.53,192.0.2.54", "searchdomain": "example.org;example.net"}
    first = run(VMID, "present", disk_gib=None, **lists)
    assert first["changed"] is True
    assert b"nameserver: 192.0.2.53 192.0.2.54\n" in api.configuration(VMID)
    again = run(VMID, "present", disk_gib=None, **lists)
    assert (again.get("failed"), again["changed"]) == (None, False)
    run(VMID, "present", disk_gib=None, nameserver="", searchdomain="")
    table.append(("name servers separated by commas", summary(again)))


def test_one_that_is_not_ours_is_removed_when_that_is_said(api, run, table):
    vmid, _state, _declared = prepare(api, run, "destroy")
    api.call("PUT", f"nodes/{api.node}/lxc/{vmid}/config", tags="prod")
    assert run(vmid, "absent")["failed"] is True
    assert run(vmid, "absent", {"unmarked_ok": True}, check=True)["changed"] is True
    assert api.configuration(vmid) is not None
    assert run(vmid, "absent", {"unmarked_ok": True})["status"] == "absent"
    assert api.configuration(vmid) is None
