# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The prover on a real systemd: how it asks, what it survives, who may look, and logs that give no events."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import textwrap
import threading
import time
from pathlib import Path

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import systemd

from tests.support.container import Container

pytestmark = pytest.mark.container
STEPS = "for i in $(seq 999); do echo ev=step step=$i; sleep 0.2; done"
PROGRESS = {"process": {"stable_for": 1}, "progress": {"pattern": r"step=(?P<step>\d+)", "within": 10}}
SHORT = {"process": {"stable_for": 1}}
SESSIONS = "/var/lib/launchproof/sessions"
PACKAGE = "ansible_collections.dflash.launchproof.plugins.module_utils.proof"


@pytest.fixture(scope="module")
def container():
    with Container("lpt-prover") as container:
        container.install()
        container.shell("useradd --create-home --shell /bin/bash ada; mkdir -p /srv/logs; chmod 755 /srv/logs")
        yield container


def unit(container: Container, name: str, script: str, service: str = "", more: str = "", log: str = "") -> str:
    """Install a unit that runs a shell text; its log is /srv/logs/NAME.log."""
    program = f"/srv/{re.sub(r'[^a-z-]', '_', name)}.sh"
    container.write(program, f"#!/bin/bash\n{script}\n", 0o755)
    log = log or f"append:/srv/logs/{name}.log"
    text = f"[Unit]\n{more}\n[Service]\nType=exec\nExecStart={program}\nStandardOutput={log}\nStandardError=inherit\n{service}\n"
    container.write(f"/etc/systemd/system/{name}.service", text)
    container.run("systemctl", "daemon-reload")
    return f"{name}.service"


def python(container: Container, text: str, user: str = "root") -> str:
    """Run Python in the container, with the project's one file on its path."""
    program = "import sys; sys.path.insert(0, '/usr/local/lib/launchproof/launchproof')\n" + textwrap.dedent(text)
    return container.run("runuser", "-u", user, "--", "python3", "-c", program).stdout


def as_ada(*words: str) -> list[str]:
    return ["runuser", "-u", "ada", "--", *words]


def prove(container: Container, *words: str, proof: dict | None = None, user: str = "", check: bool = False):
    """C(launchproof prove): the row, the exit status, and all it printed."""
    container.write("/tmp/proof.json", json.dumps(proof or {}))
    argv = [
        "launchproof",
        "prove",
        "--json",
        "--quiet",
        *(["--proof", "/tmp/proof.json"] if proof is not None else []),
        *words,
    ]
    done = container.run(*(as_ada(*argv) if user else argv), check=check)
    try:
        (row,) = json.loads(done.stdout)["jobs"]
    except ValueError:
        row = {}
    return row, done.returncode, done.stdout + done.stderr


def arm(container: Container, name: str, proof: dict, state: str = "restarted") -> subprocess.Popen:
    """Begin a proof in the background."""
    container.write(f"/tmp/{name}.json", json.dumps(proof))
    argv = container.argv(
        "launchproof", "prove", "--json", "--quiet", "--state", state, "--proof", f"/tmp/{name}.json", name
    )
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def sessions(container: Container, name: str) -> list[Path]:
    """Folders of the sessions that prove a unit, oldest first."""
    found = [path.parent for path in container.path(SESSIONS).glob("*/request.json") if f'"{name}"' in path.read_text()]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def until(what, timeout: float = 30):
    deadline = time.monotonic() + timeout
    while not (found := what()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return found


def prop(container: Container, name: str, key: str) -> str:
    return container.run("systemctl", "show", "-P", key, name).stdout.rstrip("\n")


# ---- systemd ----


def test_what_the_bus_says_is_what_systemctl_says(container):
    name = unit(
        container, "odd-one@7", STEPS,
        "ExecStartPre=/bin/echo 'two words' $$\nEnvironmentFile=-/no/such\nMemoryMax=1G\nRuntimeMaxSec=1h\nRestart=on-failure\nUser=ada",
        "ConditionPathExists=!/no/such", log="journal",
    )  # fmt: skip
    container.run("systemctl", "start", name)
    shown = json.loads(python(container, f"""
        import dataclasses, json
        from {PACKAGE}.sources import systemd
        found = systemd.show([{name!r}, "dbus.service", "absent.service"])
        print(json.dumps({{unit: dataclasses.asdict(state) for unit, (state, properties) in found.items()}}))
    """))  # fmt: skip
    for each, state in shown.items():
        for key, value in {
            "LoadState": "load_state", "ActiveState": "active_state", "SubState": "sub_state", "Result": "result", "Type": "type",
            "InvocationID": "invocation_id", "MainPID": "main_pid", "ExecMainPID": "exec_main_pid", "NRestarts": "n_restarts",
            "ControlGroup": "control_group", "Restart": "restart", "FragmentPath": "fragment_path", "NotifyAccess": "notify_access",
        }.items():  # fmt: skip
            assert prop(container, each, key) == str(state[value]), (each, key)
    state = shown[name]
    assert (state["memory_max"], state["runtime_max"], state["condition_result"]) == (2**30, 3600.0, True)
    assert prop(container, name, "ExecMainStartTimestampMonotonic")
    container.run("systemctl", "stop", name)


def test_root_needs_no_bus_and_others_are_told_that_it_is_not_there(container):
    name = unit(container, "no-bus", STEPS)
    container.shell("systemctl stop dbus.socket dbus.service; rm /run/dbus/system_bus_socket")
    try:
        row, status, said = prove(container, "--state", "restarted", name, proof=PROGRESS)
        assert (status, row.get("code")) == (0, "ok_progressing"), said
        _row, status, said = prove(container, name, proof=PROGRESS, user="ada")
        assert status == 2 and "systemd does not answer (/run/dbus/system_bus_socket: " in said, said
    finally:
        container.shell("systemctl start dbus.socket")
    container.run("systemctl", "stop", name)


def test_a_start_that_systemd_has_in_its_queue_is_waited_for(container):
    unit(container, "comes-first", "sleep 4", "Type=oneshot")
    name = unit(
        container, "queued", "echo up; exec sleep 600", more="After=comes-first.service\nWants=comes-first.service"
    )
    proof = {**SHORT, "deadlines": {"start": 2}}
    with arm(container, "queued", proof) as proving:
        status = until(lambda: [json.loads(path.read_text())["units"].get(name) for folder in sessions(container, name)
                                for path in folder.glob("status.json")])[-1]  # fmt: skip
        assert "its start job is in systemd's queue" in status["missing"][0], status
        (row,) = json.loads(proving.communicate(timeout=30)[0])["jobs"]
    assert row["code"] == "ok_started" and row["seconds"] > 4, row
    container.run("systemctl", "stop", name)


def test_a_start_that_stays_queued_is_named_when_the_time_is_up(container):
    unit(container, "comes-never", "sleep 600", "Type=oneshot\nTimeoutStartSec=infinity")
    name = unit(container, "stuck", STEPS, more="After=comes-never.service\nWants=comes-never.service")
    row, status, said = prove(
        container, "--state", "restarted", "--timeout", "4", name, proof={**SHORT, "deadlines": {"start": 1}}
    )
    assert (status, row.get("code")) == (1, "never_launched"), said
    assert "list-jobs" in row["remedy"] and row["seconds"] >= 4
    container.shell("systemctl stop stuck comes-never")


def test_a_dependency_that_fails_is_named(container):
    unit(container, "db", "exit 1", "Type=oneshot")
    name = unit(container, "needs-db", STEPS, more="Requires=db.service\nAfter=db.service")
    row, _status, said = prove(container, "--state", "started", name, proof=SHORT)
    assert (row.get("code"), row["evidence"]["dependency"]) == ("start_refused", "db.service"), said


# ---- what it survives ----


def test_a_killed_prover_is_replaced_and_nothing_is_started_twice(container):
    name = unit(container, "outlives", "echo started >> /srv/starts; sleep 4; " + STEPS)
    with arm(container, name, PROGRESS) as proving:
        folder = until(lambda: [path for path in sessions(container, name) if (path / "ordered").exists()])[-1]
        until(lambda: container.path("/srv/starts").exists())
        pid = json.loads((folder / "armed").read_text())["pid"]
        container.run("kill", "-9", str(pid))
        (row,) = json.loads(proving.communicate(timeout=40)[0])["jobs"]
    assert row["code"] == "ok_progressing", row
    assert json.loads((folder / "armed").read_text())["pid"] != pid
    assert '"resumed"' in (folder / "events.jsonl").read_text()
    assert container.read("/srv/starts") == "started\n"
    container.run("systemctl", "stop", name)


def test_the_newest_of_two_proofs_counts(container):
    name = unit(container, "wanted-twice", "sleep 2; " + STEPS)
    with arm(container, name, {**PROGRESS, "log": {"required": ["never comes"]}}) as first:
        until(lambda: [path for path in sessions(container, name) if (path / "ordered").exists()])
        with arm(container, name, PROGRESS) as second:
            (row,) = json.loads(second.communicate(timeout=40)[0])["jobs"]
        (left,) = json.loads(first.communicate(timeout=40)[0])["jobs"]
    assert row["code"] == "ok_progressing", row
    assert left["code"] == "inconclusive" and sessions(container, name)[-1].name in left["remedy"], left
    container.run("systemctl", "stop", name)


def test_the_truth_is_told_after_the_machine_went_down_in_the_middle(container):
    name = unit(container, "cut-off", "echo loading; exec sleep 600")
    with arm(container, name, PROGRESS) as proving:
        folder = until(lambda: [path for path in sessions(container, name) if (path / "ordered").exists()])[-1]
        until(
            lambda: (
                "loading"
                in (
                    container.path("/srv/logs/cut-off.log").read_text()
                    if container.path("/srv/logs/cut-off.log").exists()
                    else ""
                )
            )
        )
        container.stop()
        proving.communicate(timeout=30)
    container.start()
    news = json.loads(python(container, f"""
        import json
        from {PACKAGE} import ledger, session
        offset, verdict = 0, None
        while verdict is None:
            news = session.follow({folder.name!r}, offset, 5, ledger.Paths())
            offset, verdict = news["offset"], news["verdict"]
        print(json.dumps(verdict))
    """))  # fmt: skip
    (row,) = news["jobs"]
    assert not row["ok"] and row["code"] in ("never_launched", "inconclusive", "exited_early"), row
    assert prop(container, name, "ActiveState") == "inactive", (
        "what the machine's end stopped is not started by a proof"
    )


# ---- who may look ----


def test_an_ordinary_user_gets_the_same_verdict_of_what_can_be_read(container):
    name = unit(container, "public", STEPS)
    container.run("systemctl", "restart", name)
    row, status, said = prove(container, name, proof=PROGRESS, user="ada")
    assert (status, row.get("code")) == (0, "ok_progressing"), said
    ours, _status, _said = prove(container, name, proof=PROGRESS)
    assert (ours["code"], ours["run_id"]) == (row["code"], row["run_id"])
    container.run("systemctl", "kill", "--signal=KILL", name)
    until(lambda: prop(container, name, "ActiveState") == "failed")
    row, status, said = prove(container, name, proof=PROGRESS, user="ada")
    assert (status, row.get("code")) == (1, "killed_by_signal"), said
    row, status, said = prove(container, "absent", user="ada")
    assert (status, row.get("code")) == (1, "unit_not_found"), said
    assert container.path("/home/ada/.local/state/launchproof/sessions").exists()


def test_what_an_ordinary_user_may_not_read_is_unknown_and_says_why(container):
    name = unit(container, "private", STEPS, "UMask=0077")
    container.run("systemctl", "restart", name)
    row, status, said = prove(container, name, proof=PROGRESS, user="ada")
    assert (status, row.get("code")) == (2, "observer_blind"), said
    assert row["evidence"]["why"] == "/srv/logs/private.log: Permission denied", row
    row, status, said = prove(container, name, proof={**SHORT, "log": {"fresh": False}}, user="ada")
    assert (status, row.get("code")) == (0, "ok_started"), said
    container.run("systemctl", "stop", name)


def test_a_journal_that_an_ordinary_user_may_not_read_is_no_silent_job(container):
    name = unit(container, "journaled", STEPS, log="journal")
    container.run("systemctl", "restart", name)
    row, status, said = prove(container, name, proof=PROGRESS, user="ada")
    assert (status, row.get("code")) == (2, "observer_blind"), said
    assert "systemd-journal" in row["evidence"]["why"], row
    container.run("usermod", "-aG", "systemd-journal", "ada")
    row, status, said = prove(container, name, proof=PROGRESS, user="ada")
    assert (status, row.get("code")) == (0, "ok_progressing"), said
    container.run("systemctl", "stop", name)


def test_what_takes_root_is_said_to_an_ordinary_user(container):
    name = unit(container, "roots", STEPS)
    row, status, said = prove(container, "--state", "started", name, proof=SHORT, user="ada")
    assert (status, row.get("code")) == (2, "observer_blind"), said
    assert "takes root" in row["remedy"], row
    done = container.run(*as_ada("launchproof", "run", "--name", "hers", "--", "/bin/true"), check=False)
    assert (done.returncode, done.stdout) == (2, "") and "sudo" in done.stderr
    assert not container.path("/etc/systemd/system/hers.service").exists()


# ---- logs ----


def test_several_logs_with_old_content_some_of_which_come_later(container):
    container.shell("mkdir -p /srv/shards; for i in 0 1; do echo ev=step step=99 > /srv/shards/part$i.log; done")
    script = """
        step() { echo "ev=step step=$2" >> /srv/shards/part$1.log; }
        for i in $(seq 999); do for part in 0 1 2; do step $part $i; done; [ $i -lt 5 ] || step 3 $i; sleep 0.2; done
    """
    name = unit(container, "sharded", script)
    proof = {**PROGRESS, "log": {"path": "/srv/shards/part*.log", "count": 4}}
    row, status, said = prove(container, "--state", "restarted", name, proof=proof)
    assert (status, row.get("code")) == (0, "ok_progressing"), said
    assert row["evidence"]["progress"]["first"] == 1, "what was there before is not this run's"
    container.run("systemctl", "stop", name)
    dead = unit(container, "unsharded", "exec sleep 600")
    row, status, said = prove(container, "--state", "restarted", dead, proof={**proof, "deadlines": {"first_log": 2}})
    assert (status, row.get("code")) == (1, "log_misrouted") and "stale_log" in row["also_observed"], said
    assert row["evidence"]["log"]["new_bytes"] == 0
    container.run("systemctl", "stop", dead)


def test_a_log_that_gives_no_events_is_followed_all_the_same(container):
    """As on NFS or FUSE: the bytes come from another machine, here by the layer below, of which the container hears nothing."""
    container.shell("echo up > /srv/logs/far.log")
    name = unit(container, "far", "exec sleep 600")
    below = container.folder / "upper/srv/logs/far.log"
    with arm(container, name, {**PROGRESS, "log": {"path": "/srv/logs/far.log"}}) as proving:
        until(lambda: prop(container, name, "ActiveState") == "active")
        for step in range(100):
            if proving.poll() is not None:
                break
            with open(below, "a") as log:
                log.write(f"ev=step step={step}\n")
            time.sleep(0.2)
        (row,) = json.loads(proving.communicate(timeout=30)[0])["jobs"]
    assert row["code"] == "ok_progressing", row
    container.run("systemctl", "stop", name)


def test_names_that_hold_anything_find_their_unit(container):
    name = unit(container, r"a-b_c.d\x2de@x:1", STEPS, log="append:/srv/logs/odd.log")
    row, status, said = prove(container, "--state", "restarted", name, proof=PROGRESS)
    assert (status, row.get("code"), row.get("unit")) == (0, "ok_progressing", name), said
    assert systemd.unit_of_path(systemd.unit_path(name)) == name
    container.run("systemctl", "stop", name)
    for wrong in ("two words", "no@", "/etc/passwd", "x" * 300):
        _row, status, said = prove(container, wrong)
        assert status in (1, 2) and re.search(r"not valid|neither a valid|does not exist|no unit name", said), said
        assert "Traceback" not in said


# ---- launchproof run, watch ----


def test_what_is_run_gets_its_words_its_folder_and_its_environment_as_they_are(container):
    container.write(
        "/srv/my jobs/rel.sh",
        '#!/bin/sh\nprintf "<%s>" "$@" "$PWD" "$ODD" "$CUDA_VISIBLE_DEVICES" "$TOKEN"; exec sleep 600\n',
        0o755,
    )
    command = """cd '/srv/my jobs' && export TOKEN=s3cr3t-value && launchproof run --json --quiet --name odd.1_x-y --env 'ODD=a  "$b" %n \\' --env TOKEN \
        --gpu GPU-1 --gpu 2 --proof - -- ./rel.sh 'two words' '$HOME' '100%' "it's" '' 'back\\slash' <<< '{"process": {"stable_for": 1}}'"""
    done = container.run("bash", "-c", command, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["jobs"]
    folder = f"/var/lib/launchproof/runs/odd.1_x-y.service/{row['run_id']}"
    said = container.read(f"{folder}/log")
    assert said == '<two words><$HOME><100%><it\'s><><back\\slash></srv/my jobs><a  "$b" %n \\><GPU-1,2><s3cr3t-value>'
    assert "s3cr3t-value" not in done.stdout
    kept = container.run("grep", "-rl", "s3cr3t-value", "/etc", "/var/lib/launchproof", check=False).stdout.split()
    assert sorted(kept) == ["/etc/launchproof/secrets/odd.1_x-y.service.env", f"{folder}/log"], kept
    # The same name again: the old run ends, its log stays.
    again = container.run(
        "launchproof",
        "run",
        "--json",
        "--quiet",
        "--name",
        "odd.1_x-y",
        "--",
        "sh",
        "-c",
        "echo gone; exit 7",
        check=False,
    )
    (new,) = json.loads(again.stdout)["jobs"]
    assert (again.returncode, new["code"]) == (1, "exited_nonzero") and new["run_id"] != row["run_id"]
    assert container.read(f"{folder}/log") == said
    assert json.loads(container.read(f"{folder}/exit.json"))["exit_code"] == "killed"
    assert container.run("ps", "-eo", "args").stdout.count("sleep 600") == 0


def test_a_name_that_is_somebody_elses_is_refused_and_left_alone(container):
    name = unit(container, "theirs", STEPS)
    container.run("systemctl", "start", name)
    container.run("systemd-run", "--unit=transient", "sleep", "600")
    for taken in ("theirs", "transient", "dbus", "systemd-journald"):
        before = prop(container, taken, "MainPID")
        done = container.run("launchproof", "run", "--name", taken, "--", "/bin/true", check=False)
        assert done.returncode == 2 and "choose another name" in done.stderr, done.stderr
        assert prop(container, taken, "MainPID") == before
    container.run("systemctl", "stop", name, "transient")


def test_whoever_stops_looking_stops_nothing(container):
    # A shell without job control starts what runs in the background deaf to SIGINT.
    command = "env --default-signal=INT launchproof run --name patient -- sh -c 'echo up; sleep 600'"
    script = f"{command} & pid=$!; read -r _; kill -INT $pid; wait $pid; echo rc $?"
    with subprocess.Popen(
        container.argv("bash", "-c", script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as looking:
        read = ""
        while "patient.service: stable" not in read:
            line = looking.stdout.readline()
            assert line, read
            read += line
        rest = looking.communicate("\n", timeout=30)[0]
    assert "rc 130" in rest and "the proof goes on" in rest, rest
    folder = sessions(container, "patient.service")[-1]
    until(lambda: (folder / "verdict.json").exists())
    assert json.loads((folder / "verdict.json").read_text())["verdict"] == "ok"
    assert prop(container, "patient", "ActiveState") == "active"
    container.run("systemctl", "stop", "patient")


@pytest.fixture
def watched(container):
    """C(told(code)) gives the row of the next change to that code, as C(launchproof watch) prints it."""
    container.write("/tmp/short.json", json.dumps(SHORT))
    command = ["sh", "-c", "echo up; sleep 600"]
    container.run("launchproof", "run", "--quiet", "--proof", "/tmp/short.json", "--name", "watched", "--", *command)
    argv = container.argv("sh", "-c", "echo $$; exec launchproof watch --json --textfile /srv/watched.prom watched")
    watching = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = queue.Queue()
    reader = threading.Thread(target=lambda: [lines.put(line) for line in watching.stdout], daemon=True)
    reader.start()
    pid = lines.get(timeout=20).strip()

    def told(code):
        seen = []
        while not seen or seen[-1]["code"] != code:
            try:
                seen.append(json.loads(lines.get(timeout=20)))
            except queue.Empty:
                raise AssertionError(f"{code} was never told, but {seen}") from None
        return seen[-1]

    yield told
    container.run("kill", pid)
    watching.wait(timeout=20)
    reader.join()
    watching.stdout.close()
    container.run("systemctl", "stop", "watched")


def test_a_watch_tells_each_change_and_keeps_the_last_verdict(container, watched):
    first = watched("ok_started")
    assert (
        container.read("/srv/watched.prom").splitlines()[-1]
        == 'launchproof_state{unit="watched.service",code="ok_started"} 1'
    )
    container.run("systemctl", "kill", "--signal=KILL", "watched")
    killed = watched("killed_by_signal")
    assert killed["run_id"] == first["run_id"]
    verdict = json.loads(container.read(f"/var/lib/launchproof/runs/watched.service/{killed['run_id']}/verdict.json"))
    assert (verdict["code"], verdict["ok"]) == ("killed_by_signal", False)
    assert 'code="killed_by_signal"' in container.read("/srv/watched.prom")
    container.run("systemctl", "start", "watched")
    assert watched("ok_started")["run_id"] not in (None, first["run_id"])
