"""What is a rank at, and what did it say last? Kept so cheaply that every message can be told.

The rank's main thread notes the communication that it waits in; another thread (``core.pulse``)
looks at the notes when nothing moves any more, and tells them in a file.
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
"""The last so many communications of a rank are told."""


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
class Standing:
    """Where a rank stands, as it tells itself."""

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
    """How long it has been there."""
    last: list[str] = field(default_factory=list)
    """What it said last, the latest at the end, with the seconds that it took."""

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)


class Doing:
    """What this process waits in. The main thread writes, another thread may read at any time."""

    def __init__(self) -> None:
        self.now: Op | None = None
        self.last: collections.deque[tuple[Op, float]] = collections.deque(maxlen=KEPT_OPS)
        """Communications that have ended, with the seconds they took."""
        self.recorder: Recorder | None = None
        """Knows step and action, once the rank has one."""
        self.patience_s = 0.0
        """A rank may stand still for so long, if that is longer than ``comm.timeout_s``."""
        self._count = 0

    def begin(
        self, what: str, peer: int = -1, tag: int = -1, ranks: tuple[int, ...] = ()
    ) -> Op | None:
        """Notes that a communication begins; give what comes back to :meth:`end`."""
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
    def patiently(self, most_s: float) -> Iterator[None]:
        """Lets the rank stand still for longer while the block runs: it is at large files.

        Args:
            most_s: how long at most, in seconds.
        """
        self.patience_s = most_s
        try:
            yield
        finally:
            self._count += 1  # a move: what follows has the usual time
            self.patience_s = 0.0

    def mark(self) -> tuple[Any, ...]:
        """Returns something that changes with every communication, action and step."""
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

    def standing(self, rank: int, since_s: float) -> Standing:
        """Returns where the rank stands.

        Args:
            rank: this rank.
            since_s: how long it has not moved, if it waits in no communication.
        """
        found = Standing(rank, since_s=since_s, last=self._spoken())
        if self.recorder is not None and self.recorder.steps:
            found.step, found.action = self.recorder.steps[-1].step, self.recorder.action
        now = self.now
        if now is not None:
            found.what, found.peer, found.tag = now.what, now.peer, now.tag
            found.ranks, found.since_s = list(now.ranks), time.perf_counter() - now.begin_s
            found.nth = self._collectives(found.action) if now.ranks and found.action else -1
        return found

    def _collectives(self, action: str) -> int:
        """Returns how many collectives of the present action have ended."""
        assert self.recorder is not None
        count = 0
        for span in reversed(self.recorder.steps[-1].spans):
            if span.action != action:
                break
            count += span.kind == COLLECTIVE
        return count

    def _spoken(self) -> list[str]:
        """Returns the last communications in words."""
        return [f"{op.what} ({took_s * 1e3:.1f} ms)" for op, took_s in self.last.copy()]
