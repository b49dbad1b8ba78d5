# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Reading a log: lines whatever the pieces, patterns, progress, exceptions, and bounds."""

from __future__ import annotations

import re

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.redact import Redactor
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.scan import (
    KEPT_CHARS,
    KEPT_LINES,
    KEPT_OPEN,
    KEPT_TRACEBACKS,
    MAX_LINE,
    LineSplitter,
    Scanner,
    find_old,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import DEFAULT_FORBIDDEN, validate
from hypothesis import given
from hypothesis import strategies as st

REDRAWS = (b"\b", b"\x1b[G", b"\x1b[1G", b"\x1b[2K")
LINE_END = re.compile(rb"[\r\n\b]|\x1b\[(?:1?G|2K)")
STEP = {"pattern": r"step=(?P<step>\d+)"}
TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    main()
    ~~~~^^
ValueError: shapes (3,4) and (5,6) not aligned
"""
IGNORED = """\
Traceback (most recent call last):
  File "train.py", line 4, in __del__
    self.pool.join()
RuntimeError: cannot join current thread
"""


def scan(text: str | bytes, **spec: object):
    scanner = Scanner(validate(spec))
    scanner.feed(text.encode() if isinstance(text, str) else text, 1.0)
    scanner.settle(2.0, ended=True)
    return scanner.log("/log")


@given(
    st.lists(st.binary(max_size=12) | st.sampled_from([b"\n", b"\r\n", b"\0\0", b"step=1\r", b"\xff", *REDRAWS])),
    st.data(),
)
def test_lines_do_not_depend_on_the_pieces(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cut = LineSplitter()
    lines, rest = [], whole
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        lines += [(offset, line) for offset, line, _ in cut.feed(rest[:size])]
        rest = rest[size:]
    lines += [(offset, line) for offset, line, _ in cut.flush()]
    clean = whole.replace(b"\0", b"")
    assert [line for _, line in lines] == [line for line in LINE_END.split(clean) if line]
    assert cut.taken == len(clean)
    assert all(clean[offset : offset + len(line)] == line for offset, line in lines)


@given(st.binary(max_size=300), st.integers(1, 7))
def test_long_lines_come_in_bounded_pieces(data: bytes, bound: int) -> None:
    cut = LineSplitter(bound)
    pieces = [*cut.feed(data), *cut.flush()]
    assert all(0 < len(piece) <= bound for _, piece, _ in pieces)
    assert len(cut.pending[1]) <= bound
    assert b"".join(piece for _, piece, _ in pieces) == LINE_END.sub(b"", data.replace(b"\0", b""))


def test_memory_of_a_log_without_line_ends_is_bounded() -> None:
    scanner = Scanner(validate({}))
    for _ in range(64):
        scanner.feed(b"x" * MAX_LINE, 1.0)
    assert len(scanner._splitter.pending[1]) <= MAX_LINE
    log = scanner.log("/log")
    assert log.new_bytes == 64 * MAX_LINE
    assert len(log.tail) <= KEPT_LINES and max(map(len, log.tail)) <= KEPT_CHARS


def test_patterns() -> None:
    log = scan(
        "ev=ready\nother\nev=ready again\nall done\n",
        log={"required": ["ev=ready", "never"]},
        done={"pattern": "all done"},
    )
    assert log.required["ev=ready"].line == "ev=ready" and log.required["ev=ready"].offset == 0
    assert log.required["never"] is None
    assert log.done.offset == 30
    assert log.tail == ("ev=ready", "other", "ev=ready again", "all done")


RANKS = {"pattern": r"step=(?P<step>\d+) rank=(?P<rank>\d+)", "ranks": 2}


def test_of_ranks_that_share_a_log_each_must_have_a_value() -> None:
    log = scan("step=1 rank=1\nstep=2 rank=1\nstep=3\n", progress=RANKS)
    assert log.progress is None and log.ranks == ("1",)


def test_the_progress_of_ranks_is_that_of_the_one_behind() -> None:
    scanner = Scanner(validate({"progress": RANKS}))
    for at, line in enumerate(("step=1 rank=0", "step=1 rank=1", "step=2 rank=0", "step=2 rank=1", "step=3 rank=0")):
        scanner.feed(f"{line}\n".encode(), at)
    found = scanner.log("/log").progress
    assert (found.rank, found.last, found.changes, found.changed_at) == ("1", 2, 1, 3)
    assert found.ranks == {"0": 3, "1": 2}
    scanner.feed(b"step=7 rank=0\n", 9)
    assert scanner.log("/log").progress.changed_at == 3, "a rank that goes on hides one that stands"


def test_undecodable_bytes_and_a_hole_of_nuls_survive() -> None:
    log = scan(b"\0" * 4096 + b"caf\xe9 step=4\n\xff\xfe\n", progress=STEP)
    assert log.progress.last == 4
    assert log.tail == ("caf\\xe9 step=4", "\\xff\\xfe")
    assert log.new_bytes == 15


def test_a_line_without_end_is_seen_when_the_writer_pauses_but_its_step_may_grow() -> None:
    scanner = Scanner(validate({"progress": STEP, "log": {"required": ["ready"]}}))
    scanner.feed(b"step=1\nready step=1", 1.0)
    scanner.settle(2.0)
    assert scanner.log("/log").required["ready"] is not None
    assert scanner.log("/log").progress.changes == 0
    scanner.feed(b"2\n", 3.0)
    assert (scanner.log("/log").progress.last, scanner.log("/log").progress.changes) == (12, 1)


def test_a_progress_bar_ends_its_lines_with_carriage_returns() -> None:
    log = scan("\r1/99 [ ]\r2/99 [ ]\r3/99 [ ]", progress={"pattern": r"(?P<n>\d+)/99"})
    assert (log.progress.first, log.progress.last, log.progress.changes) == (1, 3, 2)


@pytest.mark.parametrize("redraw", ["\x1b[1G", "\x1b[G", "\x1b[2K\x1b[1G", "\b" * 8])
def test_a_progress_bar_is_drawn_anew_without_a_carriage_return(redraw: str) -> None:
    log = scan(redraw.join(["1/99 [ ]", "2/99 [ ]", "3/99 [ ]"]), progress={"pattern": r"^(?P<n>\d+)/99"})
    assert (log.progress.last, log.progress.changes, log.tail[-1]) == (3, 2, "3/99 [ ]")
    assert log.progress.offset == 2 * len("1/99 [ ]" + redraw)


def test_a_line_that_was_read_in_pieces_is_told() -> None:
    assert scan('{"step": 1}\n').cut_at is None
    log = scan('{"text": "%s", "step": 1}\n' % ("x" * MAX_LINE), progress={"json_field": "step"})
    assert (log.progress, log.cut_at) == (None, MAX_LINE)


@pytest.mark.parametrize(
    ("lines", "changes", "last"),
    [
        ('{"step": 1}\n{"step": 2}\n', 1, 2),
        ('INFO {"step": 1}\nnot json {\n{"loss": 2}\n[1]\n', 0, 1),
        ('{"step": "warm-up"}\n{"step": "train"}\n', 1, "train"),
        ('{"step": true}\n{"step": null}\n{"step": 7}\n', 0, 7),
        ('{"step": NaN}\n{"step": NaN}\n', 0, "nan"),
        ('{"step": 1e999}\n{"step": 5}\n', 1, 5),
        ('{"step": 90}\n{"step": 40}\n', 1, 40),
    ],
)
def test_json_progress(lines: str, changes: int, last: object) -> None:
    progress = scan(lines, progress={"json_field": "step"}).progress
    assert (progress.changes, progress.last) == (changes, last)


def test_nested_json_field() -> None:
    assert (
        scan('{"metrics": {"step": 3}}\n{"metrics": 5}\n', progress={"json_field": "metrics.step"}).progress.last == 3
    )


def test_own_pace_is_the_median_of_the_gaps() -> None:
    scanner = Scanner(validate({"progress": STEP}))
    for step, at in enumerate([0.0, 1.0, 2.0, 30.0, 31.0]):
        scanner.feed(b"step=%d\nstep=%d\n" % (step, step), at)
    progress = scanner.log("/log").progress
    assert (progress.median_gap, progress.changed_at, progress.changes) == (1.0, 31.0, 4)


@pytest.mark.parametrize(
    ("text", "line", "after"),
    [
        (TRACEBACK, "ValueError: shapes (3,4) and (5,6) not aligned", 0),
        (TRACEBACK + "ev=exit code=0\n", "ValueError: shapes (3,4) and (5,6) not aligned", 1),
        ("Traceback (most recent call last):\n  File 'x', line 1\nKeyboardInterrupt\n", "KeyboardInterrupt", 0),
        (
            "Traceback (most recent call last):\n  File 'x'\nKeyError: 1\n\nDuring handling of the above exception, another exception "
            "occurred:\n\nTraceback (most recent call last):\n  File 'y'\nRuntimeError: two\n",
            "RuntimeError: two",
            0,
        ),
        (
            "[rank0]: Traceback (most recent call last):\n[rank0]:   File 'x'\n[rank0]: torch.AcceleratorError: boom\n",
            "[rank0]: torch.AcceleratorError: boom",
            0,
        ),
        (
            "╭─────────── Traceback (most recent call last) ───────────╮\n│ /x.py:1 in <module> │\n│ ❱ 1 1/0 │\n"
            "╰──────────────────────────╯\nZeroDivisionError: division by zero\n",
            "ZeroDivisionError: division by zero",
            0,
        ),
        ('  File "x.py", line 1\n    if\n      ^\nSyntaxError: invalid syntax\n', "SyntaxError: invalid syntax", 0),
        (
            "  + Exception Group Traceback (most recent call last):\n  |   File 'x'\n  | ExceptionGroup: two (2 sub-exceptions)\n"
            "  +-+---------------- 1 ----------------\n    | ValueError: inner\n    +------------------------------------\n",
            "    | ValueError: inner",
            0,
        ),
        (
            "Traceback (most recent call last):\n  File 'x'\nmain.<locals>.BadBatch: odd\n",
            "main.<locals>.BadBatch: odd",
            0,
        ),
        (
            'Traceback (most recent call last):\n  File \x1b[35m"t.py"\x1b[0m, line \x1b[35m3\x1b[0m\n    \x1b[31mmain\x1b[0m()\n'
            "\x1b[1;35mValueError\x1b[0m: \x1b[35modd\x1b[0m\nbye\n",
            "ValueError: odd",
            1,
        ),
        (
            "".join(f"[rank0]: {line}\n[rank1]: {line}\n" for line in TRACEBACK.splitlines())
            + "[rank0]:[W1130] no destroy\n",
            "[rank1]: ValueError: shapes (3,4) and (5,6) not aligned",
            1,
        ),
        (
            "[rank0]: Traceback (most recent call last):\n[rank1]: step 4\n[rank0]:   File 'x'\nloading\n[rank0]: OSError: gone\n",
            "[rank0]: OSError: gone",
            0,
        ),
        (
            "[ERROR] Traceback (most recent call last):\n  File 'x'\nOSError: gone\n[ERROR] giving up\n",
            "OSError: gone",
            1,
        ),
        (
            'Traceback (most recent call last):\n\n> File "train.py", line 9, in <module>\n    main()\n    └ <function main>\n\n'
            '  File "train.py", line 6, in main\n    x / 0\n    │ └ 7\n\nZeroDivisionError: division by zero\n',
            "ZeroDivisionError: division by zero",
            0,
        ),
        (
            "Traceback (most recent call last):\n  File 'x'\nRuntimeError: Error(s) in loading state_dict for M:\n"
            + "\tsize mismatch for layer\n" * 300
            + "bye\n  bye\n",
            "RuntimeError: Error(s) in loading state_dict for M:",
            2,
        ),
        (
            "".join(
                f"[rank{rank}]: {line}\n"
                for line in ("Traceback (most recent call last):", "  File 'x'", "OSError: gone:", "  this", "  that")
                for rank in (0, 1)
            ),
            "[rank1]: OSError: gone:",
            0,
        ),
        (
            TRACEBACK + "Exception ignored in: <function T.__del__>\n" + IGNORED,
            "ValueError: shapes (3,4) and (5,6) not aligned",
            1,
        ),
        (
            "Exception ignored in: <function T.__del__>\n" + IGNORED + TRACEBACK,
            "ValueError: shapes (3,4) and (5,6) not aligned",
            0,
        ),
        (
            TRACEBACK + "saving\n" + "Exception ignored in: x\nTraceback (most recent call last):\n  File",
            "ValueError: shapes (3,4) and (5,6) not aligned",
            2,
        ),
    ],
)
def test_an_exceptions_last_line_is_found(text: str, line: str, after: int) -> None:
    (found,) = scan("before\n" + text).forbidden
    assert (found.line, found.kind, found.lines_after) == (line, "traceback", after)


@pytest.mark.parametrize(
    "says",
    [
        "Exception ignored in: <function T.__del__ at 0x7ff419d204a0>",
        "Exception ignored in atexit callback: <function f at 0x7f>",
        "Exception ignored on threading shutdown <module 'threading' from 'threading.py'>:",
        "Exception ignored while calling deallocator <function T.__del__ at 0x7f>:",
        "Error in atexit._run_exitfuncs:",
        "--- Logging error ---",
    ],
)
def test_an_exception_of_which_python_says_that_it_is_ignored_is_none(says: str) -> None:
    assert scan(f"{says}\n{IGNORED}").forbidden == ()
    chained = IGNORED + "\nDuring handling of the above exception, another exception occurred:\n\n" + IGNORED
    assert (
        scan(f"step=3\n{says}\n{chained}Call stack:\n  File \"x\", line 5, in <module>\nMessage: 'x'\n").forbidden == ()
    )
    assert len(scan(f"{says}\n{IGNORED}{TRACEBACK}").forbidden) == 1


def test_what_a_job_goes_on_with_is_no_message() -> None:
    assert scan(TRACEBACK + "".join(f"\r {i}%|#" for i in range(9))).forbidden[0].lines_after == 9
    scanner = Scanner(validate({}))
    for at, line in ((1.0, TRACEBACK), (1.1, "  layer 1\n"), (9.0, "  loaded\n"), (9.1, "  loaded\n")):
        scanner.feed(line.encode(), at)
    assert scanner.log("/log").forbidden[0].lines_after == 2


def test_tracebacks_that_no_exception_ends_are_bounded() -> None:
    scanner = Scanner(validate({}))
    for rank in range(2 * KEPT_TRACEBACKS):
        scanner.feed(f"[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]:   File 'x'\n".encode(), 1.0)
    assert len(scanner._traceback._open) == KEPT_TRACEBACKS
    scanner.feed(b"step\n" * (KEPT_OPEN + 1), 2.0)
    assert not scanner._traceback._open
    (found,) = scanner.log("/log").forbidden
    assert (found.line, found.lines_after) == (f"[rank{rank}]: Traceback (most recent call last):", KEPT_OPEN + 1)


@pytest.mark.parametrize(
    "line",
    [
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "NCCL WARN Call to ibv_modify_qp failed: unhandled system error",
        "CUDA out of memory",
        "RuntimeError: CUDA out of memory: 2 GiB requested",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.",
        "ERROR: CUDA out of memory (allocated 12 of 80 GiB)",
        "CUDA error: 2",
        "bash: line 1: 12 Segmentation fault      python x.py",
        "./run.sh: line 3: 12345 Segmentation fault      (core dumped) python3 train.py",
        "line 3: 12345 Segmentation fault (core dumped)",
        "Segmentation fault",
        "Segmentation fault (core dumped)",
        "make: *** [Makefile:3: train] Segmentation fault (core dumped)",
        "srun: error: node1: task 0: Segmentation fault",
        "[node1:12345] Signal: Segmentation fault (11)",
        "[node1:1:0:1] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)",
        "Segmentation fault: 11",
        "OSError: [Errno 28] No space left on device",
        "Fatal Python error: Aborted",
        "Fatal Python error: Bus error",
        "terminate called after throwing an instance of 'c10::Error'",
    ],
)
def test_default_forbidden(line: str) -> None:
    assert [match.kind for match in scan(line + "\n").forbidden] == ["default"]
    assert scan(line + "\n", log={"default_forbidden": False}).forbidden == ()


@pytest.mark.parametrize(
    "line",
    [
        "[rank0]:[I ProcessGroupNCCL.cpp:905] ProcessGroupNCCL initialization options: size: 2, TIMEOUT(ms): 600000",
        "NCCL version 2.21.5+cuda12.4",
        "NCCL INFO NCCL_TIMEOUT set by environment to 1800",
        "UserWarning: torch.utils.checkpoint: CUDA errors are reported asynchronously",
        "WARNING: 0 exceptions, 0 errors; errors_total=0 cuda_errors=0 oom_retries=0",
        "Error: 0.013 (validation), best error: 0.011",
        "CUDA error: no error",
        "summary: CUDA out of memory retries: 0, CUDA error: 0",
        "CUDA out of memory: 0",
        "cuda_oom=0 CUDA out of memory events=3 steps=7",
        "INFO: Segmentation fault (SIGSEGV) handler installed",
        "installed a handler for Segmentation fault",
        "traceback off; ValueError handling: on",
    ],
)
def test_healthy_lines_are_not_forbidden(line: str) -> None:
    assert scan(line + "\n").forbidden == ()


def test_the_last_match_of_a_forbidden_pattern_counts() -> None:
    (found,) = scan("nan\nok\nnan\nok\nok\n", log={"forbidden": ["nan"]}).forbidden
    assert (found.offset, found.kind, found.lines_after) == (7, "declared", 2)


def test_what_is_kept_is_redacted_before_it_is_cut() -> None:
    secret = "correct-horse-battery"
    scanner = Scanner(validate({"log": {"required": ["ready"]}}), Redactor([secret]))
    scanner.feed(
        b"x" * (KEPT_CHARS - 5)
        + secret.encode()
        + b" ready\n"
        + b"ready "
        + secret.encode()
        + b"\npart "
        + secret.encode(),
        1.0,
    )
    log = scanner.log("/log")
    kept = " ".join([*log.tail, log.required["ready"].line])
    assert "corre" not in kept and kept.count("*") >= 10


def test_old_content() -> None:
    spec = validate({"log": {"required": ["ready"]}, "progress": STEP})
    assert find_old(spec, b"hello\nstep=77", 1.0).line == "step=77"
    assert find_old(spec, b"ready\n", 1.0).pattern == "ready"
    assert find_old(spec, b"nothing\n", 1.0) is None
    assert find_old(validate({"progress": {"json_field": "step"}}), b'{"step": 3}\n', 1.0).line == '{"step": 3}'
    assert find_old(validate({"done": {"pattern": "bye"}}), b"bye\n", 1.0).pattern == "bye"


def test_default_patterns_compile() -> None:
    assert all(re.compile(pattern) for pattern in DEFAULT_FORBIDDEN)
