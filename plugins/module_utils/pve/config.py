# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Proxmox container configuration as data: property strings both ways, and what two values mean when compared. Pure.

A property string is ``volume,size=8G`` or ``name=eth0,bridge=vmbr0``: comma-separated ``key=value``, where one key of
each kind may be written without its name. The grammar is that of PVE::JSONSchema::parse_property_string, which knows no
escapes: a comma can never be part of a value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

#: The key that may stand without ``key=``, by kind of configuration key (pve-container, PVE/LXC/Config.pm).
DEFAULT_KEY = {"rootfs": "volume", "mp": "volume", "unused": "volume", "dev": "path", "startup": "order"}

#: Kinds whose value is a property string.
PROPERTY_KINDS = ("rootfs", "mp", "unused", "dev", "net", "features", "startup")

#: What an omitted property means, so that ``firewall=0`` and no ``firewall`` compare equal.
DEFAULTS = {
    "net": {"firewall": "0", "link_down": "0", "host-managed": "0", "type": "veth"},
    "dev": {"mode": "0660", "uid": "0", "gid": "0", "deny-write": "0"},
    "mp": {"ro": "0", "backup": "0", "quota": "0", "shared": "0", "keepattrs": "0", "replicate": "1"},
    "rootfs": {"ro": "0", "quota": "0", "shared": "0", "replicate": "1"},
    "features": {"nesting": "0", "keyctl": "0", "fuse": "0", "mknod": "0", "force_rw_sys": "0"},
}

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_TRUE, _FALSE = ("1", "on", "yes", "true"), ("0", "off", "no", "false")
_BOOLEANS = {
    "net": ("firewall", "link_down", "host-managed"),
    "dev": ("deny-write",),
    "mp": ("ro", "backup", "quota", "shared", "keepattrs", "replicate", "acl"),
    "rootfs": ("ro", "quota", "shared", "replicate", "acl"),
    "features": ("nesting", "keyctl", "fuse", "mknod", "force_rw_sys"),
}
_NUMBERS = {"net": ("rate",), "cpulimit": ("",)}
_SETS = {"features": ("mount",), "mp": ("mountoptions",), "rootfs": ("mountoptions",), "net": ("trunks",)}


class ConfigError(ValueError):
    """A value that cannot be a Proxmox configuration value; the message names the key and the value."""


def kind(key: str) -> str:
    """The kind of a configuration key: ``net`` for ``net0``, the key itself where it carries no number."""
    match = re.fullmatch(r"(mp|unused|net|dev)\d+", key)
    return match.group(1) if match else key


def parse(key: str, text: str) -> dict[str, str]:
    """The properties of ``text``, a value of configuration key ``key``, in the order written.

    Raises ConfigError for a part that is neither ``name=value`` nor the key's nameless first property.
    """
    props: dict[str, str] = {}
    default = DEFAULT_KEY.get(kind(key))
    for part in str(text).split(","):
        if not part:
            continue
        name, equals, value = part.partition("=")
        if not equals:
            if default is None or default in props:
                raise ConfigError(f"{key}: {part!r} in {text!r} is not name=value")
            name, value = default, part
        if name in props:
            raise ConfigError(f"{key}: {name!r} is given twice in {text!r}")
        props[name] = value
    return props


def render(key: str, props: dict[str, object]) -> str:
    """The property string for ``key``: nameless property first, the rest in the given order, booleans as 1 and 0.

    None leaves a property out. Raises ConfigError for a value the grammar cannot carry.
    """
    default = DEFAULT_KEY.get(kind(key))
    parts = []
    for name, value in sorted(props.items(), key=lambda item: item[0] != default):
        if value is None:
            continue
        text = wire(value)
        if "," in text or "\n" in text or text == "" or (name == default and "=" in text):
            raise ConfigError(f"{key}: {name}={text!r} cannot be written: Proxmox has no escape for it")
        parts.append(text if name == default else f"{name}={text}")
    return ",".join(parts)


def canonical(key: str, text: str) -> dict[str, str]:
    """``text`` reduced to its meaning: defaults left out, booleans as 1 or 0, sizes in bytes, sets sorted.

    Two values of a key mean the same exactly when their canonical forms are equal. A key that holds no property string
    comes back as ``{"": value}``.
    """
    what = kind(key)
    if what == "tags":
        return {"": ";".join(tags(text))}
    if what == "description":
        # Proxmox appends a newline to every description.
        return {"": str(text).rstrip("\n")}
    if what in ("nameserver", "searchdomain"):
        # Proxmox stores these lists with blanks, however they were sent (PVE::LXC, verify_nameserver_list).
        return {"": " ".join(filter(None, re.split(r"[,;\s]+", str(text))))}
    if what not in PROPERTY_KINDS:
        return {"": _number(text) if what in _NUMBERS else wire(text)}
    props = parse(key, text)
    for name, value in list(props.items()):
        if name in _BOOLEANS.get(what, ()):
            props[name] = _boolean(value)
        elif name == "size":
            props[name] = str(size_bytes(value))
        elif name == "hwaddr":
            props[name] = value.upper()
        elif name == "mp":
            props[name] = mount_path(value)
        elif name in _NUMBERS.get(what, ()):
            props[name] = _number(value)
        elif name in _SETS.get(what, ()):
            props[name] = ";".join(sorted(filter(None, value.split(";"))))
        if props[name] == DEFAULTS.get(what, {}).get(name):
            del props[name]
    return props


def same(key: str, one: object, other: object) -> bool:
    """Whether two values of ``key`` mean the same; None is an absent key, and equals an all-default value."""
    if one is None or other is None:
        if one is other:
            return True
        present = str(other if one is None else one)
        return kind(key) in ("features",) and not canonical(key, present)
    return canonical(key, wire(one)) == canonical(key, wire(other))


def size_bytes(text: str) -> int:
    """Bytes in a Proxmox size such as ``8G``, ``512M`` or ``1073741824``. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", str(text).strip(), re.IGNORECASE)
    if not match:
        raise ConfigError(f"{text!r} is not a size: a number with K, M, G or T")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def tags(text: str) -> list[str]:
    """The tags of a ``tags`` value as Proxmox stores them: lower case, sorted, each once."""
    return sorted({tag.lower() for tag in re.split(r"[;, \s]+", str(text or "")) if tag})


def mount_path(text: str) -> str:
    """A mount's path inside as Proxmox mounts it, ``/data`` for ``/data/`` (PVE::LXC, sanitize_mountpoint)."""
    return re.sub("/+", "/", f"/{text}").rstrip("/") or "/"


def mount_type(volume: str) -> str:
    """``volume``, ``device`` or ``bind`` (PVE::LXC::Config::classify_mountpoint)."""
    if volume.startswith("/dev/"):
        return "device"
    return "bind" if volume.startswith("/") else "volume"


def unmade(volume: str) -> bool:
    """Whether ``STORAGE:GiB`` asks for a volume; Proxmox shows it so until it is made, at the container's next start say."""
    return re.fullmatch(r"[^:/]+:\d+(\.\d+)?", volume) is not None


def wire(value: object) -> str:
    """A value as the API takes it: proxmoxer would send True as the word, which Proxmox refuses with 400."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (list, tuple)):
        return ";".join(map(str, value))
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: object) -> str:
    """``2`` for 2.0, as Proxmox answers; what is no number stays as it is."""
    try:
        number = float(str(value))
    except ValueError:
        return str(value)
    return str(int(number)) if number.is_integer() else str(number)


def _boolean(text: str) -> str:
    lowered = str(text).lower()
    return "1" if lowered in _TRUE else "0" if lowered in _FALSE else str(text)


@dataclass(frozen=True)
class Container:
    """A container as the API reports it.

    ``live`` is what the running (or next started) container has, ``pending`` what waits for a restart; a pending value
    of None is a pending removal.
    """

    live: dict[str, str]
    pending: dict[str, str | None] = field(default_factory=dict)
    running: bool = False
    digest: str | None = None

    @property
    def config(self) -> dict[str, str]:
        """What the container has after its next start."""
        merged = {**self.live, **self.pending}
        return {key: value for key, value in merged.items() if value is not None}

    @property
    def lock(self) -> str | None:
        """The configuration lock (``backup``, ``create``, …), or None."""
        return self.live.get("lock")

    @property
    def tags(self) -> list[str]:
        return tags(self.config.get("tags", ""))


def from_pending(items: list[dict], running: bool) -> Container:
    """The container behind an answer of ``GET …/pending``: live and pending values in one call.

    A real node lists ``digest`` among the keys (PVE::GuestHelpers::config_with_pending_array runs over the whole
    parsed file); where it does not, the digest is None and must be asked for before a change.
    """
    live: dict[str, str] = {}
    pending: dict[str, str | None] = {}
    for item in items:
        key = item["key"]
        if "value" in item:
            live[key] = wire(item["value"])
        if item.get("delete"):
            pending[key] = None
        elif "pending" in item:
            pending[key] = wire(item["pending"])
    digest = live.pop("digest", None)
    return Container(live, pending, running, digest)
