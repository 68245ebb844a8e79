"""Reads which rank this process is from its environment, and binds it to its share of the machine.

A launcher sets seven variables for every rank, which ``env://`` of ``torch.distributed`` reads
too; an MPI or ``srun`` numbers its processes in others (:mod:`hires.core.ranks.mpi_starter`).

    cores     0  4  1  5  2  6  3  7     hardware threads of one core side by side
    ranks    |--- 0 ---|--- 1 ---| ...   neighbouring ranks on neighbouring cores

The rank binds itself before its first thread starts: only on its own machine is visible what Slurm
or an outer command has left it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.ranks import gpus

_SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class World:
    """One rank's view of all processes."""

    rank: int
    """This process, 0 to size - 1."""
    size: int
    local_rank: int
    """This process among those on the same machine."""
    local_size: int
    """Processes on this machine."""
    address: str
    """Host where rank 0 listens, at ``port``."""
    port: int
    attempt: int
    """Which attempt of the run: the records go to ``a<attempt>``."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"RANK={self.rank} must be 0 to WORLD_SIZE-1={self.size - 1}")
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise ConfigError(
                f"LOCAL_RANK={self.local_rank} and LOCAL_WORLD_SIZE={self.local_size} do not fit "
                f"each other and WORLD_SIZE={self.size}"
            )
        if not 0 < self.port <= 65535:
            raise ConfigError(f"MASTER_PORT={self.port} must be 1 to 65535")
        if self.attempt < 0:
            raise ConfigError(f"HIRES_ATTEMPT={self.attempt} must be 0 or more")

    def to_environment(self) -> dict[str, str]:
        """Returns the variables that make a process this rank."""
        return {name: str(getattr(self, field)) for field, name in _NAMES.items()}


def from_environment(environ: Mapping[str, str] = os.environ) -> World:
    """Returns this process's world; raises ConfigError if a variable is missing or wrong."""
    missing = [name for name in _NAMES.values() if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"the environment variable {missing[0]} is not set: a rank is started by `hires run` "
            f"or by the launch.sh of a run folder, which set {', '.join(_NAMES.values())}"
        )
    names = {field: name for field, name in _NAMES.items() if field != "address"}
    numbers = {field: number_of(name, environ[name]) for field, name in names.items()}
    return World(address=environ[_NAMES["address"]], **numbers)


_NAMES = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "address": "MASTER_ADDR",
    "port": "MASTER_PORT",
    "attempt": "HIRES_ATTEMPT",
}


def number_of(name: str, text: str) -> int:
    """Returns the number that an environment variable holds; raises ConfigError if it is none."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={text!r} must be a number") from None


@dataclass(frozen=True)
class Binding:
    """The share of its machine that a rank is bound to."""

    host: str
    local_rank: int
    threads: int
    cores: list[int]
    """Numbers of the cores that it may use."""
    bound: bool
    """Whether those are its own share; else all that the machine or the job has."""
    devices: str | None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""


def bind(world: World, config: RunConfig) -> Binding:
    """Binds this process, and all threads that it starts from now on, to its share."""
    threads = config.launcher.threads
    # Where the system does not show the cores there are none.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    # Cores that share a processor, or are hardware threads of one core, stand side by side.
    neighbours = sorted(
        cores, key=lambda core: (_fact(core, "physical_package_id"), _fact(core, "core_id"), core)
    )
    share = share_of(neighbours, world.local_rank, world.local_size)
    spare = 1 if config.launcher.is_here else 0
    wanted = config.launcher.bind == "auto" and len(share) >= threads + spare
    bound = wanted and len(share) < len(cores)
    if bound:
        try:
            os.sched_setaffinity(0, share)
        except OSError:
            bound = False  # the system does not allow it
    devices = os.environ.get(gpus.VISIBLE)
    if config.comm.visible == "own":
        devices = devices_of(world, config.cluster.gpus)
    if devices is not None:
        os.environ[gpus.VISIBLE] = devices
    kept = sorted(share) if bound else cores
    return Binding(os.uname().nodename, world.local_rank, threads, kept, bound, devices)


def share_of(cores: list[int], local_rank: int, local_size: int) -> list[int]:
    """Returns one rank's part of the cores, which are shared out evenly; none if they are too few.

    >>> share_of([0, 4, 1, 5, 2], 0, 2), share_of([0, 4, 1, 5, 2], 1, 2)
    ([0, 4, 1], [5, 2])
    """
    if local_size > len(cores):
        return []
    least, more = divmod(len(cores), local_size)
    first = local_rank * least + min(local_rank, more)
    return cores[first : first + least + (local_rank < more)]


def devices_of(
    world: World, count: int | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Returns the device that a rank sees: of those that its machine shows, in turn.

    Without CUDA_VISIBLE_DEVICES they are the first ``count``, or all.
    """
    there = gpus.visible_gpus(count, environ)
    return there[world.local_rank % len(there)] if there else environ.get(gpus.VISIBLE)


def _fact(core: int, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((_SYSTEM / f"cpu{core}" / "topology" / name).read_text(encoding="ascii"))
    return 0
