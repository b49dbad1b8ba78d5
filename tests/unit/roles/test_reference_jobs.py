# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The jobs that the roles training, extraction and monitor declare, as their variables make them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.dflash.launchproof.plugins.module_utils.job import spec

ROLES = ("training", "extraction", "monitor")
S3 = {
    "extraction_s3_uri": "s3://bucket/prefix",
    "extraction_s3_endpoint": "http://node:19000",
    "extraction_s3_access_key": "access-key",
    "extraction_s3_secret_key": "secret-key",
}


def declared(*roles, **variables):
    loader, known = DataLoader(), {"role_path": str(Path("roles/job").resolve()), "inventory_hostname": "trainer"}
    for role in ROLES:
        known.update(loader.load_from_file(f"roles/{role}/defaults/main.yml", trusted_as_template=True))
    template = "{{ [" + ", ".join(f"{role}_job" for role in roles) + "] }}"
    return Templar(loader, variables={**known, **variables}).template(trust_as_template(template))


def read(*roles, **variables):
    jobs, errors = spec.validate(declared(*roles, **variables))
    assert errors == []
    return jobs


def test_defaults_make_jobs_without_errors():
    jobs = read(*ROLES)
    assert [unit.name for job in jobs for unit in job.units] == [
        "training.service",
        "extraction@1.service",
        "extraction@2.service",
        "monitor.service",
    ]
    assert len({job.code for job in jobs}) == 1 and jobs[0].code.src == str(Path("workload").resolve())
    assert len({job.lock for job in jobs}) == 1 and all(job.notify for job in jobs)
    assert all(unit.gpus is None and not unit.secrets for job in jobs for unit in job.units)


def test_a_command_replaces_the_whole_argv():
    (job,) = read("training", training_command=["/bin/false"])
    assert job.command == ("/bin/false",)


def test_arguments_are_added_to_the_reference_program():
    (job,) = read("training", training_arguments=["--attn", "sdpa"], training_max_steps=7)
    assert job.command[1] == "/opt/launchproof/workload/train_dflash_pipeline.py"
    assert job.command[job.command.index("--max-steps") + 1] == "7" and job.command[-2:] == ("--attn", "sdpa")


def test_a_program_that_does_not_speak_sd_notify():
    for role in ROLES:
        (job,) = read(role, **{f"{role}_notify": False, f"{role}_code_src": "", f"{role}_command": ["/bin/true"]})
        assert (job.notify, job.watchdog, job.code, job.working_directory) == (False, None, None, None)


def test_several_hosts_train_under_torchrun_as_one_gang():
    hosts = {
        "training_hosts": ["other", "trainer"],
        "training_processes": "2",
        "hostvars": {"other": {"ansible_host": "203.0.113.7"}},
    }
    (job,) = read("training", **hosts)
    assert job.gang == "training" and job.unit_options["Service"]["NotifyAccess"] == ("all",)
    assert job.command[1] == "/opt/launchproof/workload/torchrun.py"
    words = dict(zip(job.command[2::2], job.command[3::2], strict=False))
    assert (words["--nnodes"], words["--node-rank"], words["--nproc-per-node"]) == ("2", "1", "2")
    assert words["--rdzv-endpoint"] == "203.0.113.7:29400"
    progress = job.units[0].proof["progress"]
    assert progress["ranks"] == 2
    found = re.search(progress["pattern"], "ts=x ev=step step=41 loss=7.1 q_buckets=1/2 rank=3")
    assert found.groupdict() == {"step": "41", "rank": "3"}


def test_one_host_alone_has_no_torchrun_and_no_gang():
    (job,) = read("training")
    assert (
        job.gang is None
        and "torchrun" not in " ".join(job.command)
        and "NotifyAccess" not in job.unit_options["Service"]
    )


def test_each_process_takes_its_part_of_the_gpus():
    (job,) = read("training", training_processes=2, training_gpus=["0", "1", "2", "3"])
    assert job.gang is None
    assert (
        job.command[job.command.index("--target-gpus") + 1],
        job.command[job.command.index("--drafter-gpus") + 1],
    ) == ("0", "1")


@pytest.mark.parametrize("shards", [1, 3, "3"])
def test_each_shard_knows_its_place(shards):
    (job,) = read("extraction", extraction_shards=shards)
    number = int(shards)
    for index, unit in enumerate(job.units, 1):
        assert unit.extra == ("--shard", str(index), "--num-shards", str(number))
        assert unit.proof["heartbeat"]["path"] == f"/var/lib/launchproof/runs/{unit.name}/current/heartbeat.json"
        folder = f"/var/lib/dflash/extraction/reference/shard-{index:02}-of-{number:02}/"
        assert unit.proof["objects"]["path"] == folder
        assert unit.proof["done"] and unit.proof["progress"]


def test_s3_is_for_extraction_and_monitor():
    extraction, monitor = read("extraction", "monitor", **S3)
    secrets = {"AWS_ACCESS_KEY_ID": "access-key", "AWS_SECRET_ACCESS_KEY": "secret-key"}
    for job in (extraction, monitor):
        assert job.command[job.command.index("--s3-uri") + 1] == "s3://bucket/prefix"
        assert all(unit.secrets == secrets for unit in job.units)
    (first, _second) = extraction.units
    assert first.env["AWS_ENDPOINT_URL"] == "http://node:19000"
    assert first.proof["objects"]["uri"] == "s3://bucket/prefix/reference/shard-01-of-02/"


def test_s3_without_keys_is_an_error():
    _jobs, errors = spec.validate(declared("extraction", **{**S3, "extraction_s3_secret_key": ""}))
    assert len(errors) == 1 and "(extraction).secrets.AWS_SECRET_ACCESS_KEY: the secret is empty" in errors[0]


def test_each_shard_has_a_gpu():
    (job,) = read("extraction", extraction_gpus=["GPU-a", "GPU-b"])
    assert [unit.gpus for unit in job.units] == [("GPU-a",), ("GPU-b",)]
    assert all(unit.extra[-2:] == ("--gpu", "0") for unit in job.units)
    _jobs, errors = spec.validate(declared("extraction", extraction_gpus=["GPU-a", "GPU-b"], extraction_shards=3))
    assert len(errors) == 1 and "extraction@3.service: GPU-a is already taken by extraction@1.service" in errors[0]


def test_shards_of_one_declaration_are_spread_over_hosts():
    fleet = {"extraction_hosts": {"trainer": ["GPU-a"], "other": ["GPU-b"], "third": ["GPU-c"]}, "extraction_shards": 3}
    (job,) = read("extraction", **fleet)
    assert [(unit.name, unit.gpus) for unit in job.units] == [("extraction@1.service", ("GPU-a",))]
    assert job.units[0].argv[-6:-2] == ("--shard", "1", "--num-shards", "3")
    (job,) = read("extraction", **fleet, extraction_lost_hosts=["other"])
    assert [unit.name for unit in job.units] == ["extraction@1.service", "extraction@3.service"]
    assert job.dropped_instances == "remove"
    (job,) = read("extraction", **fleet, inventory_hostname="other", extraction_lost_hosts=["other"])
    assert job.units == ()


@pytest.mark.parametrize(
    ("gpus", "target", "drafter"),
    [
        (["GPU-a"], "0", "0"),
        (["0", "1"], "0", "1"),
        (["4", "5", "6"], "0", "1,2"),
        (["0", "1", "2", "3"], "0,1", "2,3"),
    ],
)
def test_training_uses_all_its_gpus(gpus, target, drafter):
    (job,) = read("training", training_gpus=gpus)
    assert job.command[-4:] == ("--target-gpus", target, "--drafter-gpus", drafter)
    assert [unit.gpus for unit in job.units] == [tuple(gpus)]


def test_arguments_of_ones_own_come_after_the_derived_ones():
    (job,) = read(
        "training", training_gpus=["0", "1"], training_arguments=["--target-gpus", "1", "--drafter-gpus", "0"]
    )
    assert job.command[-8:-4] == ("--target-gpus", "0", "--drafter-gpus", "1")
    assert job.command[-4:] == ("--target-gpus", "1", "--drafter-gpus", "0")


@pytest.mark.parametrize("role", ["training", "extraction"])
def test_declared_gpus_have_to_be_used(role):
    gpus = {f"{role}_gpus": ["0", "1"]}
    (job,) = read(role, **gpus)
    assert [unit.proof["gpu"] for unit in job.units] == [{"level": "consistent"}] * len(job.units)
    (job,) = read(role, **gpus, **{f"{role}_proof": {"gpu": {"level": "proved"}}})
    assert all(unit.proof["gpu"] == {"level": "proved"} for unit in job.units)
    (job,) = read(role)
    assert all("gpu" not in unit.proof for unit in job.units)
    assert not any(argument.endswith("-gpus") for argument in job.command)


def test_training_reads_what_extraction_commits():
    (job,) = read("training", **S3, training_source="s3")
    command = list(job.command)
    at = command.index("--source")
    assert command[at : at + 8] == [
        "--source", "s3", "--s3-uri", "s3://bucket/prefix", "--run-id", "reference", "--s3-endpoint", "http://node:19000",
    ]  # fmt: skip
    assert set(job.units[0].secrets) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert "secret-key" not in command
    (job,) = read("training", **S3, training_source="s3", training_gpus=["0", "1"])
    command = list(job.command)
    assert "--target-gpus" not in command and command[command.index("--drafter-gpus") + 1] == "0,1"


def test_training_online_has_no_business_with_s3():
    (job,) = read("training", **S3)
    assert "--s3-uri" not in job.command and not job.units[0].secrets
