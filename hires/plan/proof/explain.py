"""Explains why ranks do not come to their end: which rank waits for which, in words."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from hires.plan.event import MEETINGS, POSTS, Event
from hires.plan.proof.walk import Coming, Waiter, Walk, spoken

GATHERED = (*MEETINGS, "wait_issued")
"""Events that end when all members of a group have come."""


def explain(walk: Walk) -> list[str]:
    """Returns what keeps ranks from their end, and which messages have one side only.

    Args:
        walk: a walk that has got as far as it gets.
    """
    stuck, coming = walk.proof.stuck, Coming(walk)
    path, is_cycle = _follow(walk, coming, [Waiter(rank) for rank in stuck])
    chain = "; ".join(
        walk.sentence(waiter) if waiter.peer is not None else _rank_sentence(walk, waiter.rank)
        for waiter in path
    )
    problems = [f"deadlock: {chain}"] if is_cycle else []
    if stuck or walk.num_open:
        problems += _one_sided(walk)
    for source, target, receive in walk.unused():
        if not coming.has("wait_recv", target, source, receive.tag):
            text = f"rank {target} never waits for {spoken(receive)} from rank {source}"
            problems.append(text)
    for (group, _), present in walk.meeting.items():
        rank, event = next(iter(present.items()))
        missing = [
            member
            for member in walk.members[group]
            if member not in present and not coming.meets(member, group)
        ]
        if missing:
            absent = f"rank {_listed(missing)} of its group never does"
            problems.append(f"rank {rank} calls {spoken(event)}, but {absent}")
    if stuck and not problems and not walk.proof.problems:
        problems.append(f"no end: {chain}")
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
    event = walk.next_of(waiter.rank) if waiter.peer is None else None
    if event is not None and event.kind in GATHERED:
        absent = walk.absent(waiter.rank, event)
        return [Waiter(rank) for rank in absent if coming.meets(rank, event.peer)]
    if event is not None and _is_too_early(walk, waiter.rank, event):
        return [waiter] if coming.has("recv", waiter.rank, event.peer, event.tag) else []
    return walk.blockers(waiter, coming)


def _is_too_early(walk: Walk, rank: int, event: Event) -> bool:
    """Whether a rank waits for a message that it has not begun to receive."""
    if event.kind != "wait_recv":
        return False
    own = (e for e in walk.programs[rank][: walk.at[rank]] if e[1:3] == event[1:3])
    return sum((e.kind == "recv") - (e.kind == "wait_recv") for e in own) <= 0


def _rank_sentence(walk: Walk, rank: int) -> str:
    event = walk.next_of(rank)
    assert event is not None
    if event.kind in GATHERED:
        absent = walk.absent(rank, event)
        if not absent:
            return f"rank {rank} waits for {spoken(event)}, which it has not begun"
        return f"rank {rank} waits for rank {_listed(absent)} to join {spoken(event)}"
    if event.kind == "wait_recv":
        early = _is_too_early(walk, rank, event)
        tail = ", which it has not begun to receive" if early else ""
        return f"rank {rank} waits for {spoken(event)} from rank {event.peer}{tail}"
    if event.kind == "send":
        room = f"to make room for {spoken(event)}"
        return f"rank {rank} waits for rank {event.peer} to read older messages, {room}"
    unmet = walk.unmet(rank, event)
    others = _listed(dict.fromkeys(target for _, target, _ in unmet))
    messages = " and ".join(spoken(walk.open_sends[rank][channel][0]) for channel in unmet)
    return f"rank {rank} waits for rank {others} to receive {messages}"


def _one_sided(walk: Walk) -> list[str]:
    """Returns the messages that one side posts more often than the other in its whole program.

    Of several the first that the other side does not name at all is the one that is named.
    """
    sides: dict[tuple[int, int, Hashable], tuple[list[Event], list[Event]]] = {}
    for rank, program in enumerate(walk.programs):
        for event in program:
            if event.kind in POSTS:
                sending = event.kind == "send"
                ends = (rank, event.peer) if sending else (event.peer, rank)
                sides.setdefault((*ends, walk.way(event)), ([], []))[not sending].append(event)
    problems = []
    for (source, target, _), (sends, receives) in sides.items():
        more, fewer = (sends, receives) if len(sends) > len(receives) else (receives, sends)
        if len(more) == len(fewer):
            continue
        named = {event.what for event in fewer}
        event = next((event for event in more if event.what not in named), more[len(fewer)])
        if more is sends:
            text = f"rank {source} sends {spoken(event)} to rank {target}, which never receives it"
        else:
            text = f"rank {target} expects {spoken(event)} from rank {source}, which never sends it"
        problems.append(text)
    return problems


def _listed(ranks: Iterable[int]) -> str:
    return " and ".join(map(str, ranks))
