# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests marked ``container`` fail where none can be made, naming what is missing: a skipped proof proves nothing."""

from __future__ import annotations

import pytest

from tests.support.container import missing


@pytest.fixture(autouse=True, scope="session")
def _able(request):
    if any(item.get_closest_marker("container") for item in request.session.items) and (lacking := missing()):
        pytest.exit(f"these tests make LXC containers and need: {', '.join(lacking)}", returncode=1)
