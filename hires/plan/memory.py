"""Compares the memory that ``hires.engine.footprint`` predicts for ranks with what there is.

Also predicts the memory of a GPU that no tensor takes: CUDA's own, libraries' and NCCL's buffers.
None of these figures was measured by hires: each stands with its source, and a check on a GPU is to
compare their sum with what the GPU reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.units import MIB, parse_size, size
from hires.plan.groups import groups, held_stages
from hires.plan.hardware import CPU, CUDA, device_of, gpus_of_node, ranks_of_node
from hires.plan.message_routes import channels
from hires.plan.plan import Finding, Plan
from hires.plan.routes import STREAMED
from hires.plan.traffic import backends_of_plan

LIBRARIES_BYTES = 320 * 2**20
"""What a rank's libraries take before it holds anything, which no table counts; torch 2.13 on a CPU
takes 300 to 310 MiB (``rss_import_bytes`` of any record)."""
MPI_BYTES = 4 * 2**20
"""What an MPI library takes of a rank beside its messages; MPICH took 3 to 4 MiB."""


def _part(letter: str, name: str, **default: Any) -> Any:
    return dataclasses.field(metadata={"letter": letter, "name": name}, **default)


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank at the fullest moment of a step, by what they are for."""

    params_bytes: int = _part("P", "parameters")
    """Parameters and running statistics."""
    grads_bytes: int = _part("G", "gradients")
    """Gradients that were complete at that moment."""
    optimizer_bytes: int = _part("O", "optimiser")
    activations_bytes: int = _part("A", "activations")
    """What autograd and the schedule keep, and what operators pass on."""
    buffers_bytes: int = _part("B", "buffers")
    """Images read ahead, receives, messages under way, scratch memory, the process itself."""
    workspace_bytes: int = _part("W", "cuDNN and cuBLAS", default=0)
    """On a GPU: what cuDNN and cuBLAS held at that moment, in place of scratch memory."""
    allocator_bytes: int = _part("R", "reserved by torch", default=0)
    """On a GPU: what torch's allocator holds beyond the tensors of that moment, as usual."""
    nccl_bytes: int = _part("N", "NCCL", default=0)
    """On a GPU: buffers of NCCL's communicators."""
    context_bytes: int = _part("C", "CUDA context", default=0)
    """On a GPU: CUDA's context and kernels."""
    mpi_bytes: int = _part("M", "MPI library", default=0)
    """On a CPU: buffers of the MPI library."""
    shm_bytes: int = _part("S", "memory of shm", default=0)
    """On a CPU: memory of the backend shm, which other ranks of the machine share."""
    host_bytes: int = 0
    """Beside a GPU: memory of the host, pinned or shared, and the part of CUDA that lies there."""
    waiting_bytes: int = 0
    """Most of activations and buffers while it waits for other ranks."""
    spill_bytes: int = 0
    """Of the disk of ``memory.spill``, which each step writes and reads once."""
    start_bytes: int = 0
    """All at the fullest moment before the first step: the network's own tensors, while others are
    computed from them."""

    @property
    def peak_bytes(self) -> int:
        """All that is allocated for tensors, workspaces among them."""
        kept = self.params_bytes + self.grads_bytes + self.optimizer_bytes
        return kept + self.activations_bytes + self.buffers_bytes + self.workspace_bytes

    @property
    def device_bytes(self) -> int:
        """All of them together in a step, but for the host's memory beside a GPU."""
        beside = self.allocator_bytes + self.nccl_bytes + self.context_bytes
        return self.peak_bytes + beside + self.mpi_bytes + self.shm_bytes

    def to_dict(self) -> dict[str, int]:
        """Returns plain values for ``plan.json``."""
        sums = {"peak_bytes": self.peak_bytes, "device_bytes": self.device_bytes}
        return {**dataclasses.asdict(self), **sums}


def needed_bytes(entry: dict[str, int]) -> int:
    """Returns what a rank of ``plan.memory`` needs, in a step or at its start."""
    return max(entry["device_bytes"], entry["start_bytes"])


def together(plan: Plan, first: int, ranks: list[RankMemory], queued: int) -> RankMemory:
    """Returns the memory of a process that executes some ranks, from the ``first`` on.

    Parameters are there once. One rank computes at a time, and the others wait:

        process    | rank 0 waits | rank 1 waits | rank 2 waits | what one of them needs above that

    At the most ``queued`` of what is spilled is on its way to the disk or back.
    """
    stages = [held_stages(plan, first + place) for place in range(len(ranks))]
    once = [one for place, one in enumerate(ranks) if stages[place] not in stages[:place]]
    added = {"waiting_bytes", "spill_bytes"}
    if plan.resident < plan.ranks_per_replica:  # each rank has gradients of its own
        added.add("grads_bytes")
    sums = {}
    for name in (field.name for field in dataclasses.fields(RankMemory)):
        largest = name in ("buffers_bytes", "workspace_bytes", "mpi_bytes", "shm_bytes")
        sizes = [getattr(one, name) for one in (ranks if largest or name in added else once)]
        sums[name] = max(sizes) if largest else sum(sizes)
    above = (one.activations_bytes + one.buffers_bytes - one.waiting_bytes for one in ranks)
    alive = sums["waiting_bytes"] + max(above)
    sums["activations_bytes"] = max(0, alive - sums["buffers_bytes"])
    sums["buffers_bytes"] += min(sums["spill_bytes"], queued)
    return RankMemory(**sums)


@dataclass(frozen=True)
class Room:
    """How much memory there is."""

    rank_bytes: int | None
    """For each rank: ``memory.limit``; None if it is not set."""
    machine_bytes: int | None
    """For all ranks of one machine together; None if it is unknown."""
    nodes: int = 1
    """Machines over which the ranks are spread evenly, consecutive ranks together."""
    source: str | None = None
    """The key that sets ``machine_bytes``; None: it is that of this machine."""
    devices: int = 0
    """GPUs of each machine, which its ranks take in turn: then ``machine_bytes`` are those of one
    GPU. 0: the ranks share the memory of the machine."""
    beside_gpus: bool = False
    """Whether the ranks compute on GPUs, and this is the memory of the machine beside these."""

    @property
    def libraries_bytes(self) -> int:
        """What a rank needs there beside its prediction, to which a GPU's context belongs."""
        return 0 if self.devices else LIBRARIES_BYTES

    @property
    def place(self) -> str:
        """What the ranks share."""
        return "GPU" if self.devices else "node"

    @property
    def counts_nodes(self) -> bool:
        """Whether the machines are shown apart: several, or with memory that a key sets."""
        return self.nodes > 1 or self.source is not None

    def bytes_of_one(self, ranks: int) -> float:
        """Returns what one of so many ranks may need by its own, its libraries left out."""
        own = float("inf") if self.rank_bytes is None else self.rank_bytes
        if self.machine_bytes is None:
            return own
        places = self.nodes * max(1, self.devices)
        return min(own, self.machine_bytes / -(-ranks // places) - self.libraries_bytes)

    def needed(self, plan: Plan) -> int:
        """Returns the bytes that count: of the largest rank, or of the fullest machine."""
        if self.rank_bytes is not None:
            return max(map(self._own_bytes, plan.memory))
        return max(node.bytes for node in self.per_node(plan))

    def per_node(self, plan: Plan) -> list[NodeNeed]:
        """Returns what the ranks of each machine, or GPU, need together, with their libraries."""
        peaks = [self._own_bytes(entry) for entry in plan.memory]
        needs, first = [], 0
        for count in spread(plan.num_processes, self.nodes):
            here, step = range(first, first + count), max(1, self.devices)
            for ranks in [here[n::step] for n in range(min(step, count))]:
                # Replicas are equal, so the plan holds the ranks of one.
                need = sum(peaks[rank % len(peaks)] + self.libraries_bytes for rank in ranks)
                # Each page of the backends' memory is touched by two ranks at the least.
                entries = (plan.memory[rank % len(peaks)] for rank in ranks)
                need -= sum(one["shm_bytes"] for one in entries) // 2
                needs.append(NodeNeed(ranks, need))
            first += count
        return needs

    def shortage(self, config: RunConfig, plan: Plan) -> str | None:
        """Returns what does not fit, in words, or None if everything does."""
        peaks = [self._own_bytes(entry) for entry in plan.memory]
        rank = peaks.index(max(peaks))
        if self.rank_bytes is not None and peaks[rank] > self.rank_bytes:
            return (
                f"rank {rank} needs {size(peaks[rank])}, predicted, which is more than "
                f"memory.limit={config.memory.limit}"
            )
        node = max(self.per_node(plan), key=lambda one: one.bytes)
        if self.machine_bytes is None or node.bytes <= self.machine_bytes:
            return None
        rank = max(node.ranks, key=lambda r: peaks[r % len(peaks)])
        largest = size(peaks[rank % len(peaks)])
        most = f", most of all rank {rank} with {largest}" if len(node.ranks) > 1 else ""
        there, has = "this machine", f"its memory of {size(self.machine_bytes)}"
        if self.source is not None:
            name = self.source.partition(".")[2]
            there, has = f"one {self.place}", f"{self.source}={getattr(config.cluster, name)}"
        one = len(node.ranks) == 1 and self.devices
        need = f"rank on {there} needs" if one else f"ranks on {there} need"
        many = f"{len(node.ranks)} {need} {size(node.bytes)}, predicted"
        if self.beside_gpus:
            many += ", of the host's memory beside its GPUs"
        return f"{many}{most}, which is more than {has}"

    def _own_bytes(self, entry: dict[str, int]) -> int:
        return entry["host_bytes"] if self.beside_gpus else needed_bytes(entry)


def spill_findings(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yields what ``memory.spill`` takes of the disk, and why it does not fit or help."""
    folder = config.memory.spill
    if folder is None or not plan.training:
        return
    given = f"memory.spill={folder}"
    if plan.device != CPU:
        text = f"{given} keeps activations of CPUs, and device={plan.device}; leave it out"
        yield Finding("error", "memory.spill", text)
        return
    ranks = max(spread(plan.num_processes, config.num_nodes))
    sizes = [entry["spill_bytes"] for entry in plan.memory]
    need = max(sum((sizes * ranks)[first : first + ranks]) for first in range(len(sizes)))
    text = (
        f"{given} holds {size(need)} on a machine, which each step writes and reads: "
        f"{2 * need / 2**30:.3g} s at 1 GiB/s"
    )
    if not config.is_here:
        yield Finding("note", "memory.spill", text)
        return
    path = Path(folder).absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        text = (
            f"{text}; its disk has {size(free)} free: use a folder on another, "
            f"memory.checkpoint=block, or a smaller image"
        )
        yield Finding("error", "memory.spill", text)
    elif _file_system(there) in ("tmpfs", "ramfs"):
        text = f"{text}; that is a file system in memory: name a folder on a disk"
        yield Finding("warning", "memory.spill", text)
    else:
        yield Finding("note", "memory.spill", text)


def _file_system(folder: Path) -> str:
    # The kind of the one that is mounted nearest above a folder.
    kinds: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, place, kind, *_ = line.split()
            kinds[place] = kind
    path = folder.resolve()
    return next((kinds[str(one)] for one in (path, *path.parents) if str(one) in kinds), "")


class NodeNeed(NamedTuple):
    """What the ranks of one machine need."""

    ranks: range
    bytes: int


def room_of(config: RunConfig) -> Room:
    """Returns how much memory the ranks of a run may need."""
    own, nodes = parse_size(config.memory.limit), config.num_nodes
    if device_of(config) == CUDA:
        own_gpu, gpus = parse_size(config.cluster.gpu_memory), gpus_of_node(config)
        key = None if own_gpu is None else "cluster.gpu_memory"
        return Room(own, own_gpu, nodes, key, gpus or ranks_of_node(config))
    of_site = config.cluster.memory_bytes
    if own is not None:  # a node of a site is no larger for that
        return Room(own, of_site, nodes, None if of_site is None else "cluster.memory")
    return _node_room(config)


def rooms_of(config: RunConfig) -> list[Room]:
    """Returns that room, and after one on GPUs that of the nodes' own memory."""
    rooms = [room_of(config)]
    if rooms[0].devices:
        rooms.append(dataclasses.replace(_node_room(config), beside_gpus=True))
    return rooms


def _node_room(config: RunConfig) -> Room:
    of_site, nodes = config.cluster.memory_bytes, config.num_nodes
    here = machine_bytes() if config.is_here else None
    if of_site is not None and (here is None or of_site <= here):
        return Room(None, of_site, nodes, "cluster.memory")
    # This machine's memory says nothing about another's.
    return Room(None, here, nodes)


def machine_bytes() -> int | None:
    """Returns the memory of this machine, or of the container that this process runs in."""
    sizes = []
    with contextlib.suppress(ValueError, OSError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for group in _control_groups():
        with contextlib.suppress(ValueError, OSError):  # "max" is no number
            sizes.append(int((group / "memory.max").read_text()))
    return min(sizes, default=None)


def free_bytes() -> int | None:
    """Returns the memory that processes can still take on this machine, or in their container."""
    sizes = []
    with contextlib.suppress(ValueError, OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        [line] = [line for line in lines if line.startswith("MemAvailable:")]
        sizes.append(int(line.split()[1]) * 1024)
    for group in _control_groups():
        with contextlib.suppress(ValueError, OSError):  # "max" is no number
            most = int((group / "memory.max").read_text())
            sizes.append(most - int((group / "memory.current").read_text()))
    return min(sizes, default=None)


def _control_groups() -> list[Path]:
    """Returns the folders of the control groups of this process, the innermost first."""
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):  # a job of Slurm has a group of its own, below others
        own = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if line]
        group /= own[-1].split(":", 2)[-1].lstrip("/")
    return [group, *group.parents]


CONTEXT_BYTES = 450 * MIB
"""CUDA's context and the kernels of torch, cuDNN and cuBLAS that a step loads. An assumption for
CUDA 12 and 13, which load kernels when they are first called (CUDA_MODULE_LOADING=LAZY)."""
CUBLAS_BYTES = 8320 * 2**10
"""One workspace of cuBLAS, kept from its first product on: torch's default on GPUs before Hopper,
``CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8``."""
HOPPER, HOPPER_CUBLAS_BYTES = 9.0, 32 * MIB
"""Compute capability from which that default is ``:4096:8``, and its size."""
HOST_CONTEXT_BYTES = 512 * MIB
"""Memory of the host that CUDA and the libraries of a torch for it take beside those of a torch for
CPUs. An assumption."""
PINNED_BATCHES = 2
"""Microbatches of a loader in pinned memory: one is read while the one before is copied."""
CONNECTION_BYTES = 4 * MIB + 512 * 2**10 + 4800 * 2**10
"""Buffers with which one rank receives from another on one of NCCL's own channels, one for each
protocol: 4 MiB (``NCCL_BUFFSIZE`` of its user guide), and those of LL and LL128 (its source)."""
LOOPS = 8
"""NCCL's own channels of a communicator for sums; 2 to 24, as NVLinks and network cards allow."""
MESSAGE_LOOPS = 2
"""The same for each two ranks of one for messages."""
FAN = 4
"""Ranks from which one receives in sums: one in a ring, three in a tree."""


def cublas_workspaces(config: RunConfig) -> list[int]:
    """Returns the sizes of cuBLAS's workspaces on a GPU of a run; of an unknown GPU before Hopper.

    Torch keeps one for each handle and stream, and a handle for each thread that computes products:
    the main one, and in training that of the backward pass. An assumption after torch's source.
    """
    capability = config.cluster.gpu_capability
    each = HOPPER_CUBLAS_BYTES if capability and capability >= HOPPER else CUBLAS_BYTES
    return [each] * (2 if config.task.name == "train" else 1)


def pinned_bytes(num_bytes: int) -> int:
    """Returns what torch pins for a tensor: the next power of two, which it keeps.

    Source: CachingHostAllocator.h of torch 2.13.

    >>> pinned_bytes(3 * 2**20) // 2**20, pinned_bytes(0)
    (4, 0)
    """
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def nccl_bytes(plan: Plan, rank: int) -> int:
    """Returns the buffers of a rank's communicators, all of which are connected at the start."""
    if {*STREAMED}.isdisjoint(backends_of_plan(plan)):
        return 0
    sums = [min(FAN, len(group) - 1) for group in groups(plan) if rank in group]
    sources = [{pair[0] for pair in one.pairs if pair[1] == rank} for one in channels(plan)]
    loops = LOOPS * sum(sums) + MESSAGE_LOOPS * sum(map(len, sources))
    return loops * CONNECTION_BYTES
