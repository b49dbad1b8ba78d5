# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""examples/trl: somebody else's program, unchanged, under the same roles; as docs/your-own-program.md tells it.

The tests tell one story, in order, in one container of the embedded node.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.support import deployment
from tests.support.deployment import changed, play, report, rows

pytestmark = [pytest.mark.container, pytest.mark.long]

EXAMPLE = "examples/trl"
RUN = "/var/lib/launchproof/runs/finetune.service/current"
STATUS = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8600/api/status').read().decode())"


def playbook(path: str, *more: str):
    return play("ansible-playbook", "-i", f"{EXAMPLE}/inventory", path, *more)


def inside(*command: str) -> str:
    return deployment.inside(*command, vmid="903")


def shown() -> dict:
    """What the monitor in the container says of the job."""
    units = json.loads(inside("python3", "-c", STATUS))["units"]
    return next(unit for unit in units if unit["unit"] == "finetune.service")


@pytest.fixture(scope="module", autouse=True)
def _container(local_node):
    yield
    done = playbook("playbooks/destroy.yml", "-e", "launchproof_destroy=true")
    assert done.returncode == 0, done.stdout


def test_trl_is_deployed_and_its_work_is_proved_to_advance():
    done = playbook(f"{EXAMPLE}/deploy.yml")
    assert done.returncode == 0, done.stdout
    assert report()["verdict"] == "ok" and set(rows()) == {"finetune.service", "monitor.service"}
    assert rows()["finetune.service"]["code"] in ("ok_progressing", "completed")


def test_the_page_follows_its_progress_bar():
    """The job writes no heartbeat; the bar that tqdm draws in its log is enough."""
    unit = shown()
    assert unit["step"] > 0 and unit["state"] in ("running", "slow", "finished") and unit["beat_age_s"] is None


def test_a_second_deployment_changes_nothing():
    before = inside("readlink", RUN)
    done = playbook(f"{EXAMPLE}/deploy.yml")
    assert done.returncode == 0, done.stdout
    assert changed(done.stdout) == 0, done.stdout
    assert inside("readlink", RUN) == before


def test_it_completes_and_has_learnt():
    pid = inside("systemctl", "show", "-P", "MainPID", "finetune.service").strip()
    if pid != "0":
        inside("timeout", "900", "tail", "--pid", pid, "-f", "/dev/null")
    done = playbook("playbooks/prove.yml")
    assert done.returncode == 0, done.stdout
    assert rows()["finetune.service"]["code"] == "completed"
    losses = [float(loss) for loss in re.findall(r"'loss': '([0-9.]+)'", inside("cat", f"{RUN}/log"))]
    assert len(losses) == 60 and sum(losses[-5:]) < sum(losses[:5]) - 5, losses
    assert int(inside("stat", "-c", "%s", "/var/lib/finetune/out/model.safetensors")) > 1_000_000


def test_an_argument_that_trl_refuses_is_named():
    done = playbook(f"{EXAMPLE}/deploy.yml", "--tags", "job,launch_proof", "-e", "finetune_learning_rate=much")
    assert done.returncode != 0
    row = rows()["finetune.service"]
    assert not row["ok"] and row["code"] in ("exited_nonzero", "restarted_in_window", "crash_loop"), row
    # Whatever systemd has begun meanwhile: it is the run that died that is quoted.
    assert "invalid float value: 'much'" in json.dumps(row["evidence"]), row
    assert rows()["monitor.service"]["ok"]
