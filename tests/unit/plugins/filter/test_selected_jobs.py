# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.dflash.launchproof.plugins.filter.selected_jobs import selected_jobs

JOBS = [{"name": "extraction"}, {"name": "training"}, {"name": "slammed"}]


@pytest.mark.parametrize(
    ("tags", "only", "names"),
    [
        (["all"], [], ["extraction", "training", "slammed"]),
        (["training"], [], ["training"]),
        (["training", "extraction"], [], ["extraction", "training"]),
        (["job", "launch_proof"], [], ["extraction", "training", "slammed"]),
        (["job"], ["slammed"], ["slammed"]),
        (["all"], "slammed,training", ["training", "slammed"]),
    ],
)
def test_jobs_are_kept_by_name_in_their_order(tags, only, names):
    assert [job["name"] for job in selected_jobs(JOBS, tags, only)] == names


def test_a_name_that_is_not_declared_is_an_error_that_names_it_and_the_declared_ones():
    with pytest.raises(AnsibleFilterError, match="'slamed', which is not declared.*slammed"):
        selected_jobs(JOBS, ["all"], "slamed")
