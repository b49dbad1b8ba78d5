# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""C(launchproof) on the target. Exit status: 0 proved, 1 a failure that has a name, 2 nobody could look."""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import socket
import sys
from typing import TextIO

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import (
    adhoc,
    gpus,
    launcher,
    ledger,
    prover,
    render,
    runner,
    session,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.decide import decide
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import (
    NO_UNIT,
    Baseline,
    Facts,
    UnitState,
    Verdict,
    known,
)
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.redact import Redactor
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import manager, process, systemd
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.events import Loop
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import SpecError, validate
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.table import UNNAMED_COMMAND
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.watch import Watch

OK, FAILED, BLIND = 0, 1, 2
FOREVER = 1e9  # s
# What systemd writes of each start and each failure.
SAYS_NOTHING = re.compile(
    r"^(?:Starting|Started|Stopping|Stopped|Failed to start) |: (?:Failed with result|Scheduled restart job|Control process exited)|^\s*$"
)
LINE_EVERY = 1.0  # s between live lines on a terminal


def say(text: str, stream: TextIO | None = None) -> None:
    """Write one line at once, so that a pipe sees it too. Not print: ansible-test takes any of that for a module's mistake."""
    stream = sys.stdout if stream is None else stream
    stream.write(text + "\n")
    stream.flush()


def own_paths(environ: dict) -> ledger.Paths:
    """Where things lie for who runs this: an ordinary user keeps his sessions where the XDG Base Directory Specification says."""
    if os.geteuid() == 0:
        return ledger.Paths()
    state = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local/state")
    return ledger.Paths(own=os.path.join(state, "launchproof"))


def own_program() -> str:
    """Where this very code lies unpacked, for the prover to run; where there is no right to unpack it, the file itself."""
    if os.geteuid() != 0:
        return os.path.realpath(sys.argv[0])
    from ansible_collections.dflash.launchproof.plugins.module_utils.proof import bundle

    return bundle.unpack()


def drive(request: dict, paths: ledger.Paths, quiet: bool) -> dict:
    """Prove a request by a detached prover, with a live line on standard error, and return the document."""
    session.plan(request, paths)
    armed = session.begin(request, paths, own_program)
    try:
        return follow(request, armed["session"], paths, quiet)
    except KeyboardInterrupt:
        units = " ".join(job["unit"] for job in request["units"])
        say(
            "launchproof: no longer looking; the proof goes on, and so does %s: launchproof prove %s" % (units, units),
            sys.stderr,
        )
        raise


def follow(request: dict, session_id: str, paths: ledger.Paths, quiet: bool) -> dict:
    """Wait for the verdict of a session."""
    offset, rows, document, last = 0, {}, None, ""
    while document is None:
        news = session.follow(session_id, offset, LINE_EVERY, paths)
        offset, document = news["offset"], news["verdict"]
        rows.update((event["unit"], event["row"]) for event in news["events"] if event["event"] == "verdict")
        line = session.live_line(request["host"], rows, news["status"])
        if not quiet and document is None and line != last:
            say(line, sys.stderr)
            last = line
    names = {job["unit"] for job in request["units"]}
    return dict(document, jobs=[row for row in document["jobs"] if row["unit"] in names])


def report(document: dict, options: argparse.Namespace) -> int:
    """Print a document and return the exit status."""
    rows = document["jobs"]
    if options.json:
        say(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False))
    elif options.junit:
        say(render.junit(rows))
    else:
        say(render.table(rows))
    return verdict_status(rows)


def verdict_status(rows: list) -> int:
    if any(row["code"] == "observer_blind" for row in rows):
        return BLIND
    return OK if all(row["ok"] for row in rows) else FAILED


def read_text(path: str) -> str:
    """What is in a file, or, by the name of a dash, on standard input."""
    if path == "-":
        return sys.stdin.read()
    with open(path, encoding="utf-8", errors="replace") as handle:
        return handle.read()


def read_proof(path: str | None) -> dict | None:
    """The proof spec in a JSON file. Raises SpecError."""
    if not path:
        return None
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise SpecError("--proof", path, "write JSON (%s)" % error) from None


def launcher_of(options: argparse.Namespace) -> dict | None:
    """What the command line says about a foreign launcher."""
    found = {}
    for name in ("script", "output"):
        path = getattr(options, "launcher_" + name)
        if path:
            found[name] = read_text(path)
    if options.launcher_rc is not None:
        found["rc"] = options.launcher_rc
    if options.launcher_end_mark:
        found["end_mark"] = options.launcher_end_mark
    return found or None


def prove(options: argparse.Namespace, paths: ledger.Paths) -> int:
    parameters = {
        "state": options.state,
        "restart": "when_changed",
        "jobs": [{"unit": unit, "log": options.log} for unit in options.units],
        "launcher": launcher_of(options),
        "timeout": options.timeout,
    }
    proof = read_proof(options.proof)
    if proof is not None:
        for job in parameters["jobs"]:
            job["proof"] = proof
    return report(drive(session.make_request(parameters, paths), paths, options.quiet), options)


def run(options: argparse.Namespace, paths: ledger.Paths) -> int:
    """The drop-in for a remote one-liner: unit, own log, live line, named verdict, exit code."""
    command = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not command:
        raise adhoc.AdhocError("there is no command: write it after --")
    if os.geteuid() != 0:
        raise adhoc.AdhocError("launchproof run writes a unit and starts it, which takes root: run it by sudo")
    proof = read_proof(options.proof)
    proof = {} if proof is None else proof
    validate(proof)  # first, because it may be anything
    if options.progress:
        proof["progress"] = {"pattern": options.progress}
    if options.done:
        proof["done"] = {"pattern": options.done}
    if options.required:
        proof["log"] = dict(proof.get("log") or {}, required=options.required)
    validate(proof)
    environ = adhoc.environment(options.env, options.gpu, dict(os.environ))
    directory = os.path.abspath(options.directory)
    program = "%s -IS %s" % (sys.executable, os.path.realpath(sys.argv[0]))
    with manager.connect() as connection:
        adhoc.check_free(adhoc.unit_of(options.name), connection)
        unit = adhoc.deliver(options.name, command, environ, options.user, directory, proof, program, paths)
        connection.reload()
    parameters = {"state": "restarted", "jobs": [{"unit": unit}], "timeout": options.timeout}
    document = drive(session.make_request(parameters, paths), paths, options.quiet)
    status = report(document, options)
    run_id = document["jobs"][0]["run_id"]
    if run_id and not options.json and not options.junit:
        say("log: %s/log" % paths.run(unit, run_id))
    return status


def up(options: argparse.Namespace, paths: ledger.Paths) -> int:
    """Start all jobs that a boot is to start. Where systemd runs the machine it does that itself."""
    if manager.systemd_runs():
        raise session.SessionError(
            "systemd runs this machine, and starts its jobs at a boot; up is for machines without"
        )
    records = (ledger.read_json(paths.job(job["unit"])) or {} for job in session.declared_jobs(paths))
    units = [record["unit"] for record in records if record.get("autostart")]
    with manager.connect() as connection:
        connection.reload()
        answers = connection.order("StartUnit", units)
    for unit, answer in answers.items():
        say("%s: %s" % (unit, answer if isinstance(answer, systemd.SystemdError) else "started, not proved"))
    return FAILED if any(isinstance(answer, systemd.SystemdError) for answer in answers.values()) else OK


def watch(options: argparse.Namespace, paths: ledger.Paths) -> int:
    """Prove without an end: print each change of a unit's state, keep a Prometheus text file up to date."""
    parameters = {"state": "observed", "jobs": [{"unit": unit} for unit in options.units], "timeout": FOREVER}
    request = session.make_request(parameters, paths)
    loop = Loop()
    units = prover.make_units(request, {job["unit"]: prover.redactor_of(job) for job in request["units"]}, loop, paths)
    states = {}

    def changed(item, answer) -> None:
        decided = isinstance(answer, Verdict)
        state = (answer.code if decided else "waiting", item.run_id)
        if states.get(item.unit) == state:
            return
        states[item.unit] = state
        row = (
            render.row(answer)
            if decided
            else {"unit": item.unit, "code": None, "ok": None, "run_id": item.run_id, "stage": answer.stage}
        )
        row = Redactor({}).data(dict(row, at=ledger.timestamp()))
        if decided and item.run_id:
            ledger.write_verdict(paths, item.unit, item.run_id, dict(row, objects_before=known(item.baseline.objects)))
        if options.textfile:
            adhoc.write(options.textfile, metrics(states), 0o644)
        if options.json:
            say(json.dumps(row, sort_keys=True, ensure_ascii=False))
        else:
            words = render.sentence(row) if decided else "%s waits: %s" % (item.unit, answer.stage)
            say("%s %s" % (row["at"], words))

    over = Watch(loop, units, changed)
    over.show(units)
    for item in units:
        item.take_baseline(True, ledger.boottime())
    over.count_instances()
    while True:
        over.turn(units, ledger.boottime() + FOREVER)


def metrics(states: dict) -> str:
    """The states of watch() in Prometheus' text format."""
    lines = ["# HELP launchproof_state 1 for the diagnosis that holds now.", "# TYPE launchproof_state gauge"]
    lines += [
        'launchproof_state{unit="%s",code="%s"} 1' % (unit.replace("\\", "\\\\").replace('"', '\\"'), code)
        for unit, (code, _run) in sorted(states.items())
    ]
    return "\n".join(lines) + "\n"


def unexpanded(output: str) -> tuple:
    """Names in a launcher's output that still are shell patterns and that no path has: nothing was ever written there."""
    words = re.findall(r"(?<![\w*?])[\w./~-]*[*?][\w./*?-]*", output)
    return tuple(dict.fromkeys(word for word in words if re.search(r"\w[./]|[./]\w", word) and not glob.glob(word)))


def diagnose(options: argparse.Namespace, paths: ledger.Paths) -> int:
    """Say what is wrong now, of a unit or of a launcher alone; prints one row."""
    foreign = launcher_of(options) or {}
    if not (options.unit or options.pattern or foreign):
        raise session.SessionError(
            "what is to be diagnosed? Name a unit, a --pattern, or a launcher: --launcher-script FILE --launcher-rc N"
        )
    if options.pattern:
        try:
            re.compile(options.pattern)
        except re.error as error:
            raise SpecError("--pattern", options.pattern, "write a regular expression (%s)" % error) from None
    printed = unexpanded(foreign.get("output", ""))
    found = process.matches(options.pattern, os.getpid())[0] if options.pattern and not options.unit else ()
    # What a pattern found is judged by the unit that it runs in, where it runs in one.
    options.unit = options.unit or next(filter(None, map(process.unit_of, found)), None)
    if options.unit:
        parameters = {
            "state": "observed", "jobs": [{"unit": options.unit, "log": options.log}], "launcher": foreign or None,
            "timeout": options.timeout,
        }  # fmt: skip
        request = session.make_request(parameters, paths)
        (job,) = request["units"]
        if options.pattern:
            state = known(manager.show([job["unit"]])[job["unit"]][0], UnitState())
            group = known(manager.groups().pids(state.control_group), ())
            job["wrong_processes"] = process.wrong_matches(options.pattern, group, os.getpid())
        job["unexpanded"] = printed
        document = drive(request, paths, quiet=True)
        document["jobs"] = [quote_refusal(row, job) for row in document["jobs"]]
    else:
        row = diagnose_process(found[0]) if found else diagnose_launcher(foreign, options.pattern, printed)
        document = {"jobs": [row]}
    if options.json:
        say(json.dumps(document["jobs"][0], indent=2, sort_keys=True, ensure_ascii=False))
        options.json = False
        return verdict_status(document["jobs"])
    return report(document, options)


def quote_refusal(row: dict, job: dict) -> dict:
    """The row of a start that systemd refused, with what the manager knows of it beside the state; any other as it is.

    A proof has no time to ask the journal; who asks for a diagnosis has.
    """
    if row["code"] != "start_refused" or not manager.systemd_runs():
        return row
    unit = row["unit"]
    state, properties = manager.show([unit])[unit]
    journal = [
        line
        for run_id in dict.fromkeys((row["run_id"] or "", ""))
        for line in known(systemd.journal(unit, run_id), None) or ()
    ]
    commands = [" ".join(entry[1]) for entry in properties.get("ExecStartPre", ())]
    return prover.redactor_of(job).data(refusal(row, known(state, UnitState()).failed_command, commands, journal))


def refusal(row: dict, failed: str, commands: list, journal: list) -> dict:
    """I(row) with the command that failed, as far as it is known, and with those lines of I(journal) that say more than it. Pure."""
    remedy, evidence = row["remedy"], dict(row["evidence"])
    if UNNAMED_COMMAND in remedy and commands:
        remedy = remedy.replace(UNNAMED_COMMAND, "ExecStartPre=" + " or ".join(commands))
    elif failed and "failed_command" not in evidence:
        evidence["failed_command"] = failed
        remedy = "run it by hand: %s failed; %s" % (failed, remedy)
    lines = [line for line in dict.fromkeys(journal) if not SAYS_NOTHING.search(line)][-5:]
    if lines:
        evidence["journal"] = lines
        remedy += "; the journal says: " + " | ".join(lines)
    return dict(row, remedy=remedy, evidence=evidence)


def diagnose_process(pid: int) -> dict:
    """The row of a process that runs in no unit: it lives, and nothing tells of which launch it is or how it will end."""
    words = " ".join(process.argv(pid))
    row = {
        "host": socket.gethostname(), "unit": "pid %d" % pid, "run_id": None, "stage": "launch_proof", "code": "inconclusive", "ok": False,
        "seconds": 0.0, "remedy": "It runs in no unit, so no launch of it can be proved: start it by launchproof run, or as a job.",
        "evidence": {"pid": pid, "command": words, "outputs": list(known(process.outputs(pid, None)[0], ()))}, "also_observed": [],
    }  # fmt: skip
    return Redactor().data(row)


def diagnose_launcher(foreign: dict, pattern: str | None, printed: tuple) -> dict:
    """The row of a launch of which nothing is known but its launcher: there is no unit to look at."""
    now = ledger.boottime()
    facts = Facts(
        unit=NO_UNIT,
        at=now,
        wrong_processes=process.matches(pattern, os.getpid())[1] if pattern else (),
        unexpanded=printed,
        host=socket.gethostname(),
    )
    spec = validate({"launcher": foreign} if foreign else {})
    answer = decide(Baseline(taken_at=now), facts, spec, now)
    if isinstance(answer, Verdict):
        return Redactor().data(render.row(answer))
    why, said = launcher.not_run(spec.launcher) if spec.launcher else ("", "")
    if why:
        row = {
            "host": facts.host, "unit": "the launcher", "run_id": None, "stage": "launch_proof", "code": "exited_nonzero", "ok": False,
            "seconds": 0.0, "remedy": why + (" (%s)" % said if said else ""),
            "evidence": {"exit": {"how": "exit status %d" % spec.launcher.rc}, "said": said}, "also_observed": [],
        }  # fmt: skip
        return Redactor().data(row)
    missing = ["--launcher-" + name for name in ("script", "output", "rc") if name not in foreign]
    raise session.SessionError(
        "the launcher's evidence explains nothing: name the unit%s"
        % (", or give " + " and ".join(missing) if missing else "")
    )


def positive(text: str) -> float:
    """A number of seconds on the command line."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("%r is no number of seconds above 0" % text)
    return value


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="launchproof", description="Start jobs as units and prove that they work.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--json", action="store_true", help="print the verdict as JSON")
    out.add_argument("--junit", action="store_true", help="print the verdict as JUnit XML")
    out.add_argument("--quiet", action="store_true", help="no live lines")
    foreign = argparse.ArgumentParser(add_help=False)
    foreign.add_argument(
        "--launcher-script",
        metavar="FILE",
        help="the shell text that was to launch the job; - reads it from standard input",
    )
    foreign.add_argument("--launcher-rc", type=int, metavar="N", help="its exit status as the caller saw it")
    foreign.add_argument("--launcher-output", metavar="FILE", help="what it printed")
    foreign.add_argument("--launcher-end-mark", metavar="TEXT", help="what its last command would have printed")
    one = commands.add_parser(
        "prove", parents=[out, foreign], help="prove units, without starting or stopping anything"
    )
    one.add_argument("units", nargs="*", metavar="UNIT", help="default: every job delivered to this machine")
    one.add_argument(
        "--state", choices=["observed", "awaited", "started", "restarted"], default="observed",
        help="awaited: expect a start that somebody else makes from now on; started, restarted: make it",
    )  # fmt: skip
    one.add_argument("--proof", metavar="FILE", help="proof spec as JSON, instead of the delivered job's")
    one.add_argument("--log", metavar="FILE", help="the log, where the unit does not name it")
    one.add_argument("--timeout", type=positive, metavar="S", help="hard end of the proof")
    one.set_defaults(function=prove)
    why = commands.add_parser(
        "diagnose", parents=[out, foreign], help="say what is wrong now, of a unit or of a foreign launcher"
    )
    why.add_argument("unit", nargs="?", metavar="UNIT")
    why.add_argument("--pattern", metavar="P", help="command-line pattern by which the job was looked for")
    why.add_argument("--log", metavar="FILE", help="the log, where the unit does not name it")
    why.add_argument("--timeout", type=positive, default=5.0, metavar="S", help="how long to look (default: 5)")
    why.set_defaults(function=diagnose)
    new = commands.add_parser(
        "run",
        parents=[out],
        help="run a command as a unit of its own and prove it; a run of the same name is stopped first, its log is kept",
    )
    new.add_argument("--name", required=True, help="name of the unit")
    new.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="set a variable; without a value, hand yours on: a secret should not be on a command line",
    )  # fmt: skip
    new.add_argument("--gpu", action="append", default=[], metavar="UUID|INDEX", help="sets CUDA_VISIBLE_DEVICES")
    new.add_argument("--user", default="root")
    new.add_argument("--directory", default=".", help="working directory (default: this one)")
    new.add_argument("--required", action="append", default=[], metavar="REGEX", help="a line that must come")
    new.add_argument("--progress", metavar="REGEX", help=r"progress with a named group, e.g. 'step=(?P<step>\d+)'")
    new.add_argument(
        "--done", metavar="REGEX", help="line that says that the work is complete, for a command that ends"
    )
    new.add_argument("--proof", metavar="FILE", help="proof spec as JSON")
    new.add_argument("--timeout", type=positive, metavar="S", help="hard end of the proof; the command itself goes on")
    new.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    new.set_defaults(function=run)
    cards = commands.add_parser("gpus", help="every GPU of this machine and who uses it, containers included")
    cards.add_argument("--json", action="store_true", help="the same as JSON")
    cards.add_argument("--self-test", action="store_true", help="make a CUDA context to see whose pids NVML lists here")
    cards.add_argument(
        "--publish", metavar="CONTAINER",
        help="on a node: keep what concerns a container readable in it, for level proved_from_node",
    )  # fmt: skip
    cards.add_argument(
        "--seconds", type=float, metavar="S", help="end publishing after so long (default: with the container)"
    )
    cards.set_defaults(function=gpus.main)
    boot = commands.add_parser("up", help="start all jobs with autostart, at the boot of a machine without systemd")
    boot.set_defaults(function=up)
    stay = commands.add_parser("watch", help="prove without an end: print each change until it is stopped")
    stay.add_argument("units", nargs="*", metavar="UNIT", help="default: every job delivered to this machine")
    stay.add_argument("--json", action="store_true", help="one JSON row a line")
    stay.add_argument("--textfile", metavar="FILE", help="Prometheus text file to keep up to date")
    stay.set_defaults(function=watch)
    return top


def main(argv: list) -> int:
    if argv[:1] in (["begin-run"], ["end-run"]):
        return ledger.main(argv)
    if argv[:1] == ["run-job"]:
        return runner.main(argv)
    if argv[:1] == ["prover"]:
        return prover.main(argv[1])
    options = parser().parse_args(argv)
    try:
        return options.function(options, own_paths(dict(os.environ)))
    except (session.SessionError, systemd.SystemdError, adhoc.AdhocError, SpecError, ValueError) as error:
        say("launchproof: %s" % error, sys.stderr)
        return BLIND
    except OSError as error:
        where = "%s: " % error.filename if error.filename else ""
        say("launchproof: %s%s" % (where, error.strerror or error), sys.stderr)
        return BLIND
    except KeyboardInterrupt:  # the detached prover goes on
        return 130
