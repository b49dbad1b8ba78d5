# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""systemd reads what role job writes as it was meant: argv, environment and secrets, to the last character."""

from __future__ import annotations

import io
import json
import random
import subprocess
import tarfile

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.job import install, spec, units
from ansible_collections.dflash.launchproof.plugins.module_utils.proof import bundle

from tests.support.container import Container

pytestmark = pytest.mark.container

SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
NASTY = [
    "",
    " ",
    "$HOME",
    "${HOME}",
    "$$",
    "%n",
    "%%",
    ";",
    "a;b",
    "'",
    '"',
    "\\",
    "\\n",
    "trailing\\",
    "`id`",
    "#x",
    "=",
    "*",
]
NASTY += [
    "a b",
    "\n",
    "\r",
    "\t",
    "\x01\x1b\x7f",
    "é漢🚀",
    "\u2028",
    "a\nUser=root",
    "-",
    "@x",
    "+x",
    "!x",
    "'\"$\\`%;",
]
CONTROL = "".join(map(chr, range(1, 128)))
# The seed is fixed: a failure must come again. Property tests of the same functions draw freely.
RANDOM = random.Random(2)


def word(length: int) -> str:
    alphabet = [*CONTROL, "é", "漢", "\U0001f680", *"\"'\\$%`;{} " * 4]
    return "".join(RANDOM.choice(alphabet) for _ in range(length))


def cases() -> list[dict]:
    found = [{"command": NASTY, "env": {f"V{i}": text for i, text in enumerate(NASTY)}}]
    found.append({"command": [CONTROL], "env": {"V": CONTROL}, "secrets": {"S": "secret" + CONTROL}})
    for _ in range(24):
        found.append(
            {
                "command": [word(RANDOM.randrange(30)) for _ in range(RANDOM.randrange(6))],
                "env": {f"V{i}": word(RANDOM.randrange(40)) for i in range(3)},
                "secrets": {f"S{i}": word(12) for i in range(2)},
            }
        )
    return [{"id": str(number), **case} for number, case in enumerate(found)]


class Image(install.Host):
    """A folder that becomes part of the container; questions about the machine are the container's, and settled."""

    def user_exists(self, name):
        return True

    def program(self, name):
        return name

    def is_dir(self, path):
        return path == "/run/systemd/system" or super().is_dir(path)


def deliver(container: Container, root) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(root, arcname=".")
    subprocess.run(
        container.argv("tar", "-C", "/", "--no-overwrite-dir", "-xf", "-"), input=packed.getvalue(), check=True
    )


def test_argv_environment_and_secrets_arrive_unchanged(tmp_path):
    job = {"name": "show", "command": ["/usr/bin/python3", "-c", SHOW, "100% $x"], "user": "root", "instances": cases()}
    jobs, errors = spec.validate([job])
    assert errors == []
    plan = install.make_plan(jobs, {}, bundle.build(), Image(str(tmp_path)))
    install.apply(plan, Image(str(tmp_path)), reload=False)
    names = [unit.name for unit in jobs[0].units]
    with Container("job-files") as container:
        deliver(container, tmp_path)
        container.run("systemctl", "daemon-reload")
        verified = container.run("systemd-analyze", "verify", "--man=no", *names, check=False)
        assert install.verify_complaints(verified.stdout + verified.stderr, "/etc/systemd/system", jobs[0]) == []
        container.run("systemctl", "start", "--wait", *names)
        logs = container.run("cat", *(f"{units.STATE_DIR}/runs/{name}/current/log" for name in names)).stdout
        for unit, log in zip(jobs[0].units, logs.splitlines(), strict=True):
            argv, environment = json.loads(log)
            assert argv == list(unit.argv[3:])
            declared = {**units.environment(unit), **unit.secrets}
            assert {name: environment.get(name) for name in declared} == declared
        assert container.run("systemctl", "is-enabled", "show.target").stdout.strip() == "enabled"
        shown = container.run("systemctl", "show", *names).stdout
        assert "Result=success" in shown
        assert not [text for unit in jobs[0].units for text in unit.secrets.values() if text in shown]
