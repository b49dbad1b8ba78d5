#!/usr/bin/python
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: job_stop
short_description: Stop units by name, all at once
version_added: 0.1.0
author:
  - dflash.launchproof contributors (@dflash)
description:
  - Stops units and waits until they have ended. Each job is asked to end, and ended after its C(timeout_stop).
  - Units end side by side, so the slowest one decides how long it takes. Nothing is selected by the text of a command
    line.
  - A unit that waits for its automatic restart counts as running and is stopped too. A unit that does not exist is
    reported as inactive.
options:
  units:
    description:
      - Full names of the units.
    type: list
    elements: str
    required: true
attributes:
  check_mode:
    support: full
    description: Says which units would be stopped.
  diff_mode:
    support: full
    description: Shows the state of each unit before and after.
  platform:
    support: full
    platforms: Linux
    description: Needs systemd, or jobs that role P(dflash.launchproof.job#role) installed.
notes:
  - A stopped job starts again at the next boot, unless its C(autostart) is off, and at the next launch.
seealso:
  - module: dflash.launchproof.launch_proof
"""

EXAMPLES = r"""
- name: Stop both extraction shards
  dflash.launchproof.job_stop:
    units: [extraction@1.service, extraction@2.service]
"""

RETURN = r"""
units:
  description: State of each unit before and after, as systemd names it.
  returned: always
  type: dict
  sample: {training.service: {before: active, after: inactive}}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager, supervisor

# In these states there is nothing to stop; "activating" is also the wait for an automatic restart.
ENDED = ("inactive", "failed")


def parse_states(output: str) -> dict[str, str]:
    """ActiveState by Id in the output of C(systemctl show)."""
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in output.split("\n\n")]
    return {block["Id"]: block["ActiveState"] for block in blocks if block.get("Id")}


def states(module: AnsibleModule, units: list[str]) -> dict[str, str]:
    """What systemd, or else the jobs' runners, say about the units now."""
    if not manager.systemd_runs():
        return {unit: state.active_state for unit, (state, _properties) in manager.show(units).items()}
    _rc, output, _err = module.run_command(["systemctl", "show", "-p", "Id,ActiveState", "--", *units], check_rc=True)
    return parse_states(output)


def stop(module: AnsibleModule, units: list[str]) -> tuple[int, str]:
    """Stop units, and wait; what systemctl ended with, and what it said."""
    if not manager.systemd_runs():
        supervisor.stop(units)
        return 0, ""
    rc, _out, err = module.run_command(["systemctl", "stop", "--", *units])
    return rc, err


def main() -> None:
    """Stop what has not ended."""
    module = AnsibleModule(
        argument_spec={"units": {"type": "list", "elements": "str", "required": True}}, supports_check_mode=True
    )
    names = module.params["units"]
    before = states(module, names) if names else {}
    running = [unit for unit, state in before.items() if state not in ENDED]
    after = {unit: "inactive" if unit in running else state for unit, state in before.items()}
    if running and not module.check_mode:
        rc, err = stop(module, running)
        after = states(module, names)
        left = [unit for unit, state in after.items() if state not in ENDED]
        if rc != 0 or left:
            module.fail_json(
                msg=f"Still running: {', '.join(left) or 'none'}. The stop ended with {rc}: {err.strip()}",
                units={unit: {"before": before[unit], "after": after[unit]} for unit in before},
            )
    shown = [
        {name: "".join(f"{unit}: {state}\n" for unit, state in found.items())}
        for name, found in (("before", before), ("after", after))
    ]
    module.exit_json(
        changed=bool(running),
        diff={**shown[0], **shown[1]},
        units={unit: {"before": before[unit], "after": after[unit]} for unit in before},
    )


if __name__ == "__main__":
    main()
