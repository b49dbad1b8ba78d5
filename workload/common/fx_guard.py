# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""torch.fx's "is a symbolic trace running?" as a question about this thread.

torch.compile refuses to be called during a symbolic trace, and traces while it compiles.  torch keeps that in one
flag of the process (``torch.fx._symbolic_trace._is_fx_tracing_flag``, up to 2.13 at least): while one thread compiles,
a compiled function that another thread calls raises "Detected that you are using FX to symbolically trace a
dynamo-optimized function".
"""

from __future__ import annotations

import functools
import threading

import torch
from torch.fx import _symbolic_trace as fx

from common.runtime import CONFIGURATION, Fatal

_tracing = threading.local()
_NAMES = ("_is_fx_tracing_flag", "is_fx_tracing", "is_fx_symbolic_tracing", "Tracer")


def wanted(choice: str, compiling_threads: int) -> bool:
    """Whether to install it: ``on``, ``off``, or ``auto``, where several threads compile and torch has the flag."""
    known = all(hasattr(fx, name) for name in _NAMES)
    if choice == "on" and not known:
        raise Fatal(
            CONFIGURATION,
            "fx_threadlocal",
            f"--fx-threadlocal on: torch {torch.__version__} keeps no such flag. Pass auto or off.",
        )
    return choice == "on" or (choice == "auto" and known and compiling_threads > 1)


def install() -> None:
    """Make the flag count for the thread that traces alone; a second call changes nothing."""
    if hasattr(fx.Tracer.trace, "__wrapped__"):
        return
    trace = fx.Tracer.trace

    @functools.wraps(trace)
    def noted(self, *args, **kwargs):
        before = getattr(_tracing, "here", False)
        _tracing.here = True
        try:
            return trace(self, *args, **kwargs)
        finally:
            _tracing.here = before

    def here(asked):
        @functools.wraps(asked)
        def answered() -> bool:
            return getattr(_tracing, "here", False) and asked()

        return answered

    fx.Tracer.trace = noted
    # Callers look these up in the module when they are called, or when they wrap a function: so before any compilation.
    fx.is_fx_tracing = here(fx.is_fx_tracing)
    fx.is_fx_symbolic_tracing = here(fx.is_fx_symbolic_tracing)
