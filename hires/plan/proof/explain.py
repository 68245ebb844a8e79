"""Explains why ranks do not come to their end: which rank waits for which, in words."""

from __future__ import annotations

from collections.abc import Iterable

from hires.plan.event import MEETINGS
from hires.plan.proof.walk import Coming, Waiter, Walk, spoken

GATHERED = (*MEETINGS, "wait_issued")
"""Events that end when all members of a group have come."""


def explain(walk: Walk) -> list[str]:
    """Returns what keeps ranks from their end, and which messages have one side only.

    Args:
        walk: a walk that has got as far as it gets.
    """
    stuck = walk.proof.stuck
    coming = Coming(walk.programs, walk.at, stuck)
    path, is_cycle = _follow(walk, coming, [Waiter(rank) for rank in stuck])
    problems = [f"deadlock: {_told(walk, path)}"] if is_cycle else []
    problems += walk.one_sided(coming)
    problems += _never_waited_for(walk, coming)
    problems += _incomplete(walk, coming)
    if stuck and not problems and not walk.proof.problems:
        problems.append(f"no end: {_told(walk, path)}")
    return problems


def _follow(walk: Walk, coming: Coming, starts: list[Waiter]) -> tuple[list[Waiter], bool]:
    """Returns waiters that each wait for the next, and whether the last waits for the first.

    Every waiter needs all that it waits for, so any circle is a deadlock. The first way is returned
    if there is none.
    """
    seen: set[Waiter] = set()
    first: list[Waiter] = []
    for start in starts:
        path: list[Waiter] = []
        on_path: dict[Waiter, int] = {}
        todo: list[tuple[Waiter, int]] = [(start, 0)]
        while todo:
            waiter, depth = todo.pop()
            if not first and depth < len(path):
                first = list(path)
            for left in path[depth:]:
                del on_path[left]
            del path[depth:]
            if waiter in on_path:
                return path[on_path[waiter] :], True
            if waiter not in seen:
                seen.add(waiter)
                on_path[waiter] = depth
                path.append(waiter)
                blockers = reversed(_blockers(walk, coming, waiter))
                todo += [(other, depth + 1) for other in blockers]
        first = first or path
    return first, False


def _blockers(walk: Walk, coming: Coming, waiter: Waiter) -> list[Waiter]:
    """Returns what holds a waiter up and cannot go on itself."""
    event = walk.next_of(waiter.rank)
    if waiter.peer is None and event is not None and event.kind in GATHERED:
        absent = walk.absent(waiter.rank, event)
        return [Waiter(rank) for rank in absent if coming.meets(rank, event.peer)]
    if _is_too_early(walk, waiter):
        assert event is not None
        return [waiter] if coming.has("recv", waiter.rank, event.peer, event.tag) else []
    return walk.blockers(waiter, coming)


def _is_too_early(walk: Walk, waiter: Waiter) -> bool:
    """Whether a rank waits for a message that it has not begun to receive."""
    event = walk.next_of(waiter.rank)
    waits = waiter.peer is None and event is not None and event.kind == "wait_recv"
    return waits and event is not None and not walk.expects(waiter.rank, event)


def _told(walk: Walk, path: list[Waiter]) -> str:
    """Returns what each waiter waits for, in one line."""
    return "; ".join(
        walk.sentence(waiter) if waiter.peer is not None else _rank_sentence(walk, waiter.rank)
        for waiter in path
    )


def _rank_sentence(walk: Walk, rank: int) -> str:
    """Says what a rank waits for."""
    event = walk.next_of(rank)
    assert event is not None
    if event.kind in GATHERED:
        absent = walk.absent(rank, event)
        if not absent:
            return f"rank {rank} waits for {spoken(event)}, which it has not begun"
        return f"rank {rank} waits for rank {_listed(absent)} to join {spoken(event)}"
    if event.kind == "wait_recv":
        early = ", which it has not begun to receive" if _is_too_early(walk, Waiter(rank)) else ""
        return f"rank {rank} waits for {spoken(event)} from rank {event.peer}{early}"
    if event.kind == "send":
        room = f"to make room for {spoken(event)}"
        return f"rank {rank} waits for rank {event.peer} to read older messages, {room}"
    unmet = walk.unmet(rank, event)
    others = _listed(dict.fromkeys(target for _, target, _ in unmet))
    said = " and ".join(spoken(walk.open_sends[rank][channel][0]) for channel in unmet)
    return f"rank {rank} waits for rank {others} to receive {said}"


def _never_waited_for(walk: Walk, coming: Coming) -> list[str]:
    """Returns the messages that were received and are never used."""
    return [
        f"rank {target} never waits for {spoken(receive)} from rank {source}"
        for source, target, receive in walk.unused()
        if not coming.has("wait_recv", target, source, receive.tag)
    ]


def _incomplete(walk: Walk, coming: Coming) -> list[str]:
    """Returns the collectives to which some members do not come at all."""
    found = []
    for (group, _), present in walk.meeting.items():
        rank, event = next(iter(present.items()))
        missing = [
            member
            for member in walk.members[group]
            if member not in present and not coming.meets(member, group)
        ]
        if missing:
            text = f"rank {rank} calls {spoken(event)}, but rank {_listed(missing)} of its group"
            found.append(f"{text} never does")
    return found


def _listed(ranks: Iterable[int]) -> str:
    """Returns ranks as ``1 and 2``."""
    return " and ".join(map(str, ranks))
