# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a log's bytes say: fed piece by piece, in bounded memory, without I/O.

One ``Scanner`` belongs to one run's bytes of one log. The collector feeds it what it read, and asks for a ``Log``.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from statistics import median
from typing import Any, Callable

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Log, Match, Progress
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import (
    DEFAULT_FORBIDDEN,
    FORBIDDEN_WORDS,
    RANK,
    ProgressSpec,
    Spec,
)

# A longer line is handed on in pieces of this many bytes, so that a log without line ends costs no more memory than
# this.
MAX_LINE = 64 * 1024
# What is kept of a line for people to read, characters, and how many of the last lines.
KEPT_CHARS = 400
# What of a line is redacted in order to keep that much, characters.
READ_CHARS = 4000
KEPT_LINES = 20
# Gaps between advances that are remembered for the job's own pace.
KEPT_GAPS = 63
# Tracebacks that may be open at the same time, one a rank.
KEPT_TRACEBACKS = 64
# Lines of nobody after which one that is still open is given up.
KEPT_OPEN = 100
# The lines of an exception's message are written at once, s: what comes later shows that the job goes on.
MESSAGE_S = 5.0

TRACEBACK = "uncaught exception"
_HEADER = re.compile(
    r"^(?P<prefix>.*?)(?:Exception Group )?Traceback \(most recent call last\)(?::\s*$|[ \u2500]*[\u256e\u2510]?\s*$)"
)
# A SyntaxError in the main script has no header.
_SYNTAX = re.compile(r'^(?P<prefix>(?:\[\w+\]: ?)?)  File "[^"]*", line \d+$')
# A class that was defined in a function is main.<locals>.BadBatch.
_EXCEPTION = re.compile(r"^[A-Za-z_](?:[\w.]|<\w+>)*(?::(?: .*)?)?$")
# More of an exception's message. A bar begins with its number: "  5%|".
_MESSAGE = re.compile(r"[ \t]+[^\s\d]")
# What launchers put before every line of a rank.
_TAG = re.compile(r"(?:\[[\w,.-]+\](?:<\w+>)?:? ?)+")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
# The line before the header of a traceback of which Python, or logging, says that nothing came of it.
_IGNORED = re.compile(r"Exception ignored (?:in|on|while)\b|--- Logging error ---|Error in atexit\._run_exitfuncs:")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# Backspaces, to column 1, whole line erased: a bar that is drawn anew begins with one of these where it has no \r.
_REDRAWS = (b"\b", b"\x1b[1G", b"\x1b[G", b"\x1b[2K")


def same(text: str) -> str:
    """Return the text as it is: the redaction of a job without secrets."""
    return text


class LineSplitter:
    r"""Cuts bytes into lines at \n and \r, and where a bar is drawn anew without them, whatever pieces they come in.

    NUL bytes are left out before anything is counted: copytruncate leaves a hole of them as long as the old log.
    """

    def __init__(self, max_line: int = MAX_LINE) -> None:
        self._max = max_line
        self._pending = b""
        # Bytes taken so far, NULs left out.
        self.taken = 0
        # Whether a line was longer than the bound.
        self.cut = False

    @property
    def pending(self) -> tuple[int, bytes]:
        """Offset and bytes of the line that has no end yet."""
        return self.taken - len(self._pending), self._pending

    def flush(self) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the line that has no end yet, and forget it: nobody will end it."""
        offset, line = self.pending
        self._pending = b""
        if line:
            yield offset, line, True

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes, bool]]:
        """Yield (offset, line without its end, whole) for each non-empty line that the data completes.

        ``whole`` is False for every piece but the first of a line longer than the bound.
        """
        if b"\0" in data:
            data = data.replace(b"\0", b"")
        offset = self.taken - len(self._pending)
        self.taken += len(data)
        data = (self._pending + data).replace(b"\r", b"\n")
        # Nearly every log is spared more than a look for two bytes.
        if b"\b" in data or b"\x1b" in data:
            for redraw in _REDRAWS:
                data = data.replace(redraw, b"\n" * len(redraw))  # offsets stay true
        lines = data.split(b"\n")
        self._pending = b""
        last = len(lines) - 1
        for index, line in enumerate(lines):
            whole = True
            while len(line) > self._max:
                self.cut = True
                yield offset, line[: self._max], whole
                offset, line, whole = offset + self._max, line[self._max :], False
            if index == last:
                self._pending = line
            elif line:
                yield offset, line, whole
            offset += len(line) + 1


@dataclass
class _Traceback:
    """A traceback that is being read."""

    # What is quoted: the exception's line, before that comes the header or a line inside that names one.
    quoted: tuple[str, int, float]
    # How many later lines there had been when its last line came.
    later: int
    # It is said that nothing came of it.
    ignored: bool
    # One of its lines began with the header's prefix: the others do, too.
    tagged: bool = False
    # The exception's line has come; what is indented directly after it is the rest of its message.
    complete: bool = False


class TracebackTracker:
    """Finds the last line of a Python traceback, and counts the lines that came after it."""

    def __init__(self) -> None:
        # By the header's prefix: ranks that share a log write theirs at the same time.
        self._open: dict[str, _Traceback] = {}
        self._found: _Traceback | None = None
        # What is chained to an ignored exception is ignored, too.
        self._ignored = False
        # Lines of no traceback.
        self._later = 0
        self._before = ""

    def line(self, text: str, offset: int, at: float) -> None:
        """Take the next non-empty line."""
        before, self._before = self._before, text
        # The plain searches spare nearly every line the regular expressions.
        started = "Traceback (" in text and _HEADER.match(_COLOUR.sub("", text))
        if not started and not self._open and '  File "' in text:
            started = _SYNTAX.match(text)
        if started:
            self._start(started["prefix"], (_COLOUR.sub("", text), offset, at), before)
        elif not self._open or not self._continues(_COLOUR.sub("", text), offset, at):
            self._later += 1

    def match(self, keep: Callable[[str], str] = same) -> Match | None:
        """Return the exception's last line as a match, None when there was none."""
        unfinished = [item for item in self._open.values() if not item.complete and not item.ignored]
        item = unfinished[-1] if unfinished else self._found
        if item is None:
            return None
        text, offset, at = item.quoted
        return Match(TRACEBACK, keep(text), offset, at, "traceback", self._later - item.later)

    def _start(self, prefix: str, quoted: tuple[str, int, float], before: str) -> None:
        self._close(prefix)
        if len(self._open) >= KEPT_TRACEBACKS:
            self._close(next(iter(self._open)))
        ignored = bool(_IGNORED.search(before)) or (self._ignored and any(words in before for words in _CHAINED))
        self._open[prefix] = _Traceback(quoted, self._later, ignored)

    def _continues(self, text: str, offset: int, at: float) -> bool:
        """Whether the line belongs to an open traceback, which takes it."""
        prefix, body = self._owner(text)
        if prefix is None:
            # Nobody's line: what comes after it is no message any more, and a rank that died amid its traceback will not
            # end it.
            for name, item in [*self._open.items()]:
                if item.complete or self._later - item.later >= KEPT_OPEN:
                    self._close(name)
            return False
        item = self._open[prefix]
        item.tagged |= body is not text
        # Frames, exception groups, carets, the box that rich draws, and the frame that loguru points at.
        inside = body[:1] in " \t|+^~\u2502\u256d\u2570" or body.startswith('> File "')
        if item.complete:
            if at - item.quoted[2] < MESSAGE_S and _MESSAGE.match(body):
                item.later = self._later
                return True
            self._close(prefix)
            return False
        if inside or body.startswith(_CHAINED):
            if re.match(r"[\s|+]+[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b", body):
                item.quoted = (text, offset, at)
            item.later = self._later
            return True
        exception = bool(_EXCEPTION.match(body))
        if exception:
            item.quoted, item.later = (text, offset, at), self._later
        else:
            del self._open[prefix]
        item.complete, self._ignored = True, item.ignored
        self._end(item)
        return exception

    def _owner(self, text: str) -> tuple[str | None, str]:
        """Return the prefix of the open traceback that the line may belong to, and the line without it."""
        for prefix in self._open:
            if prefix and text.startswith(prefix):
                return prefix, text[len(prefix) :]
        # A logger writes its prefix before the header alone, a rank before every line.
        tag = _TAG.match(text)
        bare = [
            prefix for prefix, item in self._open.items() if not item.tagged and not (tag and _TAG.fullmatch(prefix))
        ]
        return (bare[-1], text) if bare else (None, text)

    def _close(self, prefix: str) -> None:
        item = self._open.pop(prefix, None)
        if item and not item.complete:
            self._end(item)

    def _end(self, item: _Traceback) -> None:
        # One that never came to its end may be older than what was found since.
        if not item.ignored and (self._found is None or item.quoted[1] > self._found.quoted[1]):
            self._found = item


class ProgressReader:
    """Reads progress values out of lines and keeps their pace."""

    def __init__(self, spec: ProgressSpec) -> None:
        self._spec = spec
        self._search = re.compile(spec.pattern).search if spec.pattern is not None else None
        self._path = (spec.json_field or "").split(".")
        self._gaps: deque[float] = deque(maxlen=KEPT_GAPS)
        self._changes = 0
        self._first: tuple[Any, float] | None = None
        self._last: Any = None
        self._changed_at = 0.0
        self._offset = 0

    def line(self, text: str, offset: int, at: float) -> None:
        """Take the next line."""
        value = self._value(text)
        if value is None:
            return
        if self._first is None:
            self._first = (value, at)
        elif value != self._last:
            self._gaps.append(at - self._changed_at)
            self._changes += 1
        else:
            return
        self._last, self._changed_at, self._offset = value, at, offset

    def progress(self) -> Progress | None:
        """Return what was seen, None before the first value."""
        if self._first is None:
            return None
        return Progress(
            first=self._first[0],
            last=self._last,
            changes=self._changes,
            first_at=self._first[1],
            changed_at=self._changed_at,
            offset=self._offset,
            median_gap=median(self._gaps) if len(self._gaps) >= 3 else None,
        )

    def ranks(self) -> tuple[str, ...]:
        """Return the ranks that were seen: here nobody tells them apart."""
        return ()

    def _value(self, text: str) -> float | str | None:
        if self._search is not None:
            match = self._search(text)
            raw = match[self._spec.group] if match else None
        else:
            raw = self._field(text)
        if raw is None or isinstance(raw, (bool, dict, list)):
            return None
        try:
            value = float(raw)
        except (ValueError, OverflowError):
            return raw
        # NaN differs from itself and would seem to advance for ever.
        return value if isfinite(value) else str(raw)

    def _field(self, text: str) -> Any:
        start = text.find("{")
        if start < 0:
            return None
        try:
            value = json.loads(text[start:])
        except (ValueError, RecursionError):
            return None
        for name in self._path:
            value = value.get(name) if isinstance(value, dict) else None
        return value


class RanksReader:
    """The same of several ranks that share the log; what it tells is of the one that is furthest behind."""

    def __init__(self, spec: ProgressSpec) -> None:
        self._spec = spec
        self._search = re.compile(spec.pattern).search
        self._readers: dict[str, ProgressReader] = {}

    def line(self, text: str, offset: int, at: float) -> None:
        """Take the next line."""
        match = self._search(text)
        if match and match[RANK] is not None:
            self._readers.setdefault(match[RANK], ProgressReader(self._spec)).line(text, offset, at)

    def ranks(self) -> tuple[str, ...]:
        """Return the ranks that were seen."""
        return tuple(sorted(self._readers))

    def progress(self) -> Progress | None:
        """Return what was seen, None before each rank has a value."""
        found = {rank: reader.progress() for rank, reader in sorted(self._readers.items())}
        if len(found) < self._spec.ranks or None in found.values():
            return None
        numeric = all(isinstance(item.last, float) for item in found.values())
        # Ranks in step stand together: the smallest value is of the one that is waited for.
        rank = min(found, key=lambda name: (found[name].last if numeric else 0, found[name].changed_at))
        return replace(
            found[rank],
            changes=min(item.changes for item in found.values()),
            changed_at=min(item.changed_at for item in found.values()),
            rank=rank,
            ranks={name: item.last for name, item in found.items()},
        )


class Scanner:
    """All that a spec asks of a log, over one run's bytes."""

    def __init__(self, spec: Spec, redact: Callable[[str], str] = same) -> None:
        """``redact`` is applied to every line that is kept; patterns see the line as it was written."""
        # Redacted before it is cut to what is kept: half a secret is one too. Most of the tail is asked for again.
        self._keep = lru_cache(maxsize=4 * KEPT_LINES)(lambda text: redact(text[:READ_CHARS])[:KEPT_CHARS])
        self._splitter = LineSplitter()
        # Required patterns that nothing has matched yet.
        self._open = {pattern: re.compile(pattern).search for pattern in spec.log.required}
        self._found: dict[str, Match | None] = dict.fromkeys(spec.log.required)
        self._done = re.compile(spec.done.pattern) if spec.done else None
        self._done_match: Match | None = None
        self._declared = [(pattern, re.compile(pattern).search) for pattern in spec.log.forbidden]
        self._default = [
            (pattern, re.compile(pattern).search)
            for pattern in DEFAULT_FORBIDDEN
            if spec.log.default_forbidden and pattern not in spec.log.forbidden
        ]
        # Pattern → its last match and the number of that line.
        self._hits: dict[str, tuple[Match, int]] = {}
        self._traceback = TracebackTracker() if spec.log.default_forbidden else None
        self._progress: ProgressReader | RanksReader | None = None
        if spec.progress:
            self._progress = (RanksReader if spec.progress.ranks > 1 else ProgressReader)(spec.progress)
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._lines = 0
        self._written_at: float | None = None

    def feed(self, data: bytes, at: float) -> None:
        """Take the next bytes of this run, read at CLOCK_BOOTTIME ``at``."""
        before = self._splitter.taken
        self._lines_at(self._splitter.feed(data), at)
        if self._splitter.taken > before:
            self._written_at = at

    def settle(self, at: float, ended: bool = False) -> None:
        """Look at the last line although it has no end: the writer pauses, or has ended.

        Progress is read from it only when the writer has ended: ``step=1`` may be about to become ``step=12``.
        """
        if ended:
            self._lines_at(self._splitter.flush(), at)
            return
        offset, line = self._splitter.pending
        if line:
            self._scan(_text(line), offset, at)

    def log(self, path: str, **identity: Any) -> Log:
        """Return the facts; ``identity`` are the fields of Log that only the collector knows (exists, size, old_match …)."""
        forbidden = [
            Match(**{**vars(match), "lines_after": self._lines - number}) for match, number in self._hits.values()
        ]
        traceback = self._traceback.match(self._keep) if self._traceback else None
        if traceback:
            forbidden.append(traceback)
        tail = [self._keep(text) for text in self._tail]
        pending = self._splitter.pending[1]
        if pending:
            tail = (tail + [self._keep(_text(pending))])[-KEPT_LINES:]
        return Log(
            path=path,
            new_bytes=self._splitter.taken,
            written_at=self._written_at,
            required=dict(self._found),
            forbidden=tuple(sorted(forbidden, key=lambda match: match.offset)),
            done=self._done_match,
            progress=self._progress.progress() if self._progress else None,
            ranks=self._progress.ranks() if self._progress else (),
            tail=tuple(tail),
            cut_at=MAX_LINE if self._splitter.cut else None,
            **identity,
        )

    def _lines_at(self, lines: Iterator[tuple[int, bytes, bool]], at: float) -> None:
        for offset, line, whole in lines:
            text = _text(line)
            self._scan(text, offset, at)
            if self._progress:
                self._progress.line(text, offset, at)
            if whole:
                self._lines += 1
                self._tail.append(text[:READ_CHARS])
                if self._traceback:
                    self._traceback.line(text, offset, at)

    def _scan(self, text: str, offset: int, at: float) -> None:
        for pattern, search in [*self._open.items()]:
            if search(text):
                self._found[pattern] = self._match(pattern, text, offset, at)
                del self._open[pattern]
        if self._done and self._done_match is None and self._done.search(text):
            self._done_match = self._match(self._done.pattern, text, offset, at)
        for pattern, search in self._declared:
            if search(text):
                self._hit(pattern, text, offset, at, "declared")
        if any(word in text for word in FORBIDDEN_WORDS):
            for pattern, search in self._default:
                if search(text):
                    self._hit(pattern, text, offset, at, "default")

    def _hit(self, pattern: str, text: str, offset: int, at: float, kind: str) -> None:
        self._hits[pattern] = (self._match(pattern, text, offset, at, kind), self._lines + 1)

    def _match(self, pattern: str, text: str, offset: int, at: float, kind: str = "declared") -> Match:
        return Match(pattern, self._keep(text), offset, at, kind)


def find_old(spec: Spec, data: bytes, at: float, redact: Callable[[str], str] = same) -> Match | None:
    """Return the line of older content that a check without a baseline would have believed, None when there is none.

    ``data`` is the end of what the log held before this run.
    """
    patterns = [*spec.log.required]
    if spec.progress and spec.progress.pattern:
        patterns.append(spec.progress.pattern)
    if spec.done:
        patterns.append(spec.done.pattern)
    reader = ProgressReader(spec.progress) if spec.progress and spec.progress.json_field else None
    for offset, line, _cut in LineSplitter().feed(data + b"\n"):
        text = _text(line)
        for pattern in patterns:
            if re.search(pattern, text):
                return Match(pattern, redact(text[:READ_CHARS])[:KEPT_CHARS], offset, at)
        if reader:
            reader.line(text, offset, at)
            if reader.progress():
                return Match(spec.progress.json_field, redact(text[:READ_CHARS])[:KEPT_CHARS], offset, at)
    return None


def _text(line: bytes) -> str:
    # Undecodable bytes stay readable, and the text stays encodable.
    return line.decode("utf-8", "backslashreplace")
