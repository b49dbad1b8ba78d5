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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import shell
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
# POSIX' exit codes of a command that could not begin, and what shells, env and nohup then say.
_NOT_RUN = {
    126: (
        "a command was found and could not be executed: look at its mode, its first line and its mount",
        r"(?m)^.*(?:Permission denied|[Ii]s a directory|cannot execute|bad interpreter|Exec format error).*$",
    ),
    127: (
        "a command was not found: look at its name, and at the PATH that a shell without a login has",
        r"(?m)^.*(?:not found|No such file or directory|bad interpreter).*$",
    ),
}
# What ls, tail, wc and cat say of a pattern that matched no file, and tail's and more's heads.
_UNEXPANDED = re.compile(
    r"(?:cannot (?:open|access) |==> |: )['\"\u2018]?(?P<name>[^\s:'\"\u2018\u2019]*[*?\[][^\s:'\"\u2018\u2019]*)"
    r"['\"\u2019]?(?:(?: for reading)?: No such file| <==)"
)
_ASSIGNED = re.compile(r"(?:^|[\s;&|])(?P<name>[A-Za-z_]\w*)=(?P<value>\"[^\"]*\"|'[^']*'|[^\s;&|\"']+)")
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh", "ash")
_SHELL_STARTERS = ("su", "runuser", "script")
_KILLERS = ("pkill", "killall")
_GREPS = ("grep", "egrep", "fgrep")
_PRINTERS = ("echo", "printf", "cat", "logger", "wall", "man", "which", "type", *_GREPS)
# Their words are a command on another machine, where nothing of this one's command lines is seen.
_CONTAINERS = ("pct", "lxc-attach", "lxc", "incus", "docker", "podman", "nerdctl", "kubectl", "crictl", "machinectl")
_MULTIPLEXERS = ("tmux", "screen", "watch", "parallel", "ansible")
_WRAPPERS = (
    "sudo", "doas", "nohup", "exec", "command", "builtin", "time", "env", "nice", "ionice", "chrt", "taskset", "numactl", "setsid", "timeout",
    "stdbuf", "xargs", "find", "chroot", "nsenter", "unshare", "systemd-run", "flock", "busybox", "sshpass",
)  # fmt: skip
_COMMANDS = frozenset(
    (*_SHELLS, *_SHELL_STARTERS, *_KILLERS, *_PRINTERS, *_CONTAINERS, *_MULTIPLEXERS, "ssh", "kill", "pgrep", "ps", "eval", "tee")
)  # fmt: skip
_SSH_TAKES_VALUE = re.compile(r"-[BbcDEeFIiJLlmOoPpQRSWw]")
_DEEPEST = 8  # scripts within each other
_MOST = 1000  # scripts within one


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


def not_run(spec: LauncherSpec) -> tuple[str, str]:
    """Return why the launcher's last command could not even begin, and the line of its output that says so; "" where it is none of that."""
    why, said = _NOT_RUN.get(spec.rc, ("", ""))
    lines = re.findall(said, spec.output) if why else []
    return why, lines[-1].strip() if lines else ""


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
    return _Runs(script).script(shell.Text(script, 1), (shell.Text(script, 1),))


class _Runs:
    """What a script runs. A chain is the command lines of the shells that wait for a command, as far as it can see them."""

    def __init__(self, script: str) -> None:
        self.values = {match["name"]: match["value"].strip("\"'") for match in _ASSIGNED.finditer(script)}
        # What it writes into files: it may run them.
        self.files: dict[str, shell.Text] = {}
        # A file that runs itself twice would be read for ever.
        self.left = _MOST

    def script(
        self, script: shell.Text, chain: tuple[shell.Text, ...], stdin: shell.Text | None = None, depth: int = 0
    ) -> Iterator[_Kill]:
        """Yield the kills in a script that runs with a standard input."""
        self.left -= 1
        if depth > _DEEPEST or self.left < 0:
            return
        text = self._value(script.text)
        for _number, group in groupby(shell.read(text, script.line), lambda command: command.pipeline):
            pipeline = [(self._proper(command.words), command) for command in group]
            fed = stdin
            for words, command in pipeline:
                for inner in command.substitutions:
                    yield from self.script(inner, chain, depth=depth + 1)
                fed = command.stdin or fed
                yield from self._command(words, command, chain, fed, depth)
                fed = self._printed(words, fed)
            for words, command in pipeline:
                if words and _name(words[0]) == "kill":
                    number = _signal_option(_arguments(words)[0])
                    listed = pipeline if "xargs" in map(_name, command.words) else ()
                    for inner in command.substitutions:
                        listed = [(self._proper(each.words), each) for each in shell.read(inner.text, inner.line)]
                    yield from self._kills(_lists(listed), number, chain)

    def _command(
        self,
        words: list[shell.Text],
        command: shell.Command,
        chain: tuple[shell.Text, ...],
        fed: shell.Text | None,
        depth: int,
    ) -> Iterator[_Kill]:
        if not words or depth > _DEEPEST:
            return
        name, line = _name(words[0]), words[0].line
        texts = [word.text for word in words]
        own = shell.Text(" ".join(texts), line)
        operands = [word for word in words[1:] if not word.text.startswith("-")]
        if name in _KILLERS:
            yield from self._kills([(words, command)], _signal_option(_arguments(words)[0]), chain)
        elif name in (*_SHELLS, *_SHELL_STARTERS):
            given = next((after for word, after in zip(words[1:], words[2:]) if _is_c(word)), None)
            file = next((self.files[_name(word)] for word in operands if _name(word) in self.files), None)
            reads = not operands or "-s" in texts or name in _SHELL_STARTERS
            script = given or file or (fed if reads else None)
            if script:
                yield from self.script(script, (*chain, own), fed, depth + 1)
        elif name == "ssh":
            remote = _remote(words)
            if remote:
                # sshd gives it to a shell as one text.
                script = shell.Text(" ".join(self._value(word.text) for word in remote), remote[0].line)
                yield from self.script(script, (script,), fed, depth + 1)
            elif fed:
                yield from self.script(fed, (shell.Text("-bash", line),), depth=depth + 1)
        elif name in _CONTAINERS:
            yield from self._command(self._known(words[1:]), command, (), fed, depth + 1)
        elif name == "eval":
            yield from self.script(shell.Text(" ".join(texts[1:]), line), chain, fed, depth + 1)
        elif name == "trap" and operands:
            yield from self.script(operands[0], chain, depth=depth + 1)
        elif name in _MULTIPLEXERS:
            for word in operands:
                if re.search(r"\s", word.text):
                    yield from self.script(word, (*chain, word), depth=depth + 1)
        elif name in self.files:
            yield from self.script(self.files[name], (*chain, own), fed, depth + 1)
        elif name.startswith("$") and self._value(words[0].text) != words[0].text:
            yield from self.script(shell.Text(self._value(words[0].text), line), chain, fed, depth + 1)
        file = operands[-1].text if name == "tee" and operands else command.writes
        written = fed if name == "tee" else self._printed(words, fed)
        if file and written:
            self.files[file.rsplit("/", 1)[-1]] = written
        if name not in _PRINTERS and name not in _SHELLS:
            # srun bash -c …, tmux new bash -c …
            for index, (word, after) in enumerate(zip(words[1:], words[2:]), 1):
                if _name(word) in _SHELLS and _is_c(after) and name != "ssh" and name not in _CONTAINERS:
                    yield from self._command(words[index:], command, chain, fed, depth + 1)

    def _kills(
        self, listed: list[tuple[list[shell.Text], shell.Command]], number: int, chain: tuple[shell.Text, ...]
    ) -> Iterator[_Kill]:
        """Yield those of these commands, which find what is killed, that find one of the chain."""
        for words, command in listed:
            tool = _name(words[0])
            options, pattern = _arguments(words)
            if not pattern:
                continue
            pattern = re.sub(r"\$\{?(\w+)\}?", lambda name: self.values.get(name[1], name[0]), pattern)
            exact = tool == "killall" or any(re.match(r"-\w*x|--exact", option) for option in options)
            if tool in _GREPS or any(re.match(r"-\w*f|--full", option) for option in options):
                found = next(((m, text) for text in chain if (m := _search(pattern, text.text))), None)
            elif chain:
                pattern_of = f"^(?:{pattern})$" if exact else pattern
                found = next(((m, None) for name in _SHELLS if (m := _search(pattern_of, name))), None)
            else:
                found = None
            if found:
                match, text = found
                line = text.line + text.text.count("\n", 0, match.start()) if text else 0
                yield _Kill(command.written, words[0].line, pattern, number, match[0], line)

    def _proper(self, words: list[shell.Text]) -> list[shell.Text]:
        """Return a command's words without what stands before its name."""
        while words:
            if re.match(r"[A-Za-z_]\w*\+?=", words[0].text):
                words = words[1:]
            elif _name(words[0]) in _WRAPPERS:
                words = self._known(words[1:])
            else:
                break
        return words

    def _known(self, words: list[shell.Text]) -> list[shell.Text]:
        """Return the words from the first that is a command of which it matters what it does: options' values come before it."""
        return next((words[index:] for index, word in enumerate(words) if _name(word) in (*_COMMANDS, *self.files)), [])

    def _value(self, text: str) -> str:
        """Return the value of a text that is a variable and nothing else, any other text as it is."""
        variable = re.fullmatch(r"\$\{?(\w+)\}?", text)
        return self.values.get(variable[1], text) if variable else text

    @staticmethod
    def _printed(words: list[shell.Text], fed: shell.Text | None) -> shell.Text | None:
        """Return what a command prints, where that is plain: the standard input of the next one."""
        name = _name(words[0]) if words else ""
        if name in ("echo", "printf"):
            text = " ".join(word.text for word in words[1:])
            return shell.Text(text.replace("\\n", "\n"), words[0].line)
        return fed if name == "cat" and len(words) == 1 else None


def _name(word: shell.Text) -> str:
    return word.text.rsplit("/", 1)[-1]


def _is_c(word: shell.Text) -> bool:
    return bool(re.fullmatch(r"-[A-Za-z]*c|--command", word.text))


def _remote(words: list[shell.Text]) -> list[shell.Text]:
    """Return the words of an ssh command line that are behind the host."""
    rest = words[1:]
    while rest and rest[0].text.startswith("-"):
        rest = rest[2 if _SSH_TAKES_VALUE.fullmatch(rest[0].text) else 1 :]
    return rest[1:]


def _lists(
    pipeline: Sequence[tuple[list[shell.Text], shell.Command]],
) -> list[tuple[list[shell.Text], shell.Command]]:
    """Return the commands of a pipeline that list processes by a pattern: pgrep, and grep behind ps."""
    names = [_name(words[0]) if words else "" for words, _command in pipeline]
    greps = [index for index, name in enumerate(names) if name in _GREPS and "ps" in names[:index]]
    # `grep -v grep` drops the shell too: its command line says grep.
    if any(re.match(r"-\w*v", word.text) for index in greps for word in pipeline[index][0][1:]):
        greps = []
    return [each for index, each in enumerate(pipeline) if names[index] == "pgrep" or index in greps]


def _arguments(words: list[shell.Text]) -> tuple[list[str], str]:
    """Return the options and the first operand of a command."""
    options: list[str] = []
    takes_value = False
    for word in words[1:]:
        if takes_value:
            options[-1] += f"={word.text}"
            takes_value = False
        elif word.text.startswith("-") and len(word.text) > 1:
            options.append(word.text)
            takes_value = word.text in ("-s", "--signal", "-u", "--euid", "-U", "--uid", "-g", "-P", "-t", "-G")
        else:
            return options, word.text
    return options, ""


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
