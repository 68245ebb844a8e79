"""Writes and reads the messages of ranks: their sums, and single ones with ``comm.log=full``.

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

    a0/messages/rank0000.messages   clock, dropped, and the fields of each call (LoggedCall)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hires.core.store import file_names
from hires.core.store.cache import sealed, unsealed
from hires.core.store.file_names import StrPath
from hires.core.store.files import make_folder, write_atomically
from hires.core.store.reading import Notes, Values, damaged, read_bytes, text

PLANNED_KEYS = ("operation", "kind", "size")
ROUTED_KEYS = (*PLANNED_KEYS, "backend", "algorithm")
"""Of planned rows."""
KEYS = ("operation", "kind", "backend", "algorithm", "size")
MAX_RANKS = 256
SUMS = ("count", "bytes", "issue_s", "wait_s")
PLANNED_SUMS = ("count", "bytes", "plain_bytes")
CODE_SUMS = ("count", "code_s", "changed", "numbers")
"""Of codecs: calls, seconds, and squares of what their first messages changed and had."""


def summed(lines: Iterable[Values]) -> Values | None:
    """Returns the sums of all ranks, and those of each in ``ranks``; None if none recorded any.

    Of more than ``MAX_RANKS`` the rows of each stay in the attempt's lines.
    """
    ranks = {line["rank"]: line for line in lines}
    if not ranks:
        return None
    summaries = [ranks[rank] for rank in sorted(ranks)]
    by_rank = []
    for each in summaries:
        [total] = added(each["rows"], ()) or [dict.fromkeys(SUMS, 0)]
        rows = {"rows": each["rows"]} if len(summaries) <= MAX_RANKS else {}
        by_rank.append({"rank": each["rank"], "step_s": each["step_s"], **total, **rows})
    planned = [row for each in summaries for row in each["planned"]]
    return {
        "first": min(each["first"] for each in summaries),
        "steps": min(each["steps"] for each in summaries),
        "step_s": sum(each["step_s"] for each in summaries),
        "rows": added((row for each in summaries for row in each["rows"]), KEYS),
        "codes": added((row for each in summaries for row in each["codes"]), ["codec"], CODE_SUMS),
        "planned": added(planned, ROUTED_KEYS, PLANNED_SUMS),
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


@dataclass
class LoggedCall:
    """One call of a rank."""

    rank: int
    operation: str
    kind: str
    action: str
    ranks: list[int]
    """The other rank; of a collective all its members."""
    num_bytes: int
    backend: str
    algorithm: str
    issued_s: float
    """On the clock of the machine, as the three times that follow."""
    posted_s: float
    started_s: float
    ended_s: float


@dataclass
class RankMessages:
    """The last messages of a rank, in the order in which they ended."""

    rank: int
    clock: str
    dropped: int
    """Earlier ones that were too many to keep."""
    messages: list[LoggedCall]


def write(
    attempt: StrPath, rank: int, clock: str, dropped: int, calls: Sequence[Sequence[Any]]
) -> None:
    """Writes the calls of a rank, each as the fields of a ``LoggedCall`` but the rank.

    RunError: it cannot.
    """
    path = file_names.rank_messages(attempt, rank)
    make_folder(path.parent)
    values = {"clock": clock, "dropped": dropped, "calls": calls}
    write_atomically(path, sealed(values, f"messages of rank {rank}"))


def read(attempt: StrPath, notes: Notes = None) -> Iterator[RankMessages]:
    """Yields what the ranks of an attempt have kept, in order; damaged files are left out.

    If one cannot be used: a note, or a RunError without ``notes``.
    """
    for rank, path in file_names.message_files(attempt).items():
        data = read_bytes(path, notes)
        if data is None:
            continue
        try:
            values = unsealed(data, f"messages of rank {rank}")
            calls = [_call(rank, *fields) for fields in values["calls"]]
            if not 0 <= values["dropped"] < 2**53:
                raise ValueError("it has dropped no number of calls")
            yield RankMessages(rank, _word(values["clock"]), int(values["dropped"]), calls)
        except (ValueError, TypeError, LookupError, OverflowError):
            damaged(path, "it holds no messages", notes)


def _call(
    rank: int, operation: Any, kind: Any, action: Any, ranks: Any, num_bytes: Any, *rest: Any
) -> LoggedCall:
    backend, algorithm, *times = rest
    if num_bytes < 0 or not all(-1e12 < one < 1e12 for one in times):
        raise ValueError(f"{num_bytes} bytes at {times}")
    words = _word(operation), _word(kind), _word(action)
    way = _word(backend), _word(algorithm)
    return LoggedCall(rank, *words, [*map(int, ranks)], int(num_bytes), *way, *map(float, times))


def _word(value: Any) -> str:
    word = text(value, 80)
    if word is None:
        raise ValueError(f"{value!r:.40} is no name")
    return word
