# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Several processes that train as one: what they exchange, how they end, and who is named; over several hosts: test_gang.py."""

from __future__ import annotations

import json
import re
import signal

import pytest
import torch.distributed as dist
from common import ranks
from common.place import Place, take_gpus
from common.runtime import Fatal

# One rank of two: a gradient of its own, weights of its own, and a stop that rank 1 alone was asked for.
EXCHANGE = """
import json, os, torch
from common.place import place
from common.ranks import Ranks
from common.runtime import Job
job = Job(None)
mine = Ranks(job, place(), torch.device("cpu"), timeout=60)
model = torch.nn.Linear(2, 1)
torch.nn.init.constant_(model.weight, mine.rank)
step = mine.begin(model, 7 if mine.first else 0)
begun = model.weight.tolist()
for parameter in model.parameters():
    parameter.grad = torch.full_like(parameter, float(mine.rank))
mine.average(model, stop=mine.rank == 1)
mean = model.weight.grad.tolist()
if mine.first:
    torch.nn.init.constant_(model.weight, 5)
asked = mine.share(model)
print(json.dumps([mine.rank, step, begun, mean if mine.first else None, model.weight.tolist(), asked]), flush=True)
job.progress.step = 10 + mine.rank
if os.environ.get("LEAVES") == str(mine.rank):
    job.finish(70, "leaves")
if "LEAVES" in os.environ:
    mine.average(model, stop=False)
mine.end()
job.finish(0, "done")
"""


@pytest.fixture
def two(start):
    """Start two ranks that meet at a store of this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def begin(**env):
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        places = ({"RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for n in range(2))
        return [start(EXCHANGE, env={**common, **place, **env}) for place in places]

    return begin


@pytest.mark.shows("W81")
def test_ranks_step_as_one_with_the_mean_gradient(two):
    found = two()
    for rank, program in enumerate(found):
        told = json.loads(program.until(r"^\[.*").group())
        assert told == [rank, 7, [[0, 0]], [[0.5, 0.5]] if rank == 0 else None, [[5, 5]], [1]]
        assert program.wait() == 0
        assert f"reason=done rank={rank}" in program.lines[-1]


@pytest.mark.shows("W83")
def test_a_rank_that_is_gone_is_named_by_the_other(two):
    stays, leaves = two(LEAVES="1")
    assert leaves.wait() == 70
    assert stays.wait() == 69
    assert re.search(r"reason=peer_lost peers=1 step=10 msg=.*rank 1 on \S+ \(step \d+\): gone", stays.lines[-1])


def test_who_is_behind_is_told_by_the_steps():
    beats = {0: "a 1 9 41", 1: "b 1 9 40", 2: "c 1 9 41"}
    words, who = ranks.behind(beats, "timed out")
    assert who == [1] and words.startswith("rank 1 on b (step 40): lives and does not come; the others are at step 41")
    words, who = ranks.behind({0: "a 1 9 41", 1: "b 1 9 41"}, "timed out")
    assert who == [] and "none is behind" in words


def test_the_interface_is_the_one_towards_the_first_host():
    assert ranks.interface_towards("127.0.0.1", 29400) == "lo"


def test_each_process_of_a_machine_has_its_part_of_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    take_gpus(Place(rank=5, world=8, local_rank=1, local_world=2))
    assert ranks.os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-c,GPU-d"
    with pytest.raises(Fatal, match="2 GPUs for 4 processes"):
        take_gpus(Place(rank=0, world=4, local_rank=0, local_world=4))


def torchrun(start, *argv):
    options = ("--nnodes", 1, "--nproc-per-node", 2, "--node-rank", 0, "--rdzv-backend", "static", "--max-restarts", 0)
    return start("torchrun.py", *options, "--rdzv-endpoint", "127.0.0.1:29477", "--rdzv-id", "t", *argv)


@pytest.mark.shows("W82")
def test_torchrun_ends_with_the_programs_exit_status(start, tmp_path):
    from tests.support.workload import WORKLOAD

    wrong = ("--data", tmp_path, "--ckpt-dir", tmp_path / "c", "--min-ready", 9, "--max-depth", 1)
    program = torchrun(start, WORKLOAD / "train_dflash_pipeline.py", *wrong)
    assert program.wait() == 64, program.text
    assert "ev=launch" in program.lines[0] and "reason=rank_failed" in program.lines[-1]


@pytest.mark.shows("W82", "W84")
def test_sigterm_under_torchrun_saves_and_ends_with_0(start, texts, tmp_path):
    from tests.support.workload import WORKLOAD

    argv = ("--data", texts, "--ckpt-dir", tmp_path, "--max-length", 64, "--ckpt-every", 1000)
    program = torchrun(start, WORKLOAD / "train_dflash_pipeline.py", *argv)
    program.until("ev=step step=")
    program.process.send_signal(signal.SIGTERM)
    assert program.wait() == 0, program.text
    ends = re.findall(r"ev=exit code=0 reason=sigterm step=(\d+) rank=(\d)", program.text)
    assert {rank for _step, rank in ends} == {"0", "1"} and len({step for step, _rank in ends}) == 1
    assert json.loads((tmp_path / "latest/state.json").read_text())["step"] == int(ends[0][0])
