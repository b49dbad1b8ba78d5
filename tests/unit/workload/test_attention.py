# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Masks, flex attention, and compiling in several threads."""

import threading

import pytest
import torch
import train_dflash_pipeline as program
from common import attention, drafter, fx_guard
from common import target as targets
from common.runtime import Fatal
from torch.nn.attention.flex_attention import create_mask

from tests.unit.workload.test_train import arguments, blocks

STARTS = torch.tensor([[1, 5, 3], [2, 2, 8]])


@pytest.fixture(scope="module")
def target(texts):
    return targets.load("tiny-random", texts, 64, "auto", None, torch.device("cpu"))[0]


@pytest.mark.shows("W53")
def test_a_block_sees_what_lies_before_its_anchor_and_all_of_itself():
    mask = attention.dense_mask(STARTS, width=10, block_size=4)
    assert mask.shape == (2, 1, 12, 22)
    for sample in range(2):
        for query in range(12):
            block = query // 4
            wanted = set(range(STARTS[sample, block])) | {10 + block * 4 + k for k in range(4)}
            assert set(mask[sample, 0, query].nonzero().flatten().tolist()) == wanted


@pytest.mark.shows("W53")
def test_flex_follows_the_same_rule():
    dense = attention.dense_mask(STARTS, 128, 4)
    assert create_mask(attention.rule(STARTS, 128, 4), 2, 1, 12, 140, device="cpu").equal(dense)
    assert attention.flex_mask(STARTS, 128, 4).shape == (2, 1, 12, 140)


@pytest.mark.shows("W53")
def test_flex_attention_gives_what_sdpa_gives(target):
    attention.allow_flex()
    attention.allow_flex()
    torch.manual_seed(0)
    model = drafter.build(target, 4, 2).requires_grad_(False)
    shared = drafter.SharedHead(target, torch.device("cpu"))
    made = blocks(target, anchors=3)
    # Without compiling, which needs a C++ compiler on the CPU.
    with torch.compiler.set_stance("force_eager"):
        flex = drafter.loss(model, shared, made, flex=True)
    torch.testing.assert_close(flex, drafter.loss(model, shared, made), rtol=1e-4, atol=1e-4)


@pytest.mark.shows("W53")
def test_padding_of_the_context_changes_nothing(target):
    from tests.unit.workload.test_train import MASK, items

    torch.manual_seed(0)
    model, shared = drafter.build(target, 4, MASK), drafter.SharedHead(target, torch.device("cpu"))
    plain, padded = (
        drafter.make_blocks(items(target), 3, 4, MASK, torch.Generator().manual_seed(1), multiple)
        for multiple in (1, attention.FLEX_MULTIPLE)
    )
    assert plain.features.shape[1] == 12 and padded.features.shape[1] == 128
    torch.testing.assert_close(drafter.loss(model, shared, plain), drafter.loss(model, shared, padded))


@pytest.mark.shows("W54")
def test_flex_on_the_cpu_is_78_and_sdpa_is_the_default_there(here, texts, tmp_path):
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path / "c", attn="flex"))
    assert caught.value.code == 78 and "backward" in str(caught.value) and not (tmp_path / "c").exists()
    assert " attn=sdpa " in here(program, arguments(texts, tmp_path, max_steps=1))[1].getvalue()


@pytest.mark.shows("W55")
def test_the_first_call_of_a_shape_is_one_threads_alone():
    done, inside, most = [], 0, 0
    first_calls = attention.FirstCalls(lambda **fields: done.append(fields["shape"]))
    counting, barrier = threading.Lock(), threading.Barrier(8)

    def call(shape: int) -> None:
        nonlocal inside, most
        barrier.wait()
        with first_calls("cpu", shape):
            with counting:
                inside += 1
                most = max(most, inside)
            threading.Event().wait(0.01)
            with counting:
                inside -= 1

    threads = [threading.Thread(target=call, args=(n % 2,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and sorted(done) == ["cpu/0", "cpu/1"]


@pytest.mark.shows("W55")
def test_later_calls_of_a_shape_run_side_by_side():
    first_calls = attention.FirstCalls(lambda **_fields: None)
    with first_calls("cpu", 1):
        pass
    barrier = threading.Barrier(2)

    def call() -> None:
        with first_calls("cpu", 1):
            barrier.wait(10)  # breaks when the other thread is kept out

    thread = threading.Thread(target=call)
    thread.start()
    call()
    thread.join()
    assert not barrier.broken


def test_a_first_call_that_fails_is_tried_again():
    done = []
    first_calls = attention.FirstCalls(lambda **fields: done.append(fields))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), first_calls(1):
            1 / 0  # noqa: B018
    with first_calls(1):
        pass
    assert len(done) == 1


GUARD = """
import sys, threading
import torch
from common import fx_guard

if sys.argv[1] == "on":
    fx_guard.install()
    fx_guard.install()
compiled = torch.compile(lambda x: x + 1, backend="eager")
compiled(torch.ones(1))
traced, go_on = threading.Event(), threading.Event()

class Slow(torch.nn.Module):
    def forward(self, x):
        traced.set()
        go_on.wait()
        if sys.argv[2] == "same":
            compiled(torch.ones(1))
        return x + 1

failed = []
def trace():
    try:
        torch.fx.symbolic_trace(Slow())
    except Exception as error:
        failed.append(error)

thread = threading.Thread(target=trace)
thread.start()
traced.wait()
try:
    print("other thread:", compiled(torch.ones(1)).item())
except RuntimeError as error:
    print("other thread:", error)
go_on.set()
thread.join()
print("same thread:", *failed)
print("flag:", torch.fx._symbolic_trace._is_fx_tracing_flag)
"""


@pytest.mark.shows("W56")
@pytest.mark.parametrize(("guard", "says"), [("off", "symbolically trace a dynamo-optimized function"), ("on", "2.0")])
def test_a_compiled_function_runs_while_another_thread_traces(start, guard, says):
    """Both ways: where torch itself stops minding, the first half fails, and the guard may go."""
    child = start(GUARD, guard, "other")
    assert child.wait() == 0, child.text
    assert says in next(line for line in child.lines if line.startswith("other thread:"))
    assert "flag: False" in child.lines


@pytest.mark.shows("W56")
def test_within_one_thread_torch_still_refuses(start):
    child = start(GUARD, "on", "same")
    assert child.wait() == 0, child.text
    assert any(line.startswith("same thread:") and "dynamo-optimized" in line for line in child.lines), child.text


@pytest.mark.shows("W57")
@pytest.mark.parametrize(
    ("choice", "threads", "installed"),
    [("auto", 0, False), ("auto", 1, False), ("auto", 2, True), ("on", 0, True), ("on", 1, True), ("off", 4, False)],
)
def test_auto_is_where_several_threads_compile(choice, threads, installed):
    assert fx_guard.wanted(choice, threads) is installed


@pytest.mark.shows("W57")
def test_a_torch_without_the_flag_needs_none(monkeypatch):
    monkeypatch.delattr(fx_guard.fx, "_is_fx_tracing_flag")
    assert not fx_guard.wanted("auto", 4)
    with pytest.raises(Fatal) as caught:
        fx_guard.wanted("on", 4)
    assert caught.value.code == 78


def test_symbolic_tracing_itself_goes_on_working(start):
    child = start(
        "import torch; from common import fx_guard; fx_guard.install();"
        "print(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)).code)"
    )
    assert child.wait() == 0 and "self.weight" in child.text, child.text
