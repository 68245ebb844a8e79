"""Binds a rank to its share of the cores and devices of its machine.

    cores     0  4  1  5  2  6  3  7     hardware threads of one core side by side
    ranks    |--- 0 ---|--- 1 ---| ...   neighbouring ranks on neighbouring cores

The rank binds itself, on its own machine, before its first thread starts: only there is visible
what Slurm or an outer command has left it. All cores are shared out evenly, so that two runs side
by side on a machine do not crowd the first cores.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.ranks.world import World

DEVICES = "CUDA_VISIBLE_DEVICES"
_SYSTEM = Path("/sys/devices/system/cpu")
_DEV = Path("/dev")


@dataclass(frozen=True)
class Binding:
    """The share of its machine that a rank is bound to."""

    host: str
    local_rank: int
    threads: int
    """Compute threads."""
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
    devices = devices_of(world, config.cluster.gpus, os.environ.get(DEVICES))
    if devices is not None:
        os.environ[DEVICES] = devices
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


def devices_of(world: World, gpus: int | None, visible: str | None) -> str | None:
    """Returns the devices that a rank sees: one of those that its machine shows, in turn.

    ``visible`` is CUDA_VISIBLE_DEVICES as it is. ``gpus`` are those of a node by the cluster's
    file; None: those that are there.
    """
    if visible is not None:
        there = [name.strip() for name in visible.split(",") if name.strip()]
    else:
        if gpus is None:
            gpus = sum(p.name.removeprefix("nvidia").isdigit() for p in _DEV.glob("nvidia*"))
        there = [str(number) for number in range(gpus)]
    return there[world.local_rank % len(there)] if there else visible


def _fact(core: int, name: str) -> int:
    """Returns a fact of a core's topology; 0 if nothing."""
    with contextlib.suppress(OSError, ValueError):
        return int((_SYSTEM / f"cpu{core}" / "topology" / name).read_text(encoding="ascii"))
    return 0
