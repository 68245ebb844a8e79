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

    a0/messages/rank0000.messages   one line of JSON, then entries of 48 bytes

The line names what the numbers of an entry stand for, so that a file needs no plan beside it:

    {"format": 3, "rank": 0, "crc32": 7, "clock": "...", "dropped": 0, "operations": ["send", ...],
     "ways": {"64": ["shm", "message"]}, "events": {"7": ["halo", "F0", [1]]}}

An entry is little-endian: operation (one byte), a byte without meaning, way (2), event (4), bytes
(8), then four times of 8 bytes in s on the machine's clock: issued, posted, started, ended.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hires.core.store import file_names
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

ENTRY = struct.Struct("<BxHiqdddd")
FORMAT = 3
_DAMAGED = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError,
    struct.error,
)  # fmt: skip
OUTSIDE = ("", "", ())
"""Kind, action and ranks of a message outside the plan's events, as at a checkpoint."""


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


def write(attempt: StrPath, rank: int, header: Values, entries: bytes) -> None:
    """Writes the entries of a rank; RunError: it cannot."""
    path = file_names.rank_messages(attempt, rank)
    make_folder(path.parent)
    facts = {"format": FORMAT, "rank": rank, "crc32": zlib.crc32(entries)}
    line = json.dumps({**facts, **header}).encode()
    write_atomically(path, line + b"\n" + entries)


def read(attempt: StrPath, notes: Notes = None) -> Iterator[RankMessages]:
    """Yields what the ranks of an attempt have kept, in order; damaged files are left out.

    If one cannot be used: a note, or a RunError without ``notes``.
    """
    for rank, path in file_names.message_files(attempt).items():
        data = read_bytes(path, notes)
        if data is None:
            continue
        try:
            yield _parsed(rank, data)
        except _DAMAGED:
            damaged(path, "it holds no messages", notes)


def _parsed(rank: int, data: bytes) -> RankMessages:
    line, _, entries = data.partition(b"\n")
    header = json.loads(line)
    if header["format"] != FORMAT or header["rank"] != rank or not 0 <= header["dropped"] < 2**53:
        raise ValueError(f"format {header['format']}, rank {header['rank']}")
    if header["crc32"] != zlib.crc32(entries):
        raise ValueError("its entries are not what was written")
    operations = [_word(word) for word in header["operations"]]
    ways = {int(key): tuple(map(_word, names)) for key, names in header["ways"].items()}
    events = {int(key): _event(event) for key, event in header["events"].items()}
    messages = []
    for operation, way, event, num_bytes, *times in ENTRY.iter_unpack(entries):
        kind, action, ranks = events[event] if event >= 0 else OUTSIDE
        backend, algorithm = ways[way]
        if num_bytes < 0 or not all(-1e12 < one < 1e12 for one in times):
            raise ValueError(f"{num_bytes} bytes at {times}")
        names = operations[operation], kind, action, [*ranks], num_bytes, backend, algorithm
        messages.append(LoggedCall(rank, *names, *times))
    return RankMessages(rank, _word(header["clock"]), int(header["dropped"]), messages)


def _event(values: Any) -> tuple[str, str, tuple[int, ...]]:
    kind, action, ranks = values
    return _word(kind), _word(action), tuple(map(int, ranks))


def _word(value: Any) -> str:
    word = text(value, 80)
    if word is None:
        raise ValueError(f"{value!r:.40} is no name")
    return word
