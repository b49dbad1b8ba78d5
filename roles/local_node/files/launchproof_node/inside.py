# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The part of making and starting a container that mounts its volumes.

Run as `unshare --mount --propagation private python3 -I inside.py build|boot`, with a JSON plan on stdin. The
mounts live in this private namespace alone: when the last process in it is gone, however it went, the kernel
unmounts the volumes and frees their loop devices. Nothing has to be cleaned up, so nothing can be forgotten.
"""

import ctypes
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
SIGKILL = 9
# Units that can never mount in an unprivileged container and leave systemd "degraded"; Proxmox VE masks them too.
DEBUG_MOUNTS = ("sys-kernel-debug.mount", "sys-kernel-config.mount")


def die_with_parent():
    """Let the kernel kill this process when its parent dies: an orphan would go on filling a volume nobody owns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)


def mount(image, target, options):
    """Mount a volume's image through a loop device; mount options as a list."""
    Path(target).mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-o", ",".join(["loop", *options]), image, target], check=True)


def in_root(rootfs, function, *arguments):
    """Call the function in a child process chrooted to rootfs: a symlink in there cannot lead out of it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chroot(rootfs)
            os.chdir("/")
            function(*arguments)
            status = 0
        except BaseException as error:  # the child must not return into the parent's code
            print(f"{function.__name__}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise SystemExit(f"writing the container's files failed ({function.__name__})")


def with_section(text, body):
    """TEXT with its PVE section replaced by BODY (appended when it has none), as Proxmox VE edits files in a container."""
    section = f"# --- BEGIN PVE ---\n{body}# --- END PVE ---\n"
    pattern = re.compile(r"# --- BEGIN PVE ---\n.*?# --- END PVE ---\n", re.S)
    if pattern.search(text):
        return pattern.sub(lambda _found: section, text, count=1)
    return text + ("" if not text or text.endswith("\n") else "\n") + section


def build(plan):
    """Unpack the template into a fresh volume and give the container its own identity.

    plan: image, rootfs, template, unprivileged, password or null, ssh_keys or null.
    """
    rootfs = plan["rootfs"]
    mount(plan["image"], rootfs, [])
    unpack = ["tar", "--extract", "--preserve-permissions", "--numeric-owner", "--file", plan["template"]]
    subprocess.run([*unpack, "--directory", rootfs], check=True, preexec_fn=die_with_parent)
    in_root(rootfs, _identity, plan)
    if plan["password"]:
        subprocess.run(["chroot", rootfs, "chpasswd"], input=f"root:{plan['password']}\n", text=True, check=True)


def _identity(plan):
    # Two containers of one template must not share a machine id or host keys.
    Path("/etc/machine-id").write_text("")
    for key in Path("/etc/ssh").glob("ssh_host_*"):
        key.unlink()
    if shutil.which("ssh-keygen"):
        for kind in ("ed25519", "ecdsa"):
            command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", f"/etc/ssh/ssh_host_{kind}_key"]
            subprocess.run(command, check=True)
    hosts = Path("/etc/hosts")
    if not hosts.exists() or "localhost" not in hosts.read_text():
        hosts.write_text("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n")
    if plan["unprivileged"]:
        for unit in DEBUG_MOUNTS:
            link = Path("/etc/systemd/system", unit)
            if not link.is_symlink():
                link.symlink_to("/dev/null")
    if plan["ssh_keys"]:
        folder = Path("/root/.ssh")
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / "authorized_keys").write_text(plan["ssh_keys"].rstrip("\n") + "\n")


def boot(plan):
    """Mount the volumes, write the node's files into the container and become lxc-start.

    plan: vmid, rootfs, volumes [{image, target, options}], devices [{source, staged, mode, uid, gid}],
    files {path in the container: text}, sections {path in the container: text of the section that is the node's}, log.
    """
    for volume in plan["volumes"]:
        mount(volume["image"], volume["target"], volume["options"])
    for device in plan["devices"]:
        _stage(device)
    in_root(plan["rootfs"], _files, plan["files"], plan["sections"])
    os.execvp("lxc-start", ["lxc-start", "-n", str(plan["vmid"]), "-o", plan["log"], "-l", "NOTICE"])


def _stage(device):
    # A node of its own, so that mode and owner can differ from the host's.
    node = os.stat(device["source"])
    staged = Path(device["staged"])
    staged.parent.mkdir(parents=True, exist_ok=True)
    staged.unlink(missing_ok=True)
    os.mknod(staged, stat.S_IFMT(node.st_mode) | 0o600, node.st_rdev)
    os.chown(staged, device["uid"], device["gid"])
    os.chmod(staged, device["mode"])


def _files(files, sections):
    for name, text in files.items():
        _write(Path(name), lambda _old, text=text: text)
    for name, body in sections.items():
        _write(Path(name), lambda old, body=body: with_section(old, body))


def _write(path, edit):
    # As Proxmox VE does: a resolv.conf that points at a resolver's own file is left to that resolver.
    if path.is_symlink():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(edit(path.read_text() if path.exists() else ""))
    path.chmod(0o644)


def main():
    plan = json.load(sys.stdin)
    try:
        {"build": build, "boot": boot}[sys.argv[1]](plan)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{error.cmd[0]} failed with {error.returncode}") from None


if __name__ == "__main__":
    main()
