# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files and digest of jobs. The two readers below follow systemd's source; tests/integration asks systemd itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.job import spec, units
from hypothesis import given
from hypothesis import strategies as st

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def read(**options):
    jobs, errors = spec.validate([{"name": "a", "command": ["/bin/true"], **options}])
    assert errors == []
    return jobs[0]


def systemd_words(value):
    """ExecStart=:… as config_parse_exec() reads it: extract_first_word(UNQUOTE|CUNESCAPE), then specifiers."""
    assert value.startswith(":") and "\n" not in value
    words, rest = [], value[1:]
    escapes = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}
    while rest:
        assert rest[0] == '"'
        word, index = "", 1
        while rest[index] != '"':
            if rest[index] == "\\":
                kind = rest[index + 1]
                if kind == "x":
                    word += chr(int(rest[index + 2 : index + 4], 16))
                    index += 4
                else:
                    word += escapes[kind]
                    index += 2
            else:
                word += rest[index]
                index += 1
        assert "%" not in word.replace("%%", ""), "a lone % would be a specifier"
        words.append(word.replace("%%", "%"))
        rest = rest[index + 1 :]
        assert rest[:1] in ("", " ")
        rest = rest[1:]
    return words


def systemd_environment(text):
    """An EnvironmentFile= as parse_env_file_internal() reads it, double quotes alone."""
    found, index = {}, 0
    while index < len(text):
        name, _, _rest = text[index:].partition('="')
        index += len(name) + 2
        value = ""
        while text[index] != '"':
            if text[index] == "\\":
                index += 1
                value += text[index] if text[index] in '"\\`$' else "\\" + text[index]
            else:
                value += text[index]
            index += 1
        assert text[index : index + 2] == '"\n'
        index += 2
        found[name] = value
    return found


@given(st.lists(TEXT, min_size=1))
def test_argv_survives_systemds_reader(argv):
    assert systemd_words(units.exec_line(argv)) == argv


@given(st.dictionaries(st.from_regex(spec.ENV_NAME, fullmatch=True), TEXT))
def test_environment_survives_systemds_reader(variables):
    assert systemd_environment(units.env_text(variables)) == variables


def test_an_argument_cannot_end_its_line():
    assert units.exec_line(["/bin/true", "a\nUser=root", "b\\", ";"]) == ':"/bin/true" "a\\nUser=root" "b\\\\" ";"'


def lines(job, section="Service"):
    text = units.unit_files(job)[0].text
    return text.split(f"[{section}]\n")[1].split("\n[")[0].splitlines()


def test_unit_of_a_plain_job():
    service = lines(read())
    for line in (
        "Type=simple",
        "User=dflash",
        "ExecStartPre=+/usr/local/bin/launchproof begin-run %n",
        'ExecStart=:"/bin/true"',
        "ExecStopPost=+/usr/local/bin/launchproof end-run %n",
        "EnvironmentFile=/etc/launchproof/env/%n.env",
        "StandardOutput=append:/var/lib/launchproof/runs/%n/current/log",
        "StandardError=inherit",
        "Restart=on-failure",
        "RestartSec=1",
        "RestartPreventExitStatus=64 65 78",
        "KillMode=mixed",
        "TimeoutStopSec=120",
        "NoNewPrivileges=yes",
    ):
        assert service.count(line) == 1
    assert not [
        line for line in service if line.startswith(("MemoryMax", "WatchdogSec", "WorkingDirectory", "TimeoutStart"))
    ]
    unit = lines(read(), "Unit")
    assert "StartLimitBurst=5" in unit and "StartLimitIntervalSec=600" in unit
    assert "After=network-online.target multi-user.target" in unit


def test_unit_options_of_a_job():
    service = lines(
        read(
            notify=True,
            watchdog=60,
            memory_max="24G",
            timeout_stop=7,
            restart="no",
            secrets={"K": "s3cr3t-value"},
            working_directory="/srv/100%",
        )
    )
    for line in (
        "Type=notify",
        "NotifyAccess=main",
        "TimeoutStartSec=infinity",
        "WatchdogSec=60",
        "MemoryMax=24G",
        "TimeoutStopSec=7",
        "Restart=no",
        "EnvironmentFile=/etc/launchproof/secrets/%n.env",
        "WorkingDirectory=/srv/100%%",
    ):
        assert line in service


def test_own_options_replace_scalars_and_add_to_commands():
    service = lines(
        read(unit_options={"Service": {"RestartSec": 9, "ExecStartPre": "/bin/a", "BindPaths": ["/a", "/b"]}})
    )
    assert [line for line in service if line.startswith("RestartSec")] == ["RestartSec=9"]
    assert [line for line in service if line.startswith("ExecStartPre")] == [
        "ExecStartPre=+/usr/local/bin/launchproof begin-run %n",
        "ExecStartPre=/bin/a",
    ]
    assert "BindPaths=/a" in service and "BindPaths=/b" in service


def test_files_of_instances():
    job = read(instances=[{"id": 1, "command": ["--shard", "1"]}, {"id": 2}])
    files = {file.path: file.text for file in units.unit_files(job)}
    assert sorted(files) == [
        "/etc/systemd/system/a.target",
        "/etc/systemd/system/a@.service",
        "/etc/systemd/system/a@1.service.d/launchproof.conf",
    ]
    assert "Wants=a@1.service\nWants=a@2.service\n" in files["/etc/systemd/system/a.target"]
    assert "PartOf=a.target\n" in files["/etc/systemd/system/a@.service"]
    dropin = files["/etc/systemd/system/a@1.service.d/launchproof.conf"]
    assert 'ExecStart=\nExecStart=:"/bin/true" "--shard" "1"\n' in dropin
    assert all(text.startswith(units.MARK) for text in files.values())


def test_a_boot_starts_the_target_of_instances():
    assert units.wants_link(read()) == "/etc/systemd/system/multi-user.target.wants/a.service"
    assert units.wants_link(read(instances=[{"id": 1}])) == "/etc/systemd/system/multi-user.target.wants/a.target"


def test_environment_of_a_unit():
    (unit,) = read(env={"PYTHONUNBUFFERED": "0"}).units
    assert units.environment(unit) == {"LAUNCHPROOF_UNIT": "a.service", "PYTHONUNBUFFERED": "0"}
    (unit,) = read(gpus=["GPU-a", "GPU-b"]).units
    assert units.environment(unit)["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


def test_no_file_but_one_holds_a_secret():
    job = read(secrets={"K": "s3cr3t-value"}, instances=[{"id": 1}, {"id": 2}])
    files = units.unit_files(job)
    for unit in job.units:
        files += units.job_files(job, unit, units.record(job, unit, units.digest(job, unit, b"key")))
    holding = [file for file in files if "s3cr3t-value" in file.text]
    assert [(file.path, file.mode, file.secret) for file in holding] == [
        (f"/etc/launchproof/secrets/a@{number}.service.env", 0o600, True) for number in (1, 2)
    ]


def test_siblings_of_a_unit_with_secrets_have_an_empty_file():
    job = read(instances=[{"id": 1}, {"id": 2, "secrets": {"K": "s3cr3t-value"}}])
    (empty,) = [file for file in units.job_files(job, job.units[0], {}) if file.secret]
    assert (empty.path, empty.text) == ("/etc/launchproof/secrets/a@1.service.env", "")


def test_record():
    job = read(gpus=[0], secrets={"K": "s3cr3t-value"}, proof={"done": {"pattern": "done"}})
    data = units.record(job, job.units[0], "sha256:1", "c0de", "10c4")
    assert json.loads(json.dumps(data)) == {
        "schema": 1,
        "unit": "a.service",
        "job": "a",
        "digest": "sha256:1",
        "argv": ["/bin/true"],
        "env": {"CUDA_VISIBLE_DEVICES": "0", "LAUNCHPROOF_UNIT": "a.service", "PYTHONUNBUFFERED": "1"},
        "user": "dflash",
        "runs": "/var/lib/launchproof/runs/a.service",
        "log": "/var/lib/launchproof/runs/a.service/current/log",
        "proof": {"done": {"pattern": "done"}},
        "secrets_file": "/etc/launchproof/secrets/a.service.env",
        "working_directory": "/",
        "environment_files": ["/etc/launchproof/env/a.service.env", "/etc/launchproof/secrets/a.service.env"],
        "notify": False,
        "watchdog": None,
        "restart": "on-failure",
        "timeout_stop": 120,
        "no_new_privileges": True,
        "autostart": True,
        "gpus": ["0"],
        "code_hash": "c0de",
        "versions": {"lock": "10c4"},
    }


def digest(job, key=b"key", **arguments):
    return units.digest(job, job.units[0], key, **arguments)


BASE = {"secrets": {"K": "s3cr3t-value"}, "env": {"A": "1"}}


@pytest.mark.parametrize(
    "change",
    [
        {"command": ["/bin/true", "x"]},
        {"env": {"A": "2"}},
        {"secrets": {"K": "another-value"}},
        {"secrets": {"L": "s3cr3t-value"}},
        {"user": "root"},
        {"gpus": [0]},
        {"memory_max": "1G"},
        {"unit_options": {"Service": {"Nice": 5}}},
    ],
)
def test_what_a_process_depends_on_changes_the_digest(change):
    assert digest(read(**BASE)) != digest(read(**{**BASE, **change}))


@pytest.mark.parametrize(
    "change",
    [{"proof": {"done": {"pattern": "done"}}}, {"description": "other words"}, {"autostart": False}],
)
def test_what_no_process_notices_does_not(change):
    assert digest(read(**BASE)) == digest(read(**{**BASE, **change}))


def test_code_and_lock_change_the_digest():
    job = read(**BASE)
    assert len({digest(job), digest(job, code="1"), digest(job, code="2"), digest(job, lock="1")}) == 4


def test_other_instances_do_not_change_the_digest():
    def of(ids):
        job = read(instances=[{"id": number, "command": ["--shard", number]} for number in ids])
        return {unit.name: units.digest(job, unit) for unit in job.units}

    two, four = of([1, 2]), of([1, 2, 3, 4])
    assert {name: four[name] for name in two} == two
    assert len(set(four.values())) == 4


def test_digest_depends_on_the_targets_key_when_there_are_secrets():
    job = read(**BASE)
    assert digest(job, b"one") != digest(job, b"two")
    assert digest(job, None) is None
    assert digest(read(), None) == digest(read(), b"one") is not None


def test_moving_a_value_between_env_and_secrets_changes_the_digest():
    job = read(env={"A": "value-of-a"})
    unit = replace(job.units[0], env={}, secrets={"A": "value-of-a"})
    assert digest(job) != units.digest(replace(job, units=(unit,)), unit, b"key")
