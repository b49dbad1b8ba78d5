# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which launchers killed themselves, and by which line; the incidents' own scripts among them."""

from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.launcher import analyse, unexpanded
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import LauncherSpec

A = (
    'pkill -9 -f "[t]rain_dflash_pipeline.py" || true; sleep 2; nohup /root/run.sh > /workspace/train_slammed5.log 2>&1 & sleep 5; '
    "pgrep -af train_dflash_pipeline.py || true; tail -n 25 /workspace/train_slammed5.log"
)
B = """rm -f extract_gpu*.log
pkill -f monitor.py
sleep 1
nohup python3 monitor.py > monitor.log 2>&1 &
for i in 0 1 2 3; do CUDA_VISIBLE_DEVICES=$i nohup python3 extract_hidden_states.py --shard $i > extract_gpu$i.log & done
echo "Launched"
"""
SSH_A = f"ssh node \"pct exec 200 -- bash -lc '{A}'\"".replace('"[t]', '\\"[t]').replace('.py" |', '.py\\" |')


@pytest.mark.parametrize(
    ("script", "rc", "mark", "pattern", "signal", "line"),
    [
        (A, 137, "", "[t]rain_dflash_pipeline.py", "SIGKILL", 1),
        (SSH_A, 137, "", "[t]rain_dflash_pipeline.py", "SIGKILL", 1),
        (A, -9, "", "[t]rain_dflash_pipeline.py", "SIGKILL", 1),
        (B, 143, "Launched", "monitor.py", "SIGTERM", 2),
        # ssh says 255, and nothing else, when a signal killed the remote shell.
        (B, 255, "Launched", "monitor.py", "SIGTERM", 2),
        (B, None, "Launched", "monitor.py", "SIGTERM", 2),
        # A later command masked the code; the missing end mark is left.
        (B, 0, "Launched", "monitor.py", "SIGTERM", 2),
        ("pkill -9 -f python; tmux new -d 'python train.py'", 137, "", "python", "SIGKILL", 1),
        ("pkill --signal KILL --full train; ./train", 137, "", "train", "SIGKILL", 1),
        ("pkill -KILL -f train.py\npython train.py", 137, "", "train.py", "SIGKILL", 1),
        ("NAME=train.py; pkill -f $NAME; python $NAME", 143, "", "train.py", "SIGTERM", 1),
        ("kill -9 $(pgrep -f train.py); python train.py", 137, "", "train.py", "SIGKILL", 1),
        ("pgrep -f train.py | xargs kill -9; python train.py", 137, "", "train.py", "SIGKILL", 1),
        ("ps aux | grep train.py | awk '{print $2}' | xargs kill -9", 137, "", "train.py", "SIGKILL", 1),
        ("killall -9 bash; python train.py", 137, "", "bash", "SIGKILL", 1),
        ("pkill -9 bash; python train.py", 137, "", "bash", "SIGKILL", 1),
        ("# stop it\nsudo pkill -f train.py 2>/dev/null || true\npython train.py", 143, "", "train.py", "SIGTERM", 2),
        ("if pgrep train; then pkill -f train.py; fi; python train.py", 143, "", "train.py", "SIGTERM", 1),
        ('echo "$(pkill -9 -f train.py)"; python train.py', 137, "", "train.py", "SIGKILL", 1),
        ("kill -9 `ps aux | grep train.py | awk '{print $2}'`", 137, "", "train.py", "SIGKILL", 1),
        # The text of a comment stands on the shell's command line as well.
        ("pkill -9 -f '[t]rain.py' # not train.py of others", 137, "", "[t]rain.py", "SIGKILL", 1),
        ('STOP="pkill -f train.py; python train.py"; ssh host "$STOP"', 143, "", "train.py", "SIGTERM", 1),
        (
            "ssh host 'bash -s' <<EOF\nbash -c '\n pkill -f train.py\n python train.py'\nEOF",
            143,
            "",
            "train.py",
            "SIGTERM",
            3,
        ),
        ("ssh -p 22 host bash -s train.py <<'EOF'\npkill -f train.py\nEOF", 143, "", "train.py", "SIGTERM", 2),
        # The outer shell's command line holds the whole text.
        ("bash -s <<EOF\npkill -f train.py\nEOF", 143, "", "train.py", "SIGTERM", 2),
        ("cat > r.sh <<EOF\npkill -f train.py\nEOF\nbash r.sh", 143, "", "train.py", "SIGTERM", 2),
    ],
)
def test_self_killed(script: str, rc: int | None, mark: str, pattern: str, signal: str, line: int) -> None:
    found = analyse(LauncherSpec(script, rc, "", mark))
    assert (found.code, found.pattern, found.signal, found.line) == ("launcher_self_killed", pattern, signal, line), (
        found
    )
    assert found.matched and found.command and not found.command.startswith("then")


@pytest.mark.parametrize(
    ("script", "rc", "output", "mark"),
    [
        # It went on to its end.
        (B, 143, "Launched", "Launched"),
        (A, 0, "", ""),
        # The pattern matches nothing on the launcher's own command line.
        ('pkill -9 -f "[t]rain.py"; systemctl start training', 137, "", ""),
        ("ps aux | grep train.py | grep -v grep | awk '{print $2}' | xargs kill -9", 137, "", ""),
        ("pkill -9 python3; nohup python3 train.py &", 137, "", ""),
        ("killall -9 python3; nohup python3 train.py &", 137, "", ""),
        ("grep -f patterns train.log; pgrep -f train.py", 137, "", ""),
        # Another signal than the pattern's own.
        ("pkill -f train.py; python train.py", 137, "", ""),
        ("systemctl restart training", 137, "", ""),
        ("", None, "", ""),
        # It is text, and runs nowhere.
        ("# never use pkill -9 -f train.py here\npython3 train.py --big", 137, "", ""),
        ("python3 train.py --big # not pkill -9 -f train.py", 137, "", ""),
        ('echo "to stop: pkill -9 -f train.py"; python3 train.py', 137, "", ""),
        ("printf '%s\\n' 'pkill -9 -f train.py' > stop.sh; python3 train.py", 137, "", ""),
        ("cat > stop.sh <<EOF\npkill -9 -f train.py\nEOF\npython3 train.py", 137, "", ""),
        ("echo it\\'s fine; echo 'x' # pkill -9 -f train.py\npython3 train.py", 137, "", ""),
        ("grep -c 'pkill -9 -f train.py' notes; man pkill; python3 train.py", 137, "", ""),
        # It runs, and no command line above it holds its pattern.
        ("ssh host bash -s <<'EOF'\nset -e\npkill -f train.py\nnohup python3 train.py &\nEOF", 143, "", ""),
        ("ssh host <<'EOF'\npkill -f train.py\nnohup python3 train.py &\nEOF\necho done", 143, "", ""),
        ("cat <<'EOF' | ssh host bash -s\npkill -f train.py\nEOF", 143, "", ""),
        ("pct exec 200 -- pkill -f train.py; pct exec 200 -- python3 train.py", 143, "", ""),
    ],
)
def test_not_self_killed(script: str, rc: int | None, output: str, mark: str) -> None:
    assert analyse(LauncherSpec(script, rc, output, mark)).code == ""


@pytest.mark.parametrize(
    ("rc", "output"),
    [
        (255, ""),
        (255, "ssh: connect to host x port 40022: Connection refused\nlost connection"),
        (255, "kex_exchange_identification: read: Connection reset by peer"),
        (1, "scp: /workspace/run.sh: Permission denied"),
        (255, "Host key verification failed."),
        (1, "Host key verification failed.\r\nlost connection"),
        (255, "root@10.0.0.5: Permission denied (publickey,password)."),
        (255, "Connection closed by 10.0.0.5 port 40022"),
        (255, "stopping\nclient_loop: send disconnect: Broken pipe"),
        (255, "mux_client_request_session: read from master failed: Broken pipe"),
        (
            12,
            "rsync: connection unexpectedly closed (0 bytes received so far) [sender]\nrsync error: error in rsync protocol data stream (code 12) at io.c(231)",
        ),
        (30, "rsync error: timeout in data send/receive (code 30) at io.c(197)"),
        (2, "Configuration file 'nodes/pve/lxc/200.conf' does not exist"),
        (255, "container '200' not running!"),
    ],
)
def test_not_delivered(rc: int, output: str) -> None:
    script = B if output else "systemctl start x"
    found = analyse(LauncherSpec(script, rc, output, "Launched"))
    assert found.code == "launcher_not_delivered" and found.said in output


@pytest.mark.parametrize(
    ("rc", "output"),
    [
        # Programs on the host say such things too.
        (1, "yes: standard output: Broken pipe"),
        (7, "curl: (7) Failed to connect to localhost port 80 after 0 ms: Connection refused"),
        (2, 'psql: error: connection to server at "db" (10.0.0.9), port 5432 failed: Connection refused'),
        (255, "Traceback (most recent call last):\nConnectionResetError: [Errno 104] Connection reset by peer"),
        (1, "Configuration file 'train.yaml' does not exist"),
        # A transport's words with a code that is not its own: the launcher went on after it.
        (3, "ssh: connect to host mirror port 22: Connection refused\nno data"),
        (1, "rsync error: timeout in data send/receive (code 30) at io.c(197)"),
        # Syntax errors that are no shell's, or not of a code that a shell gives for one.
        (3, 'psql:load.sql:3: ERROR:  syntax error at or near "FORM"'),
        (1, 'psql:load.sql:3: ERROR:  syntax error at or near "FORM"'),
        (2, "awk: line 1: syntax error at or near {"),
        (1, '  File "train.py", line 3\nSyntaxError: unexpected EOF while parsing'),
        (1, 'bash: line 1: 1+: syntax error: operand expected (error token is "+")'),
        (3, "bash: line 2: syntax error: unexpected end of file"),
        # Of a script that the launcher ran.
        (2, "/opt/start.sh: line 3: syntax error near unexpected token `fi'"),
    ],
)
def test_what_a_program_on_the_host_said_is_no_launchers_failure(rc: int, output: str) -> None:
    assert analyse(LauncherSpec("/opt/start.sh", rc, output)).code == ""


@pytest.mark.parametrize(
    ("script", "output"),
    [
        ("if x; then (", 'sh: 1: Syntax error: "(" unexpected'),
        ("echo 'x", "dash: 1: Syntax error: Unterminated quoted string"),
        ("for i in 0 1; do x", "./launch.sh: line 2: syntax error: unexpected end of file"),
        ("fi", "-bash: syntax error near unexpected token `fi'"),
        ("fi", "zsh:1: parse error near `fi'"),
        ("for i in 0 1; do x", "bash: -c: line 2: syntax error: unexpected end of file"),
        ("echo 'x", "bash: -c: line 1: unexpected EOF while looking for matching `''"),
        ('echo "x', ""),
    ],
)
def test_syntax(script: str, output: str) -> None:
    assert analyse(LauncherSpec(script, 2, output)).code == "launcher_syntax"


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ("ls: cannot access 'extract_gpu*.log': No such file or directory", ("extract_gpu*.log",)),
        ("tail: cannot open 'extract_gpu*.log' for reading: No such file or directory\n", ("extract_gpu*.log",)),
        (
            "wc: extract_gpu*.log: No such file or directory\nwc: x[0-9].log: No such file or directory",
            ("extract_gpu*.log", "x[0-9].log"),
        ),
        ("==> extract_gpu*.log <==", ("extract_gpu*.log",)),
        ("ls: cannot access 'x.log': No such file or directory\n[1] 4711\nloss * 2: ok", ()),
        ("", ()),
    ],
)
def test_unexpanded_globs(output: str, names: tuple[str, ...]) -> None:
    assert unexpanded(output) == names
