# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings one container into its declared state: what module pve_container does, wherever it runs."""

from __future__ import annotations

import time
from dataclasses import replace

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import api as pve_api
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import options, plan, preflight, rights
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.config import ConfigError
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.lifecycle import Lifecycle

SPEC = {
    **options.connection(),
    **options.container(),
    "state": {"type": "str", "choices": ["present", "started", "stopped", "absent"], "default": "started"},
    "restart": {"type": "str", "choices": ["when_needed", "never"], "default": "when_needed"},
    "force": {"type": "bool", "default": False},
    "unmarked_ok": {"type": "bool", "default": False},
    "shutdown_timeout": {"type": "int", "default": 60},
    "address_timeout": {"type": "int", "default": 60},
}


def run(params: dict, check_mode: bool) -> dict:
    """Bring the container into its declared state, or predict that; what the module returns, ``failed`` and ``warnings`` included.

    :param params: the module's parameters, validated by ``SPEC``.
    """
    ensuring = Ensuring(params, check_mode)
    try:
        result = ensuring.result_or_prediction()
    except Refused as refused:
        result = refused.result
    return {**result, "warnings": ensuring.warnings}


class Refused(Exception):
    """The end of a run that cannot do what is asked. ``result`` is what its module returns."""

    def __init__(self, result: dict):
        super().__init__(result["msg"])
        self.result = result


class Ensuring:
    """One run; every failure leaves through ``fail`` with what had been done until then."""

    def __init__(self, params: dict, check_mode: bool):
        self.params, self.check_mode = params, check_mode
        self.container, self.state = params["container"], params["state"]
        self.life: Lifecycle | None = None
        self.warnings: list[str] = []
        self.steps: list[str] = []
        self._asked = False

    def result(self, **more) -> dict:
        life = self.life
        return {
            "vmid": self.container["vmid"],
            "node": self.params["node"],
            "steps": life.done if life and not self.check_mode else self.steps,
            "upids": life.upids if life else [],
            "task_warnings": life.warnings if life else [],
            "api_calls": life.calls if life else [],
            **more,
        }

    def fail(self, problems: list[plan.Problem]) -> None:
        if problems:
            raise self._refusal(problems)

    def _refusal(self, problems: list[plan.Problem]) -> Refused:
        life = self.life
        # Nothing half done goes unsaid.
        done = [*life.done, *([f"{life.begun} (begun)"] if life.begun else [])] if life else []
        note = f"Until then, of container {self.container['vmid']}: {'; '.join(done)}." if done else ""
        return Refused(options.failure(problems, self.params, note, **self.result(changed=bool(done))))

    def result_or_prediction(self) -> dict:
        """What the module returns. Raises Refused."""
        try:
            return self._in_two_looks()
        except pve_api.ApiError as error:
            if self.check_mode and options.may_be_unavailable(self.params, error):
                return self._predicted_without_api(error)
            problem = options.api_problem(error, self.params)
        except ConfigError as error:
            problem = options.config_problem(error, self.params)
        raise self._refusal([problem])

    def _in_two_looks(self) -> dict:
        self.fail(plan.validate(self.container) + plan.route_problems(self.container, self.params))
        api = pve_api.connect(self.params)
        root = api if self.params["api_via"] == "node" else pve_api.connect_root(self.params)
        self.life = Lifecycle(api, root, self.params["node"], self.container["vmid"], self.params["shutdown_timeout"])
        try:
            return self._once()
        except pve_api.ApiError as error:
            # What is there now is looked at once more, and the rest is done from there. A second time would be a
            # quarrel with somebody, or a node that does not answer.
            if not error.look_again:
                raise
            self.warnings.append(f"Looked at container {self.container['vmid']} again: {error}")
            if self.life.begun and not error.ended:
                self.life.done.append(f"{self.life.begun} (its end was not seen)")
            self.life.begun = None
            self.steps = list(self.life.done)
            self._asked = False
            return self._once()

    def _once(self) -> dict:
        before = self.life.read()
        if not (self.state == "absent" and self.params["unmarked_ok"]):
            self.fail(plan.ownership(self.container, before))
        return self._remove(before) if self.state == "absent" else self._ensure(before)

    def _ask_first(self, steps: list[plan.Step], wanted: list[rights.Right]) -> bool:
        """Before the first change: the rights suffice, and nothing of an earlier run is at work; whether it was."""
        if not steps or self._asked:
            return False
        self._asked = True
        self.fail(preflight.missing_rights(self.life.api, self.params, wanted))
        return self.life.take_up()

    def _remove(self, before) -> dict:
        if before is None:
            taken = self.life.elsewhere()
            self.fail([taken] if taken else [])
            return self._ended(before, None, set())
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
        return self._ended(before, None, set())

    def _ensure(self, before) -> dict:
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
            self.warnings.append(
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
        if self.check_mode:
            pending = {} if power else after.pending
            live = after.config if power else after.live
            runs = self.state == "started" or (after.running and self.state != "stopped")
            after = replace(after, live=live, pending=pending, running=runs)
        elif power:
            after = self._settled(want)
        return self._ended(before, after, set(want))

    def _apply(self, steps: list[plan.Step]) -> None:
        for step in steps:
            self.steps.append(step.describe())
            if not self.check_mode:
                self.life.apply(step)

    def _after(self, before, delta):
        """The container after the configuration steps: read back, and held against what was asked for."""
        if self.check_mode:
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
            if not absent or self.check_mode:
                return found
            if time.monotonic() > deadline:
                self.fail(absent)
            time.sleep(0.2)

    def _ended(self, before, after, keys: set[str]) -> dict:
        now = before if self.check_mode else after
        runs_now = bool(now and now.running)
        addresses = self._addresses() if runs_now and self.state != "absent" else {}
        if not runs_now:
            self._warn_of_what_is_inside()
        return self.result(
            changed=bool(self.steps),
            status=plan.view(after, set())["state"],
            addresses=addresses,
            runs_now=runs_now,
            predicted=False,
            pending=sorted(after.pending) if after else [],
            diff={"before": plan.view(before, keys), "after": plan.view(after, keys)},
        )

    def _warn_of_what_is_inside(self) -> None:
        if self.check_mode and self.state == "started":
            self.warnings.append(
                f"Container {self.container['vmid']} does not run. What is inside it (Python environment, jobs, their launch) "
                "cannot be predicted before it exists and runs."
            )

    def _predicted_without_api(self, error: pve_api.ApiError) -> dict:
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
        return self.result(
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
