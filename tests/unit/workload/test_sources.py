# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where training's hidden states come from."""

import itertools
import json
import threading

import extract_hidden_states as extraction
import pytest
import torch
import train_dflash_pipeline as program
from common import sources
from common import store as stores
from common import target as targets
from common.bucket_queue import BucketQueue, Closed
from common.runtime import Fatal, Job

from tests.unit.workload import test_extract
from tests.unit.workload.test_train import arguments, losses

CPU = torch.device("cpu")
PIECE = str(test_extract.PIECE)


@pytest.fixture(scope="module")
def loaded(texts):
    return targets.load("tiny-random", texts, test_extract.PIECE, "auto", None, CPU)


@pytest.mark.shows("W49")
def test_several_target_threads_share_an_epoch(loaded):
    target, samples, _sha = loaded
    queue = BucketQueue([len(sample.tokens) for sample in samples], [], 1, len(samples), 2, 0)
    job = Job(None)
    drawn = []
    with sources.producing(job, queue, sources.computing(target, [CPU, CPU], samples, 0, 4, queue)):
        while len(drawn) < len(samples):
            drawn += queue.get(1)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("source-")]
        assert sorted(names) == ["source-0", "source-1"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("source-")]
    job.check()
    # Each thread goes on to its next epoch on its own: what both have drawn of the first one is every sample once.
    halves = [list(itertools.islice(sources.endless(samples, 0, n, 2), len(samples) // 2)) for n in (0, 1)]
    assert len({sample.id for half in halves for sample in half}) == 2 * (len(samples) // 2)
    for item in drawn[:5]:
        torch.testing.assert_close(item.features, target.hidden_states([item.sample])[0], rtol=1e-4, atol=1e-4)


def test_every_epoch_has_every_sample_once_in_another_order():
    one, two = (list(itertools.islice(sources.endless(list(range(20)), 7, n, 2), 20)) for n in (0, 1))
    for epoch in (slice(0, 10), slice(10, 20)):
        assert sorted(one[epoch] + two[epoch]) == list(range(20))
    assert one[:10] != one[10:]


@pytest.fixture
def extracted(here, texts, tmp_path, s3):
    """A bucket with a finished extraction of two shards, and the arguments that train from it."""
    uri = s3.bucket("bkt")
    for shard in ("1", "2"):
        here(extraction, test_extract.arguments(texts, tmp_path, s3, uri, shard=shard, num_shards="2"))
    return {"source": "s3", "s3_uri": uri, "s3_endpoint": s3.endpoint, "run_id": "r", "max_length": PIECE}


@pytest.mark.shows("W50", "W58")
def test_training_reads_what_extraction_committed_and_computes_nothing(here, texts, tmp_path, extracted, monkeypatch):
    monkeypatch.setattr("common.runtime.STEP_LINE_EVERY_S", 0.0)
    monkeypatch.setattr(targets.Target, "hidden_states", None)
    fields, output = here(program, arguments(texts, tmp_path / "c", max_steps=60, **extracted))
    assert fields == {"reason": "done", "step": 60} and " source=s3 " in output.getvalue()
    values = losses(tmp_path / "c")
    assert sum(values[-10:]) / 10 < sum(values[:10]) / 10 - 0.5


@pytest.mark.shows("W50")
def test_the_features_are_those_of_the_target(texts, extracted, loaded):
    target, samples, sha = loaded
    committed = sources.Committed(
        stores.S3Store(extracted["s3_uri"], extracted["s3_endpoint"]), "r", target.identity(sha, test_extract.PIECE)
    )
    assert sorted(committed.samples()) == sorted(sample.id for sample in samples)
    queue = BucketQueue([1], [], 1, 10_000, 1, 0)
    produce = committed.producer(lambda _what, action: action() or True, 0, set(committed.samples()), queue)

    def read() -> None:
        with pytest.raises(Closed):
            produce()

    thread = threading.Thread(target=read)
    thread.start()
    items = [item for _ in range(3) for item in queue.get(len(samples) // 3)]
    queue.close()
    thread.join(30)
    assert len({item.sample.id for item in items}) == len(items), "an epoch has each sample once"
    for item in items[:10]:
        assert item.sample == next(sample for sample in samples if sample.id == item.sample.id)
        torch.testing.assert_close(item.features.float(), target.hidden_states([item.sample])[0], rtol=0.02, atol=0.02)


@pytest.mark.shows("W50")
def test_what_is_not_committed_is_not_read(here, texts, tmp_path, extracted, s3, loaded):
    take_back(extracted, "r/shard-02-of-02/")
    _fields, output = here(program, arguments(texts, tmp_path / "c", max_steps=2, **extracted))
    committed = {
        sample
        for path in (s3.root / "bkt/data/r").glob("*/batch-*.json")
        for sample in json.loads(path.read_text())["samples"]
    }
    usable = [sample for sample in loaded[1] if sample.id in committed and len(sample.tokens) >= 3]
    assert 0 < len(usable) < len(loaded[1]) and f" samples={len(usable)} " in output.getvalue()


def take_back(extracted, prefix: str) -> None:
    """Remove commit records through the server, which remembers what it served."""
    store = stores.S3Store(extracted["s3_uri"], extracted["s3_endpoint"])
    for key in store.sizes(prefix):
        if "/batch-" in key and key.endswith(".json"):
            store._client.delete_object(Bucket=store.bucket, Key=store.prefix + key)


@pytest.mark.shows("W51")
@pytest.mark.parametrize(
    ("change", "said"), [({"layers": "0,2"}, "layers"), ({"max_length": "30"}, "max_length"), ({"data": None}, "data")]
)
def test_batches_of_something_else_are_78(here, texts, tmp_path, extracted, change, said):
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").write_text("another text\n\nof two paragraphs")
    data = other if "data" in change else texts
    options = {**extracted, **{name: value for name, value in change.items() if value}}
    with pytest.raises(Fatal) as caught:
        here(program, arguments(data, tmp_path / "c", **options))
    assert caught.value.code == 78 and said in str(caught.value) and not (tmp_path / "c").exists()


@pytest.mark.shows("W51")
def test_a_batch_that_was_changed_ends_with_65(here, texts, tmp_path, extracted, s3):
    for path in (s3.root / "bkt/data/r").glob("*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path / "c", **extracted))
    assert caught.value.code == 65 and "sha256" in str(caught.value)


@pytest.mark.shows("W15")
def test_an_extraction_that_is_not_there_yet_is_69(here, texts, tmp_path, extracted):
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path / "c", **{**extracted, "run_id": "other"}))
    assert caught.value.code == 69 and "other" in str(caught.value)
    take_back(extracted, "r/")
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path / "c", **extracted))
    assert caught.value.code == 69 and "no committed batch" in str(caught.value)


@pytest.mark.shows("W13")
@pytest.mark.parametrize("options", [{"source": "s3"}, {"s3_uri": "s3://bkt/x"}])
def test_a_source_without_its_place_is_a_usage_error(here, texts, tmp_path, options):
    with pytest.raises(Fatal) as caught:
        here(program, arguments(texts, tmp_path / "c", **options))
    assert caught.value.code == 64
