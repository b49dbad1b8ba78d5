# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A second API of the embedded node, with faults on demand: its own state, containers and port on the same machine.

It borrows the node's bridge, certificate and Python environment, and runs the programs of this checkout. Its containers
are real and small: an init that is a shell script, so that they are made, started and stopped in no time. What goes wrong
in it is nobody else's trouble.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
from pathlib import Path

import requests

from tests.support.deployment import NODE, REPO

PROGRAMS = REPO / "roles/local_node/files"
# Ends when LXC asks it to shut down (SIGPWR, lxc.container.conf(5)).
INIT = """#!/bin/sh
trap 'exit 0' PWR
while :; do sleep 3600 & wait $!; done
"""


def small_template(path: Path) -> None:
    """Write a container template: this machine's /bin/sh and sleep with their libraries, and INIT."""
    with tarfile.open(path, "w:gz", compresslevel=1) as out:
        for name in ("dev", "etc/systemd/system", "proc", "root", "run", "sbin", "sys", "tmp", "var"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            out.addfile(folder)
        init = tarfile.TarInfo("sbin/init")
        init.size, init.mode = len(INIT), 0o755
        out.addfile(init, io.BytesIO(INIT.encode()))
        programs = ("/bin/sh", "/bin/sleep")
        said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
        for file in (*programs, *sorted(set(re.findall(r"(/\S+) \(0x", said)))):
            entry = out.gettarinfo(os.path.realpath(file), arcname=file.lstrip("/"))
            entry.uid = entry.gid = 0
            with open(file, "rb") as source:
                out.addfile(entry, source)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


class OwnApi:
    """The API of node ``lpfaults``."""

    node = "lpfaults"
    template = "local:vztmpl/debian-small_amd64.tar.gz"
    token_id, password = "faults", "a-password-of-tests"
    token_secret = "11111111-2222-3333-4444-555555555555"

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="lpfaults-", dir="/var/tmp"))
        self.folder.chmod(0o755)  # the ids of unprivileged containers pass through
        self.port = free_port()
        self.ca = NODE / "tls/ca.pem"
        for name in ("log", "run", "secrets", "storage/template/cache", "pve"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "tls").symlink_to(NODE / "tls")
        small_template(self.folder / "storage/template/cache" / self.template.rpartition("/")[2])
        (self.folder / "secrets/root_password").write_text(self.password)
        (self.folder / "secrets/api_token").write_text(self.token_secret)
        settings = json.loads((NODE / "node.json").read_text())
        settings |= {"api_port": self.port, "node": self.node, "token_id": self.token_id, "faults": True}
        (self.folder / "node.json").write_text(json.dumps(settings))
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.verify = str(self.ca)
        self.session.headers["Authorization"] = f"PVEAPIToken=root@pam!{self.token_id}={self.token_secret}"

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(PROGRAMS), "PYTHONDONTWRITEBYTECODE": "1"}

    def begin(self) -> None:
        """Start it; returns when it listens."""
        command = [str(NODE / "cache/venv/bin/python"), "-m", "launchproof_node.api", str(self.folder)]
        with open(self.folder / "log/api.log", "ab") as out:
            self._process = subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                text=True,
            )
            for line in self._process.stderr:
                out.write(line.encode())
                if "listening on" in line:
                    break
            else:
                raise RuntimeError(f"the API did not start: {(self.folder / 'log/api.log').read_text()}")
        # What it says from now on is not needed, and must not fill the pipe.
        self._drain = subprocess.Popen(["cat"], stdin=self._process.stderr, stdout=subprocess.DEVNULL)

    def crash(self) -> None:
        """End it at once, as the machine's power would."""
        self._process.kill()
        self._process.wait()
        self._drain.wait()

    def end(self) -> None:
        """Stop it, and remove its containers and its folder."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.crash()
        command = ["/usr/bin/python3", "-m", "launchproof_node.destroy", str(self.folder)]
        subprocess.run(command, env=self._environment(), check=True)
        shutil.rmtree(self.folder)

    def fault(self, fault: str, **values) -> None:
        """Ask for a fault of launchproof_node/faults.py."""
        answer = self.session.post(
            f"https://127.0.0.1:{self.port}/_fault", data=json.dumps({"fault": fault, **values}), timeout=10
        )
        assert answer.status_code == 200, answer.reason

    def call(self, method: str, path: str, **values):
        """One call of the API as the test itself; its data."""
        answer = self.session.request(
            method, f"https://127.0.0.1:{self.port}/api2/json/{path}", data=values or None, timeout=30
        )
        assert answer.status_code == 200, answer.reason
        return answer.json()["data"]

    def configuration(self, vmid: int) -> bytes | None:
        """A container's configuration file, to the byte; None without one."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"pve/nodes/{self.node}/lxc/{vmid}.conf").read_bytes()
        return None

    def runs(self, vmid: int) -> bool:
        """Whether a container runs, as LXC says."""
        said = subprocess.run(["lxc-info", "-n", str(vmid), "-s", "-H"], capture_output=True, text=True, check=False)
        return said.stdout.strip() == "RUNNING"

    def log(self) -> list[str]:
        """Every request so far, as ``METHOD /path status``."""
        lines = (self.folder / "log/access.log").read_text().splitlines()
        return [line.split(" ", 1)[1] for line in lines if "/_fault" not in line]
