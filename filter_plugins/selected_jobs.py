# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: selected_jobs
short_description: The jobs that this run's tags ask for
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - Keeps the jobs that are named by C(--tags). Where no tag is a job's name, all are kept.
  - C(./deploy --tags training) then delivers, restarts and proves the training alone.
positional: tags
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
"""

EXAMPLES = r"""
- name: The jobs of this run
  ansible.builtin.debug:
    msg: "{{ launchproof_jobs | dflash.launchproof.selected_jobs(ansible_run_tags) }}"
"""

RETURN = r"""
_value:
  description: The jobs that are asked for, in their order.
  type: list
  elements: dict
"""


def selected_jobs(jobs, tags):
    """Jobs whose name is among the tags, or all where no name is."""
    return [job for job in jobs if job.get("name") in tags] or list(jobs)


class FilterModule:
    def filters(self):
        return {"selected_jobs": selected_jobs}
