# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection is imported as ansible does it, so that a role's defaults find the filters they name.

The workload's tests run where no Ansible is.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

if importlib.util.find_spec("ansible"):
    from ansible.plugins.loader import init_plugin_loader

    init_plugin_loader([str(Path("collections").resolve())])
