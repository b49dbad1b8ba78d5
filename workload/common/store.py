# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where batches go: a folder or S3, and the commit protocol over either.

<run-id>/run.json                                   what the batches were made from; another one is refused
<run-id>/shard-01-of-04/batch-000001.safetensors
<run-id>/shard-01-of-04/batch-000001.json           written last: the commit record, without it the batch does not count
<run-id>/shard-01-of-04/_DONE
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from common.files import check_folder, write_atomic
from common.runtime import CONFIGURATION, UNAVAILABLE, Fatal

DONE = "_DONE"
RUN = "run.json"
Moved = Callable[[int], None]


def shard_name(shard: int, num_shards: int) -> str:
    """``shard-01-of-04``; both numbers from 1."""
    return f"shard-{shard:02d}-of-{num_shards:02d}"


def batch_name(number: int) -> str:
    """``batch-000001``; from 1."""
    return f"batch-{number:06d}"


class Store(Protocol):
    """Keys to bytes.  Every method raises what :data:`ERRORS` names when the store is not available."""

    def preflight(self) -> None:
        """Prove that the place is there and change nothing; raises Fatal with a name otherwise."""

    def put_file(self, key: str, path: Path, moved: Moved | None = None) -> None:
        """Copy a file; ``moved`` hears of the bytes on their way."""

    def put_bytes(self, key: str, data: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """The object's bytes, None when there is no such key."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Key to size in bytes of everything below ``prefix``."""

    def abort_dangling(self, prefix: str) -> int:
        """Abort multipart uploads that a killed process left; how many."""


class LocalStore:
    """A folder.  A batch file that already lies at its key's place is only committed, not copied."""

    def __init__(self, root: Path):
        self.root = root

    def preflight(self) -> None:
        check_folder(self.root)

    def put_file(self, key: str, path: Path, moved: Moved | None = None) -> None:
        if path != self.root / key:
            self.put_bytes(key, path.read_bytes())

    def put_bytes(self, key: str, data: bytes) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.root / key, data)

    def get(self, key: str) -> bytes | None:
        try:
            return (self.root / key).read_bytes()
        except FileNotFoundError:
            return None

    def sizes(self, prefix: str) -> dict[str, int]:
        found = {}
        for path in (self.root / prefix).rglob("*"):
            # Temporary files begin with a dot; one may be renamed between the listing and the look at it.
            if not path.name.startswith(".") and path.is_file():
                found[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return found

    def abort_dangling(self, prefix: str) -> int:
        return 0


class S3Store:
    """``s3://bucket/prefix`` behind any endpoint; credentials as boto3 finds them, never from the command line."""

    def __init__(self, uri: str, endpoint: str | None):
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self.uri = uri
        parts = urlsplit(uri)
        if parts.scheme != "s3" or not parts.netloc or parts.username or parts.query:
            raise Fatal(CONFIGURATION, "s3_uri", f"--s3-uri {uri}: give s3://BUCKET or s3://BUCKET/PREFIX.")
        self.bucket = parts.netloc
        self.prefix = parts.path.strip("/") + "/" if parts.path.strip("/") else ""
        self.endpoint = endpoint
        session = boto3.session.Session()
        self._client = session.client(
            "s3",
            endpoint_url=endpoint,
            region_name=session.region_name or "us-east-1",
            config=Config(
                connect_timeout=5,
                read_timeout=60,
                retries={"max_attempts": 2, "mode": "standard"},
                s3={"addressing_style": "path"} if endpoint else None,
                # botocore adds CRC trailers by default since 1.36; servers other than AWS's often refuse them.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        # One thread: the upload queue is the parallelism, and it is bounded.
        self._transfer = TransferConfig(multipart_threshold=16 << 20, multipart_chunksize=16 << 20, use_threads=False)

    def preflight(self) -> None:
        from botocore import exceptions

        where = f"s3://{self.bucket}/{self.prefix} at {self.endpoint or 'AWS'}"
        try:
            self._client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
        except exceptions.NoCredentialsError:
            raise Fatal(
                CONFIGURATION, "s3_credentials", "no S3 credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
            ) from None
        except exceptions.ClientError as error:
            code = error.response["Error"].get("Code", "")
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status in (400, 401, 403):
                raise Fatal(
                    CONFIGURATION,
                    "s3_credentials",
                    f"{where} refused the credentials ({code}). Check key, secret and rights.",
                ) from None
            if status == 404:
                raise Fatal(
                    CONFIGURATION, "s3_bucket", f"{where}: {code}. Create the bucket or correct --s3-uri."
                ) from None
            raise Fatal(UNAVAILABLE, "s3_unavailable", f"{where}: {error}") from None
        except exceptions.BotoCoreError as error:
            raise Fatal(UNAVAILABLE, "s3_unavailable", f"{where}: {error}") from None

    def put_file(self, key: str, path: Path, moved: Moved | None = None) -> None:
        self._client.upload_file(str(path), self.bucket, self.prefix + key, Config=self._transfer, Callback=moved)

    def put_bytes(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=data)

    def get(self, key: str) -> bytes | None:
        from botocore.exceptions import ClientError

        try:
            return self._client.get_object(Bucket=self.bucket, Key=self.prefix + key)["Body"].read()
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return None
            raise

    def objects(self, prefix: str) -> dict[str, tuple[int, float]]:
        """Key to (bytes, modified in Unix seconds) of everything below ``prefix``."""
        found = {}
        for page in self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self.prefix + prefix
        ):
            for entry in page.get("Contents", ()):
                found[entry["Key"][len(self.prefix) :]] = (entry["Size"], entry["LastModified"].timestamp())
        return found

    def sizes(self, prefix: str) -> dict[str, int]:
        return {key: size for key, (size, _modified) in self.objects(prefix).items()}

    def abort_dangling(self, prefix: str) -> int:
        from botocore.exceptions import ClientError

        aborted = 0
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self.bucket, Prefix=self.prefix + prefix
        )
        try:
            for page in pages:
                for upload in page.get("Uploads", ()):
                    self._client.abort_multipart_upload(
                        Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    aborted += 1
        except ClientError as error:
            # What `rclone serve s3` answers, instead of an empty list, for a bucket that never had a multipart upload.
            if error.response["Error"].get("Code") != "NoSuchUpload":
                raise
        return aborted


def errors() -> tuple[type[Exception], ...]:
    """What a store that is not available raises, worth another attempt."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return (OSError, BotoCoreError, ClientError, Boto3Error)


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Outside the retried writes, a store that does not answer ends the process with 69."""
    try:
        yield
    except errors() as error:
        raise Fatal(UNAVAILABLE, "store_unavailable", str(error)) from error


def manifest(store: Store, run_id: str) -> dict[str, Any] | None:
    """run.json; None when there is none, 78 when it is no JSON object."""
    data = store.get(f"{run_id}/{RUN}")
    if data is None:
        return None
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError):
        raise Fatal(
            CONFIGURATION, "run_mismatch", f"{run_id}/{RUN} is no JSON object. Choose another --run-id."
        ) from None


def agree(store: Store, run_id: str, wanted: dict[str, Any], write: bool = True) -> None:
    """Bind ``run_id`` to this manifest: the first shard writes it, all others must have the same; else 78."""
    theirs = manifest(store, run_id)
    if theirs is None and write:
        store.put_bytes(f"{run_id}/{RUN}", (json.dumps(wanted, indent=1, sort_keys=True) + "\n").encode())
        # Two shards that start together both write; if they disagree, one of them reads the other's here.
        theirs = manifest(store, run_id)
    if theirs is None:
        return
    fields = sorted(name for name in {*wanted, *theirs} if wanted.get(name) != theirs.get(name))
    if fields:
        raise Fatal(
            CONFIGURATION,
            "run_mismatch",
            f"--run-id {run_id} holds batches made from something else: {', '.join(fields)} differ. "
            "Choose another --run-id.",
        )


def committed(store: Store, shard: str) -> dict[int, dict[str, Any]]:
    """Batch number to commit record of what counts under ``shard``: a record whose batch has the size that it says."""
    sizes = store.sizes(f"{shard}/")
    names = sorted(key for key in sizes if key.endswith(".json"))
    with ThreadPoolExecutor(max_workers=8) as pool:
        records = list(pool.map(store.get, names))
    found = {}
    for name, data in zip(names, records, strict=True):
        try:
            record = json.loads(data or b"")
            number, size = int(record["batch"]), int(record["bytes"])
        except (ValueError, KeyError, TypeError):
            continue
        if (
            name == f"{shard}/{batch_name(number)}.json"
            and sizes.get(f"{shard}/{batch_name(number)}.safetensors") == size
        ):
            found[number] = record
    return found
