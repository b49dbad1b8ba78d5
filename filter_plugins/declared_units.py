# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: declared_units
short_description: Names of the systemd units that declared jobs ask for
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Reads no more of a job than its name and its instances, so that the launch report knows every job, also one with a
    mistake in it.
options:
  _input:
    description: The declared jobs.
    type: list
    elements: dict
    required: true
"""

EXAMPLES = r"""
- name: The units of this host
  ansible.builtin.debug:
    msg: "{{ launchproof_jobs | dflash.launchproof.declared_units }}"
"""

RETURN = r"""
_value:
  description: Full unit names, in the order of declaration.
  type: list
  elements: str
"""

from ansible_collections.dflash.launchproof.plugins.module_utils.job import spec


def declared_units(jobs):
    """Names of units in the order of declaration."""
    return list(spec.declared_units(jobs))


def declared_gangs(jobs):
    """Units that belong to a gang, and its name."""
    return {unit: gang for unit, gang in spec.declared_units(jobs).items() if gang}


class FilterModule:
    def filters(self):
        return {"declared_units": declared_units, "declared_gangs": declared_gangs}
