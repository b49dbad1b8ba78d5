# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One container through the API: read it, send planned steps, take up what an interrupted run left behind."""

from __future__ import annotations

import ipaddress

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import config
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.api import Api, ApiError
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.config import Container
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.plan import Problem, Step

#: The tasks that the steps of a plan begin. Others (a backup, a console) are nobody's interrupted run.
_OWN_TASKS = ("vzcreate", "vzstart", "vzshutdown", "vzstop", "vzreboot", "vzdestroy", "resize")


class Lifecycle:
    """Container ``vmid`` on ``node``.

    :param root: the way root-only keys take, or None.
    :param shutdown_timeout: seconds a clean shutdown may take before the container is stopped hard.
    """

    def __init__(self, api: Api, root: Api | None, node: str, vmid: int, shutdown_timeout: int):
        self.api, self.root, self.vmid = api, root, vmid
        self._guests = f"nodes/{node}/lxc"
        self._path = f"{self._guests}/{vmid}"
        self._tasks = f"nodes/{node}/tasks"
        self._shutdown_timeout = shutdown_timeout
        self.done: list[str] = []
        #: The step that was sent last, as long as nobody knows what became of it.
        self.begun: str | None = None
        #: What a plan was made from, and the keys of it that this run has changed since.
        self._seen: Container | None = None
        self._changed: set[str] = set()

    @property
    def _ways(self) -> list[Api]:
        return [self.api, *([self.root] if self.root and self.root is not self.api else [])]

    @property
    def calls(self) -> list[str]:
        return [call for way in self._ways for call in way.calls]

    @property
    def upids(self) -> list[str]:
        return [upid for way in self._ways for upid in way.upids]

    @property
    def warnings(self) -> list[str]:
        return [text for way in self._ways for text in way.warnings]

    def read(self) -> Container | None:
        """The container as it is now, in two calls; None if there is none with that id.

        One that is just being created, by a run that was interrupted, is waited for: before that it shows nothing.
        """
        found = self._peek()
        if found is not None and found.lock == "create" and self.take_up():
            found = self._peek()
        self._seen, self._changed = found, set()
        return found

    def _peek(self) -> Container | None:
        try:
            items = self.api.get(f"{self._path}/pending")
            status = self.api.get(f"{self._path}/status/current")
        except ApiError as error:
            # Whoever has rights on a pool alone is not told that a number is free, but that it is not to be looked at.
            if error.kind == "absent" or (error.kind == "forbidden" and self._is_free()):
                return None
            raise
        return config.from_pending(items, status.get("status") == "running")

    def take_up(self) -> bool:
        """Wait for the tasks that an interrupted run left working on the container; whether there were any.

        How they end is no failure of this run, which looks at what is there then and goes on from it.
        """
        running = [
            task
            for task in self.api.get(self._tasks, vmid=self.vmid, source="active")
            # A real node lists tasks among the active ones for a while after their end.
            if task["type"] in _OWN_TASKS and not task.get("status") and not task.get("endtime")
        ]
        for task in running:
            try:
                self.api.follow(task["upid"], f"{task['type']} of container {self.vmid}, which was running already")
            except ApiError as error:
                if not error.ended:
                    raise
                self.api.warnings.append(f"{error}\nIt was an earlier run's; what it left undone is done now.")
        return bool(running)

    def _is_free(self) -> bool:
        """Whether no guest of the cluster has this id. This takes no right, unlike a look at the guest."""
        try:
            self.api.get("cluster/nextid", vmid=self.vmid)
        except ApiError as error:
            if error.kind != "bad_request":
                raise
            return False
        return True

    def elsewhere(self) -> Problem | None:
        """Who has this id, when this node has no container with it: asked before a container is created."""
        if self._is_free():
            return None
        guests = [guest for guest in self.api.get("cluster/resources", type="vm") if guest.get("vmid") == self.vmid]
        who = [f"{guest['type']} {guest.get('name', '')!r} on node {guest['node']!r}" for guest in guests]
        return Problem(
            "container.vmid",
            self.vmid,
            f"taken by {who[0] if who else 'a guest that this identity may not see'}",
            "Choose a free vmid.",
        )

    def addresses(self) -> dict[str, list[str]]:
        """Global addresses of the running container by interface, without their prefix."""
        result: dict[str, list[str]] = {}
        for interface in self.api.get(f"{self._path}/interfaces") or []:
            if interface["name"] == "lo":
                continue
            # Proxmox VE 8 has inet and inet6 alone, 9 lists every address.
            entries = interface.get("ip-addresses")
            found = (
                [entry["ip-address"] for entry in entries]
                if entries is not None
                else [interface[family].partition("/")[0] for family in ("inet", "inet6") if interface.get(family)]
            )
            result[interface["name"]] = [item for item in found if not ipaddress.ip_address(item).is_link_local]
        return result

    def apply(self, step: Step) -> None:
        """Send one step and wait for its end. Raises ApiError."""
        api = self.root if step.root and self.root else self.api
        params = dict(step.params)
        if step.action in ("config", "resize"):
            params["digest"] = self._digest()
        elif step.action == "shutdown":
            params |= {"timeout": self._shutdown_timeout, "forceStop": 1}
        elif step.action == "reboot":
            params["timeout"] = self._shutdown_timeout
        elif step.action == "destroy":
            params["purge"] = 1
        method, path = {
            "create": ("POST", self._guests),
            "config": ("PUT", f"{self._path}/config"),
            "resize": ("PUT", f"{self._path}/resize"),
            "destroy": ("DELETE", self._path),
        }.get(step.action, ("POST", f"{self._path}/status/{step.action}"))
        self.begun = step.describe()
        try:
            api.change(method, path, f"{step.action} of container {self.vmid}", **params)
        except ApiError as error:
            if not error.uncertain:
                self.begun = None
            raise
        self.done.append(self.begun)
        self.begun = None
        self._changed |= step.keys

    def _digest(self) -> str:
        """The digest of the configuration that the plan was made from: Proxmox refuses a change of any other.

        A real node tells it with the pending changes. One that does not is asked, as is each after a change of this
        run's own, and what it shows is held against what was seen.
        """
        if self._seen is not None and self._seen.digest and not self._changed:
            return self._seen.digest
        shown = {key: config.wire(value) for key, value in self.api.get(f"{self._path}/config").items()}
        digest = shown.pop("digest")
        if self._seen is not None and self._others(shown) != self._others(self._seen.config):
            error = ApiError(
                "conflict", f"the configuration of container {self.vmid} was changed while it was looked at"
            )
            error.changing = True
            raise error
        return digest

    def _others(self, configuration: dict[str, str]) -> dict[str, str]:
        """What neither this run has changed of a configuration nor one of the two calls shows alone.

        A volume that was taken away becomes an unused one, and raw lxc.* lines are not listed with the pending changes.
        """
        hidden = {"lxc", *self._changed}
        return {
            key: value
            for key, value in configuration.items()
            if key not in hidden and not (self._changed and config.kind(key) == "unused")
        }
