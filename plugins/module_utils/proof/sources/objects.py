# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Counts the objects below an S3 prefix or in a folder. A place that cannot be listed is unknown, never 0."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import os
import threading
import time
import urllib.parse

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import NOT_READ, Objects, Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import NAMES

S3_EVERY = 2.0  # s between listings: S3 tells nobody when something is stored
S3_TIMEOUT = 10.0  # s for one request
PATIENCE = 30.0  # s of failed listings that may be a server's restart, or a machine that has much to do
BASELINE_PATIENCE, BASELINE_PAUSE = 3.0, 0.3  # the same before the start, where nothing else can go on meanwhile


class ListError(Exception):
    """The place could not be listed. C(lasting): asking again would not help (no key, no right, no bucket)."""

    def __init__(self, message: str, lasting: bool = False):
        super().__init__(message)
        self.lasting = lasting


def sign(method: str, host: str, path: str, query: str, environ: dict, now: datetime.datetime) -> dict:
    """Headers of AWS Signature Version 4 for a request without a body. Source: AWS General Reference, SigV4."""
    access, secret = environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"]
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    empty = hashlib.sha256(b"").hexdigest()
    headers = {"host": host, "x-amz-content-sha256": empty, "x-amz-date": stamp}
    if environ.get("AWS_SESSION_TOKEN"):
        headers["x-amz-security-token"] = environ["AWS_SESSION_TOKEN"]
    names = ";".join(sorted(headers))
    canonical = "\n".join(
        (method, path, query, "".join("%s:%s\n" % item for item in sorted(headers.items())), names, empty)
    )
    scope = "%s/%s/s3/aws4_request" % (day, region)
    to_sign = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()))
    key = ("AWS4" + secret).encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    headers["authorization"] = "AWS4-HMAC-SHA256 Credential=%s/%s, SignedHeaders=%s, Signature=%s" % (
        access,
        scope,
        names,
        signature,
    )
    return headers


def s3_count(uri: str, environ: dict, timeout: float = S3_TIMEOUT) -> int:
    """Number of objects below C(s3://bucket/prefix), I(timeout) s for each request. Raises ListError.

    Endpoint, keys, region and CA come from the job's own AWS_* variables: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL,
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_CA_BUNDLE.
    """
    # 25 ms and 5 MiB that only this needs.
    import http.client
    import ssl
    import xml.etree.ElementTree

    missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not environ.get(name)]
    if missing:
        raise ListError("%s is not in the job's env or secrets" % missing[0], lasting=True)
    bucket, _slash, prefix = uri[len("s3://") :].partition("/")
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com"
    parts = urllib.parse.urlsplit(endpoint)
    path = "%s/%s" % (parts.path.rstrip("/"), urllib.parse.quote(bucket))
    count, token = 0, None
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=environ.get("AWS_CA_BUNDLE") or None)
        connection = http.client.HTTPSConnection(parts.netloc, timeout=timeout, context=context)
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=timeout)
    try:
        while True:
            values = {"list-type": "2", "prefix": prefix}
            if token:
                values["continuation-token"] = token
            query = "&".join(
                "%s=%s" % (key, urllib.parse.quote(value, safe="-_.~")) for key, value in sorted(values.items())
            )
            now = datetime.datetime.now(datetime.timezone.utc)
            connection.request("GET", path + "?" + query, headers=sign("GET", parts.netloc, path, query, environ, now))
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise ListError(
                    "%s answered %d %s" % (endpoint, answer.status, answer.reason), lasting=400 <= answer.status < 500
                )
            tree = xml.etree.ElementTree.fromstring(body)
            space = tree.tag.partition("}")[0] + "}" if tree.tag.startswith("{") else ""
            count += len(tree.findall(space + "Contents"))
            token = tree.findtext(space + "NextContinuationToken")
            if not token:
                return count
    except (OSError, http.client.HTTPException, xml.etree.ElementTree.ParseError) as error:
        raise ListError("%s: %s" % (endpoint, error)) from error
    finally:
        connection.close()


def folder_count(path: str) -> int:
    """Number of files in I(path) and below; 0 where it does not exist yet. Raises ListError."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise ListError("%s: %s" % (error.filename, error.strerror), lasting=True)

    return sum(len(files) for _folder, _folders, files in os.walk(path, onerror=fail))


class ObjectsSource:
    """Keeps the number of objects up to date: inotify for a folder, a listing thread for S3."""

    def __init__(self, spec, environ: dict, loop, touch):
        self.spec, self.environ, self.loop, self.touch = spec, environ, loop, touch
        self._remote = spec.uri.startswith("s3://")
        self.good = None  # the last number that was read
        self._last = self._grew_at = self._failing_since = None
        self._key = self._thread = None
        self._stop = threading.Event()
        self._reading, self._writing = None, None

    def _list(self, timeout: float = S3_TIMEOUT) -> int | Unknown:
        try:
            found = s3_count(self.spec.uri, self.environ, timeout) if self._remote else folder_count(self.spec.uri)
        except ListError as error:
            self._failing_since = (
                ledger.boottime() - PATIENCE if error.lasting else self._failing_since or ledger.boottime()
            )
            return Unknown(str(error))
        self._failing_since = None
        return found

    def count(self) -> int | Unknown:
        """Count now, as the baseline, and begin to follow.

        NOT_READ where the server may still answer: the start does not wait for it, and C(good) is the baseline once it has.
        """
        end = ledger.boottime() + BASELINE_PATIENCE
        first = self._list(BASELINE_PATIENCE)
        while isinstance(first, Unknown) and ledger.boottime() < min(end, self._failing_since + PATIENCE):
            time.sleep(BASELINE_PAUSE)
            first = self._list(BASELINE_PATIENCE)
        self._take(first)
        if self._remote:
            self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self.loop.add(self._reading, self._on_listing)
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        else:
            self._key = self.loop.watch(self.spec.uri, NAMES, lambda _mask, _name: self._take(self._list()))
        return NOT_READ if isinstance(first, Unknown) and not self._lost() else first

    def _lost(self) -> bool:
        """Whether listing has failed for so long, or in such a way, that no answer is to be expected."""
        return self._failing_since is not None and ledger.boottime() - self._failing_since >= PATIENCE

    def _run(self) -> None:
        while not self._stop.wait(S3_EVERY):
            self._found = self._list()
            with contextlib.suppress(OSError):
                os.write(self._writing, b".")

    _found = None

    def _on_listing(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reading, 64)
        self._take(self._found)

    def _take(self, found) -> None:
        if isinstance(found, int) and found != self._last:
            if isinstance(self._last, int) and found > self._last:
                self._grew_at = ledger.boottime()
            self.touch()
        if isinstance(found, int):
            self.good = found
        self._last = found

    def facts(self) -> Objects | Unknown:
        if not self._remote and self._key is None:
            self._take(self._list())  # the folder came later, or lies where inotify does not reach
            self._key = self.loop.watch(self.spec.uri, NAMES, lambda _mask, _name: self._take(self._list()))
        if isinstance(self._last, Unknown):
            if self._lost():
                return self._last
            if self.good is None:
                return NOT_READ
        return Objects(uri=self.spec.uri, count=self.good or 0, grew_at=self._grew_at)

    def close(self) -> None:
        self._stop.set()
        self.loop.unwatch(self._key)
        if self._reading is not None:
            self.loop.remove(self._reading)
            self._reading = None
