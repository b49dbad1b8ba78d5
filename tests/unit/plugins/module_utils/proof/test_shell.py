# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which commands a script has, and what is only text in it."""

from __future__ import annotations

import time

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.launcher import analyse
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.shell import read
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import LauncherSpec
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        ("a b; c&&d||e & f\ng", [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g"]]),
        ("a#b # c; d\ne '# f' \"# g\"", [["a#b"], ["e", "# f", "# g"]]),
        ("a 'b;\"c' \"d;'\\\"$e\" f\\ g $'h' ''", [["a", 'b;"c', "d;'\"$e", "f g", "h", ""]]),
        ("a >b 2>&1 <c &>d e", [["a", "e"]]),
        ("a \\\n b", [["a", "b"]]),
        ("if ! a; then { b; }; fi", [["a"], ["b"], ["fi"]]),
        ("(a; b)", [["a"], ["b"]]),
        ("case $x in y) a;; esac", [["case", "$x", "in", "y"], ["a"], ["esac"]]),
        ('a $(b ")" (c)) `d; e` ${f:-)} <(g)', [["a", '$(b ")" (c))', "`d; e`", "${f:-)}", "(g)"]]),
        ("a <<X; b\n# c ' \nX\nd", [["a"], ["b"], ["d"]]),
        ("a <<-'X Y' <<Z\nb\n\tX Y\nc\nZ\nd", [["a"], ["d"]]),
        ("a 'not closed", [["a", "not closed"]]),
        ("", []),
    ],
)
def test_the_words_of_each_command(script: str, commands: list[list[str]]) -> None:
    assert [[word.text for word in command.words] for command in read(script)] == commands


def test_lines_pipelines_heredocs_and_substitutions() -> None:
    found = read("\na |\n  b $(c\n) <<X > out\nin\nX\n'd\n' e", line=10)
    assert [(command.pipeline, command.words[-1].line, command.written) for command in found] == [
        (0, 11, "a"),
        (0, 12, "b $(c\n) <<X > out"),
        (1, 17, "'d\n' e"),
    ]
    _a, b, _d = found
    assert (b.stdin.text, b.stdin.line, b.writes) == ("in\n", 14, "out")
    assert [(inner.text, inner.line) for inner in b.substitutions] == [("c\n", 12)]


def test_a_file_that_runs_itself_is_read_no_more_often_than_helps() -> None:
    began = time.process_time()
    assert analyse(LauncherSpec(f"cat > f <<X\n{'./f;' * 50}\nX\n./f", 143)).code == ""
    assert time.process_time() - began < 5


@given(
    st.lists(st.sampled_from([*"ab'\"`$(){}\\<>&|;#\n -", "$(", "<<", "bash -c ", "pkill -f a", "ssh h "])).map("".join)
)
def test_no_text_is_an_error(script: str) -> None:
    analyse(LauncherSpec(script, 143))
