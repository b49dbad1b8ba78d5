# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every role: argument_specs and defaults name the same variables with the same values, and each default has a comment."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.dflash.launchproof.plugins.module_utils.job import spec

ROLES = sorted(path.name for path in Path("roles").iterdir() if path.is_dir())
# The jobs belong to the whole deployment, the connection to the node to everything that speaks to it.
PREFIXES = {"job": ("launchproof_",), "container": ("container_", "pve_")}
TYPES = {"str": str, "path": str, "int": int, "bool": bool, "list": list, "dict": dict, "float": (int, float)}


def load(role):
    folder = Path("roles") / role
    return (
        yaml.safe_load((folder / "meta/argument_specs.yml").read_text())["argument_specs"],
        yaml.safe_load((folder / "defaults/main.yml").read_text()) or {},
        (folder / "defaults/main.yml").read_text(),
    )


def templated(value):
    return "{{" in str(value) or "{%" in str(value)


def options_of(specs):
    """Options of all entry points; the first that describes one counts."""
    merged = {}
    for entry in specs.values():
        for name, option in (entry.get("options") or {}).items():
            merged.setdefault(name, option)
    return merged


@pytest.mark.parametrize("role", ROLES)
def test_every_option_has_a_default_or_is_required(role):
    """An option that is unset by default is there as a comment: ``# name: example``."""
    specs, defaults, text = load(role)
    named = set(defaults) | set(re.findall(r"^# ([a-z_0-9]+):", text, re.M))
    missing = [name for name, option in options_of(specs).items() if name not in named and not option.get("required")]
    assert missing == []


@pytest.mark.parametrize("role", ROLES)
def test_every_default_is_an_option(role):
    specs, defaults, _text = load(role)
    assert [name for name in defaults if not name.startswith("__") and name not in options_of(specs)] == []


@pytest.mark.parametrize("role", ROLES)
def test_defaults_say_the_same(role):
    specs, defaults, _text = load(role)
    for name, option in options_of(specs).items():
        if name not in defaults:
            assert "default" not in option, name
            continue
        if templated(defaults[name]):
            assert option.get("default", defaults[name]) == defaults[name], name
            continue
        assert option.get("default") == defaults[name], name
        if defaults[name] is not None:
            assert isinstance(defaults[name], TYPES[option.get("type", "str")]), name


@pytest.mark.parametrize("role", ROLES)
def test_every_default_has_a_comment_above_it(role):
    _specs, defaults, text = load(role)
    bare = [name for name in defaults if not re.search(rf"^#.*\n{re.escape(name)}:", text, re.M)]
    assert bare == []


@pytest.mark.parametrize("role", ROLES)
def test_every_option_is_described(role):
    def check(options, path):
        for name, option in (options or {}).items():
            assert option.get("description"), f"{path}.{name}"
            assert "type" in option, f"{path}.{name}"
            check(option.get("options"), f"{path}.{name}")

    specs, _defaults, _text = load(role)
    for entry, data in specs.items():
        assert data.get("short_description") and data.get("description"), entry
        check(data.get("options"), entry)


@pytest.mark.parametrize("role", ROLES)
def test_variables_carry_the_roles_prefix(role):
    _specs, defaults, _text = load(role)
    prefixes = PREFIXES.get(role, (role + "_",))
    assert [name for name in defaults if not name.lstrip("_").startswith(prefixes)] == []


def test_the_options_of_a_job_are_those_that_the_code_reads():
    options = load("job")[0]["main"]["options"]["launchproof_jobs"]["options"]
    assert set(options) == set(spec._JobReader.KEYS)
    assert set(options["instances"]["options"]) == set(spec._JobReader.INSTANCE_KEYS)
    code = options["code"]["options"]
    assert set(code) == {field.name for field in dataclasses.fields(spec.Code)}
    assert code["exclude"]["default"] == list(spec.DEFAULT_EXCLUDE) and code["keep"]["default"] == spec.DEFAULT_KEEP
    job = spec.validate([{"name": "a", "command": ["/bin/true"]}])[0][0]
    for name, option in options.items():
        if "default" in option and option["type"] in ("str", "int", "bool"):
            assert getattr(job, name) == option["default"], name
