# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a container's life takes on the machine: volumes, LXC, control groups. Nothing here knows the API."""

import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from . import config as node_config
from .settings import ID_SHIFT, LXC_PATH
from .state import running

CGROUPS = Path("/sys/fs/cgroup")
INSIDE = Path(__file__).with_name("inside.py")
CAP_SYS_RESOURCE = 24  # linux/capability.h
# Marks an LXC folder that this node made: only such a folder is ever removed.
OURS = ".launchproof-node"
# In a mount namespace of its own: see inside.py.
IN_NAMESPACE = ["unshare", "--mount", "--propagation", "private", sys.executable, "-I", str(INSIDE)]


class Failed(Exception):
    """An operation on the machine failed; the text is for the task's log."""


async def run(*argv, data=None):
    """Run a command in a session of its own, so that a signal to the API does not reach it; (code, output)."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE if data is not None else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    out, _none = await process.communicate(data)
    return process.returncode, out.decode(errors="replace").strip()


async def must(*argv, data=None):
    """run(), or Failed with the command's name and the last lines of its output."""
    code, out = await run(*argv, data=data)
    if code != 0:
        raise Failed(f"command '{' '.join(argv[:2])}' failed: exit code {code}: {'; '.join(out.splitlines()[-3:])}")
    return out


class Runtime:
    """Containers of one node (settings.Settings) as LXC knows them."""

    def __init__(self, settings):
        self.settings = settings
        self.cgroup2 = (CGROUPS / "cgroup.controllers").exists()
        self.cpus = os.cpu_count()

    # ---------------------------------------------------------- what there is

    def is_running(self, vmid):
        """True while the container's monitor lives."""
        return vmid in running()

    def init_pid(self, vmid):
        """The process id of the container's init on the machine, or None (5 ms; callers remember it)."""
        found = subprocess.run(["lxc-info", "-n", str(vmid), "-p", "-H"], capture_output=True, text=True, check=False)
        return int(found.stdout) if found.stdout.strip().isdigit() else None

    def payload(self, pid, controller):
        """The container's control group for a controller, from its init's /proc entry, or None.

        LXC adds -1 and so on to the name when an old group is still there, so the name is not computed.
        """
        try:
            text = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            return None
        for line in text.splitlines():
            _number, controllers, path = line.split(":", 2)
            top = Path(path.split("/")[1]) if path.startswith("/lxc.payload.") else None
            if top and self.cgroup2 and not controllers:
                return CGROUPS / top
            if top and controller in controllers.split(","):
                return CGROUPS / controller / top
        return None

    def usage(self, pid):
        """Bytes of memory and seconds of CPU that the container of this init uses: (memory, cpu), 0 when unknown."""
        memory = self._number(pid, "memory", "memory.current" if self.cgroup2 else "memory.usage_in_bytes")
        if not self.cgroup2:
            return memory, self._number(pid, "cpuacct", "cpuacct.usage") / 1e9
        try:
            found = re.search(r"usage_usec (\d+)", (self.payload(pid, "cpu") / "cpu.stat").read_text())
        except (OSError, TypeError):
            return memory, 0
        return memory, int(found[1]) / 1e6

    def _number(self, pid, controller, name):
        group = self.payload(pid, controller)
        try:
            return int((group / name).read_text())
        except (OSError, TypeError, ValueError):
            return 0

    def disk(self, pid):
        """(used, size) in bytes of a running container's root file system."""
        try:
            found = os.statvfs(f"/proc/{pid}/root")
        except OSError:
            return 0, 0
        return (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_blocks * found.f_frsize

    # ---------------------------------------------------------- volumes

    def image(self, volume):
        """The image file of a volume id such as local:901/vm-901-disk-0.raw."""
        return self.settings.images / volume.split(":", 1)[1]

    async def make_volume(self, volume, size):
        """Allocate a volume: a sparse ext4 image of SIZE bytes, as Proxmox VE makes them on a folder storage."""
        image = self.image(volume)
        image.parent.mkdir(parents=True, exist_ok=True)
        with open(image, "wb") as out:
            out.truncate(size)
        options = "lazy_itable_init=1,lazy_journal_init=1,nodiscard"
        await must("mkfs.ext4", "-q", "-F", "-E", options, str(image))

    async def grow(self, vmid, volume, size):
        """Grow a volume, also under a running container."""
        image = self.image(volume)
        out = await must("losetup", "--noheadings", "--output", "NAME", "--associated", str(image))
        if out and not _capable(CAP_SYS_RESOURCE):
            raise Failed(
                "this machine withholds CAP_SYS_RESOURCE, without which no mounted ext4 can grow: stop the container first"
            )
        os.truncate(image, size)
        if out:
            await must("losetup", "--set-capacity", out.split()[0])
            # The volume is mounted in the monitor's namespace only, with the machine's programs around it.
            monitor = _parent(self.init_pid(vmid))
            await must("nsenter", "--mount", f"--target={monitor}", "--", "resize2fs", out.split()[0])
        else:
            code, text = await run("e2fsck", "-f", "-p", str(image))
            if code > 1:  # 1: errors were corrected
                raise Failed(f"file system check of {image.name} failed: {text}")
            await must("resize2fs", str(image))

    def drop_volume(self, volume):
        """Remove a volume's image."""
        self.image(volume).unlink(missing_ok=True)

    # ---------------------------------------------------------- life

    async def create(self, vmid, config, template, password=None, ssh_keys=None):
        """Allocate the volumes of a new container and unpack the template into its root volume."""
        home = LXC_PATH / str(vmid)
        try:
            home.mkdir()
        except FileExistsError:
            raise Failed(f"{home} exists and belongs to no container of this node") from None
        (home / OURS).touch()
        (home / "rootfs").mkdir()
        for key, mount in self._volumes(config):
            await self.make_volume(mount["volume"], _bytes(mount["size"]))
            if key == "rootfs":
                root = mount
        plan = {
            "image": str(self.image(root["volume"])),
            "rootfs": str(home / "rootfs"),
            "template": str(template),
            "unprivileged": bool(config.get("unprivileged")),
            "password": password,
            "ssh_keys": ssh_keys,
        }
        await must("setpriv", "--pdeathsig", "KILL", *IN_NAMESPACE, "build", data=json.dumps(plan).encode())

    def discard(self, vmid):
        """Remove what a stopped container has on disk: its volumes and its LXC folder."""
        if self.is_running(vmid):
            raise Failed(f"container {vmid} still runs")
        home = LXC_PATH / str(vmid)
        if (home / OURS).exists():
            shutil.rmtree(home)
        shutil.rmtree(self.settings.images / str(vmid), ignore_errors=True)
        reap_groups(vmid)

    @staticmethod
    def _volumes(config):
        """(key, mount) of the options that are volumes of a storage."""
        for key in sorted(config, key=lambda name: (name != "rootfs", name)):
            if key == "rootfs" or re.fullmatch(r"mp\d+", key):
                mount = node_config.properties(config[key], "volume")
                if not mount["volume"].startswith("/"):
                    yield key, mount

    async def start(self, vmid, config):
        """Start a container as configured; returns when LXC says that it runs."""
        home = LXC_PATH / str(vmid)
        reap_groups(vmid)
        # bind and volume mounts, devices: what is missing is said before anything is mounted.
        volumes, mounts = self._mounts(vmid, config)
        staged, devices = self._devices(vmid, config)
        for n, text in node_config.numbered(config, "net"):
            bridge = node_config.properties(text, "name").get("bridge", "")
            if not Path("/sys/class/net", bridge, "bridge").is_dir():
                raise Failed(f"net{n}: bridge '{bridge}' does not exist")
        text = node_config.lxc_config(vmid, config, home / "rootfs", self.cpus, self.cgroup2, devices, mounts)
        (home / "config").write_text(text)
        log = self.settings.logs / f"lxc-{vmid}.log"
        log.unlink(missing_ok=True)
        hostname = str(config.get("hostname", f"CT{vmid}"))
        plan = {
            "vmid": vmid,
            "rootfs": str(home / "rootfs"),
            "volumes": volumes,
            "devices": staged,
            "files": {
                "/etc/hostname": hostname.partition(".")[0] + "\n",
                "/etc/resolv.conf": node_config.resolv_text(
                    config, self.settings.nameservers, self.settings.searchdomain
                ),
            },
            "sections": {"/etc/hosts": node_config.hosts_body(config, vmid)},
            "log": str(log),
        }
        code, out = await run(*IN_NAMESPACE, "boot", data=json.dumps(plan).encode())
        if code != 0 or not self.is_running(vmid):
            errors = [line for line in _text(log).splitlines() if " ERROR " in line]
            reason = errors[0].split(" - ", 1)[-1] if errors else out.splitlines()[-1] if out else f"exit code {code}"
            raise Failed(f"startup for container '{vmid}' failed: {reason}")

    def _mounts(self, vmid, config):
        volumes, mounts = [], []
        for key, mount in self._volumes(config):
            image = self.image(mount["volume"])
            if not image.exists():
                raise Failed(f"volume '{mount['volume']}' does not exist")
            options = mount.get("mountoptions", "").split(";") if mount.get("mountoptions") else []
            target = LXC_PATH / str(vmid) / ("rootfs" if key == "rootfs" else f"volumes/{key}")
            read_only = ["ro"] if mount.get("ro") == "1" else []
            volumes.append({"image": str(image), "target": str(target), "options": options + read_only})
            if key != "rootfs":
                mounts.append((target, mount["mp"].lstrip("/"), read_only, True))
        for n, text in node_config.numbered(config, "mp"):
            mount = node_config.properties(text, "volume")
            if mount["volume"].startswith("/"):
                if not Path(mount["volume"]).is_dir():
                    raise Failed(f"mp{n}: directory '{mount['volume']}' does not exist")
                mounts.append(
                    (mount["volume"], mount["mp"].lstrip("/"), ["ro"] if mount.get("ro") == "1" else [], False)
                )
        return volumes, sorted(mounts, key=lambda entry: entry[1])

    def _devices(self, vmid, config):
        shift = ID_SHIFT if config.get("unprivileged") else 0
        staged, devices = [], []
        for _n, text in node_config.numbered(config, "dev"):
            device = node_config.properties(text, "path")
            path = device["path"]
            try:
                found = os.stat(path)
            except OSError:
                raise Failed(f"Device {path} does not exist") from None
            if not (stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode)):
                raise Failed(f"{path} is not a device")
            target = LXC_PATH / str(vmid) / "passthrough" / path.lstrip("/")
            staged.append({
                "source": path,
                "staged": str(target),
                "mode": int(device.get("mode", "0660"), 8),
                "uid": shift + int(device.get("uid", 0)),
                "gid": shift + int(device.get("gid", 0)),
            })  # fmt: skip
            kind = "b" if stat.S_ISBLK(found.st_mode) else "c"
            access = "r" if device.get("deny-write") == "1" else "rw"
            devices.append((target, path.lstrip("/"), kind, os.major(found.st_rdev), os.minor(found.st_rdev), access))
        return staged, devices

    async def stop(self, vmid):
        """Kill every process of a container and wait until it is gone."""
        await self._end(vmid, "lxc-stop", "-n", str(vmid), "--kill")

    async def shutdown(self, vmid, timeout):
        """Ask the container's init to shut down; False when it has not within TIMEOUT seconds."""
        return await self._end(vmid, "lxc-stop", "-n", str(vmid), "--nokill", "--timeout", str(int(timeout)))

    async def _end(self, vmid, *command):
        pid = self.init_pid(vmid)
        monitor = _parent(pid) if pid else None
        try:
            descriptor = os.pidfd_open(monitor) if monitor else None
        except ProcessLookupError:
            descriptor = None
        try:
            code, out = await run(*command)
            if code != 0 and self.is_running(vmid):
                if "--nokill" in command:
                    return False
                raise Failed(f"lxc-stop of container {vmid} failed: {out}")
            if descriptor is not None:
                # LXC reports STOPPED before its monitor has let go of the network devices and volumes.
                await _readable(descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        reap_groups(vmid)
        return True

    # ---------------------------------------------------------- while it runs

    async def apply_limits(self, vmid, config):
        """Give a running container the memory, swap and CPU limits of its configuration."""
        pid = self.init_pid(vmid)
        wanted = [("cpuset" if key.startswith("cpuset") else "cpu", key, value)
                  for key, value in node_config.cpu_limits(vmid, config, self.cpus, self.cgroup2).items()]  # fmt: skip
        memory = int(config.get("memory", 512)) << 20
        swap = int(config.get("swap", 512)) << 20
        if self.cgroup2:
            wanted += [("memory", "memory.max", str(memory)), ("memory", "memory.swap.max", str(swap))]
        else:
            both = [
                ("memory", "memory.limit_in_bytes", str(memory)),
                ("memory", "memory.memsw.limit_in_bytes", str(memory + swap)),
            ]
            # Version 1 refuses a moment in which memory plus swap is less than memory.
            grows = memory + swap >= self._number(pid, "memory", "memory.memsw.limit_in_bytes")
            wanted += reversed(both) if grows else both
        for controller, name, value in wanted:
            group = self.payload(pid, controller)
            try:
                (group / name).write_text(value)
            except (OSError, TypeError) as error:
                raise Failed(f"{name}={value}: {error}") from None

    async def interfaces(self, vmid):
        """The container's network interfaces as `ip -json address` shows them."""
        pid = self.init_pid(vmid)
        return json.loads(await must("nsenter", "--net", f"--target={pid}", "--", "ip", "-json", "address"))


def reap_groups(vmid):
    """Remove the empty control groups that LXC left of a container that is gone."""
    name = re.compile(rf"lxc\.(monitor|payload)\.{vmid}(-\d+)?")
    parents = [CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())]
    for top in [path for parent in parents for path in parent.glob(f"lxc.*.{vmid}*") if name.fullmatch(path.name)]:
        for folder, _folders, _files in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                break  # a process is in it: not ours to remove


def _capable(number):
    """True when this process has a capability; a virtual machine's root may lack some."""
    found = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.M)
    return bool(int(found[1], 16) >> number & 1)


def _parent(pid):
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])


async def _readable(descriptor):
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _bytes(size):
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", str(size))
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))


def _text(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
