"""Builds the tables of a run's messages: by operation, size, backend, class of a study, rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hires.core.units import MIB
from hires.report.columns import Column, Row, Table, table_of, texts
from hires.report.read.message_rows import MessageSums, size_words

COUNT = Column("count", "calls", digits=0)
BYTES = Column("bytes", "bytes", "MiB", 1 / MIB, 3)
COSTS = (
    Column("issue_s", "calling", "ms", 1e3, 2),
    Column("wait_s", "waiting", "ms", 1e3, 2),
    Column("share", "share", "%", 100.0, 1),
)
PLANNED = (
    COUNT,
    Column("planned_count", "planned", digits=0),
    BYTES,
    Column("planned_bytes", "planned", "MiB", 1 / MIB, 3),
    *COSTS,
)
_SIZE = Column("least", "from")
MAX_RANKS = 64
CAPTION = (
    "Of one step: calls and bytes of all ranks, times of the mean rank. A send and its receive are "
    "two calls; of a collective, bytes are those that a rank contributes."
)


def message_tables(sums: MessageSums) -> list[Table]:
    """Returns the tables of a run's messages; those of single ranks only of few ranks."""
    kinds, sizes = texts(operation="operation", kind="kind"), texts(operation="operation")
    backends = texts(backend="backend", algorithm="algorithm")
    by_size = [{**row, "least": size_words(row["size"])} for row in sums.by("operation", "size")]
    tables = [
        _table("By operation and kind", (*kinds, *PLANNED), sums.by("operation", "kind")),
        _table("By operation and size", (*sizes, _SIZE, *PLANNED), by_size),
        _table("By backend", (*backends, COUNT, BYTES, *COSTS), sums.by("backend", "algorithm")),
        _table(
            "By the classes of the EDSR study",
            (*texts(**{"class": "size"}), *PLANNED),
            sums.by_study_class(),
        ),
    ]
    if len(sums.by_rank) <= MAX_RANKS:
        rank = Column("rank", "rank", digits=0)
        tables.append(_table("By rank", (rank, COUNT, BYTES, *COSTS), sums.by_rank))
    return tables


def message_values(sums: MessageSums) -> dict[str, Any]:
    """Returns the tables as plain values, all ranks among them."""
    return {
        "first_step": sums.first,
        "steps": sums.steps,
        "ranks": sums.ranks,
        "step_s": sums.step_s,
        "share": sums.share,
        "differs_from_plan": sums.differences(),
        "by_operation": sums.by("operation", "kind"),
        "by_size": sums.by("operation", "size"),
        "by_backend": sums.by("backend", "algorithm"),
        "by_study_class": sums.by_study_class(),
        "by_rank": sums.by_rank,
    }


def headline(sums: MessageSums) -> list[str]:
    """Returns what the tables are of, and whether the plan says the same, as lines."""
    last, plan = sums.first + sums.steps - 1, sums.differences()
    steps = f"steps {sums.first} to {last}" if sums.steps > 1 else f"step {last}"
    share, step_ms = sums.share, 1e3 * sums.step_s
    words = "" if share is None else f": {100 * share:.1f} % of {step_ms:.1f} ms"
    lines = [f"communication of {steps} on {sums.ranks} ranks{words}"]
    if not plan:
        return [*lines, "calls and bytes are those of the plan"]
    return [*lines, *(f"not as planned: {words}" for words in plan)]


def _table(title: str, columns: Sequence[Column], rows: list[Row]) -> Table:
    return table_of("comm", title, columns, rows)
