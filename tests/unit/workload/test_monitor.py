# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The monitor: it knows, or says that it does not know; and the page in a browser's absence."""

import json
import time
import urllib.error
import urllib.request
from html.parser import HTMLParser

import pytest
from common import page, status
from common import store as stores
from common.runtime import Fatal
from common.status import Count, Listing, Status, Unit

from tests.unit.workload.conftest import stop

NOW = 1_000_000.0
TWO = {"shard-01-of-02": 3, "shard-02-of-02": 3}


def judge(units=(), s3=None, local=None, expected=TWO, since=NOW):
    return status.judge(NOW, list(units), {"local": local, "s3": s3}, expected, since, 60, 600)


def listing(last=NOW, done=(False, False)) -> Listing:
    return Listing({name: Count(1, 1, 10, last, finished) for name, finished in zip(TWO, done, strict=True)})


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({}, None),
        ({"units": [Unit("a", beat_age_s=59)]}, None),
        ({"units": [Unit("a", beat_age_s=61)]}, "a: no heartbeat for 61 s"),
        ({"units": [Unit("a", beat_age_s=9999, ended="success")]}, None),
        ({"units": [Unit("a", unknown="Permission denied")]}, "a: unknown (Permission denied)"),
        ({"s3": Listing(unknown="refused")}, "s3: unknown (refused)"),
        ({"s3": listing(last=NOW - 599)}, None),
        ({"s3": listing(last=NOW - 601), "since": NOW - 9999}, "no new batch for 601 s"),
        ({"s3": listing(last=NOW - 601), "since": NOW - 5}, None),
        ({"s3": listing(last=NOW - 601, done=(True, True)), "since": NOW - 9999}, None),
        ({"s3": listing(last=NOW - 601, done=(True, False)), "since": NOW - 9999}, "no new batch"),
        ({"s3": Listing(), "expected": None, "since": NOW - 601}, "no new batch for 601 s"),
    ],
)
def test_health(case, said):
    found = judge(**case)
    assert (found == []) if said is None else (len(found) == 1 and said in found[0]), found


def test_counts_are_of_batches_and_nothing_else():
    shard = "shard-01-of-02"
    found = status.count(
        {
            f"{shard}/batch-000001.safetensors": (10, 5.0),
            f"{shard}/batch-000001.json": (1, 9.0),
            f"{shard}/batch-000002.safetensors": (20, 7.0),
            f"{shard}/_DONE": (1, 9.0),
            f"{shard}/batch-1.safetensors": (1, 99.0),
            "run.json": (1, 99.0),
        }
    )
    assert found == {shard: Count(batches=2, committed=1, bytes=30, last=7.0, done=True)}


@pytest.mark.parametrize(
    ("manifest", "expected"), [(None, None), (b"{", None), (b"[]", None), (b'{"samples": 5}', None)]
)
def test_expectations_come_from_a_readable_run_json_alone(manifest, expected):
    assert status.expected(manifest) == expected


def test_expected_batches_follow_the_extractions_own_split():
    manifest = json.dumps({"samples": 797, "num_shards": 2, "batch_samples": 32}).encode()
    assert status.expected(manifest) == {"shard-01-of-02": 13, "shard-02-of-02": 13}
    assert sum(status.expected(json.dumps({"samples": 7, "num_shards": 3, "batch_samples": 2}).encode()).values()) == 4


def test_a_local_folder_that_is_not_there_is_unknown_not_empty(tmp_path):
    assert status.list_local(tmp_path / "gone").unknown
    (tmp_path / "run/shard-01-of-01").mkdir(parents=True)
    (tmp_path / "run/shard-01-of-01/.batch-000001.safetensors.1.tmp").touch()
    assert status.list_local(tmp_path / "run") == Listing({})


def unit_folder(runs, name: str, **files):
    folder = runs / name / "abc"
    folder.mkdir(parents=True)
    (runs / name / "current").symlink_to("abc")
    for file, content in files.items():
        (folder / f"{file}.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_units_are_read_as_they_are(tmp_path):
    now = time.time()
    beat = {
        "time": now - 4,
        "phase": "run",
        "step": 7,
        "step_age_s": 1.0,
        "telemetry": "off: none",
        "shard": "shard-01-of-02",
    }
    unit_folder(tmp_path, "run.service", heartbeat=beat, verdict={"code": "ok_progressing", "ok": True})
    end = {"service_result": "exit-code", "exit_code": "exited", "exit_status": "70"}
    unit_folder(tmp_path, "dead.service", heartbeat=beat, exit=end, verdict={"code": "crashed_traceback", "ok": False})
    unit_folder(tmp_path, "broken.service", heartbeat="{half")
    unit_folder(tmp_path, "other.service")
    (tmp_path / "new.service/none").mkdir(parents=True)
    (tmp_path / "new.service/current").symlink_to("none")
    units = {unit.unit: unit for unit in status.read_units(tmp_path, now)}
    running = units["run.service"]
    assert (running.phase, running.step, running.step_age_s, running.beat_age_s) == ("run", 7, 5.0, 4.0)
    assert (running.verdict, running.verdict_ok, running.ended) == ("ok_progressing", True, None)
    assert units["dead.service"].phase == "ended" and units["dead.service"].ended == "exit-code (exited 70)"
    assert units["broken.service"].unknown
    assert units["other.service"].phase == "unknown" and units["other.service"].unknown is None
    assert units["new.service"].phase == "never started"
    assert status.read_units(tmp_path / "gone", now)[0].unknown


class Well(HTMLParser):
    """Every opened element is closed, in order."""

    VOID = {"meta", "br", "link", "input"}

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] != "style":
            self.text += data + " "


def test_the_page_escapes_is_well_formed_and_reloads():
    bad = '<script>alert("x")</script>'
    state = Status(
        NOW, bad, TWO, Listing(), Listing({bad: Count(1)}), [Unit(bad, verdict=bad), Unit("u", unknown=bad)], [bad]
    )
    html = page.page(state, 5)
    parser = Well()
    parser.feed(html)
    assert parser.open == [] and "<script" not in html
    assert '<meta http-equiv="refresh" content="5">' in html and 'name="viewport"' in html


def test_unknown_is_never_shown_as_zero():
    state = Status(NOW, "r", None, Listing(unknown="no such folder"), Listing(unknown="refused"), [], ["s3: unknown"])
    parser = Well()
    parser.feed(page.page(state, 5))
    assert parser.text.count("unknown") == 3 and "0 files" not in parser.text
    text = page.metrics(state)
    assert 'dflash_listing_known{where="s3"} 0' in text and "dflash_batches{" not in text
    assert state.data()["s3"]["unknown"] == "refused"


def test_metrics_are_typed_once_and_labels_escaped():
    state = Status(NOW, "r", TWO, None, listing(), [Unit('a"b\\c', step=3, verdict="ok_started", verdict_ok=True)], [])
    lines = page.metrics(state).splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert 'dflash_step{unit="a\\"b\\\\c"} 3' in lines
    assert 'dflash_verdict_ok{unit="a\\"b\\\\c",code="ok_started"} 1' in lines


def get(base: str, path: str):
    try:
        with urllib.request.urlopen(base + path, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_server_tells_slow_from_dead_and_down(start, s3, tmp_path):
    store = stores.S3Store(s3.bucket("bkt"), s3.endpoint)
    store.put_bytes("r/run.json", json.dumps({"samples": 4, "num_shards": 1, "batch_samples": 2}).encode())
    store.put_bytes("r/shard-01-of-01/batch-000001.safetensors", b"x")
    runs = tmp_path / "runs"
    unit_folder(runs, "t.service", heartbeat={"time": time.time(), "phase": "run", "step": 1})
    argv = ["--listen", "127.0.0.1:0", "--runs", runs, "--s3-uri", "s3://bkt/data", "--s3-endpoint", s3.endpoint]
    child = start("monitor.py", *argv, "--run-id", "r", "--every", "1", "--stale-after", "600")
    base = "http://" + child.until(r"ev=listen address=(\S+)")[1]
    child.until("ev=ready")
    assert get(base, "/healthz") == (200, "ok\n")
    code, body = get(base, "/api/status")
    assert code == 200 and json.loads(body)["s3"]["shards"]["shard-01-of-01"]["batches"] == 1
    assert "1 files" in get(base, "/")[1] and get(base, "/nope")[0] == 404
    assert 'dflash_batches{where="s3",shard="shard-01-of-01"} 1' in get(base, "/metrics")[1]
    request = urllib.request.Request(base + "/", method="POST", data=b"")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request, timeout=10)
    stop(s3.process)
    child.until(r"ev=step .*healthy=0")
    code, body = get(base, "/healthz")
    assert code == 503 and "s3: unknown" in body
    assert "unknown" in get(base, "/")[1]
    shown = "".join(get(base, path)[1] for path in ("/", "/api/status", "/metrics", "/healthz")) + child.text
    assert "a-secret-of-the-test" not in shown
    child.process.terminate()
    assert child.wait(20) == 0 and "reason=sigterm" in child.lines[-1]


def test_a_taken_address_is_69_and_says_which(start, tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "127.0.0.1:%d" % taken.getsockname()[1]
        child = start("monitor.py", "--listen", address, "--runs", tmp_path)
        assert child.wait(30) == 69 and address in child.lines[-1]


def test_wrong_credentials_end_it_instead_of_showing_unknown_for_ever(start, s3, tmp_path):
    s3.bucket("bkt")
    argv = ["--listen", "127.0.0.1:0", "--runs", tmp_path, "--s3-uri", "s3://bkt/x", "--s3-endpoint", s3.endpoint]
    child = start("monitor.py", *argv, env={"AWS_SECRET_ACCESS_KEY": "wrong"})
    assert child.wait(30) == 78


def test_loopback_is_the_default():
    import monitor

    assert monitor.parser().parse_args([]).listen == ("127.0.0.1", 8600)
    assert monitor.address("[::1]:80") == ("::1", 80)
    for bad in ("8600", ":8600", "host:", "host:x", "host:70000"):
        with pytest.raises(Fatal):
            monitor.parser().parse_args(["--listen", bad])
