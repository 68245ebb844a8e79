"""Measures cells of messages on started ranks, one after another, and goes on where it stopped.

What `hires bench comm` and `hires tune comm` share: options, progress, and what is measured.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hires.bench.bench_noise import ProgramCounter
from hires.bench.bench_output import Result, option
from hires.bench.message_operations import BARRIER, MESSAGES
from hires.bench.message_race import BenchCell
from hires.bench.started_ranks import TORCHRUN, stream_started_ranks
from hires.comm.backends.known_backends import BACKENDS
from hires.core.config.mpi_dialects import DIALECTS
from hires.core.errors import ConfigError
from hires.core.ranks import mpi_starter
from hires.core.units import parse_size, rough, size
from hires.plan.algorithm_steps import STAGED
from hires.plan.routes import DIRECT, OWN, SHARES, Route, is_possible, parse_route
from hires.plan.tuning_table import TuningTable

AUTO = "auto"
TABLE = "table"
"""The way that a tuning table chooses."""
BASELINES = RAW_GLOO, RAW_MPI4PY = ("raw:gloo", "raw:mpi4py")
"""The libraries without hires."""
PEER_SUM = str(Route("cma", SHARES))
"""The sum of gradients in a training step, which no table can name for other operations."""
TABLE_NAMES: dict[str, str] = {
    **dict.fromkeys(MESSAGES, "send"),
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Measured operation -> its name in a tuning table, where that is another."""
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")
RUN = "hires.bench.comm_contestants:run_cells"

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""What was measured of a cell on some ranks, as plain values."""


def sizes_of(flag: str, text: str) -> tuple[int, ...]:
    """Returns sizes in bytes: ``4,64KiB``, all powers of two of ``4..64MiB``, or of four: ``x4``.

    >>> sizes_of("--sizes", "16,1KiB..4KiB")
    (16, 1024, 2048, 4096)
    >>> sizes_of("--sizes", "1KiB..64KiBx8")
    (1024, 8192, 65536)
    """
    sizes: set[int] = set()
    for part in text.split(","):
        ends, _, step = part.partition("x")
        bounds = [parse_size(end) for end in ends.split("..")]
        factor = int(step or 2) if (step or "2").isdecimal() else 0
        if None in bounds or len(bounds) > 2 or factor < 2 or (step and len(bounds) < 2):
            raise ConfigError(f"{flag} {part} is no size; write 64KiB, 4..64MiB or 4..64MiBx4")
        at, last = bounds[0] or 1, bounds[-1] or 1
        if at > last:
            raise ConfigError(f"{flag} {part} is no size; write the smaller one first")
        while at <= last:
            sizes.add(at)
            at *= factor
    return tuple(sorted(sizes))


def counts_of(flag: str, text: str) -> tuple[int, ...]:
    """Returns numbers of ranks, the least first."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise ConfigError(f"{flag} {text} must be numbers above 1 with commas between, as 2,4")
    return tuple(sorted({int(part) for part in parts}))


def words_of(flag: str, text: str) -> tuple[str, ...]:
    """Returns the words of a list with commas between."""
    return tuple(dict.fromkeys(filter(None, text.split(","))))


def starter_of(flag: str, text: str) -> str:
    """Returns what starts the ranks: ``auto`` is an MPI if there is one, else torchrun.

    Without an MPI of its own a job of Slurm takes srun, which starts nothing outside of a job.
    """
    if text != AUTO:
        if text not in DIALECTS:
            raise ConfigError(
                f"{flag} {text} is unknown; choose auto or one of {', '.join(DIALECTS)}"
            )
        return text
    if importlib.util.find_spec("mpi4py") is None:
        return TORCHRUN
    in_slurm = "SLURM_JOB_ID" in os.environ and shutil.which("srun") is not None
    return mpi_starter.mpi_here() or ("srun" if in_slurm else TORCHRUN)


@dataclass(frozen=True)
class StartOptions:
    """The options of all benchmarks of messages: where they run, and how long."""

    start: str = option(
        AUTO, f"what starts the ranks: {', '.join((*DIALECTS, AUTO))}", parse=starter_of
    )
    hosts: tuple[str, ...] = option("", "machines of the ranks; none: this one", parse=words_of)
    device: str = option("cpu", "where the tensors are: cpu or cuda (on GPUs it was never run)")
    rounds: int = option(5, "turns of each library in a cell")
    seconds: float = option(0.2, "of each library in a cell, all its turns together")
    timeout: float = option(3600.0, "seconds for each number of ranks")

    @property
    def has_mpi(self) -> bool:
        """Whether the ranks are those of an MPI."""
        return bool(DIALECTS[self.start].libraries) or self.start == "srun"


@dataclass(frozen=True)
class WorldOptions(StartOptions):
    """Those of benchmarks on several numbers of ranks."""

    ranks: tuple[int, ...] = option("2", "numbers of ranks, as 2,4", parse=counts_of)


SEGMENTS = ("1MiB", "4MiB", "16MiB")
MOST_DIRECT_BYTES = 2**20
"""Largest size of which each rank sends to each other one: more is never faster."""


def routes_here(device: str, has_mpi: bool) -> tuple[str, ...]:
    """Returns the routes that a machine may have, the backends themselves first."""
    own = ("shm", "cma") if device == "cpu" else ("nccl", "nccl_direct")
    backends = [name for name in ("gloo", *["mpi"] * has_mpi, *own) if name in BACKENDS]
    libraries = [name for name in backends if name in ("gloo", "mpi", "nccl")]
    routes = [*backends]
    for name in libraries:
        routes += [f"{name}:direct"] * is_possible(Route(name, DIRECT))
        routes += [f"{name}:two_step", f"{name}:hierarchical"]
        routes += [f"{name}:segmented:{segment}" for segment in SEGMENTS]
        routes += [f"{name}:two_step:{SEGMENTS[1]}", f"{name}:hierarchical:{SEGMENTS[1]}"]
    return tuple(routes)


def baselines_here(device: str, has_mpi: bool) -> tuple[str, ...]:
    """Returns what routes are compared with: the raw libraries, and the sum of a training step."""
    raw = BASELINES if has_mpi else BASELINES[:1]
    return (*raw, PEER_SUM) if device == "cpu" else raw


def is_worth(way: str, row: Mapping[str, Any]) -> bool:
    """Whether a way differs from its backend alone in a cell, and may be faster.

    ``row`` has the cell's operation and size, and ranks and ranks per node.
    """
    if way in (*BASELINES, TABLE):
        return True
    route, operation = parse_route(way), TABLE_NAMES.get(row["operation"], row["operation"])
    if route.algorithm == OWN:
        return True
    if way == PEER_SUM:
        here = row["ranks_per_node"] >= row["ranks"]
        return here and operation == "all_reduce" and bool(row.get("blocking", True))
    if operation not in STAGED.get(route.algorithm, ()):
        return False
    if route.algorithm == "hierarchical" and row["ranks_per_node"] >= row["ranks"]:
        return False
    if route.algorithm == "direct" and row["num_bytes"] > MOST_DIRECT_BYTES:
        return False
    return int(row["num_bytes"]) > route.segment_bytes


def row_key(row: Row) -> str:
    """Returns what names a measured cell."""
    cell = BenchCell(*(row[name] for name in BenchCell._fields))
    return f"{row['ranks']} {cell.key}"


def sweep(
    options: WorldOptions,
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
        spec = {
            "cells": todo,
            "ways": [*ways],
            "rounds": options.rounds,
            "seconds": options.seconds,
            "device": options.device,
            "table": table.to_dict() if table is not None else None,
        }
        how = (options.start, RUN, ranks, options.timeout, spec)
        began, first_s = time.monotonic(), 0.0
        with ProgramCounter() as programs:
            for number, row in enumerate(stream_started_ranks(*how, hosts=options.hosts), start=1):
                others = programs.others(row["ranks_per_node"])
                rows.append({**row, "other_programs": others})
                passed_s = time.monotonic() - began
                first_s = first_s or passed_s
                left = left_s(passed_s, first_s, number, len(todo))
                about = f"; {rough(left)} left" if left is not None else ""
                yield  # a cell that is shown has been kept
                log.info("%d ranks, %d of %d: %s%s", ranks, number, len(todo), describe(row), about)


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
    late = f" {measured[best] * 1e6:.1f} us" if measured else ""
    mode = "" if row["blocking"] else " async"
    return f"{row['operation']}{mode} {size(row['bytes'])}, fastest {best}{late}"


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


def wrong(rows: Sequence[Row]) -> list[str]:
    """Returns each way and cell whose result was wrong, in words."""
    return [
        f"{name}: {describe(row).partition(',')[0]}, {row['ranks']} ranks"
        for row in rows
        for name, one in row["ways"].items()
        if one.get("wrong")
    ]


def former_rows(former: Result | None, options: dict[str, Any]) -> list[Row]:
    """Returns the rows of an earlier result that was measured alike, to go on with them."""
    if former is None or former.get("options") != options:
        return []
    rows = former.get("rows", [])
    if rows:
        log.info(
            "%d cells are measured already; remove the folder to measure them again", len(rows)
        )
    return [*rows]
