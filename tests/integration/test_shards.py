# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One declaration of shards over three hosts: one is lost in the middle, and the others finish its work.

The tests follow one another: each begins with what the one before left.
"""

from __future__ import annotations

import collections
import json
import random
import subprocess
import time

import pytest

from tests.support import workload
from tests.support.container import GATEWAY
from tests.support.hosts import hosts
from tests.support.prepared import PACKAGES_INSIDE, PROGRAMS_INSIDE

pytestmark = pytest.mark.container
SHARDS, SAMPLES = 4, 1600
HOSTS = {"c1": [], "c2": [], "c3": []}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    root = folder / "s3"
    (root / "states").mkdir(parents=True)
    with hosts(folder, "lpt-shards") as found:
        server = workload.start_s3(root, address=GATEWAY)
        words = random.Random(1).choices(
            [
                "the",
                "a",
                "tensor",
                "host",
                "shard",
                "moves",
                "where",
                "it",
                "must",
                "and",
                "no",
                "other",
                "one",
                "does",
            ],
            k=40,
        )
        data = "".join(json.dumps({"text": f"sample {number} {' '.join(words)}"}) + "\n" for number in range(SAMPLES))
        for container in found.containers.values():
            container.write("/srv/data.jsonl", data)
        found.objects = root / "states/run/reference"
        found.declare(
            launchproof_jobs=["{{ extraction_job }}"],
            extraction_shards=SHARDS,
            extraction_hosts=HOSTS,
            extraction_code_src="",
            extraction_lock="",
            extraction_command=[
                *("/usr/bin/python3", f"{PROGRAMS_INSIDE}/extract_hidden_states.py", "--data", "/srv/data.jsonl"),
                *("--out-dir", "/var/lib/dflash/extraction", "--batch-samples", "8", "--resume"),
                *("--s3-uri", "s3://states/run", "--s3-endpoint", server.endpoint),
            ],
            extraction_env={"PYTHONPATH": PACKAGES_INSIDE},
            extraction_s3_uri="s3://states/run",
            extraction_s3_endpoint=server.endpoint,
            extraction_s3_access_key=workload.KEY,
            extraction_s3_secret_key=workload.SECRET,
        )
        yield found
        workload.stop(server.process)


def unit(shard):
    return f"extraction@{shard}.service"


def records(site):
    """Commit records by shard: {shard: {name of the file: its content}}."""
    found = collections.defaultdict(dict)
    for path in site.objects.glob("shard-*/batch-*.json"):
        found[int(path.parent.name.split("-")[1])][path.name] = json.loads(path.read_text())
    return found


def show(container, shard, name):
    return container.run("systemctl", "show", "-P", name, unit(shard)).stdout.strip()


def test_a_host_that_loses_its_power_hides_no_other_hosts_verdict(site):
    run = site.start()
    while not records(site)[2]:  # in the middle of its shard
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.05)
    site.containers["c3"].stop()
    output = run.communicate(timeout=200)[0]
    assert run.returncode != 0
    site.before = records(site)
    site.ran = {
        shard: show(site.containers[host], shard, "InvocationID") for host, shard in (("c1", 1), ("c2", 3), ("c2", 4))
    }
    rows = site.rows()
    assert (rows["c3", unit(2)]["code"], rows["c3", unit(2)]["ok"]) == ("unreachable", False), output
    assert {key for key, row in rows.items() if row["ok"]} == {("c1", unit(1)), ("c2", unit(3)), ("c2", unit(4))}, (
        output
    )


def test_only_the_lost_hosts_shard_moves(site):
    rc, output = site.deploy("--limit", "c1,c2", "-e", '{"extraction_lost_hosts": ["c3"]}')
    assert rc == 0, output
    assert set(site.rows()) == {("c1", unit(1)), ("c1", unit(2)), ("c2", unit(3)), ("c2", unit(4))}
    for host, shard in (("c1", 1), ("c2", 3), ("c2", 4)):
        now = show(site.containers[host], shard, "InvocationID")
        assert now == site.ran[shard], "a shard that did not move was started anew"


def test_no_sample_is_lost_and_none_is_done_twice(site):
    for container, shards in ((site.containers["c1"], (1, 2)), (site.containers["c2"], (3, 4))):
        for shard in shards:
            container.wait_for_end(show(container, shard, "MainPID"), timeout=200)
    after = records(site)
    committed = collections.Counter(
        sample for shard in after.values() for record in shard.values() for sample in record["samples"]
    )
    assert set(committed.values()) == {1}
    assert len(committed) >= SAMPLES
    for shard, before in site.before.items():
        assert before.items() <= after[shard].items(), "a batch that was committed was done again"
    assert {path.parent.name for path in site.objects.glob("shard-*/_DONE")} == {
        f"shard-{n:02d}-of-{SHARDS:02d}" for n in range(1, SHARDS + 1)
    }


def test_a_host_that_comes_back_gives_up_what_moved(site):
    site.containers["c3"].start()
    subprocess.run([*site.containers["c3"].argv("systemctl", "start", "ssh")], check=True, stdin=subprocess.DEVNULL)
    rc, output = site.deploy("-e", '{"extraction_lost_hosts": ["c3"]}')
    assert rc == 0, output
    assert not site.containers["c3"].path(f"/etc/launchproof/jobs/{unit(2)}.json").exists()
    assert site.containers["c3"].path(f"/var/lib/launchproof/runs/{unit(2)}").is_dir()
    assert show(site.containers["c3"], 2, "ActiveState") != "active"
