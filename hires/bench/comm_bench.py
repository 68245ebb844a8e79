"""Measures messages: latency, bandwidth and every collective, with all backends of hires.comm.

    gloo, mpi, shm ...      hires.comm with ``backend=`` that route, also mpi:segmented:4MiB
    table                   hires.comm as a tuning table chooses
    raw:gloo, raw:mpi4py    the libraries without hires

The cells of a sweep are measured one after another on started ranks, whose libraries take turns;
every element of a result is checked before the first turn and after the last.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch import Tensor

from hires import comm
from hires.bench.bench_main import Result, Row, result_of
from hires.bench.coded_broadcasts import CODED, CodedBroadcast, route_in
from hires.bench.emulated_link import emulated_hosts
from hires.bench.messages import (
    BARRIER,
    BENCHED,
    MESSAGES,
    ROOT,
    BenchBuffers,
    BenchCell,
    Call,
    MessageCalls,
    bind,
    messages_in,
)
from hires.bench.race import Samples, noise_of, race, spread
from hires.bench.start_ranks import join_world, stream_ranks
from hires.comm.backends import rendezvous
from hires.comm.backends.mpi_backend import TYPES, MpiBackend
from hires.core.config.launcher_config import DIALECTS
from hires.core.errors import ConfigError, HiresError
from hires.core.ranks import mpi_library
from hires.core.ranks.world import World
from hires.core.units import size
from hires.engine.device import RankDevice, open_device
from hires.plan.hardware import CPU, GLOO, MPI
from hires.plan.routes import (
    BACKENDS,
    CARRIES,
    DIRECT,
    MEMORY,
    OWN,
    STREAMED,
    Route,
    is_possible,
    parse_route,
)
from hires.plan.tuning_table import TuningTable

TABLE = "table"
BASELINES = RAW_GLOO, RAW_MPI4PY = ("raw:gloo", "raw:mpi4py")
SEGMENTS = ("1MiB", "4MiB", "16MiB")
MOST_DIRECT_BYTES = 2**20
"""Largest size of which each rank sends to each other one: more is never faster."""
WAIT_S, WARMUP = 120.0, 3
log = logging.getLogger(__name__)


def measure(task: Mapping[str, Any]) -> Iterator[Result]:
    """Yields all rows by operation, type and number of ranks, after each cell."""
    table = TuningTable.read(task["table"]) if task["table"] else None
    routes = task["routes"] or routes_here(task)
    if TABLE in routes and table is None:
        raise ConfigError("--routes table needs --table FILE, as `hires tune comm` writes it")
    baselines = () if task["routes"] else BASELINES[: 1 + has_mpi(task)]
    ways = [*dict.fromkeys((*routes, *baselines, *([TABLE] if table else [])))]
    cells = cells_of(task["only"], task["sizes"], task["dtypes"])
    for groups in _sweep_at(task, cells, ways, table):
        idle = [row for rows in groups.values() for row in rows if "not_run" in row]
        each = [f"{row['name']} in {row['operation']}: {row['not_run']}" for row in idle]
        lacks = [f"not measured: {text}" for text in dict.fromkeys(each)]
        start = f"ranks started by {task['start']}"
        yield result_of(groups, [start, *noise_facts(groups), *lacks])


def _sweep_at(
    task: Mapping[str, Any], cells: Sequence[BenchCell], ways: Sequence[str], table: Any
) -> Iterator[dict[str, list[Row]]]:
    # On the machines that are named, or on stand-ins for them.
    with contextlib.ExitStack() as stack:
        if task.get("link"):
            stand_ins = emulated_hosts(max(task["ranks"]), task["link"], task["start"])
            task = {**task, "hosts": stack.enter_context(stand_ins)}
        yield from sweep(task, cells, ways, table)


def has_mpi(task: Mapping[str, Any]) -> bool:
    """Whether the ranks that a starter starts are those of an MPI."""
    return bool(DIALECTS[task["start"]].libraries) or task["start"] == "srun"


def routes_here(task: Mapping[str, Any]) -> list[str]:
    """Returns the routes that a machine may have, the backends themselves first."""
    unusable = {*(STREAMED if task["device"] == CPU else MEMORY), *([] if has_mpi(task) else [MPI])}
    backends = [name for name in BACKENDS if name not in unusable]
    routes = [*backends]
    for name in (name for name in backends if name not in MEMORY):
        routes += [f"{name}:direct"] * is_possible(Route(name, DIRECT))
        routes += [f"{name}:segmented:{segment}" for segment in SEGMENTS]
    return routes


def applies_to(way: str, operation: str, num_bytes: int) -> bool:
    """Whether a way differs from its backend alone in a cell, and may be faster."""
    route = None if way in (*BASELINES, TABLE) or CODED in way else parse_route(way)
    if route is None or route.algorithm == OWN:
        return True
    if BENCHED[operation].table not in CARRIES.get(route.algorithm, ()):
        return False
    if route.algorithm == DIRECT and num_bytes > MOST_DIRECT_BYTES:
        return False
    return num_bytes > route.segment_bytes


def cells_of(
    operations: Sequence[str], sizes: Sequence[int], dtypes: Sequence[str]
) -> list[BenchCell]:
    """Returns the cells of a sweep; a barrier has one size and type."""
    return [
        BenchCell(operation, num_bytes, dtype)
        for operation in operations
        for dtype in (dtypes if operation != BARRIER else dtypes[:1])
        for num_bytes in (sizes if operation != BARRIER else sizes[:1])
    ]


def sweep(
    task: Mapping[str, Any],
    cells: Sequence[BenchCell],
    ways: Sequence[str],
    table: TuningTable | None = None,
) -> Iterator[dict[str, list[Row]]]:
    """Yields all rows by operation, type and number of ranks, after each cell."""
    groups = {title: [*rows] for title, rows in task.get("before", {}).items()}
    if groups:
        yield groups
    for ranks in task["ranks"]:
        known = [row for rows in groups.values() for row in rows if row["ranks"] == ranks]
        done = {tuple(row[name] for name in BenchCell._fields) for row in known}
        if not (left := [cell for cell in cells if cell not in done]):
            continue
        job = left, task["rounds"], task["seconds"], task["device"], ways, table
        where = {"start": task["start"], "hosts": task["hosts"][:ranks]}
        place = f", {task['place']}" if task.get("place") else ""
        measured = stream_ranks(f"{__name__}:run_cells", ranks, task["timeout"], *job, **where)
        for number, (cell, rows) in enumerate(zip(left, measured, strict=True)):
            groups.setdefault(f"{cell[0]}, {cell[2]}, {ranks} ranks{place}", []).extend(rows)
            yield groups  # a cell that is shown has been kept
            right = [row for row in rows if row["ok"] and "step_s" in row]
            best = min(right, key=lambda row: float(row["step_s"]["median"]), default=None)
            fastest = f"{best['name']} {best['step_s']['median'] * 1e6:.1f} us" if best else "-"
            what = f"{cell[0]} {size(cell[1])}, fastest {fastest}"
            log.info("%d ranks, %d of %d: %s", ranks, number + 1, len(left), what)


def noise_facts(groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """Returns the line on the noise of rows that stands above their tables."""
    typical, worst = (100 * noise_share(groups, share) for share in (0.5, 0.9))
    text = f"noise: the medians of rounds differ by {typical:.1f} %, in a tenth of the cells by"
    return [f"{text} {worst:.1f} % or more"]


def noise_share(groups: Mapping[str, Sequence[Row]], share: float = 0.5) -> float:
    """Returns the noise that a share of all rows does not exceed."""
    noises = [row["noise"] for rows in groups.values() for row in rows if "noise" in row]
    return float(np.quantile(noises or [0.0], share))


def run_cells(
    world: World,
    cells: Sequence[BenchCell],
    rounds: int,
    seconds: float,
    device: str,
    ways: Sequence[str],
    table: TuningTable | None = None,
) -> Iterator[list[Row]]:
    """Yields the rows of each cell, on a rank, which joins with all backends that the ways need."""
    routes = [route_in(way).backend for way in ways if way not in (*BASELINES, TABLE)]
    routes += table.backends if table is not None else []
    routes += [GLOO] * (RAW_GLOO in ways) + [MPI] * (RAW_MPI4PY in ways)
    backends = [name for name in BACKENDS if name in routes] or [GLOO]
    join_world(world, WAIT_S, backends, device, table=table)
    if RAW_GLOO in ways:
        # torch renames its collectives in one version after the other; both names work.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        rendezvous.torch_world(world, WAIT_S)
    # The quickest that there is, so that ranks leave it close together.
    quickest = max(reversed(backends), key=lambda name: (name in MEMORY, name not in STREAMED))
    fence = functools.partial(comm.barrier, backend=quickest)
    place = open_device(device, world.local_rank)
    everyone = comm.make_groups([[*range(world.size)]])[0]
    binders = {way: _binder(way) for way in ways}
    for cell in cells:
        buffers = BenchBuffers(cell, world.rank, world.size, str(place.torch))
        num_bytes = buffers.num_bytes * (cell.operation != BARRIER)
        facts = {"bytes": num_bytes, "ranks": world.size, "device": place.torch.type}
        facts |= {**cell._asdict(), "ranks_per_node": world.local_size}
        rows: dict[str, Row] = {}
        runners: dict[str, MessageCalls] = {}
        for way in (way for way in ways if applies_to(way, cell.operation, cell.num_bytes)):
            runner, missing = None, ""
            try:
                runner = binders[way](buffers, place, fence)
                wrong = runner.num_wrong()
            except (HiresError, RuntimeError, ValueError, TypeError, KeyError) as error:
                missing = " ".join(str(error).split())[:200] or type(error).__name__
            missing = next(filter(None, comm.gather_texts(missing)), "")
            rows[way] = {**facts, "name": way, "ok": True}
            if missing:
                rows[way]["not_run"] = missing
            elif runner is not None:
                runners[way], rows[way]["ok"] = runner, comm.max_all(wrong) == 0
        yield [*_raced(rows, runners, rounds, seconds, everyone)]
    comm.barrier()
    comm.shutdown()


def _raced(
    rows: dict[str, Row],
    runners: Mapping[str, MessageCalls],
    rounds: int,
    seconds: float,
    everyone: comm.Group,
) -> Iterator[Row]:
    # The rows of a cell with what the libraries that have the operation take, by turns.
    samples: Mapping[str, Samples] = {}
    if runners:
        *_, samples = race(runners, rounds, WARMUP, everyone, seconds / rounds)
    for way, row in rows.items():
        if way in samples:
            messages = messages_in(row["operation"], row["bytes"])
            calls_s = [call_s / messages for turn_s in samples[way].turns_s for call_s in turn_s]
            took, operation = spread(calls_s), BENCHED[row["operation"]]
            rates = operation.bandwidths(row["bytes"], row["ranks"], took["median"])
            rounds_s = samples[way].rounds_s
            row |= {"step_s": took, "noise": noise_of(rounds_s), "rounds_s": rounds_s}
            row["bytes_per_s"] = rates
            row["ok"] &= comm.max_all(runners[way].num_wrong()) == 0
            row["wrong"] = "" if row["ok"] else "elements of the result"
        yield row


def _binder(way: str) -> Callable[..., MessageCalls]:
    # What binds a way to the buffers of a cell: hires.comm, or a library beside it.
    if way == RAW_MPI4PY:
        return RawMpi(cast(MpiBackend, comm.default_world().backends[MPI]).calls).bound
    if CODED in way:
        return functools.partial(CodedBroadcast, way)
    library: Any = dist if way == RAW_GLOO else comm
    if way not in (*BASELINES, TABLE):
        names = {*BENCHED, "send", "recv", "isend", "irecv"}
        calls = {name: getattr(comm, name) for name in names if hasattr(comm, name)}
        route = parse_route(way)
        bound = {n: functools.partial(call, backend=route) for n, call in calls.items()}
        library = SimpleNamespace(**bound)

    def bound_to(buffers: BenchBuffers, place: Any, fence: Call) -> MessageCalls:
        return MessageCalls(bind(library, buffers), buffers, place, fence)

    return bound_to


class RawMpi:
    """The library's own world, beside that of hires; messages as ``torch.distributed`` has them."""

    def __init__(self, lock: Any) -> None:
        self.mpi, self.lock = mpi_library.load(), lock
        mpi_library.start(self.mpi)
        with lock:
            self.world = self.mpi.COMM_WORLD.Dup()
        self._specs: dict[int, tuple[Tensor, list[Any]]] = {}

    def bound(self, buffers: BenchBuffers, device: RankDevice, fence: Call) -> MessageCalls:
        """Returns the calls of a cell: hires.comm makes none meanwhile, so the fence is MPI's."""
        return MessageCalls(self.bind(buffers), buffers, device, self.world.Barrier, self.lock)

    def bind(self, buffers: BenchBuffers) -> Call:
        """Returns a call through mpi4py; KeyError: MPI has no such type."""
        root, here = buffers.rank == ROOT, self.mpi.IN_PLACE
        self._specs.clear()
        input, output = self.spec(buffers.input), self.spec(buffers.output)
        if buffers.operation in MESSAGES:
            return bind(self, buffers)
        calls = {
            "all_reduce": ("Allreduce", here, output),
            "reduce": ("Reduce", here, output) if root else ("Reduce", input, None),
            "broadcast": ("Bcast", output),
            "all_gather_into_tensor": ("Allgather", input, output),
            "reduce_scatter_tensor": ("Reduce_scatter_block", input, output),
            "all_to_all_single": ("Alltoall", input, output),
            "gather": ("Gather", input, output if root else None),
            "scatter": ("Scatter", input if root else None, output),
            "barrier": ("Barrier",),
        }
        name, *words = calls[buffers.operation]
        return functools.partial(getattr(self.world, name), *words)

    def spec(self, tensor: Tensor) -> list[Any]:
        """Returns a tensor as mpi4py takes it; it is kept until other buffers are bound."""
        if id(tensor) not in self._specs:
            buffer = self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
            self._specs[id(tensor)] = tensor, [buffer, getattr(self.mpi, TYPES[tensor.dtype])]
        return self._specs[id(tensor)][1]

    def __getattr__(self, name: str) -> Any:
        """Returns ``send``, ``recv``, ``isend`` or ``irecv``."""
        call = getattr(self.world, name.capitalize())

        def message(tensor: Tensor, peer: int, *, tag: int) -> Any:
            request = call(self.spec(tensor), peer, tag)
            return SimpleNamespace(wait=request.Wait) if request else None

        return message
