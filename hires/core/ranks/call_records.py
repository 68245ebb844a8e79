"""Keeps the last calls of a rank, and explains from those of several why they wait.

Ranks that share a communicator must call the same operations in the same order. Each one numbers
its calls there and mixes what all must agree on into a rolling hash:

    channel "gloo, group 2"     call 1       call 2       call 3
    rank 0                      all_reduce   all_reduce   broadcast        hash 8f31
    rank 1                      all_reduce   broadcast                     hash 02c4: they differ

A message has one channel for each source, target, tag and backend; its two sides agree on the size
and the type.

Why ranks wait for each other is explained in this order, since each explains those behind it:

    1  two ranks that made different calls at one place of a communicator
    2  ranks that wait for each other in a circle, as in opposite orders on two backends
    3  a rank that others wait for: it has left, gives no answer, or does something else
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from hires.core.config.fields import build
from hires.core.errors import ConfigError
from hires.core.message_backends import BACKEND_FACTS
from hires.core.units import MIB, seconds

KEPT_CALLS = 256
"""Calls that a rank keeps; a power of two."""
SHOWN_CALLS = 96
"""Calls that a record holds."""
MOST_CHANNELS = 32_768
"""Channels of messages that a rank counts in; its messages with further tags are not kept."""
MOST_FRAMES = 40
"""Frames that are searched for the caller."""
MOST_WAITS = 4
"""Ranks whose waits are listed."""
CIRCLE = "each waits for another: they make these calls in different orders"
SILENCE = "it has ended, is stopped, or cannot be reached"
_PRIME, _MASK = 1_000_003, 2**61 - 1


class CallFacts:
    """What calls of one kind have in common. ``num_bytes``: 0 where ranks may differ in it.

    ``may_abort``: until the first call was compared, that of a backend which compares nothing, and
    of one made of messages, whose type none compares: another size or type may end the process of a
    rank, or be wrong numbers without an error.
    """

    def __init__(self, operation: str, num_bytes: int, dtype: str, route: str) -> None:
        self.operation, self.num_bytes, self.dtype, self.route = operation, num_bytes, dtype, route
        # Of what all agree on; Python's own hash differs between processes.
        is_message = operation in ("send", "recv")
        is_apart = is_message or operation in ("all_to_all", "gather", "scatter")
        backend = BACKEND_FACTS.get(route.partition(":")[0])
        self.may_abort = backend is not None and (is_apart or not backend.compares_calls)
        kind = "" if is_message else f"{operation} {route}"
        self.code = zlib.crc32(f"{kind} {num_bytes} {dtype}".encode())
        self._last: Any = None
        self._last_code = self.code

    def code_of(self, agreed: Any) -> int:
        """Returns what stands for the call and its reduction or root in the hash."""
        if agreed is not self._last:
            self._last_code = self.code ^ zlib.crc32(agreed_text(agreed).encode()) << 20
            self._last = agreed
        return self._last_code

    def text(self, agreed: Any) -> str:
        """Returns the call in words; ``agreed`` is its reduction or root, if it has one."""
        words = self.operation
        if self.num_bytes > 0:
            words += f" of {_exactly(self.num_bytes)} {self.dtype}"
        if agreed is not None:
            words += f" ({agreed_text(agreed)})"
        return f"{words} over {self.route}"


def _exactly(num_bytes: int) -> str:
    # Sizes that differ by a number must not look alike.
    if num_bytes % MIB == 0:
        return f"{num_bytes // MIB} MiB"
    return f"{num_bytes} B" if num_bytes % 1024 else f"{num_bytes // 1024} KiB"


def agreed_text(agreed: Any) -> str:
    """Returns a reduction or root in words."""
    if isinstance(agreed, tuple):
        return ", ".join(map(agreed_text, agreed))
    if isinstance(agreed, int):
        return f"root {agreed}"
    return str(agreed).rpartition(".")[2].lower()


class CallChannel:
    """A communicator, or one way between two ranks, as one rank counts its calls.

    ``broken``: why a call of it failed, so that the ranks may no longer be at the same call.
    """

    __slots__ = ("broken", "count", "hash", "members", "name")

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.name, self.members = name, tuple(members)
        self.count = self.hash = 0
        self.broken = ""


class KeptCall(NamedTuple):
    """A call as it is written down."""

    channel: str
    number: int
    """Of the calls of this rank in the channel, from 1."""
    text: str
    hash: int
    """Of all its calls up to this one."""
    site: str
    """File and line that called it."""
    agreed: str
    """What all ranks of the channel must agree on."""


@dataclass
class RankCalls:
    """The last calls of a rank, as plain values."""

    rank: int
    calls: list[list[Any]] = field(default_factory=list)
    """The fields of each ``KeptCall``, the latest at the end."""
    channels: dict[str, list[Any]] = field(default_factory=dict)
    """Name -> calls of this rank, and the ranks of the channel."""
    waits_in: int = -1
    """Position in ``calls`` of what the rank waits in; -1: it waits in none."""
    since_s: float = 0.0
    """How long it has waited, or done something else."""
    has_left: bool = False
    """Whether it has left the world."""
    messages: dict[str, int] | None = None
    """Of one that has left well: how many it sent and received, by "messages 0 to 1"."""

    @property
    def kept(self) -> list[KeptCall]:
        """The calls."""
        return [KeptCall(*call) for call in self.calls]

    @property
    def waiting(self) -> KeptCall | None:
        """What the rank waits in."""
        if 0 <= self.waits_in < len(self.calls):
            return KeptCall(*self.calls[self.waits_in])
        return None


def read_calls(rank: int, values: Any) -> RankCalls | None:
    """Returns the record of a rank from the plain values of a file; None: they are none."""
    try:
        record = build(RankCalls, {**values, "rank": rank})
        channels = {name for name, (_count, _members) in record.channels.items()}
        return record if {call.channel for call in record.kept} <= channels else None
    except (ConfigError, TypeError, ValueError):
        return None


_rings = itertools.count()
_Raw = tuple[CallChannel, int, CallFacts, Any, CodeType, int, int]


class CallRing:
    """The last calls of this process. The main thread writes; others may read at any time.

    ``inside`` are the folders whose code only passes calls on.
    """

    def __init__(self, inside: Sequence[str]) -> None:
        self.total = self._first = next(_rings) << 40  # so that no other ring has its numbers
        self._inside_folders = tuple(inside)
        self._inside: dict[str, bool] = {}  # by file
        self._ring: list[_Raw | None] = [None] * KEPT_CALLS
        self._channels: dict[Any, CallChannel] = {}
        self._num_message_channels = 0

    def channel(self, name: str, members: Sequence[int]) -> CallChannel:
        """Returns the channel of that name; it is made when it is first used."""
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = CallChannel(name, members)
        return channel

    def message_channel(self, name: str, ends: Sequence[int]) -> CallChannel | None:
        """Returns the channel of messages of that name; None: there are too many already."""
        channel = self._channels.get(name)
        if channel is None and self._num_message_channels < MOST_CHANNELS:
            self._num_message_channels += 1
            channel = self.channel(name, ends)
        return channel

    def note(self, channel: CallChannel, facts: CallFacts, agreed: Any = None) -> int:
        """Keeps a call that begins; returns its number, for :meth:`record`."""
        channel.count = count = channel.count + 1
        code = facts.code_of(agreed) if agreed is not None else facts.code
        channel.hash = mixed = (channel.hash * _PRIME + code) & _MASK
        frame, inside = sys._getframe(1), self._inside
        for _ in range(MOST_FRAMES):
            name = frame.f_code.co_filename
            is_inside = inside.get(name)
            if is_inside is None:
                is_inside = inside[name] = name.startswith(self._inside_folders)
            if not is_inside or frame.f_back is None:
                break
            frame = frame.f_back
        total = self.total
        # The line itself is found when it is needed: that takes longer than all else here.
        self._ring[total & (KEPT_CALLS - 1)] = (
            channel, count, facts, agreed, frame.f_code, frame.f_lasti, mixed,
        )  # fmt: skip
        self.total = total + 1
        return total

    def has(self, number: int) -> bool:
        """Whether a number is that of a call of this ring."""
        return self._first <= number < self.total

    def record(
        self, rank: int, waits_in: int = -1, since_s: float = 0.0, has_left: bool = False
    ) -> RankCalls:
        """Returns the last calls; ``waits_in`` is the number of the one that the rank waits in."""
        total = self.total
        first = max(self._first, total - SHOWN_CALLS)
        numbers = [*range(first, total)]
        if self._first <= waits_in < first and waits_in > total - KEPT_CALLS:
            numbers.insert(0, waits_in)  # it was called long ago, and is waited for now
        calls: list[list[Any]] = []
        place = -1
        for number in numbers:
            raw = self._ring[number & (KEPT_CALLS - 1)]
            assert raw is not None
            place = len(calls) if number == waits_in else place
            calls.append([*_kept(raw)])
        used = [self._channels[name] for name in dict.fromkeys(call[0] for call in calls)]
        channels = {one.name: [one.count, [*one.members]] for one in used}
        return RankCalls(rank, calls, channels, place, since_s, has_left)

    def messages(self) -> dict[str, int] | None:
        """Returns how many messages began by "messages 0 to 1"; None: some were not counted."""
        if self._num_message_channels >= MOST_CHANNELS:
            return None
        counts: dict[str, int] = {}
        for channel in [*self._channels.values()]:
            way, comma, _ = channel.name.partition(", tag ")
            if comma:
                counts[way] = counts.get(way, 0) + channel.count
        return counts


def _kept(raw: _Raw) -> KeptCall:
    channel, number, facts, agreed, code, last, mixed = raw
    line = next((row for begin, end, row in code.co_lines() if begin <= last < end and row), 0)
    path = Path(code.co_filename)
    name = "/".join(path.parts[-2:]) if path.name.startswith("__") else path.name
    is_message = facts.operation in ("send", "recv")
    shared = f"{facts.num_bytes} B {facts.dtype}" if is_message else facts.text(agreed)
    site = f"{name}:{line}"
    return KeptCall(channel.name, number, facts.text(agreed), mixed, site, shared)


def explanation(
    records: Mapping[int, RankCalls], ended: Collection[int] = (), silence: str = SILENCE
) -> str:
    """Returns why ranks wait, in one paragraph; empty: their records do not show it.

    ``records`` are those of the ranks that answered. Of the others those in ``ended`` are known to
    have ended, and ``silence`` is why the rest did not answer.
    """
    if difference := first_difference(records):
        return difference
    waits = {rank: record for rank, record in records.items() if record.waiting is not None}
    texts: dict[int, str] = {}
    absent: dict[int, list[int]] = {}
    for rank in sorted(waits, key=lambda rank: -waits[rank].since_s):
        call = waits[rank].waiting
        assert call is not None
        absent[rank] = _absent(call, rank, records)
        texts[rank] = f"rank {rank} waits in {_words(call)}, {_reason(call, absent[rank])}"
    # Those that lack another rank, then what they lack, as far as it waits itself.
    lacking = [rank for rank in texts if absent[rank]] or [*texts]
    wanted = [*dict.fromkeys(other for rank in lacking for other in absent[rank])]
    listed = [*dict.fromkeys([*lacking[:MOST_WAITS], *(rank for rank in wanted if rank in texts)])]
    lines = [texts[rank] for rank in listed[: 2 * MOST_WAITS]]
    others = [
        rank for rank in wanted if rank not in texts and (rank in records or rank not in ended)
    ]
    lines += [_elsewhere(rank, records, silence) for rank in others[:MOST_WAITS]]
    if lacking and wanted and all(rank in texts and absent[rank] for rank in wanted):
        lines.append(CIRCLE)
    return "; ".join(lines)


def first_difference(records: Mapping[int, RankCalls]) -> str:
    """Returns the first place at which two ranks made different calls; empty: none is seen."""
    by_channel: dict[str, dict[int, dict[int, KeptCall]]] = {}
    for rank, record in records.items():
        for call in record.kept:
            by_channel.setdefault(call.channel, {}).setdefault(rank, {})[call.number] = call
    waits = {record.waiting.channel for record in records.values() if record.waiting is not None}
    found = [
        (channel not in waits, *difference)  # a channel in which ranks wait comes first
        for channel, calls in by_channel.items()
        if (difference := _difference(calls)) is not None
    ]
    return min(found)[2] if found else ""


def first_unmatched(records: Mapping[int, RankCalls]) -> str:
    """Returns a call of a rank that left, and that another one left without; empty: none is seen.

    It is a collective, or messages of which their two ranks began other numbers.
    """
    counts = {rank: one.messages for rank, one in records.items() if one.messages is not None}
    for way in sorted({way for counted in counts.values() for way in counted}):
        source, target = (int(word) for word in way.split()[1::2])
        if source == target or source not in counts or target not in counts:
            continue
        sent, received = counts[source].get(way, 0), counts[target].get(way, 0)
        if sent != received:
            return f"messages from rank {source} to rank {target}: {sent} sent, {received} received"
    calls = [(one, call) for one in counts for call in records[one].kept]
    for rank, call in calls:
        for other in [] if _is_message(call) else _absent(call, rank, records):
            record = records[other] if other in counts else None
            # One that is full may have left the channel out.
            if record and (call.channel in record.channels or len(record.calls) < SHOWN_CALLS):
                return f"rank {other} left without {_words(call)} of rank {rank}"
    return ""


def _difference(calls: Mapping[int, Mapping[int, KeptCall]]) -> tuple[int, str] | None:
    # The first number at which two ranks of one channel differ, and how.
    for number in sorted({number for kept in calls.values() for number in kept}):
        (first, call), *rest = [(r, kept[number]) for r, kept in calls.items() if number in kept]
        for rank, other in rest:
            if other.agreed != call.agreed:
                return number, (
                    f"rank {first} calls {_words(call)} where rank {rank} calls {_words(other)}: "
                    f"call {number} of {call.channel}"
                )
            if other.hash != call.hash:
                return number, (
                    f"ranks {first} and {rank} made different calls in {call.channel} before call "
                    f"{number}, the oldest one of which both still have a record; comm.check=every "
                    "stops at the first that differs"
                )
    return None


def _absent(call: KeptCall, rank: int, records: Mapping[int, RankCalls]) -> list[int]:
    # The ranks that have not come to a call of one rank.
    members = records[rank].channels[call.channel][1]
    counts = {other: one.channels.get(call.channel, [0])[0] for other, one in records.items()}
    return [other for other in members if other != rank and counts.get(other, 0) < call.number]


def _reason(call: KeptCall, absent: list[int]) -> str:
    if not absent:
        return "to which all its ranks have come"
    listed = f"rank{'s' if len(absent) > 1 else ''} {' and '.join(map(str, absent))}"
    if _is_message(call):
        return f"of which {listed} has not called its side"
    return f"to which {listed} {'has' if len(absent) == 1 else 'have'} not come"


def _elsewhere(rank: int, records: Mapping[int, RankCalls], silence: str) -> str:
    # What a rank does that waits in no call.
    record = records.get(rank)
    if record is None:
        return f"rank {rank} gives no answer: {silence}"
    last = f"its last call was {_words(record.kept[-1])}" if record.calls else "it has called none"
    if record.has_left:
        return f"rank {rank} has left the world, and {last}"
    return f"rank {rank} waits in no call for {seconds(record.since_s)}, and {last}"


def _is_message(call: KeptCall) -> bool:
    return call.text.startswith(("send", "recv"))


def _words(call: KeptCall) -> str:
    return f"{call.text} at {call.site}"
