#!/usr/bin/python
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Start systemd units and prove that they work, or name the failure."""

from __future__ import annotations

DOCUMENTATION = r"""
module: launch_proof
short_description: Start systemd units and prove that they work, or name the failure
version_added: 0.1.0
description:
  - Starts units and does not call them started until they have shown it by evidence of this very launch. Its process
    runs and stays the same, writes its own fresh log, and its work advances, as far as the I(proof) of each asks for it.
  - Otherwise it fails with the name of the failure, the evidence it was decided by, and one sentence on what to do.
    The codes are listed in the collection's documentation.
  - The proof is made by a detached prover on the target, a transient unit of its own. A lost connection or Ctrl-C stops
    neither the prover nor the job; the next run of the task finds both.
  - Brings all that it needs to the target. Units need not have been set up by this collection; a unit that was has a
    ledger of runs, and its exit and log are found there.
requirements:
  - systemd 247 or later on the target, or jobs that role P(dflash.launchproof.job#role) installed there without systemd
  - Python 3.9 or later on the target
attributes:
  check_mode:
    support: full
    description: Says what would be started, with RV(verdict=predicted). Nothing is started, stopped or written.
  diff_mode:
    support: full
    description: Shows state and configuration digest of the units that are started or restarted.
  platform:
    support: full
    platforms: linux
    description: Platforms that the module runs on.
  action:
    support: full
    description: The action plugin prints one live line for each host while the proof goes on.
  async:
    support: none
    description: The prover is detached by itself.
options:
  state:
    description:
      - V(started) is satisfied by a unit that runs, or has completed, with the configuration named by O(jobs[].digest);
        it is proved as it is, nothing is changed. Otherwise the unit is started, or restarted as O(restart) allows.
      - V(restarted) always stops and starts the units.
      - V(observed) proves what is there, and starts or stops nothing.
    type: str
    choices: [started, restarted, observed]
    default: started
  jobs:
    description:
      - The units to prove, all by one prover. May be left out with O(state=observed), then every unit whose job file
        lies in C(/etc/launchproof/jobs) is proved.
    type: list
    elements: dict
    suboptions:
      unit:
        description: Name of the unit; C(.service) may be left out.
        type: str
        required: true
      digest:
        description:
          - Digest of the declared configuration. A unit that runs with another one is restarted.
          - Without it, any active run satisfies O(state=started).
        type: str
      proof:
        description:
          - The proof spec of the job. Left out, that of the delivered job file counts, else the defaults. Times are in seconds; a pattern is a
            Python regular expression, searched in each line of the log.
          - 'C(process): C(count) (1), the least number of live processes of the unit, the main one included; C(stable_for) (5), how long the
            main process must stay the same.'
          - 'C(log): C(path), an absolute path, or a glob where C(count) is above 1, by default the run''s own log; C(count) (1), how many log
            files there are; C(required) and C(forbidden), lists of patterns; C(default_forbidden) (V(true)), whether the built-in patterns
            and uncaught exceptions are forbidden too; C(fresh) (V(true)), whether this run must have written a byte.'
          - 'C(progress), one of C(pattern), with a named group whose text has to change (C(rank) is kept for ranks), and C(json_field), dotted,
            of a JSON line; C(ranks) (1), processes that share the log, told apart by a group C(rank), each of which must advance; C(within)
            (120), how soon after its first value it must change, and the least pause that counts as a stall; C(stall_after), that pause, by
            default the larger of C(within) and C(stall_factor) (10) times the job''s own median pause.'
          - 'C(gpu): C(level) (V(consistent), V(proved) or V(proved_from_node)), C(memory_floor) (67108864 bytes) on each declared GPU, and
            C(within), by default C(deadlines.first_progress).'
          - 'C(objects): C(uri), an C(s3://) prefix or a folder, where C(min_new) (1) objects more must be C(within) (600) of the first progress,
            or of the start where no progress is declared.'
          - 'C(heartbeat): C(path) of a file that the job touches, and C(max_age) (60) of its last write.'
          - 'C(done): C(pattern) of a job that ends: exit status 0 and this line are its success.'
          - 'C(deadlines), from the start of the run: C(start) (10), C(first_log) (60), C(first_progress) (900); C(total), the hard end, by default
            after all others.'
          - 'C(launcher), evidence of a launcher that is not ours: the C(script) that it ran, its exit status C(rc), its C(output), and the
            C(end_mark) that its last line would have printed.'
        type: dict
      log:
        description: The log, where it is neither in the unit's ledger nor named by its StandardOutput=.
        type: path
      user:
        description: User by whom the log must be writable, where the unit's User= does not say it.
        type: str
  restart:
    description:
      - What to do with a unit that runs with another configuration. V(when_changed) restarts it. V(never) leaves it alone
        and reports C(restart_pending). V(always) restarts a unit that runs even when nothing changed.
    type: str
    choices: [when_changed, never, always]
    default: when_changed
  launcher:
    description:
      - What is known of a launcher that is not this module, as evidence when no new run is found.
    type: dict
    suboptions:
      script:
        description: The shell text as it was sent.
        type: str
      rc:
        description: Its exit status as the caller saw it.
        type: int
      output:
        description: What it printed.
        type: str
      end_mark:
        description: Text that its last command would have printed.
        type: str
  timeout:
    description: Hard end of the proof in seconds. By default it follows from the deadlines of each proof spec.
    type: float
  phase:
    description: Internal, for the action plugin. Which part of the work to do in this call.
    type: str
    choices: [all, arm, follow]
    default: all
  session:
    description: Internal, for the action plugin. Id of the session to arm or to follow.
    type: str
  offset:
    description: Internal, for the action plugin. Where to go on in the session's events.
    type: int
    default: 0
  wait:
    description: Internal, for the action plugin. Seconds to wait for news in this call.
    type: float
    default: 5
  host:
    description: Internal, for the action plugin. Name of the host in the rows.
    type: str
author:
  - dflash.launchproof contributors (@dflash)
"""

EXAMPLES = r"""
- name: Start the training and prove that it advances
  dflash.launchproof.launch_proof:
    jobs:
      - unit: training.service
        digest: "{{ training_digest }}"
        proof:
          progress:
            pattern: 'ev=step step=(?P<step>\d+)'
          deadlines:
            first_progress: 900

- name: Prove everything that was delivered to this machine, without touching it
  dflash.launchproof.launch_proof:
    state: observed

- name: Restart a unit of somebody else's that logs to a file, and prove it
  dflash.launchproof.launch_proof:
    state: restarted
    jobs:
      - unit: nginx
        log: /var/log/nginx/error.log
        proof:
          log:
            fresh: false
"""

RETURN = r"""
verdict:
  description: V(ok) when every row is, V(failed), or V(predicted) in check mode.
  type: str
  returned: always
jobs:
  description: One row for each unit, whatever happened.
  type: list
  elements: dict
  returned: always
  contains:
    host:
      description: Name of the host.
      type: str
    unit:
      description: Full name of the unit.
      type: str
    run_id:
      description: Invocation id of the run that was proved, or null.
      type: str
    stage:
      description: Always V(launch_proof).
      type: str
    code:
      description: Name of the diagnosis, null when nothing was decided in check mode.
      type: str
    ok:
      description: Whether the launch is proved.
      type: bool
    seconds:
      description: Time from the baseline to the verdict.
      type: float
    remedy:
      description: What to do, in one sentence; empty for a success.
      type: str
    evidence:
      description: What decided it, as data.
      type: dict
    also_observed:
      description: Codes that held as well.
      type: list
      elements: str
session:
  description: Id of the prover's session on the target.
  type: str
  returned: when not in check mode
started:
  description: Units that were started or restarted.
  type: list
  elements: str
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import bundle, ledger, session
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import SpecError

ARGUMENTS = {
    "state": {"type": "str", "choices": ["started", "restarted", "observed"], "default": "started"},
    "jobs": {
        "type": "list",
        "elements": "dict",
        "options": {
            "unit": {"type": "str", "required": True},
            "digest": {"type": "str"},
            "proof": {"type": "dict"},
            "log": {"type": "path"},
            "user": {"type": "str"},
        },
    },
    "restart": {"type": "str", "choices": ["when_changed", "never", "always"], "default": "when_changed"},
    "launcher": {
        "type": "dict",
        "options": {
            "script": {"type": "str"},
            "rc": {"type": "int"},
            "output": {"type": "str"},
            "end_mark": {"type": "str"},
        },
    },
    "timeout": {"type": "float"},
    "phase": {"type": "str", "choices": ["all", "arm", "follow"], "default": "all"},
    "session": {"type": "str"},
    "offset": {"type": "int", "default": 0},
    "wait": {"type": "float", "default": 5.0},
    "host": {"type": "str"},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    parameters = module.params
    paths = ledger.Paths()
    try:
        if parameters["phase"] == "follow":
            module.exit_json(**session.follow(parameters["session"], parameters["offset"], parameters["wait"], paths))
        request = session.make_request(parameters, paths)
        session.plan(request, paths)
        if module.check_mode:
            rows = session.predicted_rows(request)
            module.exit_json(**session.result(request, {"verdict": "predicted", "jobs": rows}, diff=module._diff))
        armed = session.begin(request, paths, bundle.unpack)
        if parameters["phase"] == "arm":
            news = session.follow(armed["session"], 0, parameters["wait"], paths)
            module.exit_json(plan=session.result(armed, None, diff=module._diff), session=armed["session"], **news)
        document, offset = None, 0
        while document is None:
            news = session.follow(armed["session"], offset, parameters["wait"], paths)
            document, offset = news["verdict"], news["offset"]
        result = session.result(armed, document, diff=module._diff)
    except (session.SessionError, SpecError, OSError) as error:
        module.fail_json(msg=str(error), verdict="failed", jobs=[], started=[])
    if result["verdict"] == "failed":
        module.fail_json(msg=session.summary(result["jobs"]), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
