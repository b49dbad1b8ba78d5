# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A shell script's simple commands, as far as it takes to tell what runs from what is only text. Pure, and total: no text is an error.

No parser from a library: this is part of the one file that a target gets, which has the standard library alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field

_DEEPEST = 20  # quotes and substitutions within each other
_REDIRECTION = re.compile(r"&>>?|<<<|<<-?|<>|<&|>&|>>|>\||<|>")
_KEYWORDS = ("if", "then", "elif", "else", "while", "until", "do", "!", "{", "}")
_CLOSING = {'"': '"', "`": "`", "$(": ")", "(": ")", "${": "}"}


@dataclass(frozen=True)
class Text:
    """A piece of a script and the number of the line that it begins in."""

    text: str
    line: int


@dataclass
class Command:
    """One simple command; those of one pipeline have the same number."""

    pipeline: int
    # Its words without quotes; a substitution stands in them as it was written.
    words: list[Text] = field(default_factory=list)
    # What its command substitutions run.
    substitutions: list[Text] = field(default_factory=list)
    # Its heredoc or here-string.
    stdin: Text | None = None
    # The file that its output goes to.
    writes: str = ""
    # As it was written.
    written: str = ""


def read(text: str, line: int = 1) -> list[Command]:
    """Return the simple commands of a script whose first line has the number ``line``."""
    reader = _Reader(text, line)
    reader.read()
    return reader.found


class _Reader:
    def __init__(self, text: str, line: int) -> None:
        self.text, self.first = text, line
        self.newlines = [match.start() for match in re.finditer("\n", text)]
        self.found: list[Command] = []
        self.command, self.began = Command(0), -1
        self.word: list[str] | None = None
        self.word_at, self.redirection = 0, ""
        self.heredocs: list[tuple[Command, str, bool]] = []
        self.at = 0

    def read(self) -> None:
        text = self.text
        while self.at < len(text):
            at, char = self.at, text[self.at]
            pair = text[at : at + 2]
            if pair == "\\\n":
                self.at += 2
            elif char == "\\":
                self._add(pair[1:], at, 2)
            elif char == "'" or pair == "$'":
                start = at + len(char if char == "'" else pair)
                end = _end(text, start - 1)
                self._add(text[start : max(start, end - 1)] if text[end - 1] == "'" else text[start:end], at, end - at)
            elif char == '"':
                self._double()
            elif char == "`" or pair in ("$(", "${"):
                self._substitution()
            elif char == "#" and self.word is None:
                self.at = self._line_end(at)
            elif char in "<>" or pair == "&>":
                self._redirect()
            elif char in ";&|()\n":
                self._end_command(at, piped=char == "|" and pair != "||")
                self.at += 2 if pair in ("||", "|&", "&&", ";;") else 1
                if char == "\n":
                    self._read_heredocs()
            elif char.isspace():
                self._end_word()
                self.at += 1
            else:
                self._add(char, at, 1)
        self._end_command(len(text), piped=False)

    def _line(self, at: int) -> int:
        return self.first + bisect_left(self.newlines, at)

    def _line_end(self, at: int) -> int:
        index = bisect_left(self.newlines, at)
        return self.newlines[index] if index < len(self.newlines) else len(self.text)

    def _add(self, text: str, at: int, taken: int) -> None:
        if self.word is None:
            self.word, self.word_at = [], at
            if self.began < 0:
                self.began = at
        self.word.append(text)
        self.at = at + taken

    def _double(self) -> None:
        text, at = self.text, self.at
        self._add("", at, 1)
        while self.at < len(text):
            at, pair = self.at, text[self.at : self.at + 2]
            if pair[0] == '"':
                self.at += 1
                return
            if pair[0] == "`" or pair in ("$(", "${"):
                self._substitution()
            # A continued line stays one, so that the lines of a script in quotes keep their numbers.
            elif pair[0] == "\\" and pair[1:] in tuple('$`"\\'):
                self._add(pair[1:], at, 2)
            else:
                self._add(pair[0], at, 1)

    def _substitution(self) -> None:
        at, end = self.at, _end(self.text, self.at)
        whole = self.text[at:end]
        opener = "`" if whole[0] == "`" else whole[:2]
        if opener != "${":
            inner = whole[len(opener) :]
            self.command.substitutions.append(Text(inner[: -1 if inner[-1:] in ("`", ")") else None], self._line(at)))
        self._add(whole, at, end - at)

    def _redirect(self) -> None:
        if self.word is not None and "".join(self.word).isdigit():  # 2>
            self.word = None
        self._end_word()
        operator = _REDIRECTION.match(self.text, self.at)[0]
        self.at += len(operator)
        if operator in "<>" and self.text[self.at : self.at + 1] == "(":
            end = _end(self.text, self.at)
            self.command.substitutions.append(Text(self.text[self.at + 1 : end - 1], self._line(self.at)))
            self._add(self.text[self.at : end], self.at, end - self.at)
        else:
            self.redirection = operator

    def _end_word(self) -> None:
        if self.word is None:
            return
        word, operator = Text("".join(self.word), self._line(self.word_at)), self.redirection
        self.word, self.redirection = None, ""
        if operator in ("<<", "<<-"):
            self.heredocs.append((self.command, word.text, operator == "<<-"))
        elif operator == "<<<":
            self.command.stdin = word
        elif operator in (">", ">>", ">|"):
            self.command.writes = word.text
        elif not operator and not self.command.words and word.text in _KEYWORDS:
            self.began = -1
        elif not operator:
            self.command.words.append(word)

    def _end_command(self, at: int, piped: bool) -> None:
        self._end_word()
        self.redirection = ""
        command = self.command
        if command.words:
            command.written = self.text[self.began : at].strip()
            self.found.append(command)
        same = piped or not command.words  # a pipeline may go on in the next line
        self.command, self.began = Command(command.pipeline + (0 if same else 1)), -1

    def _read_heredocs(self) -> None:
        for command, delimiter, tabs in self.heredocs:
            start = end = self.at
            while self.at < len(self.text):
                end, stop = self.at, self._line_end(self.at)
                line = self.text[end:stop]
                self.at = stop + 1
                if (line.lstrip("\t") if tabs else line).rstrip("\r") == delimiter:
                    break
            else:
                end = len(self.text)
            command.stdin = Text(self.text[start:end], self._line(start))
        self.heredocs = []


def _end(text: str, at: int, depth: int = 0) -> int:
    """Return where the quoted text or the substitution that begins at ``at`` is over, the text's end where it is not closed."""
    if text[at] == "'":
        return text.find("'", at + 1) + 1 or len(text)
    opener = text[at : at + 2] if text[at] == "$" else text[at]
    at += len(opener)
    while at < len(text) and depth < _DEEPEST:
        char = text[at]
        if char == _CLOSING[opener]:
            return at + 1
        if char == "\\":
            at += 2
        elif (
            text.startswith(("$(", "${"), at)
            or char in '"`'
            or (char == "'" and opener != '"')
            or (char == "(" and opener in ("$(", "("))
        ):
            at = _end(text, at, depth + 1)
        else:
            at += 1
    return len(text)
