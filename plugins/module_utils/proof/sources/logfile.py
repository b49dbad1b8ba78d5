# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Follows a log by what this run wrote into it, through rename, truncation, deletion and late creation."""

from __future__ import annotations

import errno
import os
import pwd
import stat
import time

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import LogPlace, Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import CONTENT, NAMES

PIECE = 256 * 1024  # bytes read at once
PIECES = 8  # pieces of one log in a row, then other units get their turn
HEAD, TAIL = 1 << 20, 8 << 20  # bytes of a log that was written before we came: more is not needed to see how it goes
MARK = 64  # bytes before our place by which a log is known that was emptied and filled again between two looks
# There is no file, and no right would make one readable. ELOOP is of links that lead to each other.
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
KINDS = {
    stat.S_IFIFO: "fifo", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFDIR: "folder",
}  # fmt: skip
TICK = 0.05  # s by which the time of a write may lag: the kernel dates it with its last tick
LAST_BYTES, LAST_LINES = 4096, 5  # of another file than the log, read and kept for the reader of a verdict
PROBE_BYTES = 4096  # one block: enough for ENOSPC and EDQUOT


def identity(path: str) -> tuple | None:
    """(device, inode, size) of I(path), None where there is no such file. Raises OSError where it cannot be known."""
    try:
        about = os.stat(path)
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise
    return about.st_dev, about.st_ino, about.st_size


class Tail:
    """One log file. C(feed) gets each piece of new bytes; C(changed) is called when there may be something to read.

    I(start) is the (device, inode, size) before the run: bytes below that size of that file are old. I(skip_middle)
    leaves out the middle of what is there already when it is large.
    """

    def __init__(self, path: str, start: tuple | None, loop, changed, skip_middle: bool = False):
        self.path = path
        self.start = start
        self.change = ""  # truncated, renamed or deleted
        self.emptied_at = 0.0  # CLOCK_BOOTTIME s at which that was seen last: what is in the file was written after it
        self.error = ""  # why a file that is there cannot be read
        self.read_bytes = 0
        self.position = 0  # in the file that is open now
        self.past, self.past_written_at = 0, 0.0  # size when we came, and CLOCK_BOOTTIME of the last write before that
        self._skip_middle = skip_middle
        self._mark = b""  # what was read last
        self._limit = None  # place up to which this run has written over what was there
        self._loop = loop
        self._changed = changed
        self._file = None
        self._inode = None
        self._keys = []
        self._attach()
        if self._file is not None:
            about = os.fstat(self._file)
            self.past = about.st_size
            self.past_written_at = time.clock_gettime(time.CLOCK_BOOTTIME) - max(time.time() - about.st_mtime, 0.0)

    @property
    def inode(self) -> tuple | None:
        """(device, inode) of the file that is being read."""
        return self._inode

    @property
    def exists(self) -> bool:
        return self._file is not None

    @property
    def kind(self) -> str:
        """What is at the path where that is no regular file: fifo, socket, device or folder; "" otherwise."""
        if self._file is not None:
            return ""
        try:
            return KINDS.get(stat.S_IFMT(os.stat(self.path).st_mode), "")
        except OSError:
            return ""

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size if self._file is not None else 0

    @property
    def unchanged(self) -> bool:
        """Whether the file still has exactly the size that it had before the run, or is being written over."""
        same = self.start is not None and self.start[:2] == self._inode and self.start[2] > 0
        return same and (self._limit is not None or self.size == self.start[2])

    def overwritten(self, place: int) -> None:
        """This run writes over the lines of the run before, from the first on, and has come to I(place)."""
        if self._limit is None:
            self.rewind()
        self._limit = place

    def rewind(self) -> None:
        """Read the file from its first byte on."""
        self.position, self.past, self._mark = 0, 0, b""

    def close(self) -> None:
        for key in self._keys:
            self._loop.unwatch(key)
        self._keys = []
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _attach(self) -> None:
        """Open the file at the path, and watch it and the nearest folder that exists."""
        for key in self._keys:
            self._loop.unwatch(key)
        self._folder = self._nearest_folder()
        self._keys = [self._loop.watch(self._folder, NAMES, self._on_event)]
        self.error = ""
        try:
            # A device gives nothing back, and a pipe's bytes are for somebody else.
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                return
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in NO_FILE:
                self.error = "%s: %s" % (self.path, error.strerror)
            return
        about = os.fstat(descriptor)
        self._file, self._inode = descriptor, (about.st_dev, about.st_ino)
        same = self.start is not None and self.start[:2] == self._inode
        self.position = self.start[2] if same and self.start[2] <= about.st_size else 0
        self._limit = None
        self._mark = os.pread(descriptor, MARK, max(self.position - MARK, 0))[: self.position]
        # By the descriptor, because the name may lead elsewhere by now.
        self._keys.append(self._loop.watch("/proc/self/fd/%d" % descriptor, CONTENT, self._on_event))

    def _nearest_folder(self) -> str:
        """The deepest folder on the way to the log that exists."""
        folder = os.path.dirname(self.path)
        while folder != "/" and not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return folder

    def _on_event(self, _mask: int, _name: str) -> None:
        self._changed()

    def read(self, feed) -> bool:
        """Feed what is new. Return True when there is more than one turn may read."""
        more = self._read_open(feed) if self._file is not None else False
        if not more and self._moved():
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self.past, self.emptied_at = 0, time.clock_gettime(time.CLOCK_BOOTTIME)
            self._attach()
            if self._file is not None:
                more = self._read_open(feed)
        elif self._file is None and self._nearest_folder() != self._folder:
            self._attach()
        return more

    def _moved(self) -> bool:
        """Whether the path leads to another file than the one that is open, or leads somewhere at last."""
        try:
            about = os.stat(self.path)
        except OSError:
            if self._file is not None and not self.change:
                self.change = "deleted" if os.fstat(self._file).st_nlink == 0 else "renamed"
            return False  # what is still written through the old name is this run's: keep reading it
        if self._file is None:
            return stat.S_ISREG(about.st_mode)
        if (about.st_dev, about.st_ino) == self._inode:
            return False
        self.change = "deleted" if os.fstat(self._file).st_nlink == 0 else "renamed"
        return True

    def _read_open(self, feed) -> bool:
        size = os.fstat(self._file).st_size
        if size < self.position or (size > self.position and self._refilled()):
            self.change, self.emptied_at = "truncated", time.clock_gettime(time.CLOCK_BOOTTIME)
            self.rewind()
        if self._skip_middle and size > HEAD + TAIL:
            if self.position == 0:
                for _turn in range(HEAD // PIECE):
                    self._piece(feed)
                feed(b"\n")
            if size - TAIL > self.position:
                self.position, self._mark = size - TAIL, b""
        self._skip_middle = False
        return all(self._piece(feed) for _turn in range(PIECES))

    def _refilled(self) -> bool:
        return os.pread(self._file, len(self._mark), self.position - len(self._mark)) != self._mark

    def _piece(self, feed) -> bool:
        wanted = PIECE if self._limit is None else max(min(PIECE, self._limit - self.position), 0)
        data = os.pread(self._file, wanted, self.position)
        if not data:
            return False
        if not data.strip(b"\0"):
            # A writer without O_APPEND leaves a hole after copytruncate; skip it without reading it.
            try:
                self.position = os.lseek(self._file, self.position, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                self.position, self._mark = os.fstat(self._file).st_size, b""
                return False
            data, self._mark = os.pread(self._file, PIECE, self.position), b""
        self.position += len(data)
        self._mark = (self._mark + data[-MARK:])[-MARK:]
        self.read_bytes += len(data)
        feed(data)
        return bool(data)


def old_bytes(path: str, start: tuple | None) -> bytes:
    """The last piece of what was in the log before the run, b"" where there was nothing."""
    if start is None or start[2] == 0:
        return b""
    try:
        with open(path, "rb", buffering=0) as handle:
            about = os.fstat(handle.fileno())
            if (about.st_dev, about.st_ino) != start[:2]:
                return b""
            return os.pread(handle.fileno(), min(PIECE, start[2]), max(start[2] - PIECE, 0))
    except OSError:
        return b""


def last_lines(path: str, since: float) -> tuple:
    """The last lines of a file that was written to after I(since), CLOCK_BOOTTIME s; () where there are none, or none can be read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)) as handle:
            about = os.fstat(handle.fileno())
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - since
            if not stat.S_ISREG(about.st_mode) or about.st_mtime + TICK < time.time() - age:
                return ()
            handle.seek(max(about.st_size - LAST_BYTES, 0))
            lines = handle.read(LAST_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(line for line in lines if line.strip())[-LAST_LINES:]


def mount_of(path: str, mountinfo: str = "/proc/self/mountinfo") -> str:
    """Mount point of I(path) with type and options, for the reader of a verdict."""
    best, words = "", ""
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as handle:
            for line in handle:
                left, _dash, right = line.partition(" - ")
                point, options = left.split()[4:6]
                if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
                    best, words = point, "%s %s %s" % (point, right.split()[0], options)
    except (OSError, ValueError, IndexError):
        return ""
    return words


def looks_full(path: str) -> bool:
    """Whether the file system of a log has no room, or takes no writes."""
    try:
        about = os.statvfs(os.path.dirname(path))
    except OSError:
        return True
    full = about.f_bavail == 0 or (about.f_files > 0 and about.f_favail == 0)
    return full or bool(about.f_flag & os.ST_RDONLY)


def _try_write(path: str, user: str) -> str:
    """Name of the errno that a write at I(path) gives to I(user), "" when it can be written. Runs in a child."""
    folder = os.path.dirname(path)
    probe = os.path.join(folder, ".launchproof-probe-%d" % os.getpid())
    try:
        if user and os.geteuid() == 0:
            entry = pwd.getpwnam(user)
            os.initgroups(user, entry.pw_gid)
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
        if os.path.lexists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC))
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.unlink(probe)
            os.write(descriptor, b"\0" * PROBE_BYTES)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except KeyError:
        return ""
    except OSError as error:
        if error.errno == errno.EACCES and os.path.lexists(path) and os.access(path, os.W_OK):
            return ""  # the folder takes no new files, but the log itself can be written
        return errno.errorcode.get(error.errno, str(error.errno))
    return ""


def _number(user: str) -> int | None:
    """The number of a user, None where there is none of that name."""
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return int(user) if user.isdigit() else None


def probe_place(path: str, user: str) -> LogPlace | Unknown:
    """Try to write one block beside the log as the job's user, and remove it again. Only root can be another user."""
    if os.geteuid() not in (0, _number(user)):
        return Unknown("whether %s can write at %s can be tried by root and %s alone" % (user, path, user))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, _try_write(path, user).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="ascii") as handle:
        error = handle.read()
    os.waitpid(child, 0)
    free_bytes = free_inodes = None
    folder = os.path.dirname(path)
    try:
        about = os.statvfs(folder)
        free_bytes = about.f_bavail * about.f_frsize
        free_inodes = about.f_favail if about.f_files else None
    except OSError:
        pass
    return LogPlace(
        path=path,
        error=error,
        free_bytes=free_bytes,
        free_inodes=free_inodes,
        user=user,
        mount=mount_of(os.path.realpath(folder)),
    )
