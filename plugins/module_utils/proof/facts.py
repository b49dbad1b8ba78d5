# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What was seen: frozen facts about one unit, each value known or ``Unknown(why)``.

Collectors fill these, ``decide`` reads them, nothing here does any I/O. One ``Baseline`` is taken before the start; after
that every look at the unit is one immutable ``Facts``. All times are seconds of CLOCK_BOOTTIME as float: it is the clock of
``/proc/PID/stat`` start ticks, it does not step, and in LXC it is the only one that agrees with the kernel. (systemd's
``*Monotonic`` properties are CLOCK_MONOTONIC in microseconds: the collector adds the offset between the two clocks.)

Three kinds of "nothing" are kept apart: a value that is really absent (``None``, ``""``, ``()``), a value nobody looked at
because nothing asked for it (``NOT_READ``), and one that could not be read (``Unknown("EACCES on /proc/7/fd")``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, Union

T = TypeVar("T")

# CLD_* of waitid(2), as systemd prints them in ExecMainCode= and as EXIT_CODE in ExecStopPost=.
EXITED, KILLED, DUMPED = 1, 2, 3
#: In the place of a unit's name where a launcher or a pattern is looked at alone.
NO_UNIT = "the job"


@dataclass(frozen=True)
class Unknown:
    """A value that could not be read.

    It is false, so that ``if facts.x`` never takes an unreadable value for evidence.
    """

    # Cause in words, e.g. "EACCES on /proc/7/io". Shown to the user as it is.
    why: str

    def __bool__(self) -> bool:
        return False


# Nothing asked for this value, so nobody looked.
NOT_READ = Unknown("not read")


def known(value: Union[T, Unknown], default: Any = None) -> Any:
    """Return ``value``, or ``default`` where it is unknown."""
    return default if isinstance(value, Unknown) else value


@dataclass(frozen=True)
class Baseline:
    """The state just before the start; a rise against it is this launch's doing."""

    # CLOCK_BOOTTIME at which it was taken, s. Source: clock_gettime. Every deadline without a run counts from here.
    taken_at: float
    # False: this prover (re)starts the unit, only a new invocation counts. True: state observed, watch or diagnose; the
    # invocation that is there now is the run under test, and the log counts from that run's first byte.
    observed: bool = False
    # Invocation id then, "" when none. Source: InvocationID=, else the ledger.
    invocation_id: str | Unknown = ""
    # NRestarts= then. `stop` zeroes it, so it is read after the stop.
    n_restarts: int | Unknown = 0
    # ActiveState= then.
    active_state: str | Unknown = ""
    # Processes of the job alive then (left over in the unit's group; not those that the stop just ended). Source:
    # cgroup.procs, /proc/PID/stat.
    processes: tuple[Process, ...] | Unknown = ()
    # The declared logs that were there then, by path: (device, inode, size in bytes). Source: stat.
    logs: Mapping[str, tuple[int, int, int]] | Unknown = field(default_factory=dict)
    # oom_kill counter, summed over the groups that are read later too (unit and parent slice).
    oom_kills: int | Unknown = 0
    # Number of objects at the declared place, None when no objects are declared. Source: S3 list, listdir.
    objects: int | None | Unknown = None
    # Memory in use per GPU UUID, bytes; None when no GPU is declared. Source: NVML.
    gpu_memory: Mapping[str, int] | None | Unknown = None


@dataclass(frozen=True)
class UnitState:
    """The properties of a unit that systemctl shows, all of the same moment."""

    # LoadState=: loaded, not-found, bad-setting, error, masked.
    load_state: str = "loaded"
    # Text of LoadError=, else what systemd-analyze verify or systemctl said; "" when fine.
    load_error: str = ""
    # ActiveState=: active, reloading, inactive, failed, activating, deactivating.
    active_state: str = "inactive"
    # SubState=: running, exited, dead, failed, start, start-pre, start-post, auto-restart, auto-restart-queued,
    # stop-sigterm, …
    sub_state: str = "dead"
    # Result=: success, resources, exit-code, signal, core-dump, timeout, watchdog, oom-kill, exec-condition,
    # start-limit-hit, protocol.
    result: str = "success"
    # Type=: simple, exec, notify, forking, oneshot, …
    type: str = "exec"
    # InvocationID=, "" when none. A collected unit reads as never started.
    invocation_id: str = ""
    # MainPID=, 0 when none.
    main_pid: int = 0
    # ExecMainPID=, ExecMainCode= (0 none, 1 exited, 2 killed, 3 dumped), ExecMainStatus= (exit code or signal number).
    exec_main_pid: int = 0
    exec_main_code: int = 0
    exec_main_status: int = 0
    # ExecMainStartTimestampMonotonic=, ExecMainExitTimestampMonotonic= in CLOCK_BOOTTIME s, 0.0 when never.
    exec_main_started_at: float = 0.0
    exec_main_exited_at: float = 0.0
    # NRestarts=, automatic restarts only.
    n_restarts: int = 0
    # ConditionResult=, AssertResult= and their timestamps in CLOCK_BOOTTIME s, 0.0 when never. A collected unit reads
    # False at 0.0.
    condition_result: bool = True
    condition_at: float = 0.0
    assert_result: bool = True
    assert_at: float = 0.0
    # The condition or assertion that said no, as in the unit file ("ConditionPathExists=/data"), "" when not known.
    # Source: Conditions=, Asserts=.
    failed_condition: str = ""
    # ControlGroup=, "" when there is none.
    control_group: str = ""
    # NotifyAccess=, PIDFile=, BusName=.
    notify_access: str = "none"
    pid_file: str = ""
    bus_name: str = ""
    # The command that starts and stops it: systemctl, or supervisorctl with its configuration where no systemd runs; "" for
    # a unit of launchproof run there, which nothing keeps.
    control: str = "systemctl"
    # Type of the job pending for the unit: "", start, stop, restart, … Source: Job= and list-jobs.
    pending_job: str = ""
    # Restart=, RestartUSec=, RuntimeMaxUSec=, TimeoutStartUSec=, WatchdogUSec= (s; None = infinity or off),
    # MemoryMax= (bytes, None = infinity).
    restart: str = "no"
    restart_sec: float = 0.1
    runtime_max: float | None = None
    timeout_start: float | None = None
    watchdog: float | None = None
    memory_max: int | None = None
    # The line of the ExecStartPre= or ExecCondition= command that failed, redacted ("ExecStartPre=/bin/false (exit status 1)"), ""
    # when none did.
    failed_command: str = ""
    # That of the ExecStartPost= command that failed, likewise: systemd then ends the main process.
    failed_post_command: str = ""
    # The line of the ExecCondition=, ExecStartPre= or ExecStartPost= command that began and did not end by itself, redacted: it runs
    # still, or was killed.
    unfinished_command: str = ""
    # Files of EnvironmentFile= (without "-") that are not there.
    missing_files: tuple[str, ...] = ()
    # FragmentPath=.
    fragment_path: str = ""


@dataclass(frozen=True)
class StartAnswer:
    """What the request to start said. Evidence only: 0 proves nothing."""

    # 0 when the start was accepted and its job ended well, 1 when not, None while nothing came back: systemctl's own answer.
    rc: int | None = None
    # Why it was refused, or how its job ended.
    text: str = ""
    # Result of the start job: done, failed, dependency, skipped, assert, timeout, canceled; "" when not seen. Source:
    # the manager's signal JobRemoved.
    job_result: str = ""
    # The dependency that failed, "" when not known.
    dependency: str = ""


@dataclass(frozen=True)
class Exit:
    """One end of a main process, seen while watching; the unit itself may be collected since.

    Sources, in order of trust: ExecMain* of the same invocation, the death certificate (exit.json), the journal.
    """

    # CLOCK_BOOTTIME s at which it was seen or certified.
    at: float
    # EXITED, KILLED or DUMPED; 0 when there never was a process (e.g. 209 before a fork).
    code: int
    # Exit status, or the signal's number.
    status: int
    invocation_id: str = ""
    pid: int = 0
    # $SERVICE_RESULT of the certificate or Result=.
    result: str = ""
    # systemd, certificate, journal, pidfd.
    source: str = "systemd"
    # A stop or restart job of the unit was seen pending when it ended: someone asked for it.
    stop_requested: bool = False
    # What systemd itself wrote into the journal where it could not set the process up ("Failed at step …"), "" where it wrote
    # no such thing: then the exec did happen. Unknown where the journal cannot tell, NOT_READ where nothing depends on it.
    setup_error: str | Unknown = NOT_READ


@dataclass(frozen=True)
class Process:
    """One process of the unit's control group. Sources: cgroup.procs, /proc/PID/{stat,cmdline,environ,fd}."""

    pid: int
    # Start, CLOCK_BOOTTIME s: start ticks ÷ SC_CLK_TCK (raw ticks, never /proc/uptime or btime).
    started_at: float
    # State letter of /proc/PID/stat: R S D T Z X I.
    state: str = "S"
    # It is the unit's main process.
    main: bool = False
    # Command line, already redacted.
    argv: tuple[str, ...] = ()
    # INVOCATION_ID of its environment; None when the environment has none (env -i).
    invocation_id: str | None | Unknown = NOT_READ
    # It holds the declared log open, or was seen to write to it.
    has_log: bool | Unknown = NOT_READ
    # Where fd 1 and 2 (and regular files that it has open for writing) lead: "/dev/null", "/x/log (deleted)",
    # "pipe:[3]".
    outputs: tuple[str, ...] | Unknown = NOT_READ

    @property
    def alive(self) -> bool:
        """Whether it runs: a zombie passes kill -0 and does not."""
        return self.state not in ("Z", "X", "x")


@dataclass(frozen=True)
class Match:
    """One line that a pattern matched."""

    # The pattern, as in the proof spec or in the default list.
    pattern: str
    # The line, bounded in length, already redacted.
    line: str
    # Offset of the line's first byte in this run's bytes.
    offset: int
    # CLOCK_BOOTTIME s at which it was read.
    at: float
    # declared: of the job's own list; default: of DEFAULT_FORBIDDEN; traceback: an exception's last line.
    kind: str = "declared"
    # Lines that this run wrote after it (for forbidden matches).
    lines_after: int = 0


@dataclass(frozen=True)
class Progress:
    """The progress values of this run. A changed value is an advance, a smaller one too (a resume resets the step)."""

    # Value read first and last; text where it is not a number.
    first: float | str
    last: float | str
    # Number of changes since the first value.
    changes: int
    # CLOCK_BOOTTIME s of the first value and of the last change (the first value when there was none).
    first_at: float
    changed_at: float
    # Offset of the line with the last change, in this run's bytes.
    offset: int
    # Median of the gaps between changes, s; None with fewer than three changes.
    median_gap: float | None = None
    # Of several ranks all of the above is of the one that is furthest behind: which that is, and each one's last value.
    rank: str | None = None
    ranks: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Log:
    """The declared log, of which only this run's bytes count."""

    path: str
    exists: bool = True
    # What is there where it is no regular file, so that nothing can be read from it: fifo, socket, device, folder; "" otherwise.
    kind: str = ""
    # Size, bytes. Source: fstat.
    size: int = 0
    # Bytes this run wrote (NUL holes left out), and when the last of them came, None when none did.
    new_bytes: int = 0
    written_at: float | None = None
    # Per required pattern: its first match, or None. Keys are exactly the spec's patterns.
    required: Mapping[str, Match | None] = field(default_factory=dict)
    # The last match of each forbidden pattern, oldest first.
    forbidden: tuple[Match, ...] = ()
    # First match of the done pattern.
    done: Match | None = None
    progress: Progress | None = None
    # Ranks that progress was seen of, where several are declared; there is no progress before all have some.
    ranks: tuple[str, ...] = ()
    # The last lines, bounded, already redacted.
    tail: tuple[str, ...] = ()
    # A line was longer than this many bytes, and was read in pieces; None when none was.
    cut_at: int | None = None
    # Content older than this run matches a required, progress or done pattern: what a naive check would have believed.
    old_match: Match | None | Unknown = None
    # Files that match log.path where that is a glob (log.count > 1); otherwise () .
    files: tuple[str, ...] = ()
    # It was truncated, renamed or deleted while watching ("truncated", "renamed", "deleted"); "" when not. Healthy by
    # itself.
    changed: str = ""


@dataclass(frozen=True)
class LogPlace:
    """Whether the job's user can write at the log's place. Sources: statvfs, access probe by that user, open errno."""

    path: str
    # Name of the errno that a write there gives: ENOSPC, EDQUOT, EROFS, EACCES, ELOOP, ENOENT, ENOTDIR, EISDIR; "" when it
    # can be written.
    error: str = ""
    # Free bytes and free inodes for that user (f_bavail, f_favail); None when the file system does not count inodes.
    free_bytes: int | None = None
    free_inodes: int | None = None
    # User for whom it was tried.
    user: str = ""
    # Mount point and its options.
    mount: str = ""


@dataclass(frozen=True)
class Activity:
    """What the unit's live processes did over the last window. Sources: /proc/PID/stat utime+stime, /proc/PID/io, cpu.stat."""

    # Length of the window, s.
    window: float
    # CPU time used in it, s, and bytes read and written in it (rchar + wchar).
    cpu: float
    io: int | Unknown = NOT_READ


@dataclass(frozen=True)
class Gpu:
    """How far the GPU proof came (see docs: GPU proof ladder)."""

    # proved, proved_from_node, consistent, none.
    level: str
    # Why not further: no_device, opened_only, context_without_memory, wrong_gpu; "" when the level is enough.
    reason: str = ""
    # UUIDs declared, and those on which the unit's processes were found.
    declared: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    # Memory of the unit's processes per UUID, bytes; at level consistent, by how much the memory in use there rose.
    memory: Mapping[str, int] = field(default_factory=dict)
    # Utilisation over the last window, percent; to tell gpu_spinning from gpu_idle.
    utilisation: float | Unknown = NOT_READ
    # Whose pids NVML lists to this observer: same, translated, host, unknown.
    pids: str = "unknown"
    # What is wrong, in words, the most telling first; () where the level is enough.
    why: tuple[str, ...] = ()
    # Who else has memory of the declared GPUs, in words.
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Objects:
    """Objects at the declared place."""

    uri: str
    # Number now.
    count: int
    # CLOCK_BOOTTIME s at which the number last rose; None when it never did in this run.
    grew_at: float | None = None


@dataclass(frozen=True)
class Heartbeat:
    """The job's heartbeat file."""

    path: str
    # Age of its last write by this run, s; None when this run has not written it.
    age: float | None = None
    # Its field ``telemetry`` ("nvml", "off: why"), redacted; None when it is no JSON or has none.
    telemetry: str | None = None


@dataclass(frozen=True)
class Facts:
    """One look at one unit. ``None`` = there is none; ``Unknown`` = could not be read; NOT_READ = nobody asked."""

    unit: str
    # CLOCK_BOOTTIME of the look, s.
    at: float
    systemd: UnitState | Unknown = NOT_READ
    start: StartAnswer | Unknown = StartAnswer()
    # Id of the run under test: the newest invocation that is not the baseline's (observed: the current or last one).
    # Kept when the unit is collected. None: no new run was seen, by the symlink, systemctl, the run folder, or the
    # journal.
    run_id: str | None = None
    # When that run began, CLOCK_BOOTTIME s (main process start, else the manifest, else first seen). None with run_id
    # None.
    run_started_at: float | None = None
    # The main process was seen running the job's program, i.e. exec succeeded (or it wrote, or it is certified to
    # have run).
    exec_seen: bool = False
    # Ends of main processes of new runs, oldest first; kept over garbage collection. The last one is the run's own
    # when its process is gone.
    exits: tuple[Exit, ...] = ()
    # Number of automatic restarts seen since the baseline, where systemctl cannot tell any more (a stop zeroes
    # NRestarts). The larger of this and the rise of n_restarts counts.
    restarts_seen: int = 0
    # Processes in the unit's group (zombies included), and the main process wherever it is. Unknown when the group cannot be read.
    processes: tuple[Process, ...] | Unknown = ()
    # Processes of the same job found outside this run: older than the baseline, in the group or with the job's run
    # folder or log open.
    strays: tuple[Process, ...] | Unknown = ()
    # CLOCK_BOOTTIME since when every live worker was in state D at each look; None when one was not.
    uninterruptible_since: float | None = None
    activity: Activity | Unknown = NOT_READ
    log: Log | Unknown = NOT_READ
    # What the run before wrote, whose end systemd answered with an automatic restart; None when there was none.
    log_before: Log | None | Unknown = None
    log_place: LogPlace | Unknown = NOT_READ
    # oom_kill counter now, over the same groups as the baseline's (a rise that was seen live is kept when the group
    # vanishes).
    oom_kills: int | Unknown = NOT_READ
    # When a rise of it was first seen, CLOCK_BOOTTIME s; None when it did not rise.
    oom_at: float | None = None
    # ActiveState=active was seen in this run.
    was_active: bool = False
    # Units of the job that are declared, and those of them that exist and ran, where the job has instances; both ()
    # otherwise.
    instances_declared: tuple[str, ...] = ()
    instances_found: tuple[str, ...] = ()
    gpu: Gpu | None | Unknown = None
    objects: Objects | None | Unknown = None
    heartbeat: Heartbeat | None | Unknown = None
    # Lines of the journal about this start ("Failed to execute …", "Condition check resulted in …"), redacted. Helps,
    # never required.
    journal: tuple[str, ...] | Unknown = NOT_READ
    # diagnose only: what a command-line pattern matched that is not the job ("pid 7, bash -lc …: the observer's own
    # shell"), and arguments or printed names that still hold *?[ and that no path has.
    wrong_processes: tuple[str, ...] = ()
    unexpanded: tuple[str, ...] = ()
    # The job's command line, redacted, its user and working directory, for the remedies. Source: manifest,
    # ExecStart=, User=.
    command: tuple[str, ...] = ()
    user: str = ""
    working_directory: str = ""
    # Where its errors go where that is not its log ("/x.err", "the journal (journalctl …)"), and the last lines of this run there,
    # redacted, where that is a file. Read only of a run that failed and wrote nothing to its log.
    errors_at: str = ""
    errors_tail: tuple[str, ...] = ()
    # The log is in a /tmp of which the unit has its own (PrivateTmp=).
    own_tmp: bool = False
    # The host, for the row.
    host: str = ""


@dataclass(frozen=True)
class Verdict:
    """The answer, final for this launch."""

    unit: str
    # A code of table.py.
    code: str
    ok: bool
    # Stage in which it was decided: starting, stable, first_log, required, gpu, first_progress, progress, objects,
    # heartbeat, ended.
    stage: str
    # CLOCK_BOOTTIME s of the decision, and s since the baseline.
    at: float
    seconds: float
    # One sentence, "" for a success.
    remedy: str
    # Data that decided it, JSON-serialisable, plain builtins only.
    evidence: Mapping[str, Any]
    # Codes of other rows that held and might speak.
    also_observed: tuple[str, ...] = ()
    run_id: str | None = None
    host: str = ""


@dataclass(frozen=True)
class Wait:
    """No answer yet."""

    unit: str
    # First requirement that is still open, same names as Verdict.stage.
    stage: str
    # CLOCK_BOOTTIME s at which decide must be asked again even if no fact has changed. Always later than ``now``.
    deadline: float
    # CLOCK_BOOTTIME s at which this stage's own deadline falls (for "12 of 60 s"), and when it began.
    stage_deadline: float
    stage_began: float
    # What is still missing, in words: ("no line matches 'ev=step …' yet",).
    missing: tuple[str, ...] = ()
    # Codes that hold but may not speak yet (annotations: silent, uninterruptible …).
    noticed: tuple[str, ...] = ()


_TYPE = "__type__"


def number(value: float | str | None) -> str:
    """Return a progress value as the job wrote it."""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:g}"
    return str(value)


def as_data(value: Any) -> Any:
    """Return a baseline or facts as plain data, for JSON: ``from_data`` makes equal ones of it."""
    if is_dataclass(value):
        return {
            _TYPE: type(value).__name__,
            **{item.name: as_data(getattr(value, item.name)) for item in fields(value)},
        }
    if isinstance(value, Mapping):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    return value


def from_data(data: Any) -> Any:
    """Return what ``as_data`` was given, lists as tuples."""
    if isinstance(data, list):
        return tuple(map(from_data, data))
    if not isinstance(data, dict):
        return data
    found = {key: from_data(item) for key, item in data.items() if key != _TYPE}
    return _TYPES[data[_TYPE]](**found) if _TYPE in data else found


_TYPES = {kind.__name__: kind for kind in (
    Unknown, Baseline, UnitState, StartAnswer, Exit, Process, Match, Progress, Log, LogPlace, Activity, Gpu, Objects, Heartbeat,
    Facts,
)}  # fmt: skip
