# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: gpu_devices
short_description: A declared container with its GPUs as devices
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Replaces C(gpus) of a declaration by the entries of C(devices) that they come to, which is what
    M(dflash.launchproof.pve_container) knows. Those are the nodes of exactly these GPUs, and the driver's control nodes that
    are there.
  - A declaration without C(gpus) stays as it is. An entry that C(devices) has for the same path already stays too.
positional: gpus, nodes
options:
  _input:
    description: The declaration, C(launchproof_container).
    type: dict
    required: true
  gpus:
    description: The GPUs as P(dflash.launchproof.dealt_gpus#filter) gives them; V(none) where they are not known.
    type: list
    elements: dict
    required: true
  nodes:
    description: The device nodes of the node with their modes.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: The declaration as the module takes it
  ansible.builtin.debug:
    msg: "{{ launchproof_container | dflash.launchproof.gpu_devices(gpu_host_gpus, gpu_host_found.nodes) }}"
"""

RETURN = r"""
_value:
  description: The declaration with C(devices) instead of C(gpus).
  type: dict
"""

from ansible.errors import AnsibleFilterError
from ansible_collections.dflash.launchproof.plugins.module_utils.gpus import VARIABLE, devices


def gpu_devices(container, gpus, nodes):
    """The declaration with devices for its gpus."""
    if not container.get("gpus"):
        return {key: value for key, value in container.items() if key != "gpus"}
    if gpus is None:
        raise AnsibleFilterError(
            f"{VARIABLE} is {container['gpus']!r}: the GPUs of the node have not been read. That is done by role gpu_host, for "
            "containers that are reached by ansible_connection: dflash.launchproof.pct (ansible_pct_vmid is set)."
        )
    own = list(container.get("devices") or [])
    paths = {device["path"] for device in own}
    added = [device for device in devices(gpus, nodes) if device["path"] not in paths]
    return {**{key: value for key, value in container.items() if key != "gpus"}, "devices": own + added}


class FilterModule:
    def filters(self):
        return {"gpu_devices": gpu_devices}
