#!/usr/bin/python
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings the parts of the local node up or down."""

from __future__ import annotations

DOCUMENTATION = r"""
module: local_node_service
short_description: Brings up or takes down the local Proxmox node of the demo and the tests
version_added: 0.1.0
description:
  - The local node is a Proxmox VE API over real LXC containers on one machine, with pct, pvesh, an SSH server and an S3 server.
    It is for development, tests and the demo, and listens on loopback and on its own bridge only.
  - The module looks at every part, brings up those that are not, and leaves alone those that are. It needs no service manager.
  - Role P(dflash.launchproof.local_node#role) installs what the module needs and calls it.
options:
  state:
    description:
      - With V(up) every part is there and answers.
      - With V(down) the processes, containers, network and files that the node added to the machine are gone. Its state folder stays,
        as the template and the Python environment are caches, and what the S3 server holds is not the node's to delete.
      - With V(looked) nothing is changed; the parts are reported.
    type: str
    choices: [up, down, looked]
    default: up
  settings:
    description: What the node is like. See the options of role P(dflash.launchproof.local_node#role) for more.
    type: dict
    required: true
    suboptions:
      dir:
        description: The node's state folder.
        type: path
        required: true
      node:
        description: The node's name in the API.
        type: str
        required: true
      bridge:
        description: The containers' bridge.
        type: str
        required: true
      network:
        description: The containers' IPv4 network; its first address is the node's.
        type: str
        required: true
      api_port:
        description: The port of the API, on loopback.
        type: int
        required: true
      ssh_port:
        description: The port of the SSH server, on loopback.
        type: int
        required: true
      s3_port:
        description: The port of the S3 server, on the bridge.
        type: int
        required: true
      s3_bucket:
        description: The bucket that is made.
        type: str
        required: true
      token_id:
        description: The name of the API token of root@pam.
        type: str
        required: true
      faults:
        description: Let root@pam make the API fail on purpose, by C(POST /_fault).
        type: bool
        default: false
      template:
        description: The file name of the container template.
        type: str
        required: true
      suite:
        description: The Debian suite of the template.
        type: str
        required: true
      packages:
        description: The packages of the template.
        type: list
        elements: str
        required: true
      machine_packages:
        description: The Debian packages that the machine must have; those it lacks are reported.
        type: list
        elements: str
        default: []
  purge:
    description: With O(state=down), remove the state folder too, with everything in it.
    type: bool
    default: false
  force:
    description:
      - With O(state=down), destroy also containers of this node that do not carry the tag C(launchproof), and remove the bridge although
        interfaces of others are on it.
    type: bool
    default: false
attributes:
  check_mode:
    description: Reports what would be changed and changes nothing.
    support: full
  diff_mode:
    description: Shows the state of every part before and after.
    support: full
  idempotent:
    description: When every part is up (or gone), nothing is changed.
    support: full
author:
  - dflash.launchproof contributors (@dflash)
"""

EXAMPLES = r"""
- name: Bring the local node up
  ansible.builtin.include_role:
    name: dflash.launchproof.local_node
"""

RETURN = r"""
parts:
  description: The state of every part before the module did anything; V(up), or why it is not.
  returned: always
  type: dict
  sample: {bridge: up, api: no answer}
changed_parts:
  description: The parts that were brought up or taken down, or would be.
  returned: always
  type: list
  elements: str
program:
  description: SHA-256 of the node's programs on disk.
  returned: always
  type: str
missing_packages:
  description: The Debian packages of O(settings.machine_packages) that are not installed.
  returned: when O(state) is not V(down)
  type: list
  elements: str
outputs:
  description:
    - What clients of the node and its containers need. Secrets are not in it, only the files they are in.
    - Also written to C(outputs.json) in the state folder, which root alone can read and which has one key more,
      C(secret_environment), for index and proxy settings that carry a user or password.
  returned: when O(state) is not V(down)
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible_collections.dflash.launchproof.plugins.module_utils.node.parts import NodeError  # noqa: E402
from ansible_collections.dflash.launchproof.plugins.module_utils.node.service import Service  # noqa: E402


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["up", "down", "looked"], "default": "up"},
            "settings": {
                "type": "dict",
                "required": True,
                "options": {
                    "dir": {"type": "path", "required": True},
                    "node": {"type": "str", "required": True},
                    "bridge": {"type": "str", "required": True},
                    "network": {"type": "str", "required": True},
                    "api_port": {"type": "int", "required": True},
                    "ssh_port": {"type": "int", "required": True},
                    "s3_port": {"type": "int", "required": True},
                    "s3_bucket": {"type": "str", "required": True},
                    "token_id": {"type": "str", "required": True, "no_log": False},
                    "faults": {"type": "bool", "default": False},
                    "template": {"type": "str", "required": True},
                    "suite": {"type": "str", "required": True},
                    "packages": {"type": "list", "elements": "str", "required": True},
                    "machine_packages": {"type": "list", "elements": "str", "default": []},
                },
            },
            "purge": {"type": "bool", "default": False},
            "force": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        service = Service(module.params["settings"])
        dry = module.check_mode or module.params["state"] == "looked"
        down = module.params["state"] == "down"
        with service.lock(dry, down):
            result = service.down(module.params["purge"], module.params["force"], dry) if down else service.up(dry)
    except NodeError as error:
        module.fail_json(msg=str(error))
    if module.params["state"] == "looked":
        result["changed"] = False
    module.exit_json(**result)


if __name__ == "__main__":
    main()
