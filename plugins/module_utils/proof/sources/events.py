# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One epoll loop, and inotify over ctypes (the standard library has none)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import struct

IN_ACCESS, IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE, IN_OPEN = 0x1, 0x2, 0x4, 0x8, 0x20
IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x40, 0x80, 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF, IN_IGNORED, IN_ONLYDIR = 0x400, 0x800, 0x8000, 0x01000000
NAMES = IN_CREATE | IN_DELETE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE_SELF | IN_MOVE_SELF
CONTENT = IN_MODIFY | IN_ATTRIB | IN_OPEN | IN_MOVE_SELF | IN_DELETE_SELF
_HEADER = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len; inotify(7)

_libc = ctypes.CDLL(None, use_errno=True)


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: a unit takes three, and systemd gives 1024 by default."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Loop:
    """Callbacks by file descriptor and by watched path.

    A callback of a path gets C(mask, name): the inotify bits, and the entry's name where a folder is watched. C(blind): no path
    can be watched, because the user's inotify instances are used up (fs.inotify.max_user_instances is 128 by default, and
    containers share it); whoever waits has to look by himself.
    """

    def __init__(self):
        self._epoll = select.epoll()
        self._callbacks = {}
        self._watches = {}  # wd -> {key: callback}; the kernel gives one wd for one inode however often it is asked
        self._keys = {}  # key -> wd
        self._next_key = 0
        self._inotify = _libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self.blind = self._inotify < 0
        if not self.blind:
            self.add(self._inotify, self._read_inotify)

    def add(self, descriptor: int, callback) -> None:
        self._callbacks[descriptor] = callback
        self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        if self._callbacks.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def watch(self, path: str, mask: int, callback) -> int | None:
        """Watch I(path) and return a key for unwatch(), or None where it cannot be watched (absent, no rights, limit)."""
        wd = (
            -1 if self.blind else _libc.inotify_add_watch(self._inotify, os.fsencode(path), mask | 0x20000000)
        )  # IN_MASK_ADD
        if wd < 0:
            return None
        key = self._next_key = self._next_key + 1
        self._watches.setdefault(wd, {})[key] = callback
        self._keys[key] = wd
        return key

    def unwatch(self, key: int | None) -> None:
        wd = self._keys.pop(key, None)
        if wd is None:
            return
        callbacks = self._watches.get(wd, {})
        callbacks.pop(key, None)
        if not callbacks and self._watches.pop(wd, None) is not None:
            _libc.inotify_rm_watch(self._inotify, wd)

    def _read_inotify(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._inotify, 65536)
            offset = 0
            while offset < len(data):
                wd, mask, _cookie, length = _HEADER.unpack_from(data, offset)
                offset += _HEADER.size
                name = data[offset : offset + length].rstrip(b"\0").decode(errors="surrogateescape")
                offset += length
                if wd == -1:  # IN_Q_OVERFLOW: events were lost, so everybody looks again
                    targets = [callback for callbacks in self._watches.values() for callback in callbacks.values()]
                else:
                    targets = list(self._watches.get(wd, {}).values())
                if mask & IN_IGNORED:
                    for key in self._watches.pop(wd, {}):
                        self._keys.pop(key, None)
                for callback in targets:
                    callback(mask, name)

    def step(self, timeout: float) -> bool:
        """Wait at most I(timeout) s for events and call back. Return whether any came."""
        events = self._epoll.poll(max(timeout, 0))
        for descriptor, _mask in events:
            callback = self._callbacks.get(descriptor)
            if callback is not None:
                callback()
        return bool(events)

    def close(self) -> None:
        self._epoll.close()
        if not self.blind:
            os.close(self._inotify)
