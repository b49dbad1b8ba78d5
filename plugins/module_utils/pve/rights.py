# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which right a change needs, and which keys only root@pam may set. Pure.

Source: PVE::LXC::check_ct_modify_config_perm and PVE::API2::LXC (pve-container 6.1.10). A token of root@pam is not
root@pam: Proxmox compares the whole user name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import config

#: The built-in role that grants a privilege, named in every message about a missing one.
ROLE = {
    "VM.Allocate": "PVEVMAdmin",
    "VM.Audit": "PVEVMAdmin",
    "VM.PowerMgmt": "PVEVMAdmin",
    "VM.Config.Disk": "PVEVMAdmin",
    "VM.Config.CPU": "PVEVMAdmin",
    "VM.Config.Memory": "PVEVMAdmin",
    "VM.Config.Network": "PVEVMAdmin",
    "VM.Config.Options": "PVEVMAdmin",
    "Datastore.AllocateSpace": "PVEDatastoreUser",
    "Datastore.Audit": "PVEDatastoreUser",
    "SDN.Use": "PVESDNUser",
    "Sys.Modify": "Administrator",
}

#: The zone of the bridges that are no vnets of SDN.
_LOCAL = "/sdn/zones/localnetwork"

_PRIVILEGE = {
    "cores": "VM.Config.CPU",
    "cpulimit": "VM.Config.CPU",
    "cpuunits": "VM.Config.CPU",
    "memory": "VM.Config.Memory",
    "swap": "VM.Config.Memory",
    "net": "VM.Config.Network",
    "nameserver": "VM.Config.Network",
    "searchdomain": "VM.Config.Network",
    "hostname": "VM.Config.Network",
    "rootfs": "VM.Config.Disk",
    "mp": "VM.Config.Disk",
    "features": "VM.Allocate",
}


@dataclass(frozen=True)
class Right:
    """One of ``privileges`` on ``path``, or on ``pool``, the path of its pool; needed because of ``because``."""

    path: str
    privileges: tuple[str, ...]
    because: str
    pool: str | None = None

    @property
    def where(self) -> str:
        """The paths that it can be given on, in words."""
        return f"{self.path} or {self.pool}" if self.pool else self.path

    def words(self) -> str:
        """What it is and what it is needed for."""
        return f"{' or '.join(self.privileges)} for {self.because}"

    def grant(self, who: str) -> str:
        """The command that grants it to ``who``, a user or token, through a built-in role.

        A token with separated privileges has what it and its user have, one without has what its user has: so to both.
        """
        role = ROLE.get(self.privileges[0], "Administrator")
        user, token, _name = who.partition("!")
        also = f" --tokens '{who}'" if token else ""
        return f"pveum acl modify {self.pool or self.path} --users '{user}'{also} --roles {role}"


def refused(text: str) -> Right | None:
    """The right that a 403 asks for, from its words: ``Permission check failed (/vms/901, VM.Audit)``, or None."""
    found = re.search(r"Permission check failed \((/[^,)]*), ([\w.|]+)\)", text)
    return Right(found[1], tuple(found[2].split("|")), "this call") if found else None


def root_only(key: str, old: str | None, new: str | None, unprivileged: bool) -> str | None:
    """Why setting ``key`` from ``old`` to ``new`` takes root@pam itself, or None if a right suffices."""
    what = config.kind(key)
    if what == "dev":
        return "device passthrough"
    if what == "hookscript":
        return "a hook script"
    if what in ("mp", "rootfs") and new is not None:
        mounted = config.mount_type(config.parse(key, new).get("volume", ""))
        return None if mounted == "volume" else f"a {mounted} mount"
    if what == "features":
        before = config.canonical(key, old or "")
        after = config.canonical(key, new or "")
        changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        if changed and not unprivileged:
            return f"features of a privileged container ({', '.join(changed)})"
        if set(changed) - {"nesting"}:
            return f"features other than nesting ({', '.join(sorted(set(changed) - {'nesting'}))})"
    return None


def needed(
    vmid: int,
    changes: dict[str, str | None],
    *,
    current: dict[str, str] | None = None,
    create: bool = False,
    destroy: bool = False,
    power: bool = False,
    grows: bool = False,
    template: str | None = None,
    pool: str | None = None,
    unprivileged: bool = True,
    privileged_is_guarded: bool = False,
) -> list[Right]:
    """The rights for setting ``changes`` (None removes) on container ``vmid`` through the API.

    Root-only keys are left out: no right gives them.
    ``current``: the configuration that a container which is there has now.
    ``pool``: the one that a new container is put into, where rights on the pool do as well. It says nothing of a container
    that is there: the API counts the rights of the pool that it really is in among those on the container
    (PVE::RPCEnvironment, get_effective_permissions).
    ``privileged_is_guarded``: Proxmox VE 9 asks for Sys.Modify on / before it makes a privileged container; 8 does not.
    """
    guest = f"/vms/{vmid}"
    rights: dict[tuple[str, tuple[str, ...]], str] = {}

    def need(path: str, *privileges: str, because: str) -> None:
        rights.setdefault((path, privileges), because)

    if create:
        need(guest, "VM.Allocate", because=f"creating container {vmid}")
        # What this run reads back, and what the next ones read.
        need(guest, "VM.Audit", because=f"reading container {vmid}")
        if not unprivileged and privileged_is_guarded:
            need("/", "Sys.Modify", because="a privileged container")
    if destroy:
        need(guest, "VM.Allocate", because=f"destroying container {vmid}")
    if power:
        need(guest, "VM.PowerMgmt", because=f"starting and stopping container {vmid}")
    if template:
        need(
            f"/storage/{template.partition(':')[0]}",
            "Datastore.AllocateSpace",
            "Datastore.Audit",
            because=f"reading template {template}",
        )
    if grows:
        # /resize is checked as a change of the option "disk", which is none that Proxmox knows a right of its own for.
        need(guest, "VM.Config.Options", because="growing a volume")
    for key, value in changes.items():
        if root_only(key, None, value, unprivileged):
            continue
        what = config.kind(key)
        need(guest, _PRIVILEGE.get(what, "VM.Config.Options"), because=key)
        if what in ("rootfs", "mp") and value is not None:
            storage = config.parse(key, value)["volume"].partition(":")[0]
            need(f"/storage/{storage}", "Datastore.AllocateSpace", because=f"{key} on storage {storage}")
        if what == "net":
            # Proxmox asks for what an interface leaves as well.
            for net in filter(None, ((current or {}).get(key), value)):
                for path, where in _net_paths(config.parse(key, net)):
                    need(path, "SDN.Use", because=f"{key} on {where}")
    return [
        Right(path, privileges, because, f"/pool/{pool}" if create and pool and path == guest else None)
        for (path, privileges), because in rights.items()
    ]


def _net_paths(net: dict[str, str]) -> list[tuple[str, str]]:
    """The paths that an interface takes a right on, each in words too: its VLANs, or its bridge where it has none.

    Source: PVE::GuestHelpers::check_vnet_access.
    """
    bridge = net.get("bridge")
    if not bridge:
        return []
    path, words = f"{_LOCAL}/{bridge}", f"bridge {bridge}"
    vlans = [vlan for vlan in (net.get("tag"), *net.get("trunks", "").split(";")) if vlan]
    return [(f"{path}/{vlan}", f"VLAN {vlan} of {words}") for vlan in vlans] or [(path, words)]


def _in_other_zones(permissions: dict[str, dict[str, int]], path: str) -> list[str]:
    """``path``, which is of a bridge, in the zones that ``permissions`` know a vnet of its name in.

    Nothing else that is read tells the zone of a vnet.
    """
    if not path.startswith(f"{_LOCAL}/"):
        return []
    tail = path.removeprefix(f"{_LOCAL}/")
    found = re.compile(rf"(/sdn/zones/[^/]+)/{re.escape(tail.partition('/')[0])}(/|$)")
    return sorted({f"{match[1]}/{tail}" for match in map(found.match, permissions) if match})


def missing(permissions: dict[str, dict[str, int]], wanted: list[Right]) -> list[Right]:
    """Those of ``wanted`` that ``permissions``, the answer of ``GET /access/permissions``, does not hold.

    The answer lists effective rights per path with their propagate flag; a path that is not listed has what its nearest
    listed ancestor propagates.
    """
    return [
        right
        for right in wanted
        if not any(
            _held(permissions, path, name)
            for path in filter(None, (right.path, right.pool, *_in_other_zones(permissions, right.path)))
            for name in right.privileges
        )
    ]


def _held(permissions: dict[str, dict[str, int]], path: str, privilege: str) -> bool:
    if path in permissions:
        return privilege in permissions[path]
    while path != "/":
        path = re.sub(r"/[^/]*$", "", path) or "/"
        if path in permissions:
            return bool(permissions[path].get(privilege))
    return False
