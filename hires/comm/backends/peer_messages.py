"""Messages between ranks of one machine: of any size, with tags, none waits for another.

Short ones are copied into a ring at once (:mod:`hires.comm.backends.rings`). A longer one is
announced, and moves when its receive is posted, so no rank holds more of others' messages than
short ones:

    sender    announce 7            bytes of 7 . bytes of 7
    receiver            accept 7                            done

What comes before its receive is posted is kept. A rank answers inside its own calls and, if it has
open messages, in a helper thread while it computes; that sleeps until it is needed.
"""

from __future__ import annotations

import datetime
import itertools
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from time import monotonic as clock
from typing import TypeVar

import torch
from torch import Tensor

from hires.comm.backends.counters import copy
from hires.comm.backends.rings import ASLEEP, LOOKING, NONE, Record, Rings
from hires.core.errors import CommError, EndedError, PeerError

SHORT, ANNOUNCE, ACCEPT, BYTES, REFUSED = range(1, 6)
"""Kinds of records: a whole message; a long one; its receive is posted; its bytes; its receive has
another size."""
_LOOKS = 10  # each takes five times as long as one at a counter (counters.LOOKS)
_CLOSE_S = 2.0
_HELPER_S = 5.0  # longest sleep of a helper

_T = TypeVar("_T")


class PeerMessage:
    """A send or receive under way; its tensor belongs to it until it is complete."""

    __slots__ = ("_error", "_tensor", "address", "done", "home", "key", "moved", "number", "peer",
                 "sends", "size", "tag", "timeout_s")  # fmt: skip

    def __init__(
        self,
        home: PeerMessages,
        tensor: Tensor,
        sends: bool,
        peer: int,
        key: int,
        tag: int,
        timeout_s: float | None = None,
    ) -> None:
        self.home, self._tensor, self.sends = home, tensor, sends
        self.timeout_s = timeout_s  # None: that of the world
        self.peer, self.key, self.tag = peer, key, tag
        self.address, self.size = tensor.data_ptr(), tensor.nbytes
        self.number = 0  # among the long ones that this rank sends
        self.moved = -1  # bytes that have passed by cells; -1: its receive was not posted so far
        self.done = False
        self._error: CommError | None = None

    def is_completed(self) -> bool:
        """Whether it is complete, or has failed; never waits."""
        return self.done or self.home.look(self)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Returns when it is complete; CommError: it failed, or is late."""
        if not self.done:
            self.home.wait(self, self.timeout_s if timeout is None else timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def end(self, error: CommError | None = None) -> None:
        """Ends it: it is complete, or has failed."""
        self._error = error
        self.done = True

    def __str__(self) -> str:
        """Returns what it is, for errors."""
        what = "send to" if self.sends else "message of"
        return f"the {what} rank {self.peer} with tag {self.tag} ({self.size} bytes)"


@dataclass
class _Unexpected:
    """A message, or the announcement of one, that came before its receive was posted."""

    record: Record
    content: Tensor | None  # bytes of a short one


class PeerMessages:
    """The messages of a rank."""

    def __init__(self, rings: Rings) -> None:
        self._rings, self._counters = rings, rings.counters
        self._lock = threading.Lock()  # of all that follows
        self._waiter = threading.Lock()  # of the one thread that waits
        self._posted: dict[tuple[int, int, int], deque[PeerMessage]] = defaultdict(deque)
        self._kept: dict[tuple[int, int, int], deque[_Unexpected]] = defaultdict(deque)
        # By number, of long messages that are under way.
        self._sending: dict[int, PeerMessage] = {}
        self._receiving: dict[tuple[int, int], PeerMessage] = {}
        self._numbers = itertools.count(1)
        # What was not written so far, by target: messages and answers.
        self._outgoing: list[deque[PeerMessage | Record]]
        self._outgoing = [deque() for _ in range(rings.num_ranks)]
        self._helper: threading.Thread | None = None
        self._closed = False
        self._broken: CommError | None = None

    def isend(
        self, tensor: Tensor, target: int, key: int, tag: int, timeout_s: float | None = None
    ) -> PeerMessage:
        """Begins to send a contiguous tensor; ``key`` and ``tag`` are those of its receive.

        ``timeout_s``: longest wait; by default that of the world.
        """
        message = PeerMessage(self, tensor, True, target, key, tag, timeout_s)
        with self._lock:
            self._outgoing[target].append(message)
            self._flush(target)
        self._start_helper(message)
        return message

    def irecv(
        self, tensor: Tensor, source: int, key: int, tag: int, timeout_s: float | None = None
    ) -> PeerMessage:
        """Begins to fill a contiguous tensor with the next message of a rank with this tag."""
        message = PeerMessage(self, tensor, False, source, key, tag, timeout_s)
        place = source, key, tag
        with self._lock:
            if not self._kept.get(place):
                self._posted[place].append(message)
                self._progress()
            else:
                kept = _first(self._kept, place)
                self._match(message, source, kept.record, kept.content)
        self._start_helper(message)
        return message

    def look(self, message: PeerMessage) -> bool:
        """Moves all messages on; returns whether this one is complete."""
        with self._lock:
            self._progress()
        return message.done

    def wait(self, message: PeerMessage, timeout_s: float | None = None) -> None:
        """Returns when a message is complete; CommError: it is not, within the limit."""
        limit_s = self._counters.timeout_s if timeout_s is None else timeout_s
        rings, words, own, begin_s = self._rings, self._counters.words, self._rings.index, clock()

        def late() -> PeerError:
            return PeerError(f"{message} took over {limit_s:g} s")

        def is_complete() -> bool:
            if message.done:
                return True
            if self._broken is not None:
                raise self._broken
            moves = rings.arrived() or any(self._outgoing)  # there may be room for these
            return moves and self.look(message)

        while not self._waiter.acquire(timeout=1e-3):  # another thread of this rank waits
            if message.done:
                return
            if clock() - begin_s > limit_s:
                raise late()
        words[own] = LOOKING
        try:
            left_s, peer = limit_s - (clock() - begin_s), [message.peer]
            if not self._counters.wait(is_complete, left_s, lambda: peer, _LOOKS, LOOKING):
                raise late()
        except EndedError as error:
            raise EndedError(f"{message}: {error}", peer) from None
        finally:
            words[own] = NONE
            self._counters.fence()
            # A rank that sent or made room while the word was LOOKING has not rung.
            if rings.arrived() or any(self._outgoing):
                self.look(message)
            self._waiter.release()

    def close(self) -> None:
        """Ends the helper."""
        self._closed = True
        if self._helper is not None:
            self._counters.wake(self._rings.helper)
            self._helper.join(_CLOSE_S)

    def _start_helper(self, message: PeerMessage) -> None:
        if self._helper is None and not message.done:
            self._helper = threading.Thread(target=self._help, name="peer-messages", daemon=True)
            self._helper.start()

    def _help(self) -> None:
        word = self._rings.helper
        while not self._closed:
            self._counters.words[word] = ASLEEP
            self._counters.fence()
            if self._closed:
                return
            try:
                with self._lock:
                    self._progress()
            except Exception as error:  # every wait raises it
                self._broken = CommError(f"the helper of messages failed: {error!r}")
                return
            self._counters.doze(word, _HELPER_S)

    def _progress(self) -> None:
        # Reads what has come, and writes what there is room for. The caller holds the lock.
        rings = self._rings
        for source in rings.others:
            while (record := rings.oldest(source)) is not None:
                self._take(source, record)
                rings.drop(source)
        for target, queue in enumerate(self._outgoing):
            if queue:
                self._flush(target)

    def _take(self, source: int, record: Record) -> None:
        if record.kind == ACCEPT:
            message = self._sending.pop(record.number)
            message.moved = 0
            self._outgoing[source].append(message)
        elif record.kind == REFUSED:
            message = self._sending.pop(record.number)
            message.end(PeerError(f"{message} is received as {record.size} bytes"))
        elif record.kind == BYTES:
            message = self._receiving[source, record.number]
            copy(message.address + message.moved, record.bytes_at, record.size)
            message.moved += record.size
            if message.moved == message.size:
                del self._receiving[source, record.number]
                message.end()
        else:
            place = source, record.key, record.tag
            if self._posted.get(place):
                self._match(_first(self._posted, place), source, record, None)
            else:
                self._kept[place].append(_keep(record))

    def _match(
        self, message: PeerMessage, source: int, record: Record, content: Tensor | None
    ) -> None:
        # A receive and what was sent; short bytes lie in ``content``, or else still in the cell.
        if record.size != message.size:
            message.end(PeerError(f"{message} has {record.size} bytes"))
            if record.kind != SHORT:
                self._answer(source, REFUSED, record.number, message.size)
        elif record.kind == SHORT:
            begin = record.bytes_at if content is None else content.data_ptr()
            copy(message.address, begin, record.size)
            message.end()
        else:
            message.moved = 0
            self._receiving[source, record.number] = message
            self._answer(source, ACCEPT, record.number)

    def _answer(self, target: int, kind: int, number: int, size: int = 0) -> None:
        self._outgoing[target].append(Record(kind, number, size))
        self._flush(target)

    def _flush(self, target: int) -> None:
        # Writes what is for a rank while there is room, and wakes it; its helper, if it must answer
        # or make room.
        rings, queue, urgent, wrote = self._rings, self._outgoing[target], False, False
        while queue and rings.has_room(target):
            record = self._next(target, queue)
            rings.write(target, record)
            wrote, urgent = True, urgent or record.kind != SHORT
        if wrote or queue:
            rings.wake(target, urgent or bool(queue))

    def _next(self, target: int, queue: deque[PeerMessage | Record]) -> Record:
        # The record of what comes first, whose bytes it copies into the next cell.
        first, most = queue[0], self._rings.most
        if isinstance(first, Record):
            queue.popleft()
            return first
        if first.moved >= 0:
            size = min(first.size - first.moved, most)
            copy(self._rings.cell(target), first.address + first.moved, size)
            first.moved += size
            if first.moved == first.size:
                queue.popleft()
                first.end()
            return Record(BYTES, first.number, size)
        queue.popleft()
        if first.size <= most:
            copy(self._rings.cell(target), first.address, first.size)
            first.end()
            return Record(SHORT, 0, first.size, first.key, first.tag)
        first.number = next(self._numbers)
        self._sending[first.number] = first
        return Record(ANNOUNCE, first.number, first.size, first.key, first.tag)


def _first(queues: dict[tuple[int, int, int], deque[_T]], place: tuple[int, int, int]) -> _T:
    # Takes the first of a queue, and the queue away once it is empty.
    first = queues[place].popleft()
    if not queues[place]:
        del queues[place]
    return first


def _keep(record: Record) -> _Unexpected:
    if record.kind != SHORT:
        return _Unexpected(record, None)
    content = torch.empty(record.size, dtype=torch.uint8)
    copy(content.data_ptr(), record.bytes_at, record.size)
    return _Unexpected(record, content)
