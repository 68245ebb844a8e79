"""Finds out why a rank waits too long: compares the calls of all ranks beside the backends.

Every call of an operation is kept (:mod:`hires.core.ranks.call_records`). A thread looks at what
the rank waits in, and ranks exchange their records through a board in the store at which they met:

    rank 0    all_reduce ....... a third of the timeout: requests and compares records ... timeout
    rank 1    broadcast .............................. writes its record at a request

So the error at the end of the wait names the calls of both ranks with their lines, even if the
other rank has ended meanwhile. Before rank 0 leaves, the others keep the records that are there.
Ranks that end well compare once more when they leave, since a wrong root may be wrong numbers and
no wait at all. With ``every`` each call is compared before it begins; otherwise, unless the backend
compares calls itself, where a rank makes the first one of an operation and size, since gloo ends a
process whose size is another, and an MPI may return wrong numbers: sizes differ most often where
they are new. Of messages the first one of a size and type is compared on every backend. That takes
one message to rank 0, and no rank waits for the call of another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.backends.works import pauses, wait
from hires.core.errors import CommError
from hires.core.ranks.call_records import (
    CIRCLE,
    SILENCE,
    CallChannel,
    CallFacts,
    CallRing,
    RankCalls,
    explanation,
    first_difference,
    first_unmatched,
    read_calls,
)
from hires.core.ranks.heartbeat import Activity

log = logging.getLogger(__name__)

CHECKS = ("off", "late", "every")
"""When the calls of ranks are compared."""
LOOK_S = 0.5
"""Between two looks of the thread."""
RANKS_PER_LOOK_S = 1000
"""Looks at the board in a second: in a larger world each rank looks more rarely."""
PATIENCE_S = 2.0
"""Longest wait for the records of others at a failure."""
ENDED_S = 0.25
"""The same where one of them has ended."""
MOST_RECORDS = 64
"""Ranks whose records are read."""
LINGER_S = 0.5
"""How long rank 0 stays for ranks that have not left, besides the time between their looks."""
PAUSE_S = 0.005
NEVER = 2**62
"""A number that no request reaches: only records of ranks that have left count as answers."""

LOST = "answers come through rank 0, which gives none"

INSIDE = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
"""Code that passes calls on: hires.comm and torch."""


FAILURES = (OSError, RuntimeError, CommError)
"""The store has ended, or holds what carries no proof of the ranks' secret."""
KEPT_FIRSTS = 4096
"""Calls of one rank that others compare theirs with."""
_END = "rank 0 leaves"


class _Reason(NamedTuple):
    number: int  # of the call that waits
    text: str = ""
    is_settled: bool = False  # two calls that differ, or a circle: nothing later can change it
    has_all: bool = False  # all ranks of the call have answered


class SequenceCheck:
    """The check of one rank in one world."""

    def __init__(
        self,
        board: CallBoard,
        rank: int,
        world: int,
        timeout_s: float,
        activity: Activity,
        every: bool = False,
    ) -> None:
        self.ring = CallRing(INSIDE)
        self.has_failed = False
        """Whether an error came before: then messages without their other side are no news."""
        self._board, self._rank, self._world, self._every = board, rank, world, every
        self._timeout_s, self._activity = timeout_s, activity
        self._look_s = max(min(LOOK_S, timeout_s / 12), world / RANKS_PER_LOOK_S)
        activity.rings.append(self.ring)
        self._asked = 0  # requests that this rank has answered
        self._reason = _Reason(-1)  # of the wait in a call that is late
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="call-check", daemon=True)
        self._thread.start()

    def note(self, channel: CallChannel, facts: CallFacts, agreed: Any = None) -> int:
        """Keeps a call that begins, and returns its number.

        CommError: another rank has made a different call in its place; with ``every``, or if no
        call of these facts came before and its library might end this process for it. Or an
        earlier call of the channel failed.
        """
        if channel.broken:
            raise CommError(
                f"{facts.operation} among {channel.name} was not begun, since the ranks may be at "
                f"different calls after an error: {channel.broken}; end the program, or make a "
                "new group"
            )
        number = self.ring.note(channel, facts, agreed)
        if self._every or facts.may_abort:
            facts.may_abort = False
            self._compare_first(channel, number)
        return number

    def reason(self, number: int, patience_s: float = PATIENCE_S, ended: Sequence[int] = ()) -> str:
        """Returns why the wait in a call failed or is late; empty: the records do not show it.

        ``ended``: ranks whose processes are known to have ended.
        """
        before = self._reason if self._reason.number == number else _Reason(number)
        if before.is_settled:
            return before.text
        # When the wait became late, another rank may not have come to the call that is wrong; by
        # now it may have ended, so that what it was seen to do is all that is left.
        now = self._compared(number, min(patience_s, self._timeout_s / 4), ended)
        return now.text if now.is_settled or now.has_all else before.text or now.text

    def close(self) -> None:
        """Leaves; CommError: this rank and another one that has left made different calls."""
        if self.ring in self._activity.rings:
            self._activity.rings.remove(self.ring)
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(*FAILURES):
            self._publish(-1, has_left=True)
            if self._rank == 0:
                self._board.end()
        ranks = range(min(self._world, MOST_RECORDS))
        records: dict[int, RankCalls] = {}

        def have_left() -> bool:  # then none needs the board any more
            records.update(self._read(ranks, NEVER))
            return self._rank != 0 or len(records) == len(ranks)

        wait(have_left, LINGER_S + self._look_s, pauses(PAUSE_S))
        records[self._rank] = self._record(-1, has_left=True)
        if text := first_difference(records) or first_unmatched(records):
            raise CommError(f"the ranks did not call the same operations: {text}")

    # ---- the thread

    def _run(self) -> None:
        while not self._stopped.wait(self._look_s):
            with contextlib.suppress(*FAILURES):
                self._answer()
            self._look()

    def _answer(self) -> None:
        now = self._activity.now
        self._board.keep(range(min(self._world, MOST_RECORDS)))
        if self._board.look() != self._asked:
            self._publish(now.number if now is not None and self.ring.has(now.number) else -1)

    def _look(self) -> None:
        now, clock_s = self._activity.now, time.perf_counter()
        if now is None or not self.ring.has(now.number) or self._reason.number == now.number:
            return
        if clock_s - now.begin_s > self._timeout_s / 3:
            self._reason = late = self._compared(now.number, self._timeout_s / 4)
            if late.text and self._activity.now is now:
                log.warning("a wait is late: %s", late.text)

    # ---- the records

    def _compared(self, number: int, patience_s: float, ended: Sequence[int] = ()) -> _Reason:
        with self._lock:
            wanted, silence = self._ranks_for(number), SILENCE
            try:
                asked = self._board.ask()
                self._publish(number)
            except FAILURES:
                asked, patience_s, silence = NEVER, 0.0, LOST
            records: dict[int, RankCalls] = {}

            def are_there() -> bool:
                records.update(self._read(wanted, asked))
                records[self._rank] = self._record(number)
                ends = self._stopped.is_set() or len(records) == len(wanted)
                return ends or bool(first_difference(records))

            wait(are_there, patience_s, pauses(self._look_s))
            text = explanation(records, ended, silence)
            is_settled = bool(first_difference(records)) or text.endswith(CIRCLE)
            return _Reason(number, text, is_settled, len(records) == len(wanted))

    def _ranks_for(self, number: int) -> list[int]:
        # This rank and those of the call first; the others may be what these wait for.
        record = self.ring.record(self._rank, number)
        call = record.waiting
        near = record.channels[call.channel][1] if call is not None else []
        ranks = dict.fromkeys([self._rank, *near, *range(min(self._world, MOST_RECORDS))])
        return [*ranks][:MOST_RECORDS]

    def _publish(self, number: int, has_left: bool = False) -> None:
        record = self._record(number, has_left)
        self._asked = self._board.look()
        self._board.put(self._rank, self._asked, json.dumps(dataclasses.asdict(record)))

    def _record(self, number: int, has_left: bool = False) -> RankCalls:
        now = self._activity.now
        since_s = time.perf_counter() - (self._activity.ended_s if now is None else now.begin_s)
        record = self.ring.record(self._rank, number, since_s, has_left)
        if has_left and not self.has_failed:
            record.messages = self.ring.messages()
        return record

    def _read(self, ranks: Sequence[int], asked: int) -> dict[int, RankCalls]:
        # The records that answer a request, and those of ranks that have left.
        records = {}
        for rank, (answers, text) in self._board.get(ranks).items():
            record = read_calls(rank, json.loads(text))
            if record is not None and (answers >= asked or record.has_left):
                records[rank] = record
        return records

    def _compare_first(self, channel: CallChannel, number: int) -> None:
        # The first rank at a call leaves it on the board, and the others compare theirs.
        record = self.ring.record(self._rank, number)
        call = record.waiting
        assert call is not None
        place, text = f"{call.channel} {call.number}", json.dumps([self._rank, *call])
        first: list[Any] = [self._rank, *call]
        with contextlib.suppress(*FAILURES):
            first = json.loads(self._board.first(place, text))
        other = RankCalls(first[0], [first[1:]], {call.channel: [call.number, []]})
        if text := first_difference({first[0]: other, self._rank: record}):
            with contextlib.suppress(*FAILURES):
                self._publish(number)
            channel.broken = f"the ranks do not call the same operation: {text}"
            raise CommError(channel.broken)


class CallBoard:
    """The board as one rank has it; ``store``: a connection of its own, which no other call uses.

    It needs none of the backends, so it works while these are stuck. Its texts:

        calls of RANK      requests that the rank has answered, and its record
        request N          the records of all ranks were requested for the N-th time
        first PLACE        what the first rank that came to a place of a communicator calls there
        rank 0 leaves      so the store ends soon, and each rank keeps the records that are there

    Each method raises one of ``FAILURES`` where the store fails, but :meth:`get`.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._requests = store, 0
        self._own = deque[str]()  # places that this rank was the first at
        self._kept: dict[int, tuple[int, str]] = {}

    def put(self, rank: int, asked: int, record: str) -> None:
        """Leaves the record of a rank, which answers so many requests."""
        self._store.set(f"calls of {rank}", json.dumps([asked, record]))

    def get(self, ranks: Iterable[int]) -> dict[int, tuple[int, str]]:
        """Returns rank -> (requests that it has answered, record), of those that left one."""
        found = {}
        for rank in ranks:
            try:
                if self._store.check([f"calls of {rank}"]):
                    asked, record = json.loads(self._store.get(f"calls of {rank}"))
                    found[rank] = int(asked), str(record)
            except FAILURES:  # the store has ended
                if rank in self._kept:
                    found[rank] = self._kept[rank]
        return found

    def ask(self) -> int:
        """Requests the records of all ranks; returns the number of requests so far."""
        number = self.look() + 1
        self._store.set(f"request {number}", "")
        return number

    def look(self) -> int:
        """Returns the number of requests so far."""
        while self._store.check([f"request {self._requests + 1}"]):
            self._requests += 1
        return self._requests

    def first(self, place: str, text: str) -> str:
        """Returns the text of the first rank that came to a place; it is this one's, if it did."""
        kept = bytes(self._store.compare_set(f"first {place}", "", text)).decode()
        if kept == text:
            self._own.append(place)
            if len(self._own) > KEPT_FIRSTS:
                self._store.delete_key(f"first {self._own.popleft()}")
        return kept

    def end(self) -> None:
        """Announces that the store ends soon, on rank 0."""
        self._store.set(_END, "")

    def keep(self, ranks: Iterable[int]) -> None:
        """Keeps all records if the store ends soon."""
        if not self._kept and self._store.check([_END]):
            self._kept = self.get(ranks)


def join_check(
    meeting: WorldMeeting, timeout_s: float, activity: Activity, when: str
) -> SequenceCheck | None:
    """Returns the check of a rank; None where its ranks have not met in a store.

    ``when`` is one of ``CHECKS`` but ``off``.
    """
    if meeting.second is None:
        return None
    board, world = CallBoard(meeting.second), meeting.world
    return SequenceCheck(board, world.rank, world.size, timeout_s, activity, when == "every")
