# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from ansible.plugins.loader import init_plugin_loader
init_plugin_loader()
from ansible_collections.dflash.launchproof.plugins.callback import launch_report
launch_report.load_before_forks()
assert "ansible_collections.dflash.launchproof.plugins.connection.pct" in sys.modules
assert "ansible.plugins.connection.ssh" in sys.modules and "ansible.plugins.shell.sh" in sys.modules
"""


def test_what_each_task_would_load_is_there_before_its_fork():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
