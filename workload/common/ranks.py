# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes of one machine or several that train as one, each of them a rank.

Rank 0 steps and saves, as the first replica of a process does: gradients go to it, and its weights come back. So no other
rank needs the optimizer's state or a checkpoint.  A rank that is gone, or stands, ends the others with a line that names it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from common.place import Place
from common.runtime import UNAVAILABLE, Fatal, Job

BEAT_EVERY_S = 1.0
# A process that lives beats; longer than its main thread may hold the interpreter, or a switch may drop packets.
SILENT_S = 15.0
# The same once a connection was closed: who closed it has ended.
SILENT_AFTER_BREAK_S = 4.0
SIOCGIFADDR = 0x8915  # netdevice(7)


class Alone:
    """A process without others."""

    rank, world, first = 0, 1, True

    def begin(self, _model: torch.nn.Module, step: int) -> int:
        return step

    def average(self, _model: torch.nn.Module, stop: bool) -> None:
        self._stop = stop

    def share(self, _model: torch.nn.Module) -> list[int]:
        return [0] if self._stop else []

    def end(self) -> None:
        """Nobody to wait for."""


class Ranks:
    """This rank among the others."""

    def __init__(self, job: Job, place: Place, device: torch.device, timeout: float):
        """Join the others. Raises Fatal (69) where not all of them come within ``timeout`` seconds.

        ``timeout`` is also how long the others may take for a step.
        """
        self.rank, self.world, self.first = place.rank, place.world, place.rank == 0
        self._job, self._device = job, device
        # A second connection: a call that waits holds the first one.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = datetime.timedelta(seconds=SILENT_S)
        self._store = dist.TCPStore(address, port, is_master=False, timeout=patience, wait_for_workers=False)
        self._keys = [f"dflash/{rank}" for rank in range(self.world)]
        self._identity = f"{socket.gethostname()} {os.getpid()}.{time.time()}"
        self._beats = 0
        self._beat()
        # Without a name service gloo would offer the others the loopback address.
        interface = interface_towards(address, port)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # Otherwise a wait ends before the collective does, and the process is aborted by another thread.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        backend = "nccl" if device.type == "cuda" else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
            raise Fatal(
                UNAVAILABLE,
                "peer_lost",
                f"not all ranks came within {timeout:g} s; absent: {absent or 'none'}: {error}",
            ) from None
        job.joined = True
        self._ended, self._broken = threading.Event(), threading.Event()
        self._watcher = job.spawn("ranks", self._watch)
        job.event("ranks", world=self.world, backend=backend, interface=os.environ.get("GLOO_SOCKET_IFNAME"))

    # -- what is exchanged ---------------------------------------------------------------------------------------------

    def begin(self, model: torch.nn.Module, step: int) -> int:
        """Rank 0's weights to all; returns its step."""
        self._numbers = torch.full((1,), float(step), dtype=torch.float64, device=self._device)
        self._from_first(model)
        step = int(self._numbers.item())
        self._numbers = torch.zeros(self.world, dtype=torch.float64, device=self._device)
        return step

    def average(self, model: torch.nn.Module, stop: bool) -> None:
        """The mean gradient to rank 0; the others' is undefined then. ``stop``: this rank was asked to stop."""
        self._numbers.zero_()
        self._numbers[self.rank] = float(stop)
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        with self._together():
            dist.reduce(flat, 0)
            dist.reduce(self._numbers, 0)
        if self.first:
            flat /= self.world
            for parameter, part in zip(model.parameters(), split(flat, model), strict=True):
                parameter.grad.copy_(part)

    def share(self, model: torch.nn.Module) -> list[int]:
        """Rank 0's weights to all; returns the ranks that were asked to stop, to all the same."""
        self._from_first(model)
        return [rank for rank, asked in enumerate(self._numbers.tolist()) if asked]

    def _from_first(self, model: torch.nn.Module) -> None:
        with torch.no_grad():
            flat = torch.cat([parameter.flatten() for parameter in model.parameters()])
            with self._together():
                dist.broadcast(flat, 0)
                dist.broadcast(self._numbers, 0)
            if not self.first:
                for parameter, part in zip(model.parameters(), split(flat, model), strict=True):
                    parameter.copy_(part)

    def end(self) -> None:
        """Wait until the others came to their end too: rank 0 saves meanwhile."""
        self._ended.set()
        # Whoever passes first closes its connections.
        with contextlib.suppress(RuntimeError):
            dist.barrier()

    # -- who holds the others up ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """A collective, which fails when a rank is gone or does not come: the watcher names it and ends the process."""
        try:
            yield
        except RuntimeError as error:
            self._reason = str(error).splitlines()[0][:200]
            self._broken.set()
            self._watcher.join()
            raise

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._keys[self.rank], f"{self._identity} {self._beats} {self._job.progress.step or 0}")

    def _watch(self) -> None:
        """Beat, and look at the others' beats. They are told apart by change, since clocks differ."""
        seen: dict[int, tuple[str, float]] = {}
        broken_at = None
        while not self._ended.wait(BEAT_EVERY_S):
            try:
                self._beat()
                beats = [value.decode() for value in self._store.multi_get(self._keys)]
            except RuntimeError as error:
                words = str(error).splitlines()[0][:160]
                self._finish(f"rank 0 at {os.environ['MASTER_ADDR']}: gone, its store does not answer ({words})", [0])
            now = time.monotonic()
            for rank, beat in enumerate(beats):
                if rank not in seen or beat != seen[rank][0]:
                    if rank in seen and seen[rank][0].split()[:2] != beat.split()[:2]:
                        self._finish(f"{named(rank, seen[rank][0])}: gone, and started again", [rank])
                    seen[rank] = (beat, now)
            quiet = {rank: now - at for rank, (_beat, at) in seen.items()}
            limit = SILENT_AFTER_BREAK_S if self._broken.is_set() else SILENT_S
            gone = [rank for rank, seconds in quiet.items() if seconds > limit and seconds > max(quiet.values()) - 1]
            if gone:
                words = ", ".join(named(rank, seen[rank][0]) for rank in gone)
                self._finish(f"{words}: gone, nothing was heard from there for {quiet[gone[0]]:.0f} s", gone)
            if self._broken.is_set():
                broken_at = broken_at or now
                if now - broken_at > 2 * SILENT_AFTER_BREAK_S:
                    self._finish(*behind({rank: beat for rank, (beat, _at) in seen.items()}, self._reason))

    def _finish(self, message: str, ranks: list[int]) -> None:
        """End this process: its main thread waits in a collective for a rank that does not come."""
        self._job.finish(
            UNAVAILABLE,
            "peer_lost",
            peers=",".join(map(str, ranks)),
            step=self._job.progress.step,
            msg=f"{message}. This rank is at step {self._job.progress.step or 0}.",
        )


def split(flat: torch.Tensor, model: torch.nn.Module) -> list[torch.Tensor]:
    """The parts of a flat tensor in the shapes of a model's parameters."""
    parameters = list(model.parameters())
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def named(rank: int, beat: str) -> str:
    """A rank for people, from its last beat."""
    host, _process, _beats, step = beat.split()
    return f"rank {rank} on {host} (step {step})"


def behind(beats: dict[int, str], reason: str) -> tuple[str, list[int]]:
    """Of ranks that all live: a sentence on those that came less far, and who they are."""
    steps = {rank: int(beat.split()[3]) for rank, beat in beats.items()}
    last = [rank for rank, step in steps.items() if step == min(steps.values())]
    if len(last) == len(steps):
        return f"all ranks live, none is behind the others: look at the network between them ({reason})", []
    words = ", ".join(named(rank, beats[rank]) for rank in last)
    return f"{words}: lives and does not come; the others are at step {max(steps.values())} ({reason})", last


def interface_towards(address: str, port: int) -> str | None:
    """The network interface with the IPv4 address that packets to ``address`` leave from; None where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # sends nothing
        except OSError:
            return None
        mine = socket.inet_aton(probe.getsockname()[0])
        for _number, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                if fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == mine:
                    return name
    return None
