# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What all tests share: which of them a run is about, and the collection, imported as ansible does it.

Tests marked ``long`` are left out unless LAUNCHPROOF_LONG is set, as ``./test --long`` does. ``pytest -m peers`` means the
whole of tests/, not the unit tests alone. The workload's tests have an environment of their own, with torch and without
Ansible.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

if importlib.util.find_spec("ansible"):
    from ansible.plugins.loader import init_plugin_loader

    # A role's defaults find the filters they name, and packages are the same ones for every test.
    init_plugin_loader([str(Path("collections").resolve())])

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is, and nothing of what is tested.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

collect_ignore = [] if importlib.util.find_spec("torch") else ["unit/workload", "integration/test_page.py"]


def pytest_configure(config):
    if "peers" in config.option.markexpr and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.args = ["tests"]


def pytest_collection_modifyitems(config, items):
    if os.environ.get("LAUNCHPROOF_LONG"):
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
