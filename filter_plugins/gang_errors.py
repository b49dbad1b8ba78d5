# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
name: gang_errors
short_description: Says which gangs a play would not start as a whole
version_added: 0.1.0
author: dflash.launchproof contributors (@dflash)
description:
  - No member of a gang comes to its first step without the others, and a launch is proved by steps. A play that starts the last member
    only after it has proved the first one would wait for itself, until the deadline.
positional: members, forks, serial
options:
  _input:
    description: Names of this host's gangs.
    type: list
    elements: str
    required: true
  members:
    description: Names of the gangs of each host of the run, the hosts in the order of the play.
    type: dict
    required: true
  forks:
    description: How many hosts ansible works on at once, C(ansible_forks).
    type: int
    required: true
  serial:
    description: The play's C(serial) where it has one. A number, a percentage, or a list of both.
    type: raw
"""

EXAMPLES = r"""
- name: Refuse a gang that could not start
  ansible.builtin.assert:
    that: errors | length == 0
  vars:
    members:
      c1: [training]
      c2: [training]
    errors: "{{ ['training'] | dflash.launchproof.gang_errors(members, ansible_forks) }}"
"""

RETURN = r"""
_value:
  description: Each error as a sentence with the two numbers and the fix.
  type: list
  elements: str
"""

from ansible.utils.helpers import pct_to_int


def gang_errors(gangs, members, forks, serial=None):
    """The errors of one host's gangs."""
    errors = []
    for gang in gangs:
        hosts = [host for host, theirs in members.items() if gang in theirs]
        limits = [(int(forks), f"forks is {forks}", f"--forks {len(hosts)}")]
        parts = [sum(host in hosts for host in batch) for batch in batches(list(members), serial)]
        limits.append((max(parts), f"serial is {serial}", "a serial whose batches do not part them, or leave it out"))
        number, why, fix = min(limits)
        if number < len(hosts):
            errors.append(
                f"Gang {gang} has {len(hosts)} hosts and ansible works on {number} at once ({why}): the last would start only "
                f"after the first is proved, which waits for the last. Use {fix}."
            )
    return errors


def batches(hosts, serial=None):
    """The hosts as ansible's serial deals them: by its last element once the others are used up; all at once without it."""
    serial = serial or "100%"
    given = serial if isinstance(serial, (list, tuple)) else [serial]
    sizes = [pct_to_int(size, len(hosts)) for size in given]
    found = []
    while hosts:
        size = sizes[min(len(found), len(sizes) - 1)] or len(hosts)
        found.append(hosts[:size])
        hosts = hosts[size:]
    return found


class FilterModule:
    def filters(self):
        return {"gang_errors": gang_errors}
