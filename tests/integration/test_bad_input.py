# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bad input stops in preflight, before any change, naming the variable, its value and the fix."""

from __future__ import annotations

import json

import pytest

from tests.support.deployment import NODE, UNITS, deploy, playbook, report, writes

pytestmark = pytest.mark.container


@pytest.fixture(scope="module", autouse=True)
def node():
    """A node that is up, with one container on it that is not ours."""
    if (NODE / "outputs.json").exists():
        pytest.fail(f"{NODE} holds a node already; this test takes its own down at its end")
    assert playbook("local_node").returncode == 0
    yield
    playbook("local_node", "-e", "local_node_state=absent")
