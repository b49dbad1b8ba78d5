# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import config
from hypothesis import given
from hypothesis import strategies as st

# What the grammar can carry: no comma, no line end; the nameless first value no equals sign either.
_VALUE = st.text(st.characters(exclude_characters=",\n\r", exclude_categories=("Cs",)), min_size=1)
_FIRST = st.text(st.characters(exclude_characters=",=\n\r", exclude_categories=("Cs",)), min_size=1)
_NAME = st.from_regex(r"[a-z][a-z0-9_-]{0,12}", fullmatch=True)


@given(first=_FIRST, rest=st.dictionaries(_NAME, _VALUE))
@pytest.mark.parametrize("key", ["rootfs", "mp7", "dev0"])
def test_what_is_rendered_is_parsed_back(key, first, rest):
    default = config.DEFAULT_KEY[config.kind(key)]
    props = {default: first, **{name: value for name, value in rest.items() if name != default}}
    assert config.parse(key, config.render(key, props)) == props


@given(rest=st.dictionaries(_NAME, _VALUE))
def test_a_key_without_nameless_property_round_trips(rest):
    assert config.parse("net0", config.render("net0", rest)) == rest


@given(rest=st.dictionaries(_NAME, _VALUE), first=_FIRST)
def test_every_value_means_the_same_as_itself_in_any_order(rest, first):
    props = {"volume": first, **{k: v for k, v in rest.items() if k not in ("volume", "size")}}
    shuffled = dict(reversed(props.items()))
    assert config.same("mp0", config.render("mp0", props), config.render("mp0", shuffled))


@pytest.mark.parametrize("value", ["a,b", "", "a\nb"])
def test_a_value_without_escape_is_refused(value):
    with pytest.raises(config.ConfigError, match="mp0"):
        config.render("mp0", {"volume": "local:1", "mp": value})


@pytest.mark.parametrize("text", ["a,b", "a=1,a=2", "local:1,,x"])
def test_a_malformed_string_names_its_key(text):
    with pytest.raises(config.ConfigError, match="rootfs"):
        config.parse("rootfs", text)


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("net0", "name=eth0,bridge=vmbr0,hwaddr=bc:24:11:aa:bb:cc", "bridge=vmbr0,hwaddr=BC:24:11:AA:BB:CC,name=eth0"),
        ("net0", "name=eth0,bridge=b,firewall=0,type=veth", "name=eth0,bridge=b"),
        ("net0", "name=eth0,bridge=b,firewall=1", "name=eth0,bridge=b,firewall=on"),
        ("rootfs", "local:8,size=8G", "local:8,size=8192M"),
        ("mp0", "local:8,mp=/d,replicate=1", "local:8,mp=/d,ro=0"),
        ("mp0", "local:8,mp=/d", "local:8,mp=//d/"),
        ("dev0", "/dev/null", "path=/dev/null,mode=0660"),
        ("features", "nesting=1,keyctl=0", "nesting=1"),
        ("features", "mount=nfs;cifs", "mount=cifs;nfs"),
        ("tags", "b;A", "a,b"),
        ("description", "text\n", "text"),
        ("nameserver", "192.0.2.1,192.0.2.2", "192.0.2.1 192.0.2.2"),
        ("searchdomain", " a.example; b.example", "a.example b.example"),
        ("memory", 512, "512"),
        ("onboot", True, "1"),
        ("features", None, "nesting=0"),
        ("hostname", None, None),
    ],
)
def test_spelled_differently_and_meaning_the_same(key, one, other):
    assert config.same(key, one, other)
    assert config.same(key, other, one)


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("net0", "name=eth0,bridge=b,tag=5", "name=eth0,bridge=b"),
        ("features", "nesting=1,keyctl=1", "nesting=1"),
        ("features", None, "nesting=1"),
        ("dev0", "/dev/null,mode=0666", "/dev/null"),
        ("mp0", "local:8,mp=/d,replicate=0", "local:8,mp=/d"),
        ("tags", "a", "a;b"),
        # The first server is asked first.
        ("nameserver", "192.0.2.1 192.0.2.2", "192.0.2.2 192.0.2.1"),
        ("hostname", None, "a"),
        ("rootfs", "local:8,size=8G", "local:8,size=9G"),
    ],
)
def test_a_removed_or_changed_field_is_a_difference(key, one, other):
    assert not config.same(key, one, other)
    assert not config.same(key, other, one)


def test_pending_values_are_kept_apart_from_live_ones():
    container = config.from_pending(
        [
            {"key": "memory", "value": 512, "pending": 1024},
            {"key": "dev0", "pending": "/dev/null"},
            {"key": "swap", "value": 512, "delete": 1},
            {"key": "digest", "value": "abc"},
            {"key": "tags", "value": "launchproof"},
        ],
        running=True,
    )
    assert container.live == {"memory": "512", "swap": "512", "tags": "launchproof"}
    assert container.pending == {"memory": "1024", "dev0": "/dev/null", "swap": None}
    assert container.config == {"memory": "1024", "dev0": "/dev/null", "tags": "launchproof"}
    assert container.digest == "abc"
    assert container.lock is None


@pytest.mark.parametrize(
    ("text", "size"), [("8G", 8 * 1024**3), ("512M", 512 * 1024**2), ("0", 0), ("1.5G", 3 * 1024**3 // 2)]
)
def test_sizes(text, size):
    assert config.size_bytes(text) == size


def test_a_size_without_a_number_is_refused():
    with pytest.raises(config.ConfigError, match="'big'"):
        config.size_bytes("big")
