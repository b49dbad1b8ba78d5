# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Training: what a block may see, that the loss falls, checkpoints, resume, and how it ends."""

import json
import signal
from types import SimpleNamespace

import pytest
import torch
import train_dflash_pipeline as program
from common import checkpoint, drafter, replicas
from common import target as targets
from common.data import Sample
from common.runtime import Fatal
from dflash.model import DFlashDraftModel, extract_context_feature

from tests.unit.workload.conftest import phases_at_steps

MASK = 2


def arguments(texts, folder, **options) -> list:
    argv = ["--data", texts, "--ckpt-dir", folder, "--max-length", "64", "--min-ready", "8", "--max-depth", "24"]
    for name, value in {"max_steps": 10, "ckpt_every": 1000, **options}.items():
        argv += [f"--{name.replace('_', '-')}", value]
    return argv


def losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def target(texts):
    return targets.load("tiny-random", texts, 64, "auto", None, torch.device("cpu"))[0]


def items(target, lengths=(12, 7)) -> list[drafter.Item]:
    samples = [Sample(f"s{n}", tuple(3 + (n * 7 + k) % 500 for k in range(length))) for n, length in enumerate(lengths)]
    return [drafter.Item(s, f) for s, f in zip(samples, target.hidden_states(samples), strict=True)]


def blocks(target, anchors=2, size=4, **kwargs) -> drafter.Blocks:
    return drafter.make_blocks(items(target, **kwargs), anchors, size, MASK, torch.Generator().manual_seed(1))


def test_features_are_those_that_dflash_takes_at_inference(target):
    [item] = items(target, lengths=(9,))
    output = target.model(torch.tensor([item.sample.tokens]), output_hidden_states=True)
    wanted = extract_context_feature(output.hidden_states, list(target.layers))[0]
    torch.testing.assert_close(item.features, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.shows("W53")
def test_a_block_is_its_anchor_and_masks_and_predicts_what_follows(target):
    made = blocks(target)
    for row, item in enumerate(items(target)):
        for block in range(2):
            at = slice(block * 4, block * 4 + 4)
            anchor = made.position_ids[row, 12 + block * 4].item()
            assert made.position_ids[row, 12:][at].tolist() == list(range(anchor, anchor + 4))
            assert made.tokens[row, at].tolist() == [item.sample.tokens[anchor], MASK, MASK, MASK]
            following = list(item.sample.tokens[anchor + 1 : anchor + 4])
            assert made.labels[row, at].tolist() == [-100, *following, *[-100] * (3 - len(following))]


def test_every_block_predicts_something_even_in_the_shortest_sample(target):
    made = blocks(target, lengths=(3,), anchors=5)
    assert ((made.labels != -100).view(5, 4).sum(1) == 1).all()


@pytest.mark.shows("W53")
def test_a_block_cannot_see_features_from_its_anchor_on(target):
    """A drafter that could would look at the answer: its loss would fall and its drafts be worthless."""
    made = blocks(target)
    model = drafter.build(target, 4, MASK)
    shared = drafter.SharedHead(target, torch.device("cpu"))
    features = made.features.clone().requires_grad_()
    free = drafter.Blocks(**{**made.__dict__, "features": features})
    for row in range(2):
        for block in range(2):
            only = made.labels.clone()
            keep = torch.zeros_like(only, dtype=torch.bool)
            keep[row, block * 4 : block * 4 + 4] = True
            only[~keep] = -100
            value = drafter.loss(model, shared, drafter.Blocks(**{**free.__dict__, "labels": only}))
            (gradient,) = torch.autograd.grad(value, features)
            seen = gradient.abs().sum(-1)
            anchor = made.position_ids[row, 12 + block * 4].item()
            assert (seen[row, :anchor] > 0).all() and (seen[row, anchor:] == 0).all()
            assert (seen[1 - row] == 0).all(), "another sample's"


@pytest.mark.shows("W58")
def test_the_loss_falls(here, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("common.runtime.STEP_LINE_EVERY_S", 0.0)
    fields, output = here(program, arguments(texts, tmp_path, max_steps=120))
    assert fields == {"reason": "done", "step": 120}
    values = losses(tmp_path)
    assert len(values) == 120
    assert sum(values[-20:]) / 20 < sum(values[:20]) / 20 - 1.0, values[::10]
    assert " ev=step step=120 loss=" in output.getvalue()


@pytest.mark.shows("W59")
def test_a_checkpoint_is_a_dflash_drafter(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path))
    model = DFlashDraftModel.from_pretrained(tmp_path / "latest")
    assert (model.block_size, model.mask_token_id, model.target_layer_ids) == (8, MASK, [1, 5])
    saved = checkpoint.load_file(tmp_path / "latest/model.safetensors")
    fresh = DFlashDraftModel(model.config)
    fresh.load_state_dict(saved, strict=True)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.shows("W61")
def test_resume_goes_on_and_a_finished_training_stays_finished(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path, max_steps=4))
    before = checkpoint.load_file(tmp_path / "latest/model.safetensors")
    fields, output = here(program, arguments(texts, tmp_path, max_steps=6))
    assert "ev=resume step=4" in output.getvalue() and fields["step"] == 6
    after = checkpoint.load_file(tmp_path / "latest/model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    fields, output = here(program, arguments(texts, tmp_path, max_steps=6))
    assert fields["already"] == 1 and "ev=ready" in output.getvalue()


@pytest.mark.shows("W60")
def test_an_unfinished_checkpoint_is_never_resumed_from(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path, max_steps=3))
    unfinished = tmp_path / "step-00000009.tmp"
    unfinished.mkdir()
    (unfinished / "state.json").write_text('{"step": 9}')
    _fields, output = here(program, arguments(texts, tmp_path, max_steps=4))
    assert "ev=resume step=3" in output.getvalue()
    assert not unfinished.exists()
    with pytest.raises(Fatal) as caught:
        checkpoint.find(tmp_path, str(unfinished))
    assert caught.value.code == 78


@pytest.mark.shows("W62")
def test_a_checkpoint_of_something_else_is_78(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path, max_steps=2))
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path, max_steps=4, block_size=4))
    assert caught.value.code == 78 and "block_size" in str(caught.value)


@pytest.mark.shows("W62")
def test_checkpoints_are_not_written_over_unasked(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path, max_steps=2))
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path, resume="never"))
    assert caught.value.code == 78


@pytest.mark.shows("W65")
def test_only_the_newest_checkpoints_stay_and_nothing_else_goes(here, texts, tmp_path):
    (tmp_path / "step-notes").write_text("mine")
    here(program, arguments(texts, tmp_path, max_steps=9, ckpt_every=2, ckpt_keep=2))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000008", "step-00000009", "step-notes"]
    assert (tmp_path / "latest").resolve().name == "step-00000009"


@pytest.mark.shows("W60")
def test_a_kill_between_rename_and_latest_resumes_from_the_one_before(here, texts, tmp_path, monkeypatch):
    here(program, arguments(texts, tmp_path, max_steps=2))
    real = checkpoint.Path.symlink_to
    monkeypatch.setattr(checkpoint.Path, "symlink_to", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        here(program, arguments(texts, tmp_path, max_steps=4))
    monkeypatch.setattr(checkpoint.Path, "symlink_to", real)
    assert (tmp_path / "step-00000004").is_dir() and (tmp_path / "latest").resolve().name == "step-00000002"
    fields, output = here(program, arguments(texts, tmp_path, max_steps=4))
    assert "ev=resume step=2" in output.getvalue() and fields["step"] == 4


@pytest.mark.shows("W63")
def test_sigterm_saves_the_step_it_was_at(fork, texts, tmp_path):
    child = fork("train_dflash_pipeline.py", *arguments(texts, tmp_path, max_steps=0))
    child.until("ev=step step=")
    child.process.send_signal(signal.SIGTERM)
    assert child.wait() == 0, child.text
    step = int(child.lines[-1].rsplit("step=", 1)[1])
    assert "code=0 reason=sigterm" in child.lines[-1]
    assert json.loads((tmp_path / "latest/state.json").read_text())["step"] == step > 0


@pytest.mark.shows("W16")
@pytest.mark.parametrize("where", ["target", "drafter"])
def test_a_threads_exception_ends_the_process(here, texts, tmp_path, monkeypatch, where):
    def broken(*_args, **_kwargs):
        raise RuntimeError(f"in a {where} thread")

    if where == "target":
        monkeypatch.setattr(targets.Target, "hidden_states", broken)
    else:
        monkeypatch.setattr(drafter, "loss", broken)
    with pytest.raises(RuntimeError, match=where):
        here(program, arguments(texts, tmp_path))


@pytest.mark.shows("W52")
def test_several_drafters_step_as_one_with_the_mean_gradient(target):
    torch.manual_seed(0)
    one, two = drafter.build(target, 4, MASK), drafter.build(target, 4, MASK)
    replicas.share([one, two])
    shared = drafter.SharedHead(target, torch.device("cpu"))
    first, second = blocks(target), blocks(target, lengths=(9, 9))
    gradients = []
    for made in (first, second):
        one.zero_grad()
        drafter.loss(one, shared, made).backward()
        gradients.append([parameter.grad.clone() for parameter in one.parameters()])
    for model, made in ((one, first), (two, second)):
        model.zero_grad()
        drafter.loss(model, shared, made).backward()
    replicas.average([one, two])
    for parameter, a, b in zip(one.parameters(), *gradients, strict=True):
        torch.testing.assert_close(parameter.grad, (a + b) / 2)
    assert all(parameter.grad is None for parameter in two.parameters())


@pytest.mark.shows("W66")
def test_profile_lines_come_every_interval(here, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "4")
    _fields, output = here(program, arguments(texts, tmp_path, max_steps=9))
    profiles = [line for line in output.getvalue().splitlines() if " ev=profile " in line]
    assert len(profiles) == 2
    for name in ("step_ms", "wait_ms", "put_wait_s", "drawn", "caps", "rss_mib"):
        assert f" {name}=" in profiles[0]


def test_a_profile_interval_that_is_no_number_is_78(here, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "often")
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path / "c"))
    assert caught.value.code == 78 and "often" in str(caught.value) and not (tmp_path / "c").exists()


@pytest.mark.shows("W48")
def test_metrics_are_json_lines_and_prometheus_textfile(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path, metrics="jsonl,textfile", bucket_edges="20,40"))
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["step"] == 10 and sum(record["bucket_drawn"]) == 40 and len(record["bucket_depth"]) == 3
    assert sum(record["bucket_depth"]) == record["queue_depth"] and record["get_wait_seconds"] > 0
    lines = dict(line.split(" ") for line in (tmp_path / "metrics.prom").read_text().splitlines())
    assert lines["dflash_training_step"] == "10"
    drawn = [int(lines[f'dflash_training_bucket_drawn{{bucket="{n}"}}']) for n in range(3)]
    assert drawn == record["bucket_drawn"]
    assert {"dflash_training_put_wait_seconds", "dflash_training_loss", "dflash_training_lr"} < set(lines)


@pytest.mark.shows("W48")
def test_a_wandb_run_is_offline(here, texts, tmp_path, monkeypatch):
    logged, finished = [], []

    def init(project, dir):
        assert __import__("os").environ["WANDB_MODE"] == "offline"
        return SimpleNamespace(
            log=lambda values, step: logged.append((step, values)), finish=lambda: finished.append(True)
        )

    monkeypatch.setitem(__import__("sys").modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    here(program, arguments(texts, tmp_path, metrics="wandb"))
    step, values = logged[-1]
    assert finished == [True] and step == 10 and values["loss"] > 0 and "bucket_drawn/0" in values
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.shows("W13", "W15", "W18")
@pytest.mark.parametrize(
    ("options", "code"),
    [({"min_ready": 30}, 64), ({"mask_token_id": 99999}, 78), ({"metrics": "wandb"}, 78), ({"target_gpus": "99"}, 69)],
)
def test_what_cannot_work_is_said_before_a_checkpoint_exists(here, texts, tmp_path, options, code, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path / "c", **options))
    assert caught.value.code == code
    assert not list((tmp_path / "c").glob("step-*"))


@pytest.mark.shows("W13")
@pytest.mark.parametrize(
    "bad", [["--target-gpus", "0,0"], ["--metrics", "paper"], ["--bucket-edges", "x"], ["--max-steps", "-1"]]
)
def test_bad_options_are_usage_errors(texts, tmp_path, bad):
    with pytest.raises(Fatal) as caught:
        program.parser().parse_args(["--data", str(texts), "--ckpt-dir", str(tmp_path), *bad])
    assert caught.value.code == 64 and bad[0] in str(caught.value)


def test_the_model_is_loaded_before_the_first_step(here, texts, tmp_path, monkeypatch):
    phases = phases_at_steps(monkeypatch)
    here(program, arguments(texts, tmp_path, max_steps=3))
    assert phases == ["warmup", "run", "run"]
