# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
r"""The fault matrix as data: what is done to a real unit in a real container, and the code that must come out.

A case is a unit, a program, a proof spec and what happens before and during the proof.  ``fact`` is a shell test that
shows, without the prover, that the fault (or the health) is really there: a case whose fact fails is a broken case.

In every shell text: ``$UNIT`` the unit, ``$NAME`` the case, ``$DIR`` its folder, ``$LOG`` the log the proof reads,
``prop KEY`` a property of the unit, ``died_with STATUS`` whether its main process or its pre-command ended so,
``restarted N`` whether systemd has restarted it N times,
``until_ok COMMAND...`` repeats until it succeeds, for 15 s at most.

Styles of a case's unit:

- ``job``: as role job writes it: a run folder by invocation, a death certificate, ``append:`` into the run's own log.
- ``foreign``: somebody else's unit, one log file for all runs, nothing of ours in it.
- ``journal``: somebody else's unit without any log file.

Modes:

- ``start``: the prover is armed and starts the unit itself.
- ``prove``: the prover is armed and expects a start that somebody else makes (``during``).
- ``observe``: what runs already is looked at.
- ``diagnose``: ``launchproof diagnose`` is asked about the unit, with ``arguments``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STEP = {"pattern": r"ev=step step=(?P<step>\d+)", "within": 10}
RANKS = {"pattern": r"ev=step step=(?P<step>\d+) rank=(?P<rank>\d+)", "ranks": 2, "within": 10}
DONE = {"pattern": r"ev=exit code=0 reason=done"}
TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    main()
ValueError: shapes (3,4) and (5,6) not aligned
"""


def steps(first: int = 1, every: float = 0.3, more: str = "") -> str:
    """A program that prints one step line every ``every`` seconds and never ends."""
    return f"""#!/usr/bin/python3 -u
import itertools, os, sys, time
for i in itertools.count({first}):
    print(f"ev=step step={{i}} loss={{9 / i:.3f}}")
    {more or "pass"}
    time.sleep({every})
"""


def bash(text: str) -> str:
    """A bash program."""
    return "#!/bin/bash\n" + text.strip() + "\n"


def python(text: str, flags: str = "") -> str:
    """A python program; ``flags`` such as -u go to the interpreter."""
    return f"#!/usr/bin/python3 {flags}".rstrip() + "\n" + text.strip() + "\n"


@dataclass(frozen=True)
class Case:
    """One induced fault, or one healthy job that looks ill (``expected`` begins with ok_ or is completed)."""

    name: str
    expected: str
    induced_by: str  # one sentence for people: goes into the report and the docs
    program: str = steps()  # text of the file ExecStart runs; "" makes no file
    unit: str = ""  # more lines for [Unit]
    service: str = ""  # more lines for [Service]; a later line wins
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)  # in the job's secrets file; may be in nothing that is said
    needs: str = ""  # a program of this machine that the container has to have, too
    exec_start: str = "/opt/cases/{name}/run"
    unit_text: str | None = None  # the whole unit file instead; "" makes none
    units: dict[str, str] = field(default_factory=dict)  # other unit files by name
    style: str = "job"
    mode: str = "start"
    before: str = ""  # shell, before the baseline is taken
    during: str = ""  # shell, from the moment the prover has started the unit (or is armed, in mode prove)
    fact: str = "true"  # shell, after the verdict
    after: str = ""  # shell, undoes what ``before`` and ``during`` did; then the unit is stopped
    log: str = ""  # the declared log, where it is neither the run's own nor the foreign style's default
    proof: dict = field(default_factory=dict)
    launcher: dict = field(default_factory=dict)
    arguments: str = ""  # of launchproof diagnose, as a shell text
    timeout: float = 25  # s, hard end of the proof
    alone: bool = False  # it disturbs the whole machine: runs after all others, by itself
    nested: str = ""  # the cause that crash_loop must nest
    evidence: tuple[str, ...] = ()  # texts that must be in the evidence or the remedy

    @property
    def unit_name(self) -> str:
        """The systemd unit of this case."""
        return f"case-{self.name}.service"

    @property
    def healthy(self) -> bool:
        """Whether any code but a success would be a false alarm."""
        return self.expected.startswith("ok_") or self.expected == "completed"


FULL = "mkdir -p /mnt/$NAME; mount -t tmpfs -o size=64k none /mnt/$NAME; cat /dev/zero > /mnt/$NAME/fill || true"
CHATTER = """\
[rank0]:[I ProcessGroupNCCL.cpp:905] [PG 0 Rank 0] ProcessGroupNCCL initialization options: size: 2, TIMEOUT(ms): 600000
NCCL version 2.21.5+cuda12.4
NCCL INFO NCCL_TIMEOUT set by environment to 1800
UserWarning: torch.utils.checkpoint: CUDA errors are reported asynchronously
WARNING: 0 exceptions, 0 errors; errors_total=0 cuda_errors=0 oom_retries=0
Error: 0.013 (validation), best error: 0.011
"""
# A bucket of its own: an S3 server on a folder.
BUCKET = """
mkdir -p $DIR/s3/bucket
systemd-run -q --unit=$NAME-s3 rclone serve s3 --dir-cache-time 0s --addr 127.0.0.1:{port} --auth-key key-of-case,secret-of-case $DIR/s3
until_ok bash -c '</dev/tcp/127.0.0.1/{port}'"""
LOST = """
ssh: connect to host 198.51.100.7 port 40022: Connection refused
lost connection
"""

FAULTS = [
    # --- the unit itself -------------------------------------------------------------------------------------------
    Case("no-unit", "unit_not_found", "no such unit file", program="", unit_text="",
         fact='[ "$(prop LoadState)" = not-found ]', evidence=("case-no-unit.service",)),
    Case("relative-exec", "unit_invalid", "ExecStart= with a relative path", exec_start="./run.sh --now",
         fact='[ "$(prop LoadState)" = bad-setting ]'),
    Case("no-exec", "unit_invalid", "a [Service] without ExecStart=", unit_text="[Service]\nType=exec\n", program="",
         fact='[ "$(prop LoadState)" = bad-setting ]'),
    Case("masked", "unit_invalid", "the unit is masked", program="", unit_text="", alone=True,
         before="ln -sf /dev/null /etc/systemd/system/$UNIT; systemctl daemon-reload",
         fact='[ "$(prop LoadState)" = masked ]'),
    Case("no-environment-file", "start_refused", "EnvironmentFile= names a file that is not there",
         service="EnvironmentFile=/etc/case/absent.env", fact='[ "$(prop Result)" = resources ]',
         evidence=("/etc/case/absent.env",)),
    Case("failed-dependency", "start_refused", "a unit in Requires= fails to start",
         unit="Requires=case-dependency.service\nAfter=case-dependency.service",
         units={"case-dependency.service": "[Service]\nType=oneshot\nExecStart=/bin/false\n"},
         fact='systemctl is-failed case-dependency.service && [ "$(prop Result)" = success ] && ! [ -s $LOG ]',
         evidence=("case-dependency.service",)),
    Case("pre-command-fails", "start_refused", "ExecStartPre= fails", service="ExecStartPre=/bin/false",
         fact='prop ExecStartPre | grep -q "path=/bin/false.*status=1 " && ! [ -s $LOG ]', evidence=("/bin/false",)),
    Case("condition-path", "condition_skipped", "ConditionPathExists= of a path that is not there",
         unit="ConditionPathExists=/etc/case/go", fact='! systemctl is-active $UNIT && ! [ -s $LOG ]'),
    Case("assert-path", "condition_skipped", "AssertPathExists= of a path that is not there",
         unit="AssertPathExists=/etc/case/go", fact='! systemctl is-active $UNIT && ! [ -s $LOG ]'),
    Case("exec-condition", "condition_skipped", "ExecCondition= says no", service="ExecCondition=/bin/false",
         fact='! systemctl is-active $UNIT && ! [ -s $LOG ]'),
    # --- launchers -------------------------------------------------------------------------------------------------
    Case("launcher-killed-itself", "launcher_self_killed", "the launcher's pkill -f matched the launcher", mode="prove",
         launcher={"rc": 137, "output": "", "end_mark": "Launched", "script":
                   "pkill -9 -f '[c]ase-x.py' || true\nnohup python3 case-x.py > x.log 2>&1 &\nsleep 1\n"
                   "pgrep -af case-x.py\necho Launched\n"},
         during="""
cat > $DIR/launch <<'L'
pkill -9 -f '[c]ase-x.py' || true
nohup python3 case-x.py > x.log 2>&1 &
sleep 1
pgrep -af case-x.py
echo Launched
L
bash -c "$(cat $DIR/launch)"; echo $? > $DIR/rc""",
         fact='[ "$(cat $DIR/rc)" = 137 ] && [ "$(prop ActiveState)" = inactive ]', evidence=("case-x.py",)),
    Case("launcher-lost", "launcher_not_delivered", "ssh could not connect: 255 and no end mark", mode="prove",
         launcher={"rc": 255, "output": LOST, "end_mark": "Launched", "script": "systemctl start x; echo Launched\n"},
         fact='[ "$(prop ActiveState)" = inactive ]'),
    Case("launcher-typo", "launcher_syntax", "the launcher script does not parse", mode="prove",
         launcher={"rc": 2, "output": "bash: -c: line 2: syntax error: unexpected end of file", "end_mark": "Launched",
                   "script": "for i in 0 1; do systemctl start x@$i\necho Launched\n"},
         during="bash -c 'for i in 0 1; do systemctl start x@$i\necho Launched' ; echo $? > $DIR/rc",
         fact='[ "$(cat $DIR/rc)" = 2 ] && [ "$(prop ActiveState)" = inactive ]'),
    Case("nobody-started-it", "never_launched", "nothing starts the unit", mode="prove",
         proof={"deadlines": {"start": 2}},
         fact='[ "$(prop ActiveState)" = inactive ] && [ -z "$(prop InvocationID)" ]'),
    Case("old-run-lives", "previous_run_alive", "the launcher's start is a no-op: the run before still runs",
         mode="prove", before="systemctl start $UNIT", during="systemctl start $UNIT",
         proof={"deadlines": {"start": 2}}, fact="systemctl is-active $UNIT"),
    Case("look-finds-itself", "wrong_process", "a check by pgrep -f finds nothing but the shell that asks", mode="diagnose",
         arguments="--pattern case-train.py", fact='[ "$(prop ActiveState)" = inactive ]', evidence=("bash -c",)),
    Case("look-prints-its-glob", "glob_unexpanded", "a look at the shards' logs prints its own pattern", mode="diagnose",
         before="ls /var/log/cases/gone_gpu*.log > $DIR/printed 2>&1 || true", arguments="--launcher-output $DIR/printed",
         fact='[ "$(prop ActiveState)" = inactive ]', evidence=("gone_gpu*.log",)),
    # --- crash loops -----------------------------------------------------------------------------------------------
    Case("loop-exit-1", "crash_loop", "exit 1 at once with Restart=always", bash("echo starting; exit 1"),
         service="Restart=always\nRestartSec=200ms\nStartLimitBurst=100", unit="StartLimitIntervalSec=0",
         fact="until_ok restarted 2", nested="exited_nonzero"),
    Case("loop-gave-up", "crash_loop", "a crash loop that trips the start limit", bash("echo starting; exit 3"),
         service="Restart=on-failure\nRestartSec=100ms", unit="StartLimitIntervalSec=60\nStartLimitBurst=3",
         fact='until_ok systemctl is-failed $UNIT', nested="exited_nonzero"),
    Case("loop-203", "crash_loop", "the program is missing, with Restart=always", program="",
         exec_start="/opt/cases/absent", service="Restart=always\nRestartSec=200ms", unit="StartLimitIntervalSec=0",
         fact="until_ok restarted 2", nested="setup_failed"),
    Case("loop-killed", "crash_loop", "killed by SIGKILL after each start", bash("echo starting; kill -9 $$"),
         service="Restart=always\nRestartSec=200ms", unit="StartLimitIntervalSec=0",
         fact="until_ok restarted 2", nested="killed_by_signal"),
    # --- setup -----------------------------------------------------------------------------------------------------
    Case("no-folder", "setup_failed", "WorkingDirectory= is not there (200)", service="WorkingDirectory=/opt/absent",
         fact='died_with 200', evidence=("200", "/opt/absent")),
    Case("no-program", "setup_failed", "the program is not there (203)", program="", exec_start="/opt/cases/absent",
         fact='[ "$(prop ExecMainStatus)" = 203 ]', evidence=("203", "/opt/cases/absent")),
    Case("not-executable", "setup_failed", "the program is not executable (203)", before="chmod 644 $DIR/run",
         fact='[ "$(prop ExecMainStatus)" = 203 ]', evidence=("203",)),
    Case("bad-shebang", "setup_failed", "the interpreter in the first line is not there (203)",
         "#!/opt/venv/bin/python\nprint(1)\n", fact='[ "$(prop ExecMainStatus)" = 203 ]', evidence=("203",)),
    Case("no-log-folder", "setup_failed", "StandardOutput= into a folder that is not there (209)", style="foreign",
         log="/var/log/absent/out.log",
         fact='[ "$(prop ExecMainStatus)" = 209 ]', evidence=("209", "/var/log/absent")),
    Case("no-user", "setup_failed", "User= does not exist (217)", service="User=nobody-of-that-name",
         fact='died_with 217', evidence=("217", "nobody-of-that-name")),
    Case("no-bind-source", "setup_failed", "BindPaths= of a folder that is not there (226)",
         service="BindPaths=/opt/absent:/mnt", fact='died_with 226', evidence=("226",)),
    # --- the log's place -------------------------------------------------------------------------------------------
    Case("log-full", "log_unwritable", "the log's file system is full", style="foreign",
         before=FULL,
         program=python("""
import sys, time
while True:
    try:
        print("ev=step step=1"); sys.stdout.flush()
    except OSError:
        pass
    time.sleep(0.2)"""),
         log="/mnt/log-full/out.log", proof={"deadlines": {"first_log": 5}},
         fact='[ "$(df --output=avail $(dirname $LOG) | tail -1)" -eq 0 ] && ! [ -s $LOG ]',
         after="umount -l /mnt/$NAME"),
    Case("log-full-dies", "log_unwritable", "the log's file system is full and the job dies of it", style="foreign",
         before=FULL,
         program=python('print("ev=step step=1")', "-u"), log="/mnt/log-full-dies/out.log",
         proof={"deadlines": {"first_log": 5}},
         fact='[ "$(df --output=avail $(dirname $LOG) | tail -1)" -eq 0 ] && ! [ -s $LOG ]',
         after="umount -l /mnt/$NAME"),
    Case("log-read-only", "log_unwritable", "the log's file system is read-only (209)", style="foreign",
         before="mkdir -p /mnt/$NAME; mount -t tmpfs -o size=64k none /mnt/$NAME; mount -o remount,ro /mnt/$NAME",
         log="/mnt/log-read-only/out.log",
         fact='[ "$(prop ExecMainStatus)" = 209 ]', after="umount -l /mnt/$NAME"),
    Case("log-no-inodes", "log_unwritable", "the log's file system has no inode left (209)", style="foreign",
         before="mkdir -p /mnt/$NAME; mount -t tmpfs -o nr_inodes=2 none /mnt/$NAME; touch /mnt/$NAME/last",
         log="/mnt/log-no-inodes/out.log",
         fact='[ "$(prop ExecMainStatus)" = 209 ]', after="umount -l /mnt/$NAME"),
    Case("log-not-ours", "log_unwritable", "the job's user may not write the log that it opens itself",
         python("""
import logging, os, time
try:
    logging.basicConfig(filename=os.environ["LOG"])
except PermissionError:
    os._exit(1)"""),
         service="User=nobody", before="install -d -m 700 /var/log/cases/private", log="/var/log/cases/private/app.log",
         fact='[ "$(prop ExecMainStatus)" = 1 ] && ! [ -e $LOG ]', evidence=("nobody", "/var/log/cases/private")),
    # --- memory ----------------------------------------------------------------------------------------------------
    Case("oom", "oom_killed", "the main process goes over MemoryMax=",
         python('print("loading")\nx = bytearray(200 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1', "-u"),
         service="MemoryMax=40M", proof={"process": {"stable_for": 6}},  # near its limit it lives on for seconds
         fact='case "$(prop Result)/$(prop ExecMainStatus)" in signal/9 | oom-kill/*) ;; *) false ;; esac'),
    Case("oom-wrapped", "oom_killed", "a child goes over MemoryMax= and the shell around it says exit $?",
         bash("echo loading\n/usr/bin/python3 -c 'x = b\"1\" * (200 << 20)'\nexit $?"), service="MemoryMax=40M",
         proof={"process": {"stable_for": 6}},
         fact='[ "$(prop ExecMainStatus)" = 137 ] || [ "$(prop Result)" = oom-kill ]'),
    # --- systemd's own limits --------------------------------------------------------------------------------------
    Case("never-ready", "start_timeout", "Type=notify and READY=1 never comes",
         service="Type=notify\nTimeoutStartSec=3", fact='[ "$(prop Result)" = timeout ]'),
    Case("time-limit", "runtime_limit", "RuntimeMaxSec= is over before the proof is", steps(every=1),
         service="RuntimeMaxSec=2", proof={"process": {"stable_for": 6}}, fact='[ "$(prop Result)" = timeout ]'),
    Case("no-keep-alive", "watchdog", "WatchdogSec= and no keep-alive",
         python("""
import os, socket, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", chr(0)))
print("ready")
time.sleep(600)""", "-u"),
         service="Type=notify\nWatchdogSec=1", proof={"process": {"stable_for": 6}},
         fact='[ "$(prop Result)" = watchdog ]'),
    # --- signals ---------------------------------------------------------------------------------------------------
    Case("sigkill", "killed_by_signal", "SIGKILL from outside",
         during='until_ok grep -q step=2 $LOG; systemctl kill -s KILL $UNIT', proof={"process": {"stable_for": 8}},
         fact='[ "$(prop Result)" = signal ] && [ "$(prop ExecMainStatus)" = 9 ]', evidence=("KILL",)),
    Case("sigterm", "killed_by_signal", "SIGTERM from outside: systemd calls it a success",
         during='until_ok grep -q step=2 $LOG; kill $(prop MainPID)', proof={"process": {"stable_for": 8}},
         fact='[ "$(prop Result)" = success ] && ! systemctl is-active $UNIT', evidence=("TERM",)),
    Case("stop-before-main", "killed_by_signal", "somebody stops it while ExecStartPre= still works",
         service="ExecStartPre=/bin/sleep 20",
         during='starting() { [ "$(prop SubState)" = start-pre ]; }; until_ok starting; sleep 1; systemctl stop $UNIT',
         fact='prop ExecStartPre | grep -q "path=/bin/sleep.*code=killed" && ! systemctl is-active $UNIT',
         evidence=("was asked to stop", "ExecStartPre=/bin/sleep 20")),
    Case("sigkill-wrapped", "killed_by_signal", "a shell passes its child's SIGKILL on as exit 137",
         bash("echo go\nbash -c 'kill -9 $$'\nexit $?"), fact='[ "$(prop ExecMainStatus)" = 137 ]'),
    Case("sighup", "killed_by_signal", "SIGHUP: systemd calls it a success",
         bash("echo go\ntrap - HUP\nkill -HUP $$"), fact='[ "$(prop Result)" = success ]'),
    Case("segfault", "killed_by_signal", "SIGSEGV without a core file",
         python("import os, signal\nprint('go', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"),
         service="LimitCORE=0", fact='[ "$(prop Result)" = signal ]'),
    Case("core", "core_dumped", "SIGABRT with a core file", python("import os\nprint('go', flush=True)\nos.abort()"),
         service="LimitCORE=infinity", fact='[ "$(prop Result)" = core-dump ]'),
    # --- ends ------------------------------------------------------------------------------------------------------
    Case("traceback", "crashed_traceback", "an uncaught exception",
         python('print("ev=step step=1")\nraise ValueError("shapes do not match")', "-u"),
         fact='[ "$(prop ExecMainStatus)" = 1 ] && grep -q Traceback $LOG',
         evidence=("ValueError: shapes do not match",)),
    Case("traceback-exit-0", "crashed_traceback", "an uncaught exception behind `|| true`",
         bash("python3 -c 'raise RuntimeError(\"no batch\")' || true"), fact='grep -q RuntimeError $LOG',
         evidence=("RuntimeError: no batch",)),
    Case("traceback-in-pipe", "crashed_traceback", "an uncaught exception behind a pipe into tee: exit 0",
         bash("python3 -c 'raise RuntimeError(\"no batch\")' 2>&1 | tee $DIR.copy"),
         fact='grep -q RuntimeError $LOG && [ "$(prop Result)" = success ]', evidence=("RuntimeError: no batch",)),
    Case("traceback-done-line", "crashed_traceback", "an exit handler prints the done line after the traceback",
         python("""
import atexit
atexit.register(lambda: print("ev=exit code=0 reason=done", flush=True))
print("ev=step step=1")
raise KeyError("hidden_states")""", "-u"), proof={"progress": STEP, "done": DONE}, fact='grep -q KeyError $LOG'),
    Case("state-dict", "crashed_traceback", "an exception whose message has 300 lines: a checkpoint of another shape",
         python("""
print("ev=step step=1")
raise RuntimeError("Error(s) in loading state_dict for Model:" + "".join(f"\\n\\tsize mismatch for layers.{i}" for i in range(300)))""", "-u"),
         fact='died_with 1 && grep -q "mismatch for layers.299" $LOG', evidence=("ended with 'RuntimeError: Error(s) in loading state_dict",)),
    Case("ranks-interleaved", "crashed_traceback", "two ranks print their tracebacks at the same time, line by line",
         python(f"""
import sys
for line in {TRACEBACK!r}.splitlines():
    print(f"[rank0]: {{line}}\\n[rank1]: {{line}}")
sys.exit(1)""", "-u"), fact='died_with 1 && grep -q "rank1.*ValueError" $LOG', evidence=("[rank1]: ValueError: shapes",)),
    Case("cuda-oom-exit-0", "crashed_traceback", "CUDA out of memory, caught, and exit 0",
         python("""
print("ev=step step=1")
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")""", "-u"), proof={"progress": STEP, "done": DONE},
         fact='[ "$(prop Result)" = success ] && [ "$(prop ExecMainStatus)" = 0 ]', evidence=("CUDA out of memory",)),
    Case("silent-exit", "died_before_log", "/bin/false", program="", exec_start="/bin/false",
         fact='[ "$(prop ExecMainStatus)" = 1 ] && ! [ -s $LOG ]', evidence=("/bin/false",)),
    Case("own-exit-217", "died_before_log", "the program itself exits 217 at once, as systemd does where it cannot set up",
         bash("exit 217"), style="foreign", fact='died_with 217 && ! journalctl -q -u $UNIT | grep -q "Failed at step"',
         evidence=("run it by hand",)),
    Case("silent-exit-late", "died_before_log", "exit 3 after a second, without a word", bash("sleep 1; exit 3"),
         fact='[ "$(prop ExecMainStatus)" = 3 ] && ! [ -s $LOG ]'),
    Case("usage", "exited_nonzero", "exit 64 with a usage text", bash("echo 'usage: train --data DIR'; exit 64"),
         fact='[ "$(prop ExecMainStatus)" = 64 ]', evidence=("usage: train --data DIR",)),
    Case("exit-255", "exited_nonzero", "exit 255 is no signal", bash("echo 'no licence server'; exit 255"),
         fact='[ "$(prop ExecMainStatus)" = 255 ]', evidence=("255",)),
    Case("daemonised", "exited_early", "the program puts itself into the background and exits 0",
         bash("echo launching\nsetsid nohup sleep 600 > /dev/null 2>&1 &\necho Launched"),
         fact='! systemctl is-active $UNIT && [ "$(prop Result)" = success ]'),
    Case("pipe-exit-0", "exited_early", "a pipe hides the exit code", bash("(echo loading; exit 5) | cat"),
         proof={"progress": STEP, "done": DONE}, fact='[ "$(prop Result)" = success ] && grep -q loading $LOG'),
    Case("active-exited", "exited_early", "RemainAfterExit= keeps the unit active, and nothing of it runs",
         bash("echo launching; sleep 0.5"), service="Type=oneshot\nRemainAfterExit=yes", proof={"progress": STEP, "done": DONE},
         fact='[ "$(prop ActiveState)/$(prop SubState)" = active/exited ]'),
    Case("never-notified", "exited_early", "Type=notify, exit 0 before READY=1 (Result=protocol)",
         bash("echo started and gone"), service="Type=notify", fact='[ "$(prop Result)" = protocol ]'),
    Case("no-child", "exited_early", "Type=forking, the parent exits 0 and leaves no child (Result=protocol)",
         bash("echo launching"), service="Type=forking\nPIDFile=/run/case-no-child.pid",
         fact='[ "$(prop Result)" = protocol ]'),
    Case("forking-fails", "exited_nonzero", "Type=forking, and the parent ends with 2", bash("echo no data; exit 2"),
         service="Type=forking", fact='prop ExecStart | grep -q "code=exited ; status=2 "', evidence=("no data",)),
    Case("forks-never", "start_timeout", "Type=forking, and the program stays in the foreground",
         service="Type=forking\nTimeoutStartSec=3", proof={"progress": STEP}, fact='[ "$(prop Result)" = timeout ]'),
    Case("stopped", "killed_by_signal", "somebody stops the unit during the proof", proof={"process": {"stable_for": 8}},
         during="until_ok grep -q step=2 $LOG; systemctl stop $UNIT", fact="! systemctl is-active $UNIT"),
    Case("post-command-fails", "start_refused", "ExecStartPost= fails, so systemd kills the job",
         service="ExecStartPost=/bin/sh -c 'sleep 0.5; exit 1'", fact='[ "$(prop Result)" = exit-code ]'),
    Case("no-done-line", "exited_early", "exit 0 after some steps, and no done line",
         bash("for i in 1 2 3; do echo ev=step step=$i; sleep 0.1; done"), proof={"progress": STEP, "done": DONE},
         fact='[ "$(prop Result)" = success ] && grep -q step=3 $LOG'),
    # --- alive, and yet --------------------------------------------------------------------------------------------
    Case("worker-dead", "worker_gone", "the wrapper lives, the worker has died",
         bash("python3 -c 'print(\"worker up\")' &\nwait\nexec -a wrapper sleep 600"), proof={"process": {"count": 2}},
         fact='[ "$(systemctl show -P TasksCurrent $UNIT)" = 1 ]'),
    Case("worker-zombie", "worker_gone", "the worker is a zombie that nobody reaps",
         python("""
import os, time
if os.fork() == 0:
    os._exit(1)
print("worker up", flush=True)
time.sleep(600)"""), proof={"process": {"count": 2}}, fact='ps -o stat= --ppid $(prop MainPID) | grep -q Z'),
    Case("one-restart", "restarted_in_window", "died once, restarted by systemd, fine since",
         bash("if mkdir $DIR/once 2>/dev/null; then echo first; exit 1; fi\nexec python3 -u $DIR/steps"),
         before="echo \"$STEPS\" > $DIR/steps", service="Restart=on-failure\nRestartSec=200ms",
         proof={"process": {"stable_for": 2}}, evidence=("first",),
         fact='[ "$(prop NRestarts)" = 1 ] && systemctl is-active $UNIT'),
    Case("three-of-four", "count_mismatch", "four shards declared, three write a log",
         bash("for i in 0 1 3; do (echo up; exec sleep 600) > /var/log/cases/shard$i.log & done\nwait"),
         log="/var/log/cases/shard[0-9].log", before="rm -f /var/log/cases/shard*.log",
         proof={"log": {"count": 4}, "deadlines": {"first_log": 3}},
         fact='[ "$(ls /var/log/cases/shard*.log | wc -l)" = 3 ]', evidence=("3", "4")),
    Case("cuda-oom-alive", "error_but_alive", "CUDA out of memory in the log, the process hangs on",
         python("""
import time
print("ev=step step=1")
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
time.sleep(600)""", "-u"), proof={"progress": STEP}, fact="systemctl is-active $UNIT",
         evidence=("CUDA out of memory",)),
    Case("nccl-alive", "error_but_alive", "an NCCL timeout in the log, the process hangs on",
         python("""
import time
print("ev=step step=1")
print("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)")
time.sleep(600)""", "-u"), proof={"progress": STEP}, fact="systemctl is-active $UNIT"),
    Case("declared-forbidden", "error_but_alive", "a pattern the job itself declared as forbidden",
         bash("echo ready\necho 'loss is nan'\nsleep 600"), proof={"log": {"forbidden": ["loss is nan"]},
         "progress": STEP}, fact="systemctl is-active $UNIT", evidence=("loss is nan",)),
    Case("output-to-null", "log_misrouted", "the program sends its output to /dev/null",
         bash("exec > /dev/null 2>&1\nwhile :; do echo ev=step; sleep 0.2; done"),
         proof={"deadlines": {"first_log": 3}}, fact="systemctl is-active $UNIT && ! [ -s $LOG ]",
         evidence=("/dev/null",)),
    Case("output-elsewhere", "log_misrouted", "the program writes to another file than the declared one",
         bash("exec > $DIR/elsewhere.log 2>&1\nwhile :; do echo ev=step; sleep 0.2; done"),
         proof={"deadlines": {"first_log": 3}}, fact="[ -s $DIR/elsewhere.log ] && ! [ -s $LOG ]",
         evidence=("elsewhere.log",)),
    Case("output-deleted", "log_misrouted", "the log was deleted under the running process", style="foreign",
         program=bash("rm $LOG\nwhile :; do echo ev=step; sleep 0.2; done"), proof={"deadlines": {"first_log": 3}},
         fact="systemctl is-active $UNIT && ! [ -e $LOG ]", evidence=("deleted",)),
    Case("yesterdays-log", "stale_log", "the log matches, but every line is of the run before", bash("exec sleep 600"),
         style="foreign", before="printf 'ready\\nev=step step=77\\n' > $LOG",
         proof={"log": {"required": ["ready"]}, "progress": STEP, "deadlines": {"first_log": 3}},
         fact='systemctl is-active $UNIT && grep -q step=77 $LOG'),
    Case("buffered", "silent", "python buffers what it prints: CPU goes on, no byte arrives",
         python("""
import time
n = 0
while True:
    n += 1
    if n % 5_000_000 == 0: print("ev=step", n)"""), service="UnsetEnvironment=PYTHONUNBUFFERED\nCPUQuota=20%",
         proof={"deadlines": {"first_log": 4}}, fact="systemctl is-active $UNIT && ! [ -s $LOG ]",
         evidence=("PYTHONUNBUFFERED",)),
    Case("left-over-writes", "silent", "a worker of the run before writes steps into the shared log, this run says nothing",
         bash("if mkdir $DIR/once 2>/dev/null; then python3 -u $DIR/steps & fi\nexec sleep 600"), style="foreign",
         before='echo "$STEPS" > $DIR/steps; systemctl start $UNIT; until_ok grep -q step=2 $LOG',
         service="KillMode=process", after="systemctl kill -s KILL $UNIT",
         proof={"progress": STEP, "deadlines": {"first_log": 3}}, fact="grep -q step=9 $LOG && systemctl is-active $UNIT"),
    Case("another-writes", "silent", "another unit writes steps into the shared log, this one says nothing",
         bash("exec sleep 600"), style="foreign",
         before='echo "$STEPS" > $DIR/steps; systemd-run -q --unit=case-another -p StandardOutput=append:$LOG '
         "python3 -u $DIR/steps; until_ok grep -q step=2 $LOG", after="systemctl stop case-another",
         proof={"progress": STEP, "deadlines": {"first_log": 3}}, fact="grep -q step=9 $LOG && systemctl is-active $UNIT"),
    Case("idle", "silent", "the process sleeps and says nothing", bash("exec sleep 600"),
         proof={"deadlines": {"first_log": 3}}, fact="systemctl is-active $UNIT && ! [ -s $LOG ]"),
    Case("loading-for-ever", "no_progress_yet", "log lines, but never a step",
         bash("while :; do echo ev=loading; sleep 0.3; done"),
         proof={"progress": STEP, "deadlines": {"first_progress": 4}},
         fact="systemctl is-active $UNIT && ! grep -q step= $LOG"),
    Case("stalls-idle", "stalled", "five steps, then nothing: asleep",
         bash("for i in 1 2 3 4 5; do echo ev=step step=$i; sleep 0.1; done; exec sleep 600"),
         proof={"progress": {**STEP, "stall_after": 3}, "process": {"stable_for": 8}},
         fact="systemctl is-active $UNIT && grep -q step=5 $LOG"),
    Case("stalls-chatting", "stalled", "five steps, then log lines without a step",
         bash("for i in 1 2 3 4 5; do echo ev=step step=$i; sleep 0.1; done\n"
              "while :; do echo waiting; sleep 0.3; done"),
         proof={"progress": {**STEP, "stall_after": 3}, "process": {"stable_for": 8}},
         fact="systemctl is-active $UNIT && grep -q step=5 $LOG"),
    Case("one-rank-stands", "stalled", "two ranks in one log: one goes on for a while, the other does not",
         bash("for i in 1 2 3; do echo ev=step step=$i rank=0; echo ev=step step=$i rank=1; sleep 0.1; done\n"
              "for i in {4..40}; do echo ev=step step=$i rank=0; sleep 0.2; done; exec sleep 600"),
         proof={"progress": {**RANKS, "stall_after": 3}, "process": {"stable_for": 8}},
         fact="systemctl is-active $UNIT && grep -q 'step=9 rank=0' $LOG && ! grep -q 'step=4 rank=1' $LOG",
         evidence=('"rank": "1"',)),
    Case("stalls-in-kernel", "uninterruptible", "every process of the unit is stuck in state D",
         # The parent of a vfork() is, until its child ends, and that one has left the unit's group.
         python("""
import ctypes, os, time
print("loading", flush=True)
if ctypes.CDLL(None).vfork() == 0:
    for root in "/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified":
        if os.path.exists(root + "/cgroup.procs"):
            os.makedirs(root + "/case-elsewhere", exist_ok=True)
            with open(root + "/case-elsewhere/cgroup.procs", "w") as group: group.write(str(os.getpid()))
    time.sleep(60)
    os._exit(0)"""),
         proof={"progress": STEP, "deadlines": {"first_log": 7, "first_progress": 7}},
         fact="grep -q ^State:.D /proc/$(prop MainPID)/status"),
    Case("stalls-own-pace", "stalled", "five steps at its own pace, then none; no threshold declared",
         bash("for i in $(seq 12); do echo ev=step step=$i; sleep 0.1; done; exec sleep 600"),
         proof={"progress": STEP, "process": {"stable_for": 15}},
         fact="systemctl is-active $UNIT && grep -q step=12 $LOG"),
    Case("no-objects", "uploads_stalled", "steps go on, the output folder does not grow", before="mkdir -p $DIR/out",
         proof={"progress": STEP, "objects": {"path": "/opt/cases/no-objects/out", "within": 3, "min_new": 1}},
         fact='systemctl is-active $UNIT && [ -z "$(ls $DIR/out)" ]'),
    Case("no-gpu", "gpu_not_engaged", "the job declares a GPU, and there is none",
         env={"CUDA_VISIBLE_DEVICES": "0"}, proof={"progress": STEP, "gpu": {"within": 3}},
         fact="systemctl is-active $UNIT && ! ls /dev/nvidia0"),
    Case("no-bucket", "observer_blind", "objects in a bucket are required, and nobody answers at its address",
         env={"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"},
         proof={"progress": STEP, "objects": {"uri": "s3://bucket/prefix", "within": 4}}, timeout=45,  # a server may be about to come back: it gets 30 s
         fact="until_ok systemctl is-active $UNIT", evidence=("s3://bucket/prefix",)),
    Case("bucket-stays-empty", "uploads_stalled", "steps go on, nothing comes to the bucket", before=BUCKET.format(port=9331),
         needs="rclone", env={"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9331"},
         secrets={"AWS_ACCESS_KEY_ID": "key-of-case", "AWS_SECRET_ACCESS_KEY": "secret-of-case"}, after="systemctl stop $NAME-s3",
         proof={"progress": STEP, "objects": {"uri": "s3://bucket/out", "within": 4}},
         fact='systemctl is-active $UNIT && ! [ -e $DIR/s3/bucket/out ]', evidence=("s3://bucket/out",)),
    Case("bucket-refuses", "observer_blind", "the bucket does not take the job's key", before=BUCKET.format(port=9332), needs="rclone",
         env={"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9332"}, after="systemctl stop $NAME-s3",
         secrets={"AWS_ACCESS_KEY_ID": "key-of-case", "AWS_SECRET_ACCESS_KEY": "secret-of-another"},
         proof={"progress": STEP, "objects": {"uri": "s3://bucket/out", "within": 4}}, fact="until_ok systemctl is-active $UNIT",
         evidence=("403",)),
    Case("time-up", "inconclusive", "the time is up before the first step may be judged",
         bash("echo loading; exec sleep 600"), proof={"progress": STEP, "deadlines": {"first_progress": 600}},
         timeout=4, fact="systemctl is-active $UNIT"),
    # --- traps ------------------------------------------------------------------------------------------------------
    Case("segfault-masked", "crashed_traceback", "the worker dies of SIGSEGV in a wrapper that ends with echo: exit 0",
         bash("bash -c 'echo loading; kill -SEGV $$'\necho finished"), service="LimitCORE=0",
         fact='[ "$(prop Result)" = success ] && grep -q finished $LOG'),
    Case("no-module", "crashed_traceback", "an import fails: the wrong environment", python("import torch_that_is_not_there"),
         fact='[ "$(prop ExecMainStatus)" = 1 ]', evidence=("ModuleNotFoundError",)),
    Case("stale-pid-file", "worker_gone", "PIDFile= names a process that ran before, and the program is gone",
         bash("(echo up; sleep 0.5; exit 1) &\ntrue"),
         before="setsid sleep 600 > /dev/null 2>&1 < /dev/null & echo $! > /run/case-stale-pid-file.pid",
         service="Type=forking\nPIDFile=/run/case-stale-pid-file.pid",
         proof={"deadlines": {"start": 6}, "process": {"stable_for": 4}},
         after="kill $(cat /run/case-stale-pid-file.pid)",
         fact='systemctl is-active $UNIT; [ "$(prop MainPID)" = "$(cat /run/case-stale-pid-file.pid)" ]'),
    Case("no-pid-file", "start_timeout", "Type=forking, and the PID file never comes", bash("python3 -u $DIR/steps &\ntrue"),
         before='echo "$STEPS" > $DIR/steps', service="Type=forking\nPIDFile=/run/case-never.pid\nTimeoutStartSec=3",
         fact='case $(prop Result) in timeout | protocol) ;; *) false ;; esac'),
    Case("pre-command-hangs", "start_timeout", "ExecStartPre= does not end",
         service="ExecStartPre=/bin/sleep 600\nTimeoutStartSec=2",
         fact='[ "$(prop Result)" = timeout ]', evidence=("ExecStartPre=/bin/sleep 600",)),
    Case("listed-exit", "exited_nonzero", "exit 3, which SuccessExitStatus= lists: systemd calls it a success",
         bash("echo no data; exit 3"),
         service="SuccessExitStatus=3", fact='[ "$(prop Result)" = success ]'),
    Case("oom-survivor-mute", "oom_killed", "a child is killed for memory behind `|| true`, and nothing goes on",
         bash("echo loading\npython3 -c 'x = b\"1\" * (200 << 20)' || true\nexec sleep 600"),
         service="MemoryMax=40M\nOOMPolicy=continue",
         proof={"progress": STEP, "process": {"stable_for": 3}}, fact="systemctl is-active $UNIT"),
    Case("oom-masked", "oom_killed", "a child is killed for memory behind `|| true`, and the job ends with 0",
         bash("echo loading\npython3 -c 'x = b\"1\" * (200 << 20)' || true\necho bye"),
         service="MemoryMax=40M\nOOMPolicy=continue",
         proof={"process": {"stable_for": 6}}, fact='[ "$(prop Result)" = success ]'),
    Case("log-fills-up", "log_unwritable", "the log's file system fills up after some steps, and the job dies of it",
         style="foreign",
         before="mkdir -p /mnt/$NAME; mount -t tmpfs -o size=64k none /mnt/$NAME",
         program=python("""
import time
for i in range(1, 99999):
    print(f"ev=step step={i} " + "x" * 4000); time.sleep(0.05)""", "-u"), log="/mnt/log-fills-up/out.log",
         proof={"progress": STEP, "process": {"stable_for": 8}},
         fact='[ "$(df --output=avail $(dirname $LOG) | tail -1)" -eq 0 ] && grep -q step=2 $LOG && ! systemctl is-active $UNIT', after="umount -l /mnt/$NAME"),
    Case("log-fills-up-alive", "log_unwritable", "the log's file system fills up after some steps, and the job goes on unheard",
         style="foreign",
         before="mkdir -p /mnt/$NAME; mount -t tmpfs -o size=64k none /mnt/$NAME",
         program=python("""
import os, time
for i in range(1, 99999):
    try: os.write(1, f"ev=step step={i} {'x' * 4000}\\n".encode())
    except OSError: pass
    time.sleep(0.05)"""), log="/mnt/log-fills-up-alive/out.log",
         proof={"progress": {**STEP, "stall_after": 4}, "process": {"stable_for": 12}},
         fact='[ "$(df --output=avail $(dirname $LOG) | tail -1)" -eq 0 ] && systemctl is-active $UNIT',
         after="umount -l /mnt/$NAME"),
    Case("output-deleted-later", "log_misrouted", "the log is deleted after some steps, and the job writes on", style="foreign",
         during="until_ok grep -q step=3 $LOG; rm $LOG",
         proof={"progress": STEP, "process": {"stable_for": 6}, "deadlines": {"first_log": 3}},
         fact="systemctl is-active $UNIT && ! [ -e $LOG ]", evidence=("deleted",)),
    Case("no-group", "setup_failed", "Group= does not exist (216)", service="Group=nogroup-of-that-name", fact="died_with 216",
         evidence=("216",)),
    Case("state-is-a-file", "setup_failed", "StateDirectory= is a file (238)",
         before="rm -rf /var/lib/case-state; touch /var/lib/case-state", service="StateDirectory=case-state",
         after="rm -f /var/lib/case-state",
         fact="died_with 238", evidence=("238",)),
    Case("no-stdin", "setup_failed", "StandardInput= of a file that is not there (208)",
         service="StandardInput=file:/opt/absent", fact="died_with 208", evidence=("208",)),
    Case("no-root", "setup_failed", "RootDirectory= is not there", service="RootDirectory=/opt/absent",
         fact="died_with 200 || died_with 210 || died_with 226"),
    Case("log-is-a-folder", "setup_failed", "StandardOutput= is a folder (209)", style="foreign", before="mkdir -p $LOG",
         log="/var/log/cases/folder.log", fact='[ "$(prop ExecMainStatus)" = 209 ]', evidence=("209",)),
    Case("no-credential", "setup_failed", "LoadCredential= of a file that is not there (243)",
         service="LoadCredential=token:/etc/case/absent", fact="died_with 243", evidence=("243",)),
    Case("condition-the-second-time", "condition_skipped", "the condition held at the start before, and not at this one",
         unit="ConditionPathExists=/etc/case/second",
         before="touch /etc/case/second; systemctl start $UNIT; until_ok grep -q step=2 $LOG; rm /etc/case/second",
         fact="! systemctl is-active $UNIT", evidence=("/etc/case/second",)),
    Case("bound-unit-stops", "killed_by_signal", "the unit is bound to another, which stops",
         unit="BindsTo=case-bound.service\nAfter=case-bound.service", units={"case-bound.service": "[Service]\nExecStart=/bin/sleep 600\n"},
         during="until_ok grep -q step=2 $LOG; systemctl stop case-bound.service", proof={"process": {"stable_for": 8}},
         fact="! systemctl is-active $UNIT"),
    Case("sigstop", "stalled", "SIGSTOP: it stands still and lives",
         during="until_ok grep -q step=3 $LOG; systemctl kill -s STOP $UNIT",
         proof={"progress": {**STEP, "stall_after": 3}, "process": {"stable_for": 8}}, after="systemctl kill -s CONT $UNIT",
         fact="grep -q '^State:.T' /proc/$(prop MainPID)/status"),
    Case("thread-died", "error_but_alive", "the thread that works has died of an exception, the main thread lives",
         python("""
import threading, time
def work():
    print("ev=step step=1")
    raise ValueError("bad batch")
threading.Thread(target=work).start()
time.sleep(600)""", "-u"), proof={"progress": {**STEP, "within": 3}},
         fact="systemctl is-active $UNIT && grep -q 'bad batch' $LOG", evidence=("bad batch",)),
    Case("torchrun-summary", "crashed_traceback", "a launcher of ranks prints its own summary after the rank's traceback",
         bash(r'''
cat <<'L'
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 7, in <module>
[rank1]: RuntimeError: mat1 and mat2 shapes cannot be multiplied
W1130 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 12 closing signal SIGTERM
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
L
exit 1'''), fact='[ "$(prop ExecMainStatus)" = 1 ]'),
    Case("loop-exit-0", "crash_loop", "it ends at once with 0, and Restart=always starts it again", bash("echo nothing to do"),
         service="Restart=always\nRestartSec=200ms", unit="StartLimitIntervalSec=0",
         fact="until_ok restarted 2", nested="exited_early"),
    Case("loop-traceback", "crash_loop", "an exception at each start",
         python('print("loading")\nraise KeyError("hidden")', "-u"), service="Restart=on-failure\nRestartSec=200ms",
         unit="StartLimitIntervalSec=0",
         fact="until_ok restarted 2", nested="crashed_traceback"),
    Case("loop-truncates", "crash_loop", "an exception at each start, into a log that each start empties", style="foreign",
         program=bash("exec > $LOG 2>&1\nexec python3 -c 'raise KeyError(\"hidden\")'"),
         service="Restart=on-failure\nRestartSec=200ms", unit="StartLimitIntervalSec=0",
         fact="until_ok restarted 2", nested="crashed_traceback"),
    Case("loop-silent", "crash_loop", "exit 1 without a word at each start", bash("exit 1"),
         service="Restart=on-failure\nRestartSec=200ms", unit="StartLimitIntervalSec=0",
         fact="until_ok restarted 2", nested="died_before_log"),
    Case("loop-oom", "crash_loop", "over MemoryMax= at each start",
         python('print("loading", flush=True)\nx = b"1" * (200 << 20)'),
         service="Restart=on-failure\nRestartSec=200ms\nMemoryMax=40M", unit="StartLimitIntervalSec=0",
         proof={"process": {"stable_for": 6}}, fact="until_ok restarted 2", nested="oom_killed"),
    Case("restart-comes-late", "exited_nonzero", "exit 1, and systemd will try again in a minute", bash("echo no data; exit 1"),
         service="Restart=on-failure\nRestartSec=60",
         # The verdict comes while the unit is still stopping.
         fact="until_ok eval '[ $(prop SubState) = auto-restart ]'"),
    Case("notify-from-child", "start_timeout", "READY=1 comes from a child, which NotifyAccess=main does not hear",
         python("""
import os, socket, time
print("ready")
if os.fork() == 0:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", chr(0)))
time.sleep(600)""", "-u"), service="Type=notify\nNotifyAccess=main\nTimeoutStartSec=3",
         fact='[ "$(prop Result)" = timeout ]'),
    Case("private-tmp", "log_misrouted", "PrivateTmp=yes: the log in /tmp is another one than the proof's",
         bash("exec > /tmp/case-private.log\nwhile :; do echo ev=step; sleep 0.2; done"),
         service="PrivateTmp=yes", log="/tmp/case-private.log", proof={"deadlines": {"first_log": 3}},
         fact="systemctl is-active $UNIT && ! [ -e $LOG ]", evidence=("PrivateTmp",)),
    Case("pre-command-writes", "silent", "a command before the start writes what the proof waits for, the job itself nothing",
         bash("exec sleep 600"), service="ExecStartPre=/bin/echo all shards loaded",
         proof={"log": {"required": ["all shards loaded"]}, "deadlines": {"first_log": 3}},
         fact="grep -q 'all shards' $LOG && systemctl is-active $UNIT"),
    Case("log-is-null", "log_misrouted", "the log is a link to /dev/null", style="foreign", log="/var/log/cases/null.log",
         before="ln -sf /dev/null $LOG",
         proof={"deadlines": {"first_log": 3}}, fact="systemctl is-active $UNIT", evidence=("/dev/null",)),
    Case("transient-exits", "exited_early", "a transient unit that ends with 0 is forgotten", mode="prove", unit_text="",
         program=bash("sleep 1; echo Launched"), style="foreign",
         during="systemd-run -q --unit=$UNIT -p StandardOutput=append:$LOG $DIR/run", fact='! systemctl is-active $UNIT',
         proof={"deadlines": {"start": 4}}),
    Case("transient-fails", "exited_nonzero", "a transient unit that ends with 1 and is collected", mode="prove", unit_text="",
         program=bash("echo no data; exit 1"), style="foreign",
         during="systemd-run -q --collect --unit=$UNIT -p StandardOutput=append:$LOG $DIR/run",
         fact='! systemctl is-active $UNIT', proof={"deadlines": {"start": 4}}),
    Case("oneshot-second-fails", "exited_nonzero", "the second command of a oneshot fails", bash("echo one"),
         service="Type=oneshot\nExecStart=/bin/sh -c 'echo two; exit 4'", fact='[ "$(prop Result)" = exit-code ]',
         evidence=("two",)),
    Case("failure-ignored", "died_before_log", "ExecStart=- hides the exit code from systemd", program="",
         exec_start="-/bin/false", fact='[ "$(prop Result)" = success ]'),
    Case("no-heartbeat", "inconclusive", "steps go on, the declared heartbeat never comes", timeout=5,
         proof={"progress": STEP, "heartbeat": {"path": "/opt/cases/no-heartbeat/beat", "max_age": 5}},
         fact="systemctl is-active $UNIT", evidence=("heartbeat",)),
    Case("launched-nothing", "never_launched", "the launcher printed Launched and exited 0, and started nothing", mode="prove",
         launcher={"rc": 0, "output": "Launched\n", "end_mark": "Launched",
                   "script": "nohup ./train.sh > x.log 2>&1 &\necho Launched\n"}, proof={"deadlines": {"start": 2}},
         fact='[ "$(prop ActiveState)" = inactive ]'),
    Case("launcher-killed-by-another", "never_launched", "the launcher died of SIGTERM and kills nothing itself", mode="prove",
         launcher={"rc": 143, "output": "", "end_mark": "Launched", "script": "systemctl start x; echo Launched\n"},
         proof={"deadlines": {"start": 2}}, fact='[ "$(prop ActiveState)" = inactive ]'),
    Case("journal-traceback", "crashed_traceback", "an uncaught exception, in the journal alone",
         python('print("loading")\nraise KeyError("hidden")', "-u"), style="journal",
         fact="journalctl -q -u $UNIT | grep -q KeyError"),
    Case("journal-silent", "silent", "nothing in the journal", bash("exec sleep 600"), style="journal",
         proof={"deadlines": {"first_log": 3}}, fact="systemctl is-active $UNIT"),
    Case("file-too-large", "killed_by_signal", "LimitFSIZE= is reached: SIGXFSZ",
         bash("while :; do echo ev=loading 0123456789012345678901234567890123456789; done"),
         service="LimitFSIZE=64K\nLimitCORE=0", fact='[ "$(prop Result)" = signal ]', evidence=("XFSZ",)),
    Case("forbidden-call", "killed_by_signal", "SystemCallFilter= forbids a call that it makes: SIGSYS",
         bash("echo go; mkdir $DIR/x"), service="SystemCallFilter=~mkdir mkdirat\nLimitCORE=0",
         fact='[ "$(prop Result)" != timeout ] && ! systemctl is-active $UNIT'),
    Case("json-never-a-step", "no_progress_yet", "JSON lines whose step is always null", python("""
import json, time
while True:
    print(json.dumps({"event": "warmup", "step": None})); time.sleep(0.2)""", "-u"),
         proof={"progress": {"json_field": "step", "within": 5}, "deadlines": {"first_progress": 3}},
         fact="systemctl is-active $UNIT"),
    Case("required-never", "inconclusive", "a required line never comes", timeout=8,
         proof={"log": {"required": ["all shards loaded"]}, "progress": STEP}, fact="systemctl is-active $UNIT",
         evidence=("all shards loaded",)),
    Case("same-step-for-ever", "stalled", "the same step again and again",
         bash("while :; do echo ev=step step=7; sleep 0.2; done"), proof={"progress": {**STEP, "within": 3}},
         fact="systemctl is-active $UNIT"),
    Case("worker-in-another-unit", "exited_early", "it starts its worker by systemd-run and ends",
         bash("systemd-run -q --unit=case-moved-inner sleep 600; echo Launched"), after="systemctl stop case-moved-inner",
         fact="systemctl is-active case-moved-inner"),
]  # fmt: skip

HEALTHY = [
    Case("h-plain", "ok_started", "a job that declares no progress", bash("echo up; exec sleep 600"),
         fact="systemctl is-active $UNIT"),
    Case("h-steps", "ok_progressing", "a job whose steps advance", proof={"progress": STEP},
         fact="systemctl is-active $UNIT && grep -q step=2 $LOG"),
    Case("h-ranks", "ok_progressing", "two ranks in one log, in step",
         bash("for ((i = 1; ; i++)); do echo ev=step step=$i rank=0; echo ev=step step=$i rank=1; sleep 0.3; done"),
         proof={"progress": RANKS}, fact="grep -q 'step=2 rank=1' $LOG"),
    Case("h-json", "ok_progressing", "JSON lines with a step field",
         python("""
import itertools, json, time
for i in itertools.count(1):
    print(json.dumps({"event": "step", "step": i}))
    time.sleep(0.3)""", "-u"), proof={"progress": {"json_field": "step", "within": 10}}, fact="grep -q step $LOG"),
    Case("h-completed", "completed", "a job that ends: exit 0 and the done line",
         bash("for i in 1 2 3; do echo ev=step step=$i; sleep 0.1; done; echo ev=exit code=0 reason=done"),
         proof={"progress": STEP, "done": DONE}, fact='[ "$(prop Result)" = success ] && grep -q reason=done $LOG'),
    Case("h-completed-at-once", "completed", "over before anyone can look: nothing was left to do",
         bash("echo ev=exit code=0 reason=done already=1"), proof={"progress": STEP, "done": DONE},
         fact='[ "$(prop Result)" = success ]'),
    Case("h-silent-loading", "ok_progressing", "silence while a model loads, then steps",
         python("import time\nt = time.monotonic()\nwhile time.monotonic() - t < 4: time.sleep(0.01)\n"
                "for i in range(9999):\n    print(f'ev=step step={i}')\n    time.sleep(0.3)", "-u"),
         proof={"progress": STEP, "deadlines": {"first_log": 12}}, fact="grep -q step=1 $LOG"),
    Case("h-late-first-step", "ok_progressing", "warm-up lines for seconds before the first step",
         bash("for i in $(seq 20); do echo ev=warmup; sleep 0.2; done\n"
              "for i in $(seq 999); do echo ev=step step=$i; sleep 0.3; done"),
         proof={"progress": STEP, "deadlines": {"first_progress": 12}}, fact="grep -q step=1 $LOG"),
    Case("h-logrotate-rename", "ok_progressing", "logrotate renames the log mid-run; the program reopens on SIGHUP",
         python("""
import os, signal, time
log = os.environ["LOG"]
def reopen(*_):
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1); os.dup2(fd, 2); os.close(fd)
signal.signal(signal.SIGHUP, reopen)
for i in range(1, 9999):
    print(f"ev=step step={i}")
    time.sleep(0.2)""", "-u"), style="foreign",
         during="""
until_ok grep -q step=4 $LOG
printf '%s {\\n rotate 3\\n create\\n postrotate\\n' $LOG > $DIR/rotate
printf 'systemctl kill -s HUP %s\\n endscript\\n}\\n' $UNIT >> $DIR/rotate
logrotate -f -s $DIR/state $DIR/rotate""",
         proof={"progress": STEP, "process": {"stable_for": 4}},
         fact="[ -s $LOG.1 ] && [ -s $LOG ] && ! grep -q step=1$ $LOG"),
    Case("h-rename-no-reopen", "ok_progressing", "the log is renamed and the program goes on writing to it",
         style="foreign", during="until_ok grep -q step=4 $LOG; mv $LOG $LOG.1", proof={"progress": STEP,
         "process": {"stable_for": 4}}, fact="[ -s $LOG.1 ] && ! [ -e $LOG ] && systemctl is-active $UNIT"),
    Case("h-copytruncate", "ok_progressing", "logrotate copies and truncates the log mid-run", style="foreign",
         during="""
until_ok grep -q step=4 $LOG
printf '%s {\\n rotate 3\\n copytruncate\\n}\\n' $LOG > $DIR/rotate
logrotate -f -s $DIR/state $DIR/rotate""",
         proof={"progress": STEP, "process": {"stable_for": 4}}, fact="[ -s $LOG.1 ] && [ -s $LOG ]"),
    Case("h-copytruncate-hole", "ok_progressing", "copytruncate under a writer without O_APPEND: a hole of NULs",
         style="foreign", service="StandardOutput=file:/var/log/cases/h-copytruncate-hole.log",
         during="until_ok grep -q step=4 $LOG; cp $LOG $LOG.1; truncate -s 0 $LOG",
         proof={"progress": STEP, "process": {"stable_for": 4}},
         fact="until_ok grep -qaP '\\x00' $LOG"),
    Case("h-operator-restart", "ok_progressing", "an operator restarts the unit during the proof",
         during="until_ok grep -q step=3 $LOG; systemctl restart $UNIT",
         proof={"progress": STEP, "process": {"stable_for": 3}},
         fact='systemctl is-active $UNIT && [ "$(prop NRestarts)" = 0 ]'),
    Case("h-cr-bars", "ok_progressing", "a progress bar: carriage returns, no line feed",
         python("""
import time
for i in range(1, 9999):
    print(f"\\r{i}/9999 [#####     ] 3.2it/s", end="")
    time.sleep(0.2)""", "-u"), proof={"progress": {"pattern": r"(?P<step>\d+)/9999", "within": 10}},
         fact="! grep -q '^2/9999' $LOG"),
    Case("h-reexec", "ok_progressing", "the program replaces itself (same process, other name)",
         bash("echo loading; sleep 1; exec python3 -u $DIR/steps"), before='echo "$STEPS" > $DIR/steps',
         proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("h-forking", "ok_progressing", "Type=forking with a PID file",
         bash("python3 -u $DIR/steps &\necho $! > /run/case-h-forking.pid"), before='echo "$STEPS" > $DIR/steps',
         service="Type=forking\nPIDFile=/run/case-h-forking.pid", proof={"progress": STEP},
         fact='[ "$(prop MainPID)" = "$(cat /run/case-h-forking.pid)" ]'),
    Case("h-oneshot-long", "ok_progressing", "Type=oneshot: activating for as long as it works",
         service="Type=oneshot", proof={"progress": STEP}, fact='[ "$(prop ActiveState)" = activating ]'),
    Case("h-oneshot-remains", "completed", "Type=oneshot with RemainAfterExit: done, and active without a process",
         bash("echo ev=step step=1; echo ev=exit code=0 reason=done"), service="Type=oneshot\nRemainAfterExit=yes",
         proof={"done": DONE}, fact='[ "$(prop ActiveState)/$(prop MainPID)" = active/0 ]'),
    Case("h-old-traceback", "ok_progressing", "the log begins with the traceback of the run before", style="foreign",
         before=f"printf %s '{TRACEBACK}' > $LOG", proof={"progress": STEP}, fact="grep -q ValueError $LOG"),
    Case("h-old-cuda-oom", "ok_progressing", "the log holds a CUDA out of memory of the run before", style="foreign",
         before="echo 'CUDA out of memory' > $LOG", proof={"progress": STEP}, fact="grep -q 'CUDA out' $LOG"),
    Case("h-error-word", "ok_progressing", "the word error in healthy lines",
         steps(more="print('mean error=0.01 errors: 0 Error rate 0.0% failed=0 no exception; traceback off')"),
         proof={"progress": STEP}, fact="grep -q 'Error rate' $LOG"),
    Case("h-library-chatter", "ok_progressing", "what libraries print about errors and timeouts while all is well",
         steps(more=f"print({CHATTER!r})"), proof={"progress": STEP}, fact="grep -q 'TIMEOUT(ms)' $LOG"),
    Case("h-cuda-oom-retried", "ok_progressing", "CUDA out of memory, caught: a smaller batch, and on it goes",
         steps(more="print('CUDA out of memory. retrying with batch 4' if i == 3 else '')"),
         proof={"progress": STEP, "process": {"stable_for": 3}}, fact="grep -q 'CUDA out of memory' $LOG"),
    Case("h-symlink-swap", "ok_progressing", "the log is a link that the program swaps to a new file, twice",
         python("""
import os, time
link = os.environ["LOG"]
for part in range(99):
    with open(f"{link}.{part}", "w", buffering=1) as log:
        os.symlink(f"{link}.{part}", link + ".new")
        os.replace(link + ".new", link)
        for i in range(5):
            log.write(f"ev=step step={part * 5 + i}\\n"); time.sleep(0.2)"""),
         log="/var/log/cases/h-symlink-swap-app.log", before="rm -f $LOG*", proof={"progress": STEP, "process": {"stable_for": 3}}, fact="[ -s $LOG.1 ]"),
    Case("h-wrapped", "ok_progressing", "a shell between systemd and the worker",
         bash("python3 -u $DIR/steps"), before='echo "$STEPS" > $DIR/steps',
         proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("h-first-thread-gone", "ok_progressing", "the main thread has ended, another one of the process works on",
         python("""
import ctypes, platform, threading, time
def work():
    for i in range(1, 9999):
        print(f"ev=step step={i}")
        time.sleep(0.3)
threading.Thread(target=work).start()
time.sleep(1)
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)""", "-u"),
         proof={"progress": STEP, "process": {"stable_for": 4}},
         fact='systemctl is-active $UNIT && [ "$(cut -d" " -f3 /proc/$(prop MainPID)/stat)" = Z ]'),
    Case("h-pre-command", "ok_progressing", "commands before and after the start print into the log too",
         service="ExecStartPre=/bin/echo preparing\nExecStartPost=/bin/echo started", proof={"progress": STEP},
         fact="grep -q step=2 $LOG && grep -q started $LOG"),
    Case("h-journal", "ok_progressing", "a unit without a log file: its output goes to the journal", style="journal",
         proof={"progress": STEP},
         fact="journalctl -q -u $UNIT | grep -q step=2"),
    Case("h-other-user", "ok_progressing", "a job of a user of its own", service="User=nobody", proof={"progress": STEP},
         fact='[ "$(stat -c %U /proc/$(prop MainPID))" = nobody ] && grep -q step=2 $LOG'),
    Case("h-slice", "ok_progressing", "the unit lies in a slice of its own", service="Slice=case-gpu.slice",
         proof={"progress": STEP}, fact='[ "$(prop Slice)" = case-gpu.slice ] && grep -q step=2 $LOG'),
    Case("h-delegated", "ok_progressing", "the worker has moved into a group below the unit's (Delegate=)",
         bash("for group in systemd$(sed -n 's/.*:name=systemd://p' /proc/self/cgroup) $(sed -n s/^0:://p /proc/self/cgroup); do\n"
              "  mkdir /sys/fs/cgroup/$group/workers && echo $$ > /sys/fs/cgroup/$group/workers/cgroup.procs && break\ndone\n"
              "exec python3 -u $DIR/steps"),
         before='echo "$STEPS" > $DIR/steps', service="Delegate=yes", proof={"progress": STEP},
         fact="grep -q /workers /proc/$(prop MainPID)/cgroup && grep -q step=2 $LOG"),
    Case("h-flood", "ok_progressing", "as many lines as it can print", steps(every=0), service="CPUQuota=40%",
         proof={"progress": STEP, "process": {"stable_for": 3}}, fact='[ "$(stat -Lc %s $LOG)" -gt 20000 ]'),
    Case("h-observed-after-restarts", "ok_progressing", "it was restarted twice, long ago; looked at now", mode="observe",
         program=bash("echo x >> $DIR/runs\n[ $(wc -l < $DIR/runs) -gt 2 ] || exit 1\nexec python3 -u $DIR/steps"),
         before='echo "$STEPS" > $DIR/steps; systemctl start $UNIT; until_ok grep -q step=3 $LOG',
         service="Restart=on-failure\nRestartSec=100ms", proof={"progress": STEP},
         fact='[ "$(prop NRestarts)" = 2 ] && systemctl is-active $UNIT'),
    Case("h-traceback-then-lines", "ok_started", "a traceback while loading, then it goes on; no progress declared",
         python(f"""
import time
print("loading")
print({TRACEBACK!r})
for i in range(9999):
    print(f"loaded shard {{i}}"); time.sleep(0.05)""", "-u"), fact="grep -q ValueError $LOG && systemctl is-active $UNIT"),
    Case("h-watchdog", "ok_progressing", "WatchdogSec= and a job that keeps it fed",
         python("""
import os, socket, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.connect(os.environ["NOTIFY_SOCKET"].replace("@", chr(0)))
s.send(b"READY=1")
for i in range(1, 9999):
    s.send(b"WATCHDOG=1"); print(f"ev=step step={i}"); time.sleep(0.3)""", "-u"), service="Type=notify\nWatchdogSec=5",
         proof={"progress": STEP, "process": {"stable_for": 6}}, fact="systemctl is-active $UNIT && grep -q step=9 $LOG"),
    Case("h-reload", "ok_progressing", "systemctl reload during the proof", service="ExecReload=/bin/sleep 1",
         during="until_ok grep -q step=2 $LOG; systemctl reload $UNIT", proof={"progress": STEP,
         "process": {"stable_for": 2}}, fact="systemctl is-active $UNIT"),
    Case("h-daemon-reexec", "ok_progressing", "systemd re-executes itself during the proof",
         during="until_ok grep -q step=2 $LOG; systemctl daemon-reexec", alone=True, proof={"progress": STEP,
         "process": {"stable_for": 4}}, fact="systemctl is-active $UNIT"),
    Case("h-linked-folder", "ok_progressing", "the log's folder is a link", before="mkdir -p /srv/logs; ln -sfn /srv/logs /var/log/linked",
         style="foreign", log="/var/log/linked/out.log", proof={"progress": STEP}, fact="grep -q step=2 /srv/logs/out.log"),
    Case("h-rotating-handler", "ok_progressing", "the program rotates its log itself, every few lines",
         python("""
import logging, logging.handlers, os, time
handler = logging.handlers.RotatingFileHandler(os.environ["LOG"], maxBytes=60, backupCount=3)
logging.basicConfig(handlers=[handler], level="INFO", format="%(message)s")
for i in range(1, 9999):
    logging.info("ev=step step=%d", i); time.sleep(0.2)"""),
         log="/var/log/cases/h-rotating-handler-app.log", before="rm -f $LOG*",
         proof={"progress": STEP, "process": {"stable_for": 3}}, fact="[ -s $LOG.2 ]"),
    Case("h-left-over-worker", "ok_progressing", "KillMode=process has left a worker of the run before in the group",
         bash("setsid sleep 600 &\nexec python3 -u $DIR/steps"), before='echo "$STEPS" > $DIR/steps; systemctl start $UNIT; '
         "until_ok grep -q step=2 $LOG", service="KillMode=process", proof={"progress": STEP},
         after="systemctl kill -s KILL $UNIT", fact='[ "$(prop TasksCurrent)" -ge 3 ]'),
    Case("h-handled-exception", "ok_progressing", "a traceback that the job handles and goes on from",
         python(f"""
import time
for i in range(1, 9999):
    print(f"ev=step step={{i}}")
    if i == 3: print({TRACEBACK!r})
    time.sleep(0.2)""", "-u"), proof={"progress": STEP, "process": {"stable_for": 3}}, fact="grep -q ValueError $LOG"),
    Case("h-ignored-exception", "completed", "exceptions that logging and Python itself ignore, after the done line, too",
         python("""
import logging
class Pool:
    def __del__(self):
        raise RuntimeError("cannot join current thread")
pool = Pool()
for i in range(1, 4):
    print(f"ev=step step={i}")
logging.warning("%d files", "many")
print("ev=exit code=0 reason=done")""", "-u"), proof={"progress": STEP, "done": DONE},
         fact='grep -q "Logging error" $LOG && grep -q "Exception ignored" $LOG && [ "$(prop ExecMainStatus)" = 0 ]'),
    Case("h-resume", "ok_progressing", "a resume from a checkpoint sets the step back",
         bash("for i in 90 91 92 40 41 42 43 44 45 46 47 48 49 50 51; do echo ev=step step=$i; sleep 0.4; done; "
              "exec sleep 600"),
         proof={"progress": {**STEP, "stall_after": 5}, "process": {"stable_for": 3}}, fact="grep -q step=40 $LOG"),
    Case("h-failed-run-before", "ok_progressing", "the run before failed, this one is good",
         bash("if mkdir $DIR/once 2>/dev/null; then echo first; exit 1; fi\nexec python3 -u $DIR/steps"),
         before='echo "$STEPS" > $DIR/steps; systemctl start $UNIT; until_ok systemctl is-failed $UNIT',
         proof={"progress": STEP}, fact="systemctl is-active $UNIT"),
    Case("h-old-run-shouts", "ok_progressing", "the run before dies loudly into the same log during the stop",
         python("""
import os, pathlib, signal, sys, time
def loud(*_):
    print("Traceback (most recent call last):\\n  File 'x'\\nKeyboardInterrupt: old run\\nCUDA error: old", flush=True)
    os._exit(1)
first = pathlib.Path(os.environ["DIR"], "first")
if not first.exists():
    first.touch(); signal.signal(signal.SIGTERM, loud)
for i in range(1, 9999):
    print(f"ev=step step={i}"); time.sleep(0.3)""", "-u"), style="foreign",
         before="systemctl start $UNIT; until_ok grep -q step=2 $LOG", proof={"progress": STEP},
         fact="grep -q 'CUDA error: old' $LOG && systemctl is-active $UNIT"),
    Case("h-own-log-file", "ok_progressing", "the program writes its log file itself, standard output stays empty",
         python("""
import logging, time
logging.basicConfig(filename="/var/log/cases/h-own-log-file-app.log", level="INFO", format="%(message)s")
for i in range(1, 9999):
    logging.info("ev=step step=%d", i); time.sleep(0.3)"""),
         log="/var/log/cases/h-own-log-file-app.log", proof={"progress": STEP},
         fact="! [ -s $OUT ] && grep -q step=2 $LOG"),
    Case("h-late-folder", "ok_progressing", "the log's folder is made by the job, seconds later",
         bash("sleep 2; mkdir -p /var/log/cases/h-late/x; exec python3 -u $DIR/steps > $LOG"),
         before='echo "$STEPS" > $DIR/steps; rm -rf /var/log/cases/h-late', log="/var/log/cases/h-late/x/out.log",
         proof={"progress": STEP, "deadlines": {"first_log": 10}}, fact="grep -q step=2 $LOG"),
    Case("h-tee", "ok_progressing", "output through a pipe into tee",
         bash("python3 -u $DIR/steps 2>&1 | tee -a $DIR/copy.log"), before='echo "$STEPS" > $DIR/steps',
         proof={"progress": STEP}, fact="grep -q step=2 $DIR/copy.log"),
    Case("h-tee-only-log", "ok_progressing", "the declared log is written by tee, not by the worker",
         bash("python3 -u $DIR/steps 2>&1 | tee -a $DIR/copy.log > /dev/null"), before='echo "$STEPS" > $DIR/steps',
         proof={"progress": STEP}, log="/opt/cases/h-tee-only-log/copy.log", fact="grep -q step=2 $LOG"),
    Case("h-notify", "ok_progressing", "Type=notify: ready only after seconds of steps",
         python("""
import os, socket, time
for i in range(1, 9999):
    print(f"ev=step step={i}"); time.sleep(0.3)
    if i == 8:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        s.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"].replace("@", chr(0)))""", "-u"),
         service="Type=notify\nTimeoutStartSec=30", proof={"progress": STEP},
         fact='[ "$(prop ActiveState)" = active ] && grep -q step=8 $LOG'),
    Case("h-undecodable", "ok_progressing", "bytes that are no UTF-8, NULs and one line of 4 MB",
         python("""
import sys, time
o = sys.stdout.buffer
o.write(b"\\xff\\xfe\\x80 caf\\xe9 \\x00\\x00\\n" + b"x" * (4 << 20) + b"\\n")
for i in range(1, 9999):
    o.write(b"\\xc3\\x28 ev=step step=%d\\n" % i); o.flush(); time.sleep(0.3)"""), proof={"progress": STEP},
         fact="grep -qa step=2 $LOG"),
    Case("h-large-old-log", "ok_progressing", "2 GB of old log before this run's first byte", style="foreign",
         before="echo 'CUDA out of memory' > $LOG; truncate -s 2G $LOG; echo >> $LOG", proof={"progress": STEP},
         fact='[ "$(stat -c %s $LOG)" -gt 2147483648 ]', after="rm -f $LOG"),
    Case("h-log-on-tmpfs", "ok_progressing", "the log lies on a tmpfs", style="foreign",
         before="mkdir -p /mnt/$NAME; mount -t tmpfs none /mnt/$NAME", log="/mnt/h-log-on-tmpfs/out.log",
         proof={"progress": STEP},
         fact="grep -q step=2 $LOG", after="umount -l /mnt/$NAME"),
    Case("h-scope", "ok_progressing", "systemd-run --scope as the command: the worker is in another group",
         bash("exec systemd-run --quiet --scope --unit=case-h-scope-inner python3 -u $DIR/steps"),
         before='echo "$STEPS" > $DIR/steps', proof={"progress": STEP},
         after="systemctl stop case-h-scope-inner.scope",
         fact="systemctl is-active case-h-scope-inner.scope && grep -q step=2 $LOG"),
    Case("h-env-i", "ok_progressing", "env -i: the process has no INVOCATION_ID",
         bash("exec env -i python3 -u $DIR/steps"),
         before='echo "$STEPS" > $DIR/steps', proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("h-child-oom", "ok_progressing", "a child is killed by the memory limit and the job goes on",
         bash("python3 -c 'x = b\"1\" * (200 << 20)'\necho $? > $DIR/rc\n"
              "exec python3 -u $DIR/steps"), before='echo "$STEPS" > $DIR/steps',
         service="MemoryMax=40M\nOOMPolicy=continue", proof={"progress": STEP, "process": {"stable_for": 3}},
         fact='[ "$(cat $DIR/rc)" = 137 ] && systemctl is-active $UNIT'),
    Case("h-workers-come-and-go", "ok_progressing", "data loaders come and go under a steady main process",
         python("""
import subprocess, time
for i in range(1, 9999):
    subprocess.run(["/bin/true"]); print(f"ev=step step={i}"); time.sleep(0.2)""", "-u"), proof={"progress": STEP},
         fact="grep -q step=3 $LOG"),
    Case("h-objects", "ok_progressing", "the output folder grows",
         steps(more="open(f'/opt/cases/h-objects/out/{i}', 'w')"),
         before="mkdir -p $DIR/out",
         proof={"progress": STEP, "objects": {"path": "/opt/cases/h-objects/out", "within": 5, "min_new": 2}},
         fact='[ "$(ls $DIR/out | wc -l)" -ge 2 ]'),
    Case("h-bucket", "ok_progressing", "the bucket fills; its keys are in the job's secrets file",
         steps(more="os.makedirs('/opt/cases/h-bucket/s3/bucket/out', exist_ok=True)\n"
                    "    open(f'/opt/cases/h-bucket/s3/bucket/out/{i}', 'w').write('x')"), before=BUCKET.format(port=9333), needs="rclone",
         env={"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9333"}, after="systemctl stop $NAME-s3",
         secrets={"AWS_ACCESS_KEY_ID": "key-of-case", "AWS_SECRET_ACCESS_KEY": "secret-of-case"},
         proof={"progress": STEP, "objects": {"uri": "s3://bucket/out", "within": 10, "min_new": 2}},
         fact='[ "$(ls $DIR/s3/bucket/out | wc -l)" -ge 2 ]'),
    Case("h-heartbeat", "ok_progressing", "a heartbeat that says that telemetry is off, and why",
         steps(more="""os.chdir('/opt/cases/h-heartbeat')
    open("new", "w").write('{"telemetry": "off: no NVML here"}')
    os.replace("new", "beat")"""),
         before="mkdir -p $DIR", proof={"progress": STEP, "heartbeat": {"path": "/opt/cases/h-heartbeat/beat", "max_age": 5}},
         fact="grep -q telemetry $DIR/beat", evidence=('"telemetry": "off: no NVML here"',)),
    Case("h-observed", "ok_progressing", "a unit that has been running for a while is looked at", mode="observe",
         before="systemctl start $UNIT; until_ok grep -q step=2 $LOG", proof={"progress": STEP},
         fact="systemctl is-active $UNIT"),
    Case("h-foreign-launcher", "ok_progressing", "somebody else starts it while the prover waits", mode="prove",
         during="systemctl start $UNIT", proof={"progress": STEP, "deadlines": {"start": 8}},
         launcher={"rc": 0, "output": "Launched\n", "end_mark": "Launched",
                   "script": "systemctl start x; echo Launched\n"},
         fact="systemctl is-active $UNIT"),
    Case("h-setsid-worker", "ok_progressing", "the worker has a session of its own, and the main process waits for it",
         bash("setsid python3 -u $DIR/steps &\nwait"), before='echo "$STEPS" > $DIR/steps', proof={"progress": STEP},
         fact="grep -q step=2 $LOG"),
    Case("h-forking-guessed", "ok_progressing", "Type=forking without a PID file: systemd guesses the main process",
         bash("python3 -u $DIR/steps &\ntrue"), before='echo "$STEPS" > $DIR/steps', service="Type=forking",
         proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("h-double-fork", "ok_progressing", "a daemon that forks twice, with a PID file", python("""
import itertools, os, time
if os.fork(): os.wait(); os._exit(0)
os.setsid()
if (pid := os.fork()):
    open("/run/case-h-double-fork.pid", "w").write(str(pid)); os._exit(0)
for i in itertools.count(1):
    print(f"ev=step step={i}"); time.sleep(0.2)""", "-u"), service="Type=forking\nPIDFile=/run/case-h-double-fork.pid",
         proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("h-idle-type", "ok_progressing", "Type=idle", service="Type=idle", proof={"progress": STEP},
         fact="grep -q step=2 $LOG"),
    Case("h-socket", "ok_progressing", "started by a connection to its socket", mode="prove",
         program=python("""
import itertools, os, time
assert os.environ["LISTEN_FDS"] == "1"
for i in itertools.count(1):
    print(f"ev=step step={i}"); time.sleep(0.2)""", "-u"),
         units={"case-h-socket.socket": "[Socket]\nListenStream=/run/case-h-socket\n"}, before="systemctl start case-h-socket.socket",
         during="python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"/run/case-h-socket\")'",
         after="systemctl stop case-h-socket.socket", proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("h-timer", "ok_progressing", "started by a timer", mode="prove", proof={"progress": STEP},
         units={"case-h-timer.timer": "[Timer]\nOnActiveSec=2\nAccuracySec=1ms\n"},
         during="systemctl start case-h-timer.timer", after="systemctl stop case-h-timer.timer", fact="grep -q step=2 $LOG"),
    Case("h-stop-post-fails", "completed", "the work is done, and a command after it fails",
         bash("echo ev=step step=1; echo ev=exit code=0 reason=done"), service="ExecStopPost=/bin/false",
         proof={"done": DONE}, fact="until_ok systemctl is-failed $UNIT"),
    Case("h-shared-log", "ok_progressing", "another unit writes into the same log", style="foreign",
         before='echo "$STEPS" > $DIR/steps; systemd-run -q --unit=case-sharing -p StandardOutput=append:$LOG '
         "python3 -u $DIR/steps; until_ok grep -q step=2 $LOG", after="systemctl stop case-sharing", proof={"progress": STEP},
         fact="systemctl is-active $UNIT"),
    Case("h-json-nested", "ok_progressing", "JSON lines, the step two levels deep, between lines that are no JSON",
         python("""
import json, time
for i in range(1, 9999):
    print("not json {")
    print("2026-11-30T00:00:00 " + json.dumps({"metrics": {"train": {"step": i}}, "loss": float("nan")}))
    time.sleep(0.2)""", "-u"), proof={"progress": {"json_field": "metrics.train.step", "within": 10}},
         fact="grep -q step $LOG"),
    Case("h-no-newline", "completed", "the last line has no end",
         bash("echo ev=step step=1; printf 'ev=exit code=0 reason=done'"), proof={"done": DONE},
         fact='[ "$(prop Result)" = success ]'),
    Case("h-start-limit-used-up", "ok_progressing", "runs before have used up the start limit",
         bash("[ $(cat $DIR/runs | wc -l) -ge 3 ] || { echo x >> $DIR/runs; exit 1; }\nexec python3 -u $DIR/steps"),
         before='echo "$STEPS" > $DIR/steps; touch $DIR/runs; systemctl start $UNIT; until_ok systemctl is-failed $UNIT',
         service="Restart=on-failure\nRestartSec=50ms", unit="StartLimitIntervalSec=60\nStartLimitBurst=3",
         proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("h-file-overwrites", "ok_progressing", "StandardOutput=file: writes over a longer log of the run before",
         style="foreign", service="StandardOutput=file:/var/log/cases/h-file-overwrites.log",
         before="seq 20000 > $LOG", proof={"progress": STEP}, fact="grep -q step=2 $LOG && grep -q 19999 $LOG"),
    Case("h-truncates-own-log", "ok_progressing", "the program opens its log anew and writes more than was there before it is looked at", python("""
import time
log = open("/var/log/cases/h-trunc-app.log", "w", buffering=1)
log.write("loaded everything\\n" + "".join(f"ev=step step={i}\\n" for i in range(30)))
for i in range(30, 9999):
    log.write(f"ev=step step={i}\\n"); time.sleep(0.2)"""), log="/var/log/cases/h-trunc-app.log", before="seq 60 > $LOG",
         proof={"log": {"required": ["loaded everything"]}, "progress": STEP}, fact="grep -q loaded $LOG"),
    Case("h-own-rotation", "ok_progressing", "the program renames its log of the run before at its start", python("""
import os, time
log = "/var/log/cases/h-own-rotation-app.log"
os.rename(log, log + ".1")
with open(log, "w", buffering=1) as out:
    for i in range(1, 9999):
        out.write(f"ev=step step={i}\\n"); time.sleep(0.2)"""), log="/var/log/cases/h-own-rotation-app.log",
         before="echo 'CUDA out of memory' > $LOG", proof={"progress": STEP}, fact="[ -s $LOG.1 ] && grep -q step=2 $LOG"),
    Case("h-dynamic-user", "ok_progressing", "DynamicUser=yes", service="DynamicUser=yes", proof={"progress": STEP},
         fact="grep -q step=2 $LOG"),
    Case("h-sandbox", "ok_progressing", "a unit in every sandbox",
         service="User=nobody\nProtectSystem=strict\nPrivateTmp=yes\nPrivateDevices=yes\nNoNewPrivileges=yes\nProtectHome=yes\n"
         "ProtectProc=invisible\nPrivateNetwork=yes\nProtectControlGroups=yes\nProtectKernelTunables=yes\nRestrictNamespaces=yes\n"
         "LockPersonality=yes\nMemoryDenyWriteExecute=yes", proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("h-transient", "ok_progressing", "somebody starts it by systemd-run", mode="prove", unit_text="", style="foreign",
         during="systemd-run -q --unit=$UNIT -p StandardOutput=append:$LOG $DIR/run",
         proof={"progress": STEP, "deadlines": {"start": 8}}, fact="grep -q step=2 $LOG"),
    Case("h-oneshot-many", "completed", "a oneshot of several commands", bash("echo one"),
         service="Type=oneshot\nExecStart=/bin/echo two\nExecStart=/bin/echo ev=exit code=0 reason=done",
         proof={"done": DONE}, fact='[ "$(prop Result)" = success ]'),
    Case("h-zombies", "ok_progressing", "children that nobody reaps yet, beside work that goes on", python("""
import os, time
for i in range(1, 9999):
    if i < 9 and os.fork() == 0: os._exit(1)
    print(f"ev=step step={i}"); time.sleep(0.2)""", "-u"), proof={"progress": STEP, "process": {"stable_for": 3}},
         fact="ps -o stat= --ppid $(prop MainPID) | grep -q Z"),
    Case("h-workers-late", "ok_progressing", "the workers come seconds later",
         bash("echo up; sleep 2; sleep 600 & sleep 600 & exec python3 -u $DIR/steps"), before='echo "$STEPS" > $DIR/steps',
         proof={"progress": STEP, "process": {"count": 3}}, fact="grep -q step=2 $LOG"),
    Case("h-daemon-reload", "ok_progressing", "the unit file changes and systemd reads it anew during the proof", alone=True,
         during="until_ok grep -q step=2 $LOG; echo '# changed' >> /etc/systemd/system/$UNIT; systemctl daemon-reload",
         proof={"progress": STEP, "process": {"stable_for": 4}}, fact="systemctl is-active $UNIT"),
    Case("h-stubborn-old-run", "ok_progressing", "the run before ignores SIGTERM and is killed",
         bash("trap '' TERM\npython3 -u $DIR/steps & wait"),
         before='echo "$STEPS" > $DIR/steps; systemctl start $UNIT; until_ok grep -q step=2 $LOG',
         service="TimeoutStopSec=2", proof={"progress": STEP}, fact="systemctl is-active $UNIT && grep -q step=2 $LOG"),
    Case("h-two-restarts", "ok_progressing", "an operator restarts the unit twice during the proof",
         during="for round in 1 2; do until_ok grep -q step=3 $LOG; systemctl restart $UNIT; done",
         proof={"progress": STEP, "process": {"stable_for": 3}}, fact="systemctl is-active $UNIT"),
    Case("h-unknown-setting", "ok_progressing", "settings that systemd does not know and warns of",
         service="MemoryMaximum=40G\nKillModus=mixed", proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("rotated-away", "log_misrouted", "long ago the log was renamed, and the program was not told", mode="observe",
         style="foreign",
         before="systemctl start $UNIT; until_ok grep -q step=2 $LOG; mv $LOG $LOG.1",
         proof={"progress": STEP, "deadlines": {"first_log": 3}}, fact="systemctl is-active $UNIT && [ -s $LOG.1 ]",
         evidence=("rotated-away.log.1",)),
    Case("h-logger", "ok_progressing", "the worker's output goes through a logger process of the unit",
         bash("python3 -u $DIR/steps | while read -r line; do echo \"$(date +%s) $line\"; done"),
         before='echo "$STEPS" > $DIR/steps', proof={"progress": STEP}, fact="grep -q step=2 $LOG"),
    Case("h-unicode", "ok_progressing", "progress in another script, with a byte order mark and CRLF", python("""
import sys, time
o = sys.stdout.buffer
o.write(b"\\xef\\xbb\\xbf")
for i in range(1, 9999):
    o.write(f"\\u8bad\\u7ec3 \\u6b65\\u9aa4={i} \\U0001f680\\r\\n".encode()); o.flush(); time.sleep(0.2)"""),
         proof={"progress": {"pattern": "步骤=(?P<step>\\d+)", "within": 10}}, fact="[ -s $LOG ]"),
    Case("h-epoch-text", "ok_progressing", "progress that is text: epoch 1/3 phase names",
         bash("for p in warmup-a warmup-b train-a train-b train-c; do echo phase=$p; sleep 0.5; done; exec sleep 600"),
         proof={"progress": {"pattern": "phase=(?P<phase>\\S+)", "within": 10}}, fact="[ -s $LOG ]"),
    Case("h-slow-stop-post", "completed", "a slow ExecStopPost= after the work is done", bash("echo ev=exit code=0 reason=done"),
         service="ExecStopPost=/bin/sleep 2", proof={"done": DONE}, fact='[ "$(prop Result)" = success ]'),
]  # fmt: skip

CASES = FAULTS + HEALTHY
# Reports of other tools' users that cases are about, see test_peers.py.
PEERS = {
    "active-exited": ("ansible 20278",),
    "bad-shebang": ("systemd 3038",),
    "buffered": ("moby 12447",),
    "cuda-oom-alive": ("EveryVoice 178",),
    "cuda-oom-exit-0": ("VIAME 146",),
    "daemonised": ("ansible 79436", "ansible 33410"),
    "h-copytruncate": ("logrotate 363",),
    "h-copytruncate-hole": ("logrotate 34",),
    "h-cr-bars": ("transformers 28683",),
    "launcher-killed-itself": ("ansible 15800",),
    "nccl-alive": ("verl 1158",),
    "no-bind-source": ("systemd 17866", "lxc 4052"),
    "no-log-folder": ("systemd 27591",),
    "pipe-exit-0": ("ansible 12903",),
    "silent-exit": ("ansible 24450",),
    "worker-zombie": ("psutil 1008",),
    "yesterdays-log": ("ansible 65282",),
}
