"""Finds out why a run stands still: names the message that has one side, and who is waited for.

A rank reports only the other rank and a number; the plan has every message of a step in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hires.core.ranks.heartbeat import RankStatus
from hires.plan.event import MEETING, POSTS, Event
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.program import events


@dataclass(frozen=True)
class Wait:
    """A rank that waits, and for what."""

    rank: int
    what: str
    others: list[int]
    """The ranks that should have come to it, and have not."""
    since_s: float
    message: Event | None = None
    """The post that the rank waits for; None if the plan has no such message."""
    passed: bool = False
    """Whether the other rank is past its side of the message, so that it was lost."""

    @property
    def text(self) -> str:
        """One sentence."""
        ranks, waits = _ranks(self.others), f"rank {self.rank} waits"
        if self.message is not None and self.message.role == "send":
            waits += f" until {ranks} takes {self.what}"
        elif self.message is not None:
            waits += f" for {self.what} from {ranks}"
        elif self.others:
            waits += f" for {ranks} to join {self.what}"
        else:
            waits += f" in {self.what}, to which all have come"
        return f"{waits}, since {self.since_s:.1f} s"

    @property
    def unmatched(self) -> str | None:
        """What has one side only, and which; None if all have come, or who has not is unknown."""
        if not self.others:
            return None
        if self.message is None:
            verb = "have" if len(self.others) > 1 else "has"
            return f"{self.what}: {_ranks(self.others)} {verb} not come to it"
        sends, there = self.message.role == "send", self.others[0]
        source, target = (self.rank, there) if sends else (there, self.rank)
        size = "x".join(map(str, self.message.shape))
        fate = "has not begun to receive it" if sends else "has not sent it"
        if self.passed:
            fate = "reports a later action, so the message was lost"
        return (
            f"{self.what}, {size} {self.message.dtype}, from rank {source} to rank {target}: "
            f"rank {there} {fate}"
        )


@dataclass
class Stall:
    """Why nothing moves."""

    waits: list[Wait]
    culprits: list[int] = field(default_factory=list)
    """Ranks that others wait for, and that wait for nobody themselves."""
    circle: list[int] = field(default_factory=list)
    """Ranks of which each waits for the next and the last for the first, if there is no culprit."""

    @property
    def unmatched(self) -> list[str]:
        """The messages and collectives that lack a side; those that culprits owe come first."""
        waits = sorted(self.waits, key=lambda wait: not set(wait.others) & set(self.culprits))
        return list(dict.fromkeys(wait.unmatched for wait in waits if wait.unmatched is not None))


def stall(plan: Plan, states: Mapping[int, RankStatus]) -> Stall:
    """Returns why nothing moves, from where each rank stands that answered."""
    waits = [_wait(plan, states, status) for status in states.values() if status.what]
    waits.sort(key=lambda wait: -wait.since_s)
    by_rank = {wait.rank: wait for wait in waits}
    wanted = {other for wait in waits for other in wait.others}
    culprits = sorted(rank for rank in wanted if rank not in by_rank)
    path: list[int] = []
    # With no culprit everyone waits: following the first of the others leads into a circle.
    rank = waits[0].rank if waits and not culprits else None
    while rank is not None and rank not in path:
        path.append(rank)
        wait = by_rank.get(rank)
        rank = wait.others[0] if wait is not None and wait.others else None
    return Stall(waits, culprits, [] if rank is None else path[path.index(rank) :])


def _wait(plan: Plan, states: Mapping[int, RankStatus], here: RankStatus) -> Wait:
    """Returns what a rank waits for, in the plan's words where the plan has it."""
    event = _event(plan, here)
    if event is not None and event.role in POSTS:
        there = states.get(here.peer)
        passed = there is not None and _is_past(plan, there, here.step, event.part.action)
        return Wait(here.rank, event.what, [here.peer], here.since_s, event, passed)
    what = here.what if event is None else event.what
    if here.peer >= 0 and not here.ranks:
        return Wait(here.rank, what, [here.peer], here.since_s)
    others = [r for r in here.ranks if r != here.rank and not _together(here, states.get(r))]
    return Wait(here.rank, what, others, here.since_s)


def _together(here: RankStatus, other: RankStatus | None) -> bool:
    if other is None or not other.what:
        return False
    place = here.step, here.action, here.nth, here.operation, here.ranks
    return (other.step, other.action, other.nth, other.operation, other.ranks) == place


def _event(plan: Plan, here: RankStatus) -> Event | None:
    """Returns what a rank waits for as the plan has it, or None if it is outside the plan."""
    if not here.operation:
        return None
    if here.ranks:
        members = [*groups(plan), [*range(plan.world)]]  # the last one is the world, -1
        joint = [
            event
            for event in events(plan, here.rank)
            if event.role in (MEETING, "issue") and [*members[event.peer]] == here.ranks
        ]
        if not here.action:  # what no rank counts; an issued sum may have begun in a pass
            ends = [event for event in joint if not event.part.action or event.role == "issue"]
            return _one_of([event for event in ends if event.operation == here.operation])
        joint = [
            event for event in joint if event.role == MEETING and event.part.action == here.action
        ]
        return joint[here.nth] if 0 <= here.nth < len(joint) else None
    posts = [
        event
        for event in events(plan, here.rank)
        if (event.role, event.peer, event.tag) == (here.operation, here.peer, here.tag)
    ]
    # Halos of all microbatches have one tag: the action tells them apart.
    inside = [event for event in posts if event.part.action == here.action]
    return next(iter(inside or posts), None)


def _one_of(joint: list[Event]) -> Event | None:
    """Returns the first of several events with the words of all: one of each kind of traffic."""
    firsts: dict[str, list[Event]] = {}
    for event in joint:
        firsts.setdefault(event.traffic, []).append(event)
    words = [
        f"{first.what} (or a later one)" if more else first.what for first, *more in firsts.values()
    ]
    return joint[0]._replace(what=" or ".join(words)) if joint else None


def _is_past(plan: Plan, there: RankStatus, step: int, action: str) -> bool:
    if there.step != step:
        return there.step > step
    actions = plan.actions_of(there.rank)
    if action not in actions or there.action not in actions:
        return False
    return actions.index(there.action) > actions.index(action)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
