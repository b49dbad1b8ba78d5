# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests marked ``long`` are left out unless LAUNCHPROOF_LONG is set, as ``./test --long`` does."""

from __future__ import annotations

import os


def pytest_collection_modifyitems(config, items):
    if os.environ.get("LAUNCHPROOF_LONG"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
