# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ends or hinders training, for real: signals at any moment, exceptions in any thread, NVML that goes away."""

import contextlib
import json
import os
import signal

import extract_hidden_states as extraction
import pytest
import train_dflash_pipeline as program
from common import checkpoint, replicas
from common import store as stores
from dflash.model import DFlashDraftModel

from tests.unit.workload.test_extract import arguments as extracting
from tests.unit.workload.test_survives import LONG, until
from tests.unit.workload.test_train import arguments

PROGRAM = "train_dflash_pipeline.py"


def saved(folder) -> int:
    """The step of ``latest``, which loads whole; 0 when there is none."""
    if not (folder / "latest").is_symlink():
        return 0
    model = DFlashDraftModel.from_pretrained(folder / "latest")
    model.load_state_dict(checkpoint.load_file(folder / "latest/model.safetensors"), strict=True)
    return json.loads((folder / "latest/state.json").read_text())["step"]


@pytest.mark.shows("W64", "W60")
def test_killed_at_random_moments_a_whole_checkpoint_is_left(fork, moments, texts, tmp_path):
    argv = arguments(texts, tmp_path, max_steps=0, ckpt_every=1)
    step = 0
    for moment in range(20 if LONG else 4):
        child = fork(PROGRAM, *argv)
        child.until(f"ev=resume step={step} ")
        if moment % 3:
            child.until("ev=step step=")
        assert child.killed_after(moments.uniform(0, 0.5)) == -signal.SIGKILL
        assert saved(tmp_path) >= step
        step = saved(tmp_path)
    child = fork(PROGRAM, *arguments(texts, tmp_path, max_steps=step + 2))
    assert child.wait() == 0, child.text
    assert f"ev=resume step={step} " in child.text and saved(tmp_path) == step + 2
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.shows("W63")
def test_sigterm_in_a_checkpoint_finishes_it(fork, texts, tmp_path):
    before = 0
    for _ in range(3):
        child = fork(PROGRAM, *arguments(texts, tmp_path, max_steps=0, ckpt_every=1))
        child.until("ev=step step=")
        until(lambda: list(tmp_path.glob("step-*.tmp")))
        child.process.send_signal(signal.SIGTERM)
        assert child.wait() == 0, child.text
        step = int(child.lines[-1].rsplit("step=", 1)[1])
        assert " code=0 reason=sigterm " in child.lines[-1] and saved(tmp_path) == step > before
        assert not list(tmp_path.glob("step-*.tmp"))
        before = step


@pytest.mark.shows("W20")
@pytest.mark.parametrize(("line", "phases"), [("ev=start", {"load"}), ("ev=resume", {"load", "warmup"})])
def test_sigterm_before_the_first_step_ends_at_once(fork, texts, tmp_path, line, phases):
    # More than there ever is: the first step waits for it.
    child = fork(PROGRAM, *arguments(texts, tmp_path, max_steps=0, min_ready=5000, max_depth=5000))
    child.until(line)
    child.process.send_signal(signal.SIGTERM)
    assert child.wait(20) == 0, child.text
    assert child.text.split("phase=")[1].split()[0] in phases
    assert " code=0 reason=sigterm" in child.lines[-1] and saved(tmp_path) == 0


@pytest.mark.shows("W52", "W49")
def test_two_target_and_two_drafter_threads_take_the_same_steps(here, texts, tmp_path, monkeypatch):
    made = []
    init = replicas.Replicas.__init__

    def noted(self, *args, **kwargs):
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(replicas.Replicas, "__init__", noted)
    both = {"target_gpus": "cpu,cpu", "drafter_gpus": "cpu,cpu"}
    fields, output = here(program, arguments(texts, tmp_path, max_steps=6, **both))
    assert fields["step"] == 6 and " targets=cpu/cpu drafters=cpu/cpu" in output.getvalue()
    first, second = made[0].models
    assert first is not second
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one.equal(other)
    # A resumed run: the second replica begins with the checkpoint's weights too.
    monkeypatch.setattr(replicas.Replicas, "gradients", lambda *_a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        here(program, arguments(texts, tmp_path, max_steps=8, **both))
    for one, other in zip(first.parameters(), made[1].models[1].parameters(), strict=True):
        assert one.equal(other)


@pytest.mark.shows("W16")
@pytest.mark.parametrize("thread", ["write", "commit"])
def test_an_exception_in_extractions_threads_ends_it(here, texts, tmp_path, monkeypatch, thread):
    def broken(*_args, **_kwargs):
        raise RuntimeError(f"in the {thread} thread")

    if thread == "write":
        monkeypatch.setattr("common.committer.write_batch", broken)
    else:
        monkeypatch.setattr(stores.LocalStore, "put_file", broken)
    with pytest.raises(RuntimeError, match=thread):
        here(extraction, extracting(texts, tmp_path))


PYNVML = """
import os
class NVMLError(Exception): pass
class NVMLError_NotSupported(NVMLError): pass
NVML_TEMPERATURE_GPU = 0
class Numbers: used, gpu = 5 << 20, 97
def nvmlInit(): pass
def answer(*_args):
    if os.path.exists(os.environ["NVML_GONE"]):
        raise NVMLError("GPU is lost")
    return Numbers
nvmlDeviceGetMemoryInfo = nvmlDeviceGetUtilizationRates = answer
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetUUID(_handle): return "GPU-a"
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetPowerUsage(_handle): return 650_000
def nvmlDeviceGetTemperature(*_args): return 60
"""


@pytest.mark.shows("W22", "W24", "W4")
def test_nvml_that_fails_midway_is_a_warning_and_the_job_goes_on(start, texts, tmp_path):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/pynvml.py").write_text(PYNVML)
    env = {
        "PYTHONPATH": f"{tmp_path / 'fake'}:{os.path.dirname(program.__file__)}",
        "NVML_GONE": str(tmp_path / "gone"),
        "LAUNCHPROOF_RUN_DIR": str(tmp_path),
    }
    child = start(PROGRAM, *arguments(texts, tmp_path / "c", max_steps=0), env=env)

    def beat(telemetry: str) -> dict | None:
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((tmp_path / "heartbeat.json").read_text())
            return found if found.get("telemetry", "").startswith(telemetry) else None

    gpus = until(lambda: beat("nvml"), 90)["gpus"]
    assert gpus == [{"uuid": "GPU-a", "mem_mib": 5, "util": 97, "power_w": 650, "temp_c": 60}]
    assert " gpu_util=97 gpu_mem_mib=5 gpu_power_w=650 gpu_temp_c=60" in child.until("ev=hb phase=run ").string
    (tmp_path / "gone").touch()
    until(lambda: beat("off: NVML failed: GPU is lost"))
    child.until("ev=step ")
    child.process.send_signal(signal.SIGTERM)
    assert child.wait() == 0, child.text
    assert child.text.count("ev=warn") == 1 and "telemetry=off" in child.text


@pytest.mark.shows("W23")
def test_without_nvml_one_line_says_why(fork, texts, tmp_path):
    child = fork(PROGRAM, *arguments(texts, tmp_path, max_steps=2), env={"LAUNCHPROOF_RUN_DIR": str(tmp_path)})
    assert child.wait() == 0, child.text
    assert len([line for line in child.lines if " ev=warn " in line and " telemetry=off" in line]) == 1
    assert json.loads((tmp_path / "heartbeat.json").read_text())["telemetry"].startswith("off: ")
