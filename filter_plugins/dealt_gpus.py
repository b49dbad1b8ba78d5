# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: dealt_gpus
short_description: The GPUs of its node that a host's container gets
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Finds the GPUs that C(launchproof_container.gpus) of a host declares by UUID, by index or by C({count:&nbsp;n}).
  - A count is dealt from those that no host names, in the inventory's order, so that two containers of one node do not
    get the same one. A GPU that two hosts name is shared.
  - An error says which variable is wrong, its value, and what to write instead.
positional: host, hosts, hostvars
options:
  _input:
    description: What M(dflash.launchproof.gpu_info) found on the node.
    type: dict
    required: true
  host:
    description: The host's name.
    type: str
    required: true
  hosts:
    description: All hosts that may have containers on the same node.
    type: list
    elements: str
    required: true
  hostvars:
    description: Their variables. Same C(pve_api_host) and C(pve_node) means same node.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Know which GPUs the container gets
  ansible.builtin.debug:
    msg: "{{ found | dflash.launchproof.dealt_gpus(inventory_hostname, groups.launchproof, hostvars) }}"
"""

RETURN = r"""
_value:
  description: The GPUs in the node's order, with C(index), C(uuid) and C(minor).
  type: list
  elements: dict
"""

from ansible.errors import AnsibleFilterError
from ansible_collections.dflash.launchproof.plugins.module_utils.gpus import GpuError, deal


def dealt_gpus(found, host, hosts, hostvars):
    """The GPUs of one host's container."""

    def node(name):
        return hostvars[name].get("pve_api_host"), hostvars[name].get("pve_node")

    wishes = {name: (hostvars[name].get("launchproof_container") or {}).get("gpus") or [] for name in hosts}
    here = {name: wish for name, wish in wishes.items() if wish and node(name) == node(host)}
    try:
        return deal(here, host, found, node(host)[1])
    except GpuError as error:
        raise AnsibleFilterError(str(error)) from None


class FilterModule:
    def filters(self):
        return {"dealt_gpus": dealt_gpus}
