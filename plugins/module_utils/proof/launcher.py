# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a launcher that is not ours ended before it launched anything: read from what it ran and what came back. Pure.

``pkill -f PATTERN`` matches whole command lines. A remote shell's command line (``bash -lc SCRIPT``) holds the whole
script, hence the pattern too, or the name that a bracket trick protects in one place and not in the next. pkill spares
itself, not its parent: the shell dies at that command, prints nothing, and its exit code is 128 + the signal.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import LauncherSpec

SELF_KILLED, NOT_DELIVERED, SYNTAX = "launcher_self_killed", "launcher_not_delivered", "launcher_syntax"

# What a transport itself says when it did not deliver, and the exit codes it then has. A program on the host speaks of refused
# connections and broken pipes as well, so a line counts from its start, and only with its own transport's code.
_SSH = re.compile(
    r"(?m)^(?:ssh: |(?:kex|ssh)_exchange_identification: |banner exchange: |mux_client_\w+: |client_loop: |packet_write_wait: "
    r"|Connection (?:closed|reset|timed out|refused) by \S.* port \d+|Connection to \S+ (?:port \d+ )?(?:closed by remote host|timed out)"
    r"|Connection timed out during banner exchange|Timeout, server \S+ not responding|Received disconnect from |Disconnected from "
    r"|Unable to negotiate with |Host key verification failed|(?:\S+@)?\S+: Permission denied \(|Bad owner or permissions on ).*$"
)
_SCP = re.compile(
    r"(?m)^(?:(?:scp|sftp): |lost connection|Connection closed\.?\s*$|Couldn't (?:read|write) packet: |(?:dest|remote) open \").*$"
)
_RSYNC = re.compile(r"(?m)^rsync(?: error)?: .*$")
# Perl's die, so any code.
_PCT = re.compile(
    r"(?m)^(?:container '?\d+'? not running|CT '?\d+'? (?:not running|does not exist)|Configuration file '\S*lxc/\d+\.conf' does not exist).*$"
)
_TRANSPORTS = (
    (_SSH, (255,)),
    (_SCP, (1, 255)),
    (_RSYNC, (2, 3, 5, 10, 11, 12, 14, 23, 30, 35, 255)),
    (_PCT, range(1, 256)),
)
# In the words of bash and busybox, dash, zsh, for mawk and psql speak of syntax errors too; an error in arithmetic is found only when
# the script runs.
_SYNTAX = re.compile(
    r"(?m)^(?P<who>\S+?):(?: -c:)? ?(?:(?:line )?\d+: )?(?:syntax error near unexpected token|syntax error: (?:unexpected|unterminated)"
    r"|syntax error in conditional expression|unexpected EOF while looking for matching|Syntax error: .*(?:unexpected|[Uu]nterminated|[Bb]ad )"
    r"|parse error near|unmatched ['\"`]).*$"
)
_SYNTAX_CODES = (1, 2, 127)  # of a shell that cannot read its script
_KILL = re.compile(
    r"(?<![\w./-])(?:(?:sudo|command|exec)\s+)?(?P<tool>(?:/usr)?(?:/bin/)?(?:pkill|killall|pgrep|grep))(?=\s)(?P<rest>[^;&|\n)`]*)"
)
# What ls, tail, wc and cat say of a pattern that matched no file, and tail's and more's heads.
_UNEXPANDED = re.compile(
    r"(?:cannot (?:open|access) |==> |: )['\"\u2018]?(?P<name>[^\s:'\"\u2018\u2019]*[*?\[][^\s:'\"\u2018\u2019]*)"
    r"['\"\u2019]?(?:(?: for reading)?: No such file| <==)"
)
_ASSIGNED = re.compile(r"(?:^|[\s;&|])(?P<name>[A-Za-z_]\w*)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s;&|\"']+)")
_SHELLS = ("bash", "sh", "dash", "zsh")


@dataclass(frozen=True)
class Launcher:
    """What became of a launcher. ``code`` is "" where its evidence explains nothing."""

    code: str = ""
    # Exit status as given, and the signal that it stands for (name), "" when none.
    rc: int | None = None
    signal: str = ""
    # The command that killed it, its line number (1 = first) in the script, and its pattern.
    command: str = ""
    line: int = 0
    pattern: str = ""
    # The text of the script's own command line that the pattern matched, and the number of the line it stands in.
    matched: str = ""
    matched_line: int = 0
    # The line of its output that tells, for transport and syntax.
    said: str = ""
    # Its end mark was asked for and is not in its output.
    end_mark_missing: bool = False


@dataclass(frozen=True)
class _Kill:
    command: str
    line: int
    pattern: str
    signal: int
    matched: str
    matched_line: int


def analyse(spec: LauncherSpec) -> Launcher:
    """Return what the launcher's own evidence says."""
    missing = bool(spec.end_mark) and spec.end_mark not in spec.output
    number = _signal_of(spec.rc)
    name = signal.Signals(number).name if number else ""
    if spec.end_mark and not missing:
        return Launcher(rc=spec.rc, signal=name)
    kill = next(_self_kills(spec.script), None)
    syntax = _shells_own(spec) if spec.rc in _SYNTAX_CODES else None
    transport = next((match for words, _codes in _TRANSPORTS if (match := words.search(spec.output))), None)
    # A signal other than the pattern's own is someone else's; without an exit code the missing end is the evidence.
    # ssh turns a remote shell's death by a signal into 255 and says nothing (OpenSSH 9.2); where it did not get
    # there, it says so.
    unfinished = (
        not number and not transport and (missing or spec.rc is None or (spec.rc == 255 and not spec.output.strip()))
    )
    if kill and (number == kill.signal or unfinished):
        return Launcher(
            SELF_KILLED,
            spec.rc,
            signal.Signals(kill.signal).name,
            kill.command,
            kill.line,
            kill.pattern,
            kill.matched,
            kill.matched_line,
            end_mark_missing=missing,
        )
    if syntax or (spec.rc == 2 and not spec.output.strip() and _unbalanced(spec.script)):
        return Launcher(SYNTAX, spec.rc, said=syntax[0].strip() if syntax else "", end_mark_missing=missing)
    # 255 is what ssh says when it did not get there; it is no signal. With words that are not ssh's, a program said them.
    if (spec.rc == 255 and not spec.output.strip()) or any(
        spec.rc in codes and words.search(spec.output) for words, codes in _TRANSPORTS
    ):
        return Launcher(
            NOT_DELIVERED, spec.rc, said=transport[0].strip() if transport else "", end_mark_missing=missing
        )
    return Launcher(rc=spec.rc, signal=name, end_mark_missing=missing)


def unexpanded(output: str) -> tuple[str, ...]:
    """Return the patterns in a command's output that no path matched, so that the shell passed them on as they are."""
    return tuple(dict.fromkeys(match["name"] for match in _UNEXPANDED.finditer(output)))


def _shells_own(spec: LauncherSpec) -> re.Match[str] | None:
    """Return a shell's complaint about the launcher, not about a script that the launcher in its turn ran."""
    for match in _SYNTAX.finditer(spec.output):
        who = match["who"].rsplit("/", 1)[-1]
        if who.lstrip("-") in _SHELLS or who not in spec.script:
            return match
    return None


def _signal_of(rc: int | None) -> int:
    """Return the signal's number that an exit status stands for, 0 for none: 128 + n of a shell, -n of Python."""
    number = 0 if rc is None else (-rc if rc < 0 else rc - 128)
    try:
        return int(signal.Signals(number)) if number > 0 else 0
    except ValueError:
        return 0


def _self_kills(script: str) -> Iterator[_Kill]:
    """Yield the commands of a script that kill the shell that runs it, where its text stands on that shell's command line."""
    values = {match["name"]: match["value"].strip("\"'") for match in _ASSIGNED.finditer(script)}
    for found in _KILL.finditer(script):
        tool = found["tool"].rsplit("/", 1)[-1]
        options, pattern = _arguments(found["rest"])
        if not pattern:
            continue
        pattern = re.sub(r"\$\{?(\w+)\}?", lambda name: values.get(name[1], name[0]), pattern)
        before, after = script[: found.start()], script[found.end() :]
        if tool == "pkill" or tool == "killall":
            number = _signal_option(options)
        else:
            # pgrep -f X | xargs kill, kill $(pgrep -f X), ps | grep X | … kill
            killer = re.match(r"[^;&\n]*?\|\s*xargs\s+(?:-\S+\s+)*kill\b(?P<rest>[^;&|\n]*)", after)
            killer = killer or re.search(r"\bkill\b(?P<rest>[^;&|\n]*)(?:\$\(|`)[^;&\n)]*$", before)
            if not killer:
                continue
            number = _signal_option(_arguments(killer["rest"])[0])
        whole = tool == "grep" or any(re.match(r"-\w*f|--full", option) for option in options)
        if tool == "grep" and not re.search(r"\bps\b[^;&\n]*$", before):
            continue
        # `grep -v grep` drops the shell too: its command line says grep.
        if tool == "grep" and (any("v" in option for option in options) or re.search(r"\|\s*grep\s+-v", after)):
            continue
        if whole:
            match = _search(pattern, script)
        else:
            exact = tool == "killall" or any(re.match(r"-\w*x|--exact", option) for option in options)
            match = next(
                (m for shell in _SHELLS if (m := _search(f"^(?:{pattern})$" if exact else pattern, shell))), None
            )
        if match:
            yield _Kill(
                found[0].strip(),
                before.count("\n") + 1,
                pattern,
                number,
                match[0],
                script.count("\n", 0, match.start()) + 1 if whole else 0,
            )


def _arguments(rest: str) -> tuple[list[str], str]:
    """Return the options and the last operand of a command's words."""
    # A script inside another quoted string has its quotes escaped.
    text = rest.replace('\\"', '"').replace("\\'", "'")
    try:
        words = shlex.split(text)
    except ValueError:
        words = [word.strip("\"'\\") for word in text.split()]
    words = [word for word in words if not re.match(r"\d*[<>]", word)]
    options: list[str] = []
    operands: list[str] = []
    takes_value = False
    for word in words:
        if takes_value:
            options[-1] += f"={word}"
            takes_value = False
        elif word.startswith("-") and len(word) > 1 and not operands:
            options.append(word)
            takes_value = word in ("-s", "--signal", "-u", "--euid", "-U", "--uid", "-g", "-P", "-t", "-G")
        else:
            operands.append(word)
    return options, operands[0] if operands else ""


def _signal_option(options: list[str]) -> int:
    for option in options:
        name = re.sub(r"^(?:--signal=|-s=|--?)", "", option).upper()
        if name.isdigit():
            try:
                return int(signal.Signals(int(name)))
            except ValueError:
                continue
        name = name if name.startswith("SIG") else f"SIG{name}"
        if name in signal.Signals.__members__:
            return int(signal.Signals[name])
    return int(signal.SIGTERM)


def _search(pattern: str, text: str) -> re.Match[str] | None:
    try:
        return re.search(pattern, text)
    except re.error:
        return re.search(re.escape(pattern), text)


def _unbalanced(script: str) -> bool:
    try:
        shlex.split(script, comments=True)
    except ValueError:
        return True
    return False
