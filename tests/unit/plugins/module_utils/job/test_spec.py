# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Declared jobs: what is read, and that each wrong value is named with its variable, value and fix."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.job import spec

TRUE = {"name": "a", "command": ["/bin/true"]}


def job(**options):
    return {**TRUE, **options}


def read(*jobs, **arguments):
    found, errors = spec.validate(list(jobs), **arguments)
    assert errors == []
    return found


def errors_of(*jobs, **arguments):
    return spec.validate(list(jobs), **arguments)[1]


def test_defaults():
    (found,) = read(TRUE)
    assert (found.user, found.restart, found.timeout_stop, found.autostart) == ("dflash", "on-failure", 120, True)
    (unit,) = found.units
    assert (unit.name, unit.argv, unit.gpus, dict(unit.env)) == ("a.service", ("/bin/true",), None, {})


def test_values_become_strings():
    (found,) = read(job(command=["/bin/echo", 1, True, 2.5], env={"N": 1, "B": False, "E": ""}))
    assert found.command == ("/bin/echo", "1", "true", "2.5")
    assert found.units[0].env == {"N": "1", "B": "false", "E": ""}


def test_instances_inherit_and_override():
    (found,) = read(
        job(
            env={"A": "1", "B": "1"},
            secrets={"S": "job-secret"},
            proof={"done": {"pattern": "done"}, "deadlines": {"start": 5}},
            instances=[
                {"id": 1, "command": ["--shard", 1], "env": {"B": "2"}},
                {"id": "x", "secrets": {"S": "own-secret"}, "proof": {"deadlines": {"start": 7}}},
            ],
        )
    )
    first, second = found.units
    assert (first.name, second.name) == ("a@1.service", "a@x.service")
    assert first.argv == ("/bin/true", "--shard", "1") and second.argv == ("/bin/true",)
    assert first.env == {"A": "1", "B": "2"} and second.env == {"A": "1", "B": "1"}
    assert first.secrets == {"S": "job-secret"} and second.secrets == {"S": "own-secret"}
    assert second.proof == {"done": {"pattern": "done"}, "deadlines": {"start": 7}}


def test_working_directory_is_the_code_unless_declared():
    code = {"src": "/x", "dest": "/opt/a/"}
    assert [found.working_directory for found in read(job(code=code))] == ["/opt/a"]
    assert [found.working_directory for found in read(job(code=code, working_directory="/srv//x/"))] == ["/srv/x"]


def test_bare_no_of_yaml_is_a_restart_policy():
    assert read(job(restart=False))[0].restart == "no"


def test_gpus_are_dealt_in_order():
    instances = [{"id": 1}, {"id": 2}]
    assert [unit.gpus for unit in read(job(gpus=[0, 1, 2, 3], instances=instances))[0].units] == [
        ("0", "1"),
        ("2", "3"),
    ]
    own = [{"id": 1, "gpus": ["GPU-ab"]}, {"id": 2}]
    assert [unit.gpus for unit in read(job(gpus=[1], instances=own))[0].units] == [("GPU-ab",), ("1",)]


WRONG = [
    (["x"], "launchproof_jobs[0]: 'x' is not a job"),
    ([{"command": ["/bin/true"]}], "launchproof_jobs[0].name: missing"),
    ([{"name": "a"}], "launchproof_jobs[0] (a).command: missing"),
    ([job(name="Bad Name")], "launchproof_jobs[0] (Bad Name).name: 'Bad Name' cannot name a unit"),
    ([job(name="a@b")], "cannot name a unit"),
    ([TRUE, TRUE], "launchproof_jobs: 2 jobs have the name a"),
    ([job(command="python train.py")], "launchproof_jobs[0] (a).command: 'python train.py' is not a list"),
    ([job(command=[])], "(a).command: [] is not a list"),
    ([job(command=["/bin/true", {"a": 1}])], "(a).command[1]: {'a': 1} is not an argument"),
    ([job(command=["./train.py"])], "(a).command[0]: './train.py' is neither an absolute path nor a bare program name"),
    ([job(command=["/opt/it's"])], '(a).command[0]: "/opt/it\'s" holds a quote'),
    ([job(command=["/bin/true", "a\0b"])], "(a).command[1]: it holds a NUL byte"),
    ([job(command=["/bin/true", "\ufffe"])], "(a).command[1]: it holds a code point that Unicode reserves"),
    ([job(command=["/bin/true", "\udc80"])], "(a).command[1]: it is not valid Unicode"),
    ([job(command=["/bin/true", "x" * 131072])], "(a).command[1]: it takes 131072 bytes"),
    ([job(env={"V": "x" * 131070})], "(a).env.V: it takes 131072 bytes"),
    ([job(comand=["x"])], "(a).comand: unknown option. Did you mean command?"),
    ([job(description="two\nlines")], "(a).description: 'two\\nlines' does not fit one line"),
    ([job(description="end\\")], "(a).description: 'end\\\\' does not fit one line"),
    ([job(working_directory="here")], "(a).working_directory: 'here' is not an absolute path"),
    ([job(code={"src": "/x"})], "(a).code.dest: missing"),
    ([job(code={"src": "/x", "dest": "/opt"})], "(a).code.dest: /opt is a folder of the system itself"),
    ([job(code={"src": "/x", "dest": "/opt/../etc"})], "(a).code.dest: '/opt/../etc' is not an absolute path"),
    ([job(code={"src": "/x", "dest": "/opt/c", "keep": -1})], "(a).code.keep: -1 is not a number of versions"),
    ([job(code="/x")], "(a).code: '/x' is not a dictionary"),
    (
        [job(code={"src": "/x", "dest": "/opt/c"}), job(name="b", code={"src": "/y", "dest": "/opt/c"})],
        "code.dest of job b: /opt/c is also where job a puts other code (/x)",
    ),
    ([job(user="No Body")], "(a).user: 'No Body' cannot be the name of a user"),
    ([job(notify="yes")], "(a).notify: 'yes' is neither true nor false"),
    ([job(restart="always")], "(a).restart: 'always' is unknown"),
    ([job(timeout_stop=0)], "(a).timeout_stop: 0 is not a number of seconds"),
    ([job(timeout_stop=True)], "(a).timeout_stop: True is not a number of seconds"),
    ([job(memory_max="24GB")], "(a).memory_max: '24GB' is not a size"),
    ([job(watchdog=5)], "(a).watchdog: 5 without notify"),
    ([job(env={"1A": "x"})], "(a).env.1A: not the name of an environment variable"),
    ([job(env=["A=1"])], "(a).env: ['A=1'] is not a dictionary"),
    ([job(env={"A": [1]})], "(a).env.A: [1] is not a string"),
    ([job(env={"INVOCATION_ID": "x"})], "(a).env.INVOCATION_ID: systemd sets it"),
    ([job(env={"A": "x"}, secrets={"A": "sesame-open"})], "(a).env.A: declared as a secret too"),
    ([job(secrets={"A": ""})], "(a).secrets.A: the secret is empty"),
    ([job(secrets={"A": "12345"})], "(a).secrets.A: the secret has 5 characters"),
    ([job(gpus=0)], "(a).gpus: 0 is not a list"),
    ([job(gpus=["cuda:0"])], "(a).gpus: 'cuda:0' is no GPU"),
    ([job(gpus=[0, 0])], "(a).gpus: 0 is there twice"),
    ([job(gpus=[0], env={"CUDA_VISIBLE_DEVICES": "1"})], "(a).env.CUDA_VISIBLE_DEVICES: gpus already sets it to 0"),
    ([job(gpus=[0], instances=[{"id": 1}, {"id": 2}])], "(a).gpus: 2 instances do not fit 1 GPUs (0)"),
    ([job(gpus=[0, 1, 2], instances=[{"id": 1}, {"id": 2}])], "(a).gpus: 2 instances do not fit 3 GPUs (0, 1, 2)"),
    ([job(gpus=[0]), job(name="b", gpus=[0])], "gpus of b.service: 0 is already taken by a.service"),
    ([job(instances=[{"id": 1, "gpus": [0]}, {"id": 2, "gpus": [0]}])], "0 is already taken by a@1.service"),
    ([job(instances=2)], "(a).instances: 2 is not a list"),
    ([job(gang="Ranks!")], "(a).gang: 'Ranks!' cannot name a gang."),
    ([job(dropped_instances="stop")], "(a).dropped_instances: 'stop' is unknown. Write keep or remove."),
    ([job(instances=[{"id": "a/b"}])], "(a).instances[0].id: 'a/b' cannot name an instance"),
    ([job(instances=[{"id": 1}, {"id": "1"}])], "(a).instances[1].id: '1' is there twice"),
    ([job(unit_options={"Install": {}})], "(a).unit_options.Install: unknown option. Known are Service, Unit."),
    ([job(unit_options={"Service": {"ExecStart": "x"}})], "ExecStart: the proof rests on it. Use the job's command"),
    (
        [job(unit_options={"Service": {"Environment": "A=1"}})],
        "Environment: the proof rests on it. Use the job's env or",
    ),
    ([job(unit_options={"Service": {"Nice": "1\nExecStart=x"}})], "Nice: '1\\nExecStart=x' does not fit one line"),
    ([job(unit_options={"Service": {"Ni ce": 1}})], "Ni ce: not the name of a unit option"),
    ([job(proof={"log": {"required": ["("]}})], "launchproof_jobs[0] (a).proof.log.required[0] is '('"),
    ([job(proof={"nope": 1})], "launchproof_jobs[0] (a).proof.nope"),
]


@pytest.mark.parametrize(("jobs", "expected"), WRONG, ids=[text[:60] for _jobs, text in WRONG])
def test_each_wrong_value_is_named(jobs, expected):
    errors = errors_of(*jobs)
    assert len(errors) == 1
    assert expected in errors[0]
    assert errors[0].endswith((".", "?")) or "proof." in errors[0], "an error ends with what to do"


def test_all_errors_come_at_once():
    errors = errors_of(
        job(timeout_stop=0, memory_max="x", proof={"log": {"required": ["("]}, "progress": {"pattern": "x"}}),
        job(name="B"),
    )
    for part in ("timeout_stop", "memory_max", "log.required[0]", "progress.pattern", "(B).name"):
        assert sum(part in error for error in errors) == 1


def test_not_a_list():
    assert "launchproof_jobs: 'x' is not a list" in spec.validate("x")[1][0]


def test_gpus_of_the_host():
    assert read(job(gpus=[0, 1]), gpus=[0, 1])
    errors = errors_of(job(gpus=[0, 7]), gpus=[0, 1])
    assert errors == [
        "gpus of a.service: 7 is not in launchproof_gpus (0, 1). Declare fewer instances, or GPUs that this host has."
    ]


def test_an_index_is_the_uuid_at_that_place_where_the_hosts_are_known_by_uuid():
    jobs = read(job(gpus=[1, "GPU-a"]), job(name="b"), gpus=["GPU-a", "GPU-b"])
    assert [unit.gpus for one in jobs for unit in one.units] == [("GPU-b", "GPU-a"), None]
    assert "7 is not in launchproof_gpus (GPU-a)" in errors_of(job(gpus=[7]), gpus=["GPU-a"])[0]
    assert (
        "GPU-a is already taken by a.service"
        in errors_of(job(gpus=[0]), job(name="b", gpus=["GPU-a"]), gpus=["GPU-a"])[0]
    )


def test_shared_gpus_must_be_shared_by_both():
    shared, alone = job(gpus=[0], gpus_exclusive=False), job(name="b", gpus=[0])
    assert errors_of(shared, alone) != []
    assert errors_of(shared, {**alone, "gpus_exclusive": False}) == []


SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"command": ["/bin/true", f"--key={SECRET}"]}, "command[1] of job a"),
        ({"instances": [{"id": 1, "command": [SECRET]}]}, "instance 1 command[0] of job a"),
        ({"env": {"KEY": SECRET}}, "env.KEY of job a"),
        ({"description": f"with {SECRET}"}, "description of job a"),
        (
            {"unit_options": {"Service": {"SetCredential": f"k:{SECRET}"}}},
            "unit_options.Service.SetCredential of job a",
        ),
    ],
)
def test_a_secret_in_a_public_place_is_refused_and_not_shown(options, where):
    errors = errors_of(job(secrets={"TOKEN": SECRET}, **options))
    assert len(errors) == 1 and where in errors[0] and "a.secrets.TOKEN" in errors[0]
    assert SECRET not in errors[0]


def test_a_secret_of_one_job_in_the_argv_of_another():
    errors = errors_of(job(secrets={"TOKEN": SECRET}), job(name="b", command=["/bin/true", SECRET]))
    assert len(errors) == 1 and "of job b" in errors[0]


def test_wrong_secrets_are_not_shown():
    for secrets in ([SECRET], {"A": [SECRET]}, {"A": SECRET + "\0"}, {"A-B": SECRET}):
        errors = errors_of(job(secrets=secrets))
        assert len(errors) == 1 and SECRET not in errors[0]


def test_a_unit_does_not_show_its_secrets_when_printed():
    assert SECRET not in repr(read(job(secrets={"TOKEN": SECRET})))


def test_paths_of_the_controller(tmp_path):
    lock = tmp_path / "lock"
    good = job(code={"src": str(tmp_path), "dest": "/opt/a"}, lock=str(lock))
    lock.write_text("")
    assert errors_of(good, controller=True) == []
    lock.unlink()
    assert errors_of(good) == []
    assert f"(a).lock: '{lock}' is no file on the controller" in errors_of(good, controller=True)[0]
    missing = job(code={"src": str(tmp_path / "x"), "dest": "/opt/a"})
    assert "(a).code.src: " in errors_of(missing, controller=True)[0]


def test_a_program_that_comes_with_the_code(tmp_path):
    script = tmp_path / "run.sh"
    declared = job(command=["/opt/a/run.sh"], code={"src": str(tmp_path), "dest": "/opt/a"})
    for prepare in (lambda: None, script.touch):
        prepare()
        (error,) = errors_of(declared, controller=True)
        assert f"(a).command[0]: /opt/a/run.sh is delivered from {script}, which is no executable file." in error
    script.chmod(0o755)
    assert errors_of(declared, controller=True) == []


class Lazy(Mapping):
    """As ansible-core 2.19 hands data to a filter: templated on access."""

    def __init__(self, data):
        self.data = data

    def __getitem__(self, key):
        if self.data[key] is ...:
            raise RuntimeError("'vault_token' is undefined")
        return self.data[key]

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


def test_undefined_variables_are_reported_with_all_other_errors():
    errors = errors_of(Lazy(job(secrets=Lazy({"A": ..., "B": ...}), timeout_stop=0)))
    assert len(errors) == 3
    assert errors[0].startswith("launchproof_jobs[0].secrets.A: no value ('vault_token' is undefined).")


def test_declared_units_never_raises():
    jobs = [TRUE, Lazy({"name": ...}), job(name="b", instances=[{"id": 1}, {"id": "x"}]), None, {"command": 3}]
    assert list(spec.declared_units(jobs)) == ["a.service", "b@1.service", "b@x.service"]
    assert spec.declared_units(None) == {}
    assert spec.declared_units([job(gang="ranks"), job(name="b")]) == {"a.service": "ranks", "b.service": None}
