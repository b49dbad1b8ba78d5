# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Everything that can be known before a container is changed. Sends reads only."""

from __future__ import annotations

import re
import subprocess
from shlex import quote

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import api as pve_api
from ansible_collections.dflash.launchproof.plugins.module_utils.pve import config, options, plan, rights
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.api import Api, ApiError
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.lifecycle import Lifecycle
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.plan import Problem

SPEC = {**options.connection(), **options.container()}
_GIB = 1024**3


def run(params: dict, check_mode: bool) -> dict:
    """Look for all that stands in the way of the declared container; what module pve_preflight returns.

    :param params: the module's parameters, validated by ``SPEC``.
    """
    checks = Preflight(params)
    unavailable = False
    try:
        checks.run()
    except ApiError as error:
        unavailable = check_mode and options.may_be_unavailable(params, error)
        if unavailable:
            checks.unknown.append(f"everything about the node: {error}")
        else:
            checks.problems.append(options.api_problem(error, params))
    except config.ConfigError as error:
        checks.problems.append(options.config_problem(error, params))
    result = {"changed": False, "unknown": checks.unknown, "api_calls": checks.calls}
    if checks.problems:
        result = options.failure(checks.problems, params, **result)
    else:
        result["unavailable"] = unavailable
    return {**result, "warnings": [f"Not looked at: {what}" for what in checks.unknown]}


class Preflight:
    """The checks of one declared container, each adding to ``problems`` or, where it could not look, to ``unknown``."""

    def __init__(self, params: dict):
        self.params = params
        self.container, self.node = params["container"], params["node"]
        self.problems: list[Problem] = plan.validate(self.container)
        self.unknown: list[str] = []
        self.api: Api | None = None
        self.root: Api | None = None

    @property
    def calls(self) -> list[str]:
        return [call for way in (self.api, self.root) if way for call in way.calls]

    def run(self) -> None:
        """All checks. Raises ApiError only when the API itself cannot be used: then nothing else can be known."""
        self.problems += plan.route_problems(self.container, self.params)
        if plan.connection_problems(self.params):
            return
        self.api = pve_api.connect(self.params)
        if not self._node():
            return
        before = self._vmid()
        if before is None:
            self.problems += plan.creation_problems(self.container)
        want, found = plan.wanted(self._valid(), before, self.params["api_token_secret"])
        self.problems += found
        delta = plan.changes(want, before)
        self._storages(before, delta)
        self._bridges(delta)
        self._rights(before, delta)
        # What is on the node matters when the container starts; a look at it is a login to the node.
        if before is None or not before.running or delta or before.pending:
            self._paths()
            self._hookscript()

    def _valid(self) -> dict:
        """The declaration without the options that are wrong by themselves: the rest can still be checked."""
        wrong = {re.match(r"container\.(\w+)", item.variable).group(1) for item in plan.validate(self.container)}
        return {name: value for name, value in self.container.items() if name == "vmid" or name not in wrong}

    def _wrong(self, variable: str, value: object, problem: str, fix: str) -> None:
        self.problems.append(Problem(variable, value, problem, fix))

    def _node(self) -> bool:
        nodes = {item["node"]: item.get("status", "online") for item in self.api.get("nodes")}
        if self.node not in nodes:
            self._wrong(
                "pve_node", self.node, "no such node in this cluster", f"Choose one of {', '.join(sorted(nodes))}."
            )
        elif nodes[self.node] != "online":
            self._wrong(
                "pve_node", self.node, f"this node is {nodes[self.node]}", "Bring it up, or choose another node."
            )
        return nodes.get(self.node) == "online"

    def _vmid(self) -> config.Container | None:
        """The container that is there, if it is ours; otherwise the vmid must be free in the whole cluster."""
        life = Lifecycle(self.api, None, self.node, self.container["vmid"], 0)
        before = life.read()
        if before is None:
            taken = life.elsewhere()
            self.problems += [taken] if taken else []
            return None
        self.problems += plan.ownership(self.container, before)
        return before

    def _storages(self, before: config.Container | None, delta: dict) -> None:
        """Storages are there, hold what they shall hold, and have room for what grows."""
        storages = self._storages_of(self.api)
        needed: dict[str, int] = {}
        for variable, name, gib in _allocations(self.container, before, delta):
            if self._usable(storages, variable, name, "rootdir") and "avail" in storages[name]:
                free = int(storages[name]["avail"]) / _GIB
                others = needed.get(name, 0)
                needed[name] = others + gib
                # The volume for which there is no more room is told of, and not those after it too.
                if others <= free < needed[name]:
                    beside = f" with the other volumes there ({others})" if others else ""
                    self._wrong(
                        _size_variable(variable),
                        gib,
                        f"storage {name!r} has {free:.1f} GiB free, {needed[name]} are needed{beside}",
                        "Free space there, ask for less, or choose another storage.",
                    )
        template = self.container.get("template")
        if before is None and template and ":" in template:
            storage = template.partition(":")[0]
            download = f"Download one: `pveam update; pveam available; pveam download {storage} FILE`."
            self._listed(self.api, storages, "container.template", template, "vztmpl", download)

    def _storages_of(self, api: Api) -> dict[str, dict]:
        return {item["storage"]: item for item in api.get(f"nodes/{self.node}/storage")}

    def _usable(self, storages: dict, variable: str, name: str, content: str) -> bool:
        holders = sorted(key for key, item in storages.items() if content in item.get("content", "").split(","))
        choose = f"Choose one of {', '.join(holders) or '(none on this node)'}, or see `pvesm status`."
        if name not in storages:
            self._wrong(variable, name, f"node {self.node} has no such storage that this identity may see", choose)
        elif content not in storages[name].get("content", "").split(","):
            self._wrong(variable, name, f"this storage does not hold content {content!r}", choose)
        elif not (storages[name].get("enabled", 1) and storages[name].get("active", 1)):
            self._wrong(
                variable, name, "this storage is not active", "Bring it online: `pvesm status` shows why it is not."
            )
        else:
            return True
        return False

    def _listed(self, api: Api, storages: dict, variable: str, volume: str, content: str, otherwise: str) -> None:
        """``volume`` is among those of this content on its storage; ``otherwise``: what to do where there is none."""
        storage = volume.partition(":")[0]
        if not self._usable(storages, variable, storage, content):
            return
        found = api.get(f"nodes/{self.node}/storage/{storage}/content", content=content)
        volumes = sorted(item["volid"] for item in found)
        if volume not in volumes:
            self._wrong(
                variable,
                volume,
                "there is no such file on that storage",
                f"Choose one of {', '.join(volumes)}." if volumes else otherwise,
            )

    def _bridges(self, delta: dict) -> None:
        declared = {
            config.parse(key, value)["bridge"]
            for key, value in delta.items()
            if config.kind(key) == "net" and value and "bridge" in config.parse(key, value)
        }
        if not declared:
            return
        try:
            there = {item["iface"] for item in self.api.get(f"nodes/{self.node}/network", type="any_bridge")}
        except ApiError as error:
            self.unknown.append(f"whether the bridges exist: {error}")
            return
        for bridge in sorted(declared - there):
            self._wrong(
                "container.networks[].bridge",
                bridge,
                f"node {self.node} has no such bridge",
                f"Choose one of {', '.join(sorted(there)) or '(none that this identity may see)'}.",
            )

    def _rights(self, before: config.Container | None, delta: dict) -> None:
        """The identity may do what will be done, and root-only keys have a way."""
        guarded = plan.root_only(delta, before, is_unprivileged(self.container, before))
        self.problems += root_problems(guarded, self.params)
        wanted = rights_for(self.api, self.container, before, delta, guarded, power=True)
        self.problems += missing_rights(self.api, self.params, wanted)

    def _paths(self) -> None:
        """Declared devices and sources of bind mounts are there: Proxmox finds out at the start only.

        The API cannot tell; a root way can.
        """
        looks = [
            (
                f"[ -c {quote(device['path'])} ] || [ -b {quote(device['path'])} ]",
                Problem(
                    "container.devices[].path",
                    device["path"],
                    f"node {self.node} has no such device",
                    "Load its driver (for /dev/nvidia-uvm: nvidia-modprobe -u -c=0), or do not declare it.",
                ),
            )
            for device in self.container.get("devices") or []
        ]
        looks += [
            (
                f"[ -e {quote(mount['source'])} ]",
                Problem(
                    f"container.mounts[{mount['target']}].source",
                    mount["source"],
                    f"node {self.node} has no such path",
                    "Make it there first (mkdir -p, or mount what it comes from), or give a path that is there.",
                ),
            )
            for mount in self.container.get("mounts") or []
            if mount.get("source")
        ]
        paths = ", ".join(str(problem.value) for _condition, problem in looks)
        answers = _look([condition for condition, _problem in looks], paths, self.params, self.unknown)
        self.problems += [problem for (_condition, problem), there in zip(looks, answers) if not there]

    def _hookscript(self) -> None:
        """A declared hook script is on its storage. The API shows snippets to few; root, who has to set it, sees all."""
        volume = self._valid().get("hookscript")
        if not volume:
            return
        api = self.api
        if pve_api.identity(self.params) != "root@pam":
            api = self.root = pve_api.connect_root(self.params)
        if api is None:
            self.unknown.append(
                f"whether {volume} exists: the API shows it to root@pam alone, and pve_root_via is none"
            )
            return
        try:
            put = "Put it into the folder snippets of that storage, as an executable file."
            self._listed(api, self._storages_of(api), "container.hookscript", volume, "snippets", put)
        except ApiError as error:
            self.unknown.append(f"whether {volume} exists: {error}")


def is_unprivileged(container: dict, before: config.Container | None) -> bool:
    """Whether the container is, or will be created, unprivileged."""
    if before is not None:
        return before.config.get("unprivileged", "0") == "1"
    return container.get("unprivileged") is not False


def rights_for(
    api: Api, container: dict, before: config.Container | None, delta: dict, guarded: dict, *, power: bool
) -> list[rights.Right]:
    """The rights that bringing ``delta`` about takes, but for the root-only keys in ``guarded``."""
    create, unprivileged = before is None, is_unprivileged(container, before)
    return rights.needed(
        container["vmid"],
        {key: value for key, value in delta.items() if key not in guarded},
        current=before.live if before else None,
        create=create,
        power=power,
        grows=bool(before and plan.resizes(delta, before)),
        unprivileged=unprivileged,
        template=container.get("template") if create else None,
        pool=container.get("pool"),
        # A privileged container is rare, and the version is asked for its sake alone.
        privileged_is_guarded=create and not unprivileged and _major(api) >= 9,
    )


def _major(api: Api) -> int:
    return int(str(api.get("version").get("version", "8")).split(".", maxsplit=1)[0])


def missing_rights(api: Api, params: dict, wanted: list[rights.Right]) -> list[Problem]:
    """Those of the ``wanted`` rights that the API identity lacks; root@pam itself is not asked, it may do everything."""
    who = pve_api.identity(params)
    if who == "root@pam" or not wanted:
        return []
    # One problem for each command that puts it right.
    by_grant: dict[str, list[rights.Right]] = {}
    for right in rights.missing(api.get("access/permissions"), wanted):
        by_grant.setdefault(right.grant(who), []).append(right)
    return [
        Problem(
            "pve_api_user",
            who,
            f"on {lacking[0].where} it lacks {', '.join(right.words() for right in lacking)}",
            f"As root on a node: {command}",
        )
        for command, lacking in by_grant.items()
    ]


def root_problems(guarded: dict[str, str], params: dict) -> list[Problem]:
    """Root-only keys without a way: one problem for each, before anything is changed."""
    if params["root_via"] != "none" or pve_api.identity(params) == "root@pam":
        return []
    return [
        Problem(
            "pve_root_via",
            params["root_via"],
            f"{key} is {why}, which Proxmox lets root@pam alone set; {pve_api.identity(params)} is not root@pam",
            "Set it to local or ssh (pvesh as root on the node), or give root@pam's password as pve_api_password.",
        )
        for key, why in sorted(guarded.items())
    ]


def _allocations(container: dict, before: config.Container | None, delta: dict):
    """(variable, storage, GiB) of every volume that will be allocated or grown."""
    for key, value in delta.items():
        if config.kind(key) not in ("rootfs", "mp") or value is None:
            continue
        props = config.parse(key, value)
        if config.mount_type(props["volume"]) != "volume":
            continue
        storage, _colon, size = props["volume"].partition(":")
        variable = "container.storage" if key == "rootfs" else f"container.mounts[{props['mp']}].storage"
        old = config.parse(key, before.config[key]) if before and key in before.config else None
        if old and old["volume"] == props["volume"]:
            grown = config.size_bytes(props.get("size", "0")) - config.size_bytes(old.get("size", "0"))
            if grown > 0:
                yield variable, storage, -(-grown // _GIB)
        elif size.isdigit():
            yield variable, storage, int(size)


def _size_variable(variable: str) -> str:
    return "container.disk_gib" if variable == "container.storage" else variable.replace(".storage", ".size_gib")


def _look(conditions: list[str], paths: str, params: dict, unknown: list[str]) -> list[bool]:
    """Which of these conditions of a shell hold on the Proxmox node: one look, on this machine or over one ssh.

    Empty where there is no look; ``unknown`` then says that of ``paths``.
    """
    if not conditions:
        return []
    script = "; ".join(f"{{ {condition}; }} && echo 1 || echo 0" for condition in conditions)
    if params["root_via"] == "local":
        where, command = "sh", ["sh", "-c", script]
    elif params["root_via"] == "ssh":
        prefix = pve_api.ssh_prefix(params.get("root_ssh") or {}, params["api_host"])
        where, command = "ssh to the node", [*prefix, script]
    else:
        unknown.append(f"whether {paths} exist: the API does not tell, and pve_root_via is none")
        return []
    try:
        done = pve_api.run_on_node(command, params["api_timeout"])
    except (OSError, subprocess.TimeoutExpired) as error:
        unknown.append(f"whether {paths} exist: {where}: {error}")
        return []
    answers = done.stdout.split()
    if done.returncode != 0 or len(answers) != len(conditions):
        unknown.append(f"whether {paths} exist: {where}: {done.stderr.strip()}")
        return []
    return [answer == "1" for answer in answers]
