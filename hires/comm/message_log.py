"""Keeps what every message of a step cost: its operation, bytes and route, and when it ran.

    issued       the rank calls the operation
    posted       the call returns; the message may still be under way
    started      the rank begins to wait for it
    ended        the wait is over

    rank 0   send |issued..posted|   computes   |started..ended|

A rank spends ``posted - issued`` and ``ended - started``; in between it computes. An operation that
blocks is posted and started when it is issued. Times are those of the host: a backend with streams
ends a wait when the device's stream waits, and not when the message has come.

An entry names the event of the plan that the rank was at, and with it the kind of message, the peer
or group and the pass. The messages of a step are added up by operation, kind, route and size; the
last entries are kept, too, for the time line and for ``comm.log=full``.
"""

from __future__ import annotations

import collections
import functools
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter as clock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hires.core.store import message_files
from hires.core.store.files import append_metric
from hires.core.store.provenance import clock_name
from hires.plan.event import BARRIER, POSTS, Event
from hires.plan.routes import exact_size
from hires.plan.traffic import CALLED, planned_rows

(
    SEND, RECV, ALL_GATHER, ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_TO_ALL, GATHER,
    SCATTER, BARRIER_CALL,
) = range(len(CALLED))  # fmt: skip

_ways: list[tuple[str, str]] = []
_lock = threading.Lock()


@functools.cache
def way(backend: str, algorithm: str, segment_bytes: int = 0, is_staged: bool = False) -> int:
    """Returns the number of a route: a backend, and an algorithm (``hires.plan.routes``).

    ``is_staged``: through buffers of the host.
    """
    segment = f" {exact_size(segment_bytes)}" if segment_bytes else ""
    entry = backend, f"{algorithm}{segment}{' staged' * is_staged}"
    with _lock:
        if entry not in _ways:
            _ways.append(entry)
        return _ways.index(entry)


SUMMARY_ENTRIES, FULL_ENTRIES = 2**14, 2**17
"""Entries that are kept, or those of four steps if these are more."""
DTYPE = np.dtype(
    [
        ("operation", "u1"), ("pad", "u1"), ("way", "<u2"), ("event", "<i4"), ("bytes", "<i8"),
        ("issued", "<f8"), ("posted", "<f8"), ("started", "<f8"), ("ended", "<f8"),
    ]
)  # fmt: skip
ROW = (
    "operation", "kind", "backend", "algorithm", "size", "count", "bytes", "issue_s", "wait_s",
)  # fmt: skip

CODES = "codec", "count", "code_s", "changed", "numbers"

_pack = struct.Struct("<BxHiqdddd").pack
_Key = tuple[int, str, int, int]
_Sums = dict[_Key, list[Any]]
"""Operation, kind, route and size class -> how often, bytes, and s of issuing and waiting."""
Groups = Sequence[Sequence[int]]
"""The ranks of every group of a plan."""
Issue = tuple[int, int, int, int, float, float]
"""An entry up to the end of its call: operation, way, event, bytes, issued, posted."""


class Place(Protocol):
    """Where a rank is in the events of its step."""

    at: int
    """Number of the event that comes next."""


class MessageLog:
    """The messages of one rank in its steps.

    ``events`` are those of its program. ``keeps_all`` keeps more entries.
    """

    def __init__(self, place: Place, events: Sequence[Event], keeps_all: bool = False) -> None:
        self._events = events
        self._place, num_messages = place, sum(bool(event.traffic) for event in events)
        least = FULL_ENTRIES if keeps_all else SUMMARY_ENTRIES
        self._keeps_all = keeps_all
        self._entries = collections.deque[bytes](maxlen=max(least, 4 * num_messages))
        self._total = 0  # entries so far, those that are not kept any more included
        self._kinds = [event.traffic for event in events]
        self._counts = False  # whether a step that counts has begun
        self._first, self._num_steps, self._step_s = 0, 0, 0.0
        self._sorted = -1, np.empty(0, DTYPE)  # entries of so many
        self._step: _Sums = {}
        self._sums: _Sums = {}
        # By codec: calls and seconds of this step and of all that count; of its first message the
        # squares of what it changed and of the numbers.
        self._step_codes: dict[str, list[float]] = {}
        self._codes: dict[str, list[float]] = {}
        self._errors: dict[str, tuple[float, float]] = {}

    def issue(self, operation: int, way: int, num_bytes: int, issued: float) -> Issue:
        """Returns the beginning of an entry, when the call has returned."""
        return (operation, way, self._place.at - 1, num_bytes, issued, clock())

    def note_blocking(self, operation: int, way: int, num_bytes: int, issued: float) -> None:
        """Keeps an operation that ends now, and whose call has not returned before."""
        event = self._place.at - 1
        self.note((operation, way, event, num_bytes, issued, issued), issued)

    def note(self, issue: Issue, started: float) -> None:
        """Keeps an operation that ends now."""
        ended = clock()
        self._entries.append(_pack(*issue, started, ended))
        self._total += 1
        operation, way, event, num_bytes, issued, posted = issue
        if event >= 0:  # others lie outside the plan's events, as at a checkpoint
            key = operation, self._kinds[event], way, num_bytes.bit_length() - 1
            _add(self._step, key, 1, num_bytes, posted - issued, ended - started)

    def note_codes(self, codec: str, seconds: float) -> bool:
        """Keeps that a codec has encoded or decoded; returns whether its error is wanted."""
        sums = self._step_codes.setdefault(codec, [0, 0.0])
        sums[0] += 1
        sums[1] += seconds
        return codec not in self._errors

    def note_error(self, codec: str, changed: float, numbers: float) -> None:
        """Keeps the sums of squares of what a codec has changed, and of the numbers."""
        self._errors[codec] = changed, numbers

    def end_step(self, step: int, step_s: float, counts: bool) -> None:
        """Adds a step that all its messages have left.

        Until the first step that ``counts``, warm-up is kept; then only those that count are.
        """
        if counts and not self._counts:
            self._counts = True
            self._num_steps, self._step_s = 0, 0.0
            self._sums.clear()
            self._codes.clear()
        if counts or not self._counts:
            self._first = step if self._num_steps == 0 else self._first
            self._num_steps, self._step_s = self._num_steps + 1, self._step_s + step_s
            for key, sums in self._step.items():
                _add(self._sums, key, *sums)
            for codec, (count, code_s) in self._step_codes.items():
                before = self._codes.get(codec, [0, 0.0])
                self._codes[codec] = [before[0] + count, before[1] + code_s]
        self._step.clear()
        self._step_codes.clear()

    def summary(self) -> dict[str, Any]:
        """Returns the whole steps as plain values: what was measured, and the plan's step.

        Rows are by operation, kind, backend, algorithm and size class: 2^size bytes and more.
        """
        rows: list[dict[str, Any]] = []
        for (operation, kind, way, size), sums in sorted(self._sums.items()):
            count, num_bytes, issue_s, wait_s = sums
            names = CALLED[operation], kind, *_ways[way], size
            values = count, num_bytes, round(issue_s, 9), round(wait_s, 9)
            rows.append(dict(zip(ROW, (*names, *values), strict=True)))
        # The barrier lies before the step that is timed.
        step_s = self._step_s + sum(row["wait_s"] for row in rows if row["kind"] == BARRIER)
        steps = {"first": self._first, "steps": self._num_steps, "step_s": round(step_s, 9)}
        codes = [
            dict(zip(CODES, (codec, *sums, *self._errors.get(codec, (0.0, 0.0))), strict=True))
            for codec, sums in sorted(self._codes.items())
        ]
        return {**steps, "rows": rows, "codes": codes, "planned": planned_rows(self._events)}

    def entries(self) -> NDArray[Any]:
        """Returns the entries that are kept, fields of :data:`DTYPE`, by the end of each."""
        entries = np.frombuffer(b"".join(self._entries), DTYPE)
        return entries[np.argsort(entries["ended"], kind="stable")]

    def write(self, folder: Path, rank: int, groups: Groups) -> None:
        """Appends the summary to the lines of an attempt, and writes the entries if it keeps all.

        ``groups`` are those of the plan. RunError: it cannot.
        """
        append_metric(folder, rank, "comm", **self.summary())
        if not self._keeps_all:
            return
        calls: list[list[Any]] = []
        for operation, _, way, event, num_bytes, *times in self.entries().tolist():
            # Outside the plan's events, as at a checkpoint, it has no kind, action and ranks.
            named = self._named(self._events[event], groups) if event >= 0 else ("", "", [])
            calls.append([CALLED[operation], *named, num_bytes, *_ways[way], *times])
        dropped = self._total - len(calls)
        message_files.write(folder, rank, clock_name(), dropped, calls)

    def calls_between(self, begin_s: float, end_s: float) -> tuple[int, int, str] | None:
        """Returns calls that ended in a time, their bytes and routes; None if none is kept."""
        if self._sorted[0] != self._total:
            self._sorted = self._total, self.entries()
        entries = self._sorted[1]
        # Those that are not kept ended before the first that is.
        first, end = np.searchsorted(entries["ended"], [begin_s, end_s])
        rows = entries[first:end]
        if not len(rows) or (first == 0 and self._total > len(entries)):
            return None
        ways = [" ".join(_ways[way]) for way in np.unique(rows["way"]).tolist()]
        return len(rows), int(rows["bytes"].sum()), ", ".join(ways)

    def _named(self, event: Event, groups: Groups) -> tuple[str, str, list[int]]:
        is_pair = event.kind in POSTS
        ranks = [event.peer] if is_pair else [*groups[event.peer]] if event.peer >= 0 else []
        return event.traffic, event.part.action, ranks


def _add(sums: _Sums, key: _Key, count: int, size: int, issue_s: float, wait_s: float) -> None:
    held = sums.get(key)
    if held is None:
        sums[key] = [count, size, issue_s, wait_s]
    else:
        held[0] += count
        held[1] += size
        held[2] += issue_s
        held[3] += wait_s
