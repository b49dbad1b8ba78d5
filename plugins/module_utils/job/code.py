# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A folder of the controller as one version of code on a target.

A version is a folder named by the hash of its content, beside ``dest``; ``dest`` is a link to one of them. So a
version appears whole or not at all, and what a running job has opened stays where it is.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20

# Written by the interpreter into the delivered folder itself: never part of a version.
ALWAYS_EXCLUDED = ("__pycache__", "*.pyc")


class CodeError(Exception):
    """A folder that cannot be delivered, or an archive that is not what was sent."""


@dataclass(frozen=True)
class Entry:
    """One thing in a version: a file, a folder or a link, with its path relative to the version."""

    path: str
    kind: str  # file | dir | link
    executable: bool = False
    target: str = ""

    def line(self) -> str:
        """The entry in a listing; also what of it goes into the hash besides content."""
        return "\0".join((self.kind, "x" if self.executable else "-", self.path, self.target))

    @classmethod
    def parse(cls, line: str) -> Entry:
        """Read what ``line()`` wrote."""
        kind, executable, path, target = line.split("\0")
        return cls(path, kind, executable == "x", target)


def version_name(content_hash: str) -> str:
    """Name of a version's folder: enough of its hash to be unique, and short enough to be read."""
    return content_hash[:16]


def versions_dir(dest: str) -> str:
    """Where the versions of ``dest`` lie."""
    parent, name = os.path.split(dest)
    return f"{parent}/.{name}.versions"


def scan(root: str, exclude: Iterable[str]) -> list[Entry]:
    """List a folder in a stable order.

    Args:
        root: the folder.
        exclude: name patterns (fnmatch) of files and folders to leave out at any depth.

    Raises:
        CodeError: for a link that leads out of the folder, a device, socket or pipe.
    """
    patterns = (*exclude, *ALWAYS_EXCLUDED)
    return list(_walk(Path(root), "", patterns))


def _walk(root: Path, prefix: str, patterns: tuple[str, ...]) -> Iterator[Entry]:
    for item in sorted(os.scandir(root / prefix), key=lambda entry: entry.name):
        if any(fnmatch.fnmatch(item.name, pattern) for pattern in patterns):
            continue
        path = prefix + item.name
        if "\0" in path or "\n" in path:
            raise CodeError(f"{root / path!s}: the name holds a line break. Rename it.")
        if item.is_symlink():
            target = os.readlink(item.path)
            inside = os.path.normpath(os.path.join(os.path.dirname(path), target))
            if target.startswith("/") or inside == ".." or inside.startswith("../"):
                raise CodeError(
                    f"{root / path!s} is a link to {target}, out of the folder. Put a copy there, or exclude it."
                )
            yield Entry(path, "link", target=target)
        elif item.is_dir():
            yield Entry(path, "dir")
            yield from _walk(root, path + "/", patterns)
        elif item.is_file():
            yield Entry(path, "file", executable=bool(item.stat().st_mode & stat.S_IXUSR))
        else:
            raise CodeError(f"{root / path!s} is neither a file, a folder nor a link. Remove or exclude it.")


def tree_hash(root: str, entries: Iterable[Entry]) -> str:
    """SHA-256 over names, kinds, executable bits and contents, as hex. Raises OSError where one cannot be read."""
    total = hashlib.sha256()
    for entry in entries:
        total.update(entry.line().encode("utf-8", "surrogateescape") + b"\n")
        if entry.kind == "file":
            content = hashlib.sha256()
            with open(os.path.join(root, entry.path), "rb") as stream:
                for chunk in iter(lambda: stream.read(CHUNK), b""):  # noqa: B023 - called within this turn
                    content.update(chunk)
            total.update(content.digest())
    return total.hexdigest()


def write_archive(root: str, entries: Iterable[Entry], stream: BinaryIO) -> None:
    """Write the entries as a compressed tar, piece by piece: large files do not go through memory."""
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=stream, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in entries:
            member = tarfile.TarInfo(entry.path)
            if entry.kind == "dir":
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            elif entry.kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, entry.target
                archive.addfile(member)
            else:
                with open(os.path.join(root, entry.path), "rb") as source:
                    member.size = os.fstat(source.fileno()).st_size
                    member.mode = 0o755 if entry.executable else 0o644
                    archive.addfile(member, source)


def unpack(archive_path: str, root: str) -> list[Entry]:
    """Unpack an archive of ``write_archive`` into an empty folder and list what is there.

    Raises:
        CodeError: when a member would land outside of the folder, or is of another kind.
    """
    entries = []
    with tarfile.open(archive_path, mode="r|gz") as archive:
        for member in archive:
            parts = member.name.split("/")
            if member.name.startswith("/") or ".." in parts:
                raise CodeError(f"the archive holds {member.name}, which is outside of the folder")
            path = os.path.join(root, member.name)
            if member.isdir():
                os.mkdir(path)
                os.chmod(path, 0o755)
                entries.append(Entry(member.name, "dir"))
            elif member.issym():
                os.symlink(member.linkname, path)
                entries.append(Entry(member.name, "link", target=member.linkname))
            elif member.isfile():
                _write(archive.extractfile(member), path, member.mode & 0o777)
                entries.append(Entry(member.name, "file", executable=bool(member.mode & stat.S_IXUSR)))
            else:
                raise CodeError(f"the archive holds {member.name}, which is neither a file, a folder nor a link")
    return entries


def _write(source: BinaryIO, path: str, mode: int) -> None:
    # Exclusive, and no link is followed: a link that came earlier in the archive cannot redirect a file.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as target:
        os.fchmod(descriptor, mode)
        for chunk in iter(lambda: source.read(CHUNK), b""):
            target.write(chunk)
