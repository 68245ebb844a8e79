"""Joins a world for a benchmark of messages, and makes its contestants: routes and raw libraries.

gloo, mpi, shm ...      hires.comm with ``backend=`` that route, also mpi:segmented:4MiB
table                   hires.comm as a tuning table chooses
raw:gloo                torch.distributed itself
raw:mpi4py              the MPI library, through mpi4py
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from hires import comm
from hires.bench.message_operations import BenchBuffers, bind
from hires.bench.message_race import (
    BenchCell,
    Bind,
    Block,
    RacePlan,
    RaceWorld,
    race_cell,
    timed,
)
from hires.bench.raw_mpi import RawMpi
from hires.bench.sweep import (
    BASELINES,
    PEER_SUM,
    RAW_GLOO,
    RAW_MPI4PY,
    TABLE,
    is_worth,
)
from hires.comm.backends import rendezvous
from hires.comm.backends.mpi_backend import MpiBackend
from hires.comm.transport import transport
from hires.core.errors import CommError
from hires.core.ranks.world import World
from hires.engine.device import open_device
from hires.plan.routes import Route, parse_route
from hires.plan.tuning_table import TuningTable

NEED_MPI = ("mpi", RAW_MPI4PY)
WAIT_S = 120.0


class Through:
    """hires.comm with ``backend=`` given; None: as its table chooses."""

    def __init__(self, route: Route | None) -> None:
        self._route = route

    def __getattr__(self, name: str) -> Any:
        function = getattr(comm, name)
        return function if self._route is None else functools.partial(function, backend=self._route)


class PeerSum:
    """The sum of a training step, by ranks that read each other's memory; it has no other name."""

    def __init__(self, agreed: RaceWorld) -> None:
        self._group = comm.make_groups([[*range(agreed.ranks)]])[0]
        self.route = parse_route(PEER_SUM)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a tensor in place."""
        if self._group.peers is None:
            raise CommError("ranks do not read each other's memory here; see `hires doctor`")
        comm.all_reduce_coalesced([tensor], self._group, backend=self.route)


def backends_of(ways: Sequence[str], table: TuningTable | None = None) -> list[str]:
    """Returns the backends that ways need, the one for agreements first."""
    routes = [parse_route(way).backend for way in ways if way not in (*BASELINES, TABLE)]
    routes += table.backends if table is not None else []
    routes += ["gloo"] * (RAW_GLOO in ways) + ["mpi"] * any(w in ways for w in NEED_MPI)
    order = ("gloo", "mpi", "nccl", "shm", "cma", "nccl_direct", "null")
    return [name for name in order if name in routes] or ["gloo"]


def join(world: World, ways: Sequence[str], table: TuningTable | None, device: str) -> RaceWorld:
    """Joins the world with all backends that the ways need; returns what ranks agree by."""
    place = open_device(device, world.local_rank)
    backends = backends_of(ways, table)
    stages = ("two_step", "hierarchical")
    comm.init(backends, world=world, timeout_s=WAIT_S, table=table, algorithms=stages)
    if RAW_GLOO in ways:
        # torch renames its collectives in one version after the other; both names work.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        rendezvous.torch_world(world, WAIT_S)
    largest = functools.partial(comm.all_reduce, op=dist.ReduceOp.MAX, backend=backends[0])
    # The quickest that there is, so that ranks leave it close together.
    quickest = next((b for b in ("shm", "mpi", "gloo") if b in backends), backends[0])
    barrier = functools.partial(comm.barrier, backend=quickest)

    def fence() -> None:
        place.synchronize()
        barrier()

    return RaceWorld(
        world.rank,
        world.size,
        barrier if place.torch.type == "cpu" else fence,
        largest,
        str(place.torch),
        place.synchronize,
    )


def contestants(ways: Sequence[str], agreed: RaceWorld) -> dict[str, Bind]:
    """Returns what binds each way to the buffers of a cell."""
    raw = None
    if RAW_MPI4PY in ways:
        with cast(MpiBackend, transport.backends["mpi"]).calls:
            raw = RawMpi()
    made: dict[str, Bind] = {}
    for way in ways:
        if way == RAW_MPI4PY:
            assert raw is not None
            made[way] = _python(raw, agreed)
        elif way == PEER_SUM:
            made[way] = _called(PeerSum(agreed), agreed)
        else:
            library = dist if way == RAW_GLOO else Through(_route(way))
            made[way] = _called(library, agreed)
    return made


def run_cells(world: World, spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of each cell of ``spec``, whose values are plain, on a rank."""
    table = TuningTable.from_dict(spec["table"]) if spec["table"] else None
    agreed = join(world, spec["ways"], table, spec["device"])
    ways = contestants(spec["ways"], agreed)
    plan = RacePlan(spec["rounds"], spec["seconds"])
    for values in spec["cells"]:
        cell = BenchCell(*values)
        place = {"ranks": world.size, "ranks_per_node": world.local_size}
        here = {way: ways[way] for way in ways if is_worth(way, {**cell._asdict(), **place})}
        row = race_cell(cell, here, agreed, plan)
        yield {**row, **place, "device": agreed.device.partition(":")[0]}
    comm.barrier()
    comm.shutdown()


def _route(way: str) -> Route | None:
    return None if way == TABLE else parse_route(way)


def _called(library: Any, agreed: RaceWorld) -> Bind:
    def begin(buffers: BenchBuffers, blocking: bool) -> Block:
        return timed(bind(library, buffers, blocking), agreed)

    return begin


def _python(raw: RawMpi, agreed: RaceWorld) -> Bind:
    own = agreed._replace(fence=raw.world.Barrier)

    def begin(buffers: BenchBuffers, blocking: bool) -> Block | None:
        call = raw.bind(buffers, blocking)
        return None if call is None else _alone(timed(call, own))

    return begin


def _alone(block: Block) -> Block:
    # The thread of hires.comm must not call MPI meanwhile; so the fence is MPI's own, too.
    def run(times: int) -> list[float] | None:
        with cast(MpiBackend, transport.backends["mpi"]).calls:
            return block(times)

    return run
