"""Records what a rank waits in and its last communications, cheaply enough for every message.

The rank's main thread writes; the heartbeat thread (:mod:`hires.core.ranks.heartbeat`) reads when
nothing moves any more, and writes a :class:`RankStatus` to a file.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from hires.core.ranks.timeline import COLLECTIVE, Recorder

KEPT_OPS = 12
"""The last so many communications of a rank are kept."""


class Op(NamedTuple):
    """A communication that a rank waits in, or has left."""

    what: str
    """In words, as ``a receive from rank 1``."""
    begin_s: float
    """On the clock of ``time.perf_counter``."""
    peer: int = -1
    """The other rank of a message; -1: it is no message."""
    tag: int = -1
    """Of the message, as the plan counts."""
    ranks: tuple[int, ...] = ()
    """All members, if it is a collective."""


@dataclass
class RankStatus:
    """Where a rank stands."""

    rank: int
    step: int = -1
    """From 0; -1: it has not begun one."""
    action: str = ""
    """As ``F0``; empty between actions."""
    what: str = ""
    """The communication that it waits in; empty: it computes, reads or sleeps."""
    peer: int = -1
    tag: int = -1
    ranks: list[int] = field(default_factory=list)
    nth: int = -1
    """Collectives of this action that came before, if it waits in one; -1: it does not."""
    since_s: float = 0.0
    """How long it has been there, in seconds."""
    last: list[str] = field(default_factory=list)
    """Its last communications, the latest at the end, with the seconds that they took."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


class Activity:
    """What this process waits in. The main thread writes; another thread may read at any time."""

    def __init__(self) -> None:
        self.now: Op | None = None
        self.last: collections.deque[tuple[Op, float]] = collections.deque(maxlen=KEPT_OPS)
        """Communications that have ended, with the seconds they took."""
        self.recorder: Recorder | None = None
        """Holds step and action, once the rank has one."""
        self.still_s = 0.0
        """A rank may stand still for so long, if that is longer than ``comm.timeout_s``."""
        self._count = 0

    def begin(
        self, what: str, peer: int = -1, tag: int = -1, ranks: tuple[int, ...] = ()
    ) -> Op | None:
        """Notes that a communication begins; pass what comes back to :meth:`end`."""
        outer = self.now
        if outer is not None:  # a message of a collective
            ranks = ranks or outer.ranks
        self.now = Op(what, time.perf_counter(), peer, tag, ranks)
        return outer

    def end(self, outer: Op | None) -> None:
        """Notes that the communication has ended; ``outer`` is the one around it, if any."""
        now = self.now
        if now is not None:
            self.last.append((now, time.perf_counter() - now.begin_s))
            self._count += 1
        self.now = outer

    @contextlib.contextmanager
    def may_stand_still(self, most_s: float) -> Iterator[None]:
        """Allows the rank to stand still for ``most_s`` seconds in the block, as at large files."""
        self.still_s = most_s
        try:
            yield
        finally:
            self._count += 1  # a move: what follows has the usual time
            self.still_s = 0.0

    def mark(self) -> tuple[Any, ...]:
        """Returns a value that changes with every communication, action and step."""
        recorder = self.recorder
        if recorder is None or not recorder.steps:
            return (self._count, self.now)
        step = recorder.steps[-1]
        spans = len(step.spans) + step.dropped
        return (self._count, self.now, step.step, recorder.action, spans)

    @property
    def in_step(self) -> bool:
        """Whether the rank has begun its first step."""
        return self.recorder is not None and bool(self.recorder.steps)

    def status(self, rank: int, since_s: float) -> RankStatus:
        """Returns where the rank stands.

        Args:
            rank: this rank.
            since_s: how long it has not moved, in seconds, if it waits in no communication.
        """
        last = [f"{op.what} ({took_s * 1e3:.1f} ms)" for op, took_s in self.last.copy()]
        status = RankStatus(rank, since_s=since_s, last=last)
        if self.recorder is not None and self.recorder.steps:
            status.step, status.action = self.recorder.steps[-1].step, self.recorder.action
        now = self.now
        if now is not None:
            status.what, status.peer, status.tag = now.what, now.peer, now.tag
            status.ranks, status.since_s = list(now.ranks), time.perf_counter() - now.begin_s
            status.nth = self._collectives(status.action) if now.ranks and status.action else -1
        return status

    def _collectives(self, action: str) -> int:
        assert self.recorder is not None
        count = 0
        for span in reversed(self.recorder.steps[-1].spans):
            if span.action != action:
                break
            count += span.kind == COLLECTIVE
        return count
