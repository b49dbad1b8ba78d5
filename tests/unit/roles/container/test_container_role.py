# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is written more than once: module options, their documentation, the connection's options in the role."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible_collections.dflash.launchproof.plugins.doc_fragments.pve import ModuleDocFragment
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import options

ROLE = Path(__file__).parents[4] / "roles" / "container"
SPECS = yaml.safe_load((ROLE / "meta" / "argument_specs.yml").read_text())["argument_specs"]
ROLE_OPTIONS = SPECS["main"]["options"]
DEFAULTS = yaml.safe_load((ROLE / "defaults" / "main.yml").read_text())
DOCUMENTED = {
    **yaml.safe_load(ModuleDocFragment.DOCUMENTATION)["options"],
    **yaml.safe_load(ModuleDocFragment.CONTAINER)["options"],
}


def shape(option, nested):
    """What an option accepts, in one form for argument specs, role specs and documentation."""
    return {
        "type": option["type"],
        "elements": option.get("elements"),
        "required": option.get("required", False),
        "default": option.get("default"),
        "choices": sorted(option["choices"]) if option.get("choices") else None,
        "options": {name: shape(value, nested) for name, value in option.get(nested, {}).items()},
    }


def role_option(name):
    return "pve_api_unavailable_ok" if name == "unavailable_ok" else f"pve_{name}"


@pytest.mark.parametrize("name", {**options.connection(), **options.container()})
def test_module_documentation_and_role_say_the_same(name):
    spec = shape({**options.connection(), **options.container()}[name], "options")
    assert shape(DOCUMENTED[name], "suboptions") == spec
    # The declaration itself is documented and checked by the module alone.
    if name not in ("declared_as", "container"):
        assert shape(ROLE_OPTIONS[role_option(name)], "options") == spec


def test_secrets_are_secret_in_the_role_too():
    for name in ("pve_api_token_secret", "pve_api_password"):
        assert ROLE_OPTIONS[name]["no_log"] is True


def test_defaults_are_the_declared_ones():
    declared = {name: option["default"] for name, option in ROLE_OPTIONS.items() if "default" in option}
    assert declared == DEFAULTS


def test_every_default_has_a_comment_above():
    lines = (ROLE / "defaults" / "main.yml").read_text().splitlines()
    for number, line in enumerate(lines):
        if line and not line.startswith(("#", "---")):
            assert lines[number - 1].startswith("# "), line


def test_every_entry_point_is_declared():
    for name in SPECS:
        assert (ROLE / "tasks" / f"{name}.yml").is_file()
