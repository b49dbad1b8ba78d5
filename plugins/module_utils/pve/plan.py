# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From a declared container and the one that is there to the steps between them. Pure.

The declaration is the ``container`` option of module pve_container, already validated by its argument spec. An option
that is None is not managed: what is there stays. A list or a ``features`` dictionary that is given is managed whole:
what it does not name is removed. An empty text removes its key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass, field, replace

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import config, keys, rights, values
from ansible_collections.dflash.launchproof.plugins.module_utils.pve.config import Container

#: The tag that marks a container as one this project may change.
MARK = "launchproof"

#: Declaration options that are a configuration key of the same name and hold one plain value.
SCALARS = tuple(
    name
    for name, key in keys.KEYS.items()
    if key.text == name and not key.properties and name not in ("tags", "unprivileged")
)

#: What a running container takes without a restart (PVE::LXC::Config, vmconfig_hotplug_pending). A prediction for
#: check mode alone: after a real change the node is asked what is pending.
_HOTPLUG = {
    "description",
    "onboot",
    "startup",
    "protection",
    "hostname",
    "hookscript",
    "cores",
    "tags",
    "cpulimit",
    "cpuunits",
    "memory",
    "swap",
}

# What a container of ours was created with is written into its notes, where Proxmox shows no HTML comments: the API
# does not tell, and a change of it would be silently without effect.
_LOGIN = re.compile(r"\n?<!-- launchproof: created with (.*?) -->")
_KEY_TYPE = re.compile(r"(?<!\S)(sk-)?(ssh|ecdsa)-\S+")

_GIB = 1024**3
# What a resolver may know: in /etc/hosts names have underscores too, and elsewhere letters that are not ASCII.
_HOST = re.compile(r"[\w-]+(\.[\w-]+)*\.?")
# A token travels in a header, as Latin-1.
_IN_HEADER = re.compile(r"[!-~\xa1-\xff]+")
#: Seconds in a week: nobody waits longer, and the system's clocks take no number of any length.
_LONGEST = 7 * 24 * 3600


@dataclass(frozen=True)
class Problem:
    """One thing that must be put right first: the variable, its value, what is wrong and what to do."""

    variable: str
    value: object
    problem: str
    fix: str

    def sentence(self) -> str:
        return f"{self.variable} is {self.value!r}: {self.problem.rstrip('.')}. {self.fix}"


@dataclass(frozen=True)
class Step:
    """One call that changes something.

    ``action`` is create, resize, config, start, shutdown, stop, reboot or destroy; ``root`` sends it as root@pam.
    """

    action: str
    params: dict = field(default_factory=dict)
    root: bool = False

    @property
    def keys(self) -> set[str]:
        """The configuration keys that it changes."""
        if self.action == "resize":
            return {self.params["disk"]}
        return {*self.params, *self.params.get("delete", "").split(",")} if self.action == "config" else set()

    def describe(self) -> str:
        shown = sorted(key for key in self.params if key not in ("delete", "digest", "password", "ssh-public-keys"))
        if self.params.get("delete"):
            shown.append(f"without {self.params['delete']}")
        return f"{self.action}{' as root@pam' if self.root else ''}" + (f": {', '.join(shown)}" if shown else "")


def validate(container: dict) -> list[Problem]:
    """What is wrong with a declaration by itself, before any node is asked. Variables are named ``container.…``."""
    problems: list[Problem] = []

    def wrong(variable: str, value: object, problem: str, fix: str) -> None:
        problems.append(Problem(f"container.{variable}", value, problem, fix))

    if not 100 <= container["vmid"] <= 999_999_999:
        wrong("vmid", container["vmid"], "not a container id", "Choose one from 100 to 999999999.")
    if container.get("hostname") is not None and not values.HOSTNAME.fullmatch(container["hostname"]):
        wrong("hostname", container["hostname"], "not a DNS name", "Use letters, digits and hyphens.")
    for tag in container.get("tags") or []:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_+.-]*", tag):
            wrong("tags", tag, "not a Proxmox tag", "Use letters, digits, '_', '-', '+' and '.'.")
    for found in values.wrong(container):
        wrong(*found)
    if container.get("template") is not None and not re.fullmatch(r"[^:/\s]+:vztmpl/[^/\s]+", container["template"]):
        wrong(
            "template",
            container["template"],
            "not the volume of a container template",
            "Write STORAGE:vztmpl/FILE, as `pveam list STORAGE` shows it.",
        )
    problems += _validate_networks(container.get("networks") or [])
    problems += _validate_devices(container.get("devices") or [])
    problems += _validate_mounts(container.get("mounts") or [])
    return problems


def route_problems(container: dict, params: dict) -> list[Problem]:
    """What is wrong with the way that ``params`` choose, or cannot travel it.

    pvesh takes parameters on a command line, for all to see.
    """
    problems = connection_problems(params)
    if params["api_via"] == "node" and container.get("password"):
        problems.append(
            Problem(
                "container.password",
                "(not shown)",
                "with pve_api_via: node it would stand in the node's list of processes",
                "Use ssh_public_keys, or the API with a token or password (pve_api_via: https).",
            )
        )
    return problems


def connection_problems(params: dict) -> list[Problem]:
    """Address, times and token with which no request can be made at all."""
    problems = []
    host = params["api_host"]
    if not _is_host(host):
        problems.append(
            Problem(
                "pve_api_host",
                host,
                "neither a host name nor an address",
                "Write the name or the address alone, such as pve1.example.com, 192.0.2.1 or fe80::1, without https://, "
                "brackets and port; pve_api_port is the port.",
            )
        )
    for option, least, most in (
        ("api_port", 1, 65535),
        ("api_timeout", 1, _LONGEST),
        ("lock_timeout", 0, _LONGEST),
        ("task_timeout", 1, _LONGEST),
    ):
        if not least <= params[option] <= most:
            problems.append(
                Problem(f"pve_{option}", params[option], "out of range", f"Give a number from {least} to {most}.")
            )
    if params["api_via"] == "https" and not params.get("api_password"):
        for option in ("api_user", "api_token_id", "api_token_secret"):
            text = params.get(option)
            if text and not _IN_HEADER.fullmatch(text):
                problems.append(
                    Problem(
                        f"pve_{option}",
                        "(not shown)" if option == "api_token_secret" else text,
                        "it has a blank, a line end or another character that no HTTP header can carry",
                        "Copy it anew, as `pveum user token add` showed it.",
                    )
                )
    return problems


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(_HOST.fullmatch(text))
    return True


def _validate_networks(networks: list[dict]) -> list[Problem]:
    problems = _duplicates("networks", "name", networks)
    for network in networks:
        where = f"container.networks[{network['name']}]"
        for option, words, version in (("ip", ("dhcp", "manual"), 4), ("ip6", ("dhcp", "auto", "manual"), 6)):
            address = network.get(option)
            if address is None or address in words:
                continue
            try:
                interface = ipaddress.ip_interface(address)
                # Not a netmask, nor a prefix below 8: Proxmox takes neither.
                prefix = address.partition("/")[2]
                if interface.version != version or not prefix.isdecimal() or int(prefix) < 8:
                    raise ValueError
            except ValueError:
                problems.append(
                    Problem(
                        f"{where}.{option}",
                        address,
                        f"not an IPv{version} address with its prefix",
                        f"Write ADDRESS/PREFIX, the prefix from 8, or one of {', '.join(words)}.",
                    )
                )
                continue
            name = "gw" if version == 4 else "gw6"
            gateway = network.get(name)
            if gateway is not None and values.is_address(gateway, version) and not _reachable(gateway, interface):
                problems.append(
                    Problem(
                        f"{where}.{name}",
                        gateway,
                        f"not an address in {interface.network}",
                        "Give the gateway of that network.",
                    )
                )
    return problems


def _reachable(gateway: str, interface) -> bool:
    """Whether an address can be the gateway of an interface: in its network, or beside one that has no other address.

    To the gateway of a single address, as hosters route them, Proxmox gives the container a route of its own.
    """
    address, network = ipaddress.ip_address(gateway), interface.network
    return address in network or address.is_link_local or network.prefixlen == network.max_prefixlen


def _validate_devices(devices: list[dict]) -> list[Problem]:
    problems = _duplicates("devices", "path", devices)
    for device in devices:
        where = f"container.devices[{device['path']}]"
        if not device["path"].startswith("/dev/") or "," in device["path"]:
            problems.append(Problem(f"{where}.path", device["path"], "not a device node", "Give a path below /dev."))
        mode = device.get("mode")
        if mode is not None and not re.fullmatch(r"0[0-7]{3}", mode):
            problems.append(
                Problem(
                    f"{where}.mode",
                    mode,
                    "not an octal mode such as 0660",
                    'Quote it, as in mode: "0666": without quotes YAML reads a number.',
                )
            )
    return problems


def _validate_mounts(mounts: list[dict]) -> list[Problem]:
    problems = _duplicates("mounts", "target", _by_path(mounts))
    for mount in mounts:
        where = f"container.mounts[{mount['target']}]"
        if not mount["target"].startswith("/") or "," in mount["target"]:
            problems.append(
                Problem(
                    f"{where}.target", mount["target"], "not an absolute path", "Give the path inside the container."
                )
            )
        source, storage = mount.get("source"), mount.get("storage")
        if (source is None) == (storage is None):
            problems.append(
                Problem(
                    where,
                    {"source": source, "storage": storage},
                    "neither or both are given",
                    "Give source (a path on the node) or storage with size_gib (a new volume).",
                )
            )
        elif source is not None and (not source.startswith("/") or "," in source or "=" in source):
            problems.append(
                Problem(
                    f"{where}.source",
                    source,
                    "not a path Proxmox can mount",
                    "Give an absolute path on the node without commas and equals signs.",
                )
            )
        elif storage is not None and mount.get("size_gib") is None:
            problems.append(
                Problem(
                    f"{where}.size_gib", mount.get("size_gib"), "a new volume needs a size", "Give its size in GiB."
                )
            )
    return problems


def _duplicates(option: str, identity: str, entries: list[dict]) -> list[Problem]:
    seen: set[str] = set()
    problems = []
    for entry in entries:
        if entry[identity] in seen:
            problems.append(
                Problem(
                    f"container.{option}", entry[identity], f"this {identity} is declared twice", "Keep one of them."
                )
            )
        seen.add(entry[identity])
    return problems


def ownership(container: dict, before: Container | None) -> list[Problem]:
    """A container that is there but does not carry the mark is somebody else's: it is never changed."""
    if before is None or MARK in before.tags:
        return []
    if before.lock == "create":
        return [
            Problem(
                "container.vmid",
                container["vmid"],
                "this container is being created, restored or cloned, and no creation that this identity may see works on it",
                "See the task list of its node: where a restore or a clone works on it, wait for that. Where nothing does, it was "
                f"left half made; then, as root there: pct unlock {container['vmid']} && pct destroy {container['vmid']}.",
            )
        ]
    name = before.config.get("hostname", "without a name")
    return [
        Problem(
            "container.vmid",
            container["vmid"],
            f"taken by container {name!r}, which does not carry the tag {MARK!r} and is left alone",
            f"Choose a free vmid, or add the tag {MARK} to that container if this project may manage it.",
        )
    ]


def wanted(
    container: dict, before: Container | None, secret: str | None = None
) -> tuple[dict[str, str | None], list[Problem]]:
    """The configuration the declaration asks for, key by key (None: removed), and what stands in its way.

    Only managed keys are in it. Values take over from ``before`` what a declaration leaves open: indexes of networks,
    devices and mounts, MAC addresses, volume names, and whatever Proxmox keeps in a key that nobody can declare.
    ``secret`` is the one that this identity shares with the API, see ``login_mark``.
    """
    current = before.config if before else {}
    result: dict[str, str | None] = {}
    problems: list[Problem] = []
    for option in SCALARS:
        if container.get(option) is not None:
            result[option] = config.wire(container[option]) or None
    _login(container, before, secret, result, problems)
    declared_tags = container.get("tags")
    if declared_tags is not None or before is None:
        result["tags"] = ";".join(config.tags(";".join([*(declared_tags or []), MARK])))
    if container.get("features") is not None:
        result["features"] = _features(container["features"], current.get("features")) or None
    _rootfs(container, current, result, problems)
    _entries(result, current, "net", "name", container.get("networks"), "name", _network)
    _entries(result, current, "dev", "path", container.get("devices"), "path", _device)
    mounts = container.get("mounts")
    _entries(result, current, "mp", "mp", mounts if mounts is None else _by_path(mounts), "target", _mount, problems)
    problems += _swaps(container["vmid"], result, before)
    unprivileged = container.get("unprivileged")
    if before is None:
        result["unprivileged"] = config.wire(True if unprivileged is None else unprivileged)
    elif unprivileged is not None and config.wire(unprivileged) != current.get("unprivileged", "0"):
        problems.append(
            Problem(
                "container.unprivileged",
                unprivileged,
                "this is settled when a container is created",
                "Keep it, or destroy the container and deploy it anew.",
            )
        )
    return result, problems


def login_mark(container: dict, secret: str | None) -> str:
    """What is written down of the login that a container is created with; empty where there is nothing to write.

    The keys are public. The password is not, and whoever may look at the container could try passwords against a plain
    digest: it is keyed with ``secret``, an API token's, and left out where there is none that nobody can guess.
    """
    parts = []
    if container.get("ssh_public_keys"):
        public = sorted(filter(None, map(_public_key, "\n".join(container["ssh_public_keys"]).splitlines())))
        parts.append("ssh-keys=" + hashlib.sha256("\n".join(public).encode()).hexdigest()[:16])
    if container.get("password") and secret:
        about = hashlib.sha256(secret.encode()).hexdigest()[:8]
        digest = hmac.new(secret.encode(), container["password"].encode(), "sha256").hexdigest()[:16]
        parts.append(f"password={about}:{digest}")
    return " ".join(parts)


def _public_key(line: str) -> str:
    """Options, type and key of a line of an authorized_keys file: a comment behind them changes nothing."""
    if line.lstrip().startswith("#"):
        return ""
    # What an option has in quotes may look like a key.
    unquoted = re.sub(r'"(\\.|[^"\\])*"', lambda quoted: "-" * len(quoted[0]), line)
    found = _KEY_TYPE.search(unquoted)
    start = found.start() if found else 0
    return " ".join([*line[:start].split(), *line[start:].split()[:2]])


def _login(
    container: dict, before: Container | None, secret: str | None, result: dict, problems: list[Problem]
) -> None:
    """Write the login mark into the notes of a new container, keep it in those of an old one, and hold it to it."""
    now = login_mark(container, secret)
    if before is None:
        if now:
            result["description"] = (
                f"{result.get('description') or ''}\n<!-- launchproof: created with {now} -->".strip()
            )
        return
    found = _LOGIN.search(before.config.get("description", ""))
    if found and "description" in result:
        result["description"] = f"{result['description'] or ''}{found[0]}".strip()
    # Anybody may have written into the notes: what is no mark of ours says nothing.
    then, now = (dict(re.findall(r"([\w-]+)=(\S+)", text)) for text in (found[1] if found else "", now))
    for name, option, module in (
        ("ssh-keys", "ssh_public_keys", "ansible.posix.authorized_key"),
        ("password", "password", "ansible.builtin.user"),
    ):
        if then.get(name) == now.get(name) or name not in now:
            continue
        # A password's digest can be compared by the holder of the same secret alone.
        if name == "password" and name in then and then[name].partition(":")[0] != now[name].partition(":")[0]:
            continue
        how, keep = (
            ("was created with another value", "leave the declaration as it was created")
            if name in then
            else ("does not say in its notes that it was created with any", "take it out of the declaration")
        )
        problems.append(
            Problem(
                f"container.{option}",
                container[option] if option != "password" else "(not shown)",
                f"container {container['vmid']} {how}, and Proxmox sets it at creation alone",
                f"Change it inside, with {module}, and {keep}; or destroy the container and deploy it anew.",
            )
        )


def _features(features: dict, live: str | None) -> str:
    props = {name: "1" for name, value in features.items() if value is True}
    if features.get("mount"):
        props["mount"] = sorted(features["mount"])
    return config.render("features", {**props, **_kept("features", config.parse("features", live or ""))})


def _kept(key: str, live: dict | None) -> dict[str, str]:
    """What a live value holds beside the properties that a declaration manages: not ours to change or remove."""
    known = keys.find(key).properties
    return {name: value for name, value in (live or {}).items() if name not in known or known[name].word != "managed"}


def _rootfs(container: dict, current: dict, result: dict, problems: list[Problem]) -> None:
    if "rootfs" not in current:
        if container.get("storage") and container.get("disk_gib"):
            result["rootfs"] = f"{container['storage']}:{container['disk_gib']}"
        return
    props = config.parse("rootfs", current["rootfs"])
    storage = props["volume"].partition(":")[0]
    if container.get("storage") not in (None, storage):
        problems.append(
            Problem(
                "container.storage",
                container["storage"],
                f"the root disk is on {storage!r}",
                "Keep that storage, or move the volume with `pct move-volume` first.",
            )
        )
    if container.get("disk_gib") is not None:
        result["rootfs"] = _grown("rootfs", props, container["disk_gib"], "container.disk_gib", problems)


def _grown(key: str, props: dict, gib: int, variable: str, problems: list[Problem]) -> str:
    """The volume with at least ``gib`` GiB; a volume that would shrink is a problem, Proxmox never shrinks one."""
    size = config.size_bytes(props.get("size", "0"))
    if size > gib * _GIB:
        problems.append(
            Problem(
                variable, gib, f"the volume has {props['size']} and cannot shrink", f"Give at least {-(-size // _GIB)}."
            )
        )
    return config.render(key, {**props, "size": f"{gib}G"} if size < gib * _GIB else props)


def _entries(result, current, prefix, identity, declared, option, build, problems=None) -> None:
    """Numbered keys (net0, dev1, …): each declared entry keeps the number of the live one with the same identity."""
    if declared is None:
        return
    live = {key: config.parse(key, value) for key, value in current.items() if config.kind(key) == prefix}
    by_identity: dict[str | None, str] = {}
    # Proxmox accepts two entries that name the same thing. The lowest number is the declared one, the others go.
    for key in sorted(live, key=lambda key: int(key.removeprefix(prefix))):
        by_identity.setdefault(config.canonical(key, current[key]).get(identity), key)
    free = (f"{prefix}{number}" for number in range(256) if f"{prefix}{number}" not in live)
    for entry in declared:
        key = by_identity.pop(entry[option], None) or next(free)
        props = build(key, entry, live.get(key), problems)
        result[key] = config.render(key, props)
    result |= {key: None for key in live if key not in result}


def _network(key, entry, live, problems):
    options = ("ip", "gw", "ip6", "gw6", "mtu", "rate", "tag", "firewall", "link_down")
    return {
        "name": entry["name"],
        "bridge": entry["bridge"],
        "hwaddr": entry.get("hwaddr") or (live or {}).get("hwaddr"),
        **{name: entry.get(name) for name in options},
        "trunks": entry.get("trunks") or None,
        "host-managed": entry.get("host_managed"),
        **_kept(key, live),
    }


def _device(key, entry, live, problems):
    return {
        "path": entry["path"],
        "mode": entry.get("mode"),
        "uid": entry.get("uid"),
        "gid": entry.get("gid"),
        "deny-write": entry.get("deny_write"),
        **_kept(key, live),
    }


def _mount(key, entry, live, problems):
    options = {
        "mp": entry["target"],
        "ro": entry.get("read_only"),
        **{name: entry.get(name) for name in ("backup", "acl", "quota", "replicate", "shared", "keepattrs", "idmap")},
        "mountoptions": sorted(entry.get("mountoptions") or []) or None,
        **_kept(key, live),
    }
    if entry.get("source") is not None:
        return {"volume": entry["source"], **options}
    where = f"container.mounts[{entry['target']}]"
    if live is None or config.mount_type(live["volume"]) != "volume" or config.unmade(live["volume"]):
        return {"volume": f"{entry['storage']}:{entry['size_gib']}", **options}
    if live["volume"].partition(":")[0] != entry["storage"]:
        problems.append(
            Problem(
                f"{where}.storage",
                entry["storage"],
                f"the volume is {live['volume']!r}",
                "Keep its storage, or move the volume with `pct move-volume` first.",
            )
        )
    kept = {"volume": live["volume"], **options, "size": live.get("size")}
    return config.parse(key, _grown(key, kept, entry["size_gib"], f"{where}.size_gib", problems))


def _by_path(mounts: list[dict]) -> list[dict]:
    """Mounts with their targets as Proxmox mounts them, so that one path is one mount."""
    return [{**mount, "target": config.mount_path(mount["target"])} for mount in mounts]


def detached(want: dict[str, str | None], before: Container | None) -> dict[str, dict[str, str]]:
    """The mounts, as properties by key, whose volume the wanted keys take away from the container.

    Proxmox keeps such a volume, with what is on it, as an unused disk of the container.
    """
    current = before.config if before else {}
    mounts = {key: config.parse(key, value) for key, value in current.items() if config.kind(key) == "mp"}
    kept = {
        config.parse(key, value)["volume"]
        for key, value in {**current, **want}.items()
        if config.kind(key) == "mp" and value
    }
    return {
        key: props
        for key, props in mounts.items()
        if config.mount_type(props["volume"]) == "volume"
        and not config.unmade(props["volume"])
        and props["volume"] not in kept
    }


def _swaps(vmid: int, want: dict[str, str | None], before: Container | None) -> list[Problem]:
    """A new volume beside one that is taken away: what a renamed target looks like, and its data would be out of sight.

    Taking a volume away alone is what a shorter list says, and is done.
    """
    gone = detached(want, before)
    new = [config.parse(key, value) for key, value in want.items() if config.kind(key) == "mp" and value]
    return [
        Problem(
            f"container.mounts[{props['mp']}].target",
            props["mp"],
            "a new, empty volume would be mounted there, while "
            + " and ".join(f"{old['volume']!r} at {old['mp']!r}" for old in gone.values())
            + " is no longer declared and would be detached",
            "To mount the data there, as root on its node: "
            + " or ".join(
                f"`pct set {vmid} --{key} {config.render(key, {**old, 'mp': props['mp']})}`"
                for key, old in gone.items()
            )
            + ". To leave it behind as an unused disk, take its mount out of the declaration in a run of its own before.",
        )
        for props in new
        if gone and config.unmade(props["volume"])
    ]


def changes(want: dict[str, str | None], before: Container | None) -> dict[str, str | None]:
    """Those of the wanted keys whose value means something else than what is there."""
    current = before.config if before else {}
    return {key: value for key, value in want.items() if not config.same(key, current.get(key), value)}


def creation_problems(container: dict) -> list[Problem]:
    """What a container that does not exist yet still needs to be declared with."""
    return [
        Problem(f"container.{option}", container.get(option), "a container that is to be created needs it", fix)
        for option, fix in (
            ("template", "Give a template, STORAGE:vztmpl/FILE; `pveam list STORAGE` shows them."),
            ("storage", "Give the storage of its root disk; `pvesm status --content rootdir` shows them."),
            ("disk_gib", "Give the size of its root disk in GiB."),
        )
        if not container.get(option)
    ]


def root_only(delta: dict[str, str | None], before: Container | None, unprivileged: bool) -> dict[str, str]:
    """The keys of ``delta`` that only root@pam may set, each with the reason in words."""
    current = before.config if before else {}
    reasons = {key: rights.root_only(key, current.get(key), value, unprivileged) for key, value in delta.items()}
    return {key: why for key, why in reasons.items() if why}


def steps(
    container: dict, before: Container | None, delta: dict[str, str | None], as_root: dict[str, str], api_is_root: bool
) -> list[Step]:
    """The calls that bring ``delta`` about, power aside.

    ``as_root`` are the root-only keys; unless the API itself speaks as root@pam they go in a call of their own, after
    the others, so that a container is complete before it is first started.
    """
    apart = set() if api_is_root else set(as_root)
    ordinary = {key: value for key, value in delta.items() if key not in apart}
    guarded = {key: value for key, value in delta.items() if key in apart}
    result, growing = [], []
    if before is None:
        params = {key: value for key, value in ordinary.items() if value is not None}
        params |= {"vmid": container["vmid"], "ostemplate": container["template"]}
        if container.get("ssh_public_keys"):
            params["ssh-public-keys"] = "\n".join(container["ssh_public_keys"])
        params |= {name: container[name] for name in ("password", "pool") if container.get(name)}
        result.append(Step("create", params))
    else:
        # What Proxmox may refuse goes first: a volume never shrinks again. One that also changes otherwise comes after its
        # own resize, because a change that becomes pending would bring the size from before back.
        sizes = resizes(ordinary, before)
        result += _config_step({key: value for key, value in ordinary.items() if key not in sizes}, root=False)
        volumes = {}
        for key, size in sizes.items():
            growing.append(Step("resize", {"disk": key, "size": size}))
            grown = config.render(key, {**config.parse(key, before.config[key]), "size": size})
            if not config.same(key, grown, ordinary[key]):
                volumes[key] = ordinary[key]
        growing += _config_step(volumes, root=False)
    return result + _config_step(guarded, root=True) + growing


def resizes(delta: dict, before: Container) -> dict[str, str]:
    """Volumes whose size changes: growing goes through /resize, a config PUT would change the number alone."""
    found = {}
    for key, value in delta.items():
        old = before.config.get(key)
        if config.kind(key) in ("rootfs", "mp") and old and value:
            was, is_ = config.parse(key, old), config.parse(key, value)
            if was["volume"] == is_["volume"] and "size" in is_ and was.get("size") != is_["size"]:
                found[key] = is_["size"]
    return found


def _config_step(delta: dict, root: bool) -> list[Step]:
    if not delta:
        return []
    params = {key: value for key, value in delta.items() if value is not None}
    removed = sorted(key for key, value in delta.items() if value is None)
    if removed:
        params["delete"] = ",".join(removed)
    return [Step("config", params, root)]


def power(state: str, after: Container, managed: set[str], restart: str) -> tuple[list[Step], list[str]]:
    """The power calls that end in ``state``, and the managed keys that stay pending if a restart is not allowed."""
    waiting = sorted(key for key in after.pending if key in managed)
    if state == "stopped":
        return ([Step("shutdown")] if after.running else []), []
    if not after.running:
        return ([Step("start")] if state == "started" else []), []
    if waiting and restart == "when_needed":
        return [Step("reboot")], []
    return [], waiting


def missing_addresses(container: dict, found: dict[str, list[str]]) -> list[Problem]:
    """The declared addresses that are not among ``found``, the global addresses by interface."""
    problems = []
    for network in container.get("networks") or []:
        there = found.get(network["name"], [])
        for option, colon in (("ip", False), ("ip6", True)):
            address = network.get(option)
            if address in (None, "manual"):
                continue
            expected = address.partition("/")[0] if "/" in address else None
            if not any(_same_address(item, expected) if expected else (":" in item) == colon for item in there):
                problems.append(
                    Problem(
                        f"container.networks[{network['name']}].{option}",
                        address,
                        f"the running container has {', '.join(there) or 'no address'} there",
                        "See the container's own network log (journalctl -b -u networking -u systemd-networkd).",
                    )
                )
    return problems


def _same_address(one: str, other: str) -> bool:
    return ipaddress.ip_address(one) == ipaddress.ip_address(other)


def predict(before: Container | None, delta: dict[str, str | None]) -> Container:
    """The container after ``delta``, as far as this can be foretold: what does not hotplug becomes pending."""
    start = before or Container({})
    live, pending = dict(start.live), dict(start.pending)
    for key, value in delta.items():
        new_mount = config.kind(key) == "mp" and key not in live and value is not None
        grows = config.kind(key) in ("rootfs", "mp") and key in live and value is not None
        if start.running and value == live.get(key):
            pending.pop(key, None)
        elif start.running and not (key in _HOTPLUG or config.kind(key) in ("net", "unused") or new_mount or grows):
            pending[key] = value
        elif value is None:
            live.pop(key, None)
            pending.pop(key, None)
        else:
            live[key] = value
            pending.pop(key, None)
    return replace(start, live=live, pending=pending)


def view(after: Container | None, keys: set[str], state: str | None = None) -> dict:
    """What a diff shows of a container: its state and the given configuration keys."""
    if after is None:
        return {"state": "absent"}
    shown = {key: value for key, value in sorted(after.config.items()) if key in keys}
    pending = {"pending": sorted(after.pending)} if after.pending and state is None else {}
    return {"state": state or ("running" if after.running else "stopped"), **shown, **pending}
