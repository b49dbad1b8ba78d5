# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the node remembers: one file a container and one a task. What runs is asked of LXC and never remembered."""

import json
import os
import re
from pathlib import Path

from . import config as node_config

# The abstract socket that a container's monitor listens on, as long as it lives.
COMMAND_SOCKET = re.compile(rb"@/var/lib/lxc/(\d+)/command$", re.M)


def write_atomic(path, text, mode=0o640):
    """Replace a file as a whole: a reader or a crash sees the old text or the new one."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    temporary.replace(path)


def running(sockets=Path("/proc/net/unix")):
    """The ids of the containers whose monitor runs, as Proxmox VE finds them (0.1 ms; lxc-info takes 5 ms each)."""
    return {int(vmid) for vmid in COMMAND_SOCKET.findall(sockets.read_bytes())}


class Saved(dict):
    """A dict that calls a function after every change, before the caller goes on."""

    def __init__(self, values, save):
        super().__init__(values)
        self._save = save

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self._save()

    def __delitem__(self, key):
        super().__delitem__(key)
        self._save()

    def pop(self, *arguments):
        """dict.pop, saved."""
        value = super().pop(*arguments)
        self._save()
        return value

    def update(self, *arguments, **values):
        """dict.update, saved."""
        super().update(*arguments, **values)
        self._save()

    def setdefault(self, key, default=None):
        """dict.setdefault, saved."""
        value = super().setdefault(key, default)
        self._save()
        return value


class Store:
    """The files of the containers and tasks of one node."""

    def __init__(self, settings):
        self.configs = settings.configs
        self.tasks = settings.tasks
        self.configs.mkdir(parents=True, exist_ok=True)
        self.tasks.mkdir(parents=True, exist_ok=True)

    def path(self, vmid):
        """The configuration file of a container."""
        return self.configs / f"{vmid}.conf"

    def save(self, vmid, config, pending):
        """Write a container's configuration."""
        write_atomic(self.path(vmid), node_config.dump(config, pending))

    def load(self):
        """{vmid: (config, pending)} of every container on the node."""
        files = (path for path in self.configs.glob("*.conf") if path.stem.isdigit())
        return {int(path.stem): node_config.load(path.read_text()) for path in sorted(files)}

    def remove(self, vmid):
        """Forget a container."""
        self.path(vmid).unlink(missing_ok=True)

    def save_task(self, record):
        """Write a task: at once when it begins, so that a crash of the API leaves a trace of it."""
        name = record["upid"].replace("/", "_")
        write_atomic(self.tasks / name, json.dumps(record))

    def load_tasks(self, keep=500):
        """The newest KEEP tasks, oldest first; one that was running when the API died has ended, nobody knows how."""
        records = []
        for path in self.tasks.iterdir():
            try:
                records.append((path, json.loads(path.read_text())))
            except ValueError:
                path.unlink()
        records.sort(key=lambda item: (item[1]["starttime"], item[1]["pid"]))
        for path, _record in records[:-keep]:
            path.unlink()
        out = [record for _path, record in records[-keep:]]
        for record in out:
            if record["status"] == "running":
                # Proxmox VE's text for a worker that is gone without a last line in its log.
                record.update(status="stopped", exitstatus="unexpected status", endtime=record["starttime"])
                self.save_task(record)
        return out
