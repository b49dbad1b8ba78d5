# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The NVML reader against the stand-in: each call in a process of its own, as a library is loaded once a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ansible_collections.dflash.launchproof.plugins.module_utils.python_env import LOOK, unseen

from tests.support.nvml import standin
from tests.support.nvml.standin import UNKNOWN_MEMORY, Gpu, Listed, State

TWO = [Gpu("GPU-aa", util=97), Gpu("GPU-bb", used=3 << 30)]
ASK = """
import json
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.facts import Unknown
from ansible_collections.dflash.launchproof.plugins.module_utils.proof.sources import nvml
def plain(value):
    return {"unknown": value.why} if isinstance(value, Unknown) else value
found = nvml.Nvml()
print(json.dumps({
    "error": found.error, "driver": found.driver, "problems": found.problems, "versions": nvml.versions(),
    "devices": [[one.uuid, one.index, one.minor, one.parent] for one in found.devices.values()],
    "used": {uuid: plain(found.used(uuid)) for uuid in found.devices},
    "processes": {uuid: plain(found.processes(uuid)) for uuid in found.devices},
    "busy": {uuid: plain(found.utilisation(uuid)) for uuid in found.devices},
}))
found.close()
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return standin.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def ask(libraries, tmp_path):
    """Ask the reader about a state, with these libraries or others."""

    def run(state, folder=None):
        state.write(tmp_path / "state")
        env = {**os.environ, "LD_LIBRARY_PATH": str(folder or libraries), "NVML_STANDIN": str(tmp_path / "state")}
        env["PYTHONPATH"] = "collections"
        done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return run


def test_devices_memory_and_processes(ask):
    found = ask(State(gpus=TWO, processes=[Listed(11, 0, 1 << 30), Listed(12, 1, UNKNOWN_MEMORY)]))
    assert found["error"] is None and found["driver"] == standin.VERSION and found["problems"] == []
    assert found["devices"] == [["GPU-aa", 0, 0, ""], ["GPU-bb", 1, 1, ""]]
    assert found["used"] == {"GPU-aa": 1 << 30, "GPU-bb": 3 << 30}  # without what the driver keeps for itself
    assert found["processes"] == {"GPU-aa": {"11": 1 << 30}, "GPU-bb": {"12": None}}
    assert found["busy"] == {"GPU-aa": 97.0, "GPU-bb": 0.0}


def test_more_processes_than_the_first_guess(ask):
    found = ask(State(gpus=TWO, processes=[Listed(1000 + number) for number in range(300)]))
    assert len(found["processes"]["GPU-aa"]) == 300


@pytest.mark.parametrize(
    ("code", "words"), [(9, "Driver Not Loaded (9)"), (4, "Insufficient Permissions (4)"), (999, "(999)")]
)
def test_a_start_that_fails_is_a_value(ask, code, words):
    found = ask(State(gpus=TWO, init=code))
    assert words in found["error"] and found["devices"] == []


def test_a_mismatch_names_both_versions(ask):
    error = ask(State(gpus=TWO, init=18))["error"]
    assert "Driver/library version mismatch (18)" in error and f"the library here is of {standin.VERSION}" in error
    assert "the kernel's driver is" in error


def test_no_library(ask, tmp_path):
    assert "libnvidia-ml.so.1" in ask(State(), tmp_path)["error"]


@pytest.mark.parametrize(
    "omit",
    [
        ["nvmlDeviceGetComputeRunningProcesses_v3"],
        ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"],
        ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMigMode"],
    ],
)
def test_an_older_library_lacks_functions(ask, tmp_path, omit):
    found = ask(State(gpus=TWO, processes=[Listed(11)]), standin.build(tmp_path / "older", omit))
    assert found["error"] is None and found["processes"]["GPU-aa"] == {"11": 1 << 30}
    reserved = 600 << 20 if "nvmlDeviceGetMemoryInfo_v2" in omit else 0
    assert found["used"]["GPU-bb"] == (3 << 30) + reserved


def test_what_is_missing_altogether_is_said(ask, tmp_path):
    names = [f"nvmlDeviceGetComputeRunningProcesses{end}" for end in ("", "_v2", "_v3")]
    found = ask(State(gpus=TWO), standin.build(tmp_path / "older", [*names, "nvmlDeviceGetUtilizationRates"]))
    assert "(13)" in found["processes"]["GPU-aa"]["unknown"] and "(13)" in found["busy"]["GPU-aa"]["unknown"]
    assert found["used"]["GPU-bb"] == 3 << 30


def test_a_lost_gpu_leaves_the_others(ask):
    found = ask(State(gpus=[Gpu("GPU-aa"), Gpu("GPU-bb", lost=True), Gpu("GPU-cc")]))
    assert [device[0] for device in found["devices"]] == ["GPU-aa", "GPU-cc"] and found["error"] is None
    assert found["problems"] == ["GPU 1 of 3: nvmlDeviceGetHandleByIndex_v2: GPU is lost (15)"]


def test_permitted_in_part(ask):
    found = ask(State(gpus=TWO, errors={"nvmlDeviceGetComputeRunningProcesses_v3": 4}))
    assert "Insufficient Permissions (4)" in found["processes"]["GPU-aa"]["unknown"]
    assert found["used"]["GPU-bb"] == 3 << 30


def test_mig_instances_take_their_gpus_place(ask):
    gpus = [Gpu("GPU-aa", mig=(("MIG-1", 1, 0), ("MIG-2", 2, 0))), Gpu("GPU-bb")]
    found = ask(State(gpus=gpus, processes=[Listed(11, 0, 5 << 20, gi=2, ci=0), Listed(12, 1)]))
    assert found["devices"] == [["MIG-1", 0, 0, "GPU-aa"], ["MIG-2", 0, 0, "GPU-aa"], ["GPU-bb", 1, 1, ""]]
    assert found["processes"] == {"MIG-1": {}, "MIG-2": {"11": 5 << 20}, "GPU-bb": {"12": 1 << 30}}
    assert "Not Supported" in found["busy"]["MIG-1"]["unknown"]


@pytest.mark.parametrize(
    ("state", "wanted", "problem"),
    [
        (State(gpus=TWO), ["GPU-bb", "0"], None),
        (State(gpus=TWO), ["GPU-cc"], "does not see GPU-cc; it sees GPU-aa, GPU-bb"),
        (State(gpus=TWO, init=18), ["GPU-aa"], "version mismatch"),
        (State(gpus=[Gpu("GPU-aa", lost=True)]), ["0"], "GPU is lost"),
    ],
)
def test_the_jobs_own_environment_has_to_see_its_gpus(libraries, tmp_path, state, wanted, problem):
    """What module python_env asks the environment's Python, before anything is launched."""
    state.write(tmp_path / "state")
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "NVML_STANDIN": str(tmp_path / "state")}
    done = subprocess.run([sys.executable, "-I", "-c", LOOK], env=env, capture_output=True, text=True, check=True)
    found = unseen(json.loads(done.stdout), wanted)
    assert found is None if problem is None else problem in found


def test_others_programs_run_on_the_stand_in_unchanged(libraries, tmp_path):
    State(gpus=[Gpu("GPU-aa", name="NVIDIA H200"), Gpu("GPU-bb")], processes=[Listed(os.getpid())]).write(
        tmp_path / "state"
    )
    env = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "NVML_STANDIN": str(tmp_path / "state")}
    ask = "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0); print(n.nvmlDeviceGetUUID(h), \
[p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(h)])"
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["GPU-aa", f"[{os.getpid()}]"]
    done = subprocess.run(
        [sys.executable, "-m", "nvitop", "--once"], env=env, capture_output=True, text=True, check=True
    )
    assert "Driver Version: 580.159.04" in done.stdout and "H200" in done.stdout and str(os.getpid()) in done.stdout
    assert "FunctionNotFound" not in done.stderr
