"""Reads the tuning table of a run, and leaves out what its ranks cannot follow.

``comm.table`` names the table: ``default`` ships with hires, ``tuned`` is what ``hires tune comm``
has written for this machine (before that, one that ships), anything else is a file. With
``comm.granularity=coarse`` one backend carries all sizes of an operation
(:func:`hires.plan.tuning_table.coarse`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hires.core.config.parallel_config import AUTO
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.ranks import meeting
from hires.core.registry import offer
from hires.plan.hardware import MPI, backend_of, device_of, mpi_lacks
from hires.plan.plan import Finding
from hires.plan.routes import BACKENDS, MEMORY, ONE_MACHINE, STREAMED
from hires.plan.tuning_table import DEFAULT, FORCED, MADE, TuningRule, TuningTable, coarse

TUNED = "tuned"
TUNED_FOLDER, TUNED_FILE = "comm-tuning", "table.json"
"""What ``hires tune comm`` writes, and ``comm.table=tuned`` reads."""
_SHIPPED = Path(__file__).parent
"""Where the tables lie that ship with hires."""


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


def usable_rules(config: RunConfig) -> list[TuningRule]:
    """Returns the rules of its table that a run can follow; ConfigError: it cannot be read."""
    table, usable = table_of(config), backends_of(config)
    rules = [*table.rules, TuningRule(table.default)]
    return [rule for rule in rules if rule.way.backend in usable]


def backends_of(config: RunConfig) -> list[str]:
    """Returns the backends that messages of a run may go through; the first carries the rest."""
    comm, first = config.comm, backend_of(config)
    for name in comm.backends:
        if name not in BACKENDS:
            raise ConfigError(f"comm.backends: unknown {name!r}; {offer(name, BACKENDS)}")
    allowed = comm.backends or table_of(config).backends
    unusable = {*(ONE_MACHINE if config.num_nodes > 1 else ())}
    has_memory = not config.is_here or meeting.keeps_write_order()
    unusable |= {*(MEMORY if not (comm.shared_memory and has_memory) else ())}
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
    comm = config.comm
    if comm.table == DEFAULT:
        return _SHIPPED / f"{'stream' if backend_of(config) in STREAMED else 'default'}_table.json"
    if comm.table != TUNED:
        return Path(comm.table)
    own = Path(TUNED_FOLDER, TUNED_FILE)
    return own if own.exists() else _SHIPPED / "mix_table.json"


def check_table(config: RunConfig) -> Iterator[Finding]:
    """Yields which backends of its table a run lacks, and whether it was measured all the same."""
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
    if table.made.get(FORCED):
        text = f"the tuning table was measured on a busy machine: noise {table.made.get('noise')}"
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
