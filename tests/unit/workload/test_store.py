# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The store over a folder and over a real S3 server: what counts as committed, and who is told what."""

import json
import threading

import pytest
from common import handoff as handoffs
from common import store as stores
from common.runtime import Fatal

from tests.unit.workload.conftest import start_s3, stop

SHARD = "run/shard-01-of-01"


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path):
    if request.param == "folder":
        return stores.LocalStore(tmp_path / "local")
    s3 = request.getfixturevalue("s3")
    return stores.S3Store(s3.bucket("bkt"), s3.endpoint)


def put(store, number: int, data: bytes | None, size: int | None = None) -> None:
    name = f"{SHARD}/{stores.batch_name(number)}"
    if data is not None:
        store.put_bytes(f"{name}.safetensors", data)
    store.put_bytes(
        f"{name}.json", json.dumps({"batch": number, "bytes": len(data or b"") if size is None else size}).encode()
    )


@pytest.mark.shows("W26")
def test_only_a_record_with_a_batch_of_its_size_counts(store):
    put(store, 1, b"12345")
    put(store, 2, b"12345", size=6)
    put(store, 3, None, size=5)
    store.put_bytes(f"{SHARD}/{stores.batch_name(4)}.safetensors", b"no record")
    store.put_bytes(f"{SHARD}/{stores.batch_name(5)}.json", b"{truncated")
    store.put_bytes(f"{SHARD}/{stores.batch_name(6)}.json", json.dumps({"batch": 1, "bytes": 5}).encode())
    store.put_bytes(f"{SHARD}/{stores.DONE}", b"")
    assert list(stores.committed(store, SHARD)) == [1]


def test_bytes_and_files_come_back(store, tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    store.put_file("a/b", tmp_path / "file")
    assert store.get("a/b") == b"content" and store.get("a/c") is None
    assert store.sizes("a/") == {"a/b": 7}


@pytest.mark.shows("W42")
def test_a_large_file_goes_in_parts(s3, tmp_path):
    store = stores.S3Store(s3.bucket("bkt"), s3.endpoint)
    (tmp_path / "file").write_bytes(bytes(40 << 20))
    store.put_file("big", tmp_path / "file")
    assert store.sizes("") == {"big": 40 << 20}
    assert (s3.root / "bkt/data/big").stat().st_size == 40 << 20


@pytest.mark.shows("W42")
def test_a_listing_is_not_cut_off_after_one_page(s3):
    store = stores.S3Store(s3.bucket("bkt"), s3.endpoint)
    folder = s3.root / "bkt/data/x"
    folder.mkdir(parents=True)
    for n in range(1100):
        (folder / f"{n:04d}").touch()
    assert len(store.sizes("x/")) == 1100


@pytest.mark.shows("W31")
def test_dangling_uploads_of_this_shard_alone_are_aborted(s3):
    store = stores.S3Store(s3.bucket("bkt"), s3.endpoint)
    assert store.abort_dangling(f"{SHARD}/") == 0
    for key in (f"{SHARD}/a", f"{SHARD}/b", "other/c"):
        store._client.create_multipart_upload(Bucket="bkt", Key=f"data/{key}")
    assert store.abort_dangling(f"{SHARD}/") == 2
    left = store._client.list_multipart_uploads(Bucket="bkt").get("Uploads", [])
    assert [upload["Key"] for upload in left] == ["data/other/c"]


@pytest.mark.shows("W29")
def test_a_run_id_is_bound_to_its_first_manifest(store):
    stores.agree(store, "run", {"model": "a", "layers": [1]})
    stores.agree(store, "run", {"model": "a", "layers": [1]})
    with pytest.raises(Fatal) as caught:
        stores.agree(store, "run", {"model": "b", "layers": [1]})
    assert caught.value.code == 78 and "model" in str(caught.value) and "layers" not in str(caught.value)
    assert json.loads(store.get("run/run.json"))["model"] == "a"


@pytest.mark.shows("W19")
def test_a_check_binds_nothing(store):
    stores.agree(store, "run", {"model": "a"}, write=False)
    assert store.get("run/run.json") is None


@pytest.mark.shows("W18", "W41")
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("secret", 78, "SignatureDoesNotMatch"),
        ("key", 78, "InvalidAccessKeyId"),
        ("bucket", 78, "NoSuchBucket"),
        ("none", 78, "AWS_ACCESS"),
    ],
)
def test_what_no_retry_can_mend_is_a_configuration_error(s3, monkeypatch, tmp_path, what, code, said):
    uri = s3.bucket("bkt")
    if what == "secret":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    if what == "key":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key")
    if what == "bucket":
        uri = "s3://gone/data"
    if what == "none":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(Fatal) as caught:
        stores.S3Store(uri, s3.endpoint).preflight()
    assert caught.value.code == code and said in str(caught.value)
    assert "another-secret" not in str(caught.value)


@pytest.mark.shows("W15")
def test_a_server_that_is_down_is_69_and_may_come_back(s3):
    store = stores.S3Store(s3.bucket("bkt"), s3.endpoint)
    stop(s3.process)
    with pytest.raises(Fatal) as caught:
        store.preflight()
    assert caught.value.code == 69 and s3.endpoint in str(caught.value)
    with pytest.raises(Fatal) as caught, stores.available():
        store.sizes("")
    assert caught.value.code == 69
    again = start_s3(s3.root, int(s3.endpoint.rsplit(":", 1)[1]))
    try:
        store.preflight()
    finally:
        stop(again.process)


@pytest.mark.parametrize("uri", ["bucket/x", "http://bucket/x", "s3://", "s3://user:pw@bucket/x"])
def test_an_uri_that_is_none_is_refused(uri):
    with pytest.raises(Fatal) as caught:
        stores.S3Store(uri, None)
    assert caught.value.code == 78


def test_a_handoff_is_bounded_drained_and_aborted():
    handoff = handoffs.Handoff(2)
    handoff.put(1)
    handoff.put(2)
    thread = threading.Thread(target=lambda: handoff.put(3), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and handoff.take() == 1
    thread.join(5)
    handoff.finish()
    assert [handoff.take(), handoff.take()] == [2, 3]
    with pytest.raises(handoffs.Closed):
        handoff.take()
    handoff.abort()
    with pytest.raises(handoffs.Closed):
        handoff.put(4)
