# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every key of a container in Proxmox's own API schema: declared, read back equal, and removed; or refused in words."""

from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import config, keys, options
from ansible_collections.dflash.launchproof.plugins.modules import pve_container
from fakepve import lxc as fake_lxc
from fakepve import schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.module import run_module

PATHS = schema.load().paths
CREATE = PATHS["/nodes/{node}/lxc"]["POST"]["parameters"]["properties"]
CONFIG = {
    name: value
    for name, value in PATHS["/nodes/{node}/lxc/{vmid}/config"]["PUT"]["parameters"]["properties"].items()
    # Of the request, not of the configuration.
    if name not in ("node", "vmid", "digest", "delete", "revert")
}
TEMPLATE = "local:vztmpl/debian-12.tar.zst"
BASE = {"vmid": 901, "template": TEMPLATE, "storage": "local-lvm", "disk_gib": 8}
# The entry of a list that a property is tried in, and what its values are where the schema has no more than a pattern.
ENTRY = {
    "networks": {"name": "eth0", "bridge": "vmbr0"},
    "devices": {"path": "/dev/null"},
    "mounts": {"target": "/srv", "storage": "local-lvm", "size_gib": 1},
}
VALUES = {
    "hostname": "other", "description": "two\nlines", "nameserver": "192.0.2.53 192.0.2.54", "searchdomain": "example.org",
    "timezone": "Europe/Vienna", "hookscript": "local:snippets/hook.pl", "startup": "order=2,up=10", "tags": ["b", "A"],
    "features.mount": ["nfs", "cifs"], "networks[].bridge": "vmbr1", "networks[].ip": "192.0.2.5/24",
    "networks[].gw": "192.0.2.1", "networks[].ip6": "2001:db8::5/64", "networks[].gw6": "2001:db8::1",
    "networks[].hwaddr": "BC:24:11:AA:BB:CC", "networks[].trunks": [10, 20], "networks[].rate": 12.5,
    "networks[].tag": 7, "devices[].mode": "0640", "mounts[].mountoptions": ["noatime", "discard"],
    "mounts[].idmap": "u:0:100000:65536", "mounts[].size_gib": 2, "mounts[].source": "/srv/data",
    "cpulimit": 2.0, "cpuunits": 50, "disk_gib": 9,
}  # fmt: skip
# What makes an entry the same one: another value is another entry.
IDENTITIES = ("networks[].name", "devices[].path", "mounts[].target")


def properties(name):
    """The properties of a property string in the schema, by name; empty for a key with one value."""
    form = CONFIG[name].get("format")
    return form if isinstance(form, dict) else {}


def managed():
    """(key, property, option) of all that a declaration manages; a property of None is the key itself."""
    for name, key in keys.KEYS.items():
        if key.word != "managed":
            continue
        if not key.properties:
            yield name, None, key.text
        for prop, item in key.properties.items():
            if item.word == "managed" and item.text not in IDENTITIES:
                yield name, prop, item.text


MANAGED = [item for item in managed() if item[2] not in ("unprivileged", "storage")]


def test_the_table_is_the_schema():
    assert set(CONFIG) == set(keys.KEYS) - {"lxc", "parent"}  # seen in a configuration, and in no request
    assert set(CREATE) - set(CONFIG) - {"node"} == set(keys.CREATION)
    for name, key in keys.KEYS.items():
        if key.word == "managed" and name in CONFIG:
            assert set(properties(name)) == set(key.properties), name
    for key in [*keys.KEYS.values(), *keys.CREATION.values()]:
        for item in (key, *key.properties.values()):
            assert item.word in ("managed", "refused", "ignored")
            assert item.text


def spec(option):
    """The argument spec of an option by its path, ``networks[].ip``."""
    found = {"options": options.container()["container"]["options"]}
    for part in option.split("."):
        found = found["options"][part.removesuffix("[]")]
    return found


@pytest.mark.parametrize("option", sorted({option for _name, _prop, option in managed()} | set(IDENTITIES)))
def test_what_is_managed_has_its_option(option):
    assert spec(option)["type"]


def value_for(option, description):
    """A value of an option that is not Proxmox's default: from the table above, else from the schema."""
    if option in VALUES:
        return VALUES[option]
    if "enum" in description:
        return next(item for item in description["enum"] if item != description.get("default"))
    if description["type"] == "boolean":
        return str(description.get("default", 0)) != "1"
    return max(int(description.get("minimum", 0)), 64) if description["type"] == "integer" and "maximum" not in description \
        else int(description.get("minimum", 0)) + 1  # fmt: skip


def declare(option, value):
    """A declaration with this option, and the same without it."""
    top, _dot, rest = option.partition(".")
    if not rest:
        return {top: value}, {}
    if not top.endswith("[]"):
        return {top: {rest: value}}, {top: {}}
    top = top.removesuffix("[]")
    entry = {**ENTRY[top], rest: value}
    if rest == "source":
        entry = {"target": "/srv", "source": value}
    return {top: [entry]}, {top: [ENTRY[top]]}


@pytest.fixture
def node(fakepve):
    fakepve.acl = {}
    return fakepve


@pytest.fixture
def ensure(node, fakepve_cafile, capsys):
    """``ensure(**options)`` declares the container, as root@pam by password, and returns the result."""

    def run(**declared):
        arguments = {
            "api_host": node.host, "api_port": node.port, "api_user": "root@pam", "api_password": "secret", "node": "pve1",
            "api_ca_path": fakepve_cafile, "state": "present", "container": {**BASE, **declared},
        }  # fmt: skip
        result = run_module(pve_container, arguments, capsys)
        assert not result.get("failed"), result["msg"]
        return result

    return run


def stored(node, name, prop):
    """What Proxmox has stored of a key, or of a property of it; None for nothing."""
    key = name.replace("[n]", "0")
    text = node.ct(901).config.get(key)
    if text is None or prop is None:
        return None if text is None else config.canonical(key, text)
    # With what Proxmox takes for granted.
    return {**config.DEFAULTS.get(config.kind(key), {}), **config.canonical(key, text)}.get(prop)


@pytest.mark.parametrize(("name", "prop", "option"), MANAGED, ids=[option for _name, _prop, option in MANAGED])
def test_declared_read_back_and_removed(node, ensure, name, prop, option):
    value = value_for(option, properties(name)[prop] if prop else CONFIG[name])
    with_it, without = declare(option, value)
    ensure(**without)
    bare = stored(node, name, prop)

    assert ensure(**with_it)["changed"] is True
    text = config.wire(value)
    expected = config.canonical(name.replace("[n]", "0"), f"{prop}={text}" if prop else text)
    found = stored(node, name, prop)
    if option == "disk_gib" or option.endswith("size_gib"):
        assert found == str(value * 1024**3)
    elif option == "tags":
        assert found == {"": "a;b;launchproof"}
    else:
        assert found == (expected.get(prop, config.DEFAULTS.get(config.kind(name.replace("[n]", "0")), {}).get(prop)) if prop
                         else expected)  # fmt: skip
    before = dict(node.ct(901).config)
    assert ensure(**with_it)["changed"] is False
    assert node.ct(901).config == before

    if option in ("disk_gib", "mounts[].size_gib", "mounts[].source"):
        return  # a disk never shrinks, and a mount has one source or the other
    if not prop:
        # What is not declared is not managed.
        assert ensure()["changed"] is False
        assert stored(node, name, None) == found
        return
    assert ensure(**without)["changed"] is (found != bare and option != "networks[].hwaddr")
    assert stored(node, name, prop) == (found if option == "networks[].hwaddr" else bare)
    assert ensure(**without)["changed"] is False


@pytest.mark.parametrize(("name", "prop", "option"), MANAGED, ids=[option for _name, _prop, option in MANAGED])
def test_declared_at_creation(node, ensure, name, prop, option):
    with_it, _without = declare(option, value_for(option, properties(name)[prop] if prop else CONFIG[name]))
    assert ensure(**with_it)["steps"][0].startswith("create")
    assert ensure(**with_it)["changed"] is False


NOT_OPTIONS = sorted(
    name.replace("[n]", "0").replace("-", "_")
    for name, key in {**keys.KEYS, **keys.CREATION}.items()
    if (key.word != "managed" or key.text != name)
    and name.replace("-", "_") not in options.container()["container"]["options"]
)


@pytest.mark.parametrize("name", NOT_OPTIONS)
def test_a_key_that_is_no_option_is_refused_with_the_reason(node, fakepve_cafile, capsys, name):
    arguments = {
        "api_host": node.host, "api_port": node.port, "api_user": "root@pam", "api_password": "secret", "node": "pve1",
        "api_ca_path": fakepve_cafile, "container": {**BASE, name: "1"},
    }  # fmt: skip
    result = run_module(pve_container, arguments, capsys)
    assert result["msg"].startswith((f"{name} is declared as ", f"{name} cannot be declared: "))
    assert node.requests == []


def test_what_is_ignored_stays(node, ensure):
    ensure(networks=[ENTRY["networks"]])
    ct = node.ct(901)
    ct.config.update({"unused0": "local-lvm:vm-901-disk-7", "arch": "arm64", "lxc": [["lxc.apparmor.profile", "x"]],
                      "rootfs": ct.config["rootfs"] + ",mountoptions=noatime"})  # fmt: skip
    before = dict(ct.config)
    assert ensure(networks=[ENTRY["networks"]])["changed"] is False
    ensure(networks=[{**ENTRY["networks"], "mtu": 1400}], disk_gib=9)
    after = dict(node.ct(901).config)
    grown = config.canonical("rootfs", after.pop("rootfs"))
    assert {**grown, "size": str(8 * 1024**3)} == config.canonical("rootfs", before.pop("rootfs"))
    assert after.pop("net0").replace("mtu=1400,", "") == before.pop("net0")
    assert after == before


# ------------------------------------------------------------------ any value of the schema's own grammar

# On a machine that is busy with other things too.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

BOOLEAN = st.sampled_from(["0", "1", "on", "off", "yes", "no", "true", "false"])


def texts(name):
    """Property strings of a key with any choice of properties, in any order, however its booleans are spelled."""
    form = {prop: item for prop, item in properties(name).items() if prop not in ("volume", "path")}
    first = {"net[n]": st.just("name=eth0"), "features": st.just("nesting=1")}.get(
        name, st.sampled_from(["/dev/x", "/srv/x", "local:vm-1"])
    )

    def one(prop):
        item = form[prop]
        values = BOOLEAN if item["type"] == "boolean" else st.sampled_from(item.get("enum", ["1", "64", "1500"]))
        return values.map(lambda value: f"{prop}={value}")

    chosen = st.lists(st.sampled_from(sorted(set(form) - {"name", "nesting"})), unique=True)
    return chosen.flatmap(lambda props: st.tuples(first, *map(one, props))).map(",".join)


@pytest.mark.parametrize("name", ["net[n]", "mp[n]", "dev[n]", "features", "rootfs"])
@unhurried
@given(data=st.data())
def test_what_proxmox_writes_back_means_what_was_sent(name, data):
    key = name.replace("[n]", "0")
    sent = data.draw(texts(name))
    assert config.same(key, config.render(key, config.parse(key, sent)), sent)
    if key.startswith(("net", "features")):
        back = fake_lxc.normalise(key, sent)
    elif key.startswith("dev"):
        back = sent
    else:
        back = fake_lxc.print_mount(fake_lxc.parse_mount(sent), key == "rootfs")
    # A MAC address is Proxmox's own addition where there was none.
    kept = {} if "hwaddr=" in sent else {"hwaddr"}
    meant = {prop: value for prop, value in config.canonical(key, back).items() if prop not in kept}
    assert meant == config.canonical(key, sent)


@unhurried
@given(one=texts("net[n]"), other=texts("net[n]"))
def test_comparing_is_symmetric_and_canonical_forms_are_final(one, other):
    assert config.same("net0", one, other) == config.same("net0", other, one)
    form = config.canonical("net0", one)
    assert config.canonical("net0", config.render("net0", form)) == form


@unhurried
@given(number=st.floats(0, 8192, allow_nan=False), whole=st.integers(0, 8192))
def test_numbers_are_compared_as_numbers(number, whole):
    assert config.same("cpulimit", number, str(number))
    assert config.same("cpulimit", float(whole), whole)
    assert config.same("cpulimit", f"{whole}.00", whole)
    assert not config.same("cpulimit", whole, whole + 1)
