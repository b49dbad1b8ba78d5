# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong with a declared environment is said by the names of its variables, all of it at once."""

from __future__ import annotations

import pytest
from ansible_collections.dflash.launchproof.plugins.filter.environment_errors import environment_errors

RIGHT = {
    "path": "lock.txt",
    "lock": "pynvml==1 \\\n  --hash=sha256:00\n",
    "extra_requirements": ["torch==2"],
    "imports": ["torch", "safetensors.torch"],
    "uv": "",
    "uv_version": "0.9",
    "uv_sha256": {"x86_64": "00"},
}


def test_a_list_may_be_a_string_as_the_command_line_gives_it():
    assert environment_errors(**{**RIGHT, "extra_requirements": "torch==2,x==1", "imports": "torch.nn"}) == []


def test_a_right_one_has_none():
    assert environment_errors(**RIGHT) == []
    assert environment_errors(**{**RIGHT, "uv": "/usr/bin/uv", "uv_version": "", "uv_sha256": {}}) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lock": ""}, "python_env_requirements is lock.txt: there is no such file"),
        ({"lock": "pynvml>=1\n"}, "python_env_requirements: requirement 'pynvml>=1' is not pinned"),
        ({"extra_requirements": ["torch"]}, "python_env_extra_requirements: requirement 'torch' is not pinned"),
        ({"lock": "# none\n", "extra_requirements": []}, "python_env_requirements names no package"),
        ({"imports": ["torch", "a b", 7]}, "python_env_imports has 'a b', 7"),
        ({"uv_version": ""}, "python_env_uv is not given, nor uv_version"),
    ],
)
def test_what_is_wrong_is_named(wrong, said):
    (error,) = environment_errors(**{**RIGHT, **wrong})
    assert error.startswith(said)


def test_all_of_it_at_once():
    assert len(environment_errors(**{**RIGHT, "lock": "a\n", "extra_requirements": ["b"], "imports": ["-"]})) == 3
