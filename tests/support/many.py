# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Many containers at once, for what depends on their number alone: Debian with Python, no init but a process that waits."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.container import CACHE, template

CONFIG = """\
lxc.uts.name = {name}
lxc.rootfs.path = overlayfs:{lower}:{upper}
lxc.apparmor.profile = unconfined
lxc.init.cmd = /bin/sleep infinity
lxc.tty.max = 0
lxc.console.path = none
lxc.mount.auto = proc:mixed sys:mixed
lxc.net.0.type = empty
"""


@contextlib.contextmanager
def containers(numbers: list[int]) -> Iterator[Path]:
    """Containers of these numbers, running, in an LXC folder of their own, which is yielded; gone afterwards."""
    lower = template()
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="many-") as name:
        home = Path(name)
        try:
            for number in numbers:
                upper = home / str(number) / "upper"
                upper.mkdir(parents=True)
                (upper.parent / "config").write_text(CONFIG.format(name=number, lower=lower, upper=upper))
                _lxc("lxc-start", home, number)
            yield home
        finally:
            for number in numbers:
                if (home / str(number) / "config").exists():
                    _lxc("lxc-stop", home, number, "-k")
                    shutil.rmtree(home / str(number))


def _lxc(program: str, home: Path, number: int, *arguments: str) -> None:
    done = subprocess.run(
        [program, "-P", home, "-n", str(number), *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0 and program == "lxc-start":
        raise RuntimeError(f"{program} of container {number} failed: {done.stderr}")
