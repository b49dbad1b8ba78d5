#!/usr/bin/python
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: pve_preflight
short_description: Check a declared container against its Proxmox node, before any change
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Asks the API whether O(container) can be brought about. It checks that the API is reachable, the certificate
    trusted, the identity valid and its rights sufficient, the node online, the template there, the vmid free or
    this collection's own, the values such as Proxmox takes, the storages able to hold what is declared, the bridges
    there, and, where the container is to be started or changed and O(root_via) lets it look, devices, sources of bind mounts
    and hook script too.
  - All problems are reported at once, each with variable, value and fix.
  - Sends reads only, apart from the login that O(api_password) needs.
extends_documentation_fragment:
  - dflash.launchproof.pve
  - dflash.launchproof.pve.container
attributes:
  check_mode:
    support: full
    description: Changes nothing in either mode.
  diff_mode:
    support: none
    description: There is nothing to compare.
seealso:
  - module: dflash.launchproof.pve_container
"""

EXAMPLES = r"""
- name: Know what is wrong before anything is changed
  dflash.launchproof.pve_preflight:
    api_host: pve1.example.com
    api_user: deploy@pve
    api_token_id: launchproof
    api_token_secret: "{{ vault_pve_token }}"
    api_ca_path: files/pve-root-ca.pem
    node: pve1
    container:
      vmid: 901
      hostname: trainer
      template: local:vztmpl/debian-12-standard_12.7-1_amd64.tar.zst
      storage: local-lvm
      disk_gib: 32
  delegate_to: localhost
"""

RETURN = r"""
problems:
  description: What has to be put right first. Returned with a failure.
  returned: failed
  type: list
  elements: dict
  sample:
    - variable: container.template
      value: local:vztmpl/debian-13.tar.zst
      problem: there is no such file on that storage
      fix: Choose one of local:vztmpl/debian-12.tar.zst.
unknown:
  description: What could not be looked at, and why.
  returned: always
  type: list
  elements: str
unavailable:
  description: Whether the node's API did not answer, which check mode accepts with O(unavailable_ok).
  returned: success
  type: bool
api_calls:
  description: The calls that were made.
  returned: always
  type: list
  elements: str
"""

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import options, preflight


def main() -> None:
    options.Module(argument_spec=preflight.SPEC, supports_check_mode=True).conclude(preflight.run)


if __name__ == "__main__":
    main()
