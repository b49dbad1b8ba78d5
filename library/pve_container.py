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

import time
from dataclasses import replace

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import api as pve_api
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import options, plan, preflight, rights
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.config import ConfigError
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.lifecycle import Lifecycle


class Run:
    """One run of the module; every failure leaves through ``fail`` with what had been done until then."""

    def __init__(self, module: options.Module):
        self.module, self.params = module, module.params
        self.container, self.state = module.params["container"], module.params["state"]
        self.life: Lifecycle | None = None
        self.steps: list[str] = []
        self._asked = False

    def result(self, **more) -> dict:
        life = self.life
        return {
            "vmid": self.container["vmid"],
            "node": self.params["node"],
            "steps": life.done if life and not self.module.check_mode else self.steps,
            "upids": life.upids if life else [],
            "task_warnings": life.warnings if life else [],
            "api_calls": life.calls if life else [],
            **more,
        }

    def fail(self, problems: list[plan.Problem]) -> None:
        if not problems:
            return
        life = self.life
        # Nothing half done goes unsaid.
        done = [*life.done, *([f"{life.begun} (begun)"] if life.begun else [])] if life else []
        note = f"Until then, of container {self.container['vmid']}: {'; '.join(done)}." if done else ""
        options.fail(self.module, problems, note, **self.result(changed=bool(done)))

    def main(self) -> None:
        self.fail(plan.validate(self.container) + plan.route_problems(self.container, self.params))
        api = pve_api.connect(self.params)
        root = api if self.params["api_via"] == "node" else pve_api.connect_root(self.params)
        self.life = Lifecycle(api, root, self.params["node"], self.container["vmid"], self.params["shutdown_timeout"])
        try:
            self._once()
        except pve_api.ApiError as error:
            # What is there now is looked at once more, and the rest is done from there. A second time would be a
            # quarrel with somebody, or a node that does not answer.
            if not error.look_again:
                raise
            self.module.warn(f"Looked at container {self.container['vmid']} again: {error}")
            if self.life.begun and not error.ended:
                self.life.done.append(f"{self.life.begun} (its end was not seen)")
            self.life.begun = None
            self.steps = list(self.life.done)
            self._asked = False
            self._once()

    def _once(self) -> None:
        before = self.life.read()
        if not (self.state == "absent" and self.params["unmarked_ok"]):
            self.fail(plan.ownership(self.container, before))
        if self.state == "absent":
            self._remove(before)
        else:
            self._ensure(before)

    def _ask_first(self, steps: list[plan.Step], wanted: list[rights.Right]) -> bool:
        """Before the first change: the rights suffice, and nothing of an earlier run is at work; whether it was."""
        if not steps or self._asked:
            return False
        self._asked = True
        self.fail(preflight.missing_rights(self.life.api, self.params, wanted))
        return self.life.take_up()

    def _remove(self, before) -> None:
        if before is None:
            taken = self.life.elsewhere()
            self.fail([taken] if taken else [])
            self._exit(before, None, set())
        vmid = self.container["vmid"]
        if before.running and not self.params["force"]:
            self.fail(
                [
                    plan.Problem(
                        "container.vmid", vmid, "this container is running", "Stop it first, or say force: true."
                    )
                ]
            )
        if before.config.get("protection") == "1":
            self.fail(
                [
                    plan.Problem(
                        "container.vmid",
                        vmid,
                        "this container is protected",
                        "Take its protection away first (state: present, protection: false).",
                    )
                ]
            )
        steps = [plan.Step("stop")] if before.running else []
        steps.append(plan.Step("destroy"))
        if self._ask_first(steps, rights.needed(vmid, {}, destroy=True, power=before.running)):
            return self._once()
        self._apply(steps)
        return self._exit(before, None, set())

    def _ensure(self, before) -> None:
        want, problems = plan.wanted(self.container, before, self.params["api_token_secret"])
        if before is None:
            problems += plan.creation_problems(self.container)
            taken = None if problems else self.life.elsewhere()
            problems += [taken] if taken else []
        delta = plan.changes(want, before)
        unprivileged = preflight.is_unprivileged(self.container, before)
        guarded = plan.root_only(delta, before, unprivileged)
        self.fail(problems + preflight.root_problems(guarded, self.params))
        for props in plan.detached(want, before).values():
            self.module.warn(
                f"Volume {props['volume']!r} of container {self.container['vmid']}, mounted at {props['mp']!r}, is no longer "
                "declared: it is detached, and stays as an unused disk (unusedN) until somebody removes it or the container."
            )
        steps = plan.steps(self.container, before, delta, guarded, pve_api.identity(self.params) == "root@pam")
        power, _waiting = plan.power(self.state, plan.predict(before, delta), set(want), self.params["restart"])
        wanted = preflight.rights_for(self.life.api, self.container, before, delta, guarded, power=bool(power))
        if self._ask_first(steps + power, wanted):
            return self._once()
        self._apply(steps)
        after = self._after(before, delta)
        power, waiting = plan.power(self.state, after, set(want), self.params["restart"])
        if waiting:
            self.fail(
                [
                    plan.Problem(
                        "container_restart",
                        self.params["restart"],
                        f"{', '.join(waiting)} of container {self.container['vmid']} stays pending until it is "
                        "restarted",
                        "Say when_needed, or restart the container yourself.",
                    )
                ]
            )
        self._apply(power)
        if self.module.check_mode:
            pending = {} if power else after.pending
            live = after.config if power else after.live
            runs = self.state == "started" or (after.running and self.state != "stopped")
            after = replace(after, live=live, pending=pending, running=runs)
        elif power:
            after = self._settled(want)
        return self._exit(before, after, set(want))

    def _apply(self, steps: list[plan.Step]) -> None:
        for step in steps:
            self.steps.append(step.describe())
            if not self.module.check_mode:
                self.life.apply(step)

    def _after(self, before, delta):
        """The container after the configuration steps: read back, and held against what was asked for."""
        if self.module.check_mode:
            return plan.predict(before, delta)
        if not self.steps:
            return before
        after = self.life.read()
        want, _problems = plan.wanted(self.container, after)
        left = sorted(plan.changes(want, after)) if after else ["everything"]
        if left:
            raise pve_api.ApiError(
                "refused",
                f"the API accepted {'; '.join(self.steps)}, but {', '.join(left)} of container "
                f"{self.container['vmid']} did not change",
            )
        return after

    def _settled(self, want):
        """The container after a power step that succeeded: as it was asked for, or it is a failure."""
        after = self.life.read()
        running = after is not None and after.running
        if running != (self.state != "stopped"):
            raise pve_api.ApiError(
                "refused",
                f"{self.steps[-1]} of container {self.container['vmid']} ended well, but it "
                f"{'runs' if running else 'does not run'} now",
            )
        left = sorted(key for key in after.pending if key in want)
        if running and left:
            raise pve_api.ApiError(
                "refused", f"{', '.join(left)} of container {self.container['vmid']} is pending after {self.steps[-1]}"
            )
        return after

    def _addresses(self) -> dict[str, list[str]]:
        """The container's addresses, waited for where the declaration promises some: the API tells no event."""
        deadline = time.monotonic() + self.params["address_timeout"]
        while True:
            found = self.life.addresses()
            absent = plan.missing_addresses(self.container, found) if self.state == "started" else []
            if not absent or self.module.check_mode:
                return found
            if time.monotonic() > deadline:
                self.fail(absent)
            time.sleep(0.2)

    def _exit(self, before, after, keys: set[str]) -> None:
        runs_now = bool(
            (before if self.module.check_mode else after) and (before if self.module.check_mode else after).running
        )
        addresses = self._addresses() if runs_now and self.state != "absent" else {}
        if not runs_now:
            self._warn_of_what_is_inside()
        self.module.exit_json(
            **self.result(
                changed=bool(self.steps),
                status=plan.view(after, set())["state"],
                addresses=addresses,
                runs_now=runs_now,
                predicted=False,
                pending=sorted(after.pending) if after else [],
                diff={"before": plan.view(before, keys), "after": plan.view(after, keys)},
            )
        )

    def _warn_of_what_is_inside(self) -> None:
        if self.module.check_mode and self.state == "started":
            self.module.warn(
                f"Container {self.container['vmid']} does not run. What is inside it (Python environment, jobs, their launch) "
                "cannot be predicted before it exists and runs."
            )

    def predict_without_api(self, error: pve_api.ApiError) -> None:
        """Check mode before the node itself is up: all of it would be done."""
        want, problems = plan.wanted(self.container, None)
        absent = self.state == "absent"
        self.fail([] if absent else problems)
        after = None if absent else replace(plan.predict(None, want), running=self.state == "started")
        steps = [] if absent else plan.steps(self.container, None, want, {}, api_is_root=True)
        steps += [plan.Step("start")] if self.state == "started" else []
        self.steps = [step.describe() for step in steps]
        status = plan.view(after, set())["state"]
        self._warn_of_what_is_inside()
        self.module.exit_json(
            **self.result(
                changed=bool(steps),
                predicted=True,
                status=status,
                runs_now=False,
                addresses={},
                pending=[],
                diff={"before": plan.view(None, set()), "after": plan.view(after, set(want))},
                msg=f"Predicted without the node, which is not up yet ({error}): "
                "rights, storages, template and devices were not looked at.",
            )
        )


def main() -> None:
    module = options.Module(
        argument_spec={
            **options.connection(),
            **options.container(),
            "state": {"type": "str", "choices": ["present", "started", "stopped", "absent"], "default": "started"},
            "restart": {"type": "str", "choices": ["when_needed", "never"], "default": "when_needed"},
            "force": {"type": "bool", "default": False},
            "unmarked_ok": {"type": "bool", "default": False},
            "shutdown_timeout": {"type": "int", "default": 60},
            "address_timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    options.require_libraries(module)
    run = Run(module)
    try:
        run.main()
    except pve_api.ApiError as error:
        if options.may_be_unavailable(module, error):
            run.predict_without_api(error)
        run.fail([options.api_problem(error, module.params)])
    except ConfigError as error:
        run.fail([plan.Problem("container", module.params["container"]["vmid"], str(error), "Correct that value.")])


if __name__ == "__main__":
    main()
