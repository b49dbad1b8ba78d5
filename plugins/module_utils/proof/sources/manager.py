# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who starts and stops units on this machine: systemd where it runs, supervisor elsewhere."""

from __future__ import annotations

import os

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import cgroup, supervisor, systemd

SYSTEMD_RUNS = "/run/systemd/system"  # sd_booted(3): this folder is there exactly where systemd is the init


def systemd_runs() -> bool:
    """Whether systemd runs this machine."""
    return os.path.isdir(SYSTEMD_RUNS)


def connect(loop=None, changed=None, job_ended=None):
    """The manager of this machine; the arguments are those of systemd.Manager."""
    return (systemd if systemd_runs() else supervisor).Manager(loop, changed, job_ended)


def groups():
    """What finds the processes of a unit."""
    return cgroup.Groups() if systemd_runs() else supervisor.Groups()


def show(units: list) -> dict:
    """{unit: (UnitState or Unknown, properties)} of I(units), by a connection that is closed again."""
    with connect() as manager:
        return manager.show(units)
