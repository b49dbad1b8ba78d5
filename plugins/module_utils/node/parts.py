# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The parts of the local node: each can look whether it is up, bring itself up, and take itself down.

There may be no service manager on the machine, so a daemon is a detached process with a pid file, and it counts as
up only when that very process answers. Everything a part changes outside the state folder is written down in
run/machine.json before it is changed, and that record is what taking it down follows.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import ipaddress
import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import ssl
import subprocess
import time
import uuid
from pathlib import Path

from ansible_collections.dflash.launchproof.plugins.module_utils.node import machine

TABLE = "launchproof_node"
# Written on the bridge, so that an interface of the same name that somebody else made is never touched.
ALIAS = "dflash.launchproof local node"
TOOLS = Path("/usr/local/sbin")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SUBORDINATE = "root:100000:65536"
VETH = re.compile(r"veth(\d+)i\d+")
START_TIMEOUT = 20  # seconds until a daemon answers
STOP_TIMEOUT = 10  # seconds between SIGTERM and SIGKILL


class NodeError(Exception):
    """Something that a person has to change; the text names variable, value and fix."""


def run(*argv, data=None, environment=None):
    """Run a command; its output, or NodeError with the last line of what it said."""
    done = subprocess.run(argv, input=data, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
        raise NodeError(f"command {' '.join(argv[:3])} failed with {done.returncode}: {lines[-1]}")
    return done.stdout


def write(path, text, mode=0o644):
    """Replace a file as a whole; True when that changed it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        if path.read_text() == text and (path.stat().st_mode & 0o777) == mode:
            return False
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as out:
        os.fchmod(out.fileno(), mode)
        out.write(text)
    temporary.replace(path)
    return True


class Node:
    """The settings of a node, the paths below its state folder, and its record of changes to the machine."""

    def __init__(self, settings, environment=None):
        """settings: the module's parameters; environment: of the machine's user, for the containers' index settings."""
        self.settings = settings
        self.environment = os.environ if environment is None else environment
        self.dir = Path(settings["dir"])
        self.run = self.dir / "run"
        self.cache = self.dir / "cache"
        self.lib = self.dir / "lib"
        self.logs = self.dir / "log"
        self.network = ipaddress.ip_network(settings["network"])
        self.gateway = str(next(self.network.hosts()))
        self.bridge = settings["bridge"]

    @property
    def machine(self):
        """What the node has changed on the machine: {name: value before, or what was added}."""
        try:
            return json.loads((self.run / "machine.json").read_text())
        except (OSError, ValueError):
            return {}

    def remember(self, **changes):
        """Write down a change before it is made."""
        write(self.run / "machine.json", json.dumps({**self.machine, **changes}), 0o600)

    def forget(self, name):
        """A change has been taken back."""
        left = {key: value for key, value in self.machine.items() if key != name}
        write(self.run / "machine.json", json.dumps(left), 0o600)

    def program(self):
        """SHA-256 of the node's programs on disk, as the role computes it from its own files; '' without them."""
        try:
            paths = [*sorted((self.lib / "launchproof_node").glob("*.py")), self.lib / "requirements.txt"]
            return hashlib.sha256("".join(path.read_text() for path in paths).encode()).hexdigest()
        except OSError:
            return ""

    def missing_packages(self):
        """The Debian packages of the machine that are not installed."""
        wanted = self.settings["machine_packages"]
        command = ["dpkg-query", "--show", "--showformat", "${Package} ${db:Status-Status}\n", *wanted]
        lines = (
            subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines() if wanted else []
        )
        return [name for name in wanted if f"{name} installed" not in lines]

    def containers(self):
        """{vmid: (tags, is running)} of the node's containers, from its files."""
        active = set(re.findall(r"@/var/lib/lxc/(\d+)/command$", Path("/proc/net/unix").read_text(), re.M))
        out = {}
        for path in sorted((self.dir / "pve/nodes").glob("*/lxc/*.conf")):
            tags = re.search(r"^tags: (.*)$", path.read_text(), re.M)
            out[path.stem] = (tags[1].split(";") if tags else [], path.stem in active)
        return out


# ------------------------------------------------------------------ files


class Files:
    """Settings, keys and secrets. Secrets and keys are made once and stay."""

    name = "files"

    def __init__(self, node):
        self.node = node

    def _settings(self):
        node = self.node
        servers, search = machine.resolvers("/")
        return json.dumps({
            "node": node.settings["node"], "api_host": "127.0.0.1", "api_port": node.settings["api_port"],
            "gateway": node.gateway, "token_id": node.settings["token_id"], "faults": node.settings["faults"],
            "nameservers": servers, "searchdomain": search,
        }, indent=2, sort_keys=True) + "\n"  # fmt: skip

    def _secrets(self):
        folder = self.node.dir
        return {
            folder / "secrets/root_password": lambda: secrets.token_urlsafe(24),
            folder / "secrets/api_token": lambda: str(uuid.uuid4()),
            folder / "s3/access_key": lambda: secrets.token_hex(10).upper(),
            folder / "s3/secret_key": lambda: base64.b64encode(secrets.token_bytes(30)).decode(),
        }

    def look(self):
        """up, or what is missing."""
        try:
            if (self.node.dir / "node.json").read_text() != self._settings():
                return "settings differ"
        except OSError:
            return "absent"
        paths = [
            *self._secrets(),
            self.node.dir / "ssh/id_ed25519",
            self.node.dir / "ssh/host_ed25519",
            self.node.dir / "ssh/sshd_config",
        ]
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            return f"{missing[0]} missing"
        if (self.node.dir / "ssh/sshd_config").read_text() != self._sshd_config():
            return "sshd_config differs"
        return "up" if self._certificate_lasts() else "certificate expires"

    def _certificate_lasts(self):
        command = ["openssl", "x509", "-checkend", str(14 * 86400), "-noout", "-in", str(self.node.dir / "tls/ca.pem")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def up(self):
        """Write what is missing or differs."""
        node = self.node
        for name in ("secrets", "tls", "ssh", "s3", "run"):
            (node.dir / name).mkdir(mode=0o700 if name != "s3" else 0o755, parents=True, exist_ok=True)
        # Clients that are not root verify the certificate, so its folder can be entered.
        (node.dir / "tls").chmod(0o755)
        for name in (
            "storage/images",
            "storage/template/cache",
            "log",
            "s3/data",
            f"pve/nodes/{node.settings['node']}/lxc",
        ):
            (node.dir / name).mkdir(parents=True, exist_ok=True)
        for link, target in (
            ("local", f"nodes/{node.settings['node']}"),
            ("lxc", f"nodes/{node.settings['node']}/lxc"),
        ):
            path = node.dir / "pve" / link
            if not path.is_symlink() or os.readlink(path) != target:
                path.unlink(missing_ok=True)
                path.symlink_to(target)
        for path, make in self._secrets().items():
            if not path.exists():
                write(path, make() + "\n", 0o600)
        for name in ("id_ed25519", "host_ed25519"):
            if not (node.dir / "ssh" / name).exists():
                run(
                    "ssh-keygen",
                    "-q",
                    "-t",
                    "ed25519",
                    "-N",
                    "",
                    "-C",
                    "launchproof-node",
                    "-f",
                    str(node.dir / "ssh" / name),
                )
        if not self._certificate_lasts():
            self._make_certificate()
        port = node.settings["ssh_port"]
        write(node.dir / "ssh/authorized_keys", (node.dir / "ssh/id_ed25519.pub").read_text(), 0o600)
        write(node.dir / "ssh/known_hosts", f"[127.0.0.1]:{port} {(node.dir / 'ssh/host_ed25519.pub').read_text()}")
        write(node.dir / "ssh/sshd_config", self._sshd_config())
        write(node.dir / "node.json", self._settings())

    def _sshd_config(self):
        folder = self.node.dir / "ssh"
        return (
            f"ListenAddress 127.0.0.1\nPort {self.node.settings['ssh_port']}\nHostKey {folder}/host_ed25519\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPidFile none\nUsePAM no\nPermitRootLogin prohibit-password\n"
            "AllowUsers root\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPrintMotd no\n"
            "AcceptEnv LANG LC_*\nSubsystem sftp internal-sftp\n"
            # The node's root is this machine's. bash reads ~/.bashrc for each command over ssh unless it runs in another
            # shell, and what a developer's does (a tenth of a second of pyenv, a greeting) is nothing of a node's.
            "SetEnv SHLVL=1\n"
        )

    def _make_certificate(self):
        folder = self.node.dir / "tls"
        run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "398",
            "-subj", "/CN=launchproof local node", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-addext", "extendedKeyUsage=serverAuth", "-keyout", str(folder / "key.pem.new"), "-out", str(folder / "ca.pem.new"))  # fmt: skip
        (folder / "key.pem.new").chmod(0o600)
        (folder / "ca.pem.new").chmod(0o644)
        (folder / "key.pem.new").replace(folder / "key.pem")
        (folder / "ca.pem.new").replace(folder / "ca.pem")

    def down(self):
        """Files stay: they are the caches and keys of the next up, and what the S3 server holds is not the node's to delete."""


class Environment:
    """The Python environment of the API and the S3 server, complete when its marker says so."""

    name = "environment"

    def __init__(self, node):
        self.node = node
        self.path = node.cache / "venv"
        self.requirements = node.lib / "requirements.txt"

    def _wanted(self):
        try:
            return hashlib.sha256(self.requirements.read_bytes()).hexdigest()
        except OSError:
            return ""

    def look(self):
        """up, absent or outdated."""
        try:
            found = (self.path / "complete").read_text()
        except OSError:
            return "absent"
        return "up" if found == self._wanted() else "outdated"

    def begin(self):
        """Start making it; the process to wait for. pip reads the machine's own index settings."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.node.cache.mkdir(parents=True, exist_ok=True)
        pip = f"{self.path}/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement {self.requirements}"
        # The interpreter of the distribution: the one whose venv package the role installs.
        return _begin(self.node, self.name, ["sh", "-ec", f"/usr/bin/python3 -m venv {self.path}; {pip}"])

    def finish(self):
        """Mark it complete."""
        write(self.path / "complete", self._wanted())

    def down(self):
        """It is a cache."""


class Template:
    """The Debian template that containers are made from, rebuilt when its packages or the machine's authorities change."""

    name = "template"

    def __init__(self, node):
        self.node = node
        self.path = node.dir / "storage/template/cache" / node.settings["template"]
        self.authorities = machine.container_needs("/", node.environment)["authorities"]

    def _wanted(self):
        digest = hashlib.sha256(
            json.dumps([self.node.settings["suite"], sorted(self.node.settings["packages"])]).encode()
        )
        for path in self.authorities:
            digest.update(Path(path).read_bytes())
        return digest.hexdigest()

    def look(self):
        """up, absent or outdated."""
        if not self.path.exists():
            return "absent"
        try:
            return "up" if self.path.with_suffix(".key").read_text() == self._wanted() else "outdated"
        except OSError:
            return "outdated"

    def begin(self):
        """Start building it beside its place; the process to wait for."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        packages = ",".join(sorted(self.node.settings["packages"]))
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}"]
        options = machine.apt_options(run("apt-config", "dump", "Acquire"))
        if options:
            # A proxy's URL may carry a password: no argument shows it, and the template that comes out is without it.
            path = self.node.run / "apt.conf"
            write(path, options, 0o600)
            inside = '"$1/etc/apt/apt.conf.d/99mmdebstrap"'
            command += [
                f"--aptopt={path}",
                f"--setup-hook=chmod 0600 {inside}",
                f"--customize-hook=sed -i '\\#://[^/]*@#d' {inside}; chmod 0644 {inside}",
            ]
        if self.authorities:
            command.append(
                "--customize-hook=copy-in " + " ".join(self.authorities) + " /usr/local/share/ca-certificates"
            )
            command.append('--customize-hook=chroot "$1" update-ca-certificates')
        temporary = self.path.with_name("new-" + self.path.name)
        return _begin(self.node, self.name, [*command, self.node.settings["suite"], str(temporary),
                                             *machine.apt_sources("/", self.node.settings["suite"])])  # fmt: skip

    def finish(self):
        """Put it in its place."""
        self.path.with_name("new-" + self.path.name).replace(self.path)
        write(self.path.with_suffix(".key"), self._wanted())

    def down(self):
        """It is a cache."""


def _begin(node, name, command):
    node.logs.mkdir(parents=True, exist_ok=True)
    log = node.logs / f"{name}.log"
    environment = {**node.environment, "PIP_NO_INPUT": "1", "LC_ALL": "C.UTF-8"}
    with open(log, "w") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment), log


def finish_together(parts):
    """Build parts that take long at the same time; NodeError with the end of the log of the first that failed."""
    begun = [(part, *part.begin()) for part in parts]
    failed = None
    for part, process, log in begun:
        if process.wait() == 0:
            part.finish()
        else:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            failed = failed or NodeError(
                f"{part.name}: {process.args[0]} failed with {process.returncode}, see {log}:\n{tail}"
            )
    if failed:
        raise failed


# ------------------------------------------------------------------ network


class Bridge:
    """The containers' bridge, with the node's address on it."""

    name = "bridge"

    def __init__(self, node):
        self.node = node

    def _link(self):
        done = subprocess.run(
            ["ip", "-json", "address", "show", "dev", self.node.bridge], capture_output=True, text=True, check=False
        )
        return json.loads(done.stdout)[0] if done.returncode == 0 else None

    def _foreign(self, link):
        try:
            return Path("/sys/class/net", link["ifname"], "ifalias").read_text().strip() != ALIAS
        except OSError:
            return True

    def look(self):
        """up, or what is missing."""
        link = self._link() if shutil.which("ip") else None
        if link is None:
            return "absent"
        if self._foreign(link):
            return "foreign"
        wanted = (self.node.gateway, self.node.network.prefixlen)
        if wanted not in [(address["local"], address["prefixlen"]) for address in link["addr_info"]]:
            return "no address"
        return "up" if "UP" in link["flags"] else "down"

    def check(self):
        """Raise NodeError when the bridge would collide with what the machine has."""
        node = self.node
        if self.look() == "foreign":
            raise NodeError(
                f"local_node_bridge={node.bridge}: an interface of that name exists and is not this node's; choose another name"
            )
        for route in json.loads(run("ip", "-json", "route", "show", "table", "all")) if shutil.which("ip") else []:
            target = route["dst"].partition("/")
            try:
                found = ipaddress.ip_network(route["dst"] if target[1] else f"{route['dst']}/32")
            except ValueError:
                continue  # "default"
            if (
                found.version == 4
                and found.prefixlen
                and found.overlaps(node.network)
                and route.get("dev") != node.bridge
            ):
                raise NodeError(f"local_node_network={node.network}: collides with the machine's route {route['dst']} dev "
                                f"{route.get('dev')}; choose a network that is not in use here")  # fmt: skip
        servers, _search = machine.resolvers("/")
        if not servers:
            raise NodeError(
                "/etc/resolv.conf names no name server that a container can reach; add one that is not on loopback"
            )
        for host in [*servers, *machine.index_hosts("/", node.environment)]:
            for address in _addresses(host):
                if ipaddress.ip_address(address) in node.network:
                    raise NodeError(f"local_node_network={node.network}: holds {host} ({address}), which containers must reach outside; "
                                    "choose another network")  # fmt: skip

    def up(self):
        """Make it, with the MTU of the way out: larger packets of a container would be lost where ICMP is filtered."""
        name = self.node.bridge
        if self._link() is None:
            run("ip", "link", "add", name, "type", "bridge")
            run("ip", "link", "set", name, "alias", ALIAS)
        run("ip", "link", "set", name, "mtu", str(_mtu_out()), "up")
        run("ip", "address", "replace", f"{self.node.gateway}/{self.node.network.prefixlen}", "dev", name)

    def ports(self):
        """The interfaces on the bridge."""
        return sorted(path.name for path in Path("/sys/class/net", self.node.bridge, "brif").glob("*"))

    def down(self):
        """Remove it."""
        if self.look() not in ("absent", "foreign"):
            run("ip", "link", "delete", self.node.bridge)


def _addresses(host):
    try:
        return {entry[4][0] for entry in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)}
    except OSError:
        return set()


def _mtu_out():
    routes = json.loads(run("ip", "-json", "-4", "route", "show", "default"))
    device = routes[0]["dev"] if routes else "lo"
    return min(1500, int(Path("/sys/class/net", device, "mtu").read_text()))


class Nat:
    """The way out: a table of our own that masquerades the containers' network."""

    name = "nat"

    def __init__(self, node):
        self.node = node

    def look(self):
        """up, absent or differs."""
        if not shutil.which("nft"):
            return "absent"
        done = subprocess.run(["nft", "list", "table", "ip", TABLE], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return "absent"
        return (
            "up"
            if f'ip saddr {self.node.network} oifname != "{self.node.bridge}" masquerade' in done.stdout
            else "differs"
        )

    def up(self):
        """Replace the table in one transaction."""
        rule = f'ip saddr {self.node.network} oifname != "{self.node.bridge}" masquerade'
        chain = f"chain postrouting {{\n type nat hook postrouting priority srcnat; policy accept;\n {rule}\n}}"
        run("nft", "-f", "-", data=f"add table ip {TABLE}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n{chain}\n}}\n")

    def down(self):
        """Delete the table."""
        if self.look() != "absent":
            run("nft", "delete", "table", "ip", TABLE)


class Forwarding:
    """IPv4 forwarding, put back as it was."""

    name = "forwarding"
    path = Path("/proc/sys/net/ipv4/ip_forward")

    def __init__(self, node):
        self.node = node

    def look(self):
        """up or down."""
        return "up" if self.path.read_text().strip() == "1" else "down"

    def up(self):
        """Switch it on and remember how it was."""
        self.node.remember(ip_forward=self.path.read_text().strip())
        self.path.write_text("1")

    def down(self):
        """As it was before up."""
        before = self.node.machine.get("ip_forward")
        if before is not None:
            self.path.write_text(before)
            self.node.forget("ip_forward")


# ------------------------------------------------------------------ the machine's own files


class Tools:
    """pct, pvesh and /etc/pve where the machine has none, and root's range of ids for unprivileged containers."""

    name = "tools"

    def __init__(self, node):
        self.node = node

    def _scripts(self):
        for name in ("pct", "pvesh"):
            yield (
                TOOLS / name,
                (
                    "#!/usr/bin/python3 -IS\n"
                    "# dflash.launchproof local node: taken away again when the node goes down\n"
                    "import sys\n\n"
                    f"sys.dont_write_bytecode = True\nsys.path.insert(0, {str(self.node.lib)!r})\n"
                    f"from launchproof_node.{name} import main\n\n"
                    f"sys.exit(main({str(self.node.dir)!r}, sys.argv[1:]))\n"
                ),
            )

    def look(self):
        """up, or what is missing."""
        for path, text in self._scripts():
            found = path.read_text(errors="replace") if path.exists() else shutil.which(path.name)
            if found != text and (not found or self._ours(found)):
                return f"{path.name} absent"
        if not os.path.lexists("/etc/pve"):
            return "/etc/pve absent"
        return "up" if all(_has_range(path) for path in ("/etc/subuid", "/etc/subgid")) else "no subordinate ids"

    def present(self):
        """True when something of it is on the machine."""
        scripts = any(path.exists() and self._ours(path.read_text(errors="replace")) for path, _text in self._scripts())
        return scripts or self._linked() or any(name in self.node.machine for name in ("/etc/subuid", "/etc/subgid"))

    def _linked(self):
        return os.path.islink("/etc/pve") and os.readlink("/etc/pve") == str(self.node.dir / "pve")

    @staticmethod
    def _ours(text):
        return "dflash.launchproof local node" in text

    def up(self):
        """Add what is missing; what the machine already has stays as it is."""
        for path, text in self._scripts():
            if (
                path.exists()
                and self._ours(path.read_text(errors="replace"))
                or not (path.exists() or shutil.which(path.name))
            ):
                write(path, text, 0o755)
        if not os.path.lexists("/etc/pve"):
            os.symlink(self.node.dir / "pve", "/etc/pve")
        for name in ("/etc/subuid", "/etc/subgid"):
            if not _has_range(name):
                # newuidmap refuses root's containers without it, and shadow would hand the range to the next user.
                self.node.remember(**{name: SUBORDINATE})
                text = Path(name).read_text() if Path(name).exists() else ""
                _rewrite(name, text + ("" if not text or text.endswith("\n") else "\n") + SUBORDINATE + "\n")

    def down(self):
        """Take away what up added."""
        for path, _text in self._scripts():
            if path.exists() and self._ours(path.read_text(errors="replace")):
                path.unlink()
        if self._linked():
            os.unlink("/etc/pve")
        for name in ("/etc/subuid", "/etc/subgid"):
            if self.node.machine.get(name) == SUBORDINATE:
                lines = Path(name).read_text().splitlines(keepends=True)
                _rewrite(name, "".join(line for line in lines if line.strip() != SUBORDINATE))
                self.node.forget(name)


def _has_range(name):
    try:
        return any(
            line.split(":")[:2] in (["root", "100000"], ["0", "100000"]) for line in Path(name).read_text().splitlines()
        )
    except OSError:
        return False


def _rewrite(name, text):
    # In place: these are files of the machine, whose owner and mode are not ours to set.
    with open(name, "w") as out:
        out.write(text)


# ------------------------------------------------------------------ daemons


class Daemon:
    """A detached process with a pid file. It is up when that process lives, runs what is on disk now, and answers."""

    name = ""
    port_variable = ""

    def __init__(self, node):
        self.node = node
        self.file = node.run / f"{self.name}.json"

    def address(self):
        """(host, port) it listens on."""
        raise NotImplementedError

    def command(self):
        """Its command line: never a secret in it."""
        raise NotImplementedError

    def variables(self):
        """Its environment beside the machine's PATH."""
        return {}

    def identity(self):
        """A digest of what it runs: another one means restart."""
        raise NotImplementedError

    def answers(self):
        """True when it answers as it should."""
        raise NotImplementedError

    def _record(self):
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}

    def pid(self):
        """The process id of the running daemon, or None; a reused id is told apart by its start time."""
        record = self._record()
        return record["pid"] if record and _start_ticks(record["pid"]) == record["start"] else None

    def look(self):
        """up, or why not."""
        if not self.pid():
            return "down"
        if self._record().get("identity") != self.identity():
            return "outdated"
        return "up" if self.answers() else "no answer"

    def check(self):
        """Raise NodeError when another process has the port."""
        if self.pid():
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(self.address())
            except OSError as error:
                if error.errno == 98:  # EADDRINUSE
                    raise NodeError(
                        f"{self.port_variable}={self.address()[1]}: another process listens there; choose another port"
                    ) from None

    def up(self):
        """Start it (again) and wait until it answers."""
        self.end()
        self.check()
        log = self.node.logs / f"{self.name}.log"
        record = {"identity": self.identity()}

        def enter():
            # In the child, so that there is a pid file as soon as there is a process, whatever becomes of this one.
            os.chdir("/")
            record.update(pid=os.getpid(), start=_start_ticks(os.getpid()))
            self.file.write_text(json.dumps(record))
            self.enter()

        environment = {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", **self.variables()}
        with open(log, "a") as out:
            process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
                                       start_new_session=True, preexec_fn=enter)  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT
        while not self.answers():
            if process.poll() is not None or time.monotonic() > deadline:
                state = (
                    f"ended with {process.returncode}"
                    if process.returncode is not None
                    else f"did not answer in {START_TIMEOUT} s"
                )
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                raise NodeError(f"{self.name} {state}, see {log}:\n{tail}")
            time.sleep(0.02)

    def enter(self):
        """Called in the new process before it becomes the daemon."""

    def end(self):
        """End the process, by its id."""
        pid = self.pid()
        if pid:
            _end(pid)
        self.file.unlink(missing_ok=True)

    def down(self):
        """End it and what it leaves behind."""
        self.end()


def _start_ticks(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _end(pid):
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        for number, seconds in ((signal.SIGTERM, STOP_TIMEOUT), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if poller.poll(seconds * 1000):
                return
    finally:
        os.close(descriptor)


class Sshd(Daemon):
    """sshd on loopback: root by the node's own key, its own host key."""

    name = "sshd"
    port_variable = "local_node_ssh_port"

    def address(self):
        """Loopback."""
        return "127.0.0.1", self.node.settings["ssh_port"]

    def command(self):
        """In the foreground of its own session."""
        # sshd's privilege separation needs this folder; without a service manager nobody makes it after a boot.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        return ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.node.dir / "ssh/sshd_config")]

    def identity(self):
        """Its configuration and host key."""
        return _digest(self.node.dir / "ssh/sshd_config", self.node.dir / "ssh/host_ed25519.pub")

    def answers(self):
        """It says that it is an SSH server."""
        try:
            with socket.create_connection(self.address(), timeout=3) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    @staticmethod
    def _group():
        # Version 2 of control groups, alone or beside version 1 (systemd's "unified" and "hybrid" layouts).
        tops = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
        return next((top / "launchproof-node" for top in tops if (top / "cgroup.procs").exists()), None)

    def enter(self):
        """Into a control group: sessions outlive the listener, rename themselves and leave its session id."""
        group = self._group()
        if group:
            group.mkdir(exist_ok=True)
            (group / "cgroup.procs").write_text("0")

    def down(self):
        """End the listener, and the sessions with what they started."""
        super().down()
        group = self._group()
        if group and group.exists():
            for pid in (group / "cgroup.procs").read_text().split():
                _end(int(pid))
            group.rmdir()


class Api(Daemon):
    """The Proxmox VE API."""

    name = "api"
    port_variable = "local_node_api_port"

    def address(self):
        """Loopback."""
        return "127.0.0.1", self.node.settings["api_port"]

    def command(self):
        """The node's program in its own environment."""
        return [str(self.node.cache / "venv/bin/python"), "-m", "launchproof_node.api", str(self.node.dir)]

    def variables(self):
        """Where the program lies."""
        return {"PYTHONPATH": str(self.node.lib), "PYTHONDONTWRITEBYTECODE": "1"}

    def identity(self):
        """Program, environment, settings, certificate and credentials."""
        folder = self.node.dir
        files = ["node.json", "tls/ca.pem", "secrets/api_token", "secrets/root_password", "cache/venv/complete"]
        return hashlib.sha256((self.node.program() + _digest(*(folder / name for name in files))).encode()).hexdigest()

    def answers(self):
        """It gives its version to the token, over TLS that its certificate verifies."""
        folder = self.node.dir
        try:
            context = ssl.create_default_context(cafile=str(folder / "tls/ca.pem"))
            connection = http.client.HTTPSConnection(*self.address(), context=context, timeout=5)
            secret = (folder / "secrets/api_token").read_text().strip()
            token = f"PVEAPIToken=root@pam!{self.node.settings['token_id']}={secret}"
            connection.request("GET", "/api2/json/version", headers={"Authorization": token})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


class S3(Daemon):
    """The S3 server, on the bridge: containers and the machine reach it, nobody else."""

    name = "s3"
    port_variable = "local_node_s3_port"

    def address(self):
        """On the bridge."""
        return self.node.gateway, self.node.settings["s3_port"]

    def command(self):
        """rclone over a folder: a bucket is a folder, an object is a file."""
        data = self.node.dir / "s3/data"
        (data / self.node.settings["s3_bucket"]).mkdir(parents=True, exist_ok=True)
        host, port = self.address()
        return [
            str(self.node.cache / "venv/bin/rclone"),
            "serve",
            "s3",
            "--addr",
            f"{host}:{port}",
            "--config",
            "",
            str(data),
        ]

    def variables(self):
        """Credentials by environment: a command line can be read by every user of the machine."""
        keys = [(self.node.dir / "s3" / name).read_text().strip() for name in ("access_key", "secret_key")]
        return {"RCLONE_AUTH_KEY": f'"{",".join(keys)}"', "HOME": str(self.node.run)}

    def identity(self):
        """Address, bucket, credentials and program."""
        folder = self.node.dir
        text = f"{self.address()} {self.node.settings['s3_bucket']} "
        return hashlib.sha256(
            (
                text + _digest(folder / "s3/access_key", folder / "s3/secret_key", folder / "cache/venv/complete")
            ).encode()
        ).hexdigest()

    def answers(self):
        """It refuses a request without a signature."""
        try:
            connection = http.client.HTTPConnection(*self.address(), timeout=5)
            connection.request("GET", "/")
            return connection.getresponse().status in (400, 403)
        except (OSError, http.client.HTTPException):
            return False


def _digest(*paths):
    digest = hashlib.sha256()
    for path in paths:
        with contextlib.suppress(OSError):
            digest.update(path.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()
