#!/usr/bin/python
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: pve_container
short_description: A Proxmox LXC container as it is declared
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Creates, changes, starts, stops and removes one LXC container through the Proxmox API, and changes nothing where
    nothing is to be changed.
  - Property strings are compared field by field, so a field that is no longer declared is a change. MAC addresses,
    volume names and the numbers of interfaces, devices and mount points are kept.
  - A change of a running container that Proxmox leaves pending is applied by one restart, or reported as a failure,
    see O(restart). Disks grow and never shrink.
  - A volume that is no longer among O(container.mounts) is detached with a warning, and stays as an unused disk of the
    container. A change that would make a new one at the same time is refused, as a renamed target looks like that.
  - A container without the tag V(launchproof) is never touched, unless O(unmarked_ok) lets it be removed.
  - The rights of the API identity are asked before the first change. What is missing is named with its path and the
    role that grants it.
  - One API call, a lock of the container and a task have a time limit each, see O(api_timeout), O(lock_timeout) and
    O(task_timeout). When a change was sent and its answer did not come, or somebody else changed the container
    meanwhile, it is looked at once more, and what is left is done.
  - Keys that only C(root@pam) may set are known beforehand. Without a way for them, see O(root_via), the module
    fails before it changes anything.
extends_documentation_fragment:
  - dflash.launchproof.pve
  - dflash.launchproof.pve.container
attributes:
  check_mode:
    support: full
    description: Predicts the change, the restart included.
  diff_mode:
    support: full
    description: Shows state and managed keys before and after.
options:
  state:
    description:
      - V(present) makes the container what is declared and leaves it running or not; V(started) and V(stopped) see
        to that too. All three create it if it is not there.
      - V(absent) removes it with its disks.
    type: str
    choices: [present, started, stopped, absent]
    default: started
  restart:
    description:
      - V(when_needed) restarts a running container once when a change would otherwise stay pending.
      - V(never) stores the change and fails, naming what is pending.
    type: str
    choices: [when_needed, never]
    default: when_needed
  force:
    description: Lets O(state=absent) stop a running container first.
    type: bool
    default: false
  unmarked_ok:
    description: Lets O(state=absent) remove a container that does not carry the tag V(launchproof).
    type: bool
    default: false
  shutdown_timeout:
    description: Seconds a clean shutdown may take.
    type: int
    default: 60
  address_timeout:
    description:
      - With O(state=started), seconds until the container must have the addresses that its networks declare.
      - A static address is expected as it is written, V(dhcp) and V(auto) any global one.
    type: int
    default: 60
notes:
  - O(container.template), O(container.pool), O(container.ssh_public_keys) and O(container.password) matter at creation
    alone, and the configuration does not tell what they were. Of keys and password, digests go into an HTML comment of the
    container's notes, and a later run with others is refused. The password's digest is keyed with the API token's
    secret; without a token there is none, and after a new secret it cannot be compared.
  - The tasks of a run that was interrupted are taken up by the next one, whatever they do.
seealso:
  - module: dflash.launchproof.pve_preflight
  - plugin: dflash.launchproof.pct
    plugin_type: connection
  - name: pct(1)
    description: The keys of a container's configuration.
    link: https://pve.proxmox.com/pve-docs/pct.1.html
"""

EXAMPLES = r"""
- name: Have a container with one GPU, running
  dflash.launchproof.pve_container:
    api_host: pve1.example.com
    api_user: deploy@pve
    api_token_id: launchproof
    api_token_secret: "{{ vault_pve_token }}"
    api_ca_path: files/pve-root-ca.pem
    node: pve1
    root_via: ssh
    container:
      vmid: 901
      hostname: trainer
      template: local:vztmpl/debian-12-standard_12.7-1_amd64.tar.zst
      storage: local-lvm
      disk_gib: 32
      cores: 8
      memory: 32768
      features: {nesting: true}
      networks:
        - {name: eth0, bridge: vmbr0, ip: 192.0.2.11/24, gw: 192.0.2.1}
      devices:
        - {path: /dev/nvidia0, mode: "0666"}
        - {path: /dev/nvidiactl, mode: "0666"}
        - {path: /dev/nvidia-uvm, mode: "0666"}
    state: started
  delegate_to: localhost

- name: Remove it, running or not
  dflash.launchproof.pve_container:
    api_host: pve1.example.com
    api_user: deploy@pve
    api_token_id: launchproof
    api_token_secret: "{{ vault_pve_token }}"
    node: pve1
    container: {vmid: 901}
    state: absent
    force: true
  delegate_to: localhost
"""

RETURN = r"""
vmid:
  description: Number of the container.
  returned: always
  type: int
node:
  description: Its node.
  returned: always
  type: str
status:
  description: V(running), V(stopped) or V(absent), after the change or as predicted.
  returned: success
  type: str
runs_now:
  description: Whether it runs at the end of this task. In check mode that is what it does, RV(status) what it would do.
  returned: success
  type: bool
addresses:
  description: Its global addresses by interface; empty unless it runs.
  returned: success
  type: dict
  sample: {eth0: [192.0.2.11]}
steps:
  description: What was done, or would be in check mode, in order.
  returned: always
  type: list
  elements: str
  sample: ["create: hostname, ostemplate, rootfs, tags, vmid", start]
upids:
  description: The Proxmox tasks that were followed.
  returned: always
  type: list
  elements: str
task_warnings:
  description: What tasks that succeeded warned of.
  returned: always
  type: list
  elements: str
pending:
  description: Configuration keys that wait for the container's next start, declared or not.
  returned: success
  type: list
  elements: str
predicted:
  description: Whether this is a prediction made without the API, see O(unavailable_ok).
  returned: success
  type: bool
problems:
  description: What has to be put right first, as M(dflash.launchproof.pve_preflight) returns it.
  returned: failed
  type: list
  elements: dict
api_calls:
  description: The calls that were made.
  returned: always
  type: list
  elements: str
"""

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import ensure, options


def main() -> None:
    options.Module(argument_spec=ensure.SPEC, supports_check_mode=True).conclude(ensure.run)


if __name__ == "__main__":
    main()
