# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests marked ``container`` fail where none can be made, naming what is missing: a skipped proof proves nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.support.container import missing
from tests.support.deployment import NODE, playbook


@pytest.fixture(autouse=True, scope="session")
def _able(request):
    if any(item.get_closest_marker("container") for item in request.session.items) and (lacking := missing()):
        pytest.exit(f"these tests make LXC containers and need: {', '.join(lacking)}", returncode=1)


@pytest.fixture(scope="module")
def local_node():
    """The embedded node, up. One that was up before is used and stays; otherwise it goes when the module's tests end."""
    was_up = (NODE / "outputs.json").exists()
    up = playbook("local_node")
    assert up.returncode == 0, up.stdout
    yield
    if not was_up:
        down = playbook("local_node", "-e", "local_node_state=absent")
        assert down.returncode == 0, down.stdout


@pytest.fixture
def sockets():
    """A folder for ssh's own sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)
