# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bounds and formats of a declaration's values, held to Proxmox's own API schema."""

from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import keys, plan, values
from fakepve import schema

CREATE = schema.load().paths["/nodes/{node}/lxc"]["POST"]["parameters"]["properties"]
ENTRY = {
    "networks": {"name": "eth0", "bridge": "vmbr0"},
    "devices": {"path": "/dev/null"},
    "mounts": {"target": "/srv", "source": "/srv"},
}
# What the schema has no bounds for: a size is a text there, and VLANs that pass are those that there are.
WITHOUT = {"disk_gib", "mounts[].size_gib", "networks[].trunks"}
# What the schema, or fakepve, has no rule for that tells good from bad.
UNJUDGED = {"nameserver", "timezone", "hookscript", "ssh_public_keys", "devices[].path", "mounts[].target", "mounts[].source"}  # fmt: skip


def described():
    """What the schema says of each managed option."""
    found = {}
    for name, key in {**keys.KEYS, **keys.CREATION}.items():
        if key.word != "managed":
            continue
        found.setdefault(key.text, CREATE[name])
        for prop, item in key.properties.items():
            if item.word == "managed" and item.text not in found:
                found[item.text] = CREATE[name]["format"][prop]
    return found


SCHEMA = described()


def declare(option, value):
    top, dot, rest = option.partition(".")
    name = top.removesuffix("[]")
    if not dot:
        return {"vmid": 901, name: value}
    return {"vmid": 901, name: {rest: value} if name == top else [{**ENTRY[name], rest: value}]}


def test_the_bounds_are_the_schemas():
    of_schema = {
        option: tuple(None if limit is None else int(limit) for limit in (item.get("minimum"), item.get("maximum")))
        for option, item in SCHEMA.items()
        if option != "vmid" and ("minimum" in item or "maximum" in item)
    }
    assert {option: bounds for option, bounds in values.BOUNDS.items() if option not in WITHOUT} == of_schema
    assert set(values.BOUNDS) - WITHOUT == set(of_schema)


def test_every_rule_of_the_schema_for_a_text_has_its_form():
    ruled = {
        option
        for option, item in SCHEMA.items()
        if item["type"] == "string" and {"pattern", "minLength", "maxLength"} & set(item)
    }
    # The module's own choices, plan.validate, and a look at the node do for these.
    elsewhere = {"hostname", "template", "devices[].mode", "mounts[].mountoptions", "networks[].trunks"}
    assert ruled - set(values.FORMS) == elsewhere


@pytest.mark.parametrize("option", values.BOUNDS)
def test_a_number_out_of_its_bounds_is_named(option):
    least, most = values.BOUNDS[option]
    for good in (least, least + 1, *([most] if most else [])):
        value = [good] if option == "networks[].trunks" else good
        assert [item for item in plan.validate(declare(option, value)) if "size_gib" not in option] == []
    for bad in (least - 1, -5, *([most + 1] if most else [])):
        value = [1, bad] if option == "networks[].trunks" else bad
        (problem,) = plan.validate(declare(option, value))
        assert problem.variable.startswith(f"container.{option.partition('[')[0]}")
        assert problem.variable.endswith(option.rpartition(".")[2])
        assert problem.value == bad
        assert str(least) in problem.fix


GOOD = {
    "description": ["two\nlines", "x" * 8192],
    "nameserver": ["192.0.2.53", "192.0.2.53 2001:db8::53", "192.0.2.53,192.0.2.54", "fe80::1%vmbr0"],
    "searchdomain": ["example.org", "example.org a.example"],
    "timezone": ["host", "Europe/Vienna", "Etc/GMT+1"],
    "startup": ["1", "order=2,up=10,down=30", "up=10", "2,up=3"],
    "hookscript": ["local:snippets/hook.pl"],
    "pool": ["gpu", "a/b/c"],
    "password": ["12345", "pä ß'"],
    "ssh_public_keys": [
        ["ssh-ed25519 AAAAC3Nz me@home", "ssh-rsa AAAAB3Nz"],
        ["ssh-rsa AAAAB3Nz one\necdsa-sha2-nistp256 AAAAE2Vj two\n"],
        ['from="192.0.2.1",no-pty sk-ssh-ed25519@openssh.com AAAAGnNr= me'],
    ],
    "features.mount": [["nfs", "cifs"]],
    "networks[].name": ["eth0", "a-b_c.5"],
    "networks[].bridge": ["vmbr0"],
    "networks[].gw": ["192.0.2.1"],
    "networks[].gw6": ["2001:db8::1", "fe80::1"],
    "networks[].hwaddr": ["BC:24:11:AA:BB:CC", "02:00:00:00:00:0a"],
    "devices[].path": ["/dev/dri/card0", "/dev/a..b"],
    "mounts[].target": ["/srv/.hidden", "/a..b"],
    "mounts[].source": ["/srv/.hidden"],
    "mounts[].idmap": ["passthrough", "u:0:100000:65536;g:0:100000:65536"],
}
BAD = {
    "description": ["x" * 8193],
    "nameserver": ["nonsense", "192.0.2.53 x", "192.0.2.53/24", "192.0.2.53%eth0", "fe80::1%a b"],
    "searchdomain": ["-a", "example.org a_b"],
    "timezone": ["Europe Vienna", "a;b"],
    "startup": ["foo bar", "order=", "up=x", "order=1;up=2", "after=1"],
    "hookscript": ["hook.pl", "local:iso/hook.pl", "/srv/hook.pl"],
    "pool": ["a b", "a/b/c/d", "/a"],
    "password": ["abc", "s3c!"],
    "ssh_public_keys": [["garbage"], ["ssh-rsa BBBB"], ["ssh-rsa AAAAB3Nz\n-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blb"]],
    "features.mount": [["nfs,x"], [""]],
    "networks[].name": ["eth 0", "a,b"],
    "networks[].bridge": ["vmbr0,tag=5", ""],
    "networks[].gw": ["nope", "192.0.2.1/24", "2001:db8::1", ""],
    "networks[].gw6": ["nope", "192.0.2.1", "fe80::1%eth0"],
    "networks[].hwaddr": ["zz", "01:00:00:00:00:01", "BC-24-11-AA-BB-CC"],
    "devices[].path": ["/dev/../etc", "/dev/."],
    "mounts[].target": ["/a/../b", "/a/."],
    "mounts[].source": ["/a/..", "/./a"],
    "mounts[].idmap": ["x", "u:0:1:0", "u:0:1"],
}  # fmt: skip


def cases(table):
    return [
        pytest.param(option, value, id=f"{option} {value}"[:60]) for option, them in table.items() for value in them
    ]


def accepted(option, value):
    """Whether the schema takes a value as it travels."""
    text = ";".join(value) if isinstance(value, list) else value
    # Python does not know Perl's (?^:…), and fakepve lets pass what it cannot read.
    rule = {key: item.replace("(?^:", "(?:") if key == "pattern" else item for key, item in SCHEMA[option].items()}
    return schema.check_value(rule, text)[1] is None


def test_every_form_has_samples():
    assert set(values.FORMS) == set(GOOD) == set(BAD)


@pytest.mark.parametrize(("option", "value"), cases(GOOD))
def test_a_good_text_has_no_problem(option, value):
    assert plan.validate(declare(option, value)) == []
    assert accepted(option, value)


@pytest.mark.parametrize(("option", "value"), cases(BAD))
def test_a_bad_text_is_named(option, value):
    (problem,) = plan.validate(declare(option, value))
    assert problem.variable.startswith(f"container.{option.partition('[')[0].partition('.')[0]}")
    assert problem.variable.endswith(option.rpartition(".")[2])
    assert problem.fix.endswith(".")
    assert len(str(problem.value)) < 80
    assert option != "password" or value not in problem.sentence()
    assert option in UNJUDGED or not accepted(option, value)


@pytest.mark.parametrize("option", ["nameserver", "startup", "pool", "hookscript", "password", "networks[].hwaddr"])
def test_an_empty_text_is_none(option):
    assert plan.validate(declare(option, "")) == []
