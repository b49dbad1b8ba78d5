# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which GPUs of a node a container gets: declared by UUID, by index or by count. Pure.

A GPU is ``{"index", "uuid", "minor"}``: its place in NVML's order, the name that never changes, N of /dev/nvidiaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VARIABLE = "launchproof_container.gpus"
HOW = "Write UUIDs or indexes as nvidia-smi -L shows them on the node, such as [0, 1], or {count: 2}."
#: What CUDA opens beside the GPUs' own nodes; nvidia-modprobe makes each of them.
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
CAPABILITIES = "/dev/nvidia-caps/"


class GpuError(Exception):
    """A declaration that cannot be fulfilled; the text names variable, value and fix."""


def deal(declared: Mapping[str, Any], host: str, found: Mapping[str, Any], node: str) -> list[dict]:
    """The GPUs of ``host``'s container, in the node's order, which is also their order inside.

    A count is dealt from what no host names, in the inventory's order. To name one GPU for two hosts shares it.

    Args:
        declared: ``launchproof_container.gpus`` of every host with a container on this node, in the inventory's order.
        found: what module gpu_info says of the node.
        node: name of the node, for messages.

    Raises GpuError.
    """
    value, gpus = declared[host], found["gpus"]
    names, count = read(value)
    if not gpus:
        raise _wrong(
            value,
            f"node {node} shows no GPU ({found['why']})",
            "Its kernel module and its libraries have different versions: reboot the node, or load the module anew."
            if "mismatch" in found["why"]
            else "Install and load the NVIDIA driver there (nvidia-smi -L has to list its GPUs), or declare no gpus.",
        )
    mine = [_find(name, value, gpus, node) for name in names]
    for gpu in mine:
        if mine.count(gpu) > 1:
            raise _wrong(value, f"{gpu['uuid']}, index {gpu['index']}, is there twice", "Name each GPU once.")
    wishes = {other: _wish(theirs) for other, theirs in declared.items()}
    named = {name for theirs, _count in wishes.values() for name in theirs}
    unnamed = [gpu for gpu in gpus if not named & {gpu["uuid"], str(gpu["index"])}]
    before = sum(wishes[other][1] for other in list(declared)[: list(declared).index(host)])
    dealt = unnamed[before : before + count]
    if len(dealt) < count:
        left = ", ".join(gpu["uuid"] for gpu in dealt) or "none"
        raise _wrong(
            value,
            f"of the {len(gpus)} GPUs of node {node} the other hosts leave {left}",
            f"Ask for {len(names) + len(dealt)} at most, or take one from another host.",
        )
    return sorted(mine + dealt, key=lambda gpu: gpu["index"])


def read(value: Any) -> tuple[list[str], int]:
    """A declaration as (names, count), UUIDs and indexes both being names. Raises GpuError."""
    names, count = [], 0
    if not isinstance(value, (list, tuple, Mapping)):
        raise _wrong(value, "not a list of GPUs")
    for entry in [value] if isinstance(value, Mapping) else value:
        if isinstance(entry, Mapping):
            number = str(entry.get("count"))
            if set(entry) != {"count"} or not number.isdecimal() or int(number) < 1:
                raise _wrong(value, f"{dict(entry)!r} is no count of GPUs")
            count += int(number)
        elif str(entry).startswith("MIG-"):
            raise _wrong(
                value, f"{str(entry)!r} is a part of a GPU", "Name the whole GPU, by the UUID that begins with GPU-."
            )
        elif isinstance(entry, bool) or not (str(entry).isdecimal() or str(entry).startswith("GPU-")):
            raise _wrong(value, f"{entry!r} is neither an index nor a UUID")
        else:
            names.append(str(entry))
    return names, count


def _wish(value: Any) -> tuple[list[str], int]:
    """As ``read``; a mistake in another host's declaration is that host's to hear of."""
    try:
        return read(value)
    except GpuError:
        return [], 0


def _find(name: str, value: Any, gpus: list[dict], node: str) -> dict:
    for gpu in gpus:
        if name in (gpu["uuid"], str(gpu["index"])):
            return gpu
    there = ", ".join(f"{gpu['uuid']} ({gpu['index']})" for gpu in gpus)
    raise _wrong(value, f"node {node} has no GPU {name}", f"It has {there}.")


def _wrong(value: Any, problem: str, fix: str = HOW) -> GpuError:
    return GpuError(f"{VARIABLE} is {value!r}: {problem}. {fix}")


def devices(gpus: list[dict], nodes: Mapping[str, str]) -> list[dict]:
    """The ``devices`` of pve_container for these GPUs, with the control nodes among ``nodes`` ({path: mode}).

    Every user may open them, as the driver itself allows on a node; capabilities keep the modes that are their point.
    """
    paths = {f"/dev/nvidia{gpu['minor']}": "0666" for gpu in gpus}
    paths |= {path: "0666" for path in CONTROL if path in nodes}
    paths |= {path: mode for path, mode in nodes.items() if path.startswith(CAPABILITIES)}
    return [{"path": path, "mode": mode} for path, mode in paths.items()]
