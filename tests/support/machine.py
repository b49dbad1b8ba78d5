# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A second machine by namespaces, for tests of the local node: bringing it up and down, killing its parts, rebooting.

It has its own mounts (fresh /etc/pve, /var/lib/lxc, state folder, /run), processes, control groups and network (a veth
pair with NAT through this machine), so a node that is up on this machine does not notice. Programs are this machine's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CGROUPS = Path("/sys/fs/cgroup")
# 192.0.0.0/24 is reserved for protocol assignments (RFC 6890): no network of a machine uses it.
HOST_ADDRESS, ADDRESS = "192.0.0.129", "192.0.0.130"
STATE = Path("/var/lib/launchproof-node")
INVENTORY = (
    "all: {children: {local_node: {hosts: {localhost: {ansible_connection: local, "
    "ansible_python_interpreter: '{{ ansible_playbook_python }}'}}}}}\n"
)
# Without the project's own configuration: its report belongs to deployments.
ANSIBLE = {"ANSIBLE_COLLECTIONS_PATH": str(REPO / "collections"), "ANSIBLE_NOCOLOR": "1"}
# The node's address is the same on every machine: a connection that is kept open would lead to another one's.
OWN_SSH = {"ANSIBLE_SSH_CONTROL_PATH_DIR": "/run/ansible-cp"}
# Process 1 of the machine: reaps what its daemons leave behind, and ends the machine when it is killed.
INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"


class Machine:
    """One such machine; `boot` starts it with what is on its disk, `crash` ends every process at once."""

    def __init__(self, folder):
        """folder: its disk, kept over a reboot."""
        self.folder = Path(folder)
        self.name = f"lpm{os.getpid() % 10000}"
        self.process = None
        self.init = None  # process 1 of the machine, as this machine numbers it
        self._forward = Path("/proc/sys/net/ipv4/ip_forward").read_text()

    def boot(self):
        """Start it; returns when its network and file systems are there."""
        groups = self._make_groups()
        script = self.folder / "boot.sh"
        self.folder.mkdir(parents=True, exist_ok=True)
        script.write_text(self._script())
        command = [
            "unshare",
            "--mount",
            "--net",
            "--pid",
            "--cgroup",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
        ]
        ready, told = os.pipe()

        def enter():
            for group in groups:
                (group / "cgroup.procs").write_text("0")

        self.process = subprocess.Popen(
            [*command, "sh", "-e", str(script)], stdout=told, preexec_fn=enter, stdin=subprocess.DEVNULL
        )
        os.close(told)
        # The machine waits for its cable, then tells that it is up; the end of the pipe means that it is not.
        self.init = self._child()
        self._cable()
        with os.fdopen(ready) as pipe:
            if pipe.readline() != "up\n":
                self._unplug()
                raise RuntimeError("the machine did not boot")

    def _script(self):
        disk = self.folder / "disk"
        lines = ["mount -t proc proc /proc"]
        # /etc as this machine's, with changes of its own; the rest empty.
        (disk / "etc/upper").mkdir(parents=True, exist_ok=True)
        (disk / "etc/work").mkdir(exist_ok=True)
        lines.append(
            f"mount -t overlay overlay -o lowerdir=/etc,upperdir={disk}/etc/upper,workdir={disk}/etc/work /etc"
        )
        if not (disk / "seen").exists():
            lines += ["rm -f /etc/pve", "sed -i /^root:/d /etc/subuid /etc/subgid", f"touch {disk}/seen"]
        for path in (STATE, Path("/var/lib/lxc"), Path("/usr/local/sbin")):
            own = disk / str(path).lstrip("/")
            own.mkdir(parents=True, exist_ok=True)
            path.mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {own} {path}")
        lines.append("mount -t tmpfs tmpfs /run")
        # sysfs shows the network of whoever mounted it; control groups mounted anew begin at the machine's own.
        lines.append("mount -t sysfs sysfs /sys")
        if CGROUPS not in self._tops():
            lines.append(f"mount -t tmpfs -o mode=755 tmpfs {CGROUPS}")
        for top in self._tops():
            if (top / "cgroup.controllers").exists():
                mount = "-t cgroup2 cgroup2"
            else:
                mount = f"-t cgroup -o {'none,name=systemd' if top.name == 'systemd' else top.name} cgroup"
            lines.append(f"mkdir -p {top}; mount {mount} {top}")
        lines += [
            "echo 0 >/proc/sys/net/ipv4/ip_forward",
            "ip link set lo up",
            f"until ip link show {self.name}g >/dev/null 2>&1; do sleep 0.02; done",
            f"ip address add {ADDRESS}/30 dev {self.name}g",
            f"ip link set {self.name}g mtu {_mtu()} up",
            f"ip route add default via {HOST_ADDRESS}",
            "echo up",
            f"exec {sys.executable} -c '{INIT}' >/dev/null",
        ]
        return "\n".join(lines) + "\n"

    def _tops(self):
        mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
        return [
            Path(fields[1])
            for fields in mounts
            if fields[2] in ("cgroup", "cgroup2") and Path(fields[1]).is_relative_to(CGROUPS)
        ]

    def _make_groups(self):
        groups = []
        for top in self._tops():
            group = top / self.name
            group.mkdir(exist_ok=True)
            if top.name == "cpuset":
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (group / name).write_text((top / name).read_text())
            groups.append(group)
        return groups

    def _cable(self):
        """A veth pair into the machine, with NAT."""
        _run(
            "ip",
            "link",
            "add",
            f"{self.name}h",
            "type",
            "veth",
            "peer",
            "name",
            f"{self.name}g",
            "netns",
            str(self.init),
        )
        _run("ip", "address", "add", f"{HOST_ADDRESS}/30", "dev", f"{self.name}h")
        _run("ip", "link", "set", f"{self.name}h", "up")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        rule = f"ip saddr {ADDRESS} oifname != {self.name}h masquerade"
        chain = f"chain postrouting {{\n type nat hook postrouting priority srcnat;\n {rule}\n}}"
        subprocess.run(["nft", "-f", "-"], input=f"table ip {self.name} {{\n{chain}\n}}\n", text=True, check=True)

    def _child(self):
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        deadline = time.monotonic() + 10
        while not (children := path.read_text().split()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError("the machine did not boot")
            time.sleep(0.01)
        return int(children[0])

    def run(self, *command, check=True, environment=None):
        """Run a command in the machine; its CompletedProcess with output as text."""
        enter = ["nsenter", f"--target={self.init}", "--mount", "--net", "--pid", "--cgroup", f"--wdns={REPO}", "--"]
        groups = [top / self.name for top in self._tops()]

        def join():
            for group in groups:
                (group / "cgroup.procs").write_text("0")

        done = subprocess.run([*enter, *command], capture_output=True, text=True, check=False, cwd=REPO, preexec_fn=join,
                              stdin=subprocess.DEVNULL, env={**os.environ, **OWN_SSH, **(environment or {})})  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"{command}: {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}")
        return done

    def sh(self, script, check=True):
        """Run a shell script in the machine; its output."""
        return self.run("sh", "-c", script, check=check).stdout.strip()

    def playbook(self, *arguments, check=True):
        """Run playbooks/local_node.yml in the machine."""
        inventory = self.folder / "inventory.yml"
        inventory.write_text(INVENTORY)
        configuration = self.folder / "ansible.cfg"
        configuration.write_text("")
        command = [
            sys.executable,
            "-m",
            "ansible",
            "playbook",
            "-i",
            str(inventory),
            "playbooks/local_node.yml",
            *arguments,
        ]
        return self.run(*command, check=check, environment={**ANSIBLE, "ANSIBLE_CONFIG": str(configuration)})

    def seed(self):
        """Give it the caches of this machine's own node, where there is one: they take a minute to make."""
        for name in ("cache", "storage/template/cache"):
            if (STATE / name).is_dir():
                shutil.copytree(STATE / name, self.folder / "disk" / str(STATE / name).lstrip("/"), symlinks=True)

    def crash(self):
        """Power off without warning: every process dies at once, nothing is written any more."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self.process.wait()
        self._unplug()

    def _unplug(self):
        for command in (["ip", "link", "delete", f"{self.name}h"], ["nft", "delete", "table", "ip", self.name]):
            subprocess.run(command, capture_output=True, check=False)
        deadline = time.monotonic() + 10
        for top in self._tops():
            group = top / self.name
            while group.exists():
                for folder, _folders, _files in os.walk(group, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)

    def discard(self):
        """End it and remove its disk."""
        if self.process and self.process.poll() is None:
            self.crash()
        Path("/proc/sys/net/ipv4/ip_forward").write_text(self._forward)
        shutil.rmtree(self.folder)


def _mtu():
    device = _run("ip", "-4", "route", "show", "default").split("dev ")[1].split()[0]
    return Path("/sys/class/net", device, "mtu").read_text().strip()


def _run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
