# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The decision: baseline, facts, spec and the time give a verdict, or say what is still missing. Pure."""

from __future__ import annotations

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Baseline, Facts, Verdict, Wait
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import Spec


def decide(baseline: Baseline, facts: Facts, spec: Spec, now: float) -> Verdict | Wait:
    """Return the verdict on one unit, or what it waits for.

    ``now`` is CLOCK_BOOTTIME in seconds, never earlier than ``facts.at``. Total and deterministic.
    """
    raise NotImplementedError
