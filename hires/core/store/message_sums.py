"""Sums what the ranks of an attempt recorded of their messages (``hires.comm.message_log``).

    metrics.jsonl  {"kind": "comm", "rank": 0, "first": 2, "steps": 10, "step_s": 3.1,
                    "rows": [{"operation": "send", "kind": "halo", "backend": "shm",
                              "algorithm": "message", "size": 12, "count": 520, "bytes": 2662400,
                              "issue_s": 0.011, "wait_s": 0.0}, ...],
                    "planned": [{"operation": "send", "kind": "halo", "size": 12,
                                 "backend": "shm", "algorithm": "message",
                                 "count": 52, "bytes": 266240}, ...]}

Messages of class ``size`` have 2^size bytes or more and fewer than twice as many; of class -1 none.
Counts, bytes and seconds are of all ``steps``, ``planned`` is of one. ``step_s`` is the
time of the steps, with the barrier before each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hires.core.store.reading import Values

PLANNED_KEYS = ("operation", "kind", "size")
ROUTED_KEYS = (*PLANNED_KEYS, "backend", "algorithm")
"""Of planned rows."""
KEYS = ("operation", "kind", "backend", "algorithm", "size")
MAX_RANKS = 256
SUMS = ("count", "bytes", "issue_s", "wait_s")


def summed(lines: Iterable[Values]) -> Values | None:
    """Returns the sums of all ranks, and those of each in ``ranks``; None if none recorded any.

    Of more than ``MAX_RANKS`` the rows of each stay in the attempt's lines.
    """
    ranks = {line["rank"]: line for line in lines}
    if not ranks:
        return None
    own = [ranks[rank] for rank in sorted(ranks)]
    by_rank = []
    for one in own:
        [total] = added(one["rows"], ()) or [dict.fromkeys(SUMS, 0)]
        rows = {"rows": one["rows"]} if len(own) <= MAX_RANKS else {}
        by_rank.append({"rank": one["rank"], "step_s": one["step_s"], **total, **rows})
    planned = [row for one in own for row in one["planned"]]
    return {
        "first": min(one["first"] for one in own),
        "steps": min(one["steps"] for one in own),
        "step_s": sum(one["step_s"] for one in own),
        "rows": added((row for one in own for row in one["rows"]), KEYS),
        "planned": added(planned, ROUTED_KEYS, SUMS[:2]),
        "ranks": by_rank,
    }


def added(rows: Iterable[Values], keys: Sequence[str], sums: Sequence[str] = SUMS) -> list[Values]:
    """Returns one row for each combination of some keys, in their order, with the sums of its rows.

    Rows hold texts and numbers.
    """
    totals: dict[tuple[Any, ...], Values] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        empty = {**dict(zip(keys, key, strict=True)), **dict.fromkeys(sums, 0)}
        total = totals.setdefault(key, empty)
        for name in sums:
            total[name] += row[name]
    return [totals[key] for key in sorted(totals)]
