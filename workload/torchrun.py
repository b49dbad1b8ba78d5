#!/usr/bin/env python3
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""torchrun as a job under systemd wants it; its arguments are torchrun's.

torchrun itself ends with 1 whatever its program ended with, and at SIGTERM kills after 30 s and ends with a traceback.
Here the exit status is that of the first rank that failed (128+n for a signal), SIGTERM is handed on, and whoever stops
the job decides how long that may take.  The first line is there before torch is imported.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

from common.contract import OK, UNAVAILABLE, format_event

STOPS = (signal.SIGTERM, signal.SIGINT)


def say(event: str, **fields) -> None:
    print(format_event(event, fields), flush=True)


def leave(code: int, reason: str, **fields) -> None:
    """The last line, and the end; without torch's teardown, as in the programs."""
    say("exit", code=code, reason=reason, **fields, launcher="torchrun")
    os._exit(code)


def children() -> list[int]:
    """Processes that this one started: torchrun's workers, nothing else."""
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def hand_on_stops() -> None:
    """SIGTERM and SIGINT to the workers; before there are any, it is the end.

    By a thread, because the main thread may be in a call of torch's for as long as a rendezvous lasts.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    for number in STOPS:
        signal.signal(number, lambda *_: None)

    def listen(_kept=writing) -> None:
        while True:
            number = reading.recv(1)[0]
            workers = children()
            say("stopping", signal=signal.Signals(number).name.lower(), workers=len(workers), launcher="torchrun")
            if not workers:
                leave(OK, "sigterm")
            for pid in workers:
                os.kill(pid, number)

    threading.Thread(target=listen, daemon=True).start()


def main(argv: list[str]) -> None:
    hand_on_stops()
    say("launch", argv=" ".join(argv), launcher="torchrun")
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = run.parse_args(["--signals-to-handle", "SIGQUIT", *argv])
    try:
        run.run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        leave(code, "rank_failed", failed_rank=rank, pid=failure.pid)
    except DistError as error:
        words = str(error).splitlines()[0][:300]
        # Only the first node can tell that others are missing; any other one fails to reach it, or waits like it.
        reached = not re.search(r"trying to connect|failed to connect", words)
        leave(
            UNAVAILABLE,
            "rendezvous_incomplete" if reached else "rendezvous_unreachable",
            node=args.node_rank,
            endpoint=args.rdzv_endpoint,
            msg=words,
        )
    leave(OK, "ranks_ended")


if __name__ == "__main__":
    main(sys.argv[1:])
