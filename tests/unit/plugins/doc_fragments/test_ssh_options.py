# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import yaml
from ansible.plugins.connection import ssh
from ansible_collections.dflash.launchproof.plugins.doc_fragments.ssh_options import ModuleDocFragment


def test_the_options_are_those_of_this_ansible_core_without_its_versions():
    def without_versions(data):
        if isinstance(data, dict):
            return {key: without_versions(value) for key, value in data.items() if key != "version_added"}
        return [without_versions(item) for item in data] if isinstance(data, list) else data

    declared = yaml.safe_load(ssh.DOCUMENTATION)["options"]
    assert yaml.safe_load(ModuleDocFragment.DOCUMENTATION) == {"options": without_versions(declared)}
