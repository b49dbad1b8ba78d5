# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What lies between two threads of extraction: a bounded queue that can be closed, and attempts that are counted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from common.runtime import TOO_MANY_ERRORS, Fatal, Job

Item = TypeVar("Item")


class Closed(Exception):
    """The other side of a :class:`Handoff` is gone."""


class Handoff(Generic[Item]):
    """A bounded queue that can be closed: ``finish`` lets the taker drain it, ``abort`` wakes both sides at once."""

    def __init__(self, depth: int):
        self._depth = depth
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._finished = False
        self._aborted = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Wait for room, then append; raises Closed after ``abort``."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < self._depth or self._aborted)
            if self._aborted:
                raise Closed
            self._items.append(item)
            self._changed.notify_all()

    def take(self) -> Item:
        """Wait for the next item; raises Closed when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._finished or self._aborted)
            if self._aborted or not self._items:
                raise Closed
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def finish(self) -> None:
        """Nothing more will be put; the taker may have what is there."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def abort(self) -> None:
        """Wake both sides with Closed."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


class Retry:
    """Attempts with a growing pause, for one place that may come back; failures in a row are counted over all of them.

    With the default limit of 8, a place that fails at once may be away for 91 s: 1, 2, 4, 8, 16, 30 and 30.
    """

    LONGEST_PAUSE_S = 30

    def __init__(self, job: Job, limit: int, errors: tuple[type[Exception], ...], first_pause_s: float = 1.0):
        self._job, self._limit, self._errors, self._first = job, limit, errors, first_pause_s
        self._row = 0

    def __call__(self, what: str, action: Callable[[], None]) -> bool:
        """Run ``action`` until it succeeds; False when a stop was requested while it failed; 75 at the limit."""
        while True:
            try:
                action()
            except self._errors as error:
                self._row += 1
                self._job.event("error", what=what, row=self._row, limit=self._limit, msg=str(error)[:300])
                if self._row >= self._limit:
                    raise Fatal(
                        TOO_MANY_ERRORS, "too_many_errors", f"{what} failed {self._row} times in a row: {error}"
                    ) from error
                if self._job.stopping.wait(min(self._first * 2 ** (self._row - 1), self.LONGEST_PAUSE_S)):
                    return False
            else:
                self._row = 0
                return True
