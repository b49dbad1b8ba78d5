# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One container through the API: read it, send planned steps, follow their tasks."""

from __future__ import annotations

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import config
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.api import Api, ApiError
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.config import Container
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.plan import Problem, Step


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
        self.upids: list[str] = []

    def read(self) -> Container | None:
        """The container as it is now, in two calls; None if this node has none with that id.

        A task that still creates it, left behind by an interrupted run, is waited for first.
        """
        found = self.peek()
        if found is not None and found.lock == "create":
            for task in self.api.get(self._tasks, vmid=self.vmid, source="active"):
                self.upids.append(task["upid"])
                self.api.follow(task["upid"], f"the running creation of container {self.vmid}")
            found = self.peek()
        return found

    def peek(self) -> Container | None:
        """The container as it is now, whatever runs; None if this node has none with that id."""
        try:
            items = self.api.get(f"{self._path}/pending")
            status = self.api.get(f"{self._path}/status/current")
        except ApiError as error:
            if error.kind == "absent":
                return None
            raise
        return config.from_pending(items, status.get("status") == "running")

    def elsewhere(self) -> Problem | None:
        """Who has this id, when this node has no container with it: asked before a container is created."""
        for guest in self.api.get("cluster/resources", type="vm"):
            if int(guest.get("vmid", 0)) == self.vmid:
                return Problem(
                    "container.vmid",
                    self.vmid,
                    f"taken by {guest['type']} {guest.get('name', '')!r} on node {guest['node']!r}",
                    "Choose a free vmid.",
                )
        return None

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
            result[interface["name"]] = [address for address in found if not address.lower().startswith("fe80:")]
        return result

    def apply(self, step: Step) -> None:
        """Send one step and wait for its end. Raises ApiError."""
        what = f"{step.action} of container {self.vmid}"
        api = self.root if step.root and self.root else self.api
        if step.action == "create":
            upid = api.change("POST", self._guests, **step.params)
        elif step.action == "config":
            api.change("PUT", f"{self._path}/config", **step.params, digest=self._digest())
            upid = None
        elif step.action == "resize":
            upid = api.change("PUT", f"{self._path}/resize", **step.params, digest=self._digest())
        elif step.action == "destroy":
            upid = api.change("DELETE", self._path, purge=1)
        elif step.action in ("shutdown", "reboot"):
            extra = {"forceStop": 1} if step.action == "shutdown" else {}
            upid = api.change("POST", f"{self._path}/status/{step.action}", timeout=self._shutdown_timeout, **extra)
        else:
            upid = api.change("POST", f"{self._path}/status/{step.action}")
        self.done.append(step.describe())
        if isinstance(upid, str) and upid.startswith("UPID:"):
            self.upids.append(upid)
            self.api.follow(upid, what)

    def _digest(self) -> str:
        """The digest a change is tied to: Proxmox refuses the change if the configuration moved since."""
        return self.api.get(f"{self._path}/config")["digest"]
