# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""pve_container and pve_preflight against fakepve: an API that answers as Proxmox does, with the rights it checks."""

from __future__ import annotations

import json

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import options
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.lifecycle import Lifecycle
from ansible_collections.dflash.launchproof.plugins.modules import pve_container, pve_preflight

from tests.support.module import run_action, run_module

TEMPLATE = "local:vztmpl/debian-12.tar.zst"
ETH0 = {"name": "eth0", "bridge": "vmbr0", "ip": "192.0.2.50/24", "gw": "192.0.2.1"}
DECLARED = {
    "vmid": 901, "hostname": "trainer", "template": TEMPLATE, "storage": "local-lvm", "disk_gib": 8, "cores": 2,
    "memory": 1024, "features": {"nesting": True}, "networks": [ETH0], "tags": ["Gpu"],
}  # fmt: skip
#: What a token of an ordinary user needs for DECLARED, as preflight itself names it.
RIGHTS = [
    ("/vms/901", ["VM.Allocate", "VM.Audit", "VM.PowerMgmt", "VM.Config.Disk", "VM.Config.CPU", "VM.Config.Memory",
                  "VM.Config.Network", "VM.Config.Options"]),
    ("/storage/local-lvm", ["Datastore.AllocateSpace"]),
    ("/storage/local", ["Datastore.Audit"]),
    ("/sdn/zones/localnetwork/vmbr0", ["SDN.Use"]),
]  # fmt: skip


@pytest.fixture
def node(fakepve):
    """fakepve as a node with a template, a token of a user with just the rights that are needed, and strict rules."""
    fakepve.apitokens["deploy@pve!t"] = "s3cret-token"
    fakepve.apitokens["root@pam!t"] = "s3cret-root"
    fakepve.acl = {"deploy@pve!t": list(RIGHTS)}
    fakepve.storages["local"]["volumes"] = {
        "vztmpl/debian-12.tar.zst": {"content": "vztmpl", "format": "tzst", "size": 1}
    }
    return fakepve


@pytest.fixture(params=[run_module, run_action], ids=["module", "action"])
def run(request, node, fakepve_cafile, capsys):
    """``run(module, container, **options)`` runs a module as Ansible would and returns its result."""

    def execute(module, container, check=False, **options):
        token = {} if "api_password" in options else {"api_token_id": "t", "api_token_secret": "s3cret-token"}
        arguments = {
            "api_host": node.host, "api_port": node.port, "api_user": "deploy@pve", "api_ca_path": fakepve_cafile,
            "node": "pve1", "container": container, "lock_timeout": 1, **token, **options,
        }  # fmt: skip
        return request.param(module, arguments, capsys, check=check, secrets=("s3cret",))

    return execute


def ensure(run, container=None, **options):
    return run(pve_container, {**DECLARED, **(container or {})}, **options)


def changes_sent(node):
    return [f"{method} {path}" for method, path, _body in node.requests if method != "GET"]


def test_created_started_and_then_left_alone(run, node):
    first = ensure(run)
    assert first["changed"] is True
    assert first["status"] == "running"
    assert first["addresses"] == {"eth0": ["192.0.2.50"]}
    assert [step.partition(":")[0] for step in first["steps"]] == ["create", "start"]
    assert len(first["upids"]) == 2
    assert first["diff"]["before"] == {"state": "absent"}
    assert first["diff"]["after"]["tags"] == "gpu;launchproof"
    before = dict(node.ct(901).config)
    node.requests.clear()
    second = ensure(run)
    assert second["changed"] is False
    assert len(second["api_calls"]) <= 3
    assert changes_sent(node) == []
    assert node.ct(901).config == before
    assert second["diff"]["before"] == second["diff"]["after"]


def test_check_mode_predicts_and_sends_nothing(run, node):
    predicted = ensure(run, check=True)
    assert (predicted["changed"], predicted["status"], predicted["runs_now"]) == (True, "running", False)
    assert changes_sent(node) == []
    done = ensure(run)
    assert predicted["steps"] == done["steps"]
    again = ensure(run, check=True)
    assert (again["changed"], again["runs_now"]) == (False, True)


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        ({"memory": 2048}, "memory", "2048"),
        ({"hostname": "other"}, "hostname", "other"),
        ({"onboot": True}, "onboot", "1"),
        ({"tags": []}, "tags", "launchproof"),
        ({"description": "a note"}, "description", "a note"),
        ({"disk_gib": 9}, "rootfs", "local-lvm:vm-901-disk-0,size=9G"),
    ],
)
def test_a_change_is_made_once(run, node, change, key, expected):
    ensure(run)
    predicted = ensure(run, change, check=True)
    done = ensure(run, change)
    assert (predicted["changed"], predicted["steps"]) == (True, done["steps"])
    assert done["diff"]["after"][key] == expected
    assert str(node.ct(901).config[key]).rstrip("\n") == expected
    assert ensure(run, change)["changed"] is False


def test_a_mac_address_survives_a_change_of_its_interface(run, node):
    ensure(run)
    mac = node.ct(901).config["net0"].partition("hwaddr=")[2].partition(",")[0]
    changed = {"networks": [{**ETH0, "tag": 7}]}
    assert ensure(run, changed)["changed"] is True
    assert f"hwaddr={mac}" in node.ct(901).config["net0"]
    assert "tag=7" in node.ct(901).config["net0"]
    ensure(run)
    assert "tag=" not in node.ct(901).config["net0"]


def test_what_stays_pending_is_applied_by_one_restart(run, node):
    ensure(run)
    change = {"nameserver": "192.0.2.53"}
    refused = ensure(run, change, restart="never")
    assert refused["failed"] is True
    assert refused["changed"] is True
    assert refused["problems"][0]["variable"] == "container_restart"
    assert "nameserver" in refused["msg"]
    assert ensure(run, change, restart="never", check=True)["problems"] == refused["problems"]
    predicted = ensure(run, change, check=True)
    assert predicted["steps"] == ["reboot"]
    done = ensure(run, change)
    assert (done["steps"], done["pending"]) == (["reboot"], [])
    assert node.ct(901).config["nameserver"] == "192.0.2.53"
    assert ensure(run, change)["changed"] is False


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"devices": [{"path": "/dev/null", "mode": "0666"}]}, "dev0"),
        ({"mounts": [{"target": "/srv", "source": "/srv"}]}, "mp0"),
        ({"features": {"nesting": True, "keyctl": True}}, "features"),
    ],
)
def test_root_only_keys_without_a_way_fail_before_anything(run, node, change, key):
    result = ensure(run, change)
    assert result["failed"] is True
    assert changes_sent(node) == []
    assert result["problems"][0]["variable"] == "pve_root_via"
    assert key in result["msg"]
    # A token of root@pam is not root@pam.
    again = ensure(run, change, api_user="root@pam", api_token_secret="s3cret-root")
    assert again["problems"][0]["variable"] == "pve_root_via"
    assert node.ct(901) is None


def test_root_only_keys_by_the_ticket_of_root(run, node):
    change = {"devices": [{"path": "/dev/null", "mode": "0666"}], "mounts": [{"target": "/srv", "source": "/srv"}]}
    options = {"api_user": "root@pam", "api_password": "secret"}
    done = run(pve_container, {**DECLARED, **change}, **options)
    assert done["changed"] is True
    assert node.ct(901).config["dev0"] == "/dev/null,mode=0666"
    assert run(pve_container, {**DECLARED, **change}, **options)["changed"] is False
    removed = run(pve_container, {**DECLARED, "devices": []}, **options)
    assert removed["changed"] is True
    assert "dev0" not in node.ct(901).config


DATA = {"target": "/data", "storage": "local-lvm", "size_gib": 1}


def test_a_volume_that_is_no_longer_declared_is_detached_with_a_warning(run, node, monkeypatch):
    warned = []
    # Within one process, Ansible shows warnings on the screen instead of returning them.
    monkeypatch.setattr(options.Module, "warn", lambda _self, text: warned.append(text))
    ensure(run, {"mounts": [DATA]}, state="present")
    assert ensure(run, {"mounts": [{**DATA, "target": "/data/"}]}, state="present")["changed"] is False
    assert warned == []
    for predict in (True, False):
        warned += ensure(run, {"mounts": []}, state="present", check=predict).get("warnings", [])
        (warning,) = warned
        assert "'local-lvm:vm-901-disk-1' of container 901, mounted at '/data'," in warning
        warned.clear()
    assert node.ct(901).config["unused0"] == "local-lvm:vm-901-disk-1"
    assert ensure(run, {"mounts": []}, state="present")["changed"] is False
    assert warned == []


def test_a_volume_that_waits_to_be_made_is_the_declared_one(run, node):
    """Proxmox shows it as it was asked for, without a size, until the container's next start."""
    ensure(run, state="present")
    node.ct(901).config["mp0"] = "local-lvm:1,mp=/data"
    assert ensure(run, {"mounts": [DATA]}, state="present")["changed"] is False
    for asked in ("local-lvm:1", "local-lvm:0.5"):
        node.ct(901).config["mp0"] = f"{asked},mp=/data"
        done = ensure(run, {"mounts": [{**DATA, "size_gib": 2}]}, state="present", check=True)
        assert done["steps"] == ["config: mp0"]
    gone = ensure(run, {"mounts": []}, state="present", check=True)
    assert (gone["steps"], gone.get("warnings", [])) == (["config: without mp0"], [])


def test_a_renamed_target_does_not_swap_a_volume_for_an_empty_one(run, node):
    ensure(run, {"mounts": [DATA]}, state="present")
    before = dict(node.ct(901).config)
    moved = {"mounts": [{**DATA, "target": "/srv/data"}]}
    node.requests.clear()
    for result in (
        ensure(run, moved, state="present"),
        ensure(run, moved, state="present", check=True),
        check(run, moved),
    ):
        (problem,) = result["problems"]
        assert problem["variable"] == "container.mounts[/srv/data].target"
        assert "local-lvm:vm-901-disk-1" in problem["problem"]
    assert changes_sent(node) == []
    # The way that the message names.
    words = problem["fix"].partition("pct set 901 --mp0 ")[2].partition("`")[0]
    node.ct(901).config["mp0"] = words
    assert ensure(run, moved, state="present")["changed"] is False
    # And the other: away in a run of its own.
    node.ct(901).config.update(before)
    ensure(run, {"mounts": []}, state="present")
    ensure(run, moved, state="present")
    assert node.ct(901).config["unused0"] == "local-lvm:vm-901-disk-1"
    assert "vm-901-disk-2" in node.ct(901).config["mp0"]


@pytest.mark.parametrize("state", ["present", "started", "stopped", "absent"])
def test_a_container_that_is_not_ours_is_left_alone(run, node, state):
    node.add_ct(901, "precious", status="running", config={"tags": "prod"})
    before, digest = dict(node.ct(901).config), node.ct(901).digest()
    result = ensure(run, state=state, force=True)
    assert result["failed"] is True
    assert result["problems"][0]["variable"] == "container.vmid"
    assert "precious" in result["msg"]
    assert changes_sent(node) == []
    assert (node.ct(901).config, node.ct(901).digest(), node.ct(901).status) == (before, digest, "running")


def test_a_number_that_a_virtual_machine_has_is_taken(run, node):
    node.add_vm(901, "database")
    node.acl["deploy@pve!t"].append(("/vms", ["VM.Audit"]))
    result = ensure(run)
    assert "database" in result["msg"]
    assert changes_sent(node) == []


def test_absent_does_not_pass_over_a_container_that_another_node_has(run, node):
    """The declaration names the wrong node: that nothing is removed there must not look like a success."""
    node.add_ct(901, "trainer", node="pve2", config={"tags": "launchproof"})
    node.acl["deploy@pve!t"].append(("/vms", ["VM.Audit"]))
    result = ensure(run, state="absent", force=True)
    assert "'trainer' on node 'pve2'" in result["msg"]
    assert changes_sent(node) == []


def test_states(run, node):
    assert ensure(run, state="present")["status"] == "stopped"
    assert ensure(run, state="started")["steps"] == ["start"]
    assert ensure(run, state="present")["changed"] is False
    assert ensure(run, state="stopped", check=True)["status"] == "stopped"
    assert node.ct(901).status == "running"
    assert ensure(run, state="stopped")["steps"][0].startswith("shutdown")
    assert ensure(run, state="stopped")["changed"] is False


def test_absent_takes_a_word_for_a_running_container(run, node):
    ensure(run)
    refused = run(pve_container, {"vmid": 901}, state="absent")
    assert "force" in refused["msg"]
    assert node.ct(901).status == "running"
    assert run(pve_container, {"vmid": 901}, state="absent", force=True, check=True)["changed"] is True
    assert node.ct(901) is not None
    done = run(pve_container, {"vmid": 901}, state="absent", force=True)
    assert (done["status"], done["diff"]["after"]) == ("absent", {"state": "absent"})
    assert node.ct(901) is None
    assert run(pve_container, {"vmid": 901}, state="absent")["changed"] is False


def test_a_protected_container_stays(run, node):
    ensure(run, {"protection": True})
    assert "protected" in run(pve_container, {"vmid": 901}, state="absent", force=True)["msg"]
    assert node.ct(901).status == "running"


def test_what_a_new_container_needs_is_named_all_at_once(run, node):
    result = run(pve_container, {"vmid": 901, "hostname": "x"})
    assert [item["variable"] for item in result["problems"]] == [
        "container.template", "container.storage", "container.disk_gib",
    ]  # fmt: skip
    assert changes_sent(node) == []


def test_a_failed_task_is_told_with_its_log(run, node):
    ensure(run, state="present")
    node.ct(901).start_error = "startup for container '901' failed"
    result = ensure(run)
    assert result["failed"] is True
    assert "startup for container '901' failed" in result["msg"]


def test_a_lock_is_named_when_it_does_not_go_away(run, node):
    ensure(run)
    node.ct(901).lock = "backup"
    result = ensure(run, {"memory": 2048})
    assert "CT is locked (backup)" in result["msg"]
    assert ensure(run)["changed"] is False


@pytest.mark.peers("Telmate 677", "Telmate 1069")
def test_a_locked_container_is_waited_for(run, node):
    ensure(run)
    node.fail("PUT", "/config", 500, "CT is locked (backup)", times=1)
    assert ensure(run, {"memory": 2048}, lock_timeout=5)["changed"] is True


def test_a_change_in_between_is_looked_at_once_more(run, node):
    ensure(run)
    node.fail(
        "PUT", "/config", 500, "detected modified configuration - file changed by other user? Try again.", times=1
    )
    assert ensure(run, {"memory": 2048})["changed"] is True
    assert node.ct(901).config["memory"] == 2048
    node.fail(
        "PUT", "/config", 500, "detected modified configuration - file changed by other user? Try again.", times=2
    )
    assert "detected modified configuration" in ensure(run, {"memory": 1024})["msg"]


@pytest.mark.parametrize(("path", "because"), [
    ("/vms/901", "creating container 901"), ("/storage/local-lvm", "rootfs on storage local-lvm"),
    ("/storage/local", "reading template"), ("/sdn/zones/localnetwork/vmbr0", "net0 on bridge vmbr0"),
])  # fmt: skip
def test_a_missing_right_stops_a_creation_before_it_begins(run, node, path, because):
    node.acl["deploy@pve!t"] = [entry for entry in RIGHTS if entry[0] != path]
    for state in ("present", "started"):
        result = ensure(run, state=state)
        assert because in result["msg"]
        assert f"pveum acl modify {path} --users 'deploy@pve' --tokens 'deploy@pve!t' --roles PVE" in result["msg"]
    assert ensure(run, check=True)["failed"] is True
    assert changes_sent(node) == []


def test_rights_on_a_pool_do_for_a_container_that_is_put_into_it(run, node):
    node.pools["gpu"] = set()
    node.acl["deploy@pve!t"] = [("/pool/gpu", RIGHTS[0][1]), *RIGHTS[1:]]
    lacking = ensure(run)
    assert "on /vms/901 it lacks VM.Allocate for creating container 901, VM.Audit for" in lacking["msg"]
    assert ensure(run, {"pool": "gpu"}, check=True)["changed"] is True
    done = ensure(run, {"pool": "gpu"})
    assert done["status"] == "running"
    assert node.pools["gpu"] == {901}
    assert ensure(run, {"pool": "gpu"})["changed"] is False
    assert ensure(run, {"pool": "gpu", "memory": 2048})["changed"] is True
    node.acl["deploy@pve!t"][0] = ("/pool/gpu", ["VM.Audit"])
    lacking = ensure(run, {"pool": "gpu", "memory": 4096})
    assert "on /vms/901 it lacks VM.Config.Memory for memory" in lacking["msg"]


def test_rights_on_a_pool_that_a_container_is_not_in_do_not(run, node):
    ensure(run)
    node.pools["gpu"] = set()
    node.acl["deploy@pve!t"] = [("/pool/gpu", RIGHTS[0][1]), ("/vms/901", ["VM.Audit"]), *RIGHTS[1:]]
    before, change = dict(node.ct(901).config), {"pool": "gpu", "memory": 2048}
    node.requests.clear()
    for result in (ensure(run, change), check(run, change)):
        assert "on /vms/901 it lacks VM." in result["msg"]
        assert "VM.Config.Memory for memory" in result["msg"]
        assert "pveum acl modify /vms/901 --users" in result["msg"]
    assert (changes_sent(node), node.ct(901).config) == ([], before)


def test_rights_on_vlans_do_without_one_on_their_bridge(run, node):
    bridge = "/sdn/zones/localnetwork/vmbr0"
    node.acl["deploy@pve!t"] = [*RIGHTS[:-1], (f"{bridge}/7", ["SDN.Use"]), (f"{bridge}/10", ["SDN.Use"])]
    tagged = {"networks": [{**ETH0, "tag": 7, "trunks": [10]}]}
    assert check(run, tagged).get("failed") is None
    assert ensure(run, tagged)["changed"] is True
    node.requests.clear()
    for network, path in (
        ({**ETH0, "tag": 8}, f"{bridge}/8"),
        ({**ETH0, "trunks": [7, 30]}, f"{bridge}/30"),
        (ETH0, bridge),
    ):
        result = ensure(run, {"networks": [network]})
        assert f"pveum acl modify {path} --users" in result["msg"]
    # What an interface leaves is asked for, too.
    node.acl["deploy@pve!t"] = [*RIGHTS[:-1], (f"{bridge}/8", ["SDN.Use"])]
    result = ensure(run, {"networks": [{**ETH0, "tag": 8}]})
    assert f"pveum acl modify {bridge}/7 --users" in result["msg"]
    assert f"pveum acl modify {bridge}/10 --users" in result["msg"]
    assert changes_sent(node) == []


def test_rights_on_a_vnet_are_looked_for_in_its_zone(run, node):
    node.zones["vmbr0"] = "tenants"
    node.acl["deploy@pve!t"] = [*RIGHTS[:-1], ("/sdn/zones/tenants/vmbr0", ["SDN.Use"])]
    assert ensure(run)["changed"] is True


def test_a_container_that_may_not_be_looked_at(run, node):
    """A 403 says that there is something; whoever may look at nothing is told which right that takes."""
    node.add_ct(901, "precious", status="running", config={"tags": "launchproof"})
    node.acl["deploy@pve!t"] = RIGHTS[1:]
    for state in ("present", "absent"):
        result = ensure(run, state=state)
        assert "VM.Audit" in result["msg"]
        assert (
            "pveum acl modify /vms/901 --users 'deploy@pve' --tokens 'deploy@pve!t' --roles PVEVMAdmin" in result["msg"]
        )
    assert changes_sent(node) == []


def test_a_number_of_a_guest_that_may_not_be_seen_is_taken_all_the_same(run, node):
    node.add_vm(901, "database")
    node.acl["deploy@pve!t"] = RIGHTS
    result = ensure(run)
    assert result["problems"][0]["variable"] == "container.vmid"
    assert changes_sent(node) == []


def test_the_change_is_tied_to_what_was_seen(run, node, monkeypatch):
    """Somebody else's change between the look and the change is a conflict, even where the digest is asked for later."""
    ensure(run)
    node.requests.clear()
    usual, looks = node._status, []

    def meanwhile(ct):
        # The status is read after the configuration.
        if not looks:
            ct.config["cpuunits"] = 77
        looks.append(1)
        return usual(ct)

    monkeypatch.setattr(node, "_status", meanwhile)
    assert ensure(run, {"memory": 2048})["changed"] is True
    assert len(looks) == 3  # before, again, and read back
    assert len(changes_sent(node)) == 1
    assert (node.ct(901).config["memory"], node.ct(901).config["cpuunits"]) == (2048, 77)


@pytest.mark.parametrize(("taken", "ends"), [({"cpuunits": 77}, "done"), ({"tags": "prod"}, "left")])
def test_each_step_is_tied_to_what_was_seen_but_for_the_steps_before_it(run, node, monkeypatch, taken, ends):
    """Somebody else's change between two steps is looked at, and one that takes the container away ends the run."""
    ensure(run, state="present")
    usual = Lifecycle.apply

    def then_another(life, step):
        usual(life, step)
        if step.action == "config":
            node.ct(901).config |= taken

    monkeypatch.setattr(Lifecycle, "apply", then_another)
    done = ensure(run, {"disk_gib": 9, "memory": 2048}, state="present")
    config = node.ct(901).config
    assert {key: config[key] for key in taken} == taken
    if ends == "done":
        assert done["steps"] == ["config: memory", "resize: disk, size"]
        assert done["api_calls"].count("GET nodes/pve1/lxc/901/pending") == 3, "before, again, and read back"
        assert "size=9G" in config["rootfs"]
    else:
        assert "does not carry the tag 'launchproof' and is left alone" in done["msg"]
        assert "Until then, of container 901: config: memory." in done["msg"]
        assert "size=8G" in config["rootfs"]


def test_several_steps_of_one_run_are_no_conflict(run, node):
    ensure(run)
    node.ct(901).config["lxc"] = [["lxc.mount.entry", "proc proc proc"]]
    grown = ensure(run, {"disk_gib": 9, "memory": 2048, "cores": 4})
    assert [step.partition(":")[0] for step in grown["steps"]] == ["config", "resize"]
    assert grown["api_calls"].count("GET nodes/pve1/lxc/901/pending") == 2, "before, and read back"


def test_login_is_set_at_creation_and_another_one_later_is_refused(run, node):
    login = {"ssh_public_keys": ["ssh-ed25519 AAAAC3Nz me"], "password": "first-pw", "description": "a note"}
    ensure(run, login)
    notes = node.ct(901).config["description"]
    assert notes.startswith("a note\n<!-- launchproof: created with ssh-keys=")
    assert "first-pw" not in notes
    assert ensure(run, login)["changed"] is False
    for other, variable in (
        ({"ssh_public_keys": ["ssh-rsa AAAAB3Nz"]}, "ssh_public_keys"),
        ({"password": "second-pw"}, "password"),
    ):
        result = ensure(run, {**login, **other})
        assert [problem["variable"] for problem in result["problems"]] == [f"container.{variable}"]
        assert "second-pw" not in json.dumps(result)
        assert variable in [item["variable"].rpartition(".")[2] for item in check(run, {**login, **other})["problems"]]
    changed = ensure(run, {**login, "description": "another note"})
    assert changed["changed"] is True
    assert node.ct(901).config["description"].startswith("another note\n<!-- launchproof")


def test_a_bad_value_is_named_by_its_option(run, node):
    result = ensure(run, {"cores": 100000})
    assert result["problems"][0]["variable"] == "container.cores"
    assert result["problems"][0]["value"] == 100000
    assert node.requests == []


def test_a_value_that_only_the_api_refuses_is_named_by_its_option(run, node):
    template = f"local:vztmpl/{'x' * 250}"
    result = ensure(run, {"template": template})
    assert result["problems"][0]["variable"] == "container.template"
    assert result["problems"][0]["value"] == template
    assert len(changes_sent(node)) == 1
    assert node.ct(901) is None


def test_a_change_that_is_refused_leaves_no_volume_grown(run, node):
    ensure(run)
    node.fail("PUT", "/config", 400, "Parameter verification failed.", times=1)
    assert ensure(run, {"memory": 2048, "disk_gib": 9})["changed"] is False
    assert "size=8G" in node.ct(901).config["rootfs"]
    done = ensure(run, {"memory": 2048, "disk_gib": 9})
    assert [step.partition(":")[0] for step in done["steps"]] == ["config", "resize"]


def check(run, container=None, **options):
    return run(pve_preflight, {**DECLARED, **(container or {})}, **options)


def variables(result):
    return [item["variable"] for item in result["problems"]]


def test_preflight_passes_with_just_the_rights_it_names(run, node):
    result = check(run)
    assert result.get("failed") is None
    assert result["changed"] is False
    assert {method for method, _path, _body in node.requests} == {"GET"}
    assert ensure(run)["changed"] is True
    assert check(run).get("failed") is None


@pytest.mark.parametrize(
    ("container", "options", "variable", "words"),
    [
        ({"template": "local:vztmpl/debian-13.tar.zst"}, {}, "container.template", TEMPLATE),
        ({"template": None}, {}, "container.template", "needs it"),
        ({"storage": "nowhere"}, {}, "container.storage", "local-lvm"),
        ({"storage": "local"}, {}, "container.storage", "rootdir"),
        ({"disk_gib": 100000}, {}, "container.disk_gib", "GiB free"),
        ({"networks": [{**ETH0, "bridge": "vmbr9"}]}, {}, "container.networks[].bridge", "vmbr0"),
        ({}, {"node": "pve9"}, "pve_node", "Choose one of pve1"),
        ({}, {"api_token_secret": "s3cret-wrong"}, "pve_api_token_secret", "deploy@pve!t"),
        ({}, {"api_port": 1}, "pve_api_host", "127.0.0.1:1"),
        ({}, {"api_ca_path": "/nonexistent.pem"}, "pve_api_ca_path", "no such file"),
        ({}, {"api_ca_path": "/etc/ssl/certs/ca-certificates.crt"}, "pve_api_ca_path", "not trusted"),
        ({"devices": [{"path": "/dev/null"}]}, {}, "pve_root_via", "dev0"),
        ({"devices": [{"path": "/dev/absent0"}]}, {"root_via": "local"}, "container.devices[].path", "/dev/absent0"),
        ({"hostname": "a_b"}, {}, "container.hostname", "a_b"),
        ({"swap": -1}, {}, "container.swap", "at least 0"),
        ({"nameserver": "nonsense"}, {}, "container.nameserver", "nonsense"),
        ({"networks": [{**ETH0, "bridge": "a,b"}]}, {}, "container.networks[eth0].bridge", "a,b"),
        ({"networks": [{**ETH0, "gw": ""}]}, {}, "container.networks[eth0].gw", "IPv4"),
    ],
)
def test_preflight_names_variable_value_and_fix(run, node, container, options, variable, words):
    result = check(run, container, **options)
    assert result["failed"] is True
    assert variable in variables(result)
    assert words in result["msg"]
    assert all(item["fix"] for item in result["problems"])
    assert {method for method, _path, _body in node.requests} <= {"GET"}


def test_preflight_finds_all_problems_at_once_and_calls_them_as_the_user_does(run):
    container = {"template": "local:vztmpl/x", "storage": "nowhere", "hostname": "a_b", "mounts": [{"target": "/d"}],
                 "networks": [{**ETH0, "bridge": "br9"}]}  # fmt: skip
    result = check(run, container, declared_as="launchproof_container")
    assert sorted(item["variable"] for item in result["problems"]) == [
        "launchproof_container.hostname", "launchproof_container.mounts[/d]", "launchproof_container.networks[].bridge",
        "launchproof_container.storage", "launchproof_container.template", "pve_api_user", "pve_api_user",
    ]  # fmt: skip
    assert result["msg"].startswith("1. ")


@pytest.mark.peers("Telmate 155", "UdelaRInterior 16")
@pytest.mark.parametrize("index", range(len(RIGHTS)))
def test_preflight_names_a_missing_right_and_the_command_that_grants_it(run, node, index):
    path = RIGHTS[index][0]
    node.acl["deploy@pve!t"] = [*(entry for entry in RIGHTS if entry[0] != path), ("/storage/local", ["Datastore.Audit"]),
                                ("/storage/local-lvm", ["Datastore.Audit"]), ("/vms/901", ["VM.Audit"])]  # fmt: skip
    result = check(run)
    if path == "/storage/local":
        assert result.get("failed") is None
        return
    assert f"pveum acl modify {path} --users 'deploy@pve' --tokens 'deploy@pve!t'" in result["msg"]


@pytest.mark.peers("proxcenter-ui 9")
def test_a_token_without_any_right_is_told_each_that_it_lacks_and_how_a_token_gets_it(run, node):
    node.acl = {}
    said = check(run)["msg"]
    for privilege in RIGHTS[0][1]:
        assert f"{privilege} for " in said
    assert "on /vms/901 it lacks " in said
    assert "--tokens 'deploy@pve!t'" in said


def test_preflight_adds_up_what_one_storage_is_to_hold(run, node):
    node.storages["local-lvm"]["avail"] = 10 * 1024**3
    volumes = [{"target": f"/{name}", "storage": "local-lvm", "size_gib": 8} for name in "ab"]
    # One by one they would fit.
    result = check(run, {"mounts": volumes})
    assert variables(result) == ["container.mounts[/a].size_gib"]
    assert "'local-lvm' has 10.0 GiB free, 16 are needed with the other volumes there (8)" in result["msg"]
    assert check(run, {"disk_gib": 2, "mounts": volumes[:1]}).get("failed") is None
    alone = check(run, {"disk_gib": 11, "mounts": volumes})
    assert variables(alone) == ["container.disk_gib"]
    assert "11 are needed." in alone["msg"]


@pytest.mark.parametrize("way", ["local", "ssh"])
def test_preflight_looks_for_devices_and_sources_of_bind_mounts_on_the_node(run, node, tmp_path, monkeypatch, way):
    # What ssh would do there: the command is its last argument, which a shell runs.
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho >> {tmp_path}/times\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    there = tmp_path / "it's here; $x"
    there.mkdir()
    container = {
        "devices": [{"path": "/dev/null"}, {"path": "/dev/absent0"}],
        "mounts": [
            {"target": "/a", "source": str(there)},
            {"target": "/b", "source": str(tmp_path / "absent")},
            {"target": "/c", "storage": "local-lvm", "size_gib": 1},
        ],
    }
    result = check(run, container, root_via=way)
    assert variables(result) == ["container.devices[].path", "container.mounts[/b].source"]
    assert [item["value"] for item in result["problems"]] == ["/dev/absent0", str(tmp_path / "absent")]
    assert result["unknown"] == []
    assert way == "local" or (tmp_path / "times").read_text() == "\n"
    ssh.write_text("#!/bin/sh\necho 'Host key verification failed.' >&2; exit 255\n")
    if way == "ssh":
        result = check(run, container, root_via=way)
        assert result.get("failed") is None
        assert "Host key verification failed" in result["unknown"][0]
        assert str(there) in result["unknown"][0]


HOOK = "local:snippets/hook.pl"


def test_preflight_looks_for_a_hook_script_as_root(run, node):
    root = {"api_user": "root@pam", "api_password": "secret"}
    node.storages["local"]["content"] = "iso,vztmpl"
    assert "does not hold content 'snippets'" in check(run, {"hookscript": HOOK}, **root)["msg"]
    node.storages["local"]["content"] = "iso,vztmpl,snippets"
    assert "folder snippets" in check(run, {"hookscript": HOOK}, **root)["msg"]
    node.storages["local"]["volumes"]["snippets/other.pl"] = {"content": "snippets", "format": "snippet", "size": 1}
    result = check(run, {"hookscript": HOOK}, **root)
    assert variables(result) == ["container.hookscript"]
    assert "Choose one of local:snippets/other.pl." in result["msg"]
    node.storages["local"]["volumes"]["snippets/hook.pl"] = {"content": "snippets", "format": "snippet", "size": 1}
    assert check(run, {"hookscript": HOOK}, **root).get("failed") is None
    # Whoever is not root@pam is not shown snippets: that it is missing would be a guess.
    result = check(run, {"hookscript": HOOK})
    assert variables(result) == ["pve_root_via"]
    assert HOOK in result["unknown"][0]


@pytest.mark.parametrize(
    ("listed", "wrong", "unknown"),
    [('[{"volid":"local:snippets/hook.pl"}]', [], 0), ("[]", ["container.hookscript"], 0), ("x", [], 1)],
)
def test_preflight_looks_for_a_hook_script_through_pvesh(run, node, tmp_path, monkeypatch, listed, wrong, unknown):
    (tmp_path / "pvesh").write_text(
        f"""#!/bin/sh
case $2 in
  */content) echo '{listed}';;
  *) echo '[{{"storage":"local","content":"snippets"}}]';;
esac
"""
    )
    (tmp_path / "pvesh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    result = check(run, {"hookscript": HOOK}, root_via="local")
    assert [item["variable"] for item in result.get("problems", [])] == wrong
    assert len(result["unknown"]) == unknown
    assert result["api_calls"][-1] == "GET nodes/pve1/storage/local/content"


def test_preflight_sees_a_taken_number(run, node):
    node.add_ct(901, "precious", status="running", config={"tags": "prod"})
    result = check(run)
    assert "container.vmid" in variables(result)
    assert "precious" in result["msg"]


def test_preflight_says_what_it_could_not_look_at(run, node):
    node.fail("GET", "/network", 403, "Permission check failed")
    result = check(run)
    assert result.get("failed") is None
    assert "bridges" in result["unknown"][0]


def test_a_node_that_is_off(run, node):
    node.nodes["pve1"]["online"] = False
    node.nodes["pve2"] = {"online": True}
    assert variables(check(run)) == ["pve_node"]


@pytest.mark.parametrize("module", [pve_container, pve_preflight])
def test_an_api_that_is_not_up_yet_is_a_prediction_in_check_mode_alone(run, module):
    result = run(module, DECLARED, check=True, unavailable_ok=True, api_port=1)
    assert result.get("failed") is None
    assert "127.0.0.1:1" in json.dumps(result)
    assert run(module, DECLARED, check=False, unavailable_ok=True, api_port=1)["failed"] is True
    assert run(module, DECLARED, check=True, api_port=1)["failed"] is True
    if module is pve_container:
        assert (result["predicted"], result["changed"], result["runs_now"]) == (True, True, False)
        assert result["steps"][-1] == "start"
        assert result["diff"]["after"]["memory"] == "1024"
    else:
        assert "everything about the node" in result["unknown"][0]
        assert (result["unavailable"], run(module, DECLARED)["unavailable"]) == (True, False)
    # Only a node that is not there is excused, not one that refuses.
    assert run(module, DECLARED, check=True, unavailable_ok=True, api_token_secret="s3cret-no")["failed"] is True


@pytest.mark.parametrize("module", [pve_container, pve_preflight])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("api_host", "https://pve1"),
        ("api_host", "127.0.0.1:8006"),
        ("api_host", "[::1]"),
        ("api_port", 65536),
        ("api_timeout", 0),
        ("api_token_secret", "s3cret-€"),
        ("api_token_secret", "s3cret\n"),
    ],
)
def test_a_way_that_leads_nowhere_is_named_and_nothing_is_sent(run, node, module, option, value):
    for check in (False, True):
        result = run(module, DECLARED, check=check, unavailable_ok=True, **{option: value})
        assert variables(result) == [f"pve_{option}"]
        assert result["problems"][0]["fix"]
    assert node.requests == []
