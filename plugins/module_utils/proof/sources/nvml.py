# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What NVML says of GPUs and of who uses them. The driver's own library, over ctypes, is all it takes.

Nothing here raises: NVML may be missing, may not match the kernel's driver, may be permitted in part, and a GPU may be
lost while the others work. Each of these is a value with its reason. The structures are those of nvml.h.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass

from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Unknown

LIBRARY = "libnvidia-ml.so.1"
KERNEL_DRIVER = "/proc/driver/nvidia/version"
VERSION = re.compile(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b")
INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND, MISMATCH = 7, 13, 18  # nvmlReturn_t
NOT_AVAILABLE = 2**64 - 1  # usedGpuMemory where NVML may not or cannot tell, as NVML_VALUE_NOT_AVAILABLE
MIG_ENABLED = 1


class _Memory(ctypes.Structure):
    """nvmlMemory_t: C(used) includes what the driver keeps for itself."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Memory2(ctypes.Structure):
    """nvmlMemory_v2_t: C(used) is what processes use."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _Process1(ctypes.Structure):
    """nvmlProcessInfo_v1_t, before CUDA 11."""

    _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t, which the calls _v2 and _v3 fill."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Utilisation(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


LISTS = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", _Process),
    ("nvmlDeviceGetComputeRunningProcesses_v2", _Process),
    ("nvmlDeviceGetComputeRunningProcesses", _Process1),
)


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG instance of one: what a process can be given."""

    uuid: str
    # Its place in NVML's order, which is that of the PCI bus; of a MIG instance, the place of its GPU.
    index: int
    # N of its /dev/nvidiaN, None where NVML does not say.
    minor: int | None
    name: str
    # UUID of the GPU that a MIG instance is part of, "" for a GPU.
    parent: str = ""


def library_path() -> str | None:
    """The file that this process has mapped as NVML, its links resolved; None where there is none."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as handle:
            for line in handle:
                if "libnvidia-ml.so" in line:
                    return os.path.realpath(line.split(None, 5)[5].strip())
    except OSError:
        pass
    return None


def versions() -> tuple:
    """Return (version of the kernel's driver, version of the NVML library that is loaded), None where not known.

    In a container the first is the host's, the second the container's own.
    """
    kernel = None
    try:
        with open(KERNEL_DRIVER, encoding="utf-8", errors="replace") as handle:
            kernel = VERSION.search(handle.readline())
    except OSError:
        pass
    library = VERSION.search(os.path.basename(library_path() or "").partition(".so.")[2])
    return kernel and kernel.group(1), library and library.group(1)


class Nvml:
    """One open NVML. Every answer is a value, or Unknown with the reason."""

    def __init__(self):
        # Why nothing can be asked; None when NVML works.
        self.error = None
        # UUID -> Device, GPUs in NVML's order; where MIG is on, a GPU's instances instead of it.
        self.devices = {}
        # What is wrong with single GPUs, in words.
        self.problems = []
        self.driver = None
        self._handles = {}
        self._library = None
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            self.error = "%s: %s" % (LIBRARY, error)
            return
        self._library = library
        code = self._code("nvmlInit_v2")
        if code:
            self.error = self._start_error(code)
            return
        self.driver = self._text(None, "nvmlSystemGetDriverVersion")
        count = ctypes.c_uint()
        code = self._code("nvmlDeviceGetCount_v2", ctypes.byref(count))
        if code:
            self.error = self._words("nvmlDeviceGetCount_v2", code)
        for index in range(count.value):
            self._add_gpu(index, count.value)

    def _code(self, name: str, *arguments) -> int:
        """Call a function of the library; an older one may not have it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return FUNCTION_NOT_FOUND
        return function(*arguments)

    def _words(self, name: str, code: int) -> str:
        text = "error"
        if hasattr(self._library, "nvmlErrorString"):
            self._library.nvmlErrorString.restype = ctypes.c_char_p
            text = (self._library.nvmlErrorString(code) or b"error").decode(errors="replace")
        return "%s: %s (%d)" % (name, text, code)

    def _start_error(self, code: int) -> str:
        kernel, library = versions()
        if code == MISMATCH or (kernel and library and kernel != library):
            return "%s; the kernel's driver is %s, the library here is of %s" % (
                self._words("nvmlInit_v2", code), kernel or "of a version that cannot be read", library or "a version that its name hides",
            )  # fmt: skip
        return self._words("nvmlInit_v2", code)

    def _text(self, handle, name: str) -> str | None:
        text = ctypes.create_string_buffer(96)
        code = self._code(name, *([handle] if handle else []), text, ctypes.c_uint(len(text)))
        return None if code else text.value.decode(errors="replace")

    def _number(self, handle, name: str) -> int | None:
        number = ctypes.c_uint()
        return None if self._code(name, handle, ctypes.byref(number)) else number.value

    def _add_gpu(self, index: int, count: int) -> None:
        handle = ctypes.c_void_p()
        code = self._code("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        uuid = None if code else self._text(handle, "nvmlDeviceGetUUID")
        if uuid is None:
            what = self._words("nvmlDeviceGetHandleByIndex_v2", code) if code else "it does not say its UUID"
            self.problems.append("GPU %d of %d: %s" % (index, count, what))
            return
        minor = self._number(handle, "nvmlDeviceGetMinorNumber")
        name = self._text(handle, "nvmlDeviceGetName") or ""
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        code = self._code("nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending))
        instances = self._instances(handle) if not code and current.value == MIG_ENABLED else []
        for instance, instance_uuid in instances:
            self._handles[instance_uuid] = instance
            self.devices[instance_uuid] = Device(instance_uuid, index, minor, name, parent=uuid)
        if not instances:
            self._handles[uuid] = handle
            self.devices[uuid] = Device(uuid, index, minor, name)

    def _instances(self, handle) -> list:
        """[(handle, UUID)] of a GPU's MIG instances. The numbers that are free are not found, which is no error."""
        found = []
        for number in range(self._number(handle, "nvmlDeviceGetMaxMigDeviceCount") or 0):
            instance = ctypes.c_void_p()
            if not self._code(
                "nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(number), ctypes.byref(instance)
            ):
                uuid = self._text(instance, "nvmlDeviceGetUUID")
                if uuid:
                    found.append((instance, uuid))
        return found

    def used(self, uuid: str) -> int | Unknown:
        """Memory that processes use on a device, bytes; those that NVML does not list here are in it."""
        memory = _Memory2(version=ctypes.sizeof(_Memory2) | 2 << 24)
        name = "nvmlDeviceGetMemoryInfo_v2"
        code = self._code(name, self._handles[uuid], ctypes.byref(memory))
        if code:
            memory, name = _Memory(), "nvmlDeviceGetMemoryInfo"
            code = self._code(name, self._handles[uuid], ctypes.byref(memory))
        return Unknown(self._words(name, code)) if code else memory.used

    def processes(self, uuid: str) -> dict | Unknown:
        """{pid: memory in bytes} of the compute processes that NVML lists here; None where it does not say how much."""
        for name, kind in LISTS:
            size = 64
            while True:
                count, found = ctypes.c_uint(size), (kind * size)()
                code = self._code(name, self._handles[uuid], ctypes.byref(count), found)
                if code != INSUFFICIENT_SIZE:
                    break
                size = count.value + 16  # more may have come since it counted
            if code != FUNCTION_NOT_FOUND:
                break
        if code:
            return Unknown(self._words(name, code))
        return {item.pid: None if item.memory == NOT_AVAILABLE else item.memory for item in found[: count.value]}

    def utilisation(self, uuid: str) -> float | Unknown:
        """Share of the last sample in which a kernel ran, percent; MIG instances do not have it."""
        rates = _Utilisation()
        code = self._code("nvmlDeviceGetUtilizationRates", self._handles[uuid], ctypes.byref(rates))
        return Unknown(self._words("nvmlDeviceGetUtilizationRates", code)) if code else float(rates.gpu)

    def close(self) -> None:
        """Let go of the driver. The devices can still be named, and not asked any more."""
        if self._library is not None and self.error is None:
            self._code("nvmlShutdown")
        self.error = self.error or "NVML is closed"
