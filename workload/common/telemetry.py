# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVML telemetry that is either true or off with a reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def visible(devices: list[tuple[int, str]], wanted: str | None) -> list[int]:
    """The NVML indexes that CUDA_VISIBLE_DEVICES names.

    ``devices`` are NVML's (index, UUID) pairs.  NVML does not honour the variable, so other jobs' GPUs would be counted
    here.  CUDA stops at the first entry that it does not know, and so does this.
    """
    if wanted is None:
        return [index for index, _uuid in devices]
    chosen = []
    for entry in filter(None, (part.strip() for part in wanted.split(","))):
        match = [
            index
            for index, uuid in devices
            if entry == str(index) or (entry.startswith("GPU-") and uuid.startswith(entry))
        ]
        if len(match) != 1:
            break
        chosen.append(match[0])
    return chosen


class Telemetry:
    """Samples of the visible GPUs; after the first NVML error it is off for good, with one warning line."""

    def __init__(self, warn: Callable[..., None]):
        self._warn = warn
        self._handles: list[tuple[str, Any]] = []
        self._nvml: Any = None
        self.off: str | None = None
        try:
            import pynvml  # provided by nvidia-ml-py
        except ImportError as error:
            self._turn_off(f"nvidia-ml-py is not installed ({error})")
            return
        try:
            pynvml.nvmlInit()
            devices = []
            for index in range(pynvml.nvmlDeviceGetCount()):
                devices.append((index, pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))))
            for index in visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES")):
                self._handles.append((devices[index][1], pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError as error:
            self._turn_off(f"NVML: {error}")
            return
        if not self._handles:
            self._turn_off("NVML shows no GPU that CUDA_VISIBLE_DEVICES names")
            return
        self._nvml = pynvml

    def _turn_off(self, why: str) -> None:
        self.off, self._nvml = why, None
        self._warn(why, telemetry="off")

    def sample(self) -> dict[str, Any]:
        """Heartbeat fields: ``telemetry`` (``nvml`` or ``off: why``) and ``gpus``, one entry a GPU (%, MiB, W, °C)."""
        nvml = self._nvml
        if nvml is None:
            return {"telemetry": f"off: {self.off}"}
        gpus = []
        try:
            for uuid, handle in self._handles:
                gpu: dict[str, Any] = {"uuid": uuid, "mem_mib": nvml.nvmlDeviceGetMemoryInfo(handle).used >> 20}
                for key, read in (
                    ("util", lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu),
                    ("power_w", lambda h: nvml.nvmlDeviceGetPowerUsage(h) // 1000),
                    ("temp_c", lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)),
                ):
                    try:
                        gpu[key] = read(handle)
                    except nvml.NVMLError_NotSupported:
                        gpu[key] = None
                gpus.append(gpu)
        except nvml.NVMLError as error:
            self._turn_off(f"NVML failed: {error}")
            return {"telemetry": f"off: {self.off}"}
        return {"telemetry": "nvml", "gpus": gpus}

    def line(self) -> dict[str, Any]:
        """Fields for the heartbeat line: ``gpu_util=97/3 gpu_mem_mib=…``, a number a GPU, or ``telemetry=off``."""
        gpus = self.sample().get("gpus")
        if not gpus:
            return {"telemetry": "off"}
        keys = ("util", "mem_mib", "power_w", "temp_c")
        return {f"gpu_{key}": "/".join("-" if gpu[key] is None else str(gpu[key]) for gpu in gpus) for key in keys}
