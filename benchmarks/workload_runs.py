# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The measuring half of benchmarks.workload: runs in .venv-workload and prints one JSON object.

.venv-workload/bin/python -m benchmarks.workload_runs
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "workload"))
os.environ["HF_HUB_OFFLINE"] = "1"

import extract_hidden_states as extraction  # noqa: E402
import torch  # noqa: E402
import train_dflash_pipeline as training  # noqa: E402
from common import bucket_queue, drafter, replicas, runtime, sources, telemetry  # noqa: E402
from common import target as targets  # noqa: E402

from tests.support.proxy import Proxy  # noqa: E402
from tests.support.workload import KEY, SECRET, start_s3, stop  # noqa: E402

DATA = Path("/usr/share/common-licenses")
CPU = torch.device("cpu")
ROUNDS = 3
STEPS = 40


def run(module: ModuleType, argv: list) -> tuple[dict, str]:
    """A program's body in this process: the fields of its exit line, and its output."""
    job = runtime.Job(None, out=io.StringIO())
    fields = module.body(job, module.parser().parse_args([str(arg) for arg in argv]))
    job._finished.set()
    return fields, job._out.getvalue()


class Extraction:
    """Runs of extraction over part of the data, each in a folder of its own."""

    def __init__(self, folder: Path, data: Path):
        self._folder, self._data, self._count = folder, data, 0

    def __call__(self, *more) -> dict:
        self._count += 1
        out = self._folder / f"out-{self._count}"
        argv = ["--data", self._data, "--out-dir", out, "--run-id", f"r{self._count}", "--threads", "1", *more]
        return run(extraction, argv)[0]


def bare_forward(data: Path) -> float:
    """Tokens/s of the model alone: the same batches in the same groups, and nothing is kept of what it computes."""
    target, samples, _sha = targets.load("tiny-random", data, 512, "auto", None, CPU)
    batches = [samples[i : i + 32] for i in range(0, len(samples), 32)]
    began = time.monotonic()
    with torch.no_grad():
        for batch in batches:
            for group in targets.groups([len(sample.tokens) for sample in batch]):
                tokens, mask = targets.padded([batch[index].tokens for index in group])
                target.model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False)
    return sum(len(sample.tokens) for sample in samples) / (time.monotonic() - began)


def extraction_costs(folder: Path, part: Path) -> dict:
    """Tokens/s of the bare model, of extraction to the disk and to an S3 server behind 20 ms, and what of the upload shows.

    Over all of the data: the last batch's upload has nothing to hide behind, and is to be one of many.
    """
    extract, extract_part = Extraction(folder, DATA), Extraction(folder / "part", part)
    (folder / "s3/bkt").mkdir(parents=True)
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    server = start_s3(folder / "s3")
    found: dict[str, list[float]] = {name: [] for name in ("bare", "kept", "exposed")}
    try:
        with Proxy(server.port, latency=0.02) as proxy:
            far = ["--s3-uri", "s3://bkt/x", "--s3-endpoint", proxy.endpoint]
            for _ in range(ROUNDS):
                # In turn, so that all see the same machine.
                found["bare"].append(bare_forward(DATA))
                found["kept"].append(extract()["tok_s"])
                uploaded = extract(*far)
                found["exposed"].append((uploaded["elapsed_s"] - uploaded["compute_s"]) / uploaded["upload_s"])
            far[1] = "s3://bkt/part"
            by_size = {"batches": extract_part(*far), "each": extract_part(*far, "--batch-samples", "1")}
    finally:
        stop(server.process)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {**medians, **{name: fields["tok_s"] for name, fields in by_size.items()}}


def training_costs(folder: Path, data: Path) -> dict:
    """Seconds a step: the program's, with its target thread and queue, and the same steps on items kept in memory."""
    shape = ["--anchors", "32", "--block-size", "16", "--micro-batch", "4", "--min-ready", "30", "--max-depth", "90"]
    queued, memory = [], []
    for turn in range(ROUNDS):
        argv = ["--data", data, "--ckpt-dir", folder / f"ckpt-{turn}", "--metrics", "", "--threads", "1"]
        os.environ["DFLASH_PROFILE_INTERVAL"] = str(STEPS // 2)
        _fields, output = run(training, [*argv, *shape, "--max-steps", STEPS, "--ckpt-every", 10 * STEPS])
        # The second half: the first one has the queue's filling in it.
        queued.append(float(output.split("ev=profile step_ms=")[2].split()[0]) / 1000)
        memory.append(steps_from_memory(data))
    return {"queued": statistics.median(queued), "memory": statistics.median(memory)}


def steps_from_memory(data: Path) -> float:
    """Seconds a step where nothing computes hidden states and nothing waits: as many samples as the queue holds."""
    target, samples, _sha = targets.load("tiny-random", data, 512, "auto", None, CPU)
    usable = [sample for sample in samples if len(sample.tokens) >= 3]
    edges = bucket_queue.quartile_edges([len(sample.tokens) for sample in usable])
    queue: bucket_queue.BucketQueue = bucket_queue.BucketQueue(
        [len(sample.tokens) for sample in usable], edges, 1, 10 * STEPS, 1, 0
    )
    chosen = [sample for sample, _n in zip(sources.endless(usable, 0, 0, 1), range(5 * STEPS), strict=False)]
    for sample, features in zip(chosen, target.hidden_states(chosen), strict=True):
        with contextlib.suppress(bucket_queue.Closed):
            queue.put(drafter.Item(sample, features), len(sample.tokens))
    items = [queue.get(4) for _ in range(STEPS)]
    made = replicas.Replicas(target, [CPU], 32, 16, target.mask_token(None), 0, None)
    made.begin(0)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=3e-3)
    with made:
        for n, drawn in enumerate(items):
            if n == STEPS // 2:
                began = time.monotonic()
            made.gradients(lambda drawn=drawn: drawn)
            torch.nn.utils.clip_grad_norm_(made.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return (time.monotonic() - began) / (STEPS - STEPS // 2)


def telemetry_share(folder: Path) -> float:
    """Part of one CPU that heartbeat, sample and line of a GPU job take, with an NVML that answers as a driver does."""
    (folder / "pynvml.py").write_text(NVML)
    sys.path.insert(0, str(folder))
    sys.modules.pop("pynvml", None)  # torch has looked for the real one
    job = runtime.Job(folder / "heartbeat.json", out=io.StringIO())
    job.telemetry = telemetry.Telemetry(job.warn)
    assert job.telemetry.off is None, job.telemetry.off
    beats = 200
    began = time.thread_time()
    for _ in range(beats):
        job.heartbeat()
    beat = (time.thread_time() - began) / beats
    began = time.thread_time()
    for _ in range(beats):
        job.event("hb", phase="run", last_step=1, age_s=0.1, **job.telemetry.line())
    line = (time.thread_time() - began) / beats
    return beat / runtime.HEARTBEAT_EVERY_S + line / runtime.HEARTBEAT_LINE_EVERY_S


# Eight GPUs; each question takes 30 us of CPU, the slowest that was seen on an H200.
NVML = """
import time
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
NVML_TEMPERATURE_GPU = 0
class Answer: used, gpu = 5 << 30, 97
def asked(*_args):
    until = time.perf_counter() + 30e-6
    while time.perf_counter() < until: pass
    return Answer
def number(*_args): return asked() and 60
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 8
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetHandleByIndex(index): return index
nvmlDeviceGetMemoryInfo = nvmlDeviceGetUtilizationRates = asked
nvmlDeviceGetPowerUsage = nvmlDeviceGetTemperature = number
"""


def fairness() -> float:
    """The largest relative distance of a bucket's draws from its occupancy, over 10,000 draws."""
    shares = {10: 500, 100: 300, 300: 150, 500: 50}
    lengths = [length for length, count in shares.items() for _ in range(count)]
    queue: bucket_queue.BucketQueue = bucket_queue.BucketQueue(lengths, [50, 200, 400], 1, 1000, 1, 0)
    for length in lengths:
        queue.put(length, length)
    for _ in range(5000):
        for length in queue.get(2):
            queue.put(length, length)
    return max(
        abs(drawn / 10_000 - count / 1000) / (count / 1000)
        for drawn, count in zip(queue.counters.drawn, shares.values(), strict=True)
    )


def memory_growth(folder: Path, data: Path) -> dict:
    """MiB resident at most: with the libraries and the model alone, and after extraction and training too."""

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    bare_forward(data)
    found = {"model": peak()}
    Extraction(folder, data)("--batch-samples", "32")
    found["extraction"] = peak()
    run(training, ["--data", data, "--ckpt-dir", folder / "ckpt", "--max-steps", "60", "--metrics", ""])
    found["training"] = peak()
    return found


def part_of_the_data(folder: Path) -> Path:
    """A quarter of the licences: enough for stable numbers, and soon done."""
    path = folder / "data"
    path.mkdir()
    for name in ("GPL-3", "Apache-2.0", "MPL-1.1"):
        (path / name).write_bytes((DATA / name).read_bytes())
    return path


def main() -> None:
    """Measure what is named, in the order of the arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["memory", "extraction", "training", "telemetry", "fairness"])
    what = parser.parse_args().what
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-workload-") as name:
        folder = Path(name)
        data = part_of_the_data(folder)
        found = {
            "memory": lambda: memory_growth(folder, data),
            "extraction": lambda: extraction_costs(folder, data),
            "training": lambda: training_costs(folder, data),
            "telemetry": lambda: telemetry_share(folder),
            "fairness": fairness,
        }[what]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
