# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and folders that are whole or absent, and used by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from common.contract import CONFIGURATION, Fatal


def write_atomic(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, durable before the rename: a reader sees the old content or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError:
        # On a full disk, what was written so far is in the way of everybody.
        temporary.unlink(missing_ok=True)
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left of :func:`write_atomic`; ``folder`` is held by :func:`exclusive`."""
    for path in folder.glob(".*.tmp"):
        path.unlink()


def make_folder(folder: Path) -> None:
    """Make a writable folder; 78 with the reason where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"not writable by uid {os.getuid()}")
    except OSError as error:
        raise Fatal(CONFIGURATION, "folder", f"{folder}: {error}. Give a folder that this user may write to.") from None


def check_folder(folder: Path) -> None:
    """Say what :func:`make_folder` would, and make nothing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise Fatal(
            CONFIGURATION,
            "folder",
            f"{folder}: {existing} is no folder that uid {os.getuid()} may write to. Give one that is.",
        )


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process; a second holder ends with 78 before it touches anything there."""
    make_folder(folder)
    with open(folder / ".lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fatal(
                CONFIGURATION, "locked", f"{folder} is in use by another process. Stop it or choose another folder."
            ) from None
        yield
