# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every rung of the GPU proof ladder, and every way to fall off it: real units and processes, a stand-in for the driver.

The programs call libcuda as torch does in the end (cuInit, a context, memory) and go on on the CPU where it fails, silently, as
the programs of the incidents did. What NVML answers comes from the stand-in's file.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.integration import matrix
from tests.integration.cases import STEP, Case
from tests.integration.test_matrix import judge
from tests.support.container import REPO, Container
from tests.support.nvml import standin
from tests.support.nvml.standin import Gpu, Listed, State

pytestmark = pytest.mark.container

A, B = "GPU-aaaaaaaa-0000", "GPU-bbbbbbbb-1111"
FLOOR = 600 << 20  # above a bare context's 518 MiB
GIB = 1 << 30


def job(*steps: object, before: str = "", more: str = "", every: float = 0.2) -> str:
    """A program that goes so far with CUDA ("init", "context", bytes to take) and then prints steps."""
    return f"""#!/usr/bin/python3 -u
import ctypes, itertools, os, signal, sys, time
{before}
def cuda(*steps):
    library = ctypes.CDLL("libcuda.so.1")
    for step in steps:
        if step == "init":
            code = library.cuInit(0)
        elif step == "context":
            code = library.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), int(os.environ.get("ORDINAL", "0")))
        else:
            code = library.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(step))
        if code == 2:
            print("CUDA out of memory. Tried to allocate 500.00 GiB", flush=True)
            signal.pause()
        if code:
            print(f"cuda {{step}} gave {{code}}, going on on the CPU", flush=True)
            return
cuda(*{list(steps)!r})
for i in itertools.count(1):
    print(f"ev=step step={{i}}")
    {more or "pass"}
    time.sleep({every})
"""


WORKS = job("init", "context", GIB)
LEVEL = {"level": "proved", "memory_floor": FLOOR, "within": 8}
# A worker that keeps the GPU when its parent dies; after a restart the program only uses the CPU.
FORKS = job(
    before="""
again = os.path.exists(os.environ["DIR"] + "/ran")
open(os.environ["DIR"] + "/ran", "w").close()
if not again and os.fork() == 0:
    os.environ["CHILD"] = "1"
""",
    more="""if i == 1 and "CHILD" in os.environ:
        cuda("init", "context", 2 << 30)""",
)


def case(
    name: str, expected: str, induced_by: str, program: str = WORKS, visible: str = A, proof: dict | None = None, **more
) -> Case:
    """A case that declares GPU A unless it says otherwise."""
    proof = {"progress": STEP, "gpu": LEVEL, **(proof or {})}
    return Case(name, expected, induced_by, program, env={"CUDA_VISIBLE_DEVICES": visible}, proof=proof, **more)


# What can be induced on one machine that works: each unit has its own fault.
CASES = [
    case("gpu-proved", "ok_progressing", "a context with memory on the declared GPU", evidence=('"gpu": "proved"', A)),
    case("gpu-both", "ok_progressing", "a worker for each of two declared GPUs", visible=f"{A},{B}",
         program=job("init", "context", GIB, before='if os.fork() == 0: os.environ["ORDINAL"] = "1"'),
         evidence=('"gpu": "proved"', A, B)),
    case("gpu-by-index", "ok_progressing", "the declared GPU is named by its index", visible="1", evidence=('"gpu": "proved"', B)),
    case("gpu-context-only", "gpu_not_engaged", "a context and nothing in it",
         program=job("init", "context"), evidence=("context_without_memory",)),
    case("gpu-opened-only", "gpu_not_engaged", "cuInit, and no context", program=job("init"), evidence=("opened_only",)),
    case("gpu-cpu", "gpu_not_engaged", "the program never asks for the GPU: a CPU build",
         program=job(), evidence=("no_device", "holds no device of the driver open")),
    case("gpu-measures", "gpu_not_engaged", "the program uses NVML for its telemetry, and the CPU for its work",
         program=job(before='os.open("/dev/nvidiactl", os.O_RDWR); os.open("/dev/nvidia0", os.O_RDWR)'),
         evidence=("no_device", "only asks NVML")),
    case("gpu-empty", "gpu_not_engaged", "a wrapper empties CUDA_VISIBLE_DEVICES",
         exec_start="/usr/bin/env CUDA_VISIBLE_DEVICES= /opt/cases/{name}/run",
         evidence=("no_device", "was given CUDA_VISIBLE_DEVICES=''")),
    case("gpu-none-declared", "gpu_not_engaged", "the job itself declares CUDA_VISIBLE_DEVICES empty", visible="",
         evidence=("no_device", "CUDA_VISIBLE_DEVICES is declared empty")),
    case("gpu-wrong-uuid", "gpu_not_engaged", "the declared GPU is another machine's", visible="GPU-zzzzzzzz",
         evidence=("no_device", "NVML has no GPU GPU-zzzzzzzz here", A)),
    case("gpu-wrong", "gpu_not_engaged", "it works, on the other GPU",
         exec_start=f"/usr/bin/env CUDA_VISIBLE_DEVICES={B} /opt/cases/{{name}}/run", evidence=("wrong_gpu", f"it runs on {B}")),
    case("gpu-half", "gpu_not_engaged", "two GPUs are declared and one is used", visible=f"{A},{B}", evidence=("wrong_gpu",)),
    case("gpu-no-node", "gpu_not_engaged", "the GPU's device node is not there", service="InaccessiblePaths=/dev/nvidia0",
         evidence=("no_device", "/dev/nvidia0 cannot be opened")),
    case("gpu-no-uvm", "gpu_not_engaged", "nvidia-uvm is not there, as after a reboot: NVML works and cuInit does not",
         service="InaccessiblePaths=/dev/nvidia-uvm", evidence=("no_device", "/dev/nvidia-uvm cannot be opened")),
    case("gpu-private-devices", "gpu_not_engaged", "PrivateDevices=yes takes the device nodes away",
         service="PrivateDevices=yes", evidence=("no_device", "/dev/nvidiactl cannot be opened (No such file")),
    case("gpu-not-mine", "gpu_not_engaged", "the device node has a mode that keeps the job's user out",
         before="mknod -m 0660 /dev/$NAME c 1 3", after="rm -f /dev/$NAME",
         service="User=nobody\nBindPaths=/dev/gpu-not-mine:/dev/nvidia-uvm", evidence=("no_device", "mode 0660", "/dev/nvidia-uvm")),
    case("gpu-oom-alive", "error_but_alive", "the GPU's memory is taken, and the job lives on without it",
         program=job("init", "context", 500 * GIB), evidence=("CUDA out of memory",)),
    case("gpu-killed", "killed_by_signal", "the main process is killed, and its worker keeps the memory", program=FORKS,
         service="KillMode=process", during="until_ok grep -q step=3 $LOG; sleep 1.2; kill -9 $(prop MainPID)",
         proof={"process": {"stable_for": 60}}, timeout=60, evidence=("gpu_still_held",)),
    case("gpu-leftover", "gpu_not_engaged", "an earlier run's worker holds the GPU while the new run uses the CPU", program=FORKS,
         service="KillMode=process", before="systemctl start $UNIT; until_ok grep -q step=3 $LOG",
         evidence=("of an earlier run of the unit", "holds 2566 MiB")),
    case("gpu-reload", "ok_progressing", "systemd reloads while the job runs", during="until_ok grep -q step=2 $LOG; systemctl daemon-reload",
         evidence=('"gpu": "proved"',)),
]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(request):
    """Outcomes by name, of the cases that this run has collected."""
    wanted = {
        item.callspec.params["item"].name
        for item in request.session.items
        if "item" in getattr(getattr(item, "callspec", None), "params", {})
    }
    chosen = [item for item in CASES if item.name in wanted]
    with Container("lpt-gpu") as container, ThreadPoolExecutor(matrix.AT_ONCE) as pool:
        standin.install(container, State(gpus=[Gpu(A), Gpu(B)], nodes=True))
        matrix.deliver(container, chosen)
        yield {found.case.name: found for found in pool.map(lambda item: matrix.run(container, item), chosen)}


@pytest.mark.parametrize("item", CASES, ids=lambda item: item.name)
def test_ladder(outcomes, item):
    judge(outcomes[item.name])


# --- what concerns the whole machine: one after the other, in one container


@pytest.fixture(scope="module")
def machine():
    with Container("lpt-gpu-machine") as container:
        container.install()
        standin.install(container, State(gpus=[Gpu(A), Gpu(B)]))
        yield container


@pytest.fixture
def prove(machine):
    """Launch the program in the machine with a state of the driver, and return the row of the verdict."""

    def run(state: State | None, program: str = WORKS, during=None, **gpu) -> dict:
        if state is not None:
            state.write(machine.path(standin.STATE))
        machine.write("/opt/job", program, 0o755)
        machine.write(
            "/opt/proof.json", json.dumps({"progress": STEP, "gpu": {**LEVEL, **gpu}, "process": {"stable_for": 1}})
        )
        argv = ["launchproof", "run", "--name", "gpujob", "--gpu", A, "--proof", "/opt/proof.json", "--json", "--quiet"]
        with ThreadPoolExecutor(1) as beside:
            other = beside.submit(during) if during else None
            said = machine.run(*argv, "--timeout", "30", "--", "/opt/job", check=False)
            if other:
                other.result()
        (row,) = json.loads(said.stdout)["jobs"]
        return row

    yield run
    machine.shell("systemctl stop gpujob.service; systemctl reset-failed gpujob.service", check=False)


def wait_for(look, seconds: float = 15.0):
    """What ``look`` returns once it is true; it has no event."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return found


def pid_here(machine: Container) -> int | None:
    """The pid, on this machine, of the job in the container."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{name}/cmdline", "rb") as command,
            open(f"/proc/{name}/cgroup") as groups,
        ):
            where = groups.read()
            if machine.name in where and "gpujob.service" in where and command.read().endswith(b"/opt/job\0"):
                return int(name)
    return None


def detail(row: dict) -> str:
    assert row["code"] == "gpu_not_engaged", row
    return row["evidence"]["detail"]


LOG = "/var/lib/launchproof/runs/gpujob.service/current/log"
HOST = State(gpus=[Gpu(A), Gpu(B)], host_pids=True)


@pytest.mark.peers("nvidia-docker 1483")
def test_where_nvml_lists_the_nodes_pids_they_are_not_mistaken_for_ours(machine, prove):
    """The list names a pid that also exists here, and is another process."""
    row = prove(replace(HOST, processes=[Listed(1, memory=2 * GIB)]))
    assert detail(row) == "opened_only" and row["evidence"]["pids"] == "host"


def memory_by_node_pid(machine: Container) -> list[Listed]:
    """Wait for the job; from then on its memory is in use, and NVML lists it by the node's pid."""
    listed = [Listed(wait_for(lambda: pid_here(machine)), memory=2 * GIB)]
    replace(HOST, processes=listed).write(machine.path(standin.STATE))
    return listed


def test_consistent_without_the_nodes_word(machine, prove):
    row = prove(HOST, during=lambda: memory_by_node_pid(machine), level="consistent")
    assert row["code"] == "ok_progressing" and row["evidence"]["gpu"] == "consistent", row
    assert row["evidence"]["gpus"] == {A: 2 * GIB} and row["evidence"]["gpu_pids"] == "host"


def test_proved_from_node(machine, prove, tmp_path):
    """The node's view, published into the container, is joined by the pid that a process has inside."""
    state = tmp_path / "state"
    replace(HOST).write(state)
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": str(standin.built()),
        "NVML_STANDIN": str(state),
        "PYTHONPATH": str(REPO / "collections"),
    }
    program = "import sys; from ansible_collections.dflash.launchproof.plugins.module_utils.proof.cli import main; sys.exit(main(sys.argv[1:]))"
    node = [sys.executable, "-c", program, "gpus"]
    with subprocess.Popen([*node, "--publish", machine.name, "--seconds", "30"], env=env) as publisher:

        def act():
            replace(HOST, processes=memory_by_node_pid(machine)).write(state)

        row = prove(HOST, during=act, level="proved_from_node")
        publisher.terminate()
    assert row["code"] == "ok_progressing" and row["evidence"]["gpu"] == "proved_from_node", row
    assert row["evidence"]["gpus"] == {A: 2 * GIB}
    seen = json.loads(subprocess.run([*node, "--json"], env=env, capture_output=True, text=True, check=True).stdout)
    (process,) = seen["gpus"][A]["processes"]
    assert (
        process["container"] == machine.name
        and process["unit"] == "gpujob.service"
        and process["inside"] != process["pid"]
    )
    assert seen["pids"] == "same"


def test_mismatch_names_both_versions(prove):
    row = prove(State(gpus=[Gpu(A)], init=18, cuinit=803))
    assert detail(row) == "no_device"
    assert "version mismatch (18)" in row["remedy"] and f"the library here is of {standin.VERSION}" in row["remedy"]


def test_a_driver_that_does_not_answer_while_cuda_works_blinds_the_observer(prove):
    row = prove(State(gpus=[Gpu(A)], init=4))
    assert row["code"] == "observer_blind" and "Insufficient Permissions" in row["evidence"]["why"], row


def test_a_lost_gpu(prove):
    row = prove(State(gpus=[Gpu(A, lost=True), Gpu(B)]), program=job())
    assert detail(row) == "no_device" and "GPU is lost (15)" in row["remedy"]


def test_memory_that_nvml_does_not_tell(machine, prove):
    """Permitted in part: the process is listed without its memory, and the device's rises."""

    def act():
        wait_for(lambda: "ev=step" in machine.run("cat", LOG, check=False).stdout)
        pid = int(machine.run("systemctl", "show", "-P", "MainPID", "gpujob.service").stdout)
        told = State(gpus=[Gpu(A, used=2 * GIB), Gpu(B)], processes=[Listed(pid, memory=standin.UNKNOWN_MEMORY)])
        told.write(machine.path(standin.STATE))

    machine.shell("rm -f /var/lib/launchproof/runs/gpujob.service/current")
    row = prove(HOST, during=act, level="consistent")
    assert row["code"] == "ok_progressing" and row["evidence"]["gpu"] == "consistent", row


def test_a_busy_gpu_that_looks_empty(prove):
    """Foreign processes are not listed in a container, and their memory counts: the list is empty, the GPU is not."""
    row = prove(State(gpus=[Gpu(A, used=70 * GIB), Gpu(B)]), program=job())
    assert detail(row) == "no_device"
    assert row["evidence"]["gpu_others"] == [f"71680 MiB of {A} are in use by processes that cannot be seen from here"]


def test_mig(prove, machine):
    """An instance is a device of its own: its GPU's memory is not."""
    gpus = [Gpu(A, mig=(("MIG-1", 1, 0), ("MIG-2", 2, 0)))]
    row = prove(State(gpus=gpus), program=job())
    assert "NVML has no GPU " + A in row["remedy"] and "MIG-1, MIG-2" in row["remedy"]


def test_the_self_test(machine):
    """It makes a context of its own to see whose pids NVML lists; the first thing that fails after a reboot is cuInit."""
    State(gpus=[Gpu(A)]).write(machine.path(standin.STATE))
    assert json.loads(machine.run("launchproof", "gpus", "--self-test", "--json").stdout)["pids"] == "translated"
    replace(HOST, processes=[Listed(1)]).write(machine.path(standin.STATE))
    assert json.loads(machine.run("launchproof", "gpus", "--self-test", "--json").stdout)["pids"] == "host"


def test_after_a_reboot_without_uvm(machine, prove):
    """NVML and nvidia-smi work and cuInit gives 999, until something on the node loads nvidia-uvm."""
    machine.stop()
    machine.start()
    standin.install(machine, State(gpus=[Gpu(A), Gpu(B)]), nodes=["nvidiactl", "nvidia0"])
    row = prove(None)
    assert detail(row) == "no_device" and "/dev/nvidia-uvm cannot be opened (No such file" in row["remedy"]
    said = machine.run("launchproof", "gpus", "--self-test", check=False)
    assert said.returncode == 2 and "cuInit: CUDA_ERROR_UNKNOWN (999)" in said.stderr
    assert A in machine.run("launchproof", "gpus").stdout  # NVML sees nothing wrong
