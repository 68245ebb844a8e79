"""Compares the last calls of several ranks, and explains why they wait for each other.

In this order, since each explains those behind it:

    1  two ranks that made different calls at one place of a communicator
    2  ranks that wait for each other in a circle, as in opposite orders on two backends
    3  a rank that others wait for: it has left, gives no answer, or does something else
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from hires.core.ranks.call_records import SHOWN_CALLS, KeptCall, RankCalls
from hires.core.units import seconds

MOST_WAITS = 4
"""Ranks whose waits are listed."""
CIRCLE = "each waits for another: they make these calls in different orders"
SILENCE = "it has ended, is stopped, or cannot be reached"
_MESSAGES = re.compile(r"(messages (\d+) to (\d+)), tag (-?\d+),(.*)")
"""The name of a channel of messages."""


def explanation(
    records: Mapping[int, RankCalls], ended: Collection[int] = (), silence: str = SILENCE
) -> str:
    """Returns why ranks wait, in one paragraph; empty: their records do not show it.

    ``records`` are those of the ranks that answered. Of the others those in ``ended`` are known to
    have ended, and ``silence`` is why the rest did not answer.
    """
    difference = first_difference(records)
    if difference:
        return difference
    waits = {rank: record for rank, record in records.items() if record.waiting is not None}
    texts: dict[int, str] = {}
    absent: dict[int, list[int]] = {}
    for rank in _longest_first(waits):
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
    tags = [text for rank in lacking if (text := _other_tag(rank, records))]
    if tags:
        lines.append(tags[0])
    elif lacking and wanted and all(rank in texts and absent[rank] for rank in wanted):
        lines.append(CIRCLE)
    return "; ".join(lines)


def first_difference(records: Mapping[int, RankCalls]) -> str:
    """Returns the first place at which two ranks made different calls; empty: none is seen."""
    found: list[tuple[bool, int, str]] = []
    by_channel: dict[str, dict[int, dict[int, KeptCall]]] = {}
    for rank, record in records.items():
        for channel in record.channels:
            by_channel.setdefault(channel, {})[rank] = {}
        for call in record.kept:
            by_channel[call.channel][rank][call.number] = call
    for channel, calls in by_channel.items():
        difference = _difference(calls)
        if difference is not None:
            waits = any(
                record.waiting is not None and record.waiting.channel == channel
                for record in records.values()
            )
            found.append((not waits, difference[0], difference[1]))
    return min(found)[2] if found else ""


def first_unmatched(records: Mapping[int, RankCalls]) -> str:
    """Returns a call of a rank that left, and that another one left without; empty: none is seen.

    It is a collective, or the last of messages of which their two ranks began other numbers.
    """
    counts = {rank: one.messages for rank, one in records.items() if one.messages is not None}
    for way in sorted({way for counted in counts.values() for way in counted}):
        source, target = (int(word) for word in way.split()[1::2])
        if source == target or source not in counts or target not in counts:
            continue
        sent, received = counts[source].get(way, 0), counts[target].get(way, 0)
        if sent != received:
            more, less = (source, target) if sent > received else (target, source)
            return (
                f"messages from rank {source} to rank {target}: {sent} sent, {received} received"
                f"{_alone(way, records[more], records[less])}"
            )
    calls = ((rank, call) for rank in counts for call in records[rank].kept)
    for rank, call in calls:
        missing = [] if _is_message(call) else _absent(call, rank, records)
        never = [r for r in missing if r in counts and _counts(records[r], call.channel)]
        if never:
            return f"{_ranks(never)} left without {_words(call)} of rank {rank}"
    return ""


def _alone(way: str, more: RankCalls, less: RankCalls) -> str:
    # The last kept message that has no other side.
    for call in reversed(more.kept):
        other = _MESSAGES.fullmatch(call.channel)
        if other is None or other[1] != way or not _counts(less, call.channel):
            continue
        if less.channels.get(call.channel, [0])[0] < call.number:
            return f": rank {more.rank}'s {_words(call)}, tag {other[4]}, has no other side"
    return ""


def _counts(record: RankCalls, channel: str) -> bool:
    # Whether it holds the number of a rank's calls in a channel; it may be too old for that.
    return channel in record.channels or len(record.calls) < SHOWN_CALLS


def _difference(calls: Mapping[int, Mapping[int, KeptCall]]) -> tuple[int, str] | None:
    # The first number at which two ranks of one channel differ, and how.
    ranks = [rank for rank in calls if calls[rank]]
    numbers = sorted({number for rank in ranks for number in calls[rank]})
    for number in numbers:
        here = [(rank, calls[rank][number]) for rank in ranks if number in calls[rank]]
        first, call = here[0]
        for rank, other in here[1:]:
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
    """Returns the ranks that have not come to a call."""
    members = records[rank].channels[call.channel][1]
    absent = []
    for other in members:
        if other == rank:
            continue
        record = records.get(other)
        count = record.channels.get(call.channel, [0])[0] if record is not None else 0
        if count < call.number:
            absent.append(other)
    return absent


def _other_tag(rank: int, records: Mapping[int, RankCalls]) -> str:
    # Whether the other side of a message that a rank waits for has another tag.
    record = records[rank]
    waits = _MESSAGES.fullmatch(record.waiting.channel if record.waiting else "")
    if waits is None:
        return ""
    way, source, target, tag, rest = waits.groups()
    peer = int(target) if int(source) == rank else int(source)
    for name, (count, _) in records[peer].channels.items() if peer in records else ():
        other = _MESSAGES.fullmatch(name)
        if other is None or (other[1], other[5]) != (way, rest) or other[4] == tag:
            continue
        if _counts(record, name) and count > record.channels.get(name, [0])[0]:
            sent, awaited = (tag, other[4]) if int(source) == rank else (other[4], tag)
            return f"rank {source} sends tag {sent}, and rank {target} waits for tag {awaited}"
    return ""


def _reason(call: KeptCall, absent: list[int]) -> str:
    if not absent:
        return "to which all its ranks have come"
    listed = _ranks(absent)
    if _is_message(call):
        return f"of which {listed} has not called its side"
    return f"to which {listed} {'has' if len(absent) == 1 else 'have'} not come"


def _elsewhere(rank: int, records: Mapping[int, RankCalls], silence: str) -> str:
    """Returns what a rank does that waits in no call."""
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


def _longest_first(waits: Mapping[int, RankCalls]) -> Iterator[int]:
    return iter(sorted(waits, key=lambda rank: -waits[rank].since_s))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
