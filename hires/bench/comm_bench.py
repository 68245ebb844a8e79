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
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch.distributed as dist

from hires import comm
from hires.bench.bench_main import BenchTable, Result
from hires.bench.messages import (
    BARRIER,
    BENCHED,
    BenchBuffers,
    BenchCell,
    Block,
    RaceWorld,
    Row,
    bind,
    noise_of,
    race_cell,
    timed,
)
from hires.bench.peers.mpi4py_calls import RawMpi
from hires.bench.start_ranks import TORCHRUN, join_world, stream_ranks
from hires.comm.backends import rendezvous
from hires.comm.backends.backend import BACKENDS
from hires.comm.backends.mpi_backend import MpiBackend
from hires.core.config.mpi_dialects import DIALECTS
from hires.core.errors import ConfigError
from hires.core.ranks import mpi_starter
from hires.core.ranks.world import World
from hires.core.registry import offer
from hires.core.units import parse_size, size
from hires.engine.device import open_device
from hires.plan.routes import CARRIES, DIRECT, OWN, Route, is_possible, parse_route
from hires.plan.tuning_table import TuningTable

TABLE = "table"
BASELINES = RAW_GLOO, RAW_MPI4PY = ("raw:gloo", "raw:mpi4py")
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
SEGMENTS = ("1MiB", "4MiB", "16MiB")
MOST_DIRECT_BYTES = 2**20
"""Largest size of which each rank sends to each other one: more is never faster."""
WAIT_S = 120.0
log = logging.getLogger(__name__)


def options_of(task: Mapping[str, Any]) -> SimpleNamespace:
    """Returns the options of a task, lists as tuples; ConfigError: one makes no sense.

    ``routes`` that were not asked for are all that this machine has, backends first.
    """
    options = SimpleNamespace(**{**task, "start": starter_of(task["start"])})
    ranks, options.routes = words_of(task["ranks"]), words_of(task["routes"])
    if not all(word.isdecimal() and int(word) > 1 for word in ranks):
        raise ConfigError(f"--ranks {task['ranks']}: write numbers above 1, as 2,4")
    for route in (route for route in options.routes if route not in (*BASELINES, TABLE)):
        parse_route(route)
    options.routes = options.routes or routes_here(task["device"], has_mpi(options.start))
    options.ranks, options.hosts = sorted({*map(int, ranks)}), words_of(task["hosts"])
    options.operations = words_of(task["only"], "--only", BENCHED)
    options.sizes = sizes_of(task["sizes"])
    options.dtypes = words_of(task["dtypes"], "--dtypes", DTYPES)
    return options


def has_mpi(start: str) -> bool:
    """Whether the ranks that a starter starts are those of an MPI."""
    return bool(DIALECTS[start].libraries) or start == "srun"


def words_of(text: str, option: str = "", choices: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns the words of a list with commas; ConfigError: one is no choice of the option."""
    words = tuple(dict.fromkeys(filter(None, text.split(","))))
    for word in words if option else ():
        if word not in choices:
            raise ConfigError(f"{option}: unknown {word!r}; {offer(word, choices)}")
    return words


def sizes_of(text: str) -> tuple[int, ...]:
    """Returns sizes in bytes: ``4,64KiB``, all powers of two of ``4..64MiB``, or of four: ``x4``.

    >>> sizes_of("16,1KiB..64KiBx8")
    (16, 1024, 8192, 65536)
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


def routes_here(device: str, mpi: bool) -> tuple[str, ...]:
    """Returns the routes that a machine may have, the backends themselves first."""
    own = "shm" if device == "cpu" else "nccl"
    backends = [name for name in ("gloo", *["mpi"] * mpi, own) if name in BACKENDS]
    routes = [*backends]
    for name in (name for name in backends if name != "shm"):
        routes += [f"{name}:direct"] * is_possible(Route(name, DIRECT))
        routes += [f"{name}:segmented:{segment}" for segment in SEGMENTS]
    return tuple(routes)


def applies_to(way: str, operation: str, num_bytes: int) -> bool:
    """Whether a way differs from its backend alone in a cell, and may be faster."""
    route = None if way in (*BASELINES, TABLE) else parse_route(way)
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


def sweep(options: SimpleNamespace, cells: Sequence[BenchCell], *job: Any) -> Iterator[list[Row]]:
    """Yields all rows after each cell; a ``job`` has the ways, and a tuning table if any."""
    rows: list[Row] = []
    for ranks in options.ranks:
        words = cells, options.rounds, options.seconds, options.device, *job
        where = {"start": options.start, "hosts": options.hosts}
        measured = stream_ranks(f"{__name__}:run_cells", ranks, options.timeout, *words, **where)
        for number, row in enumerate(measured):
            rows.append(row)
            yield rows  # a cell that is shown has been kept
            log.info("%d ranks, %d of %d: %s", ranks, number + 1, len(cells), describe(row))


def describe(row: Row) -> str:
    """Returns a row in a line: the operation, the size and the fastest way."""
    right = right_ways(row)
    best = min(right, key=right.__getitem__, default="-")
    best_us = f" {right[best] * 1e6:.1f} us" if right else ""
    return f"{row['operation']} {size(row['bytes'])}, fastest {best}{best_us}"


def right_ways(row: Row) -> dict[str, float]:
    """Returns the medians of the ways whose results were right."""
    ways = row["ways"].items()
    return {name: way["p50_s"] for name, way in ways if way.get("p50_s") and not way["wrong"]}


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
    rounds: int,
    seconds: float,
    device: str,
    ways: Sequence[str],
    plain_table: dict[str, Any] | None = None,
) -> Iterator[Row]:
    """Yields the row of each cell, on a rank, which joins with all backends that the ways need."""
    table = TuningTable.from_dict(plain_table) if plain_table else None
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
        rendezvous.torch_world(world, WAIT_S)
    largest = functools.partial(comm.all_reduce, op=dist.ReduceOp.MAX, backend=backends[0])
    # The quickest that there is, so that ranks leave it close together.
    quickest = next((b for b in ("shm", "mpi", "gloo") if b in backends), backends[0])

    def fence() -> None:
        place.synchronize()
        comm.barrier(backend=quickest)

    name, done = str(place.torch), place.synchronize
    race_world = RaceWorld(world.rank, world.size, fence, largest, name, done)
    bound = {way: _bound(way, race_world) for way in ways}
    near = {"ranks_per_node": world.local_size, "device": place.torch.type}
    for cell in (BenchCell(*values) for values in cells):
        here = {w: bound[w] for w in ways if applies_to(w, cell.operation, cell.num_bytes)}
        yield {**race_cell(cell, here, race_world, rounds, seconds), **near}
    comm.barrier()
    comm.shutdown()


def _bound(way: str, world: RaceWorld) -> Callable[[BenchBuffers], Block]:
    # What binds a way to the buffers of a cell.
    if way != RAW_MPI4PY:
        library: Any = dist if way == RAW_GLOO else comm
        if way not in (*BASELINES, TABLE):
            route = parse_route(way)
            names = {*BENCHED, "send", "recv", "isend", "irecv"}
            calls = {n: getattr(comm, n) for n in names if hasattr(comm, n)}
            bound = {n: functools.partial(call, backend=route) for n, call in calls.items()}
            library = SimpleNamespace(**bound)
        return lambda buffers: timed(bind(library, buffers), world)
    lock = cast(MpiBackend, comm.default_world().backends["mpi"]).calls
    with lock:
        raw = RawMpi()
    own = world._replace(fence=raw.world.Barrier)

    def bind_raw(buffers: BenchBuffers) -> Block:
        block = timed(raw.bind(buffers), own)

        # The thread of hires.comm must not call MPI meanwhile; so the fence is MPI's own, too.
        def run(times: int) -> list[float]:
            with lock:
                return block(times)

        return run

    return bind_raw


def measure(task: Mapping[str, Any]) -> Iterator[Result]:
    """Yields all rows after each cell."""
    options = options_of(task)
    table = TuningTable.read(task["table"]) if task["table"] else None
    if TABLE in options.routes and table is None:
        raise ConfigError("--routes table needs --table FILE, as `hires tune comm` writes it")
    baselines = () if task["routes"] else BASELINES[: 1 + has_mpi(options.start)]
    ways = dict.fromkeys((*options.routes, *baselines, *([TABLE] if table else [])))
    cells = cells_of(options.operations, options.sizes, options.dtypes)
    plain = table.to_dict() if table is not None else None
    for rows in sweep(options, cells, [*ways], plain):
        wrong = wrong_rows(rows)
        yield {"ok": not wrong, "start": options.start, "wrong": wrong, "rows": rows}


def noise_facts(rows: Sequence[Row]) -> list[str]:
    """Returns the line on the noise of rows that stands above their tables."""
    typical, worst = (100 * noise_of(rows, share) for share in (0.5, 0.9))
    text = f"noise: the medians of rounds differ by {typical:.1f} %, in a tenth of the cells by"
    return [f"{text} {worst:.1f} % or more"]


def facts(result: Result) -> list[str]:
    """Returns what stands above the tables."""
    ways = [(*item, row["operation"]) for row in result["rows"] for item in row["ways"].items()]
    lacks = dict.fromkeys(f"{n} in {op}: {w['missing']}" for n, w, op in ways if "missing" in w)
    lines = [f"not measured: {text}" for text in lacks]
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


def _cells(row: Row, ways: Sequence[str]) -> dict[str, str]:
    # The size, the fastest way with its bandwidths, and the median of every way.
    right, values = right_ways(row), ["-"] * 4
    best = min(right, key=right.__getitem__, default="-")
    if right:
        way, operation = row["ways"][best], BENCHED[row["operation"]]
        rates = operation.bandwidths(row["bytes"], row["ranks"], right[best])
        rates_text = [f"{rate / 1e9:.3f}" for rate in rates]
        values = [f"{way['p99_s'] * 1e6:.1f}", *rates_text, str(way["count"])]
    cells = {"size": "-" if row["operation"] == BARRIER else size(row["bytes"]), "fastest": best}
    cells |= dict(zip(("p99", "alg GB/s", "bus GB/s", "n"), values, strict=True))
    for name in ways:
        wrong = row["ways"].get(name, {}).get("wrong")
        cells[name] = f"{right[name] * 1e6:.1f}" if name in right else "WRONG" if wrong else "-"
    return cells
