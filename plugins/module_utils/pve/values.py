# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a value of a declaration may be: the bounds and formats of Proxmox's own API schema. Pure.

Proxmox checks them too, but only in the request that carries the value, and the one before may have changed something.
Options are named as in ``keys``; a unit test holds the tables to the schema.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

#: The least and the most a number may be; None is no bound.
BOUNDS = {
    "disk_gib": (1, None),
    "cores": (1, 8192),
    "cpulimit": (0, 8192),
    "cpuunits": (0, 500_000),
    "memory": (16, None),
    "swap": (0, None),
    "tty": (0, 6),
    "networks[].mtu": (64, 65535),
    "networks[].tag": (1, 4094),
    "networks[].trunks": (1, 4094),
    "devices[].uid": (0, None),
    "devices[].gid": (0, None),
    "mounts[].size_gib": (1, None),
}

_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOSTNAME = re.compile(rf"(?=.{{1,255}}$){_LABEL}(\.{_LABEL})*")
# ssh-keygen, which Proxmox asks, takes options in front of a key and a comment behind it.
_SSH_KEY = re.compile(
    r"(.*\s)?(ssh-(rsa|dss|ed25519)|ecdsa-sha2-nistp(256|384|521)|sk-(ssh-ed25519|ecdsa-sha2-nistp256)@openssh\.com)"
    r"\s+AAAA[A-Za-z0-9+/]+={0,2}(\s.*)?"
)
_STORAGE = "[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]"
_POOL = "[A-Za-z0-9_.-]+"
_IDS = "[ug]:[0-9]+:[0-9]+:[1-9][0-9]*"
#: Of a value that is wrong, as much as a message shows.
_SHOWN = 60


class Form(NamedTuple):
    """What a text has to look like: whether one does, what it is otherwise, and what to write."""

    fits: Callable[[str], object]
    wrong: str
    fix: str
    secret: bool = False


def is_address(text: str, *versions: int) -> bool:
    """Whether ``text`` is an IP address of one of these versions, without prefix and zone."""
    try:
        return ipaddress.ip_address(text).version in versions and "%" not in text
    except ValueError:
        return False


def _pattern(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern).fullmatch


def _listed(fits: Callable[[str], object]) -> Callable[[str], bool]:
    """As Proxmox splits its lists (PVE::Tools::split_list)."""
    return lambda text: all(fits(word) for word in re.split(r"[,;\s]+", text) if word)


def _is_nameserver(text: str) -> bool:
    address, zone, interface = text.partition("%")
    if not zone:
        return is_address(address, 4, 6)
    return address.startswith("fe80:") and is_address(address, 6) and bool(re.fullmatch(r"[\w.:-]+", interface))


def _is_startup(text: str) -> bool:
    parts = [re.fullmatch(r"(?:(order|up|down)=)?[0-9]+", part) for part in text.split(",")]
    # The number alone is the order.
    return all(parts) and len({part[1] or "order" for part in parts}) == len(parts)


def _are_ssh_keys(text: str) -> bool:
    return all(_SSH_KEY.fullmatch(line) for line in text.splitlines() if line.strip())


_PLAIN_PATH = Form(
    lambda text: not re.search(r"(^|/)\.\.?(/|$)", text),
    "it has . or .. in it, which Proxmox refuses",
    "Write the path without them.",
)
_INTERFACE = Form(_pattern("[A-Za-z0-9_.-]+"), "not the name of an interface", "Use letters, digits, '-', '_' and '.'.")

FORMS = {
    "description": Form(lambda text: len(text) <= 8192, "longer than 8192 characters", "Write less."),
    "nameserver": Form(
        _listed(_is_nameserver), "not addresses of name servers", "Write addresses, separated by blanks."
    ),
    "searchdomain": Form(_listed(HOSTNAME.fullmatch), "not DNS domains", "Write domains, separated by blanks."),
    "timezone": Form(
        _pattern("[A-Za-z0-9_+/-]+"), "not a time zone", "Write one such as Europe/Vienna, or host for the node's."
    ),
    "startup": Form(_is_startup, "not an order and delays of a start", "Write them such as order=2,up=10,down=30."),
    "hookscript": Form(
        _pattern(rf"{_STORAGE}:snippets/[^/,\n]+"), "not the volume of a hook script", "Write STORAGE:snippets/FILE."
    ),
    "pool": Form(
        _pattern(rf"{_POOL}(/{_POOL}){{0,2}}"), "not the name of a pool", "Use letters, digits, '-', '_' and '.'."
    ),
    "password": Form(lambda text: len(text) >= 5, "shorter than 5 characters", "Give a longer one.", secret=True),
    "ssh_public_keys": Form(
        _are_ssh_keys,
        "not a public key of ssh",
        "Give the line of a .pub file, which begins with its type, such as ssh-ed25519 AAAA….",
    ),
    "features.mount": Form(
        _pattern("[A-Za-z0-9_; ]+"), "not a type of file system", "Write it as /proc/filesystems does, such as nfs."
    ),
    "networks[].name": _INTERFACE,
    "networks[].bridge": _INTERFACE,
    "networks[].gw": Form(lambda text: is_address(text, 4), "not an IPv4 address", "Write it without prefix."),
    "networks[].gw6": Form(lambda text: is_address(text, 6), "not an IPv6 address", "Write it without prefix."),
    # An empty one is none.
    "networks[].hwaddr": Form(
        _pattern("([A-Fa-f0-9][02468aceACE](:[A-Fa-f0-9]{2}){5})?"),
        "not a MAC address of one interface",
        "Write it such as BC:24:11:00:00:01; the second digit is even.",
    ),
    "devices[].path": _PLAIN_PATH,
    "mounts[].target": _PLAIN_PATH,
    "mounts[].source": _PLAIN_PATH,
    "mounts[].idmap": Form(
        _pattern(f"passthrough|{_IDS}(;{_IDS})*"),
        "not a mapping of ids",
        "Write passthrough, or such as u:0:100000:65536;g:0:100000:65536.",
    ),
}

_IDENTITY = {"networks": "name", "devices": "path", "mounts": "target"}


def wrong(container: dict) -> Iterator[tuple[str, object, str, str]]:
    """(option, value, problem, fix) of each value that Proxmox would refuse whatever its node looks like."""
    for option, (least, most) in BOUNDS.items():
        for where, value in _given(container, option):
            if most is None and not value >= least:
                yield where, value, f"less than {least}", f"Give at least {least}."
            elif most is not None and not least <= value <= most:
                yield where, value, "out of range", f"Give a number from {least} to {most}."
    for option, form in FORMS.items():
        for where, value in _given(container, option):
            if not form.fits(value):
                cut = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}…"
                yield where, "(not shown)" if form.secret else cut, form.wrong, form.fix


def _given(container: dict, option: str) -> Iterator[tuple[str, object]]:
    """(option, value) wherever a declaration gives an option; of ``networks[].mtu`` there is one in each entry."""
    top, dot, rest = option.partition(".")
    name = top.removesuffix("[]")
    declared = container.get(name)
    if not dot:
        # An empty text removes its key.
        found = [(name, None if declared == "" else declared)]
    elif name == top:
        found = [(option, (declared or {}).get(rest))]
    else:
        found = [(f"{name}[{entry[_IDENTITY[name]]}].{rest}", entry.get(rest)) for entry in declared or []]
    for where, value in found:
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                yield where, item
