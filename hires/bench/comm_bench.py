"""Measures messages: latency, bandwidth and every collective, with all backends of hires.comm.

    gloo, mpi, shm ...      hires.comm with ``backend=`` that route, also mpi:segmented:4MiB
    table                   hires.comm as a tuning table chooses
    raw:gloo, raw:mpi4py    the libraries without hires

The cells of a sweep are measured one after another on started ranks; the slowest rank is the
sample, and every result is checked.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist

from hires import comm
from hires.bench.bench_main import BenchTable, Result
from hires.bench.message_race import (
    BenchCell,
    Bind,
    Block,
    RaceWorld,
    Row,
    noise_of,
    race_cell,
    timed,
)
from hires.bench.messages import BARRIER, BENCHED, BenchBuffers, bind, table_name
from hires.bench.peers.mpi4py_calls import RawMpi
from hires.bench.start_ranks import TORCHRUN, join_world, stream_ranks, torch_world
from hires.comm.backends.known_backends import BACKENDS
from hires.comm.backends.mpi_backend import MpiBackend
from hires.comm.transport import transport
from hires.core.config.mpi_dialects import DIALECTS
from hires.core.errors import ConfigError
from hires.core.ranks import mpi_starter
from hires.core.ranks.world import World
from hires.core.registry import offer
from hires.core.units import parse_size, rough, size
from hires.engine.device import open_device
from hires.plan.routes import DIRECT, OWN, Route, is_possible, parse_route
from hires.plan.table_rules import CARRIES
from hires.plan.tuning_table import TuningTable

TABLE = "table"
BASELINES = RAW_GLOO, RAW_MPI4PY = ("raw:gloo", "raw:mpi4py")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
SEGMENTS = ("1MiB", "4MiB", "16MiB")
MOST_DIRECT_BYTES = 2**20
"""Largest size of which each rank sends to each other one: more is never faster."""
WAIT_S = 120.0
NOTES = """\
The sample of a call is its slowest rank; all ranks leave a fence together before it. Libraries run
in turns, in another order every round. A size is what a rank contributes. Bandwidths: nccl-tests,
PERFORMANCE.md. `raw:mpi4py` and `raw:gloo` are the libraries without hires, `table` is hires.comm
with `comm=mix`."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SweepOptions:
    """What is measured, where, and how long."""

    start: str
    hosts: tuple[str, ...]
    device: str
    ranks: tuple[int, ...]
    rounds: int
    seconds: float
    """Of each way in a cell, all rounds together."""
    timeout: float
    """Seconds for each number of ranks."""
    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    ways: tuple[str, ...]
    """Routes and baselines; empty: all that are here."""

    @staticmethod
    def of(task: Mapping[str, Any]) -> SweepOptions:
        """Returns the options of a task; ConfigError: one makes no sense."""
        ranks = words_of(task["ranks"])
        if not all(word.isdecimal() and int(word) > 1 for word in ranks):
            raise ConfigError(f"--ranks {task['ranks']}: write numbers above 1, as 2,4")
        ways = words_of(task["routes"])
        for way in ways:
            if way not in (*BASELINES, TABLE):
                parse_route(way)
        return SweepOptions(
            starter_of(task["start"]),
            words_of(task["hosts"]),
            task["device"],
            tuple(sorted({int(word) for word in ranks})),
            task["rounds"],
            float(task["seconds"]),
            task["timeout"],
            words_of(task["only"], "--only", BENCHED),
            sizes_of(task["sizes"]),
            words_of(task["dtypes"], "--dtypes", DTYPES),
            ways,
        )

    @property
    def routes(self) -> tuple[str, ...]:
        """The routes that were asked for, or all that this machine has, backends first."""
        return self.ways or routes_here(self.device, self.has_mpi)

    @property
    def has_mpi(self) -> bool:
        """Whether the ranks are those of an MPI."""
        return bool(DIALECTS[self.start].libraries) or self.start == "srun"


def words_of(text: str, option: str = "", choices: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the words of a list with commas; ConfigError: one is no choice of the option."""
    words = tuple(dict.fromkeys(filter(None, text.split(","))))
    for word in words if option else ():
        if word not in choices:
            raise ConfigError(f"{option}: unknown {word!r}; {offer(word, choices)}")
    return words


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
        bounds = [parse_size(end) or 0 for end in ends.split("..")]
        factor = int(step or 2) if (step or "2").isdecimal() else 0
        at, last = bounds[0], bounds[-1]
        if not 0 < at <= last or len(bounds) > 2 or factor < 2 or (step and len(bounds) < 2):
            raise ConfigError(f"--sizes {part} is no size; write 64KiB, 4..64MiB or 4..64MiBx4")
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
    own = "shm" if device == "cpu" else "nccl"
    backends = [name for name in ("gloo", *["mpi"] * has_mpi, own) if name in BACKENDS]
    routes = [*backends]
    for name in (name for name in backends if name != "shm"):
        routes += [f"{name}:direct"] * is_possible(Route(name, DIRECT))
        routes += [f"{name}:segmented:{segment}" for segment in SEGMENTS]
    return tuple(routes)


def applies_to(way: str, operation: str, num_bytes: int) -> bool:
    """Whether a way differs from its backend alone in a cell, and may be faster."""
    if way in (*BASELINES, TABLE):
        return True
    route = parse_route(way)
    if route.algorithm == OWN:
        return True
    if table_name(operation) not in CARRIES.get(route.algorithm, ()):
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
    options: SweepOptions,
    cells: Sequence[BenchCell],
    ways: Sequence[str],
    rows: list[Row],
    table: TuningTable | None = None,
) -> Iterator[None]:
    """Measures the cells that ``rows`` lacks, and appends each; yields after each."""
    done = {(row["ranks"], *(row[name] for name in BenchCell._fields)) for row in rows}
    for ranks in options.ranks:
        todo = [cell for cell in cells if (ranks, *cell) not in done]
        if not todo:
            continue
        job = todo, ways, options.rounds, options.seconds, options.device
        measured = stream_ranks(
            f"{__name__}:run_cells",
            ranks,
            options.timeout,
            *job,
            table.to_dict() if table is not None else None,
            start=options.start,
            hosts=options.hosts,
        )
        first_s = 0.0  # in which the ranks start and join is part of no cell
        for number, row in enumerate(measured):
            rows.append(row)
            first_s = first_s or time.monotonic()
            left_s = (time.monotonic() - first_s) / max(number, 1) * (len(todo) - number - 1)
            about = f"; {rough(left_s)} left" if number else ""
            yield  # a cell that is shown has been kept
            log.info("%d ranks, %d of %d: %s%s", ranks, number + 1, len(todo), describe(row), about)


def describe(row: Row) -> str:
    """Returns a row in a line: the operation, the size and the fastest way."""
    measured = {name: way["p50_s"] for name, way in row["ways"].items() if "p50_s" in way}
    best = min(measured, key=measured.__getitem__, default="-")
    best_us = f" {measured[best] * 1e6:.1f} us" if measured else ""
    return f"{row['operation']} {size(row['bytes'])}, fastest {best}{best_us}"


def wrong_rows(rows: Sequence[Row]) -> list[str]:
    """Returns each way and cell whose result was wrong, in words."""
    return [
        f"{name}: {describe(row).partition(',')[0]}, {row['ranks']} ranks"
        for row in rows
        for name, way in row["ways"].items()
        if way.get("wrong")
    ]


def run_cells(
    world: World,
    cells: Sequence[Sequence[Any]],
    ways: Sequence[str],
    rounds: int,
    seconds: float,
    device: str,
    table: dict[str, Any] | None,
) -> Iterator[Row]:
    """Yields the row of each cell, on a rank."""
    race_world = join(world, ways, TuningTable.from_dict(table) if table else None, device)
    bound = {way: _bound(way, race_world) for way in ways}
    near = {"ranks_per_node": world.local_size, "device": race_world.device.partition(":")[0]}
    for cell in (BenchCell(*values) for values in cells):
        here = {w: bound[w] for w in ways if applies_to(w, cell.operation, cell.num_bytes)}
        yield {**race_cell(cell, here, race_world, rounds, seconds), **near}
    comm.barrier()
    comm.shutdown()


def join(world: World, ways: Sequence[str], table: TuningTable | None, device: str) -> RaceWorld:
    """Joins the world with all backends that the ways need; returns what ranks agree by."""
    routes = [parse_route(way).backend for way in ways if way not in (*BASELINES, TABLE)]
    routes += table.backends if table is not None else []
    routes += ["gloo"] * (RAW_GLOO in ways) + ["mpi"] * (RAW_MPI4PY in ways)
    order = ("gloo", "mpi", "nccl", "shm", "null")  # the first one is for agreements
    backends = [name for name in order if name in routes] or ["gloo"]
    place = open_device(device, world.local_rank)
    join_world(world, WAIT_S, backends, device, table=table)
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
    if way != RAW_MPI4PY:
        library = (
            dist if way == RAW_GLOO else RoutedComm(None if way == TABLE else parse_route(way))
        )
        return lambda buffers: timed(bind(library, buffers), world)
    calls = cast(MpiBackend, transport.backends["mpi"]).calls
    with calls:
        raw = RawMpi()
    own = world._replace(fence=raw.world.Barrier)

    def bind_raw(buffers: BenchBuffers) -> Block | None:
        call = raw.bind(buffers)
        if call is None:
            return None
        block = timed(call, own)

        # The thread of hires.comm must not call MPI meanwhile; so the fence is MPI's own, too.
        def run(times: int) -> list[float]:
            with calls:
                return block(times)

        return run

    return bind_raw


def measure(task: Mapping[str, Any], previous: Result | None) -> Iterator[Result]:
    """Yields all rows after each cell."""
    options = SweepOptions.of(task)
    table = TuningTable.read(task["table"]) if task["table"] else None
    if TABLE in options.ways and table is None:
        raise ConfigError("--routes table needs --table FILE, as `hires tune comm` writes it")
    ways = options.ways or (*options.routes, *(BASELINES if options.has_mpi else BASELINES[:1]))
    ways = tuple(dict.fromkeys((*ways, *([TABLE] if table else []))))
    rows: list[Row] = previous["rows"] if previous else []
    cells = cells_of(options.operations, options.sizes, options.dtypes)

    def result() -> Result:
        wrong = wrong_rows(rows)
        return {"ok": not wrong, "start": options.start, "wrong": wrong, "rows": rows}

    for _ in sweep(options, cells, ways, rows, table):
        yield result()
    yield result()


def noise_facts(rows: Sequence[Row]) -> list[str]:
    """Returns the line on the noise of rows that stands above their tables."""
    typical, worst = (100 * noise_of(rows, share) for share in (0.5, 0.9))
    text = f"noise: the medians of rounds differ by {typical:.1f} %, in a tenth of the cells by"
    return [f"{text} {worst:.1f} % or more"]


def facts(result: Result) -> list[str]:
    """Returns what stands above the tables."""
    missing: dict[str, dict[str, None]] = defaultdict(dict)
    for row in result["rows"]:
        for name, way in row["ways"].items():
            if way.get("missing"):
                missing[way["missing"]][f"{name} in {row['operation']}"] = None
    lines = [f"not measured: {', '.join([*ways][:3])}: {why}" for why, ways in missing.items()]
    results = f"WRONG: {'; '.join(result['wrong'])}" if result["wrong"] else "all right"
    noise = noise_facts(result["rows"])
    return [f"ranks started by {result['start']}", *noise, f"results: {results}", *lines]


def tables(result: Result) -> list[BenchTable]:
    """Returns a table for each operation, type and number of ranks."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in result["rows"]:
        groups[f"{row['operation']}, {row['dtype']}, {row['ranks']} ranks, us"].append(row)
    tables = []
    for title, rows in groups.items():
        ways = [*dict.fromkeys(way for row in rows for way in row["ways"])]
        ways.sort(key=lambda way: ":" in way and way not in BASELINES)  # narrow screens cut the end
        tables.append(BenchTable(title, [_cells(row, ways) for row in rows]))
    return tables


def right_ways(row: Row) -> dict[str, Row]:
    """Returns what was measured of the ways whose results were right."""
    return {name: way for name, way in row["ways"].items() if way.get("p50_s") and not way["wrong"]}


def _cells(row: Row, ways: Sequence[str]) -> dict[str, str]:
    """Returns the size, the fastest way with its bandwidths, and the median of every way."""
    right = right_ways(row)
    best = min(right, key=lambda name: right[name]["p50_s"], default="-")
    cells = {"size": "-" if row["operation"] == BARRIER else size(row["bytes"]), "fastest": best}
    cells |= dict.fromkeys(("p99", "alg GB/s", "bus GB/s", "n"), "-")
    if right:
        way, operation = right[best], BENCHED[row["operation"]]
        rates = operation.bandwidths(row["bytes"], row["ranks"], way["p50_s"])
        values = f"{way['p99_s'] * 1e6:.1f}", *(f"{rate / 1e9:.3f}" for rate in rates)
        cells |= dict(zip(("p99", "alg GB/s", "bus GB/s"), values, strict=True))
        cells["n"] = str(way["count"])
    for name in ways:
        wrong = row["ways"].get(name, {}).get("wrong")
        cells[name] = "WRONG" if wrong else "-"
        if name in right:
            cells[name] = f"{right[name]['p50_s'] * 1e6:.1f}"
    return cells
