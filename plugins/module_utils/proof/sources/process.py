# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Processes by pid, from /proc. Nothing here searches by command line."""

from __future__ import annotations

import contextlib
import os
import re
import stat

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Process, Unknown

TICKS = os.sysconf("SC_CLK_TCK")
MAX_ARGV = 4096  # bytes of a command line that are worth showing


def read_stat(pid: int) -> dict | None:
    """Fields of /proc/PID/stat, None where there is no such process.

    C(started_at) is CLOCK_BOOTTIME, s: raw start ticks, because LXC rewrites /proc/uptime and btime but not these.
    """
    try:
        with open("/proc/%d/stat" % pid, "rb") as handle:
            text = handle.read().decode(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name may hold spaces and brackets: proc(5)
    return {
        "state": fields[0],
        "parent": int(fields[1]),
        "cpu": (int(fields[11]) + int(fields[12])) / TICKS,
        "started_at": int(fields[19]) / TICKS,
    }


def exit_status(pid: int) -> int:
    """The status that a process exited with which nobody has waited for yet; 0 also where it was a signal, or is not ours to know.

    exit_code, the last field of /proc/PID/stat that proc(5) names, is what waitpid(2) will give.
    """
    try:
        with open("/proc/%d/stat" % pid, "rb") as handle:
            fields = handle.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    status = int(fields[49]) if fields[0] == b"Z" and len(fields) > 49 else 0
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0


def dumping_core(pid: int) -> bool:
    """Whether a process only still exists because its core is being written; Linux 4.15 and later say so."""
    try:
        with open("/proc/%d/status" % pid, "rb") as handle:
            return b"\nCoreDumping:\t1\n" in handle.read()
    except OSError:
        return False


def living_thread(pid: int) -> tuple:
    """(id, state) of a thread that goes on where the first one has ended, else (I(pid), "Z").

    The kernel shows the state of the first thread as the process's, whose files and memory only the others still have: proc(5).
    """
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/%d/task" % pid):
            fields = read_stat(int(name))
            if fields and fields["state"] not in "ZXx":
                return int(name), fields["state"]
    return pid, "Z"


def argv(pid: int) -> tuple:
    """Command line of a process, () where it has none (kernel thread, zombie, gone)."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as handle:
            data = handle.read(MAX_ARGV)
    except OSError:
        return ()
    return tuple(part.decode(errors="replace") for part in data.rstrip(b"\0").split(b"\0")) if data else ()


def invocation_id(pid: int) -> str | None | Unknown:
    """INVOCATION_ID of a process's environment at exec; None where it has none."""
    path = "/proc/%d/environ" % pid
    try:
        with open(path, "rb") as handle:
            for item in handle.read().split(b"\0"):
                if item.startswith(b"INVOCATION_ID="):
                    return item[14:].decode(errors="replace")
    except OSError as error:
        return Unknown("%s: %s" % (path, error.strerror))
    return None


def outputs(pid: int, log: tuple | None) -> tuple:
    """Return (where a process's output goes, whether it holds the log open).

    I(log) is the (device, inode) of the declared log. The first part holds the targets of fd 1 and 2 and of regular
    files open for writing, or Unknown; the second is True, False or Unknown.
    """
    folder = "/proc/%d/fd" % pid
    found = []
    has_log = False
    try:
        for name in sorted(os.listdir(folder), key=int):
            path = "%s/%s" % (folder, name)
            try:
                target = os.readlink(path)
                about = os.stat(path)
            except OSError:
                continue
            if stat.S_ISREG(about.st_mode) and not os.lstat(path).st_mode & stat.S_IWUSR:
                continue  # open for reading only: the link's own mode says how, proc_pid_fd(5)
            if log is not None and (about.st_dev, about.st_ino) == log:
                has_log = True
            if name in ("1", "2") or stat.S_ISREG(about.st_mode):
                found.append(target)
    except OSError as error:
        why = Unknown("%s: %s" % (folder, error.strerror))
        return why, why
    return tuple(dict.fromkeys(found)), has_log


def _writing(pid: int, log: tuple):
    """Yield the numbers of a process's descriptors that are open for writing on I(log), a (device, inode)."""
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            about, mode = os.stat("%s/%s" % (folder, name)), os.lstat("%s/%s" % (folder, name)).st_mode
        except OSError:
            continue
        if (about.st_dev, about.st_ino) == log and mode & stat.S_IWUSR:
            yield name


def holds(pid: int, log: tuple) -> bool:
    """Whether a process has I(log) open for writing."""
    return any(True for _name in _writing(pid, log))


def has_written(pid: int, log: tuple) -> bool:
    """Whether something was written through a descriptor of the process: with O_APPEND its position is 0 until then."""
    for name in _writing(pid, log):
        try:
            with open("/proc/%d/fdinfo/%s" % (pid, name), encoding="ascii") as handle:
                if int(handle.readline().split()[1]) > 0:
                    return True
        except (OSError, ValueError, IndexError):
            continue
    return False


def place(pid: int, log: tuple) -> int:
    """How far a process has come in I(log) by a descriptor that does not append: bytes from the file's beginning."""
    found = 0
    for name in _writing(pid, log):
        try:
            with open("/proc/%d/fdinfo/%s" % (pid, name), encoding="ascii") as handle:
                lines = dict(line.split(":", 1) for line in handle if ":" in line)
            if not int(lines["flags"], 8) & os.O_APPEND:
                found = max(found, int(lines["pos"]))
        except (OSError, ValueError, KeyError):
            continue
    return found


def other_writers(log: tuple, pids: tuple) -> tuple:
    """Pids other than I(pids) that have I(log) open for writing. Looks at every process of the machine."""
    return tuple(
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and int(name) not in pids and any(_writing(int(name), log))
    )


def read_io(pid: int) -> int | Unknown:
    """Bytes that a process read and wrote by any means, rchar + wchar."""
    path = "/proc/%d/io" % pid
    try:
        with open(path, encoding="ascii") as handle:
            values = dict(line.split(": ") for line in handle.read().splitlines())
        return int(values["rchar"]) + int(values["wchar"])
    except (OSError, ValueError, KeyError) as error:
        return Unknown("%s: %s" % (path, error))


def process(pid: int, main_pid: int, log: tuple | None, detailed: bool, clean=str) -> Process | None:
    """Facts of one process, None where it has gone. I(detailed) also reads its environment and open files."""
    fields = read_stat(pid)
    if fields is None:
        return None
    seen_by = pid
    if pid == main_pid and dumping_core(pid):
        fields["state"] = "X"  # it has ended, although it may take seconds to write the core
    elif fields["state"] == "Z":
        seen_by, fields["state"] = living_thread(pid)
    details = {}
    if detailed and fields["state"] not in "ZX":
        where, has_log = outputs(seen_by, log)
        details = {"invocation_id": invocation_id(seen_by), "outputs": where, "has_log": has_log}
    return Process(
        pid=pid,
        started_at=fields["started_at"],
        state=fields["state"],
        main=pid == main_pid,
        argv=tuple(clean(part) for part in argv(seen_by)),
        **details,
    )


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process dies; None where there is none (gone, an old kernel)."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def ancestors(pid: int) -> tuple:
    """Pids of a process and all above it, nearest first."""
    found = []
    while pid > 0:
        fields = read_stat(pid)
        if fields is None:
            break
        found.append(pid)
        pid = fields["parent"]
    return tuple(found)


# What carries other programs' names on its own command line: shells, remote shells, searchers, viewers.
CARRIERS = re.compile(
    r"(?:^|/)-?(?:ba|da|z|k|c)?sh$|(?:^|/)(?:sshd?|lxc-attach|pct|sudo|env|tmux|screen|pgrep|pkill|grep|tail|less|watch|vim?|nano)$"
)


def matches(pattern: str, observer: int) -> tuple:
    """Return (pids that a command-line pattern matches and that may be the job, matches that cannot be, in words).

    This reads command lines to explain what others found by them: nothing is selected by them.
    """
    search = re.compile(pattern).search
    own = ancestors(observer)
    jobs, wrong = [], []
    for name in os.listdir("/proc"):
        words = argv(int(name)) if name.isdigit() else ()
        pid = int(name) if words else 0
        if not words or pid == observer or not search(" ".join(words)):
            continue
        about = "pid %d (%s)" % (pid, " ".join(words)[:120])
        if pid in own:
            wrong.append(about + ", the observer's own shell or one above it")
        elif CARRIERS.search(words[0]):
            wrong.append(about + ", which only carries the name on its command line")
        else:
            jobs.append(pid)
    return tuple(jobs), tuple(wrong)


def wrong_matches(pattern: str, group: tuple, observer: int) -> tuple:
    """What a command-line pattern matches when none of it is in the unit's group, whose pids I(group) holds; () when some is."""
    jobs, wrong = matches(pattern, observer)
    if any(pid in group for pid in jobs):
        return ()
    outside = tuple("pid %d (%s), outside the unit's control group" % (pid, " ".join(argv(pid))[:120]) for pid in jobs)
    return wrong + outside


def unit_of(pid: int) -> str | None:
    """The service whose control group a process is in, None where it is in none."""
    try:
        with open("/proc/%d/cgroup" % pid, encoding="utf-8") as handle:
            lines = handle.read().splitlines()
    except OSError:
        return None
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd"):
            names = [part for part in path.split("/") if part.endswith(".service")]
            if names:
                return names[-1]
    return None
