# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which GPUs a unit's processes use, asked of NVML over ctypes: the driver's own library is all it takes."""

from __future__ import annotations

import ctypes
import os

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import NOT_READ, Gpu, Unknown

LIBRARY = "libnvidia-ml.so.1"
MAX_PROCESSES = 256


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of the _v3 calls, nvml.h of CUDA 11 and later."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class NvmlError(Exception):
    """NVML cannot be loaded or gives an error."""


class Nvml:
    """The few calls that the proof needs. Raises NvmlError."""

    def __init__(self):
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError("%s: %s" % (LIBRARY, error)) from None
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self.devices = {}  # UUID -> handle, in index order
        for index in range(count.value):
            handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
            self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
            self._call("nvmlDeviceGetUUID", handle, text, len(text))
            self.devices[text.value.decode()] = handle

    def _call(self, name: str, *arguments) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            raise NvmlError("%s: %s" % (name, self._library.nvmlErrorString(code).decode()))

    def driver(self) -> str:
        """Version of the driver, the same in the kernel and in the library: NVML does not start where they differ."""
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, len(text))
        return text.value.decode()

    def minor(self, uuid: str) -> int:
        """Number of a device's node, N of /dev/nvidiaN."""
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetMinorNumber", self.devices[uuid], ctypes.byref(number))
        return number.value

    def used(self, uuid: str) -> int:
        """Memory in use on a device, bytes, foreign processes included."""
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self.devices[uuid], ctypes.byref(memory))
        return memory.used

    def processes(self, uuid: str) -> dict:
        """{pid: memory in bytes} of the compute processes that NVML shows to this namespace."""
        count = ctypes.c_uint(MAX_PROCESSES)
        found = (_Process * MAX_PROCESSES)()
        self._call("nvmlDeviceGetComputeRunningProcesses_v3", self.devices[uuid], ctypes.byref(count), found)
        return {item.pid: item.memory for item in found[: count.value]}

    def utilisation(self, uuid: str) -> float:
        rates = _Utilisation()
        self._call("nvmlDeviceGetUtilizationRates", self.devices[uuid], ctypes.byref(rates))
        return float(rates.gpu)


def declared_uuids(visible: str | None, available: list) -> tuple:
    """UUIDs that CUDA_VISIBLE_DEVICES declares, which may name indices or shortened UUIDs. All when it is not set."""
    if visible is None:
        return tuple(available)
    found = []
    for word in filter(None, (part.strip() for part in visible.split(","))):
        if word.isdigit():
            found.extend(available[int(word) : int(word) + 1] or [word])
        else:
            found.append(next((uuid for uuid in available if uuid.startswith(word)), word))
    return tuple(found)


def opened(pid: int) -> tuple:
    """Return (the process has an nvidia device open, it has libcuda mapped)."""
    device = library = False
    folder = "/proc/%d/fd" % pid
    try:
        device = any(os.readlink(folder + "/" + name).startswith("/dev/nvidia") for name in os.listdir(folder))
        with open("/proc/%d/maps" % pid, encoding="utf-8", errors="replace") as handle:
            library = any("libcuda.so" in line for line in handle)
    except OSError:
        pass
    return device, library


def judge(declared: tuple, memory: dict, rose: tuple, has_device: bool, has_library: bool, floor: int) -> tuple:
    """Return (level, reason) of the GPU proof ladder. Pure.

    I(memory) is {UUID: bytes} of the unit's own processes, I(rose) the UUIDs whose memory in use rose by the floor.
    """
    if memory:
        if set(memory) != set(declared):
            return "none", "wrong_gpu"
        if all(value >= floor for value in memory.values()):
            return "proved", ""
        return "none", "context_without_memory"
    if has_device and has_library:
        if set(rose) == set(declared):
            return "consistent", ""
        return "none", "wrong_gpu" if rose else "opened_only"
    return "none", "opened_only" if has_device else "no_device"


class GpuSource:
    """Follows the declared GPUs of one unit. NVML is opened once and stays open."""

    def __init__(self, spec, environ: dict):
        self.spec = spec
        self.error = None
        self.nvml = None
        self.declared = ()
        self._memory, self._used, self._busy = {}, {}, NOT_READ
        self._device = self._library = False
        try:
            self.nvml = Nvml()
            self.declared = declared_uuids(environ.get("CUDA_VISIBLE_DEVICES"), list(self.nvml.devices))
        except NvmlError as error:
            self.error = str(error)
            self.declared = declared_uuids(environ.get("CUDA_VISIBLE_DEVICES", ""), [])

    def memory(self) -> dict | Unknown:
        """Memory in use per device now, bytes: the baseline."""
        if self.nvml is None:
            return Unknown(self.error)
        try:
            return {uuid: self.nvml.used(uuid) for uuid in self.nvml.devices}
        except NvmlError as error:
            return Unknown(str(error))

    def sample(self, processes: tuple) -> None:
        """Look which devices the unit's I(processes) use."""
        pids = {item.pid for item in processes}
        flags = [opened(pid) for pid in pids]
        self._device = any(device for device, _library in flags)
        self._library = any(library for _device, library in flags)
        if self.nvml is None:
            return
        try:
            memory = {}
            for uuid in self.nvml.devices:
                own = [size for pid, size in self.nvml.processes(uuid).items() if pid in pids]
                if own:
                    memory[uuid] = sum(own)
                self._used[uuid] = self.nvml.used(uuid)
            self._memory = memory
            busy = [self.nvml.utilisation(uuid) for uuid in self.declared if uuid in self.nvml.devices]
            self._busy = max(busy) if busy else NOT_READ
            self.error = None
        except NvmlError as error:
            self.error = str(error)

    def facts(self, baseline: dict) -> Gpu | Unknown:
        if self.nvml is None and os.path.exists("/dev/nvidiactl"):
            return Unknown(self.error)  # there is a driver, but nobody to ask about it
        if self.nvml is not None and self.error:
            return Unknown(self.error)
        floor = self.spec.memory_floor
        rose = tuple(uuid for uuid, used in self._used.items() if used - baseline.get(uuid, 0) >= floor)
        level, reason = judge(self.declared, self._memory, rose, self._device, self._library, floor)
        return Gpu(
            level=level, reason=reason, declared=self.declared, found=tuple(self._memory) or rose, memory=dict(self._memory),
            utilisation=self._busy,
        )  # fmt: skip

    def close(self) -> None:
        self.nvml = None
