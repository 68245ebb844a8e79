"""Looks ahead in the programs of stuck ranks: what they would come to if they went on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hires.plan.event import MEETINGS, Event


class Waiter(NamedTuple):
    """Something that cannot go on."""

    rank: int
    peer: int | None = None
    """None: the rank itself; else its stream for the messages with this rank."""
    lane: int = 0
    """Which of its streams for this rank, where there are several."""


class Coming:
    """The events that stuck ranks have not come to, the one at which they stand included."""

    def __init__(
        self, programs: Sequence[list[Event]], at: Sequence[int], stuck: Sequence[int]
    ) -> None:
        """Takes all ranks' programs and positions, and the ranks that are not at their end."""
        self._tagged: set[tuple[str, int, int, int]] = set()
        self._posts: dict[tuple[str, int, int], list[Event]] = {}
        for rank in stuck:
            for event in programs[rank][at[rank] :]:
                self._tagged.add((event.kind, rank, event.peer, event.tag))
                self._posts.setdefault((event.kind, rank, event.peer), []).append(event)

    def has(self, kind: str, rank: int, peer: int, tag: int | None = None) -> bool:
        """Whether a rank would come to such an event; for a collective ``peer`` is the group."""
        if tag is None:
            return (kind, rank, peer) in self._posts
        return (kind, rank, peer, tag) in self._tagged

    def meets(self, rank: int, group: int) -> bool:
        """Whether a rank would come to a collective of a group, or begin a sum."""
        return any(self.has(kind, rank, group) for kind in (*MEETINGS, "issue"))

    def posts(self, kind: str, rank: int, peer: int) -> list[Event]:
        """Returns all such events, in order."""
        return self._posts.get((kind, rank, peer), [])
