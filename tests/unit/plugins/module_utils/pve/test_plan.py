# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import plan
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.config import Container

NET = "name=eth0,bridge=vmbr0,hwaddr=BC:24:11:00:00:01,ip=192.0.2.5/24,type=veth"
LIVE = {
    "hostname": "t", "memory": "512", "cores": "1", "unprivileged": "1", "tags": "launchproof;x", "net0": NET,
    "rootfs": "fast:vm-901-disk-0,size=8G", "features": "nesting=1",
}  # fmt: skip
ETH0 = {"name": "eth0", "bridge": "vmbr0", "ip": "192.0.2.5/24"}


def declared(**options):
    return {"vmid": 901, **options}


def there(running=False, pending=None, **live):
    merged = {**LIVE, **live}
    return Container({key: value for key, value in merged.items() if value is not None}, pending or {}, running, "d1")


def delta(before, **options):
    want, problems = plan.wanted(declared(**options), before)
    assert problems == []
    return plan.changes(want, before)


@pytest.mark.parametrize(
    ("options", "live", "expected"),
    [
        ({}, {}, {}),
        ({"memory": 512, "hostname": "t", "features": {"nesting": True}, "networks": [ETH0], "disk_gib": 8}, {}, {}),
        ({"memory": 1024}, {}, {"memory": "1024"}),
        ({"onboot": False}, {}, {"onboot": "0"}),
        ({"features": {"nesting": True, "keyctl": True}}, {}, {"features": "nesting=1,keyctl=1"}),
        ({"features": {"nesting": False}}, {}, {"features": None}),
        ({"features": {}}, {"features": None}, {}),
        ({"tags": ["x"]}, {}, {}),
        ({"tags": ["y"]}, {}, {"tags": "launchproof;y"}),
        # A MAC address that is not declared stays; a field that is no longer declared goes.
        ({"networks": [ETH0]}, {"net0": NET + ",tag=5"},
         {"net0": "name=eth0,bridge=vmbr0,hwaddr=BC:24:11:00:00:01,ip=192.0.2.5/24,type=veth"}),
        ({"networks": []}, {}, {"net0": None}),
        # Entries keep the number of the live one with the same identity.
        ({"devices": [{"path": "/dev/b"}, {"path": "/dev/c"}]}, {"dev0": "/dev/a", "dev1": "/dev/b"},
         {"dev0": None, "dev2": "/dev/c"}),
        ({"devices": [{"path": "/dev/a", "mode": "0666"}]}, {"dev0": "/dev/a"}, {"dev0": "/dev/a,mode=0666"}),
        ({"mounts": [{"target": "/d", "source": "/srv/d", "read_only": True}]}, {},
         {"mp0": "/srv/d,mp=/d,ro=1"}),
        ({"mounts": [{"target": "/d", "storage": "fast", "size_gib": 4}]}, {}, {"mp0": "fast:4,mp=/d"}),
        ({"mounts": [{"target": "/d", "storage": "fast", "size_gib": 4}]}, {"mp3": "fast:vm-901-disk-1,mp=/d,size=4G"}, {}),
        # A slash at the end of a path says nothing, on either side.
        ({"mounts": [{"target": "/d/", "storage": "fast", "size_gib": 4}]}, {"mp3": "fast:vm-901-disk-1,mp=/d,size=4G"}, {}),
        ({"mounts": [{"target": "/d", "storage": "fast", "size_gib": 4}]}, {"mp3": "fast:vm-901-disk-1,mp=//d/,size=4G"}, {}),
        ({"disk_gib": 9}, {}, {"rootfs": "fast:vm-901-disk-0,size=9G"}),
    ],
)  # fmt: skip
def test_changes(options, live, expected):
    assert delta(there(**live), **options) == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([], {"dev0": None, "dev1": None, "dev10": None}),
        ([{"path": "/dev/a"}], {"dev1": None, "dev10": None}),
        ([{"path": "/dev/a", "mode": "0666"}, {"path": "/dev/b"}],
         {"dev0": "/dev/a,mode=0666", "dev1": None, "dev10": None, "dev2": "/dev/b"}),
    ],
)  # fmt: skip
def test_of_live_entries_that_name_the_same_thing_the_first_is_kept(devices, expected):
    """Proxmox accepts the same device twice, and tells the keys in no order."""
    assert delta(there(dev10="/dev/a,mode=0600", dev1="/dev/a", dev0="/dev/a"), devices=devices) == expected


@pytest.mark.parametrize(
    ("options", "variable", "words"),
    [
        ({"disk_gib": 4}, "container.disk_gib", "cannot shrink"),
        ({"storage": "slow"}, "container.storage", "'fast'"),
        ({"unprivileged": False}, "container.unprivileged", "created"),
        ({"mounts": [{"target": "/d", "storage": "slow", "size_gib": 4}]}, "container.mounts[/d].storage", "fast:vm"),
        ({"mounts": [{"target": "/d", "storage": "fast", "size_gib": 2}]}, "container.mounts[/d].size_gib", "shrink"),
    ],
)
def test_what_cannot_be_changed_is_a_problem(options, variable, words):
    _want, problems = plan.wanted(declared(**options), there(mp0="fast:vm-901-disk-1,mp=/d,size=4G"))
    assert [problem.variable for problem in problems] == [variable]
    assert words in problems[0].sentence()


VOLUME = {"target": "/d", "storage": "fast", "size_gib": 4}
BIND = {"target": "/b", "source": "/srv/b"}


@pytest.mark.parametrize(
    ("mounts", "gone", "refused"),
    [
        (None, [], []),
        ([VOLUME, BIND], [], []),
        # What is on a bind mount's source is the node's and stays there.
        ([VOLUME], [], []),
        ([VOLUME, {**VOLUME, "target": "/e"}], [], []),
        ([BIND], ["mp0"], []),
        ([], ["mp0"], []),
        ([{"target": "/d", "source": "/srv/d"}], ["mp0"], []),
        ([{**VOLUME, "target": "/srv/d"}, BIND], ["mp0"], ["container.mounts[/srv/d].target"]),
        ([{**VOLUME, "target": "/srv/d", "size_gib": 8}], ["mp0"], ["container.mounts[/srv/d].target"]),
    ],
)
def test_a_volume_is_detached_with_a_word_and_never_replaced_by_an_empty_one(mounts, gone, refused):
    before = there(mp0="fast:vm-901-disk-1,mp=/d,size=4G,backup=1", mp1="/srv/b,mp=/b")
    want, problems = plan.wanted(declared(mounts=mounts), before)
    assert [(key, props["volume"]) for key, props in plan.detached(want, before).items()] == [
        (key, "fast:vm-901-disk-1") for key in gone
    ]
    assert [problem.variable for problem in problems] == refused
    if refused:
        said = problems[0].sentence()
        assert "'fast:vm-901-disk-1'" in said
        assert "pct set 901 --mp0 fast:vm-901-disk-1,mp=/srv/d,size=4G,backup=1" in said


@pytest.mark.parametrize(
    ("options", "variable"),
    [
        ({"vmid": 7}, "container.vmid"),
        ({"hostname": "a_b"}, "container.hostname"),
        ({"tags": ["a b"]}, "container.tags"),
        ({"disk_gib": 0}, "container.disk_gib"),
        ({"template": "debian-12"}, "container.template"),
        ({"networks": [{**ETH0, "ip": "192.0.2.5"}]}, "container.networks[eth0].ip"),
        ({"networks": [{**ETH0, "ip": "192.0.2.5/255.255.255.0"}]}, "container.networks[eth0].ip"),
        ({"networks": [{**ETH0, "ip": "192.0.2.5/7"}]}, "container.networks[eth0].ip"),
        ({"networks": [{**ETH0, "gw": "198.51.100.1"}]}, "container.networks[eth0].gw"),
        ({"networks": [{**ETH0, "ip6": "2001:db8::5/64", "gw6": "2001:db8:1::1"}]}, "container.networks[eth0].gw6"),
        ({"networks": [{**ETH0, "ip": "192.0.2.5/32", "gw": "2001:db8::1"}]}, "container.networks[eth0].gw"),
        ({"networks": [{**ETH0, "gw": "nope"}]}, "container.networks[eth0].gw"),
        ({"networks": [{**ETH0, "ip": "dhcp", "gw": "nope"}]}, "container.networks[eth0].gw"),
        ({"networks": [{**ETH0, "ip6": "192.0.2.5/24"}]}, "container.networks[eth0].ip6"),
        ({"networks": [ETH0, ETH0]}, "container.networks"),
        ({"devices": [{"path": "nvidia0"}]}, "container.devices[nvidia0].path"),
        ({"devices": [{"path": "/dev/a", "mode": "438"}]}, "container.devices[/dev/a].mode"),
        ({"mounts": [{"target": "/d"}]}, "container.mounts[/d]"),
        ({"mounts": [{"target": "/d", "source": "/a"}, {"target": "/d/", "source": "/b"}]}, "container.mounts"),
        ({"mounts": [{"target": "d", "source": "/d"}]}, "container.mounts[d].target"),
        ({"mounts": [{"target": "/d", "source": "/a=b"}]}, "container.mounts[/d].source"),
        ({"mounts": [{"target": "/d", "storage": "fast"}]}, "container.mounts[/d].size_gib"),
    ],
)
def test_bad_input_is_named_before_any_node_is_asked(options, variable):
    problems = plan.validate(declared(**options))
    assert [problem.variable for problem in problems] == [variable]
    assert problems[0].fix.endswith(".")


def test_good_input_has_no_problems():
    assert plan.validate(declared(
        hostname="a-b.example", tags=["x_1"], disk_gib=8, template="local:vztmpl/d.tar.zst",
        networks=[{**ETH0, "gw": "192.0.2.1", "ip6": "auto"}], devices=[{"path": "/dev/a", "mode": "0666"}],
        mounts=[{"target": "/d", "source": "/d"}, {"target": "/e", "storage": "fast", "size_gib": 1}])) == []  # fmt: skip


@pytest.mark.parametrize(
    "network",
    [
        {"ip": "203.0.113.5/32", "gw": "172.31.1.1"},
        {"ip": "203.0.113.5/24", "gw": "203.0.113.1"},
        {"ip6": "2001:db8::5/128", "gw6": "2001:db8:1::1"},
        {"ip6": "2001:db8::5/64", "gw6": "fe80::1"},
        {"ip": "dhcp", "gw": "192.0.2.1"},
    ],
)
def test_a_gateway_that_proxmox_can_route_to(network):
    assert plan.validate(declared(networks=[{"name": "eth0", "bridge": "vmbr0", **network}])) == []


def test_all_problems_are_found_at_once():
    problems = plan.validate(declared(hostname="_", disk_gib=0, devices=[{"path": "x"}]))
    assert len(problems) == 3


def test_a_container_without_the_mark_is_somebody_elses():
    assert "'t'" in plan.ownership(declared(), there(tags="x"))[0].problem
    assert plan.ownership(declared(), there()) == []
    assert plan.ownership(declared(), None) == []


def test_a_new_container_is_marked_and_unprivileged():
    options = declared(
        hostname="t", template="local:vztmpl/d", storage="fast", disk_gib=8, password="pw", ssh_public_keys=["k"]
    )
    want, problems = plan.wanted(options, None)
    assert problems == []
    (step,) = plan.steps(options, None, plan.changes(want, None), {}, api_is_root=False)
    assert step.action == "create"
    assert step.params == {
        "vmid": 901, "ostemplate": "local:vztmpl/d", "hostname": "t", "rootfs": "fast:8", "tags": "launchproof",
        "unprivileged": "1", "password": "pw", "ssh-public-keys": "k",
        "description": f"<!-- launchproof: created with {plan.login_mark(options, None)} -->",
    }  # fmt: skip
    assert "pw" not in step.describe()


KEY = "ssh-ed25519 AAAAC3Nz me@home"
FROM, RUNS = 'from="192.0.2.0/24" ', 'restrict,command="echo \\"hi\\" ssh-ed25519 AAAA" '
SECRET = "00000000-1111-2222-3333-444444444444"


def created(**login):
    """A container that was created with this login, by an identity with SECRET."""
    want, _problems = plan.wanted(declared(description="a note", **login), None, SECRET)
    return there(description=want["description"] + "\n")


@pytest.mark.parametrize(
    ("then", "now", "secret", "refused"),
    [
        ({"ssh_public_keys": [KEY]}, {"ssh_public_keys": [KEY]}, SECRET, None),
        ({"ssh_public_keys": [KEY]}, {"ssh_public_keys": ["ssh-ed25519 AAAAC3Nz other comment"]}, SECRET, None),
        ({"ssh_public_keys": [KEY]}, {"ssh_public_keys": [KEY, "ssh-rsa BBBB"]}, SECRET, "container.ssh_public_keys"),
        # Options stand before the type; words in their quotes are none.
        ({"ssh_public_keys": [FROM + KEY]}, {"ssh_public_keys": [FROM + "ssh-ed25519 AAAAC3Nz"]}, SECRET, None),
        ({"ssh_public_keys": [FROM + KEY]}, {"ssh_public_keys": [FROM + "ssh-ed25519 BBBB"]}, SECRET, "container.ssh_public_keys"),
        ({"ssh_public_keys": [RUNS + KEY]}, {"ssh_public_keys": [RUNS + "ssh-ed25519 BBBB"]}, SECRET, "container.ssh_public_keys"),
        ({"ssh_public_keys": [FROM + KEY]}, {"ssh_public_keys": [KEY]}, SECRET, "container.ssh_public_keys"),
        # A file of several keys is one element or many.
        ({"ssh_public_keys": [f"# us\n{KEY}\n\nssh-rsa BBBB\n"]}, {"ssh_public_keys": ["ssh-rsa BBBB x", KEY]}, SECRET, None),
        ({"ssh_public_keys": [f"{KEY}\nssh-rsa BBBB"]}, {"ssh_public_keys": [f"{KEY}\nssh-rsa CCCC"]}, SECRET,
         "container.ssh_public_keys"),
        ({"ssh_public_keys": [KEY]}, {}, SECRET, None),
        ({}, {"ssh_public_keys": [KEY]}, SECRET, "container.ssh_public_keys"),
        ({"password": "pw-1"}, {"password": "pw-1", "ssh_public_keys": [KEY]}, SECRET, "container.ssh_public_keys"),
        ({}, {"password": "pw-1"}, SECRET, "container.password"),
        ({}, {"password": "pw-1"}, None, None),
        ({"password": "pw-1"}, {"password": "pw-1"}, SECRET, None),
        ({"password": "pw-1"}, {"password": "pw-2"}, SECRET, "container.password"),
        # With another secret, or none, nobody can tell.
        ({"password": "pw-1"}, {"password": "pw-2"}, "other", None),
        ({"password": "pw-1"}, {"password": "pw-2"}, None, None),
    ],
)  # fmt: skip
def test_another_login_than_at_creation_is_refused(then, now, secret, refused):
    before = created(**then)
    want, problems = plan.wanted(declared(description="a note", **now), before, secret)
    assert [problem.variable for problem in problems] == ([refused] if refused else [])
    assert plan.changes(want, before) == {}
    assert not any(word in str(problems) + before.config["description"] for word in ("pw-1", "pw-2"))


def test_the_mark_of_plain_keys_stays_what_containers_carry_already():
    keys = declared(ssh_public_keys=["ssh-rsa BBBB you", KEY])
    assert plan.login_mark(keys, None) == "ssh-keys=8cc4f9fbd6087df1"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("<!-- launchproof: created with care -->", ["container.ssh_public_keys"]),
        ("<!-- launchproof: created with {mark} --> by me --> and others", ["container.ssh_public_keys"]),
        ("<!-- launchproof: created with care, {mark} -->", ["container.ssh_public_keys"]),
        ("<!-- launchproof: created with ssh-keys= -->", ["container.ssh_public_keys"]),
    ],
)
def test_a_mark_that_somebody_wrote_into_is_read_as_far_as_it_goes(text, refused):
    mark = plan.login_mark({"ssh_public_keys": [KEY]}, None)
    before = there(description=text.format(mark=mark))
    _want, problems = plan.wanted(declared(ssh_public_keys=["ssh-rsa BBBB"]), before)
    assert [problem.variable for problem in problems] == refused


def test_notes_change_beside_the_login_that_is_written_in_them():
    before = created(ssh_public_keys=[KEY])
    want, _problems = plan.wanted(declared(description="other"), before)
    assert want["description"].startswith("other\n<!-- launchproof: created with ssh-keys=")
    gone, _problems = plan.wanted(declared(description=""), before)
    assert gone["description"].startswith("<!-- launchproof")


@pytest.mark.parametrize(
    ("option", "key", "live"),
    [
        ({"networks": [ETH0]}, "net0", NET + ",from-the-future=1"),
        ({"mounts": [{"target": "/d", "storage": "fast", "size_gib": 4}]}, "mp0", "fast:vm-1,from-the-future=1,mp=/d,size=4G"),
        ({"devices": [{"path": "/dev/a"}]}, "dev0", "/dev/a,from-the-future=1"),
        ({"features": {"nesting": True}}, "features", "from-the-future=1,nesting=1"),
    ],
)  # fmt: skip
def test_what_nobody_can_declare_is_kept(option, key, live):
    assert delta(there(**{key: live}), **option) == {}


def test_an_empty_text_removes_its_key():
    assert delta(there(nameserver="192.0.2.53"), nameserver="") == {"nameserver": None}
    assert delta(there(), nameserver="") == {}


@pytest.mark.parametrize(("api_is_root", "expected"), [(False, ["create", "config as root@pam"]), (True, ["create"])])
def test_root_only_keys_go_a_way_of_their_own(api_is_root, expected):
    options = declared(template="local:vztmpl/d", storage="fast", disk_gib=8, devices=[{"path": "/dev/null"}])
    want, _problems = plan.wanted(options, None)
    change = plan.changes(want, None)
    guarded = plan.root_only(change, None, unprivileged=True)
    assert guarded == {"dev0": "device passthrough"}
    steps = plan.steps(options, None, change, guarded, api_is_root)
    assert [step.describe().partition(":")[0] for step in steps] == expected
    assert ("dev0" in steps[0].params) is api_is_root


def test_growing_is_a_resize_and_removing_a_delete():
    before = there(dev1="/dev/a")
    change = delta(before, disk_gib=9, devices=[], memory=1024)
    steps = plan.steps(declared(), before, change, {"dev1": "device passthrough"}, api_is_root=False)
    assert steps == [
        plan.Step("config", {"memory": "1024"}),
        plan.Step("config", {"delete": "dev1"}, root=True),
        plan.Step("resize", {"disk": "rootfs", "size": "9G"}),
    ]


def test_a_volume_that_grows_and_changes_takes_both_calls():
    before = there(mp0="fast:vm-901-disk-1,mp=/d,size=4G")
    change = delta(before, mounts=[{"target": "/d", "storage": "fast", "size_gib": 5, "read_only": True}])
    assert [step.action for step in plan.steps(declared(), before, change, {}, False)] == ["resize", "config"]
    # What else changes needs no grown volume, and may be refused.
    steps = plan.steps(declared(), before, {**change, "memory": "1024"}, {}, False)
    assert [step.describe() for step in steps] == ["config: memory", "resize: disk, size", "config: mp0"]


@pytest.mark.parametrize(
    ("state", "running", "pending", "restart", "expected"),
    [
        ("started", False, {}, "when_needed", (["start"], [])),
        ("started", True, {}, "when_needed", ([], [])),
        ("started", True, {"dev0": "/dev/a"}, "when_needed", (["reboot"], [])),
        ("started", True, {"dev0": "/dev/a"}, "never", ([], ["dev0"])),
        # What somebody else left pending is no reason to restart.
        ("started", True, {"swap": "1"}, "when_needed", ([], [])),
        ("present", True, {"dev0": "/dev/a"}, "when_needed", (["reboot"], [])),
        ("present", False, {}, "when_needed", ([], [])),
        ("stopped", True, {"dev0": "/dev/a"}, "when_needed", (["shutdown"], [])),
        ("stopped", False, {}, "when_needed", ([], [])),
    ],
)
def test_power(state, running, pending, restart, expected):
    steps, waiting = plan.power(state, there(running, pending), {"dev0"}, restart)
    assert ([step.action for step in steps], waiting) == expected


def test_a_prediction_knows_what_does_not_hotplug():
    before = there(running=True)
    after = plan.predict(before, {"memory": "1024", "dev0": "/dev/a", "net0": None, "mp0": "fast:1,mp=/d"})
    assert after.pending == {"dev0": "/dev/a"}
    assert after.live["memory"] == "1024"
    assert "net0" not in after.live
    assert plan.predict(there(), {"dev0": "/dev/a"}).pending == {}


@pytest.mark.parametrize(
    ("network", "found", "count"),
    [
        ({"ip": "192.0.2.5/24"}, ["192.0.2.5"], 0),
        ({"ip": "192.0.2.5/24"}, ["192.0.2.6"], 1),
        ({"ip": "dhcp"}, ["192.0.2.6"], 0),
        ({"ip": "dhcp"}, ["2001:db8::1"], 1),
        ({"ip6": "auto"}, ["2001:db8::1"], 0),
        ({"ip6": "2001:db8::1/64"}, ["2001:0db8:0::1"], 0),
        ({"ip": "manual"}, [], 0),
        ({"ip": "dhcp", "ip6": "auto"}, [], 2),
    ],
)
def test_a_declared_address_is_expected(network, found, count):
    problems = plan.missing_addresses(declared(networks=[{"name": "eth0", **network}]), {"eth0": found})
    assert len(problems) == count


WAY = {
    "api_host": "pve1", "api_port": 8006, "api_via": "https", "api_user": "a@pve", "api_token_id": "t",
    "api_token_secret": SECRET, "api_timeout": 30, "lock_timeout": 60, "task_timeout": 600,
}  # fmt: skip


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"lock_timeout": 0},
        {"api_user": None, "api_token_id": None, "api_token_secret": None, "api_via": "node"},
        {"api_user": "ü ü@pam", "api_token_id": None, "api_token_secret": None, "api_password": "pä ß\n"},
        *[
            {"api_host": host}
            for host in ("::1", "fe80::1", "192.0.2.1", "localhost", "pve_1.example.com.", "pvé.example")
        ],
    ],
)
def test_a_way_without_problems(way):
    assert plan.route_problems({}, {**WAY, **way}) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[
            ("api_host", value)
            for value in (
                "https://pve1",
                "pve1:8006",
                "127.0.0.1:8006",
                "[::1]",
                "[::1]:8006",
                "",
                "a b",
                "a/b",
                "a..b",
                "a@b",
            )
        ],
        *[("api_port", value) for value in (0, -1, 65536)],
        *[("api_timeout", value) for value in (0, -1, 10**12)],
        *[("lock_timeout", value) for value in (-1, 10**12)],
        *[("task_timeout", value) for value in (0, 10**12)],
        *[("api_token_secret", value) for value in ("s3cret-€", "s3cret\n", "s3cret x")],
        ("api_token_id", "t€"),
        ("api_user", "€@pve"),
    ],
)
def test_a_way_that_no_request_can_take_is_named(option, value):
    (problem,) = plan.route_problems({}, {**WAY, option: value})
    assert problem.variable == f"pve_{option}"
    assert problem.fix.endswith(".")
    assert "s3cret" not in problem.sentence()
    assert option == "api_token_secret" or repr(value) in problem.sentence()
