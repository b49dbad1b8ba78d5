# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: selected_jobs
short_description: The jobs that this run is about
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Keeps the jobs that are named by O(only) or, without it, by C(--tags). Where no tag is a job's name, all are kept.
  - C(./deploy --tags training) then delivers, restarts and proves the training alone. Tags are fixed in the playbooks, so
    a job of one's own is named by C(./deploy -e launchproof_only=slammed).
positional: tags, only
options:
  _input:
    description: The declared jobs.
    type: list
    elements: dict
    required: true
  tags:
    description: The run's tags, C(ansible_run_tags).
    type: list
    elements: str
    required: true
  only:
    description: Names of jobs, C(launchproof_only). Each must be declared.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: The jobs of this run
  ansible.builtin.debug:
    msg: "{{ launchproof_jobs | dflash.launchproof.selected_jobs(ansible_run_tags, launchproof_only | default([])) }}"
"""

RETURN = r"""
_value:
  description: The jobs that are asked for, in their order.
  type: list
  elements: dict
"""


from ansible.errors import AnsibleFilterError


def selected_jobs(jobs, tags, only=()):
    """Jobs named by only, else those named by a tag, else all. A name in only that no job has is an error."""
    only = only.split(",") if isinstance(only, str) else list(only)
    names = [job.get("name") for job in jobs]
    for name in only:
        if name not in names:
            raise AnsibleFilterError(
                f"launchproof_only names {name!r}, which is not declared. Declared are: {', '.join(names)}."
            )
    return [job for job in jobs if job.get("name") in (only or tags)] or list(jobs)


class FilterModule:
    def filters(self):
        return {"selected_jobs": selected_jobs}
