# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand-ins for libnvidia-ml.so.1 and libcuda.so.1: what the driver answers comes from a file that the test writes.

    folder = standin.build(tmp_path)                       # gcc, and nvml.h of the PyPI package nvidia-nvml-dev
    State(gpus=[Gpu("GPU-aaaa")]).write(path)              # libraries read $NVML_STANDIN, else /run/nvml-standin
    env = {"LD_LIBRARY_PATH": folder, "NVML_STANDIN": path}

    standin.install(container, State(gpus=[Gpu("GPU-aaaa")]))   # into a container of tests.support.container

A program that calls libcuda's cuInit and cuDevicePrimaryCtxRetain through ctypes opens the real device nodes, honours
CUDA_VISIBLE_DEVICES, and is in NVML's list from then on until it ends, by its pid in its own namespace.
"""

from __future__ import annotations

import functools
import importlib.metadata
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.container import CACHE, Container

HERE = Path(__file__).resolve().parent
VERSION = "580.159.04"
STATE = "/run/nvml-standin"
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
NODES = ("nvidiactl", "nvidia-uvm")
UNKNOWN_MEMORY = -1


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML would describe it; memory in bytes. ``lost``: it has fallen off the bus."""

    uuid: str
    used: int = 0
    total: int = 80 << 30
    util: int = 0
    minor: int | None = None
    name: str = "Stand-in"
    lost: bool = False
    # (UUID, GPU instance, compute instance) of each MIG instance; any switches MIG on.
    mig: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Listed:
    """A process as NVML lists it. ``memory`` UNKNOWN_MEMORY: NVML does not tell. ``gi``, ``ci``: its MIG instance."""

    pid: int
    gpu: int = 0
    memory: int = 1 << 30
    gi: int | None = None
    ci: int | None = None


@dataclass
class State:
    """All that the libraries answer.

    ``init``, ``cuinit``: what nvmlInit and cuInit return (18: mismatch, 9: no driver; 999). ``errors``: function name to
    nvmlReturn_t. ``host_pids``: NVML lists the node's pids, so a context does not list itself: give ``processes``.
    ``nodes``: nvmlInit opens /dev/nvidiactl and fails as the driver does.
    """

    gpus: list[Gpu] = field(default_factory=list)
    processes: list[Listed] = field(default_factory=list)
    driver: str = VERSION
    init: int = 0
    cuinit: int = 0
    host_pids: bool = False
    nodes: bool = False
    errors: dict[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """The file's words."""
        lines = [f"driver {self.driver}", f"init {self.init}", f"cuinit {self.cuinit}"]
        lines += [
            f"pids {'host' if self.host_pids else 'translated'}",
            f"nodes {'checked' if self.nodes else 'ignored'}",
        ]
        for index, gpu in enumerate(self.gpus):
            minor = index if gpu.minor is None else gpu.minor
            name = gpu.name.replace(" ", "_")
            lines.append(
                f"gpu uuid={gpu.uuid} name={name} minor={minor} total={gpu.total} used={gpu.used} util={gpu.util} lost={int(gpu.lost)}"
            )
            lines += [f"mig gpu={index} uuid={uuid} gi={gi} ci={ci} total={gpu.total}" for uuid, gi, ci in gpu.mig]
        for one in self.processes:
            memory = "?" if one.memory == UNKNOWN_MEMORY else one.memory
            place = "" if one.gi is None else f" gi={one.gi} ci={one.ci}"
            lines.append(f"process gpu={one.gpu} pid={one.pid} memory={memory}{place}")
        lines += [f"error {name} {code}" for name, code in self.errors.items()]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Replace what the libraries answer from now on."""
        path.write_text(self.text())
        path.chmod(0o666)  # whoever makes a context adds himself


def header() -> Path:
    """The folder of nvml.h, as nvidia-nvml-dev brought it."""
    files = importlib.metadata.files("nvidia-nvml-dev") or ()
    found = next(file for file in files if file.name == "nvml.h")
    return Path(found.locate()).resolve().parent


def build(folder: Path, omit: Iterable[str] = (), version: str = VERSION) -> Path:
    """Compile both libraries into ``folder`` and return it; functions in ``omit`` are not there, as in an older driver."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "symbols"
    script.write_text("{ local: %s };\n" % " ".join(f"{name};" for name in omit) if omit else "{ global: *; };\n")
    for name in ("libnvidia-ml", "libcuda"):
        library = folder / f"{name}.so.{version}"
        argv = [
            "gcc",
            "-shared",
            "-fPIC",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{header()}",
            f"-Wl,-soname,{name}.so.1",
        ]
        argv += [f"-Wl,--version-script={script}", "-o", library, HERE / "standin.c"]
        subprocess.run(argv, check=True)
        link = folder / f"{name}.so.1"
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)
    return folder


@functools.cache
def built() -> Path:
    """The libraries with all functions, compiled once a run."""
    return build(CACHE / "nvml")


def install(container: Container, state: State, nodes: Iterable[str] | None = None) -> None:
    """Give a container the libraries, the state and device nodes: a GPU container as far as a program can see.

    ``nodes``: which of /dev/nvidia*, all that ``state`` needs when None. They are /dev/null's device, so they can be
    opened and nothing comes of it.
    """
    for name in ("libnvidia-ml", "libcuda"):
        container.write(f"{LIBRARIES}/{name}.so.{VERSION}", (built() / f"{name}.so.{VERSION}").read_bytes(), 0o755)
        link = container.path(f"{LIBRARIES}/{name}.so.1")
        link.unlink(missing_ok=True)
        link.symlink_to(f"{name}.so.{VERSION}")
    if nodes is None:
        nodes = [*NODES, *(f"nvidia{i if gpu.minor is None else gpu.minor}" for i, gpu in enumerate(state.gpus))]
    for name in nodes:
        container.shell(f"[ -c /dev/{name} ] || mknod -m 0666 /dev/{name} c 1 3")
    state.write(container.path(STATE))
