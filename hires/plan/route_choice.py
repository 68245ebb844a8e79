"""Chooses the route of a message from a run's tuning table, as far as its ranks can take it.

``comm.table`` names the table: ``default`` ships with hires, ``tuned`` is what ``hires tune comm``
has written for this machine (before that, one that ships), anything else is a file. With
``comm.granularity=coarse`` one backend carries all sizes of an operation
(:func:`hires.plan.point_times.coarse`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.config.parallel_config import AUTO
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.ranks import memory_files
from hires.core.registry import offer
from hires.plan.hardware import CUDA, GLOO, MPI, NCCL, backend_of, device_of, mpi_lacks
from hires.plan.plan import Finding
from hires.plan.point_times import coarse
from hires.plan.routes import (
    BACKENDS,
    CHANNEL,
    FLAT,
    MEMORY,
    MESSAGE,
    OWN,
    STREAMED,
    Route,
    is_possible,
)
from hires.plan.table_rules import CARRIES, dtype_class
from hires.plan.tuning_table import DISTURBED, MADE, TuningTable

DEFAULT, TUNED = "default", "tuned"
TUNED_FOLDER, TUNED_FILE = "comm-tuning", "table.json"
"""What ``hires tune comm`` writes, and ``comm.table=tuned`` reads."""
_SHIPPED = Path(__file__).parent
"""Where the tables lie that ship with hires."""
TILES, STAGES, HOLDERS, BUCKETS, OF_ALL = "tiles", "stages", "holders", "buckets", "world"
"""Where a message belongs: among the tiles of a stage, between stages, to the sums of gradients (of
one tensor, or of several at once), to all ranks."""


@dataclass(frozen=True)
class RouteChoice:
    """A table, and the routes of it that the ranks of a run can take."""

    table: TuningTable
    backend: str
    """Carries what no rule does."""
    device: str
    backends: frozenset[str]
    """Those that rules may name."""

    def route(
        self,
        operation: str,
        place: str,
        ranks: int,
        near: int,
        dtype: str,
        num_bytes: int,
    ) -> Route:
        """Returns the route of a message, by facts that all its ranks share.

        ``ranks``: of the group, also of a message between two of its tiles; ``near``: how many of
        the message's ranks are on one node.
        """
        if place == OF_ALL:
            # One number of the host. The way of agreements may depend on no table: the first of
            # them compares the tables, and one ends a run in which a rank could not go on.
            return Route(self.fallback("cpu"))
        device = self.device

        def possible(route: Route) -> bool:
            return route.backend in self.backends and _fits(route, operation)

        kind = dtype_class(operation, dtype)
        own_ranks = 2 if operation == "send" else ranks
        route = self.table.route(operation, own_ranks, near, device, kind, num_bytes, possible)
        if not possible(route):
            route = Route(self.fallback(device))
        return _own_form(route, operation, place)

    def fallback(self, device: str) -> str:
        """Returns the default backend of tensors on a device."""
        return GLOO if self.backend == NCCL and device != CUDA else self.backend


def resolve(config: RunConfig) -> RunConfig:
    """Returns the config with the device and the backends that its ``auto`` mean here.

    Backends depend on how many ranks share a GPU, so they stay open as long as the layout is.
    ConfigError: its tuning table cannot be read.
    """
    comm = config.comm
    if config.parallel.name != AUTO:
        others = comm.backends if comm.table == DEFAULT else backends_of(config)[1:]
        comm = dataclasses.replace(comm, backend=backend_of(config), backends=others)
    return dataclasses.replace(config, device=device_of(config), comm=comm)


def choice_of(config: RunConfig) -> RouteChoice:
    """Returns what chooses the routes of a run; ConfigError: its table cannot be read."""
    table, backend = table_of(config), backend_of(config)
    return RouteChoice(table, backend, device_of(config), frozenset(backends_of(config)))


def backends_of(config: RunConfig) -> list[str]:
    """Returns the backends that messages of a run may go through; the first carries the rest."""
    comm, first = config.comm, backend_of(config)
    for name in comm.backends:
        if name not in BACKENDS:
            raise ConfigError(f"comm.backends: unknown {name!r}; {offer(name, BACKENDS)}")
    allowed = comm.backends or table_of(config).backends
    unusable = {name for name in MEMORY if not _has_memory(config)}
    if mpi_lacks(config) is not None and first != MPI:
        unusable.add(MPI)
    # Streams have their own way between GPUs of one machine, and one order for all messages.
    unusable |= {*STREAMED, *(MEMORY if first in STREAMED else ())} - {first}
    return [*dict.fromkeys([first, *(name for name in allowed if name not in unusable)])]


def table_of(config: RunConfig) -> TuningTable:
    """Returns the table of a run, by size or coarse; ConfigError: it cannot be read."""
    path = table_path(config)
    try:
        stat = path.stat()
    except OSError:
        raise ConfigError(
            f"comm.table={config.comm.table}: there is no such file; `hires tune comm` writes one, "
            f"comm.table=default ships with hires"
        ) from None
    fine = _read(path, backend_of(config), stat.st_mtime_ns, stat.st_size)
    return coarse(fine) if config.comm.granularity == "coarse" else fine


def table_path(config: RunConfig) -> Path:
    """Returns where the table of a run lies."""
    comm, shipped = config.comm, Path(__file__).parent
    if comm.table == DEFAULT:
        return shipped / f"{'stream' if backend_of(config) in STREAMED else 'default'}_table.json"
    if comm.table != TUNED:
        return Path(comm.table)
    own = Path(TUNED_FOLDER, TUNED_FILE)
    return own if own.exists() else shipped / "mix_table.json"


def check_table(config: RunConfig) -> Iterator[Finding]:
    """Yields which backends of its table a run lacks, and how it was disturbed when measured."""
    comm = config.comm
    if comm.table == DEFAULT:
        return
    if comm.table == TUNED and table_path(config).parent == _SHIPPED:
        text = (
            "no table has been measured here, so that which ships with hires chooses the routes; "
            "`hires tune comm` measures this machine"
        )
        yield Finding("note", "comm.table", text)
    table, usable = table_of(config), backends_of(config)
    left_out = [name for name in table.backends if name not in usable]
    if left_out:
        text = (
            f"{' and '.join(left_out)} of the tuning table cannot carry messages here; these take "
            f"the next rule that holds them"
        )
        why = mpi_lacks(config) if MPI in left_out else None
        text += f"; for mpi: {why}" if why else ""
        yield Finding("note", "comm.table", text)
    if why := table.made.get(DISTURBED):
        text = f"the tuning table was measured on a busy machine: {why!s:.200}"
        yield Finding("note", "comm.table", text)


def facts_of_table(config: RunConfig) -> dict[str, Any]:
    """Returns the facts of the table that a plan holds."""
    table, comm = table_of(config), config.comm
    made = {key: table.made[key] for key in MADE if key in table.made}
    return {"name": comm.table, "granularity": comm.granularity, "digest": table.digest, **made}


def table_digest(config: RunConfig) -> str:
    """Returns the digest of a table, which is part of a run's name; empty: the default one."""
    if config.comm.table == DEFAULT:
        return ""
    return table_of(config).digest


@functools.lru_cache(maxsize=16)
def _read(path: Path, base: str, mtime_ns: int, size: int) -> TuningTable:
    del mtime_ns, size  # a changed file is read again
    return TuningTable.read(path, base)


def _has_memory(config: RunConfig) -> bool:
    is_supported = not config.is_here or memory_files.is_supported()
    return config.comm.shared_memory and config.num_nodes == 1 and is_supported


def _own_form(route: Route, operation: str, place: str) -> Route:
    # The algorithm of a backend where the table names none.
    if route.algorithm not in (OWN, MESSAGE):
        return route
    if operation == "send":
        return route._replace(algorithm=CHANNEL if route.backend in STREAMED else MESSAGE)
    return route._replace(algorithm=FLAT if place == BUCKETS else OWN)


def _fits(route: Route, operation: str) -> bool:
    return operation in CARRIES.get(route.algorithm, (operation,)) and is_possible(route)
