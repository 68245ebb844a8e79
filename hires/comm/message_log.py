"""Keeps what every message of a step cost: its operation, bytes and way, and when it ran.

    issued       the rank calls the operation
    posted       the call returns; the message may still be under way
    started      the rank begins to wait for it
    ended        the wait is over

    rank 0   send |issued..posted|   computes   |started..ended|

A rank spends ``posted - issued`` and ``ended - started``; in between it computes. An operation that
blocks is posted and started when it is issued. Times are those of the host: a backend with streams
ends a wait when the device's stream waits, and not when the message has come.

Entries are numbers of fixed size in a ring, so that one costs less than a microsecond; the oldest
are overwritten. An entry names the event of the plan that the rank was at, and with it the kind of
message, the peer or group and the pass. At the end, or when the ring is full, those of whole steps
are added up by operation, kind, way and size.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter as clock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hires.core.store import message_entries
from hires.core.store.files import append_line
from hires.core.store.message_entries import ENTRY
from hires.core.store.provenance import clock_name
from hires.plan.event import POSTS, Event
from hires.plan.routes import exact_size
from hires.plan.traffic import BARRIER, CALLED, Operation, planned_rows

(
    SEND, RECV, ALL_GATHER, ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_TO_ALL, GATHER,
    SCATTER, BARRIER_CALL,
) = range(len(CALLED))  # fmt: skip

_ways: list[tuple[str, str]] = []


@functools.cache
def way(backend: str, algorithm: str, segment_bytes: int = 0, is_staged: bool = False) -> int:
    """Returns the number of a way: a backend, and an algorithm (``hires.plan.routes``).

    ``is_staged``: through buffers of the host.
    """
    segment = f" {exact_size(segment_bytes)}" if segment_bytes else ""
    _ways.append((backend, f"{algorithm}{segment}{' staged' * is_staged}"))
    return len(_ways) - 1


SUMMARY_ENTRIES, FULL_ENTRIES = 2**14, 2**17
"""Entries that a ring holds, or those of four steps if these are more."""

_SIZE, _pack = ENTRY.size, ENTRY.pack_into
_DTYPE = np.dtype(
    [
        ("operation", "u1"), ("pad", "u1"), ("way", "<u2"), ("event", "<i4"), ("bytes", "<i8"),
        ("issued", "<f8"), ("posted", "<f8"), ("started", "<f8"), ("ended", "<f8"),
    ]
)  # fmt: skip


ROW = (
    "operation", "kind", "backend", "algorithm", "size", "count", "bytes", "issue_s", "wait_s",
)  # fmt: skip
_RADIX = (256, 1024, 65536, 64)
"""More than there are operations, kinds, ways and sizes."""

Groups = Sequence[Sequence[int]]
"""The ranks of every group of a plan."""
Issue = tuple[int, int, int, int, float, float]
"""An entry up to the end of its call: operation, way, event, bytes, issued, posted."""


class Place(Protocol):
    """Where a rank is in the events of its step."""

    at: int
    """Number of the event that comes next."""


@dataclass
class _Sum:
    count: int = 0
    num_bytes: int = 0
    issue_s: float = 0.0
    wait_s: float = 0.0


class MessageLog:
    """The messages of one rank in its steps.

    ``operations`` are those of the plan by the number of their event (``traffic.operations``).
    ``keeps_all`` makes the ring larger.
    """

    def __init__(
        self,
        place: Place,
        operations: Sequence[Operation | None],
        keeps_all: bool = False,
    ) -> None:
        self.operations = operations
        self._place, num_messages = place, sum(one is not None for one in operations)
        least = FULL_ENTRIES if keeps_all else SUMMARY_ENTRIES
        self.capacity = max(least, 4 * num_messages)
        self._keeps_all = keeps_all
        self._sorted: tuple[int, NDArray[Any], NDArray[Any]] | None = None  # of so many entries
        self._ring = bytearray(self.capacity * ENTRY.size)
        self._late: collections.deque[tuple[Any, ...]] = collections.deque()
        self.total = 0
        """Entries so far, those that were overwritten included."""
        self._folded = self._whole = 0  # entries that are added up, and those of whole steps
        kinds = [one.kind if one else "" for one in operations]
        self._kind_names = sorted({*kinds})
        self._kinds = np.array([self._kind_names.index(kind) for kind in kinds], np.int64)
        self._counts = False  # whether a step that counts has begun
        self.first, self.num_steps, self.step_s = 0, 0, 0.0
        # By operation, kind, way and size.
        self._sums: dict[tuple[int, ...], _Sum] = {}

    def issue(self, operation: int, way: int, num_bytes: int, issued: float) -> Issue:
        """Returns the beginning of an entry, when the call has returned."""
        return (operation, way, self._place.at - 1, num_bytes, issued, clock())

    def note_blocking(self, operation: int, way: int, num_bytes: int, issued: float) -> None:
        """Keeps an operation that ends now, and whose call has not returned before."""
        event = self._place.at - 1
        self.note((operation, way, event, num_bytes, issued, issued), issued)

    def note(self, issue: Issue, started: float, ended: float | None = None) -> None:
        """Keeps an operation that ends now, or has ended."""
        total = self.total
        if total - self._folded >= self.capacity:
            self._make_room()
        place = total % self.capacity * _SIZE
        _pack(self._ring, place, *issue, started, clock() if ended is None else ended)
        self.total = total + 1

    def note_later(self, issue: Issue, started: float) -> None:
        """Keeps an operation that ended in another thread, at the next step's end."""
        self._late.append((*issue, started, clock()))

    def end_step(self, step: int, step_s: float, counts: bool) -> None:
        """Adds a step that all its messages have left.

        Until the first step that ``counts``, warm-up is kept; then only those that count are.
        """
        while self._late:
            late = self._late.popleft()
            self.note(late[:6], late[6], late[7])
        if counts and not self._counts:
            self._counts = True
            self._folded, self.num_steps, self.step_s = self._whole, 0, 0.0
            self._sums.clear()
        if counts or not self._counts:
            self.first = step if self.num_steps == 0 else self.first
            self.num_steps, self.step_s = self.num_steps + 1, self.step_s + step_s
        else:
            self._fold()
            self._folded = self.total
        self._whole = self.total

    def summary(self) -> dict[str, Any]:
        """Returns the whole steps as plain values: what was measured, and the plan's step.

        Rows are by operation, kind, backend, algorithm and size class: 2^size bytes and more.
        """
        self._fold()
        rows: list[dict[str, Any]] = []
        for key, held in sorted(self._sums.items()):
            operation, kind, way, size = key
            names = CALLED[operation], self._kind_names[kind], *_ways[way]
            sums = held.count, held.num_bytes, round(held.issue_s, 9), round(held.wait_s, 9)
            rows.append(dict(zip(ROW, (*names, size, *sums), strict=True)))
        # The barrier lies before the step that is timed.
        step_s = self.step_s + sum(row["wait_s"] for row in rows if row["kind"] == BARRIER)
        steps = {"first": self.first, "steps": self.num_steps, "step_s": round(step_s, 9)}
        return {**steps, "rows": rows, "planned": planned_rows(self.operations)}

    def entries(self) -> NDArray[Any]:
        """Returns what the ring holds, the oldest first: fields of :data:`_DTYPE`."""
        return self._between(max(0, self.total - self.capacity), self.total)

    def write(self, metrics: Path, rank: int, events: Sequence[Event], groups: Groups) -> None:
        """Appends the summary to the lines of an attempt, and writes the entries if it keeps all.

        ``events`` and ``groups`` are those of the plan. RunError: it cannot.
        """
        append_line(metrics, {"kind": "comm", "rank": rank, **self.summary()})
        if not self._keeps_all:
            return
        entries = self._by_end()[1]
        numbers = sorted({*entries["event"].tolist()} - {-1})
        header = {
            "clock": clock_name(),
            "dropped": self.total - len(entries),
            "operations": CALLED,
            "ways": {way: _ways[way] for way in sorted({*entries["way"].tolist()})},
            "events": {at: self._named(events[at], at, groups) for at in numbers},
        }
        message_entries.write(metrics.parent, rank, header, entries.tobytes())

    def calls_between(self, begin_s: float, end_s: float) -> tuple[int, int, str] | None:
        """Returns calls that ended in a time, their bytes and ways; None if none is kept."""
        ended, entries = self._by_end()
        # Those that were overwritten ended before the first that is kept.
        first, end = np.searchsorted(ended, [begin_s, end_s])
        rows = entries[first:end]
        if not len(rows) or (first == 0 and self.total > self.capacity):
            return None
        ways = [" ".join(_ways[way]) for way in np.unique(rows["way"]).tolist()]
        return len(rows), int(rows["bytes"].sum()), ", ".join(ways)

    def _named(self, event: Event, at: int, groups: Groups) -> tuple[str, str, list[int]]:
        one = self.operations[at]
        assert one is not None
        is_pair = event.kind in POSTS
        ranks = [event.peer] if is_pair else [*groups[event.peer]] if event.peer >= 0 else []
        return one.kind, event.part.action, ranks

    def _by_end(self) -> tuple[NDArray[Any], NDArray[Any]]:
        # When entries ended, and the entries, in this order.
        if self._sorted is None or self._sorted[0] != self.total:
            entries = self.entries()
            entries = entries[np.argsort(entries["ended"], kind="stable")]
            self._sorted = self.total, entries["ended"].copy(), entries
        return self._sorted[1:]

    def _between(self, first: int, end: int) -> NDArray[Any]:
        ring = np.frombuffer(self._ring, _DTYPE)
        return ring[np.arange(first, end) % self.capacity]

    def _make_room(self) -> None:
        # A ring holds four steps, so some are whole; without end_step() the oldest entry goes.
        self._fold()
        self._folded = max(self._folded, self.total - self.capacity + 1)
        self._whole = max(self._whole, self._folded)

    def _fold(self) -> None:
        # Adds up the entries of whole steps that are not yet.
        rows = self._between(self._folded, self._whole)
        rows = rows[rows["event"] >= 0]  # others lie outside the plan's events, as at a checkpoint
        self._folded = self._whole
        if not len(rows):
            return
        # One number for a key, since rows of several are sorted twenty times slower.
        columns = (
            rows["operation"],
            self._kinds[rows["event"]],
            rows["way"],
            np.frexp(rows["bytes"].astype(np.float64))[1],  # log2, rounded down, + 1
        )
        codes = np.ravel_multi_index([column.astype(np.int64) for column in columns], _RADIX)
        codes, places = np.unique(codes, return_inverse=True)
        found = np.stack(np.unravel_index(codes, _RADIX), axis=1) - (0, 0, 0, 1)
        counts, num_bytes = np.bincount(places), np.zeros(len(found), np.int64)
        np.add.at(num_bytes, places, rows["bytes"])
        issue_s = np.bincount(places, rows["posted"] - rows["issued"])
        wait_s = np.bincount(places, rows["ended"] - rows["started"])
        sums = found.tolist(), counts.tolist(), num_bytes.tolist(), issue_s, wait_s
        for key, count, size, issuing_s, waiting_s in zip(*sums, strict=True):
            held = self._sums.setdefault(tuple(key), _Sum())
            held.count, held.num_bytes = held.count + count, held.num_bytes + size
            held.issue_s += float(issuing_s)
            held.wait_s += float(waiting_s)
