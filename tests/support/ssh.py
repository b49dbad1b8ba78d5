# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container that is reached by plain ssh on an odd port, with its host key known beforehand: incident B's host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.container import REPO, Container

PORT = 40022


@dataclass(frozen=True)
class SshHost:
    """How to reach the container: everything a client needs, in files of one folder."""

    container: Container
    key: Path
    known_hosts: Path
    control: Path  # folder of the sockets of ssh's masters, so that a test can find its own

    def options(self) -> list[str]:
        """Options that every ssh of the tests gets. Host keys are checked, strictly."""
        return [
            "-F", "none", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes",
            "-o", f"UserKnownHostsFile={self.known_hosts}", "-o", "GlobalKnownHostsFile=/dev/null",
            "-o", "IdentitiesOnly=yes",
        ]  # fmt: skip

    def ssh(self, command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run one remote command line, as a person would."""
        argv = ["ssh", *self.options(), "-i", str(self.key), "-p", str(PORT), f"root@{self.container.address}", command]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)

    def masters(self) -> list[int]:
        """Process ids of ssh's masters to this host, as ssh itself tells them."""
        told = [
            subprocess.run(["ssh", "-F", "none", "-O", "check", "-S", socket, "host"], capture_output=True, text=True)
            for socket in self.control.iterdir()
        ]
        return [int(pid) for check in told for pid in re.findall(r"\(pid=(\d+)\)", check.stderr)]

    def hostvars(self) -> dict:
        """Inventory variables of this host for ansible.builtin.ssh."""
        return {
            "ansible_host": self.container.address,
            "ansible_port": PORT,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": " ".join(self.options()),
            "ansible_control_path_dir": str(self.control),
            "ansible_python_interpreter": "/usr/bin/python3",
        }


def serve_ssh(container: Container, folder: Path) -> SshHost:
    """Start sshd in the container on PORT with a key of its own, and make the client's files in ``folder``."""
    key, known_hosts, control = folder / "key", folder / "known_hosts", folder / "cp"
    control.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True)
    container.write("/root/.ssh/authorized_keys", key.with_suffix(".pub").read_text(), 0o600)
    container.path("/root/.ssh").chmod(0o700)
    container.write("/etc/ssh/sshd_config.d/odd-port.conf", f"Port {PORT}\nPasswordAuthentication no\nUseDNS no\n")
    # Without a key its starts have failed up to the start limit since the boot.
    by_systemd, by_hand = "systemctl reset-failed ssh; systemctl restart ssh", "mkdir -p /run/sshd; /usr/sbin/sshd"
    start = by_systemd if container.systemd else by_hand
    container.shell(f"ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; {start}")
    host_key = " ".join(container.read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2])
    known_hosts.write_text(f"[{container.address}]:{PORT} {host_key}\n")
    return SshHost(container, key, known_hosts, control)


def playbook(argv: list[str], report: Path, **environment: str) -> subprocess.Popen[str]:
    """Start ansible-playbook from the repository's root, in a process group of its own; output and errors in one pipe.

    ``report`` is where the launch report goes, so that a test never overwrites a user's.
    """
    return subprocess.Popen(
        [str(Path(sys.executable).parent / "ansible-playbook"), *argv],
        cwd=REPO,
        env={**os.environ, "LAUNCHPROOF_REPORT": str(report), "ANSIBLE_NOCOLOR": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
