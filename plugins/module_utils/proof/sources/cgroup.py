# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Control groups of both versions: who is in a unit's group, and how many of them the kernel killed for memory."""

from __future__ import annotations

import ctypes
import os

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Unknown

MOUNT = "/sys/fs/cgroup"


class Groups:
    """Finds a unit's directories; I(mount) is another directory in tests."""

    def __init__(self, mount: str = MOUNT):
        self.mount = mount
        if os.path.exists(mount + "/cgroup.controllers"):
            self.unified, self.processes, self.memory = mount, mount, None
        else:
            unified = mount + "/unified"
            self.unified = unified if os.path.exists(unified + "/cgroup.controllers") else None
            self.processes, self.memory = mount + "/systemd", mount + "/memory"

    def pids(self, group: str) -> tuple | Unknown:
        """Pids in I(group) and below it, () where it is gone; Unknown where it cannot be read."""
        found = []
        top = self.processes + group
        if not group or not os.path.isdir(top):
            return ()
        for folder, _folders, _files in os.walk(top):
            try:
                with open(folder + "/cgroup.procs", encoding="ascii") as handle:
                    found.extend(int(line) for line in handle)
            except FileNotFoundError:  # removed while we look
                continue
            except OSError as error:
                return Unknown("%s/cgroup.procs: %s" % (folder, error.strerror))
        return tuple(found)

    def events_path(self, group: str) -> str | None:
        """File that changes when the group becomes populated or empty; version 2 and hybrid alone have it."""
        return self.unified + group + "/cgroup.events" if self.unified and group else None

    def oom_path(self, group: str) -> str:
        """File with the group's C(oom_kill) counter."""
        if self.memory:
            return self.memory + group + "/memory.oom_control"
        return (self.unified or self.mount) + group + "/memory.events"

    def oom_kills(self, group: str) -> int | Unknown:
        """The group's own counter; 0 where the group has gone or the counter is not delegated to it."""
        path = self.oom_path(group)
        try:
            return ledger.oom_kill_counter(path) or 0
        except FileNotFoundError:
            return 0
        except OSError as error:
            return Unknown("%s: %s" % (path, error.strerror))

    def oom_event(self, group: str) -> int | None:
        """An eventfd that fires when version 1 counts an OOM, None where there is no such thing.

        Between the rise of the counter and the end of the group lie milliseconds: only an event is fast enough.
        Source: cgroup-v1/memory.rst, "OOM Control".
        """
        if not self.memory:
            return None
        path = self.memory + group
        try:
            control = os.open(path + "/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        descriptor = ctypes.CDLL(None, use_errno=True).eventfd(0, os.O_CLOEXEC | os.O_NONBLOCK)  # os.eventfd is of 3.10
        if descriptor < 0:
            os.close(control)
            return None
        try:
            with open(path + "/cgroup.event_control", "w", encoding="ascii") as handle:
                handle.write("%d %d" % (descriptor, control))
        except OSError:
            os.close(descriptor)
            return None
        finally:
            os.close(control)
        return descriptor
