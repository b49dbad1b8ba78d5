# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module pve_preflight, without a process of its own on the controller."""

from __future__ import annotations

from ansible_collections.dflash.launchproof.plugins.module_utils.pve import preflight
from ansible_collections.dflash.launchproof.plugins.plugin_utils.api_action import ApiAction


class ActionModule(ApiAction):
    """dflash.launchproof.pve_preflight"""

    SPEC, WORK = preflight.SPEC, preflight.run
