# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Hosts that systemd does not run: every code that can exist there, the runner's own deaths, incident B, and the role."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.job import units
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import supervisor
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.table import TABLE

from tests.integration import matrix
from tests.integration.cases import Case, python
from tests.integration.test_incidents import FILES, INCIDENTS, OWN_LAUNCH, drop_in_twice, launch
from tests.integration.test_matrix import judge, named
from tests.support.bare import PYTHON_ENV, SYSTEMCTL, Bare
from tests.support.ssh import SshHost, playbook, serve_ssh

pytestmark = pytest.mark.container
PROGRAM = "/usr/local/bin/launchproof"
# Codes that only systemd can bring about, and why.
ONLY_SYSTEMD = {
    "unit_invalid": "there is no unit file that could be wrong",
    "condition_skipped": "there are no conditions",
    "start_timeout": "a job has all the time that it wants to become ready, as by the role's units",
    "runtime_limit": "there is no limit of a run's time",
}
# It can exist there too, and is told in the same way; but what is stuck in state D by a vfork() has a child that is not.
NOT_INDUCED = {"uninterruptible"}
# Cases of the matrix whose job can be the same there.
SHARED = """
    no-unit no-environment-file launcher-killed-itself launcher-lost launcher-typo nobody-started-it old-run-lives
    look-finds-itself look-prints-its-glob no-folder no-program no-user log-not-ours no-keep-alive sigkill sigterm sighup segfault
    traceback traceback-exit-0 cuda-oom-exit-0 silent-exit usage exit-255 daemonised stopped no-done-line worker-zombie one-restart
    three-of-four cuda-oom-alive output-to-null buffered idle loading-for-ever stalls-idle no-objects no-gpu
    no-bucket time-up
    h-plain h-steps h-completed h-completed-at-once h-operator-restart h-other-user h-notify h-watchdog h-wrapped h-env-i h-setsid-worker
    h-observed h-foreign-launcher h-failed-run-before h-stubborn-old-run
"""
OWN = [
    Case("loop-3", "crash_loop", "it exits with 3 again and again", program="#!/bin/sh\necho loading; exit 3\n",
         service="Restart=on-failure", fact="until_ok restarted 1", nested="exited_nonzero"),
    Case("config-error", "exited_nonzero", "an exit that is not retried", program="#!/bin/sh\necho bad flag; exit 78\n",
         service="Restart=on-failure", fact='[ "$(prop ActiveState)/$(prop NRestarts)" = failed/0 ]'),
    Case("old-log", "stale_log", "it opens a log with old lines and writes nothing", log="/var/log/cases/old-log.log",
         program="#!/bin/sh\nexec sleep 600 >> $LOG 2>&1\n", before="echo model loaded > $LOG",
         proof={"log": {"required": ["model loaded"]}, "deadlines": {"first_log": 2}}, fact="grep -q loaded $LOG"),
    Case("core-dumped", "core_dumped", "it dumps core", program=python(
         "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (1 << 24,) * 2)\nprint('loading', flush=True)\nos.chdir('/tmp')\n"
         "os.abort()"), fact='[ "$(prop Result)" = core-dump ]'),
    Case("memory", "oom_killed", "the kernel kills it at the container's limit", alone=True, program=python(
         "print('loading', flush=True)\nheld = []\nwhile True:\n    held.append(bytearray(b'x' * (1 << 20)))"),
         fact='[ "$(prop ExecMainStatus)" = 9 ]'),
]  # fmt: skip
SETTINGS = {"User": "user", "WorkingDirectory": "working_directory", "Restart": "restart"}


def record(case: Case) -> dict:
    """The record that the role writes for a job like the case's unit."""
    found = {
        **matrix.job_file(case),
        "restart": "no",
        "timeout_stop": 120,
        "environment_files": [units.env_path(case.unit_name)],
    }
    for key, _equals, value in (line.partition("=") for line in case.service.splitlines()):
        if key in SETTINGS:
            found[SETTINGS[key]] = value
        elif key == "EnvironmentFile":
            found["environment_files"].append(value)
        elif key == "WatchdogSec":
            found["watchdog"] = float(value)
        elif key == "TimeoutStopSec":
            found["timeout_stop"] = float(value)
        elif key == "Type":
            found["notify"] = value == "notify"
    return found


def deliver(container: Bare, cases: list[Case]) -> None:
    """Put there what the role would put there, for all cases."""
    container.shell("mkdir -p /var/log/cases /opt/cases /etc/case")
    container.install()
    container.have_supervisor()
    container.write("/usr/local/bin/systemctl", SYSTEMCTL, 0o755)
    container.write("/etc/launchproof/supervisor.conf", units.SUPERVISOR_TEXT)
    for case in cases:
        unit = case.unit_name
        container.write(f"/opt/cases/{case.name}/proof.json", json.dumps(matrix.proof(case)))
        if case.program:
            container.write(f"/opt/cases/{case.name}/run", case.program, 0o755)
        if case.unit_text == "":
            continue
        environ = {**matrix.environment(case), **case.env}
        if "UnsetEnvironment=PYTHONUNBUFFERED" not in case.service:
            environ["PYTHONUNBUFFERED"] = "1"
        container.write(units.env_path(unit), units.env_text(environ))
        container.write(units.job_path(unit), json.dumps(record(case)))
        program = units.PROGRAM_TEXT.format(mark=units.MARK, job=case.name, unit=unit, program=PROGRAM)
        container.write(f"/etc/launchproof/supervisor.d/{unit}.conf", program)
        container.write(f"{matrix.RUNS}/{unit}/none/log", "")
        container.path(f"{matrix.RUNS}/{unit}/current").symlink_to("none")
    # What a boot does: it starts supervisor, and here no job, as none has autostart.
    container.run(PROGRAM, "up")


CASES = [*named(SHARED), *OWN]


@pytest.fixture(scope="module")
def outcomes(request):
    """Outcomes by case, of the cases that this run of pytest has collected."""
    cases = [case for case in CASES if any(item.name == f"test_case[{case.name}]" for item in request.session.items)]
    with Bare("lpt-bare-matrix", network=False) as container, ThreadPoolExecutor(matrix.AT_ONCE) as pool:
        deliver(container, cases)
        together = [case for case in cases if not case.alone]
        found = {outcome.case.name: outcome for outcome in pool.map(lambda case: matrix.run(container, case), together)}
        limit_memory(container)
        found.update((case.name, matrix.run(container, case)) for case in cases if case.alone)
        yield found


def limit_memory(container: Bare) -> None:
    """Give the container less than the case wants, as the one who rents it out does."""
    lines = Path(f"/proc/{container.pid}/cgroup").read_text().splitlines()
    path = next(line for line in lines if ":memory:" in line or line.startswith("0::")).split(":")[2]
    new = Path("/sys/fs/cgroup", path.lstrip("/"), "memory.max")
    old = Path("/sys/fs/cgroup/memory", path.lstrip("/"), "memory.limit_in_bytes")
    (old if old.exists() else new).write_text(str(300 << 20))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_case(outcomes, name):
    judge(outcomes[name])
    assert "systemctl" not in outcomes[name].row["remedy"], "there is none on such a host"


def test_every_code_that_can_exist_is_induced():
    codes = {code for row in TABLE for code in row.codes}
    induced = {case.expected for case in CASES}
    assert codes - set(ONLY_SYSTEMD) - NOT_INDUCED == induced


class Rented(SshHost):
    """Incident B's machine: plain ssh on an odd port, no systemd, and wheels in place of an index."""

    def hostvars(self) -> dict:
        return {**super().hostvars(), **PYTHON_ENV}


class Site:
    """The host's inventory, and the playbooks that are run against it."""

    def __init__(self, host: Rented, folder: Path):
        self.host, self.folder = host, folder

    def play(
        self, jobs: list[dict], *more: str, book: str = "tests/integration/launch.yml"
    ) -> tuple[int, str, list[dict]]:
        """(exit code, output, rows of the report) of a playbook."""
        inventory = {"launchproof": {"hosts": {"rented": {**self.host.hostvars(), "launchproof_jobs": jobs}}}}
        (self.folder / "inventory.json").write_text(json.dumps(inventory))
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        with playbook(["-i", str(self.folder / "inventory.json"), book, "--diff", *more], report) as run:
            output = run.communicate(timeout=180)[0]
        return run.returncode, output, json.loads(report.read_text())["jobs"] if report.exists() else []

    def state(self, unit: str) -> dict:
        """What the unit's runner says."""
        return json.loads(self.host.container.read(f"{matrix.RUNS}/{unit}/state.json"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with Bare("lpt-bare") as container:
        ssh = serve_ssh(container, tmp_path_factory.mktemp("ssh"))
        for file in FILES.iterdir():
            container.write(f"/root/{file.name}", file.read_bytes(), 0o755)
        container.install()
        yield Site(Rented(**vars(ssh)), tmp_path_factory.mktemp("site"))


def test_incident_b_is_named_within_5_seconds(site):
    incident = next(incident for incident in INCIDENTS if incident.name == "B")
    began = time.monotonic()
    done = launch(site.host, incident)
    assert (done.returncode, done.stdout, done.stderr) == (incident.rc, "", "")
    container = site.host.container
    container.write("/tmp/launcher.sh", incident.script)
    words = ["diagnose", "--json", "--launcher-script", "/tmp/launcher.sh", "--launcher-rc", str(incident.rc)]
    named_so = container.run(PROGRAM, *words, check=False)
    took = time.monotonic() - began
    assert json.loads(named_so.stdout)["code"] == "launcher_self_killed", named_so.stdout + named_so.stderr
    assert took <= 5, f"{took:.2f} s from the launch to its name"


def changed(output: str) -> int:
    return int(re.search(r"changed=(\d+)", output).group(1))


def test_it_is_deployed_right_and_a_second_run_changes_nothing(site):
    jobs = OWN_LAUNCH["B"]
    status, output, rows = site.play(jobs, "--check")
    assert status == 0 and {row["code"] for row in rows} == {"would_start"}, output
    assert not site.host.container.path("/etc/launchproof/jobs").exists(), "check mode wrote something"
    shards = [f"extraction@{number}.service" for number in range(4)]
    for expected in (4, 0):  # its user, supervisor, the job, the launch
        status, output, rows = site.play(jobs)
        assert status == 0, output
        assert {row["unit"]: row["code"] for row in rows} == dict.fromkeys(
            [*shards, "monitor.service"], "ok_progressing"
        ), output
        assert changed(output) == expected, output
        runs = {row["unit"]: row["run_id"] for row in rows}
    for unit, run_id in runs.items():
        state = site.state(unit)["unit"]
        container = site.host.container
        assert state["invocation_id"] == run_id
        assert f"INVOCATION_ID={run_id}\0" in container.path(f"/proc/{state['main_pid']}/environ").read_text()
        status = container.path(f"/proc/{state['main_pid']}/status").read_text()
        assert "NoNewPrivs:\t1" in status and container.read(f"{matrix.RUNS}/{unit}/{run_id}/manifest.json")

    # One job changes: that one would be, and is, started anew.
    jobs = [*jobs[:1], {**jobs[1], "env": {"SOMETHING": "else"}}]
    status, output, rows = site.play(jobs, "--check")
    assert [row["unit"] for row in rows if row["code"] == "would_start"] == ["monitor.service"], output
    status, output, rows = site.play(jobs)
    assert status == 0, output
    after = {row["unit"]: row["run_id"] for row in rows}
    assert [unit for unit in runs if runs[unit] != after[unit]] == ["monitor.service"]
    certificate = json.loads(
        site.host.container.read(f"{matrix.RUNS}/monitor.service/{runs['monitor.service']}/exit.json")
    )
    assert (certificate["exit_code"], certificate["exit_status"]) == ("killed", "TERM")


def wait_until(found, seconds: float = 20.0):
    """The value of found() once it is true."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.05)
    return value


def test_a_runner_that_is_killed_takes_its_job_along_and_is_started_again(site):
    unit, container = "monitor.service", site.host.container
    before = site.state(unit)
    container.run("kill", "-9", str(before["runner"]["pid"]))

    def again() -> dict | None:
        state = site.state(unit)
        return (
            state
            if state["unit"]["invocation_id"] != before["unit"]["invocation_id"] and state["unit"]["main_pid"]
            else None
        )

    after = wait_until(again)
    assert after["unit"]["n_restarts"] == 1
    assert not container.path(f"/proc/{before['unit']['main_pid']}").exists()
    certificate = json.loads(container.read(f"{matrix.RUNS}/{unit}/{before['unit']['invocation_id']}/exit.json"))
    assert (certificate["exit_code"], certificate["exit_status"]) == ("killed", "KILL")
    container.run(PROGRAM, "prove", "--quiet", unit)


def test_jobs_outlive_supervisor_and_a_boot_starts_them(site):
    container, units_of = site.host.container, ["monitor.service", "extraction@0.service"]
    before = {unit: site.state(unit)["unit"]["invocation_id"] for unit in units_of}
    container.shell("kill -9 $(cat /run/launchproof/supervisord.pid)")
    assert "started, not proved" in container.run(PROGRAM, "up").stdout
    assert {unit: site.state(unit)["unit"]["invocation_id"] for unit in units_of} == before
    # A second runner, which the new supervisor starts if somebody tells it to, finds the first one at work and leaves it alone.
    supervisorctl = [supervisor.SUPERVISORCTL, "-c", supervisor.CONFIG]
    container.run(*supervisorctl, "start", *units_of)
    status = [*supervisorctl, "status", *units_of]
    wait_until(lambda: container.run(*status, check=False).stdout.count("EXITED") == len(units_of))
    assert {unit: site.state(unit)["unit"]["invocation_id"] for unit in units_of} == before
    container.stop()
    container.start()
    container.run(PROGRAM, "up")
    done = container.run(PROGRAM, "prove", "--json", "--quiet", *units_of)
    assert {row["code"] for row in json.loads(done.stdout)["jobs"]} == {"ok_progressing"}
    assert not set(before.values()) & {site.state(unit)["unit"]["invocation_id"] for unit in units_of}
    container.shell("mkdir -p /run/sshd; /usr/sbin/sshd")


def test_they_are_stopped_by_name(site):
    for expected in (1, 0):
        status, output, _rows = site.play(OWN_LAUNCH["B"], book="playbooks/stop.yml")
        assert status == 0 and changed(output) == expected, output
    names = [f"extraction@{number}.service" for number in range(4)] + ["monitor.service"]
    assert {site.state(name)["unit"]["active_state"] for name in names} == {"inactive"}
    listed = site.host.container.run("ps", "-eo", "args").stdout
    assert "extract_hidden_states" not in listed and "run-job" not in listed


def test_the_drop_in_for_the_one_liner_replaces_its_own_run_alone(site):
    drop_in_twice(site.host.container)
    taken = site.host.container.run(PROGRAM, "run", "--name", "monitor", "--", "true", check=False)
    assert taken.returncode == 2 and "was not written by launchproof run" in taken.stderr


def test_a_job_has_the_folder_that_it_writes_into(site):
    script = "echo kept > /var/lib/site/writer/file && echo ready && exec sleep 600"
    job = {
        "name": "writer",
        "user": "writer",
        "command": ["/bin/sh", "-c", script],
        "unit_options": {"Service": {"StateDirectory": "site/writer"}},
        "proof": {"log": {"required": ["ready"]}},
    }
    status, output, rows = site.play([job])
    assert status == 0, output
    assert [row["code"] for row in rows] == ["ok_started"], output
    assert site.host.container.read("/var/lib/site/writer/file") == "kept\n"
