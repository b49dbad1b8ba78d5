# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every configuration key of a Proxmox container, and what a declaration has to do with it. Pure data.

A key is ``managed`` (an option of the declaration says what it is to be), ``refused`` (it cannot be declared here, for a
reason) or ``ignored`` (Proxmox keeps it for itself, or it cannot be set: it is neither compared nor touched). What a
managed key holds besides its managed properties is kept as it is. The keys are those of Proxmox VE 9.1's API schema; a
unit test holds the table to it, key by key and property by property.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Key:
    """What becomes of a key or of a property of one; ``word`` is managed, refused or ignored.

    ``text`` names the option of a managed one, and gives the reason for any other. ``properties`` are those of a
    property string, by their Proxmox names.
    """

    word: str
    text: str
    properties: dict[str, Key] = field(default_factory=dict)


def _managed(option: str, properties: dict[str, Key] | None = None) -> Key:
    return Key("managed", option, properties or {})


def _refused(why: str) -> Key:
    return Key("refused", why)


def _ignored(why: str) -> Key:
    return Key("ignored", why)


def _each(entry: str, names: str) -> dict[str, Key]:
    """Properties whose option is called as they are, but for hyphens."""
    return {name: _managed(f"{entry}.{name.replace('-', '_')}") for name in names.split()}


_ROOT_DISK = _ignored("the root disk keeps the mount options that it has")

#: The keys of a container's configuration, ``[n]`` standing for a number.
KEYS = {
    **{
        name: _managed(name)
        for name in (
            *("hostname", "description", "tags", "onboot", "startup", "protection", "hookscript", "unprivileged"),
            *("cores", "cpulimit", "cpuunits", "memory", "swap", "nameserver", "searchdomain", "timezone"),
            *("tty", "console", "cmode", "debug"),
        )
    },
    "features": _managed("features", _each("features", "nesting keyctl fuse mknod force_rw_sys mount")),
    "rootfs": _managed(
        "storage",
        {
            "volume": _managed("storage"),
            "size": _managed("disk_gib"),
            **dict.fromkeys(["acl", "idmap", "mountoptions", "quota", "replicate", "ro", "shared"], _ROOT_DISK),
        },
    ),
    "net[n]": _managed(
        "networks",
        {
            **_each(
                "networks[]",
                "name bridge ip gw ip6 gw6 hwaddr firewall mtu rate tag link_down trunks host-managed",
            ),
            "type": _ignored("it is veth, always"),
        },
    ),
    "dev[n]": _managed("devices", _each("devices[]", "path mode uid gid deny-write")),
    "mp[n]": _managed(
        "mounts",
        {
            "mp": _managed("mounts[].target"),
            "volume": _managed("mounts[].source"),
            "size": _managed("mounts[].size_gib"),
            "ro": _managed("mounts[].read_only"),
            **_each("mounts[]", "backup acl quota replicate shared keepattrs idmap mountoptions"),
        },
    ),
    "unused[n]": _ignored("a disk that a removed mount point left behind; it stays until somebody removes it"),
    "arch": _refused("Proxmox reads it from the template"),
    "ostype": _refused("Proxmox reads it from the template"),
    "entrypoint": _refused("the jobs' units need the container's own init"),
    "env": _refused("whoever may look at the container would read it; give a job its env and secrets"),
    "lock": _refused("Proxmox sets and removes it while it works on the container"),
    "template": _refused("a template cannot be started; pct template on the node makes one"),
    "lxc": _ignored("raw lxc.* lines, which the API cannot set"),
    "parent": _ignored("the snapshot it goes back to"),
}

#: Parameters of the request that creates a container and no keys of its configuration.
CREATION = {
    "vmid": _managed("vmid"),
    "ostemplate": _managed("template"),
    "storage": _managed("storage"),
    "password": _managed("password"),
    "ssh-public-keys": _managed("ssh_public_keys"),
    "pool": _managed("pool"),
    "start": _refused("the module's state says whether it runs"),
    "ha-managed": _refused(
        "a container with a GPU of one node cannot move; community.proxmox.proxmox_cluster_ha_resources"
    ),
    "bwlimit": _refused("it belongs to restores, which are pct restore's"),
    "force": _refused("it overwrites a container"),
    "restore": _refused("a backup is brought back with pct restore on the node"),
    "unique": _refused("it belongs to restores, which are pct restore's"),
    "ignore-unpack-errors": _refused("half a template makes half a container"),
}


def find(name: str) -> Key | None:
    """The entry of a configuration key or creation parameter, ``net0`` or ``net[n]``; None for what is neither."""
    general = re.sub(r"^(net|dev|mp|unused)\d+$", r"\1[n]", name)
    return KEYS.get(general) or CREATION.get(name.replace("_", "-"))


def why_not(name: str) -> str | None:
    """Why ``name`` cannot stand in a declaration although Proxmox knows it, as a sentence with the way out."""
    entry = find(name)
    if entry is None:
        return None
    if entry.word == "managed":
        return f"{name} is declared as {entry.text}"
    return f"{name} cannot be declared: {entry.text}"
