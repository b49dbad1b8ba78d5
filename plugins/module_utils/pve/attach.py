# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What connection pct sends to a node, and what it reads back. Pure.

An exit code alone does not say whether ssh, the attaching program or the command failed: each of them ends with 255,
137 or 1 for reasons of its own. So the code does not travel as an exit code. The shell on the node and the one in the
container write marks with a nonce to stderr, which are taken out again::

    begin           the command is about to run in the container
    end RC          it ended with RC, as a shell sees it: 128 + N when signal N killed it
    node RC STATE   the attaching program ended with RC; STATE says why it was not even tried

The script on the node exits 0 once it has written its mark, so ssh's own 255 means a failed connection and nothing
else.
"""

from __future__ import annotations

import re
import shlex
import signal
from typing import NamedTuple

#: Bytes one argument can have on Linux (MAX_ARG_STRLEN, 32 pages).
ARGUMENT_LIMIT = 128 * 1024
#: Exit code of ``send`` for a path that is not a file.
NO_SUCH_FILE = 66

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRONMENT = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}


class Outcome(NamedTuple):  # a dataclass would take 1 ms of each task to make, as this module is imported by each
    """One execution. ``failure`` is None where the command ran to its end, whatever its exit code.

    Otherwise it is node_unreachable, missing, starting, stopped, frozen, no_state, attach_failed, cut_before, cut or gone.
    """

    rc: int
    stdout: bytes
    stderr: bytes
    failure: str | None = None

    @property
    def passing(self) -> bool:
        """Whether the same may well succeed a moment later: nothing had begun, and it was not a refusal."""
        return self.failure in ("node_unreachable", "cut_before") and bool(re.search(_PASSING, self.stderr))

    def words(self) -> str:
        """What happened, in one sentence with the last words on stderr."""
        said = self.stderr.decode(errors="replace").strip()
        text = _WORDS.get(self.failure) or killed_by(self.rc) or f"the command failed with exit code {self.rc}"
        return f"{text}: {said}" if said else text


# sshd turns connections away above MaxStartups and sessions above MaxSessions; a shared connection may just be ending.
_PASSING = (
    rb"kex_exchange_identification|Connection (closed|reset)|timed out during banner exchange|[Bb]roken pipe"
    rb"|mux_client|Session open refused"
)

# Who moves a process into another control group, as an attach does, waits until each processor has passed a quiet state
# (percpu_down_write() waits for rcu_sync_enter()), since Linux 6.0 and unless the hierarchy is mounted with favordynmods:
# 13 ms of the 20 that an attach takes. A move to where the process is begins that wait while the attach gets ready.
_BEGIN_GRACE_PERIOD = (
    '{ while IFS=: read -r n _ g; do [ "$n" = 0 ] && for v in "" /unified; do p=/sys/fs/cgroup$v$g/cgroup.procs; '
    '[ -e "$p" ] && echo 0 >"$p"; done; done; } </proc/self/cgroup >/dev/null 2>&1 & '
)

_WORDS = {
    "node_unreachable": "the node cannot be reached over ssh",
    "cut_before": "the connection to the node was cut before the command began",
    "missing": "there is no such container on this node",
    "starting": "the container has not started yet; ansible.builtin.wait_for_connection waits for it",
    "stopped": "the container is stopped; start it (pct start, or role dflash.launchproof.container)",
    "frozen": "the container is frozen: it counts as running, but nothing in it can run; thaw it with lxc-unfreeze",
    "no_state": "the state of the container cannot be read; the user on the node must be root",
    "attach_failed": "the node could not run a command in the container",
    "cut": "the connection to the node was cut while the command ran; whether it ended is not known",
    "gone": "the command was ended from outside: the container stopped, or what attached to it was killed",
}


def killed_by(rc: int) -> str | None:
    """Words for an exit code above 128, which a shell gives to a command that a signal killed."""
    try:
        name = signal.Signals(rc - 128).name
    except ValueError:
        return None
    return f"the command was killed by {name} (exit code {rc})"


def node_script(
    vmid: int, cmd: str, nonce: str, *, stdin: bool, method: str = "lxc-attach", lxc_path: str | None = None
) -> str:
    """The POSIX shell script that runs ``cmd`` in container ``vmid`` from its node.

    Without ``stdin`` the command reads /dev/null: a closed stdin would let lxc-attach change the mode of whatever file
    takes its place. The state is looked at first because a frozen container lets an attach wait for ever.
    """
    number = shlex.quote(str(vmid))
    path = f" -P {shlex.quote(lxc_path)}" if lxc_path else ""
    # A line of its own end: while it waits for become, ansible.builtin.ssh loses what comes after the last newline.
    mark = shlex.quote(f"\\036{nonce} %s\\036\\n")
    inner = f'printf {mark} begin >&2; /bin/sh -c {shlex.quote(cmd)}; rc=$?; printf {mark} "end $rc" >&2; exit $rc'
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in _ENVIRONMENT.items())
    if method == "pct":
        attach = f"pct exec {number} --keep-env 0 -- env {settings}"
    else:
        variables = " ".join(f"-v {name}={shlex.quote(value)}" for name, value in _ENVIRONMENT.items())
        attach = f"lxc-attach{path} -n {number} --clear-env {variables} --"
    return (
        f"{_BEGIN_GRACE_PERIOD}"
        # pct is Perl and corrupts arguments that are not ASCII without a UTF-8 locale.
        "export LC_ALL=C.UTF-8; "
        f"s=$(lxc-info{path} -n {number} -s -H 2>/dev/null </dev/null); "
        'if [ "$s" = RUNNING ]; then '
        f"{attach} /bin/sh -c {shlex.quote(inner)}{'' if stdin else ' </dev/null'}; "
        f'printf {mark} "node $? RUNNING" >&2; '
        # pct knows a container that was never started, of which LXC may not have heard. It is slow; this has failed.
        'else [ "$s" ] || s=$(if command -v pct >/dev/null; '
        f"then pct status {number}; else lxc-info{path} -n {number} -s -H; fi 2>&1 </dev/null); "
        f'printf {mark} "node 0 $s" >&2; fi; exit 0'
    )


def read(nonce: str, rc: int, stdout: bytes, stderr: bytes) -> Outcome:
    """What an execution of ``node_script`` came to, its marks taken out of stderr."""
    marks = re.compile(rb"\x1e" + nonce.encode() + rb" ([^\x1e]*)\x1e\n")
    found = [mark.group(1).decode(errors="replace").split(" ", 2) for mark in marks.finditer(stderr)]
    begun = any(mark[0] == "begin" for mark in found)
    ended = next((int(mark[1]) for mark in found if mark[0] == "end"), None)
    node = next((mark for mark in found if mark[0] == "node"), None)
    rest = marks.sub(b"", stderr)
    if ended is not None:
        return Outcome(ended, stdout, rest)
    if node is None:
        if begun:
            return Outcome(rc, stdout, rest, "cut")
        return Outcome(rc, stdout, rest, "node_unreachable" if rc == 255 else "cut_before")
    if begun:
        return Outcome(int(node[1]), stdout, rest, "gone")
    state = node[2] if len(node) > 2 else ""
    if state == "RUNNING":
        return Outcome(int(node[1]), stdout, rest, "attach_failed")
    return Outcome(0, stdout, rest + state.encode(), _state(state))


def _state(said: str) -> str:
    """The failure behind what lxc-info or pct status said of a container that is not RUNNING."""
    lowered = said.lower()
    if "does not exist" in lowered or "doesn't exist" in lowered:
        return "missing"
    if "frozen" in lowered or "freezing" in lowered:
        return "frozen"
    if "starting" in lowered:
        return "starting"
    return "stopped" if "stopp" in lowered or "aborting" in lowered else "no_state"


def receive(path: str, size: int, mode: int) -> str:
    """The command that stores ``size`` bytes of stdin as ``path``: complete or not at all, with ``mode``.

    A connection that is cut ends stdin like a complete file does, hence the look at the size.
    """
    target = shlex.quote(path)
    return (
        f"t={target}; [ ! -d \"$t\" ] || {{ echo 'the target is a folder' >&2; exit 65; }}; "
        # Beside the target, for a rename; under a name of its own, for the target's may have the longest length there is.
        'case $t in */*) d=${t%/*};; *) d=.;; esac; n=$(mktemp "$d/.launchproof.XXXXXXXX") || exit 1; '
        f'if cat > "$n" && [ "$(wc -c < "$n")" -eq {size} ] && chmod {mode:o} "$n" && mv -f -- "$n" "$t"; '
        "then exit 0; fi; "
        f"echo 'not all of {size} bytes arrived, or they could not be stored' >&2; rm -f \"$n\"; exit 1"
    )


def send(path: str) -> str:
    """The command that writes the file ``path`` to stdout."""
    return f'f={shlex.quote(path)}; [ -f "$f" ] || exit {NO_SUCH_FILE}; exec cat < "$f"'
