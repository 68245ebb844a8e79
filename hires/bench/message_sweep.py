"""Measures cells of messages on started ranks, one after another, and continues where it stopped.

gloo, mpi, shm ...      hires.comm with ``backend=`` that route, also mpi:segmented:4MiB
table                   hires.comm as a tuning table chooses
raw:gloo, raw:mpi4py    the libraries without hires
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from hires import comm
from hires.bench.message_noise import ProgramCounter
from hires.bench.message_race import BenchCell, Bind, Block, RacePlan, RaceWorld, race_cell, timed
from hires.bench.messages import BARRIER, MESSAGES, BenchBuffers, bind
from hires.bench.peers.mpi4py_calls import RawMpi
from hires.bench.start_ranks import TORCHRUN, join_world, stream_ranks, torch_world
from hires.comm.backends.known_backends import BACKENDS
from hires.comm.backends.mpi_backend import MpiBackend
from hires.comm.transport import transport
from hires.core.config.mpi_dialects import DIALECTS
from hires.core.errors import ConfigError
from hires.core.ranks import mpi_starter
from hires.core.ranks.world import World
from hires.core.units import parse_size, rough, size
from hires.engine.device import open_device
from hires.plan.algorithm_steps import STAGED
from hires.plan.routes import DIRECT, OWN, Route, is_possible, parse_route
from hires.plan.tuning_table import TuningTable

TABLE = "table"
"""The way that a tuning table chooses."""
BASELINES = RAW_GLOO, RAW_MPI4PY = ("raw:gloo", "raw:mpi4py")
"""The libraries without hires."""
TABLE_NAMES: dict[str, str] = {
    **dict.fromkeys(MESSAGES, "send"),
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Measured operation -> its name in a tuning table, where that is another."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
SEGMENTS = ("1MiB", "4MiB", "16MiB")
MOST_DIRECT_BYTES = 2**20
"""Largest size of which each rank sends to each other one: more is never faster."""
WAIT_S = 120.0

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""What was measured of a cell on some ranks, as plain values."""


@dataclass(frozen=True)
class SweepOptions:
    """Where messages are measured, and how long."""

    start: str
    hosts: tuple[str, ...]
    device: str
    ranks: tuple[int, ...]
    rounds: int
    seconds: float
    """Of each way in a cell, all rounds together."""
    timeout: float
    """Seconds for each number of ranks."""

    @property
    def has_mpi(self) -> bool:
        """Whether the ranks are those of an MPI."""
        return bool(DIALECTS[self.start].libraries) or self.start == "srun"


def sizes_of(text: str) -> tuple[int, ...]:
    """Returns sizes in bytes: ``4,64KiB``, all powers of two of ``4..64MiB``, or of four: ``x4``.

    >>> sizes_of("16,1KiB..4KiB")
    (16, 1024, 2048, 4096)
    >>> sizes_of("1KiB..64KiBx8")
    (1024, 8192, 65536)
    """
    sizes: set[int] = set()
    for part in text.split(","):
        ends, _, step = part.partition("x")
        bounds = [parse_size(end) for end in ends.split("..")]
        factor = int(step or 2) if (step or "2").isdecimal() else 0
        if None in bounds or len(bounds) > 2 or factor < 2 or (step and len(bounds) < 2):
            raise ConfigError(f"--sizes {part} is no size; write 64KiB, 4..64MiB or 4..64MiBx4")
        at, last = bounds[0] or 1, bounds[-1] or 1
        if at > last:
            raise ConfigError(f"--sizes {part} is no size; write the smaller one first")
        while at <= last:
            sizes.add(at)
            at *= factor
    return tuple(sorted(sizes))


def starter_of(text: str) -> str:
    """Returns what starts the ranks: ``auto`` is an MPI if there is one, else torchrun.

    Without an MPI of its own a job of Slurm takes srun, which starts nothing outside of a job.
    """
    if text != "auto":
        if text not in DIALECTS:
            raise ConfigError(f"--start {text} is unknown; choose auto or {', '.join(DIALECTS)}")
        return text
    if importlib.util.find_spec("mpi4py") is None:
        return TORCHRUN
    in_slurm = "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
    return mpi_starter.mpi_here() or ("srun" if in_slurm else TORCHRUN)


def routes_here(device: str, has_mpi: bool) -> tuple[str, ...]:
    """Returns the routes that a machine may have, the backends themselves first."""
    own = ("shm", "cma") if device == "cpu" else ("nccl", "nccl_direct")
    backends = [name for name in ("gloo", *["mpi"] * has_mpi, *own) if name in BACKENDS]
    routes = [*backends]
    for name in (name for name in backends if name in ("gloo", "mpi", "nccl")):
        routes += [f"{name}:direct"] * is_possible(Route(name, DIRECT))
        routes += [f"{name}:two_step", f"{name}:hierarchical"]
        routes += [f"{name}:segmented:{segment}" for segment in SEGMENTS]
        routes += [f"{name}:two_step:{SEGMENTS[1]}", f"{name}:hierarchical:{SEGMENTS[1]}"]
    return tuple(routes)


def baselines_here(has_mpi: bool) -> tuple[str, ...]:
    """Returns the raw libraries beside which a machine's routes are measured."""
    return BASELINES if has_mpi else BASELINES[:1]


def applies_to(way: str, row: Mapping[str, Any]) -> bool:
    """Whether a way differs from its backend alone in a cell, and may be faster.

    ``row`` has the cell's operation and size, and ranks and ranks per node.
    """
    if way in (*BASELINES, TABLE):
        return True
    route, operation = parse_route(way), TABLE_NAMES.get(row["operation"], row["operation"])
    if route.algorithm == OWN:
        return True
    if operation not in STAGED.get(route.algorithm, ()):
        return False
    if route.algorithm == "hierarchical" and row["ranks_per_node"] >= row["ranks"]:
        return False
    if route.algorithm == "direct" and row["num_bytes"] > MOST_DIRECT_BYTES:
        return False
    return int(row["num_bytes"]) > route.segment_bytes


def cells_of(
    operations: Sequence[str], sizes: Sequence[int], dtypes: Sequence[str], modes: Sequence[bool]
) -> list[BenchCell]:
    """Returns the cells of a sweep; a barrier has one size, messages have no blocking form."""
    return [
        BenchCell(operation, num_bytes, dtype, blocking)
        for operation in operations
        for dtype in (dtypes if operation != BARRIER else dtypes[:1])
        for num_bytes in (sizes if operation != BARRIER else sizes[:1])
        for blocking in (modes[:1] if operation in MESSAGES else modes)
    ]


def sweep(
    options: SweepOptions,
    cells: Sequence[BenchCell],
    ways: Sequence[str],
    rows: list[Row],
    table: TuningTable | None = None,
) -> Iterator[None]:
    """Measures the cells that ``rows`` lacks, and appends each; yields after each."""
    done = {row_key(row) for row in rows}
    for ranks in options.ranks:
        todo = [cell for cell in cells if f"{ranks} {cell.key}" not in done]
        if not todo:
            continue
        job = {"cells": todo, "ways": [*ways], "rounds": options.rounds}
        job |= {"seconds": options.seconds, "device": options.device}
        job |= {"table": table.to_dict() if table is not None else None}
        how = f"{__name__}:run_cells", ranks, options.timeout, job
        began, first_s = time.monotonic(), 0.0
        measured = stream_ranks(*how, start=options.start, hosts=options.hosts)
        with ProgramCounter() as programs:
            for number, row in enumerate(measured, start=1):
                rows.append({**row, "other_programs": programs.others(row["ranks_per_node"])})
                passed_s = time.monotonic() - began
                first_s = first_s or passed_s
                left = left_s(passed_s, first_s, number, len(todo))
                about = f"; {rough(left)} left" if left is not None else ""
                yield  # a cell that is shown has been kept
                log.info("%d ranks, %d of %d: %s%s", ranks, number, len(todo), describe(row), about)


def row_key(row: Row) -> str:
    """Returns what names a measured cell."""
    return f"{row['ranks']} {BenchCell(*(row[name] for name in BenchCell._fields)).key}"


def left_s(passed_s: float, first_s: float, number: int, total: int) -> float | None:
    """Returns the seconds for the rest of ``total`` cells after ``number``; None: not known yet.

    ``first_s``: those until the first cell, in which the ranks started and joined.
    """
    if number == 1:
        return 0.0 if total == 1 else None
    return (passed_s - first_s) / (number - 1) * (total - number)


def describe(row: Row) -> str:
    """Returns a row in a line: the operation, the size and the fastest way."""
    measured = {name: one["p50_s"] for name, one in row["ways"].items() if "p50_s" in one}
    best = min(measured, key=measured.__getitem__, default="-")
    took = f" {measured[best] * 1e6:.1f} us" if measured else ""
    mode = "" if row["blocking"] else " async"
    return f"{row['operation']}{mode} {size(row['bytes'])}, fastest {best}{took}"


def wrong_rows(rows: Sequence[Row]) -> list[str]:
    """Returns each way and cell whose result was wrong, in words."""
    return [
        f"{name}: {describe(row).partition(',')[0]}, {row['ranks']} ranks"
        for row in rows
        for name, one in row["ways"].items()
        if one.get("wrong")
    ]


def run_cells(world: World, job: dict[str, Any]) -> Iterator[Row]:
    """Yields the row of each cell, on a rank."""
    table = TuningTable.from_dict(job["table"]) if job["table"] else None
    race_world = join(world, job["ways"], table, job["device"])
    ways = {way: _bound(way, race_world) for way in job["ways"]}
    plan, place = RacePlan(job["rounds"], job["seconds"]), {"ranks": world.size}
    place |= {"ranks_per_node": world.local_size}
    for values in job["cells"]:
        cell = BenchCell(*values)
        here = {way: ways[way] for way in ways if applies_to(way, {**cell._asdict(), **place})}
        row = race_cell(cell, here, race_world, plan)
        yield {**row, **place, "device": race_world.device.partition(":")[0]}
    comm.barrier()
    comm.shutdown()


def backends_of(ways: Sequence[str], table: TuningTable | None = None) -> list[str]:
    """Returns the backends that ways need, the one for agreements first."""
    routes = [parse_route(way).backend for way in ways if way not in (*BASELINES, TABLE)]
    routes += table.backends if table is not None else []
    routes += ["gloo"] * (RAW_GLOO in ways) + ["mpi"] * (RAW_MPI4PY in ways)
    order = ("gloo", "mpi", "nccl", "shm", "cma", "nccl_direct", "null")
    return [name for name in order if name in routes] or ["gloo"]


def join(world: World, ways: Sequence[str], table: TuningTable | None, device: str) -> RaceWorld:
    """Joins the world with all backends that the ways need; returns what ranks agree by."""
    place, backends = open_device(device, world.local_rank), backends_of(ways, table)
    stages = ("two_step", "hierarchical")
    join_world(world, WAIT_S, backends, device, table=table, algorithms=stages)
    if RAW_GLOO in ways:
        # torch renames its collectives in one version after the other; both names work.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        torch_world(world, WAIT_S)
    largest = functools.partial(comm.all_reduce, op=dist.ReduceOp.MAX, backend=backends[0])
    # The quickest that there is, so that ranks leave it close together.
    quickest = next((b for b in ("shm", "mpi", "gloo") if b in backends), backends[0])
    barrier = functools.partial(comm.barrier, backend=quickest)

    def fence() -> None:
        place.synchronize()
        barrier()

    near = barrier if place.torch.type == "cpu" else fence
    name = str(place.torch)
    return RaceWorld(world.rank, world.size, near, largest, name, place.synchronize)


class RoutedComm:
    """hires.comm with ``backend=`` given; None: as its table chooses."""

    def __init__(self, route: Route | None) -> None:
        self._route = route

    def __getattr__(self, name: str) -> Any:
        function = getattr(comm, name)
        return function if self._route is None else functools.partial(function, backend=self._route)


def _bound(way: str, world: RaceWorld) -> Bind:
    """Returns what binds a way to the buffers of a cell."""
    if way == RAW_MPI4PY:
        with cast(MpiBackend, transport.backends["mpi"]).calls:
            raw = RawMpi()
        own = world._replace(fence=raw.world.Barrier)

        def bind_raw(buffers: BenchBuffers, blocking: bool) -> Block | None:
            call = raw.bind(buffers, blocking)
            return None if call is None else _holding_mpi(timed(call, own))

        return bind_raw
    library = dist if way == RAW_GLOO else RoutedComm(None if way == TABLE else parse_route(way))
    return lambda buffers, blocking: timed(bind(library, buffers, blocking), world)


def _holding_mpi(block: Block) -> Block:
    # The thread of hires.comm must not call MPI meanwhile; so the fence is MPI's own, too.
    def run(times: int) -> list[float] | None:
        with cast(MpiBackend, transport.backends["mpi"]).calls:
            return block(times)

    return run
