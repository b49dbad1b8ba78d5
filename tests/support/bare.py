# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers without systemd, as hosts for rent are, and what they need to have jobs without any network.

python -m tests.support.bare up NAME FOLDER     make one that answers to ssh, with the client's files in FOLDER
python -m tests.support.bare down NAME          remove it
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.container import CACHE, REPO, Container

LOCK = REPO / "roles/job/files/supervisor.txt"
UV, WHEELS, UV_CONFIG = "/opt/uv/uv", "/opt/uv/wheels", "/opt/uv/uv.toml"
# Role python_env's variables for such a container: from where it has uv and supervisor.
PYTHON_ENV = {
    "python_env_uv": UV,
    "python_env_find_links": [WHEELS],
    "python_env_environment": {"UV_CONFIG_FILE": UV_CONFIG},
}
# systemctl as far as the matrix' shell texts ask it, over what the runners leave and what supervisor is told.
SYSTEMCTL = r"""#!/usr/bin/python3
import json, os, signal, subprocess, sys, time

RUNS = "/var/lib/launchproof/runs"
CTL = ["/opt/launchproof/supervisor/bin/supervisorctl", "-c", "/etc/launchproof/supervisor.conf"]
NAMES = {
    "LoadState": "load_state", "ActiveState": "active_state", "SubState": "sub_state", "Result": "result", "MainPID": "main_pid",
    "ExecMainStatus": "exec_main_status", "ExecMainCode": "exec_main_code", "NRestarts": "n_restarts", "InvocationID": "invocation_id",
}


def read(unit):
    try:
        with open("%s/%s/state.json" % (RUNS, unit)) as handle:
            return json.load(handle)
    except OSError:
        return {"unit": {"active_state": "inactive", "main_pid": 0, "invocation_id": ""}, "runner": {"pid": 0}}


words = [word for word in sys.argv[1:] if word not in ("-s", "-P", "--no-pager", "-q")]
verb, unit = words[0], words[-1]
data = read(unit)
if not os.path.exists("/etc/launchproof/jobs/%s.json" % unit):
    data["unit"]["load_state"] = "not-found"
if verb == "show" and words[1] == "TasksCurrent":
    with open("/proc/%d/task/%d/children" % (data["runner"]["pid"],) * 2) as handle:
        print(len(handle.read().split()))
elif verb == "show":
    print(data["unit"].get(NAMES[words[1]], ""))
elif verb in ("is-active", "is-failed"):
    print(data["unit"]["active_state"])
    sys.exit(data["unit"]["active_state"] != verb[3:])
elif verb == "kill":
    os.kill(data["unit"]["main_pid"], signal.Signals["SIG" + words[1]])
elif verb in ("start", "stop", "restart"):
    status = subprocess.call(CTL + [verb, unit], stdout=subprocess.DEVNULL)
    # As with systemd, the unit has begun when the command returns.
    end = time.monotonic() + 20
    while verb != "stop" and time.monotonic() < end and read(unit)["unit"]["invocation_id"] == data["unit"]["invocation_id"]:
        if verb == "start" and data["unit"]["active_state"] == "active":
            break
        time.sleep(0.02)
    sys.exit(status)
"""


def wheel() -> Path:
    """Supervisor's wheel, of the version and with the hash that the role locks."""
    folder = CACHE / "wheels"
    found = list(folder.glob("supervisor-*.whl"))
    locked = LOCK.read_text().split()[0].replace("==", "-")
    if not found or not found[0].name.startswith(locked + "-"):
        for old in found:
            old.unlink()
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-qq",
            "--no-deps",
            "--require-hashes",
            "-r",
            str(LOCK),
            "-d",
            str(folder),
        ]
        subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
        found = list(folder.glob("supervisor-*.whl"))
    return found[0]


class Bare(Container):
    """A container without systemd, in which supervisor can be installed without a network."""

    def __init__(self, name: str, network: bool = True):
        super().__init__(name, network=network, systemd=False)

    def __enter__(self) -> Bare:
        super().__enter__()
        self.equip()
        return self

    def equip(self) -> None:
        """Give it uv, and supervisor's wheel in place of an index."""
        package = wheel()
        uv = Path(sys.executable).with_name("uv")
        self.write(UV, uv.read_bytes(), 0o755)
        self.write(f"{WHEELS}/{package.name}", package.read_bytes())
        self.write(UV_CONFIG, "no-index = true\n")

    def have_supervisor(self) -> None:
        """Put it where role job puts it, without any Ansible."""
        self.shell(f"""set -e
            export UV_CONFIG_FILE={UV_CONFIG}
            {UV} venv -q --no-python-downloads --python /usr/bin/python3 /opt/launchproof/supervisor
            {UV} pip install -q --python /opt/launchproof/supervisor/bin/python --find-links {WHEELS} supervisor""")


def main(args: list[str]) -> int:
    from tests.support.ssh import serve_ssh

    if args[:1] == ["up"] and len(args) == 3:
        container, folder = Bare(args[1]), Path(args[2])
        if not (folder / "known_hosts").exists():
            container.up(hold=False)
            container.equip()
            folder.mkdir(parents=True, exist_ok=True)
            serve_ssh(container, folder)
    elif args[:1] == ["down"] and len(args) == 2:
        Bare(args[1]).down()
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
