# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over a list of jobs. Each is documented in the file of its name beside this one."""

from __future__ import annotations

from ansible.errors import AnsibleFilterError
from ansible_collections.dflash.launchproof.plugins.module_utils.job import spec


def job_errors(jobs, gpus=()):
    """Every error of a declaration, one sentence each."""
    return spec.validate(jobs, gpus, controller=True)[1]


def job_units(jobs, installed=None):
    """What launch_proof has to know about the units of jobs."""
    read, errors = spec.validate(jobs)
    if errors:
        raise AnsibleFilterError("dflash.launchproof.job_units: " + " ".join(errors))
    digests = {row["unit"]: row["digest"] for row in (installed or {}).get("units", [])}
    rows = []
    for job in read:
        for unit in job.units:
            row = {"unit": unit.name, "user": job.user, "proof": dict(unit.proof)}
            if digests.get(unit.name):
                row["digest"] = digests[unit.name]
            rows.append(row)
    return rows


def job_gpus(jobs, gpus=()):
    """The GPUs that jobs declare, each once; without errors, which job_errors has."""
    read, _errors = spec.validate(jobs, gpus)
    return sorted({gpu for job in read for unit in job.units for gpu in unit.gpus or ()})


class FilterModule:
    """Names of the filters."""

    def filters(self):
        return {"job_errors": job_errors, "job_gpus": job_gpus, "job_units": job_units}
