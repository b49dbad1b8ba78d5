# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Container configuration as text: Proxmox VE's file format, and the LXC configuration made from it. Pure."""

import hashlib
import re
from urllib.parse import unquote

from .settings import ID_COUNT, ID_SHIFT

# Options that the API answers as numbers; everything else stays text.
INTEGERS = {
    "memory",
    "swap",
    "cores",
    "cpuunits",
    "onboot",
    "protection",
    "unprivileged",
    "template",
    "tty",
    "debug",
    "console",
}
# What this node does for real. An option that is not here would be stored and have no effect, which is worse
# than an error: a test that passes on it means nothing on a real node.
OPTIONS = {
    "arch", "cores", "cpulimit", "cpuunits", "description", "features", "hostname", "lock", "memory", "nameserver",
    "onboot", "ostype", "protection", "rootfs", "searchdomain", "swap", "tags", "unprivileged",
}  # fmt: skip
NUMBERED = re.compile(r"^(mp|net|dev|unused)\d+$")
FEATURES = {"nesting", "keyctl", "fuse"}
NET_KEYS = {"name", "bridge", "hwaddr", "ip", "gw", "ip6", "gw6", "mtu", "type", "firewall", "link_down"}
# backup, replicate and shared say nothing about a running container; the others are mount options.
MOUNT_KEYS = {"volume", "mp", "size", "ro", "backup", "replicate", "shared", "mountoptions"}
DEVICE_KEYS = {"path", "mode", "uid", "gid", "deny-write"}


class Unsupported(Exception):
    """An option that this node cannot honour for real; the text names option and value."""


def properties(text, default):
    """The keys of a property string such as `local:8,size=8G`; a first part without = gets the key DEFAULT."""
    out = {}
    for part in str(text).split(","):
        key, equals, value = part.partition("=")
        if equals:
            out[key] = value
        elif part:
            out[default] = part
    return out


def check(options):
    """Raise Unsupported for the first of the options (name: value) that has no real effect on this node."""
    for key, value in sorted(options.items()):
        if key not in OPTIONS and not NUMBERED.match(key):
            raise Unsupported(f"{key}={value}")
        if key == "features":
            for name, state in properties(value, "").items():
                if name not in FEATURES and state not in ("0", "off", "no", "false"):
                    raise Unsupported(f"features={name}={state}")
        elif key.startswith("net"):
            _check_properties(key, properties(value, "name"), NET_KEYS)
            if properties(value, "name").get("ip") == "dhcp" or properties(value, "name").get("ip6") in (
                "dhcp",
                "auto",
            ):
                raise Unsupported(f"{key}: no DHCP or router advertisement on this bridge, give a static address")
        elif key.startswith("dev"):
            _check_properties(key, properties(value, "path"), DEVICE_KEYS)
        elif key == "rootfs" or re.match(r"mp\d", key):
            mount = properties(value, "volume")
            _check_properties(key, mount, MOUNT_KEYS)
            if mount.get("volume", "").startswith("/dev/"):
                raise Unsupported(f"{key}: device mount {mount['volume']}")
            if re.fullmatch(r"[^:/]+:0+(\.0+)?", mount.get("volume", "")):
                raise Unsupported(f"{key}: a volume without a size")


def _check_properties(key, values, known):
    for name in values:
        if name not in known:
            raise Unsupported(f"{key}: {name}={values[name]}")


# ------------------------------------------------------------------ Proxmox VE's file


def dump(config, pending):
    """The text of a container's configuration file: description as comments, options, then the pending section."""
    lines = []
    for line in str(config.get("description", "")).splitlines():
        lines.append("#" + re.sub(r"[%\x00-\x1f\x7f]", lambda found: f"%{ord(found[0]):02X}", line))
    lines += [f"{key}: {config[key]}" for key in sorted(config) if key != "description"]
    if pending:
        lines += ["", "[pve:pending]"]
        deletes = sorted(key for key, value in pending.items() if value is None)
        if deletes:
            lines.append("delete: " + ",".join(deletes))
        lines += [f"{key}: {_line(key, value)}" for key, value in sorted(pending.items()) if value is not None]
    return "\n".join(lines) + "\n"


def _line(key, value):
    # In the pending section a description is an ordinary option: its line ends are encoded, as Proxmox VE does.
    return value.replace("%", "%25").replace("\n", "%0A") if key == "description" else value


def load(text):
    """(config, pending) of such a text; a pending value of None is a pending removal."""
    config, pending, comments = {}, {}, []
    section = config
    for line in text.splitlines():
        if line.startswith("#"):
            comments.append(unquote(line[1:]))
        elif line == "[pve:pending]":
            section = pending
        elif ": " in line:
            key, value = line.split(": ", 1)
            if section is pending and key == "delete":
                pending.update(dict.fromkeys(value.split(",")))
            else:
                section[key] = _value(key, value)
    if comments:
        config["description"] = "".join(comment + "\n" for comment in comments)
    return config, pending


def _value(key, text):
    if key in INTEGERS and re.fullmatch(r"-?\d+", text):
        return int(text)
    if key == "cpulimit":
        number = float(text)
        return int(number) if number.is_integer() else number
    return unquote(text) if key == "description" else text


def digest(config, pending):
    """Proxmox VE's configuration digest: the SHA-1 of the file."""
    return hashlib.sha1(dump(config, pending).encode()).hexdigest()


# ------------------------------------------------------------------ LXC's file


def numbered(config, prefix):
    """[(n, text)] of the options PREFIXn, by number."""
    found = ((re.fullmatch(prefix + r"(\d+)", key), value) for key, value in config.items())
    return sorted((int(match[1]), value) for match, value in found if match)


def veth(vmid, n):
    """The host side's name of a container's network device, as Proxmox VE names it."""
    return f"veth{vmid}i{n}"


def lxc_config(vmid, config, rootfs, cpus, cgroup2, devices, mounts):
    """The LXC configuration of a container.

    cpus: number of CPUs of the node; cgroup2: controllers live in the unified hierarchy (else version 1);
    devices: [(staged path, path in the container without /, kind b|c, major, minor, access)];
    mounts: [(source, path in the container without /, mount options, idmapped)].
    """
    limits = "lxc.cgroup2." if cgroup2 else "lxc.cgroup."
    features = properties(config.get("features", ""), "")
    unprivileged = bool(config.get("unprivileged"))
    lines = [
        "# Written by the local node at every start, from the container's Proxmox VE configuration.",
        "lxc.include = /usr/share/lxc/config/common.conf",
    ]
    if unprivileged:
        lines += [
            "lxc.include = /usr/share/lxc/config/userns.conf",
            f"lxc.idmap = u 0 {ID_SHIFT} {ID_COUNT}",
            f"lxc.idmap = g 0 {ID_SHIFT} {ID_COUNT}",
            # The volumes hold unshifted ids and are mapped when mounted, so both kinds unpack the same way.
            "lxc.rootfs.options = idmap=container",
        ]
    if features.get("nesting") == "1":
        lines.append("lxc.include = /usr/share/lxc/config/nesting.conf")
    lines += [
        f"lxc.arch = {config.get('arch', 'amd64')}",
        f"lxc.uts.name = {str(config.get('hostname', f'CT{vmid}')).partition('.')[0]}",
        f"lxc.rootfs.path = dir:{rootfs}",
        # This node is for development: a host with AppArmor must run the same containers as one without.
        "lxc.apparmor.profile = unconfined",
        "lxc.init.cmd = /sbin/init",
        "lxc.tty.max = 0",
        "lxc.console.path = none",
    ]
    memory, swap = int(config.get("memory", 512)), int(config.get("swap", 512))
    if cgroup2:
        lines += [f"{limits}memory.max = {memory}M", f"{limits}memory.swap.max = {swap}M"]
    else:
        lines += [
            f"{limits}memory.limit_in_bytes = {memory}M",
            f"{limits}memory.memsw.limit_in_bytes = {memory + swap}M",
        ]
    lines += [f"{limits}{key} = {value}" for key, value in cpu_limits(vmid, config, cpus, cgroup2).items()]
    for n, text in numbered(config, "net"):
        lines += _network(vmid, n, properties(text, "name"))
    for source, target, kind, major, minor, access in devices:
        for version in ("lxc.cgroup.", "lxc.cgroup2."):
            lines.append(f"{version}devices.allow = {kind} {major}:{minor} {access}")
        lines.append(f"lxc.mount.entry = {source} {target} none bind,create=file 0 0")
    if features.get("fuse") == "1":
        lines.append("lxc.mount.entry = /dev/fuse dev/fuse none bind,create=file 0 0")
    for source, target, options, idmapped in mounts:
        options = ["bind", "create=dir", *options] + (["idmap=container"] if idmapped and unprivileged else [])
        lines.append(f"lxc.mount.entry = {source} {target} none {','.join(options)} 0 0")
    return "\n".join(lines) + "\n"


def cpu_limits(vmid, config, cpus, cgroup2):
    """The control group files (name: text) that give a container its cores, cpulimit and cpuunits.

    Proxmox VE spreads containers over the machine's CPUs and balances them as they run; here the number says which CPU
    is a container's first.
    """
    out = {}
    cores = min(int(config.get("cores") or cpus), cpus)
    out["cpuset.cpus"] = ",".join(str(cpu) for cpu in sorted((vmid + n) % cpus for n in range(cores)))
    limit = float(config.get("cpulimit") or 0)
    units = config.get("cpuunits")
    if cgroup2:
        out["cpu.max"] = f"{int(limit * 100000)} 100000" if limit else "max 100000"
        out["cpu.weight"] = str(units or 100)
    else:
        out["cpu.cfs_period_us"] = "100000"
        out["cpu.cfs_quota_us"] = str(int(limit * 100000)) if limit else "-1"
        out["cpu.shares"] = str(units or 1024)
    return out


def _network(vmid, n, net):
    lines = [
        f"lxc.net.{n}.type = veth",
        f"lxc.net.{n}.veth.pair = {veth(vmid, n)}",
        f"lxc.net.{n}.link = {net['bridge']}",
        f"lxc.net.{n}.name = {net['name']}",
        f"lxc.net.{n}.hwaddr = {net['hwaddr']}",
    ]
    if net.get("link_down") != "1":
        lines.append(f"lxc.net.{n}.flags = up")
    if net.get("mtu"):
        lines.append(f"lxc.net.{n}.mtu = {net['mtu']}")
    for address, gateway, family in (("ip", "gw", "ipv4"), ("ip6", "gw6", "ipv6")):
        if "/" in net.get(address, ""):
            lines.append(f"lxc.net.{n}.{family}.address = {net[address]}")
            if net.get(gateway):
                lines.append(f"lxc.net.{n}.{family}.gateway = {net[gateway]}")
    return lines


# ------------------------------------------------------------------ the files inside


def hosts_body(config, vmid):
    """The lines of /etc/hosts that belong to the container itself."""
    name = str(config.get("hostname", f"CT{vmid}"))
    names = name if "." not in name else f"{name} {name.partition('.')[0]}"
    addresses = [properties(text, "name").get("ip", "").split("/")[0] for _n, text in numbered(config, "net")]
    addresses = [address for address in addresses if re.match(r"\d", address)]
    return f"{addresses[0] if addresses else '127.0.1.1'} {names}\n"


def resolv_text(config, nameservers, searchdomain):
    """/etc/resolv.conf, which Proxmox VE replaces as a whole: the container's own settings, else the node's."""
    servers = re.split(r"[\s,;]+", config["nameserver"]) if config.get("nameserver") else nameservers
    search = config.get("searchdomain") or searchdomain
    return (f"search {search}\n" if search else "") + "".join(f"nameserver {server}\n" for server in servers if server)
