# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Planning and applying in a folder that stands for the machine's root; systemd itself is asked in tests/integration."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.job import code as code_tree
from ansible_collections.dflash.launchproof.plugins.module_utils.job import install, spec

PROGRAM = b"#!/usr/bin/python3\n"
SECRET = "s3cr3t-value"


class Machine(install.Host):
    """A machine in a folder, with systemd's answers given."""

    def __init__(self, root):
        super().__init__(str(root))
        self.users = {"dflash"}
        self.root_user = True
        self.verify_output = ""
        self.show_output = ""
        self.commands, self.given = [], {}
        for folder in ("/run/systemd/system", "/usr/bin", "/bin"):
            os.makedirs(self.at(folder))
        self.write("/bin/true", b"", 0o755)

    def is_root(self):
        return self.root_user

    def user_exists(self, name):
        return name in self.users

    def give(self, path, user):
        self.given[path] = user

    def run(self, argv):
        self.commands.append(argv)
        return 0, self.verify_output if argv[0] == "systemd-analyze" else self.show_output

    def tree(self):
        """Everything below the root: path → (kind, mode, content)."""
        found = {}
        for folder, folders, files in os.walk(self.root):
            for name in folders + files:
                path = os.path.join(folder, name)
                info = os.lstat(path)
                if stat.S_ISLNK(info.st_mode):
                    content = os.readlink(path)
                elif stat.S_ISREG(info.st_mode):
                    content = Path(path).read_bytes()
                else:
                    content = ""
                found[path[len(self.root) :]] = (stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode), content)
        return found


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "root")


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "src"
    root.mkdir()
    (root / "main.py").write_text("print(1)\n")
    return root


def read(*jobs):
    found, errors = spec.validate([{"name": "a", "command": ["/bin/true"], **job} for job in jobs or [{}]])
    assert errors == []
    return found


def plan(machine, jobs, delivered=None, **arguments):
    return install.make_plan(jobs, delivered or {}, PROGRAM, machine, **arguments)


def deploy(machine, jobs, delivered=None):
    found = plan(machine, jobs, delivered)
    install.apply(found, machine, found.units_changed)
    return found


def deliver(source, tmp_path, exclude=()):
    entries = code_tree.scan(str(source), exclude)
    archive = tmp_path / "archive"
    with open(archive, "wb") as stream:
        code_tree.write_archive(str(source), entries, stream)
    return install.Delivered(code=code_tree.tree_hash(str(source), entries), archive=str(archive))


def labels(found):
    return [label for label, _step in found.steps + found.records]


def problems(machine, jobs, delivered=None):
    before = machine.tree()
    with pytest.raises(install.InstallError) as raised:
        plan(machine, jobs, delivered)
    assert machine.tree() == before
    return raised.value.problems


def test_planning_writes_nothing_and_applying_leaves_nothing_to_do(machine):
    before = machine.tree()
    jobs = read({"secrets": {"K": SECRET}}, {"name": "b", "instances": [{"id": 1, "command": ["x"]}, {"id": 2}]})
    first = plan(machine, jobs)
    assert machine.tree() == before and first.units_changed
    install.apply(first, machine, reload=True)
    second = plan(machine, jobs)
    assert (labels(second), second.diff, second.units_changed) == ([], [], False)
    assert [row["digest_before"] for row in second.rows] == [row["digest"] for row in second.rows]


def test_what_is_on_the_machine_afterwards(machine):
    deploy(machine, read({"secrets": {"K": SECRET}}))
    tree = machine.tree()
    assert tree["/etc/systemd/system/multi-user.target.wants/a.service"][2] == "/etc/systemd/system/a.service"
    assert tree["/usr/local/bin/launchproof"][2] == "/usr/local/lib/launchproof/launchproof"
    assert tree["/usr/local/lib/launchproof/launchproof"][1:] == (0o755, PROGRAM)
    assert tree["/var/lib/launchproof/runs/a.service/current"][2] == "none"
    assert tree["/var/lib/launchproof/runs/a.service/none"][1] == 0o755
    assert tree["/etc/launchproof/secrets"][1] == 0o700
    assert tree["/etc/launchproof/secrets/a.service.env"][1] == 0o600
    assert tree["/etc/launchproof/secrets/.digest-key"][1] == 0o600
    assert tree["/etc/launchproof/env/a.service.env"][1] == 0o644
    assert json.loads(tree["/etc/launchproof/jobs/a.service.json"][2])["digest"].startswith("sha256:")


def test_no_temporary_file_is_left_when_writing_fails(machine, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        machine.write("/etc/x", b"1", 0o644)
    assert os.listdir(machine.at("/etc")) == []


def test_the_key_and_so_the_digest_stay(machine):
    jobs = read({"secrets": {"K": SECRET}})
    first = deploy(machine, jobs).rows
    assert plan(machine, jobs).rows[0]["digest"] == first[0]["digest"] is not None


def test_check_mode_predicts_on_a_machine_that_has_nothing(machine):
    machine.users = set()
    jobs = read({"command": ["/opt/venv/bin/python"], "secrets": {"K": SECRET}, "working_directory": "/srv/a"})
    found = plan(machine, jobs, check_mode=True)
    assert found.rows == [{"unit": "a.service", "job": "a", "digest": None, "digest_before": None}]
    assert len(found.warnings) == 3 and labels(found)
    assert all(text.startswith("Only known once the steps before have been carried out: ") for text in found.warnings)


def test_what_is_missing_on_the_machine_is_named_before_any_write(machine):
    machine.users = set()
    found = problems(machine, read({"command": ["/opt/venv/bin/python"], "working_directory": "/srv/a"}))
    assert [text.split(":")[0] for text in found] == [
        "user of job a",
        "command[0] of job a",
        "working_directory of job a",
    ]
    machine.users = {"dflash"}
    machine.write("/opt/venv/bin/python", b"", 0o644)
    assert "is not an executable file here" in problems(machine, read({"command": ["/opt/venv/bin/python"]}))[0]


def test_another_user_than_root(machine):
    machine.root_user = False
    assert problems(machine, read()) == ["This user is not root. Connect as root, or set become: true."]


def test_a_machine_without_systemd(machine):
    os.rmdir(machine.at("/run/systemd/system"))
    assert problems(machine, read()) == [
        "/opt/launchproof/supervisor/bin/supervisord is missing, which keeps jobs where no systemd runs. Role job makes it."
    ]
    machine.write("/opt/launchproof/supervisor/bin/supervisord", b"", 0o755)
    jobs = read({"memory_max": "1G", "unit_options": {"Service": {"Nice": 5}}, "instances": [{"id": "1"}, {"id": "2"}]})
    found = plan(machine, jobs)
    assert found.warnings == ["job a: memory_max and unit_options need systemd, and have no effect on this machine."]
    install.apply(found, machine, reload=False)
    tree = machine.tree()
    assert not [path for path in tree if path.startswith("/etc/systemd")]
    program = tree["/etc/launchproof/supervisor.d/a@2.service.conf"][2].decode()
    assert "[program:a@2.service]\ncommand=/usr/local/bin/launchproof run-job a@2.service\n" in program
    record = json.loads(tree["/etc/launchproof/jobs/a@2.service.json"][2])
    assert (record["restart"], record["working_directory"], record["autostart"]) == ("on-failure", "/", True)
    assert not plan(machine, jobs).changes


def test_what_a_job_writes_into_is_there_without_systemd_too(machine):
    os.rmdir(machine.at("/run/systemd/system"))
    os.makedirs(machine.at("/var/lib"))
    machine.write("/opt/launchproof/supervisor/bin/supervisord", b"", 0o755)
    jobs = read(
        {
            "user": "dflash",
            "unit_options": {"Service": {"StateDirectory": "dflash/a b"}},
            "instances": [{"id": "1"}, {"id": "2"}],
        }
    )
    found = plan(machine, jobs)
    assert found.warnings == []
    install.apply(found, machine, reload=False)
    assert machine.given == {"/var/lib/dflash": "root", "/var/lib/dflash/a": "dflash", "/var/lib/b": "dflash"}
    assert machine.tree()["/var/lib/dflash/a"][1] == 0o755
    assert not plan(machine, jobs).changes
    machine.write("/var/lib/c", b"", 0o644)
    (problem,) = problems(machine, read({"unit_options": {"Service": {"StateDirectory": "c"}}}))
    assert "/var/lib/c cannot be a folder" in problem
    (problem,) = problems(machine, read({"unit_options": {"Service": {"StateDirectory": "../c"}}}))
    assert "/var/lib/../c cannot be a folder" in problem


def test_a_manager_that_the_machine_does_not_have(machine):
    with pytest.raises(install.InstallError, match=r"manager is supervisor, and systemd runs this machine\."):
        install.make_plan(read(), {}, PROGRAM, machine, wanted="supervisor")
    os.rmdir(machine.at("/run/systemd/system"))
    with pytest.raises(install.InstallError, match=r"manager is systemd, which does not run this machine"):
        install.make_plan(read(), {}, PROGRAM, machine, wanted="systemd")


@pytest.mark.parametrize(
    ("path", "text"),
    [("supervisor.conf", "was not written by us"), ("supervisor.d/a.service.conf", "was not written by us")],
)
def test_supervisors_files_of_others_are_not_replaced(machine, path, text):
    os.rmdir(machine.at("/run/systemd/system"))
    machine.write("/opt/launchproof/supervisor/bin/supervisord", b"", 0o755)
    machine.write("/etc/launchproof/" + path, b"[supervisord]\n", 0o644)
    (problem,) = problems(machine, read())
    assert f"/etc/launchproof/{path} is there and {text}" in problem


def test_programs_within_the_code_are_not_looked_for_on_the_machine(machine, source, tmp_path):
    jobs = read({"command": ["/opt/c/run.sh"], "code": {"src": str(source), "dest": "/opt/c"}})
    assert plan(machine, jobs, {"a": deliver(source, tmp_path)}).steps


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/etc/systemd/system/a.service", "/etc/systemd/system/a.service is there and was not written by us"),
        ("/usr/lib/systemd/system/a.service", "it would hide /usr/lib/systemd/system/a.service of the system"),
        ("/usr/local/bin/launchproof", "/usr/local/bin/launchproof is there and is not a link to"),
        ("/etc/systemd/system/multi-user.target.wants/a.service", "is there and is not a link. Move it away."),
        ("/opt/c/main.py", "code.dest /opt/c exists and is not a link of ours"),
    ],
)
def test_nothing_of_others_is_replaced(machine, source, path, expected):
    machine.write(path, b"[Unit]\n", 0o644)
    delivered = {"a": install.Delivered(code="1", archive="/nonexistent")}
    (problem,) = problems(machine, read({"code": {"src": str(source), "dest": "/opt/c"}}), delivered)
    assert expected in problem


def test_a_link_of_others_at_dest_is_not_replaced(machine, source):
    machine.symlink("/srv/elsewhere", "/opt/c")
    delivered = {"a": install.Delivered(code="1", archive="/nonexistent")}
    (problem,) = problems(machine, read({"code": {"src": str(source), "dest": "/opt/c"}}), delivered)
    assert "code.dest /opt/c exists and is not a link of ours" in problem


def test_a_masked_unit_is_not_replaced(machine):
    machine.symlink("/dev/null", "/etc/systemd/system/a.service")
    (problem,) = problems(machine, read())
    assert "was not written by us" in problem


def test_code_is_asked_for_once_and_then_not_again(machine, source, tmp_path):
    jobs = read(*({"name": name, "code": {"src": str(source), "dest": "/opt/c"}} for name in "ab"))
    given = deliver(source, tmp_path)
    unsent = {name: install.Delivered(code=given.code) for name in "ab"}
    assert plan(machine, jobs, unsent).needs_code == ["/opt/c"]
    found = deploy(machine, jobs, dict.fromkeys("ab", given))
    assert labels(found).count("/opt/c") == 1
    assert machine.read("/opt/c/main.py") == b"print(1)\n"
    again = plan(machine, jobs, unsent)
    assert (again.needs_code, labels(again)) == ([], [])


def test_a_new_version_leaves_the_old_one_and_changes_the_digest(machine, source, tmp_path):
    jobs = read({"code": {"src": str(source), "dest": "/opt/c"}})
    first = deploy(machine, jobs, {"a": deliver(source, tmp_path)})
    old = os.path.realpath(machine.at("/opt/c"))
    (source / "main.py").write_text("print(2)\n")
    second = deploy(machine, jobs, {"a": deliver(source, tmp_path)})
    assert machine.read("/opt/c/main.py") == b"print(2)\n"
    assert Path(old, "main.py").read_text() == "print(1)\n"
    assert first.rows[0]["digest"] != second.rows[0]["digest"] and not second.units_changed


def test_going_back_to_an_old_version_sends_nothing(machine, source, tmp_path):
    jobs = read({"code": {"src": str(source), "dest": "/opt/c"}})
    old = deliver(source, tmp_path)
    deploy(machine, jobs, {"a": old})
    (source / "main.py").write_text("print(2)\n")
    deploy(machine, jobs, {"a": deliver(source, tmp_path)})
    found = plan(machine, jobs, {"a": install.Delivered(code=old.code)})
    assert found.needs_code == [] and "/opt/c" in labels(found)


def versions(machine):
    return sorted(name for name in os.listdir(machine.at("/opt/.c.versions")) if not name.endswith(".list"))


def test_the_oldest_versions_beyond_keep_are_removed_unless_a_process_uses_them(machine, source, tmp_path):
    jobs = read({"code": {"src": str(source), "dest": "/opt/c", "keep": 1}})
    names, users = [], []
    try:
        for number in range(4):
            (source / "main.py").write_text(f"print({number})\n")
            given = deliver(source, tmp_path)
            names.append(code_tree.version_name(given.code))
            deploy(machine, jobs, {"a": given})
            os.utime(machine.at(f"/opt/.c.versions/{names[-1]}.list"), (number, number))
            if number == 0:
                users.append(subprocess.Popen(["/bin/sleep", "60"], cwd=machine.at("/opt/c")))
        assert versions(machine) == sorted([names[0], names[2], names[3]])
        assert labels(plan(machine, jobs, {"a": given})) == []
    finally:
        for user in users:
            user.kill()
            user.wait()
    found = deploy(machine, jobs, {"a": given})
    assert labels(found) == [f"/opt/.c.versions/{names[0]}"]
    assert versions(machine) == sorted(names[2:])


def test_a_surplus_version_that_was_edited_stays_and_one_that_was_half_removed_goes(machine, source, tmp_path):
    jobs = read({"code": {"src": str(source), "dest": "/opt/c", "keep": 2}})
    names = []
    for number in range(3):
        (source / "main.py").write_text(f"print({number})\n")
        given = deliver(source, tmp_path)
        names.append(code_tree.version_name(given.code))
        deploy(machine, jobs, {"a": given})
    machine.write(f"/opt/.c.versions/{names[0]}/main.py", b"edited\n", 0o644)
    os.unlink(machine.at(f"/opt/.c.versions/{names[1]}/main.py"))
    deploy(machine, read({"code": {"src": str(source), "dest": "/opt/c", "keep": 0}}), {"a": given})
    assert versions(machine) == sorted([names[0], names[2]])


def test_an_open_file_of_a_version_keeps_it(machine, source):
    machine.write("/opt/.c.versions/1/main.sh", b"", 0o644)
    with open(machine.at("/opt/.c.versions/1/main.sh")):
        assert machine.used(["/opt/.c.versions/1", "/opt/.c.versions/11"]) == {"/opt/.c.versions/1"}
    assert machine.used(["/opt/.c.versions/1"]) == set()


def test_an_edit_on_the_target_is_put_right_and_kept(machine, source, tmp_path):
    jobs = read({"code": {"src": str(source), "dest": "/opt/c"}})
    given = deliver(source, tmp_path)
    deploy(machine, jobs, {"a": given})
    with open(machine.at("/opt/c/main.py"), "w") as stream:
        stream.write("edited\n")
    assert plan(machine, jobs, {"a": install.Delivered(code=given.code)}).needs_code == ["/opt/c"]
    found = deploy(machine, jobs, {"a": given})
    assert machine.read("/opt/c/main.py") == b"print(1)\n"
    (kept,) = [name for name in os.listdir(machine.at("/opt/.c.versions")) if ".edited-" in name]
    assert machine.read(f"/opt/.c.versions/{kept}/main.py") == b"edited\n"
    assert kept in found.warnings[0]


def test_files_that_a_job_adds_beside_its_code_do_not_matter(machine, source, tmp_path):
    jobs = read({"code": {"src": str(source), "dest": "/opt/c"}})
    given = deliver(source, tmp_path)
    deploy(machine, jobs, {"a": given})
    machine.write("/opt/c/train.log", b"x", 0o644)
    assert labels(plan(machine, jobs, {"a": given})) == []


def test_code_that_changed_on_the_way_is_refused(machine, source, tmp_path):
    jobs = read({"code": {"src": str(source), "dest": "/opt/c"}})
    given = deliver(source, tmp_path)
    wrong = install.Delivered(code="0" * 64, archive=given.archive)
    with pytest.raises(code_tree.CodeError, match="the code changed while it was sent"):
        deploy(machine, jobs, {"a": wrong})
    assert os.listdir(machine.at("/opt/.c.versions")) == [] and not machine.exists("/opt/c")


def test_the_diff_hides_secrets_and_says_which_changed(machine):
    deploy(machine, read({"secrets": {"K": SECRET, "L": 'line\n"two"', "M": "gone-value"}}))
    found = plan(machine, read({"secrets": {"K": "another-secret", "L": 'line\n"two"', "N": "new-value"}}))
    (diff,) = [item for item in found.diff if "secrets" in item["before_header"]]
    assert diff["before"] == "K=(hidden)\nL=(hidden)\nM=(hidden)\n"
    assert diff["after"] == "K=(hidden, changed)\nL=(hidden)\nN=(hidden)\n"
    assert not any(value in json.dumps(found.diff) for value in (SECRET, "another-secret", "gone-value", "new-value"))


def test_a_wrong_mode_of_secrets_is_put_right(machine):
    jobs = read({"secrets": {"K": SECRET}})
    deploy(machine, jobs)
    os.chmod(machine.at("/etc/launchproof/secrets/a.service.env"), 0o644)
    assert labels(deploy(machine, jobs)) == ["/etc/launchproof/secrets/a.service.env"]
    assert machine.mode("/etc/launchproof/secrets/a.service.env") == 0o600


def test_secrets_that_are_no_longer_declared_are_removed(machine):
    deploy(machine, read({"secrets": {"K": SECRET}}))
    deploy(machine, read())
    assert not machine.exists("/etc/launchproof/secrets/a.service.env")


def test_fewer_shards_leave_files_and_runs_and_say_so(machine):
    def job(number):
        return read({"instances": [{"id": shard} for shard in range(1, number + 1)]})

    deploy(machine, job(3))
    before = machine.tree()
    found = deploy(machine, job(2))
    assert found.undeclared == ["a@3.service"]
    assert "a@3.service is no longer declared by job a" in found.warnings[0]
    assert set(before) == set(machine.tree())
    assert b"a@3" not in machine.read("/etc/systemd/system/a.target")


def test_a_shard_that_moved_away_is_stopped_and_leaves_its_runs_alone(machine):
    def job(*shards):
        instances = [{"id": shard, "command": [shard], "secrets": {"K": SECRET}} for shard in shards]
        return read({"instances": instances, "dropped_instances": "remove"})

    deploy(machine, job("1", "2"))
    machine.commands.clear()
    found = deploy(machine, job("1"))
    assert ["systemctl", "stop", "--", "a@2.service"] in machine.commands
    assert {path for path in machine.tree() if "a@2" in path} == {
        "/etc/systemd/system/a@2.service.d",
        *(f"/var/lib/launchproof/runs/a@2.service{rest}" for rest in ("", "/none", "/current")),
    }
    assert (found.undeclared, found.warnings, found.units_changed) == (["a@2.service"], [], True)
    assert not plan(machine, job("1")).changes


def test_the_last_shard_may_move_away(machine):
    deploy(machine, read({"instances": [{"id": "1"}]}))
    deploy(machine, read({"instances": [], "dropped_instances": "remove"}))
    assert not machine.exists("/etc/launchproof/jobs/a@1.service.json")
    assert spec.declared_units([{"name": "a", "instances": []}]) == {}


def test_a_stop_that_fails_removes_nothing_and_is_tried_again(machine, monkeypatch):
    deploy(machine, read({"instances": [{"id": "1"}, {"id": "2"}]}))
    fewer = read({"instances": [{"id": "1"}], "dropped_instances": "remove"})
    run = machine.run
    monkeypatch.setattr(machine, "run", lambda argv: (1, "no bus") if "stop" in argv else run(argv))
    with pytest.raises(install.ApplyError, match="stop a@2.service ended with 1: no bus"):
        deploy(machine, fewer)
    assert plan(machine, fewer).undeclared == ["a@2.service"]


def test_another_jobs_units_are_reported_without_a_warning(machine):
    deploy(machine, read({"name": "b"}))
    found = plan(machine, read())
    assert (found.undeclared, found.warnings) == (["b.service"], [])


def test_an_instance_that_lost_its_arguments_keeps_no_drop_in(machine):
    deploy(machine, read({"instances": [{"id": 1, "command": ["x"]}]}))
    path = "/etc/systemd/system/a@1.service.d/launchproof.conf"
    assert machine.exists(path)
    machine.write("/etc/systemd/system/a@1.service.d/own.conf", b"[Service]\nNice=1\n", 0o644)
    assert deploy(machine, read({"instances": [{"id": 1}]})).units_changed
    assert not machine.exists(path) and machine.exists("/etc/systemd/system/a@1.service.d/own.conf")


def test_autostart_makes_and_removes_the_link(machine):
    link = "/etc/systemd/system/multi-user.target.wants/a.service"
    deploy(machine, read({"autostart": False}))
    assert not machine.exists(link)
    deploy(machine, read())
    assert machine.exists(link)
    deploy(machine, read({"autostart": False}))
    assert not machine.exists(link)


def test_proof_changes_change_no_unit_and_no_digest(machine):
    before = deploy(machine, read())
    found = deploy(machine, read({"proof": {"deadlines": {"start": 7}}}))
    assert labels(found) == ["/etc/launchproof/jobs/a.service.json"] and not found.units_changed
    assert found.rows[0]["digest"] == before.rows[0]["digest"]


def test_complaints_of_systemd_stop_it(machine, monkeypatch):
    monkeypatch.setattr(install.shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    machine.verify_output = "a.service:7: Unknown key name 'Nise' in section 'Service', ignoring.\n"
    (problem,) = problems(machine, read({"unit_options": {"Service": {"Nise": 1}}}))
    assert problem == (
        "unit of job a: a.service:7: Unknown key name 'Nise' in section 'Service', ignoring. Correct unit_options."
    )


def test_units_that_did_not_change_are_not_verified_again(machine, monkeypatch):
    monkeypatch.setattr(install.shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    deploy(machine, read())
    machine.commands.clear()
    plan(machine, read())
    assert machine.commands == []


def test_complaints_about_other_units_and_missing_programs_are_not_ours():
    (job,) = read({"instances": [{"id": 1}]})
    output = (
        "/tmp/v/a@1.service:3: Failed to parse Nice=x\n"
        "a@1.service: Command /usr/local/bin/launchproof is not executable: No such file or directory\n"
        "/lib/systemd/system/ssh.service:3: Unknown key\n"
        "/tmp/v/a@1.service:3: Failed to parse Nice=x\n"
    )
    assert install.verify_complaints(output, "/tmp/v", job) == ["a@1.service:3: Failed to parse Nice=x"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "Id=multi-user.target\nNeedDaemonReload=no\nWants=a.service x\n\nId=a.service\nNeedDaemonReload=no\nWants=\n",
            False,
        ),
        (
            "Id=multi-user.target\nNeedDaemonReload=no\nWants=a.service x\n\nId=a.service\nNeedDaemonReload=yes\nWants=\n",
            True,
        ),
        ("Id=multi-user.target\nNeedDaemonReload=no\nWants=x\n\nId=a.service\nNeedDaemonReload=no\nWants=\n", True),
    ],
)
def test_a_reload_that_an_earlier_deployment_did_not_reach_is_made_up_for(machine, output, expected):
    machine.show_output = output
    assert install.needs_reload(read(), machine) is expected


def test_a_record_is_written_after_systemd_has_read_the_units(machine):
    found = plan(machine, read())
    machine.run = lambda argv: (1, "Connection timed out\n")
    with pytest.raises(install.ApplyError, match="daemon-reload ended with 1: Connection timed out"):
        install.apply(found, machine, reload=True)
    assert machine.exists("/etc/systemd/system/a.service")
    assert not machine.exists("/etc/launchproof/jobs/a.service.json")


def test_a_corrupt_record_is_written_anew(machine):
    jobs = read()
    deploy(machine, jobs)
    machine.write("/etc/launchproof/jobs/a.service.json", b"{", 0o644)
    assert labels(deploy(machine, jobs)) == ["/etc/launchproof/jobs/a.service.json"]
