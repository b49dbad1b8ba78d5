# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection as its users get it: built, installed and used from another folder, without this checkout."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the built collection installed beside it; returns a function that runs a command there."""
    base = tmp_path_factory.mktemp("build")
    stage = subprocess.run(
        [ROOT / "tools/stage", base / "stage"], check=True, capture_output=True, text=True
    ).stdout.strip()
    subprocess.run(["ansible-galaxy", "collection", "build", "--output-path", base, stage], check=True)
    (artifact,) = base.glob("dflash-launchproof-*.tar.gz")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")},
        "ANSIBLE_COLLECTIONS_PATH": str(base / "collections"),
        "ANSIBLE_CALLBACKS_ENABLED": "dflash.launchproof.launch_report",
        "ANSIBLE_LOCALHOST_WARNING": "false",
    }
    (base / "site").mkdir()

    def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, cwd=base / "site", env=environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    run(
        "ansible-galaxy",
        "collection",
        "install",
        "--offline",
        "--no-deps",
        "-p",
        str(base / "collections"),
        str(artifact),
    )
    return run


def test_nothing_of_the_checkout_is_left_out_or_dragged_along(installed):
    listed = json.loads(installed("ansible-doc", "--list", "--json", "-t", "module", "dflash.launchproof").stdout)
    assert {"dflash.launchproof.launch_proof", "dflash.launchproof.pve_container"} <= set(listed)


@pytest.mark.parametrize(
    "playbook", ["preflight", "container", "python_env", "job", "launch_proof", "prove", "stop", "destroy"]
)
def test_every_playbook_is_callable_by_its_full_name(installed, playbook):
    installed("ansible-playbook", "-i", "localhost,", "--syntax-check", f"dflash.launchproof.{playbook}")


def test_an_installed_proof_names_a_failure(installed, tmp_path):
    """The module brings its prover along: no role ran on this host, and no checkout is near."""
    play = [
        {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars": {
                "launchproof_units": ["nobody-installed-this.service"],
                # discovery may find a pyenv shim of a version that is not selected, which cannot run
                "ansible_python_interpreter": "{{ ansible_playbook_python }}",
            },
            "tasks": [
                {
                    "dflash.launchproof.launch_proof": {
                        "state": "observed",
                        "jobs": [{"unit": "nobody-installed-this.service"}],
                    }
                }
            ],
        }
    ]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    done = installed(
        "env",
        f"LAUNCHPROOF_REPORT={tmp_path}/report.json",
        "ansible-playbook",
        "-i",
        "localhost,",
        str(tmp_path / "play.yml"),
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "report.json").read_text())["jobs"]
    assert (row["unit"], row["stage"]) == ("nobody-installed-this.service", "launch_proof")
    assert row["code"] == "unit_not_found", row
