# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: environment_errors
short_description: Says what is wrong with a declared Python environment
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - What M(dflash.launchproof.python_env) would refuse without a look at the target, said before anything is changed and by the
    names of the variables of role P(dflash.launchproof.python_env#role).
positional: lock, extra_requirements, imports, uv, uv_version, uv_sha256
options:
  _input:
    description: The path of the lock, C(python_env_requirements).
    type: str
    required: true
  lock:
    description: Its text; empty or none where there is no such file.
    type: str
    required: true
  extra_requirements:
    description: C(python_env_extra_requirements).
    type: list
    elements: str
    required: true
  imports:
    description: C(python_env_imports).
    type: list
    elements: str
    required: true
  uv:
    description: C(python_env_uv).
    type: str
    required: true
  uv_version:
    description: C(python_env_uv_version).
    type: str
    required: true
  uv_sha256:
    description: C(python_env_uv_sha256).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Refuse an environment that could not be made
  ansible.builtin.assert:
    that: errors | length == 0
    fail_msg: "{{ errors | join(' ') }}"
  vars:
    lock: "{{ lookup('ansible.builtin.file', 'requirements.lock', errors='ignore') }}"
    errors: "{{ 'requirements.lock' | dflash.launchproof.environment_errors(lock, [], ['torch'], '/usr/local/bin/uv', '', {}) }}"
"""

RETURN = r"""
_value:
  description: Each error as a sentence with variable, value and fix.
  type: list
  elements: str
"""

from ansible.module_utils.common.validation import check_type_list
from ansible_collections.dflash.launchproof.plugins.module_utils.python_env import declaration_errors


def environment_errors(path, lock, extra_requirements, imports, uv, uv_version, uv_sha256):
    """The errors of one host's declaration."""
    if not lock:
        return [
            f"python_env_requirements is {path}: there is no such file on this machine, or it is empty. Give a lock."
        ]
    params = {
        "requirements": lock,
        # As the module reads them: -e NAME=VALUE always gives a string.
        "extra_requirements": check_type_list(extra_requirements),
        "imports": check_type_list(imports),
        "uv": uv,
        "uv_version": uv_version,
        "uv_sha256": uv_sha256,
    }
    return [f"python_env_{error}" for error in declaration_errors(params)]


class FilterModule:
    def filters(self):
        return {"environment_errors": environment_errors}
