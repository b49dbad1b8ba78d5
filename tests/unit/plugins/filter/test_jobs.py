# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filters over jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.dflash.launchproof.plugins.filter.jobs import FilterModule

FILTERS = FilterModule().filters()
JOBS = [
    {"name": "a", "command": ["/bin/true"], "proof": {"done": {"pattern": "done"}}},
    {"name": "b", "command": ["/bin/true"], "user": "root", "instances": [{"id": 1}, {"id": 2}]},
    {"name": "c", "command": ["/bin/true"]},
]


def test_every_filter_is_documented_under_its_name():
    for name in FILTERS:
        documented = yaml.safe_load((Path("filter_plugins") / f"{name}.yml").read_text())
        assert documented["DOCUMENTATION"]["name"] == name


def test_job_units():
    installed = {"units": [{"unit": "a.service", "digest": "sha256:1"}, {"unit": "b@1.service", "digest": None}]}
    assert FILTERS["job_units"](JOBS, installed) == [
        {"unit": "a.service", "user": "dflash", "proof": {"done": {"pattern": "done"}}, "digest": "sha256:1"},
        {"unit": "b@1.service", "user": "root", "proof": {}},
        {"unit": "b@2.service", "user": "root", "proof": {}},
        {"unit": "c.service", "user": "dflash", "proof": {}},
    ]


def test_job_units_of_wrong_jobs():
    with pytest.raises(AnsibleFilterError, match="job_units: launchproof_jobs.0. .a..command: missing"):
        FILTERS["job_units"]([{"name": "a"}])


def test_job_errors_looks_at_the_controller():
    jobs = [{"name": "a", "command": ["/bin/true"], "code": {"src": "/nonexistent", "dest": "/opt/a"}}]
    assert len(FILTERS["job_errors"](jobs)) == 1
    assert FILTERS["job_errors"](JOBS, []) == []
