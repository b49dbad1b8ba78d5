# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import yaml
from ansible.plugins.connection import ssh


def _options() -> dict:
    """The options of ansible.builtin.ssh as this ansible-core declares them.

    A connection that inherits from it reads all of them, and which there are differs from version to version; a copy
    would break with the next one. Their version_added speaks of ansible-core, not of this collection.
    """
    options = yaml.safe_load(ssh.DOCUMENTATION)["options"]

    def without_versions(data):
        if isinstance(data, dict):
            return {key: without_versions(value) for key, value in data.items() if key != "version_added"}
        return [without_versions(item) for item in data] if isinstance(data, list) else data

    return without_versions(options)


class ModuleDocFragment:
    """Options of ansible.builtin.ssh, for a connection plugin that inherits from it."""

    # Annotated, since ansible-test takes a plain assignment for YAML text.
    DOCUMENTATION: str = yaml.safe_dump({"options": _options()})
