"""Binds a rank to its share of its machine: cores, and a GPU.

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
from hires.core.ranks import machine
from hires.core.ranks.world import World

_SYSTEM = Path("/sys/devices/system/cpu")


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
    cores = sorted(os.sched_getaffinity(0))
    # Cores that share a processor, or are hardware threads of one core, stand side by side.
    neighbours = sorted(
        cores, key=lambda core: (_fact(core, "physical_package_id"), _fact(core, "core_id"), core)
    )
    least = threads + (1 if config.is_here else 0)
    share = share_of(neighbours, world.local_rank, world.local_size)
    bound = config.launcher.bind == "auto" and least <= len(share) < len(cores)
    if bound:
        try:
            os.sched_setaffinity(0, share)
        except OSError:
            bound = False  # the system does not allow it
    devices = os.environ.get(machine.VISIBLE)
    if config.comm.visible == "own":
        devices = devices_of(world, config.cluster.gpus)
    if devices is not None:
        os.environ[machine.VISIBLE] = devices
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
    there = machine.visible_gpus(count, environ)
    return there[world.local_rank % len(there)] if there else environ.get(machine.VISIBLE)


def _fact(core: int, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int((_SYSTEM / f"cpu{core}" / "topology" / name).read_text(encoding="ascii"))
    return 0
