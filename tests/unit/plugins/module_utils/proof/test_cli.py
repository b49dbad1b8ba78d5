# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a person types wrongly, and what is printed where no systemd is asked. The rest is tested in containers."""

from __future__ import annotations

import io
import json

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import cli, ledger, session
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager, systemd


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A machine whose systemd does not answer."""
    monkeypatch.setattr(manager, "SYSTEMD_RUNS", str(tmp_path))
    monkeypatch.setattr(systemd, "PRIVATE_SOCKET", str(tmp_path / "private"))
    monkeypatch.setattr(systemd, "BUS_SOCKET", str(tmp_path / "bus"))
    monkeypatch.setattr(cli, "own_paths", lambda environ: ledger.Paths(str(tmp_path)))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "--name", "x"], "there is no command: write it after --"),
        (["run", "--name", "a b", "--", "true"], "--name a b: use letters"),
        (["run", "--name", "x", "--env", "LAUNCHPROOF_UNSET", "--", "true"], "--env LAUNCHPROOF_UNSET: it is not in your environment"),
        (["run", "--name", "x", "--proof", "BAD", "--", "true"], "--proof is 'BAD': write JSON (Expecting"),
        (["run", "--name", "x", "--proof", "absent", "--", "true"], "absent: No such file or directory"),
        (["run", "--name", "x", "--progress", "(", "--", "true"], "proof.progress.pattern is '(': not a regular expression"),
        (["run", "--name", "x", "--", "true"], "systemd does not answer ("),
        (["prove", "x"], "systemd does not answer ("),
        (["prove"], "holds no job: name the units"),
        (["watch"], "holds no job: name the units"),
        (["diagnose"], "what is to be diagnosed? Name a unit"),
        (["diagnose", "--pattern", "("], "--pattern is '(': write a regular expression (missing )"),
        (["diagnose", "--launcher-script", "absent"], "absent: No such file or directory"),
        (["diagnose", "--launcher-script", "/dev/null"], "explains nothing: name the unit, or give --launcher-output and --launcher-rc\n"),
        (["diagnose", "--launcher-script", "/dev/null", "--launcher-output", "/dev/null", "--launcher-rc", "3"],
         "explains nothing: name the unit\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_one_line_and_is_no_verdict(alone, monkeypatch, capsys, words, text):
    monkeypatch.chdir(alone)
    (alone / "BAD").write_text("{")
    assert cli.main(words) == cli.BLIND
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("launchproof: ") and printed.err.count("\n") == 1
    assert text in printed.err
    assert sorted(path.name for path in alone.iterdir()) == ["BAD"], "nothing was written"


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf", "nan"])
def test_times_are_numbers_above_0(capsys, seconds):
    with pytest.raises(SystemExit) as ended:
        cli.main(["prove", "--timeout", seconds, "x"])
    assert ended.value.code == cli.BLIND and "is no number of seconds above 0" in capsys.readouterr().err


def test_a_launcher_can_be_pasted(alone, monkeypatch, capsys):
    """Incident B's script, and what its caller saw: the line that killed its own shell is named."""
    script = "rm -f log\npkill -f monitor.py\nnohup python3 monitor.py > log 2>&1 &\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(script))
    assert cli.main(["diagnose", "--json", "--launcher-script", "-", "--launcher-rc", "143"]) == cli.FAILED
    row = json.loads(capsys.readouterr().out)
    assert (row["code"], row["evidence"]["line"], row["evidence"]["command"]) == (
        "launcher_self_killed",
        2,
        "pkill -f monitor.py",
    )


@pytest.mark.parametrize(
    ("script", "rc", "output", "unit", "code", "remedy"),
    [
        ("pkill -f t.py; ./t.py", 143, "", "the job", "launcher_self_killed", "stop it by its unit or its pid, never by pattern"),
        ("fi", 2, "bash: -c: line 1: syntax error near unexpected token `fi'", "the job", "launcher_syntax",
         "(bash: -c: line 1: syntax error near unexpected token `fi'): correct it, then run it again"),
        ("x", 255, "ssh: connect to host h port 22: No route to host", "the job", "launcher_not_delivered", "then start the job"),
        ("nohupp ./t", 127, "go\nbash: line 1: nohupp: command not found\n", "the launcher", "exited_nonzero",
         "PATH that a shell without a login has (bash: line 1: nohupp: command not found)"),
        ("./t", 126, "sh: 1: ./t: Permission denied\r\n", "the launcher", "exited_nonzero", "(sh: 1: ./t: Permission denied)"),
        ("./t", 126, "", "the launcher", "exited_nonzero", "its first line and its mount"),
    ],
)  # fmt: skip
def test_a_remedy_without_a_unit(alone, capsys, script, rc, output, unit, code, remedy):
    (alone / "s").write_text(script)
    (alone / "o").write_text(output)
    given = ["--launcher-script", str(alone / "s"), "--launcher-output", str(alone / "o"), "--launcher-rc", str(rc)]
    assert cli.main(["diagnose", "--json", *given]) == cli.FAILED
    row = json.loads(capsys.readouterr().out)
    assert (row["unit"], row["code"]) == (unit, code)
    assert row["remedy"].endswith(remedy) and "systemctl" not in row["remedy"], row["remedy"]


def test_a_pattern_that_finds_who_looks_is_told_so_without_a_unit(alone, monkeypatch, capsys):
    monkeypatch.setattr(cli.process, "matches", lambda pattern, pid: ((), ("pid 7, bash -c pgrep -f t.py",)))
    assert cli.main(["diagnose", "--json", "--pattern", "t.py"]) == cli.FAILED
    row = json.loads(capsys.readouterr().out)
    assert row["code"] == "wrong_process"
    assert row["remedy"].endswith("look at the control group of the job, never at command lines")


FAILED = "ExecStartPre=/bin/t (exit status 1)"
LIMIT = "earlier runs of a.service used up its start limit: run systemctl reset-failed a.service"
FAILED_PRE = "run it by hand: %s failed, so the main process of a.service was never started"


@pytest.mark.parametrize(
    ("remedy", "evidence", "failed", "journal", "wanted"),
    [
        (FAILED_PRE % FAILED, {"failed_command": FAILED}, FAILED, [],
         FAILED_PRE % FAILED),
        (FAILED_PRE % "an ExecStartPre= command", {"failed_command": ""}, "", [], FAILED_PRE % "ExecStartPre=/bin/t or /bin/u -x"),
        (LIMIT, {}, FAILED, [],
         "run it by hand: ExecStartPre=/bin/t (exit status 1) failed; " + LIMIT),
        (LIMIT, {}, "", ["Starting a...", "bad line 7", "a.service: Control process exited, code=exited", "a.service: Failed with result 'exit-code'.",
                         "bad line 7", "a.service: Start request repeated too quickly.", "Failed to start a."],
         LIMIT + "; the journal says: bad line 7 | a.service: Start request repeated too quickly."),
    ],
)  # fmt: skip
def test_a_refused_start_is_told_by_command_and_journal(remedy, evidence, failed, journal, wanted):
    row = {"code": "start_refused", "remedy": remedy, "evidence": {"journal": [], **evidence}}
    found = cli.refusal(row, failed, ["/bin/t", "/bin/u -x"], journal)
    assert found["remedy"] == wanted
    assert found["evidence"].get("failed_command", "") == failed
    assert all(line in wanted for line in found["evidence"]["journal"]) and bool(found["evidence"]["journal"]) == bool(
        journal
    )


def test_an_ordinary_users_sessions_are_his_own(monkeypatch):
    monkeypatch.setattr(cli.os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/ada")
    assert cli.own_paths({}).sessions == "/home/ada/.local/state/launchproof/sessions"
    assert cli.own_paths({"XDG_STATE_HOME": "/s"}).sessions == "/s/launchproof/sessions"
    assert cli.own_paths({}).runs == ledger.Paths().runs
    monkeypatch.setattr(cli.os, "geteuid", lambda: 0)
    assert cli.own_paths({"XDG_STATE_HOME": "/s"}).sessions == ledger.Paths().sessions


def test_who_stops_looking_is_told_what_goes_on(alone, monkeypatch, capsys):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "plan", lambda request, paths: None)
    monkeypatch.setattr(session, "begin", lambda request, paths, install: {"session": "s1"})
    monkeypatch.setattr(session, "follow", interrupted)
    assert cli.main(["prove", "a", "b"]) == 130
    assert (
        "the proof goes on, and so does a.service b.service: launchproof prove a.service b.service"
        in capsys.readouterr().err
    )


def test_states_in_prometheus_text_format():
    text = cli.metrics({r"a\x2d.service": ("ok_started", "r"), "b.service": ("waiting", None)})
    assert text.splitlines()[2:] == [
        'launchproof_state{unit="a\\\\x2d.service",code="ok_started"} 1',
        'launchproof_state{unit="b.service",code="waiting"} 1',
    ]
