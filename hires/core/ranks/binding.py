"""Binds a rank to its share of its machine: cores, and a GPU.

    cores     0  4  1  5  2  6  3  7     hardware threads of one core side by side
    ranks    |--- 0 ---|--- 1 ---| ...   neighbouring ranks on neighbouring cores

A rank that computes on a GPU gets cores of the GPU's NUMA node, where the system shows which one
that is. Copies between host and GPU, and the kernels that a rank launches, then cross no link
between processors.

    NUMA node    |--- 0 ---|--- 1 ---|
    GPUs             2   3     0   1
    ranks            2   3     0   1

The rank binds itself before its first thread starts: only on its own machine is visible what Slurm
or an outer command has left it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.ranks import gpus
from hires.core.ranks.gpus import NumaNode
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
    numa_node: int | None = None
    """The NUMA node of its GPU, if it is bound to cores of that one."""


def bind(world: World, config: RunConfig) -> Binding:
    """Binds this process, and all threads that it starts from now on, to its share."""
    threads = config.launcher.threads
    # Where the system does not show the cores there are none.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    # Cores that share a processor, or are hardware threads of one core, stand side by side.
    neighbours = sorted(
        cores, key=lambda core: (_fact(core, "physical_package_id"), _fact(core, "core_id"), core)
    )
    least = threads + (1 if config.launcher.is_here else 0)
    nodes = gpu_nodes(world, config)
    share, node = share_beside_gpu(neighbours, world.local_rank, nodes, least), None
    if share:
        node = nodes[world.local_rank]
    else:
        share = share_of(neighbours, world.local_rank, world.local_size)
    bound = config.launcher.bind == "auto" and least <= len(share) < len(cores)
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
    number = node.number if node is not None and bound else None
    return Binding(os.uname().nodename, world.local_rank, threads, kept, bound, devices, number)


def gpu_nodes(
    world: World, config: RunConfig, environ: Mapping[str, str] = os.environ
) -> list[NumaNode | None]:
    """Returns the NUMA node of the GPU of each rank on this machine; None: it is not shown.

    None for all where Slurm shows each rank other GPUs (``--gpus-per-task``): a rank that sees its
    own GPU alone could not compute the shares of the others, and shares would overlap.
    """
    none: list[NumaNode | None] = [None] * world.local_size
    if config.device != "cuda":
        return none
    count = config.cluster.gpus if config.comm.visible == "own" else None
    names = gpus.visible_gpus(count, environ)
    of_all = min(config.cluster.gpus or world.local_size, world.local_size)
    # Ranks that hires itself starts here have one environment, so they see the same GPUs.
    if not names or (len(names) < of_all and not config.launcher.is_here):
        return none
    nodes = [gpus.numa_node(name, environ) for name in names]
    return [nodes[rank % len(nodes)] for rank in range(world.local_size)]


def share_beside_gpu(
    cores: Sequence[int], local_rank: int, nodes: Sequence[NumaNode | None], least: int
) -> list[int]:
    """Returns one rank's part of the cores of its GPU's NUMA node, which ranks there share evenly.

    No rank of the machine has any if the node of one is unknown, or one would have fewer than
    ``least`` cores: ranks on their nodes and ranks anywhere would share cores.

    >>> two = NumaNode(0, frozenset({0, 1, 2, 3})), NumaNode(1, frozenset({4, 5, 6, 7}))
    >>> share_beside_gpu(range(8), 2, [two[1], two[1], two[0]], 2)
    [0, 1, 2, 3]
    """
    shares = []
    for rank, node in enumerate(nodes):
        if node is None:
            return []
        mates = [other for other, its in enumerate(nodes) if its == node]
        there = [core for core in cores if core in node.cores]
        shares.append(share_of(there, mates.index(rank), len(mates)))
    return shares[local_rank] if min(map(len, shares)) >= least else []


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
