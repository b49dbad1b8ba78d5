# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Telemetry is true, or off with a reason, said once."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from common.telemetry import Telemetry, visible

DEVICES = [(0, "GPU-aaaa"), (1, "GPU-bbbb"), (2, "GPU-bbcc")]


@pytest.mark.shows("W22")
@pytest.mark.parametrize(
    ("wanted", "indexes"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-bbbb", [1]),
        ("GPU-a, 1", [0, 1]),
        ("GPU-b", []),
        ("0,7,1", [0]),
        ("-1", []),
    ],
)
def test_only_the_gpus_of_this_job_are_counted(wanted, indexes):
    assert visible(DEVICES, wanted) == indexes


class FakeNvml(ModuleType):
    """pynvml with two GPUs, and a switch that makes it fail."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801 - pynvml's own name
        pass

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, init=True):
        super().__init__("pynvml")
        self.works, self._init = True, init

    def _check(self, value):
        if not self.works:
            raise self.NVMLError("GPU is lost")
        return value

    def nvmlInit(self):  # noqa: N802
        if not self._init:
            raise self.NVMLError("Driver Not Loaded")

    def __getattr__(self, name):
        values = {
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 << 20),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
            "nvmlDeviceGetPowerUsage": 650_000,
        }
        if name in values:
            return lambda *_a: self._check(values[name])
        if name == "nvmlDeviceGetHandleByIndex":
            return lambda index: index
        if name == "nvmlDeviceGetUUID":
            return lambda handle: DEVICES[handle][1]
        if name == "nvmlDeviceGetTemperature":
            raise_it = self.NVMLError_NotSupported

            def read(*_a):
                raise raise_it("N/A")

            return read
        raise AttributeError(name)


@pytest.fixture
def make(monkeypatch):
    warned = []

    def build(module, visible_devices=None):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        if visible_devices is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
        return Telemetry(lambda message, **fields: warned.append((message, fields))), warned

    return build


@pytest.mark.shows("W22")
def test_a_sample_names_each_gpu_and_what_it_cannot_say_is_none(make):
    telemetry, warned = make(FakeNvml(), "GPU-bbbb")
    assert telemetry.sample() == {
        "telemetry": "nvml",
        "gpus": [{"uuid": "GPU-bbbb", "mem_mib": 5, "util": 97, "power_w": 650, "temp_c": None}],
    }
    line = {"gpu_util": "97", "gpu_mem_mib": "5", "gpu_power_w": "650", "gpu_temp_c": "-"}
    assert telemetry.line() == line and warned == []


@pytest.mark.shows("W23")
@pytest.mark.parametrize(
    ("module", "devices", "why"),
    [(None, None, "not installed"), (FakeNvml(init=False), None, "Driver Not Loaded"), (FakeNvml(), "", "no GPU")],
)
def test_off_is_one_warning_with_the_reason(make, module, devices, why):
    telemetry, warned = make(module, devices)
    assert telemetry.sample()["telemetry"].startswith("off: ") and why in telemetry.sample()["telemetry"]
    assert telemetry.line() == {"telemetry": "off"}
    assert len(warned) == 1 and why in warned[0][0] and warned[0][1] == {"telemetry": "off"}


@pytest.mark.shows("W24")
def test_a_failure_midway_turns_it_off_once(make):
    module = FakeNvml()
    telemetry, warned = make(module)
    assert telemetry.sample()["telemetry"] == "nvml"
    module.works = False
    assert [telemetry.sample()["telemetry"] for _ in range(3)] == ["off: NVML failed: GPU is lost"] * 3
    assert len(warned) == 1
