# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Extraction end to end against a real S3 server: exactly once, whatever ends it."""

import hashlib
import json
import signal
import threading
from types import SimpleNamespace

import extract_hidden_states as program
import pytest
import torch
from common import handoff
from common import store as stores
from common import target as targets
from common.runtime import Fatal
from safetensors import safe_open
from safetensors.torch import load

from tests.unit.workload.conftest import phases_at_steps, stop

PIECE = 24


def arguments(texts, tmp_path, s3=None, uri=None, **options) -> list:
    argv = [
        "--data",
        texts,
        "--out-dir",
        tmp_path / "out",
        "--run-id",
        "r",
        "--batch-samples",
        "4",
        "--max-length",
        str(PIECE),
    ]
    if s3:
        argv += ["--s3-uri", uri, "--s3-endpoint", s3.endpoint]
    for name, value in options.items():
        argv += [f"--{name.replace('_', '-')}"] + ([] if value is True else [value])
    return argv


def everything(store, shards: int = 1, run: str = "r") -> dict:
    """Sample id to its rows of hidden states, from committed batches alone; checks each file against its record."""
    found = {}
    for shard in range(1, shards + 1):
        name = f"{run}/{stores.shard_name(shard, shards)}"
        for number, record in stores.committed(store, name).items():
            data = store.get(f"{name}/{stores.batch_name(number)}.safetensors")
            assert hashlib.sha256(data).hexdigest() == record["sha256"] and len(data) == record["bytes"]
            tensors = load(data)
            offsets = tensors["offsets"].tolist()
            assert tensors["hidden_states"].dtype == torch.bfloat16
            assert len(tensors["hidden_states"]) == len(tensors["token_ids"]) == offsets[-1] == record["tokens"]
            for sample, start, end in zip(record["samples"], offsets[:-1], offsets[1:], strict=True):
                assert sample not in found, "a sample was committed twice"
                found[sample] = (tensors["token_ids"][start:end], tensors["hidden_states"][start:end])
    return found


@pytest.mark.shows("W25", "W28", "W32")
@pytest.mark.peers("speculators 279")
def test_two_shards_commit_every_sample_once_and_the_states_are_the_models(here, texts, tmp_path, s3):
    uri = s3.bucket("bkt")
    for shard in (1, 2):
        fields, _ = here(program, arguments(texts, tmp_path, s3, uri, shard=shard, num_shards=2))
        assert fields["reason"] == "done"
    target, samples, _sha = targets.load("tiny-random", texts, PIECE, "auto", None, torch.device("cpu"))
    found = everything(stores.S3Store(uri, s3.endpoint), shards=2)
    assert set(found) == {sample.id for sample in samples} and len(samples) > 60
    for sample in (samples[0], samples[-1]):
        tokens, states = found[sample.id]
        assert tokens.tolist() == list(sample.tokens)
        alone = target.model(torch.tensor([sample.tokens]), output_hidden_states=True).hidden_states
        wanted = torch.cat([alone[layer + 1][0] for layer in target.layers], dim=-1)
        torch.testing.assert_close(states.float(), wanted, rtol=0.02, atol=0.02)
    assert not list((tmp_path / "out").rglob("*.safetensors")), "local files go after their commit"
    assert (s3.root / "bkt/data/r/shard-02-of-02/_DONE").exists()


@pytest.mark.shows("W25", "W26")
@pytest.mark.peers("SpecForge 426")
def test_a_batch_says_what_it_is(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path))
    folder = tmp_path / "out/r/shard-01-of-01"
    with safe_open(folder / "batch-000001.safetensors", "pt") as handle:
        metadata = handle.metadata()
    record = json.loads((folder / "batch-000001.json").read_text())
    assert json.loads(metadata["sample_ids"]) == record["samples"] and len(record["samples"]) > 1
    assert json.loads(metadata["layers"]) == [1, 5] and metadata["batch"] == "1"


@pytest.mark.shows("W30", "W31")
def test_killed_and_resumed_every_sample_is_there_once(fork, texts, tmp_path, s3):
    uri = s3.bucket("bkt")
    argv = arguments(texts, tmp_path, s3, uri, resume=True, batch_samples="1")
    first = fork("extract_hidden_states.py", *argv)
    first.until("ev=step step=5 ")
    first.process.send_signal(signal.SIGKILL)
    assert first.wait() == -9
    # What a kill can leave: a batch without its record, a local file, half an upload, a stray temporary file.
    store = stores.S3Store(uri, s3.endpoint)
    shard = "r/shard-01-of-01"
    store.put_bytes(f"{shard}/batch-000040.safetensors", b"half")
    store._client.create_multipart_upload(Bucket="bkt", Key=f"data/{shard}/batch-000041.safetensors")
    before = set(stores.committed(store, shard))
    (tmp_path / "out" / shard / f"{stores.batch_name(min(before))}.safetensors").write_bytes(b"already committed")
    assert len(before) >= 5
    second = fork("extract_hidden_states.py", *argv)
    assert second.wait() == 0, second.text
    assert f"committed={len(before)} aborted_uploads=1" in second.text
    _target, samples, _sha = targets.load("tiny-random", texts, PIECE, "auto", None, torch.device("cpu"))
    assert set(everything(store)) == {sample.id for sample in samples}
    assert not list((tmp_path / "out").rglob("*.safetensors"))


def test_batches_are_uploaded_side_by_side_and_each_before_its_record(here, texts, tmp_path, s3, monkeypatch):
    together = threading.Barrier(2)
    put_file, put_bytes, uploaded = stores.S3Store.put_file, stores.S3Store.put_bytes, set()

    def put_two_files(self, key, *more):
        together.wait(30)
        put_file(self, key, *more)
        uploaded.add(key)

    def put_record(self, key, data):
        assert not key.endswith(".json") or "batch-" not in key or key.replace(".json", ".safetensors") in uploaded
        put_bytes(self, key, data)

    monkeypatch.setattr(stores.S3Store, "put_file", put_two_files)
    monkeypatch.setattr(stores.S3Store, "put_bytes", put_record)
    uri = s3.bucket("bkt")
    # With one thread the first of the two batches would wait for the second until the barrier breaks.
    texts_of_two = tmp_path / "two.jsonl"
    texts_of_two.write_text("".join(json.dumps({"text": f"sample {n}"}) + "\n" for n in range(8)))
    fields, _ = here(program, arguments(texts_of_two, tmp_path, s3, uri))
    assert fields["batches"] == 2
    assert len(everything(stores.S3Store(uri, s3.endpoint))) == 8


def test_sigterm_commits_what_waits_and_ends_clean(fork, texts, tmp_path, s3):
    uri = s3.bucket("bkt")
    child = fork("extract_hidden_states.py", *arguments(texts, tmp_path, s3, uri, resume=True, batch_samples="1"))
    child.until("ev=step step=3 ")
    child.process.send_signal(signal.SIGTERM)
    assert child.wait() == 0, child.text
    assert "code=0 reason=sigterm" in child.lines[-1]
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert not (s3.root / "bkt/data/r/shard-01-of-01/_DONE").exists()


@pytest.mark.shows("W34", "W3")
def test_a_finished_shard_is_done_again_at_once(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path))
    fields, output = here(program, arguments(texts, tmp_path, resume=True))
    assert fields["reason"] == "done" and fields["already"] == 1
    assert "ev=ready" in output.getvalue() and "ev=step" not in output.getvalue()


@pytest.mark.shows("W35")
def test_committed_batches_are_not_continued_unasked(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path))
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path))
    assert caught.value.code == 78 and "--resume" in str(caught.value)


@pytest.mark.shows("W29")
@pytest.mark.parametrize(
    ("option", "value", "said"), [("batch_samples", "5", "batch_samples"), ("layers", "0,2", "layers")]
)
def test_another_layout_under_the_same_run_id_is_78(here, texts, tmp_path, option, value, said):
    here(program, arguments(texts, tmp_path))
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path, resume=True, **{option: value}))
    assert caught.value.code == 78 and said in str(caught.value)


@pytest.mark.shows("W29")
def test_other_data_under_the_same_run_id_is_78(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a").write_text("something else entirely\n\nin two paragraphs")
    with pytest.raises(Fatal) as caught:
        here(program, arguments(tmp_path / "texts", tmp_path, resume=True))
    assert caught.value.code == 78 and "data_sha256" in str(caught.value)


@pytest.mark.shows("W40", "W26")
def test_a_local_file_that_is_cut_off_is_made_again(here, texts, tmp_path):
    here(program, arguments(texts, tmp_path))
    whole = everything(stores.LocalStore(tmp_path / "out"))
    path = tmp_path / "out/r/shard-01-of-01/batch-000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    fields, _ = here(program, arguments(texts, tmp_path, resume=True))
    assert fields["reason"] == "done" and fields["samples"] == 4
    assert set(everything(stores.LocalStore(tmp_path / "out"))) == set(whole)


@pytest.mark.shows("W17", "W37")
def test_a_store_that_goes_away_ends_with_75_and_loses_nothing(here, texts, tmp_path, s3, monkeypatch):
    uri = s3.bucket("bkt")
    monkeypatch.setattr(handoff.Retry.__init__, "__defaults__", (0.01,))
    real = stores.S3Store.put_bytes

    def put_bytes(self, key, data):
        real(self, key, data)
        if key.endswith("batch-000003.json"):
            stop(s3.process)

    monkeypatch.setattr(stores.S3Store, "put_bytes", put_bytes)
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path, s3, uri, max_consecutive_errors="3"))
    assert caught.value.code == 75 and "3 times" in str(caught.value)
    committed = stores.committed(stores.LocalStore(s3.root / "bkt/data"), "r/shard-01-of-01")
    assert list(committed) == [1, 2, 3]
    assert (tmp_path / "out/r/shard-01-of-01/batch-000004.safetensors").exists(), "what is not committed stays"


def retry(limit: int, stopping=False) -> handoff.Retry:
    seen = SimpleNamespace(event=lambda *a, **k: None, stopping=SimpleNamespace(wait=lambda _s: stopping))
    return handoff.Retry(seen, limit, (OSError,))


def failing(times: int):
    left = [times]

    def action():
        if left[0]:
            left[0] -= 1
            raise OSError("no")

    return action


def test_a_success_forgets_earlier_failures():
    attempt = retry(3)
    for _ in range(5):
        assert attempt("x", failing(2))


@pytest.mark.shows("W17")
def test_the_limit_counts_failures_in_a_row():
    with pytest.raises(Fatal) as caught:
        retry(3)("x", failing(3))
    assert caught.value.code == 75


def test_a_stop_request_ends_the_attempts():
    assert retry(8, stopping=True)("x", failing(1)) is False


def test_other_exceptions_are_not_retried():
    with pytest.raises(ZeroDivisionError):
        retry(8)("x", lambda: 1 / 0)


@pytest.mark.shows("W13")
def test_a_shard_above_their_number_is_a_usage_error(here, texts, tmp_path):
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path, shard="3", num_shards="2"))
    assert caught.value.code == 64


@pytest.mark.shows("W19")
def test_check_writes_nothing(here, texts, tmp_path, s3):
    uri = s3.bucket("bkt")
    fields, _ = here(program, [*arguments(texts, tmp_path, s3, uri), "--check"])
    assert fields["reason"] == "check"
    assert not list((s3.root / "bkt").iterdir()) and not (tmp_path / "out").exists()


@pytest.mark.shows("W15")
def test_a_gpu_that_is_not_there_is_69(here, texts, tmp_path):
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path, gpu="99"))
    assert caught.value.code == 69


def test_the_model_is_loaded_before_the_first_batch_is_committed(here, texts, tmp_path, monkeypatch):
    phases = phases_at_steps(monkeypatch)
    here(program, arguments(texts, tmp_path))
    assert phases[0] == "warmup" and set(phases[1:]) == {"run"}
