# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The reference workload beside what it cannot be faster than, on one core: the tiny model and Debian's licences.

Extraction is compared with the same model's bare forward pass over the same batches, in time a token; with one file a
sample; and its exposed upload, the part of the run that is not the model's work, with the time that uploading took, behind
an S3 server that answers after 20 ms. Training is compared with the same steps on items that are in memory, in time a
step, with 32 blocks of 16 tokens a sample: enough that the drafter and not the target is what is waited for. Telemetry is
the CPU that heartbeat and samples take with an NVML of eight GPUs that answers as slowly as any seen on an H200. Memory is
the process's peak, beside the same process with model and libraries alone. Fairness is the worst bucket's distance from its
part of the queue over 10,000 draws. Medians of three rounds, what is compared in turn.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from benchmarks.rows import Row, Unmeasured
from tests.support.container import REPO

PYTHON = REPO / ".venv-workload/bin/python"
FORWARD = 0.85  # tokens/s of extraction, at least, as part of the bare forward pass
QUEUE = 0.90  # steps/s with the queue, at least, as part of steps from memory


def measured(what: str) -> Any:
    """The numbers of one part, from a process of its own: memory and threads of the others do not count."""
    argv = [PYTHON, "-m", "benchmarks.workload_runs", what]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise Unmeasured(f"{what}: {done.stderr.strip()[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure() -> list[Row]:
    if not PYTHON.exists():
        raise Unmeasured(f"{PYTHON} is not there: run ./test workload or ./bench, which make it")
    extraction, training, memory = (measured(what) for what in ("extraction", "training", "memory"))

    def microseconds(name: str) -> float:
        return 1e6 / extraction[name]

    return [
        Row(
            "extraction, time a token", microseconds("kept"), "µs", microseconds("bare"), "bare forward",
            at_most=1 / FORWARD, bounds="ratio",
        ),
        Row("extraction to S3, one file a batch of 32", microseconds("batches"), "µs", microseconds("each"), "a file a sample"),
        Row("extraction to S3, upload not hidden behind the model", 100 * extraction["exposed"], "%", at_most=10),
        Row(
            "training, time a step", 1000 * training["queued"], "ms", 1000 * training["memory"], "fed from memory",
            at_most=1 / QUEUE, bounds="ratio",
        ),
        Row("telemetry, of one core", 100 * measured("telemetry"), "%", at_most=1, hard=True),
        Row("memory, extraction", memory["extraction"], "MiB", memory["model"], "model and libraries"),
        Row("memory, extraction and training", memory["training"], "MiB", memory["model"], "model and libraries"),
        Row("buckets, distance from their part of the queue", 100 * measured("fairness"), "%", at_most=10, hard=True),
    ]  # fmt: skip
