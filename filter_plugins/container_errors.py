# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: container_errors
short_description: What is wrong between a host and the declaration of its container
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - A host is derived from C(launchproof_container), the declaration that creates its container. Says where the two have
    come apart, which would run tasks in another container, and where two hosts declare the same container.
positional: host, hosts, hostvars
options:
  _input:
    description: The container's number, C(launchproof_container.vmid).
    type: int
    required: true
  host:
    description: The host's name.
    type: str
    required: true
  hosts:
    description: All hosts that may declare containers.
    type: list
    elements: str
    required: true
  hostvars:
    description: Their variables. Same C(pve_api_host) means same cluster, which has each number once.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Refuse a container with two numbers, or of two hosts
  ansible.builtin.assert:
    that: errors | length == 0
    fail_msg: "{{ errors | join(' ') }}"
  vars:
    errors: "{{ launchproof_container.vmid | dflash.launchproof.container_errors(inventory_hostname, groups.launchproof, hostvars) }}"
"""

RETURN = r"""
_value:
  description: Each error as a sentence with variable, value and fix.
  type: list
  elements: str
"""


def container_errors(vmid, host, hosts, hostvars):
    """The errors of one host."""
    errors = []
    entered = hostvars[host].get("ansible_pct_vmid", vmid)
    if str(entered) != str(vmid):
        errors.append(
            f"ansible_pct_vmid is {entered}: the container that is declared for {host} has launchproof_container.vmid {vmid}, "
            "and its tasks would run in another one. Derive it: ansible_pct_vmid: '{{ launchproof_container.vmid }}'."
        )
    cluster = hostvars[host].get("pve_api_host")
    for other in hosts:
        theirs = hostvars[other]
        if (
            other != host
            and theirs.get("pve_api_host") == cluster
            and str((theirs.get("launchproof_container") or {}).get("vmid")) == str(vmid)
        ):
            errors.append(
                f"launchproof_container.vmid is {vmid}: host {other} declares that container too (pve_api_host is {cluster}). "
                "Give each its own number, or declare the jobs of both on one host."
            )
    return errors


class FilterModule:
    def filters(self):
        return {"container_errors": container_errors}
