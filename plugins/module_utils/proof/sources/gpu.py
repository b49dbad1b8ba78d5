# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which GPUs a unit's processes use: the GPU proof ladder, and why it ends where it does.

NVML's process list is joined with the unit's control group by pid. In a container drivers differ in whose pids they
list: those of this namespace, or the node's. So it is looked at, not assumed (C(whose_pids)); where they are the node's, the node's
own view (C(proof/gpus.py)) is joined, if it is there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import NOT_READ, Gpu, Unknown, known
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import process
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.nvml import Nvml

# What the node says of this container: written from outside by `launchproof gpus --publish`.
NODE_VIEW = "/run/launchproof/node-gpus.json"
FRESH = 5.0  # s; a node's view that is older says nothing
FOREIGN_LEAST = 512 << 20  # bytes in use beyond what is listed that are worth a word; a context takes about as much
INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of linux/proc_ns.h
CUDA_NODE = "nvidia-uvm"  # CUDA opens it, NVML never does: a program that only measures holds the others too
UVM_FIX = "load nvidia-uvm on the host (nvidia-modprobe -u -c 0), which no reboot does by itself, and give the container its device"
GPU_NODE = re.compile(r"nvidia\d+$")


@dataclass(frozen=True)
class Opened:
    """What a process holds of the driver."""

    # Names of its open device nodes below /dev, such as nvidia0, nvidiactl, nvidia-uvm.
    nodes: frozenset
    # It has libcuda mapped.
    libcuda: bool

    @property
    def cuda(self) -> bool:
        """Whether it came through cuInit: NVML alone opens no nvidia-uvm, and a cuInit that fails no GPU."""
        return self.libcuda and CUDA_NODE in self.nodes and any(map(GPU_NODE.match, self.nodes))


def held_nodes(pid: int) -> frozenset | Unknown:
    """Names of the driver's device nodes that a process has open; Unknown where that may not be read.

    A process that has gone holds nothing.
    """
    folder = "/proc/%d/fd" % pid
    nodes = set()
    try:
        for name in os.listdir(folder):
            try:
                target = os.readlink("%s/%s" % (folder, name))
            except FileNotFoundError:  # closed while we look
                continue
            if target.startswith("/dev/nvidia"):
                nodes.add(target[len("/dev/") :])
    except (FileNotFoundError, ProcessLookupError):
        pass
    except OSError as error:
        return Unknown("%s: %s" % (folder, error.strerror))
    return frozenset(nodes)


def has_libcuda(pid: int) -> bool | Unknown:
    """Whether a process has libcuda mapped. In a large program this costs milliseconds."""
    path = "/proc/%d/maps" % pid
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return any("/libcuda.so" in line for line in handle)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError as error:
        return Unknown("%s: %s" % (path, error.strerror))


def visible_devices(pid: int) -> str | None:
    """CUDA_VISIBLE_DEVICES as a process was given it, None where it has none or may not be asked."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as handle:
            for item in handle.read().split(b"\0"):
                if item.startswith(b"CUDA_VISIBLE_DEVICES="):
                    return item.partition(b"=")[2].decode(errors="replace")
    except OSError:
        pass
    return None


def node_problem(name: str, root: str = "", ids: tuple | None = None) -> str | None:
    """Why /dev/NAME cannot be opened, None where it can. That a node is there proves nothing: a filter may refuse it.

    I(root) is the root of the process that needs it, I(ids) its (uid, set of gids).
    """
    path = "%s/dev/%s" % (root, name)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        about = os.fstat(descriptor)
        os.close(descriptor)
    except OSError as error:
        fix = UVM_FIX if name == CUDA_NODE else "give the container this device, and do not hide it from the unit"
        return "/dev/%s cannot be opened (%s): %s" % (name, error.strerror, fix)
    if ids and ids[0] != 0:
        shift = 6 if about.st_uid == ids[0] else 3 if about.st_gid in ids[1] else 0
        if about.st_mode >> shift & 6 != 6:
            return "/dev/%s has mode %04o, so uid %d may not open it: give it mode 0666" % (
                name,
                about.st_mode & 0o7777,
                ids[0],
            )
    return None


def process_ids(pid: int) -> tuple | None:
    """(effective uid, set of gids) of a process; None where it has gone."""
    try:
        with open("/proc/%d/status" % pid, encoding="utf-8", errors="replace") as handle:
            fields = dict(line.partition(":")[::2] for line in handle)
        return int(fields["Uid"].split()[1]), {int(fields["Gid"].split()[1]), *map(int, fields["Groups"].split())}
    except (OSError, KeyError, ValueError, IndexError):
        return None


def whose_pids(listed, list_again) -> str:
    """The self-test: whose pids NVML lists here. C(same), C(translated), C(host) or, with nothing listed, C(unknown).

    In the first pid namespace there is only one kind. Elsewhere each listed pid must be a process of this namespace that
    holds a GPU's device node open, as every process with a context does; one that has ended meanwhile is not listed by
    I(list_again).
    """
    if os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE:
        return "same"
    if not listed:
        return "unknown"

    def is_here(pid: int) -> bool:
        if not os.path.exists("/proc/%d" % pid):
            return False
        nodes = held_nodes(pid)
        return isinstance(nodes, Unknown) or any(map(GPU_NODE.match, nodes))

    strange = {pid for pid in listed if not is_here(pid)}
    if strange:
        strange = {pid for pid in strange & set(list_again()) if not is_here(pid)}
    return "host" if strange else "translated"


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


def judge(declared: tuple, memory: dict, from_node: bool, rose: tuple, held: Opened, floor: int) -> tuple:
    """Return (level, reason) of the GPU proof ladder. Pure.

    I(memory) is {UUID: bytes, or None where not told} of the unit's own processes, I(rose) the UUIDs whose memory in use
    rose by the floor.
    """
    if memory:
        if set(memory) != set(declared):
            return "none", "wrong_gpu"
        if all(value is not None for value in memory.values()):
            if all(value >= floor for value in memory.values()):
                return "proved_from_node" if from_node else "proved", ""
            return "none", "context_without_memory"
        return ("consistent", "") if set(rose) == set(declared) else ("none", "context_without_memory")
    if not held.cuda:
        return "none", "no_device"
    if rose and set(rose) == set(declared):
        return "consistent", ""
    return "none", "wrong_gpu" if rose else "opened_only"


def read_node_view(path: str = NODE_VIEW) -> dict | None:
    """{UUID: [process, …]} as the node sees this container, None without a fresh view."""
    view = ledger.read_json(path)
    if not view or not 0 <= ledger.boottime() - view.get("at", 0.0) <= FRESH:
        return None
    return {uuid: gpu["processes"] for uuid, gpu in view["gpus"].items()}


_open = None  # the process's NVML: one prover follows many units


def shared_nvml() -> Nvml:
    """This process's NVML, opened anew where it did not work: a driver may come, and may go."""
    global _open
    if _open is None or _open.error:
        _open = Nvml()
    return _open


class GpuSource:
    """Follows the declared GPUs of one unit."""

    def __init__(self, spec, environ: dict):
        self.spec = spec
        self.visible = environ.get("CUDA_VISIBLE_DEVICES")
        self.nvml = shared_nvml()
        self.pids = "unknown"
        self._judged = None  # the listed pids that self.pids was found by
        self._memory, self._used, self._listed, self._busy = {}, {}, {}, NOT_READ
        self._failed = {}  # UUID: why its processes cannot be listed
        self._from_node = False
        self._held = Opened(frozenset(), False)
        self._own, self._older, self._with_libcuda = (), (), set()

    @property
    def declared(self) -> tuple:
        """UUIDs of the declared GPUs; words of CUDA_VISIBLE_DEVICES where NVML does not know them."""
        return declared_uuids(self.visible, list(self.nvml.devices))

    def memory(self) -> dict | Unknown:
        """Memory in use per device now, bytes: the baseline."""
        return Unknown(self.nvml.error) if self.nvml.error else self._uses()

    def sample(self, processes: tuple, older: tuple = ()) -> None:
        """Look which devices the unit's I(processes) use. I(older) are an earlier run's that are still in its group."""
        left = {item.pid for item in older}
        self._own = tuple(item.pid for item in processes if item.alive and item.pid not in left)
        self._older = tuple(sorted(left))
        self.nvml = shared_nvml()
        self._memory, self._listed, self._used, self._from_node = {}, {}, {}, False
        if self.nvml.error is None:
            self._ask_nvml()
        self._held = self._opened() if not self._memory else Opened(frozenset(), False)

    def _list(self) -> dict:
        """{UUID: {pid: bytes or None}}. A GPU that does not answer is left out, and its reason kept."""
        found = {uuid: self.nvml.processes(uuid) for uuid in self.nvml.devices}
        self._failed = {uuid: listed.why for uuid, listed in found.items() if isinstance(listed, Unknown)}
        return {uuid: listed for uuid, listed in found.items() if uuid not in self._failed}

    def _ask_nvml(self) -> None:
        self._listed = self._list()
        pids = {pid for found in self._listed.values() for pid in found}
        if pids != self._judged:
            self._judged = pids
            self.pids = whose_pids(pids, lambda: {pid for found in self._list().values() for pid in found})
        self._used = self._uses()
        if self.pids in ("same", "translated"):
            self._memory = self._joined(self._listed)
        elif self.pids == "host":
            view = read_node_view()
            if view is not None:
                self._from_node = True
                self._memory = self._joined(
                    {uuid: {item["inside"]: item["memory"] for item in found} for uuid, found in view.items()}
                )
        busy = [known(self.nvml.utilisation(uuid)) for uuid in self.declared if uuid in self.nvml.devices]
        busy = [value for value in busy if value is not None]
        self._busy = max(busy) if busy else NOT_READ

    def _uses(self) -> dict:
        used = {uuid: self.nvml.used(uuid) for uuid in self.nvml.devices}
        return {uuid: value for uuid, value in used.items() if not isinstance(value, Unknown)}

    def _joined(self, listed: dict) -> dict:
        """{UUID: bytes of the unit's processes, None where one of them is not told}."""
        joined = {}
        for uuid, found in listed.items():
            own = [size for pid, size in found.items() if pid in self._own]
            if own:
                joined[uuid] = None if None in own else sum(own)
        return joined

    def _opened(self) -> Opened | Unknown:
        """What the unit's processes hold of the driver, together."""
        nodes = frozenset()
        for pid in self._own:
            held = held_nodes(pid)
            if isinstance(held, Unknown):
                return held
            nodes |= held
            if held and pid not in self._with_libcuda:
                mapped = has_libcuda(pid)
                if isinstance(mapped, Unknown):
                    return mapped
                if mapped:  # and nobody unmaps it
                    self._with_libcuda.add(pid)
        return Opened(nodes, any(pid in self._with_libcuda for pid in self._own))

    def facts(self, baseline: dict) -> Gpu | Unknown:
        """How far the proof came. I(baseline) is what memory() gave before the start."""
        held = self._held
        if isinstance(held, Unknown):
            return held
        if self.nvml.error and held.cuda:
            return Unknown(self.nvml.error)  # the job uses CUDA, and nobody can be asked on which GPU
        declared, floor = self.declared, self.spec.memory_floor
        rises = {uuid: used - baseline.get(uuid, 0) for uuid, used in self._used.items()}
        rose = tuple(uuid for uuid, rise in rises.items() if rise >= floor and not self._list_tells(uuid))
        level, reason = judge(declared, self._memory, self._from_node, rose, held, floor)
        memory = {uuid: size for uuid, size in self._memory.items() if size is not None}
        if level == "consistent":
            memory = {uuid: rises[uuid] for uuid in declared}
        return Gpu(
            level=level, reason=reason, declared=declared, found=tuple(self._memory) or rose, memory=memory, utilisation=self._busy,
            pids=self.pids, why=self._causes(declared, held) if reason else (), others=self._others(declared),
        )  # fmt: skip

    def _list_tells(self, uuid: str) -> bool:
        """Whether NVML's list says who is on a device, so that a rise of its memory is somebody's, and known whose."""
        joined = self.pids != "host" or self._from_node
        return joined and uuid not in self._failed and self._memory.get(uuid, 0) is not None

    def _causes(self, declared: tuple, held: Opened) -> tuple:
        """What can be found wrong and what to do about it, in words, the most telling first."""
        causes = ["%s: end that process first" % text for text in self._left(declared)]
        if self.nvml.error:
            causes.append("%s: give the container the driver libraries of its host's version" % self.nvml.error)
        causes += [*self.nvml.problems, *("%s: %s" % item for item in self._failed.items())]
        main = self._own[0] if self._own else None
        given = None if main is None else visible_devices(main)
        if given is not None and self.visible is not None and given != self.visible:
            causes.append(
                "pid %s was given CUDA_VISIBLE_DEVICES='%s' where '%s' is declared: look at what starts the program"
                % (main, given, self.visible)
            )
        elif self.visible == "":
            causes.append("CUDA_VISIBLE_DEVICES is declared empty: name the GPUs")
        if self.nvml.error is None:
            have = ", ".join(self.nvml.devices) or "none"
            causes += [
                "NVML has no GPU %s here, it has %s: correct the declaration, or give the container that GPU"
                % (word, have)
                for word in declared
                if word not in self.nvml.devices
            ]
        if main is not None and not held.cuda and not self._memory:
            minors = {device.minor for uuid, device in self.nvml.devices.items() if uuid in declared}
            names = ["nvidiactl", *("nvidia%d" % minor for minor in sorted(minors - {None})), CUDA_NODE]
            root, ids = "/proc/%s/root" % main, process_ids(main)
            causes += filter(None, (node_problem(name, root, ids) for name in names if name not in held.nodes))
            if held.nodes:
                causes.append(
                    "it holds %s open and makes no context: it only asks NVML, or CUDA gave up; look for a fall-back to the CPU"
                    % ", ".join(sorted(held.nodes))
                )
            else:
                causes.append(
                    "it holds no device of the driver open: look for a fall-back to the CPU, or a torch without CUDA"
                )
        return tuple(dict.fromkeys(causes))

    def _left(self, declared: tuple) -> list:
        """The workers of earlier runs that still have memory of the declared GPUs, in words."""
        return [
            "pid %d of an earlier run of the unit holds %s of %s" % (pid, mib(size), uuid)
            for uuid in declared
            for pid, size in self._listed.get(uuid, {}).items()
            if self.pids != "host" and pid in self._older
        ]

    def _others(self, declared: tuple) -> tuple:
        """Who else has memory of the declared GPUs, in words: an earlier run's worker, a neighbour, somebody outside."""
        found = self._left(declared)
        if self.pids == "host":
            return ()
        for uuid in declared:
            listed = self._listed.get(uuid, {})
            hidden = self._used.get(uuid, 0) - sum(size or 0 for size in listed.values())
            for pid, size in listed.items():
                if pid not in self._own and pid not in self._older:
                    found.append(
                        "pid %d (%s) holds %s of %s" % (pid, process.unit_of(pid) or "of no unit", mib(size), uuid)
                    )
            if uuid in self._listed and None not in listed.values() and hidden >= FOREIGN_LEAST:
                found.append("%s of %s are in use by processes that cannot be seen from here" % (mib(hidden), uuid))
        return tuple(found)

    def close(self) -> None:
        """The process's NVML stays open for its other units."""


def mib(size: int | None) -> str:
    """Bytes as a sentence says them."""
    return "memory of an amount that NVML does not tell" if size is None else "%d MiB" % (size >> 20)
