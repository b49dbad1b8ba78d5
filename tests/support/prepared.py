# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A container that can run the reference programs: it sees them and their packages, read-only."""

from __future__ import annotations

import sys

from tests.support.container import REPO, Container

PACKAGES = REPO / f".venv-workload/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
PROGRAMS_INSIDE, PACKAGES_INSIDE = "/opt/workload", "/opt/packages"


class Prepared(Container):
    """The programs are in PROGRAMS_INSIDE; /usr/bin/python3 runs them with PYTHONPATH=PACKAGES_INSIDE."""

    def start(self) -> None:
        assert PACKAGES.is_dir(), f"{PACKAGES} is made by ./test workload"
        with open(self.folder / "config", "r+") as config:
            if "lxc.mount.entry" not in config.read():
                for source, place in ((REPO / "workload", PROGRAMS_INSIDE), (PACKAGES, PACKAGES_INSIDE)):
                    config.write(f"lxc.mount.entry = {source} {place[1:]} none bind,ro,create=dir 0 0\n")
        super().start()
