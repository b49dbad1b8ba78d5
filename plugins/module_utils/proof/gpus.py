# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""C(launchproof gpus): every GPU of this machine and who uses it, across containers.

On a node this sees what no container can: the processes of all its containers, by node pid, each with the container, the
unit and the pid that it has inside. I(--publish) keeps that view readable in one container, for its prover.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import time

from ansible_collections.dflash.launchproof.plugins.module_utils.proof import ledger
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import gpu, process
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources.nvml import Nvml

# Where LXC, as Proxmox sets it up (/lxc/ID/ns/…) and by itself (/lxc.payload.NAME/…), puts a container's processes.
CONTAINER = re.compile(r"/lxc(?:/|\.payload[./])([^/]+)(/|$)")
PUBLISH_EVERY = 1.0  # s; NVML has no event for a process that comes or goes


class GpusError(Exception):
    """The view cannot be had or published; the text says why."""


def container_of(pid: int) -> str | None:
    """The LXC container that a process is in, None where it is in none that can be seen from here."""
    try:
        with open("/proc/%d/cgroup" % pid, encoding="utf-8", errors="replace") as handle:
            found = CONTAINER.search(handle.read())
    except OSError:
        return None
    return found.group(1) if found else None


def pids_of(pid: int) -> list:
    """A process's pids, that of this namespace first (NSpid of proc_pid_status(5)); [] where it has gone."""
    try:
        with open("/proc/%d/status" % pid, encoding="utf-8", errors="replace") as handle:
            for line in handle:
                if line.startswith("NSpid:"):
                    return [int(word) for word in line.split()[1:]]
    except OSError:
        pass
    return []


def describe(pid: int, memory: int | None) -> dict:
    """One process that NVML lists: who it is, here and in its container."""
    pids = pids_of(pid)
    container = container_of(pid)
    return {
        "pid": pid,
        "inside": pids[1] if container and len(pids) > 1 else pid,
        "container": container,
        "unit": process.unit_of(pid),
        "command": " ".join(process.argv(pid))[:120],
        "memory": memory,
    }


def view(nvml: Nvml) -> dict:
    """Every GPU with everybody on it: {at, driver, error, problems, pids, gpus: {UUID: {…, processes: […]}}}."""
    found = {}
    listed = {uuid: nvml.processes(uuid) for uuid in nvml.devices} if not nvml.error else {}
    for uuid, processes in listed.items():
        device, used = nvml.devices[uuid], nvml.used(uuid)
        found[uuid] = {
            "index": device.index,
            "name": device.name,
            "minor": device.minor,
            "parent": device.parent,
            "used": None if isinstance(used, Unknown) else used,
            "error": processes.why if isinstance(processes, Unknown) else None,
            "processes": []
            if isinstance(processes, Unknown)
            else [describe(*item) for item in sorted(processes.items())],
        }
    pids = {item["pid"] for one in found.values() for item in one["processes"]}

    def again() -> set:
        answers = (nvml.processes(uuid) for uuid in nvml.devices)
        return {pid for answer in answers if not isinstance(answer, Unknown) for pid in answer}

    return {
        "at": ledger.boottime(),
        "driver": nvml.driver,
        "error": nvml.error,
        "problems": nvml.problems,
        "pids": gpu.whose_pids(pids, again),
        "gpus": found,
    }


def inside_view(whole: dict, container: str) -> dict:
    """What one container may know of a node's view: its own processes, and how much memory is somebody else's."""
    gpus = {}
    for uuid, one in whole["gpus"].items():
        own = [item for item in one["processes"] if item["container"] == container]
        gpus[uuid] = {
            "used": one["used"],
            "processes": [{"inside": item["inside"], "memory": item["memory"]} for item in own],
        }
    return {"at": whole["at"], "gpus": gpus}


def init_of(container: str) -> int:
    """Pid, here, of a running container's init. Raises GpusError where there is none."""
    for name in os.listdir("/proc"):
        if name.isdigit() and container_of(int(name)) == container:
            pids = pids_of(int(name))
            if len(pids) > 1 and pids[1] == 1:
                return int(name)
    raise GpusError("no container %s runs on this machine" % container)


def deliver(init: int, path: str, data: dict) -> None:
    """Write I(data) as I(path) inside the container of I(init), as its root and with its root as ours.

    A child does it after chroot(2): a link that the container put into the way leads nowhere but into the container. Raises
    GpusError.
    """
    root = "/proc/%d/root" % init
    owner = os.stat("/proc/%d" % init).st_uid
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chroot(root)
            os.chdir("/")
            os.setgroups([])
            os.setgid(owner)
            os.setuid(owner)
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            ledger.write_json(path, data)
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise GpusError("%s cannot be written in the container whose init is pid %d" % (path, init))


def publish(container: str, seconds: float | None) -> None:
    """Keep the container's copy of the view fresh, for I(seconds) or until the container ends."""
    init = init_of(container)
    started = process.read_stat(init)["started_at"]
    end = None if seconds is None else time.monotonic() + seconds
    while end is None or time.monotonic() < end:
        about = process.read_stat(init)
        if about is None or about["started_at"] != started or about["state"] in "ZX":
            return
        nvml = gpu.shared_nvml()
        if nvml.error:
            raise GpusError(nvml.error)
        deliver(init, gpu.NODE_VIEW, inside_view(view(nvml), container))
        time.sleep(PUBLISH_EVERY)


def context_test(timeout: float = 30.0) -> str:
    """Make a CUDA context in a child and look under which pid NVML lists it: the self-test that needs nobody else's process.

    It costs half a GiB of the first GPU for a moment. Returns what whose_pids() would, or raises GpusError.
    """
    ready_read, ready_write = os.pipe()
    end_read, end_write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ready_read)
            os.close(end_write)
            os.write(ready_write, (_make_context() or "ok").encode())
            os.read(end_read, 1)
        finally:
            os._exit(0)
    os.close(ready_write)
    os.close(end_read)
    try:
        said = os.read(ready_read, 4096).decode()
        if said != "ok":
            raise GpusError("no CUDA context can be made here: %s" % (said or "the child died"))
        nvml = Nvml()
        if nvml.error:
            raise GpusError(nvml.error)
        pids = {pid for uuid in nvml.devices for pid in _or_empty(nvml.processes(uuid))}
        return "translated" if child in pids else "host"
    finally:
        os.close(end_write)
        os.close(ready_read)
        os.waitpid(child, 0)


def _or_empty(found) -> dict:
    return {} if isinstance(found, Unknown) else found


def _make_context() -> str | None:
    """A context on the first device; the error in words. cuInit is the first thing that an after-reboot fault breaks."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    context = ctypes.c_void_p()
    for name, arguments in (("cuInit", (0,)), ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), 0))):
        code = getattr(library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            library.cuGetErrorName(code, ctypes.byref(text))
            return "%s: %s (%d)" % (name, (text.value or b"error").decode(), code)
    return None


def lines(whole: dict) -> list:
    """The view as a table."""
    if whole["error"]:
        return ["NVML: " + whole["error"]]
    rows = ["driver %s" % whole["driver"], *whole["problems"]]
    for uuid, one in whole["gpus"].items():
        used = gpu.mib(one["used"]) if one["used"] is not None else "an unknown amount"
        rows.append("%s (GPU %d, %s): %s in use" % (uuid, one["index"], one["name"], used))
        rows += ["  " + one["error"]] if one["error"] else []
        for item in one["processes"]:
            where = "container %s, pid %d there" % (item["container"], item["inside"]) if item["container"] else "here"
            rows.append(
                "  pid %d, %s, %s: %s" % (item["pid"], where, item["unit"] or "no unit", gpu.mib(item["memory"]))
            )
    return rows


def main(options, _paths) -> int:
    """The command line's part; 0 when there is something to see, 2 when nobody could look."""
    try:
        if options.publish:
            publish(options.publish, options.seconds)
            return 0
        whole = view(Nvml())
        if options.self_test:
            whole["pids"] = context_test()
    except GpusError as error:
        sys.stderr.write("launchproof: %s\n" % error)
        return 2
    text = json.dumps(whole, indent=2, sort_keys=True) if options.json else "\n".join(lines(whole))
    sys.stdout.write(text + "\n")
    return 2 if whole["error"] else 0
