#!/usr/bin/python
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: job_install
short_description: Install jobs as units, ready to be launched and proved
version_added: 0.1.0
author:
  - dflash.launchproof contributors (@dflash)
description:
  - Puts all files of all jobs onto the target in one call. These are unit files, environment files, secrets,
    what the prover has to know about each unit, the program C(launchproof), and the code.
  - Everything is looked at before the first write. Units are checked with C(systemd-analyze verify).
  - Where systemd does not run the target, supervisor keeps the jobs. It is started when it does not run, and reads its programs
    again when one came or went; neither starts or ends a job.
  - Nothing is started or stopped. The returned digest of each unit tells M(dflash.launchproof.launch_proof) whether
    what runs is what is declared.
  - A unit file, link or folder that this module did not write is never replaced, and nothing is removed but what a
    declared job no longer has. Units that are no longer declared are reported and left as they are.
options:
  jobs:
    description:
      - The jobs, as in the variable C(launchproof_jobs) of the role P(dflash.launchproof.job#role), which documents
        their options.
    type: list
    elements: dict
    required: true
  gpus:
    description:
      - GPUs of the target, by UUID or index. When not empty, a job may name no other.
    type: list
    elements: str
    default: []
  manager:
    description:
      - What is to keep the jobs. V(auto) takes systemd where it runs the target, and supervisor elsewhere; the others fail where the
        target has the other one.
      - Supervisor is expected in C(/opt/launchproof/supervisor), where role P(dflash.launchproof.job#role) puts it.
    type: str
    choices: [auto, systemd, supervisor]
    default: auto
  look_first:
    description:
      - Where the user of a job is missing, or supervisor is to keep the jobs, changes nothing and returns RV(lacking), for whoever can
        put that right and then calls again without this option.
    type: bool
    default: false
  secrets:
    description:
      - Internal. The action plugin takes the secrets out of O(jobs) and hands them over here, by unit.
    type: dict
    default: {}
  delivered:
    description:
      - Internal. What the action plugin knows of code and locks, by job.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Also predicts on a target that has neither the user nor the job's program yet.
  diff_mode:
    support: full
    description: Secrets are shown by name alone.
  platform:
    support: full
    platforms: Linux
    description: Needs systemd 240 or newer, or supervisor.
notes:
  - Runs as root on the target.
  - The code of a job is sent only when the target does not have this version yet. It appears as a whole, C(code.dest)
    is a link to it. As many earlier versions stay as C(code.keep) says.
seealso:
  - module: dflash.launchproof.launch_proof
"""

EXAMPLES = r"""
- name: Install a training job
  dflash.launchproof.job_install:
    jobs:
      - name: training
        command: [/opt/venv/bin/python, /opt/train/train.py, --max-steps, "2000"]
        code:
          src: ./train
          dest: /opt/train
        user: dflash
        proof:
          progress:
            pattern: step=(?P<step>\d+)
  register: installed
"""

RETURN = r"""
units:
  description: One entry a declared unit.
  returned: always
  type: list
  elements: dict
  contains:
    unit:
      description: Name of the unit.
      type: str
      sample: training.service
    job:
      description: Name of the job.
      type: str
      sample: training
    digest:
      description:
        - Hash of everything that a run of this unit depends on. V(none) in check mode where it cannot be known yet.
      type: str
      sample: sha256:9f0b5c1e
    digest_before:
      description: The digest that was installed before, or V(none).
      type: str
      sample: sha256:1c22d7aa
undeclared:
  description:
    - Units that were installed here earlier and are not among O(jobs). Instances of a job with C(dropped_instances=remove)
      were stopped and removed, nothing was done to the others.
  returned: always
  type: list
  elements: str
  sample: [extraction@3.service]
reloaded:
  description: Whether systemd was told to read its units again, or supervisor its programs.
  returned: always
  type: bool
lacking:
  description: What has to be seen to before anything is installed. Nothing was changed.
  returned: with O(look_first), where there is something
  type: dict
  contains:
    users:
      description: Users of jobs that do not exist.
      type: list
      elements: str
    supervisor:
      description: Whether supervisor is to keep the jobs, so that its environment has to be there.
      type: bool
errors:
  description: What is wrong with the declaration or with the target, one sentence each. Nothing was changed.
  returned: on failure
  type: list
  elements: str
"""

import os
from dataclasses import replace

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dflash.launchproof.plugins.module_utils.job import install, spec
from ansible_collections.dflash.launchproof.plugins.module_utils.job.code import CodeError
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import bundle


def read_jobs(module: AnsibleModule) -> list[spec.Job]:
    """The declared jobs with the secrets that travelled apart from them."""
    jobs, errors = spec.validate(module.params["jobs"], module.params["gpus"])
    if errors:
        fail(module, errors)
    secrets = module.params["secrets"]
    return [
        replace(job, units=tuple(replace(unit, secrets=secrets.get(unit.name, {})) for unit in job.units))
        for job in jobs
    ]


def fail(module: AnsibleModule, errors: list[str]) -> None:
    """End with every error; nothing was changed."""
    module.fail_json(msg="\n- ".join(["Nothing was changed:", *errors]), errors=errors)


def main() -> None:
    """Plan, and unless in check mode apply."""
    module = AnsibleModule(
        argument_spec={
            "jobs": {"type": "list", "elements": "dict", "required": True},
            "gpus": {"type": "list", "elements": "str", "default": []},
            "manager": {"type": "str", "choices": ["auto", "systemd", "supervisor"], "default": "auto"},
            "look_first": {"type": "bool", "default": False},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "delivered": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    # Folders on the way to a run's own must be passable for the job's user, whatever root's habit is here.
    os.umask(0o022)
    jobs = read_jobs(module)
    delivered = {name: install.Delivered(**given) for name, given in module.params["delivered"].items()}
    host = install.Host()
    lacking = install.lacking(jobs, host, module.params["manager"]) if module.params["look_first"] else {}
    if any(lacking.values()):
        module.exit_json(changed=False, lacking=lacking)
    try:
        plan = install.make_plan(jobs, delivered, bundle.build(), host, module.check_mode, module.params["manager"])
    except install.InstallError as error:
        fail(module, error.problems)
    if plan.needs_code and not module.check_mode:
        module.exit_json(changed=False, needs_code=plan.needs_code)
    reload = plan.units_changed or install.needs_reload(jobs, host)
    if not module.check_mode:
        try:
            install.apply(plan, host, reload)
        except (install.ApplyError, CodeError, OSError) as error:
            module.fail_json(msg=f"Installing stopped half-way, running it again completes it: {error}", diff=plan.diff)
    for warning in plan.warnings:
        module.warn(warning)
    module.exit_json(
        changed=plan.changes or reload, diff=plan.diff, units=plan.rows, undeclared=plan.undeclared, reloaded=reload
    )


if __name__ == "__main__":
    main()
