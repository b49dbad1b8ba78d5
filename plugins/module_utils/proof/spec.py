# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The proof spec: what a job must show before it counts as launched. Validation and defaults, no I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Callable

# The group of a progress pattern that tells ranks apart.
RANK = "rank"
LEVELS = ("consistent", "proved_from_node", "proved")

# Anywhere in a line; written so that no healthy line that merely says "error" matches. An uncaught Python exception
# is not in this list: it counts only where it ends the log, which takes the scanner, not a pattern (scan.py).
DEFAULT_FORBIDDEN = (
    # Not "CUDA out of memory retries: 0", which counts.
    r"CUDA out of memory(?!(?: \w+)?[:=] ?\d+(?![\d.]| ?[KMGT]?i?B))",
    r"CUDA error: (?!0\b|.*\bno error\b)",
    r"[Ww]atchdog caught collective operation timeout|NCCL .*communicator was aborted",
    r"NCCL (?:WARN|error).*(?:unhandled (?:cuda|system) error|[Tt]imeout|abort)",
    # As shells, MPI, UCX and faulthandler report it: not "Segmentation fault (SIGSEGV) handler installed".
    r"(?:^|[\d:\])(])\s*Segmentation fault(?:\s*$|\s{2,}\S|\s*\((?:core dumped|11)\)|: (?:\d|address|invalid))",
    r"No space left on device",
    r"^Fatal Python error: ",
    r"terminate called (?:after throwing|without an active exception)",
)

# One of these stands in every line that a default pattern matches: most lines need no regular expression.
FORBIDDEN_WORDS = ("CUDA", "NCCL", "atchdog", "Segmentation", "No space left", "terminate called", "Fatal Python")


class SpecError(ValueError):
    """A proof spec that cannot be used.

    ``field`` is the full path of the offending field (``launchproof_jobs[0].proof.log.required[1]``), ``value`` what was
    given, ``fix`` what to write instead; ``str()`` is all three in one sentence.
    """

    def __init__(self, field: str, value: Any, fix: str) -> None:
        self.field, self.value, self.fix = field, value, fix
        super().__init__(f"{field} is {value!r}: {fix}")


@dataclass(frozen=True)
class ProcessSpec:
    """Which processes must live."""

    # Least number of live processes (zombies do not count) in the unit's group, the main process included.
    count: int = 1
    # The same main process must live this long, s.
    stable_for: float = 5.0


@dataclass(frozen=True)
class LogSpec:
    """What the log must and must not say. Patterns are Python regular expressions, searched in each line."""

    # Absolute path, or a glob where count > 1; None = the run's own log.
    path: str | None = None
    required: tuple[str, ...] = ()
    # The job's own forbidden patterns; they speak at once.
    forbidden: tuple[str, ...] = ()
    # Whether DEFAULT_FORBIDDEN and uncaught exceptions are forbidden too.
    default_forbidden: bool = True
    # At least one byte of this run is required. False only for a job that is rightly mute.
    fresh: bool = True
    # Number of log files declared, for a job that writes one a shard.
    count: int = 1


@dataclass(frozen=True)
class ProgressSpec:
    """How progress is read, and how fast it must come. Exactly one of pattern and json_field is set."""

    # Regular expression with a named group, whose text is the value.
    pattern: str | None = None
    # Name of that group.
    group: str = ""
    # Processes that share the log and work in step: group "rank" of the pattern tells them apart, and each must advance.
    ranks: int = 1
    # Field of a JSON line, dotted for a nested one ("metrics.step").
    json_field: str | None = None
    # After the first value it must change once more within this time, s; also the least stall threshold.
    within: float = 120.0
    # Stalled after this long without a change, s; None = the larger of within and stall_factor × the job's own median
    # gap.
    stall_after: float | None = None
    stall_factor: float = 10.0


@dataclass(frozen=True)
class GpuSpec:
    """Which step of the GPU proof ladder is enough."""

    level: str = "consistent"
    # Least memory on each declared GPU, bytes.
    memory_floor: int = 64 * 1024 * 1024
    # Time for it, s since the start; None = the first_progress deadline.
    within: float | None = None


@dataclass(frozen=True)
class ObjectsSpec:
    """Where objects must grow: an s3:// prefix, or a folder."""

    uri: str
    # The number must have risen by min_new against the baseline within this time, s since the first progress where progress
    # is declared, else since the start.
    within: float = 600.0
    min_new: int = 1


@dataclass(frozen=True)
class HeartbeatSpec:
    """A file that the job touches while it is well."""

    path: str
    # Greatest age of its last write, s.
    max_age: float = 60.0


@dataclass(frozen=True)
class DoneSpec:
    """For jobs that end: exit status 0 and this pattern in the log is success."""

    pattern: str


@dataclass(frozen=True)
class DeadlineSpec:
    """How long each stage may take, s since the run's start (since the baseline as long as there is no run)."""

    # A new invocation and its processes must be there.
    start: float = 10.0
    first_log: float = 60.0
    first_progress: float = 900.0
    # The hard end of the proof, s since the baseline; None = computed, so that every other deadline falls before it.
    total: float | None = None


@dataclass(frozen=True)
class LauncherSpec:
    """Evidence left by a launcher that is not ours: what it ran, what came back."""

    # The shell script or command line as it was sent.
    script: str = ""
    # Its exit status as the caller saw it; None = not known.
    rc: int | None = None
    # What it printed.
    output: str = ""
    # Text that its last line would have printed ("Launched"); "" = it has none.
    end_mark: str = ""


@dataclass(frozen=True)
class Spec:
    """A whole, validated proof spec."""

    process: ProcessSpec = ProcessSpec()
    log: LogSpec = LogSpec()
    progress: ProgressSpec | None = None
    gpu: GpuSpec | None = None
    objects: ObjectsSpec | None = None
    heartbeat: HeartbeatSpec | None = None
    done: DoneSpec | None = None
    deadlines: DeadlineSpec = DeadlineSpec()
    launcher: LauncherSpec | None = None

    @property
    def total(self) -> float:
        """The hard end: s since the baseline where it is declared, else since the run's start."""
        if self.deadlines.total is not None:
            return self.deadlines.total
        ends = [self.deadlines.start + self.process.stable_for, self.deadlines.first_log]
        if self.progress:
            ends.append(self.deadlines.first_progress + self.progress.within)
        if self.gpu:
            ends.append(self.gpu_within)
        if self.objects:
            ends.append(self.objects.within + (self.deadlines.first_progress if self.progress else 0.0))
        if self.heartbeat:
            ends.append(self.deadlines.first_progress)
        return self.deadlines.start + max(ends) + 1.0

    @property
    def gpu_within(self) -> float:
        """Deadline of the GPU proof, s since the start."""
        if self.gpu is not None and self.gpu.within is not None:
            return self.gpu.within
        return self.deadlines.first_progress

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data that ``validate`` reads back to an equal spec."""
        return {
            key: {
                k: list(v) if isinstance(v, tuple) else v
                for k, v in value.items()
                if not (key == "progress" and k == "group")
            }
            for key, value in asdict(self).items()
            if value is not None
        }


def validate(data: Any, where: str = "proof") -> Spec:
    """Return the spec that ``data`` declares.

    ``data`` is a mapping as in a job's ``proof`` (None and {} = all defaults), ``where`` the path of it for messages.
    Raises SpecError on the first field that cannot be used.
    """
    root = _Section(data, where)
    spec = Spec(
        process=_process(root.section("process")) or ProcessSpec(),
        log=_log(root.section("log")) or LogSpec(),
        progress=_progress(root.section("progress")),
        gpu=_gpu(root.section("gpu")),
        objects=_objects(root.section("objects")),
        heartbeat=_heartbeat(root.section("heartbeat")),
        done=_done(root.section("done")),
        deadlines=_deadlines(root.section("deadlines")) or DeadlineSpec(),
        launcher=_launcher(root.section("launcher")),
    )
    root.finish()
    return spec


def _process(s: _Section | None) -> ProcessSpec | None:
    if s is None:
        return None
    spec = ProcessSpec(count=s.integer("count", 1, least=1), stable_for=s.seconds("stable_for", 5.0, zero=True))
    return s.finish(spec)


def _log(s: _Section | None) -> LogSpec | None:
    if s is None:
        return None
    path, count = s.text("path", None), s.integer("count", 1, least=1)
    if path is not None and not path.startswith("/"):
        raise SpecError(f"{s.where}.path", path, "write an absolute path, or leave it out for the run's own log")
    if count > 1 and (path is None or not re.search(r"[*?\[]", path)):
        raise SpecError(f"{s.where}.path", path, f"write a glob that finds the {count} logs declared by count")
    spec = LogSpec(
        path=path,
        required=s.patterns("required"),
        forbidden=s.patterns("forbidden"),
        default_forbidden=s.boolean("default_forbidden", True),
        fresh=s.boolean("fresh", True),
        count=count,
    )
    if not spec.fresh and spec.required:
        raise SpecError(f"{s.where}.fresh", False, "leave it out: a required pattern needs lines of this run")
    return s.finish(spec)


def _progress(s: _Section | None) -> ProgressSpec | None:
    if s is None:
        return None
    pattern, json_field = s.pattern("pattern", None), s.text("json_field", None)
    ranks = s.integer("ranks", 1, least=1)
    if (pattern is None) == (json_field is None):
        raise SpecError(s.where, s.data, "give exactly one of pattern and json_field")
    if ranks > 1 and pattern is None:
        raise SpecError(f"{s.where}.ranks", ranks, "give a pattern, whose group rank tells them apart, or leave it out")
    group = ""
    if pattern is not None:
        groups = [name for name in re.compile(pattern).groupindex if name != RANK or ranks == 1]
        if ranks > 1 and RANK not in re.compile(pattern).groupindex:
            raise SpecError(
                f"{s.where}.pattern",
                pattern,
                rf"name the group that tells the {ranks} ranks apart: rank=(?P<{RANK}>\d+)",
            )
        if not groups:
            raise SpecError(
                f"{s.where}.pattern", pattern, r"name the group that holds the value, e.g. step=(?P<step>\d+)"
            )
        group = groups[0]
    if json_field == "":
        raise SpecError(f"{s.where}.json_field", json_field, "name the field that holds the value, e.g. step")
    spec = ProgressSpec(
        pattern=pattern,
        group=group,
        ranks=ranks,
        json_field=json_field,
        within=s.seconds("within", 120.0),
        stall_after=s.seconds("stall_after", None),
        stall_factor=s.number("stall_factor", 10.0, least=1.0),
    )
    return s.finish(spec)


def _gpu(s: _Section | None) -> GpuSpec | None:
    if s is None:
        return None
    level = s.text("level", "consistent")
    if level not in LEVELS:
        raise SpecError(f"{s.where}.level", level, f"write one of {', '.join(LEVELS)}")
    spec = GpuSpec(
        level=level,
        memory_floor=s.integer("memory_floor", GpuSpec.memory_floor, least=0),
        within=s.seconds("within", None),
    )
    return s.finish(spec)


def _objects(s: _Section | None) -> ObjectsSpec | None:
    if s is None:
        return None
    uri, path = s.text("uri", None), s.text("path", None)
    if (uri is None) == (path is None):
        raise SpecError(s.where, s.data, "give exactly one of uri (s3://bucket/prefix) and path (an absolute folder)")
    place = uri if uri is not None else path
    if not re.match(r"s3://[^/]+|/", place):
        raise SpecError(
            f"{s.where}.{'uri' if uri is not None else 'path'}", place, "write s3://bucket/prefix or an absolute folder"
        )
    spec = ObjectsSpec(uri=place, within=s.seconds("within", 600.0), min_new=s.integer("min_new", 1, least=1))
    return s.finish(spec)


def _heartbeat(s: _Section | None) -> HeartbeatSpec | None:
    if s is None:
        return None
    path = s.text("path", "")
    if not path.startswith("/"):
        raise SpecError(f"{s.where}.path", path, "write the absolute path of the job's heartbeat file")
    return s.finish(HeartbeatSpec(path=path, max_age=s.seconds("max_age", 60.0)))


def _done(s: _Section | None) -> DoneSpec | None:
    if s is None:
        return None
    pattern = s.pattern("pattern", None)
    if pattern is None:
        raise SpecError(
            f"{s.where}.pattern", None, "write the pattern of the line that the job prints when its work is complete"
        )
    return s.finish(DoneSpec(pattern=pattern))


def _deadlines(s: _Section | None) -> DeadlineSpec | None:
    if s is None:
        return None
    spec = DeadlineSpec(
        start=s.seconds("start", 10.0),
        first_log=s.seconds("first_log", 60.0),
        first_progress=s.seconds("first_progress", 900.0),
        total=s.seconds("total", None),
    )
    return s.finish(spec)


def _launcher(s: _Section | None) -> LauncherSpec | None:
    if s is None:
        return None
    spec = LauncherSpec(
        script=s.text("script", ""),
        rc=s.integer("rc", None, least=-255),
        output=s.text("output", ""),
        end_mark=s.text("end_mark", ""),
    )
    return s.finish(spec)


class _Section:
    """One mapping of the spec: typed reads that know their path, and a check for keys that nobody read."""

    def __init__(self, data: Any, where: str) -> None:
        if data is None:
            data = {}
        if not isinstance(data, Mapping):
            raise SpecError(where, data, "write a mapping of fields")
        self.data, self.where, self._read = data, where, []

    def section(self, key: str) -> _Section | None:
        value = self._get(key, None)
        return None if value is None else _Section(value, f"{self.where}.{key}")

    def finish(self, spec: Any = None) -> Any:
        for key in self.data:
            if key not in self._read:
                raise SpecError(
                    f"{self.where}.{key}", self.data[key], f"no such field; there are {', '.join(sorted(self._read))}"
                )
        return spec

    def text(self, key: str, default: str | None) -> Any:
        value = self._get(key, default)
        if value is not default and not isinstance(value, str):
            raise SpecError(f"{self.where}.{key}", value, "write a text")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        # Ansible's -e key=value gives text.
        words = {"true": True, "yes": True, "false": False, "no": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if not isinstance(value, bool):
            raise SpecError(f"{self.where}.{key}", value, "write true or false")
        return value

    def seconds(self, key: str, default: float | None, zero: bool = False) -> Any:
        value = self._numeric(key, default, float, "a number of seconds")
        if value is not None and (value < 0 or (value == 0 and not zero)):
            raise SpecError(
                f"{self.where}.{key}", self.data[key], f"write a number of seconds {'from 0 up' if zero else 'above 0'}"
            )
        return value

    def number(self, key: str, default: float, least: float) -> float:
        value = self._numeric(key, default, float, "a number")
        if value < least:
            raise SpecError(f"{self.where}.{key}", self.data[key], f"write a number from {least:g} up")
        return value

    def integer(self, key: str, default: int | None, least: int) -> Any:
        value = self._numeric(key, default, int, "a whole number")
        if value is not None and value < least:
            raise SpecError(f"{self.where}.{key}", self.data[key], f"write a whole number from {least} up")
        return value

    def pattern(self, key: str, default: str | None) -> Any:
        value = self.text(key, default)
        if value is not default:
            _check_pattern(value, f"{self.where}.{key}")
        return value

    def patterns(self, key: str) -> tuple[str, ...]:
        value = self._get(key, ())
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            raise SpecError(f"{self.where}.{key}", value, "write a list of regular expressions")
        for index, item in enumerate(value):
            if not isinstance(item, str):
                raise SpecError(f"{self.where}.{key}[{index}]", item, "write a regular expression as text")
            _check_pattern(item, f"{self.where}.{key}[{index}]")
        return tuple(value)

    def _numeric(self, key: str, default: Any, kind: Callable[[Any], Any], what: str) -> Any:
        value = self._get(key, default)
        if value is None or value is default:
            return value
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)
            if not math.isfinite(number) or (kind is int and number != int(number)):
                raise ValueError
            return kind(number)
        except (TypeError, ValueError):
            raise SpecError(f"{self.where}.{key}", value, f"write {what}") from None

    def _get(self, key: str, default: Any) -> Any:
        self._read.append(key)
        value = self.data.get(key, default)
        return default if value is None else value


def _check_pattern(pattern: str, where: str) -> None:
    if not pattern:
        raise SpecError(where, pattern, "an empty pattern matches every line; write what the line must say")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise SpecError(
            where, pattern, f"not a regular expression ({error}); fix it, or escape the character"
        ) from None
    if compiled.search(""):
        raise SpecError(where, pattern, "it matches an empty line, hence any log; write what the line must say")
