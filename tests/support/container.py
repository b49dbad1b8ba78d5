# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bare LXC containers for tests: Debian 12 with a real systemd, made in half a second.

The root file system is built once by mmdebstrap (about 25 s) and kept in the cache folder, then shared read-only as
the lower layer of an overlay; each container writes to a layer of its own.  A container is known by its name: ``up``
first removes what a crashed run left under that name, and a lock held for the container's life keeps two runs of the
tests apart.

    python -m tests.support.container up NAME [ADDRESS]     make one by hand and leave it running
    python -m tests.support.container sh NAME [COMMAND]     a shell in it
    python -m tests.support.container template [SUITE]      the folder of the root file system
    python -m tests.support.container sweep                 remove every container and the bridge of the tests
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("LAUNCHPROOF_TEST_CACHE") or REPO / ".cache" / "tests")
# Debian releases, and what their init is told so that it uses the control groups that the machine has: bullseye's systemd
# (247) would mount a hierarchy without controllers over hybrid ones; bookworm's (252) and trixie's (257) would not.
SUITES = {"bookworm": "", "bullseye": "systemd.unified_cgroup_hierarchy=0", "trixie": ""}
SUITE = "bookworm"
PACKAGES = "systemd-sysv,dbus,python3,openssh-server,openssh-sftp-server,procps,iproute2,tmux,logrotate"
TOOLS = ("lxc-start", "lxc-attach", "lxc-stop")
PURE_V2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
BRIDGE = "lptest0"
#: Of the machine and not of the checkout, as the bridge is.
BRIDGE_LOCK = Path("/run/lock", BRIDGE)
GATEWAY = "198.18.10.1"  # RFC 2544's range for tests: never routed
PATH_IN_CONTAINER = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CONFIG = """\
lxc.include = /usr/share/lxc/config/common.conf
lxc.arch = amd64
lxc.uts.name = {name}
lxc.rootfs.path = overlayfs:{lower}:{upper}
lxc.apparmor.profile = unconfined
lxc.init.cmd = {init}
lxc.tty.max = 0
lxc.console.path = none
lxc.mount.auto = proc:mixed sys:mixed {cgroup}
lxc.cgroup.relative = {relative}
"""
# The init of a container that is rented out as an image runs: no service manager, it reaps at most.
BARE_INIT = """\
#!/usr/bin/python3
import signal

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    signal.pause()
"""
NO_NETWORK = "lxc.net.0.type = empty\n"  # loopback alone
NETWORK = """\
lxc.net.0.type = veth
lxc.net.0.link = {bridge}
lxc.net.0.flags = up
lxc.net.0.ipv4.address = {address}/24
lxc.net.0.ipv4.gateway = {gateway}
"""


def missing() -> list[str]:
    """What this machine lacks to make containers: names of tools, or ``root``. Empty when it can."""
    tools = (*TOOLS, *(() if can_make(SUITE) else ("mmdebstrap",)))
    return [tool for tool in tools if shutil.which(tool) is None] + ([] if os.geteuid() == 0 else ["root"])


_UNTIL_IT_ENDS = """
import contextlib, os, select, sys
with contextlib.suppress(ProcessLookupError):
    select.select([os.pidfd_open(int(sys.argv[1]))], [], [])
"""


@contextlib.contextmanager
def _locked(path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def template_folder(suite: str) -> Path:
    """Where the root file system of a release lies. A change of the suite or the packages makes another one."""
    return CACHE / f"rootfs-{hashlib.sha256(f'{suite} {PACKAGES}'.encode()).hexdigest()[:12]}"


def can_make(suite: str) -> bool:
    """Whether a template of the release is there, or can be built."""
    return template_folder(suite).exists() or shutil.which("mmdebstrap") is not None


def template(suite: str = SUITE) -> Path:
    """The folder of the shared root file system of a release; built when it is missing."""
    rootfs = template_folder(suite)
    with _locked(CACHE / "template.lock"):
        if not rootfs.exists():
            partial = rootfs.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            argv = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--include=" + PACKAGES]
            subprocess.run([*argv, suite, str(partial)], check=True, stdin=subprocess.DEVNULL)
            for name in ("etc/machine-id", "var/lib/dbus/machine-id", "etc/fstab"):
                (partial / name).unlink(missing_ok=True)
            for name in ("etc/machine-id", "etc/fstab"):
                (partial / name).touch()
            for key_file in (partial / "etc/ssh").glob("ssh_host_*"):
                key_file.unlink()  # a key in a template is a shared secret: the tests that need sshd make their own
            partial.rename(rootfs)
    return rootfs


def _bridge_up() -> None:
    with _locked(BRIDGE_LOCK):
        if not Path("/sys/class/net", BRIDGE).exists():
            subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True)
            subprocess.run(["ip", "addr", "add", f"{GATEWAY}/24", "dev", BRIDGE], check=True)
        subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True)


def _bridge_down_when_unused() -> None:
    with _locked(BRIDGE_LOCK):
        ports = Path("/sys/class/net", BRIDGE, "brif")
        if ports.exists() and not any(ports.iterdir()):
            subprocess.run(["ip", "link", "del", BRIDGE], check=True)


def _enter_root_group() -> None:
    """On pure cgroup v2 a group below one that holds processes itself, as the caller's may, gets no controllers."""
    if PURE_V2:
        Path("/sys/fs/cgroup/cgroup.procs").write_text("0")


class Container:
    """One running container. Use it as a context manager; it is gone afterwards, whatever happened inside."""

    def __init__(self, name: str, address: str = "", suite: str = SUITE, network: bool = True, systemd: bool = True):
        """``name`` is unique on this machine; ``address`` an IPv4 address in 198.18.10.0/24, derived when empty.

        ``suite`` is the Debian release inside, one of SUITES; without ``network`` there is loopback alone; without
        ``systemd`` its init starts and manages nothing.
        """
        self.name, self.suite, self.network, self.systemd = name, suite, network, systemd
        self.address = address or f"198.18.10.{10 + int(hashlib.sha256(name.encode()).hexdigest(), 16) % 240}"
        self.home = CACHE / "lxc"
        self.folder = self.home / name
        self._lock = None
        self.pid = 0

    def __enter__(self) -> Container:
        self.up()
        return self

    def __exit__(self, *_exc) -> None:
        self.down()

    def up(self, hold: bool = True) -> None:
        """Make it and return once systemd has finished its start. Removes a leftover of that name first.

        ``hold=False`` leaves it without the lock, for use by hand.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        lower = template(self.suite)
        self._lock = open(self.home / f"{self.name}.lock", "w")  # noqa: SIM115 - held until down()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"container {self.name} is in use by another run of the tests") from None
        self._remove()
        upper = self.folder / "upper"
        (upper / "etc").mkdir(parents=True)
        (upper / "etc" / "hostname").write_text(self.name + "\n")
        (upper / "etc" / "hosts").write_text(f"127.0.0.1 localhost {self.name}\n")
        values = {"name": self.name, "lower": lower, "upper": upper, "bridge": BRIDGE}
        values["init"] = f"/sbin/init {SUITES[self.suite]}" if self.systemd else "/bare-init"
        # systemd mounts its own; where there is none, a container sees its group read-only, as in Docker.
        values["cgroup"] = "cgroup:mixed" if self.systemd else "cgroup:ro:force"
        if not self.systemd:
            (upper / "bare-init").write_text(BARE_INIT)
            (upper / "bare-init").chmod(0o755)
        values["relative"] = int(PURE_V2)
        values.update(address=self.address, gateway=GATEWAY)
        (self.folder / "config").write_text((CONFIG + (NETWORK if self.network else NO_NETWORK)).format(**values))
        if self.network:
            _bridge_up()
        self.start()
        if not hold:
            self._lock.close()

    def start(self) -> None:
        """Boot it and wait until systemd, where it is there, has settled (also after ``stop``)."""
        log = self.folder / "lxc.log"
        subprocess.run(
            ["lxc-start", "-P", self.home, "-n", self.name, "-o", log, "-l", "INFO"],
            check=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=_enter_root_group,
        )
        info = subprocess.run(["lxc-info", "-P", self.home, "-n", self.name, "-pH"], capture_output=True, text=True)
        self.pid = int(info.stdout)
        if not self.systemd:
            return
        deadline = time.monotonic() + 30
        # --wait blocks until the start is done; only until systemd listens at all does this have to ask again.
        while self.run("systemctl", "is-system-running", "--wait", check=False).stdout.strip() not in (
            "running",
            "degraded",
        ):
            if time.monotonic() > deadline:
                raise RuntimeError(f"container {self.name}: systemd did not come up in 30 s; see {log}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Power off hard, as a node that loses its power does; ``start`` boots it again with its files kept."""
        subprocess.run(["lxc-stop", "-P", self.home, "-n", self.name, "-k"], check=True)

    def down(self) -> None:
        """Stop and remove it; the bridge too when this was the last one."""
        self._remove()
        _bridge_down_when_unused()
        if self._lock:
            self._lock.close()

    def _remove(self) -> None:
        for state in Path("/sys/fs/cgroup/freezer", f"lxc.payload.{self.name}").rglob("freezer.state"):
            state.write_text("THAWED")  # cgroup v1: a frozen process does not die, and lxc-stop waits for it for ever
        if (self.folder / "config").exists():
            subprocess.run(["lxc-stop", "-P", self.home, "-n", self.name, "-k"], capture_output=True)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def argv(self, *command: str) -> list[str]:
        """The command line that runs ``command`` in the container from this machine."""
        attach = ["lxc-attach", "-P", str(self.home), "-n", self.name, "--clear-env"]
        return [*attach, "-v", f"PATH={PATH_IN_CONTAINER}", "-v", "LANG=C.UTF-8", "-v", "HOME=/root", "--", *command]

    def run(self, *command: str, check: bool = True, input: str | None = None, timeout: float = 60):
        """Run one command; returns subprocess.CompletedProcess with text. ``check`` raises with what it printed."""
        feed = {"stdin": subprocess.DEVNULL} if input is None else {"input": input}
        done = subprocess.run(
            self.argv(*command), capture_output=True, text=True, errors="replace", timeout=timeout, **feed
        )
        if check and done.returncode:
            raise RuntimeError(f"{self.name}: {command} gave {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def shell(self, script: str, check: bool = True, timeout: float = 60):
        """Run a bash script given on standard input, so that its text is on no command line."""
        return self.run("bash", "-s", check=check, input=script, timeout=timeout)

    def wait_for_end(self, pid: str, timeout: float) -> None:
        """Wait until a process has ended; it may have before, and 0 (MainPID= of a unit without one) has."""
        if pid != "0":
            self.run("python3", "-c", _UNTIL_IT_ENDS, pid, timeout=timeout)

    def path(self, inside: str) -> Path:
        """A path of the running container as this machine sees it. Does not follow absolute links inside."""
        return Path(f"/proc/{self.pid}/root", inside.lstrip("/"))

    def write(self, inside: str, text: str | bytes, mode: int = 0o644) -> None:
        """Write a file into the running container, with its folder."""
        target = self.path(inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)
        target.chmod(mode)

    def install(self) -> None:
        """Put ``launchproof`` where role job puts it, without any Ansible."""
        from ansible_collections.dflash.launchproof.plugins.module_utils.proof import bundle

        self.write("/usr/local/lib/launchproof/launchproof", bundle.build(), 0o755)
        self.path("/usr/local/bin/launchproof").symlink_to("/usr/local/lib/launchproof/launchproof")

    def read(self, inside: str) -> str:
        """The text of a file in the running container."""
        return self.path(inside).read_text(errors="replace")


def sweep() -> list[str]:
    """Remove every container of the tests and their bridge; returns the names removed."""
    names = [config.parent.name for config in sorted((CACHE / "lxc").glob("*/config"))]
    for name in names:
        Container(name).down()
    _bridge_down_when_unused()
    return names


def main(args: list[str]) -> int:
    if args[:1] == ["up"] and len(args) in (2, 3):
        container = Container(*args[1:])
        container.up(hold=False)
        print(f"{container.name} {container.address} pid {container.pid}")
    elif args[:1] == ["sh"] and len(args) >= 2:
        return subprocess.run(Container(args[1]).argv(*(args[2:] or ["bash", "-l"]))).returncode
    elif args[:1] == ["template"] and len(args) <= 2:
        print(template(*args[1:]))
    elif args == ["sweep"]:
        print("removed:", *(sweep() or ["nothing"]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
