# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The proof spec: defaults, and every wrong field named with its value and the fix."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
import yaml
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.spec import Spec, SpecError, validate
from ansible_collections.dflash.launchproof.plugins.modules import launch_proof

FULL = {
    "process": {"count": 2, "stable_for": 0},
    "log": {
        "path": "/l/*.log",
        "required": ["ready"],
        "forbidden": ["nan"],
        "default_forbidden": False,
        "fresh": True,
        "count": 4,
    },
    "progress": {"pattern": r"epoch=\d+ step=(?P<step>\d+)", "within": 5, "stall_after": 30, "stall_factor": 4},
    "gpu": {"level": "proved", "memory_floor": 1024, "within": 60},
    "objects": {"uri": "s3://bucket/prefix", "within": 60, "min_new": 2},
    "heartbeat": {"path": "/run/beat", "max_age": 9},
    "done": {"pattern": "all done"},
    "deadlines": {"start": 5, "first_log": 6, "first_progress": 7, "total": 100},
    "launcher": {"script": "run.sh", "rc": 137, "output": "", "end_mark": "Launched"},
}


def test_defaults() -> None:
    assert validate(None) == validate({}) == Spec()
    spec = validate({})
    assert (spec.process.count, spec.process.stable_for) == (1, 5.0)
    assert (spec.deadlines.start, spec.deadlines.first_log, spec.deadlines.first_progress) == (10, 60, 900)
    assert spec.log.fresh and spec.log.default_forbidden and spec.progress is None


@pytest.mark.parametrize("data", [{}, FULL, {"progress": {"json_field": "a.b"}, "objects": {"path": "/out"}}])
def test_it_reads_back_what_it_says(data: dict[str, Any]) -> None:
    assert validate(validate(data).as_dict()) == validate(data)


def test_the_group_of_the_progress_pattern() -> None:
    assert validate(FULL).progress.group == "step"
    of_ranks = {"pattern": r"\[(?P<rank>\d+)\] step=(?P<step>\d+)", "ranks": 4}
    assert validate({"progress": of_ranks}).progress.group == "step"
    assert validate({"progress": {"pattern": r"rank=(?P<rank>\d+)"}}).progress.group == "rank"


def test_numbers_may_come_as_text() -> None:
    spec = validate({"deadlines": {"start": "7"}, "process": {"count": "3"}, "log": {"fresh": "false"}})
    assert (spec.deadlines.start, spec.process.count, spec.log.fresh) == (7.0, 3, False)


@pytest.mark.parametrize(
    "data",
    [{}, {"progress": {"json_field": "s"}}, {"gpu": {}}, {"objects": {"path": "/o"}}, {"heartbeat": {"path": "/h"}}],
)
def test_the_hard_end_comes_after_every_deadline(data: dict[str, Any]) -> None:
    spec = validate(data)
    ends = [spec.deadlines.start + spec.process.stable_for, spec.deadlines.first_log]
    if spec.progress:
        ends.append(spec.deadlines.first_progress + spec.progress.within)
    if spec.gpu:
        ends.append(spec.gpu_within)
    if spec.objects:
        ends.append(spec.objects.within)
    assert spec.total > spec.deadlines.start + max(ends)


@pytest.mark.parametrize(
    ("data", "field", "fix"),
    [
        (["x"], "proof", "mapping"),
        ({"porgress": {}}, "proof.porgress", "no such field"),
        ({"log": {"requires": []}}, "proof.log.requires", "required"),
        ({"log": "x"}, "proof.log", "mapping"),
        ({"log": {"path": "out.log"}}, "proof.log.path", "absolute"),
        ({"log": {"path": 3}}, "proof.log.path", "text"),
        ({"log": {"required": "ready"}}, "proof.log.required", "list"),
        ({"log": {"required": ["ok", "(x"]}}, "proof.log.required[1]", "not a regular expression"),
        ({"log": {"required": [3]}}, "proof.log.required[0]", "as text"),
        ({"log": {"forbidden": [""]}}, "proof.log.forbidden[0]", "every line"),
        ({"log": {"required": ["x*"]}}, "proof.log.required[0]", "empty line"),
        ({"log": {"count": 4, "path": "/l/0.log"}}, "proof.log.path", "glob"),
        ({"log": {"fresh": False, "required": ["x"]}}, "proof.log.fresh", "leave it out"),
        ({"log": {"fresh": "perhaps"}}, "proof.log.fresh", "true or false"),
        ({"process": {"count": 0}}, "proof.process.count", "from 1 up"),
        ({"process": {"count": 1.5}}, "proof.process.count", "whole number"),
        ({"process": {"count": True}}, "proof.process.count", "whole number"),
        ({"process": {"stable_for": -1}}, "proof.process.stable_for", "from 0 up"),
        ({"progress": {}}, "proof.progress", "exactly one"),
        ({"progress": {"pattern": "x(?P<a>y)", "json_field": "a"}}, "proof.progress", "exactly one"),
        ({"progress": {"pattern": r"step=(\d+)"}}, "proof.progress.pattern", "name the group"),
        (
            {"progress": {"pattern": r"step=(?P<step>\d+)", "ranks": 2}},
            "proof.progress.pattern",
            "tells the 2 ranks apart",
        ),
        ({"progress": {"pattern": r"rank=(?P<rank>\d+)", "ranks": 2}}, "proof.progress.pattern", "holds the value"),
        ({"progress": {"json_field": "s", "ranks": 2}}, "proof.progress.ranks", "give a pattern"),
        ({"progress": {"json_field": ""}}, "proof.progress.json_field", "name the field"),
        ({"progress": {"json_field": "s", "stall_factor": 0.5}}, "proof.progress.stall_factor", "from 1 up"),
        ({"progress": {"json_field": "s", "within": 0}}, "proof.progress.within", "above 0"),
        ({"gpu": {"level": "maybe"}}, "proof.gpu.level", "proved_from_node"),
        ({"objects": {}}, "proof.objects", "exactly one"),
        ({"objects": {"uri": "http://x"}}, "proof.objects.uri", "s3://"),
        ({"objects": {"path": "out"}}, "proof.objects.path", "absolute folder"),
        ({"heartbeat": {}}, "proof.heartbeat.path", "absolute path"),
        ({"done": {}}, "proof.done.pattern", "work is complete"),
        ({"deadlines": {"start": "soon"}}, "proof.deadlines.start", "number of seconds"),
        ({"deadlines": {"start": float("nan")}}, "proof.deadlines.start", "number of seconds"),
        ({"launcher": {"rc": "x"}}, "proof.launcher.rc", "whole number"),
    ],
)
def test_bad_fields_are_named(data: Any, field: str, fix: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(data)
    assert caught.value.field == field
    assert fix in caught.value.fix
    assert str(caught.value).startswith(f"{field} is {caught.value.value!r}: ")


def test_every_field_is_documented_in_the_module():
    documented = yaml.safe_load(launch_proof.DOCUMENTATION)["options"]["jobs"]["suboptions"]["proof"]["description"]
    for section, kind in typing.get_type_hints(Spec).items():
        (text,) = [bullet for bullet in documented if bullet.startswith(f"C({section})")]
        (parts,) = [part for part in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(part)]
        names = {field.name for field in dataclasses.fields(parts)} - ({"group"} if section == "progress" else set())
        assert [name for name in names if f"C({name})" not in text] == [], section
