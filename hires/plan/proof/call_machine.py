"""Defines what the calls of a program mean: the steps of ranks, and when a call is complete.

A step is one rank that begins its next call, or that leaves a call which is complete. What is
complete follows from what was begun:

    collective    the k-th call of every member on one communicator of one backend is one operation
    message       a receive takes the first message of its source and tag; one from any rank takes
                  whichever comes first, so that the outcome depends on the interleaving
    stream        (nccl) two ranks run what they posted for each other in order, a batch at a time

There are two extremes of buffering, and every library lies between them: a send ends when its
receive is posted, or at once; the root of a broadcast waits for all members, or leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from hires.plan.proof.comm_program import (
    ANY,
    COLLECTIVES,
    RECEIVES,
    SENDS,
    CommCall,
    CommProgram,
)
from hires.plan.routes import STREAMED

Op = tuple[int, int]
"""(rank, position of the call in its program)."""


class ExploredState(NamedTuple):
    """Where the ranks are; what follows from the positions alone is not in it."""

    at: tuple[int, ...]
    """Of each rank, twice the calls that it has left, plus one inside a blocking call."""
    met: tuple[tuple[Op, Op], ...] = ()
    """(send, receive) of messages that a receive from any rank has met, in order."""


class CallMachine:
    """What a program's calls mean; everything that does not depend on the state is made once."""

    def __init__(self, program: CommProgram, is_buffered: bool) -> None:
        self.program, self.is_buffered = program, is_buffered
        self.mismatches: list[str] = []
        # The calls of each operation of a communicator; those of each box of messages, by rank.
        self.meetings: dict[Any, dict[int, int]] = {}
        self.meeting_of: dict[Op, Any] = {}
        self.waited: dict[Op, list[Op]] = {}  # what a wait needs
        self.boxes: dict[Any, list[Op]] = {}  # posts of a channel, sends and receives apart
        self.place: dict[Op, int] = {}
        self.streams: dict[tuple[str, int, int], list[list[Op]]] = {}
        # (rank, backend, tag) with a receive from any rank.
        self.racing = {
            (rank, call.backend, call.tag)
            for rank, calls in enumerate(program.ranks)
            for call in calls
            if call.operation in RECEIVES and call.peer == ANY
        }
        for rank in range(len(program.ranks)):
            self._read(rank)
        for members in self.meetings.values():
            self._compare(members)
        for channel, sends in self.boxes.items():
            receives = self.boxes.get((*channel[:-1], False), []) if channel[-1] else []
            for pair in zip(sends, receives, strict=False):
                self._compare_sides(*pair)

    def call(self, op: Op) -> CommCall:
        """Returns the call at a position."""
        return self.program.ranks[op[0]][op[1]]

    def steps(self, state: ExploredState) -> Iterator[tuple[int, str, ExploredState]]:
        """Yields each rank that can take a step, the step in words, and the state after it."""
        kept: list[tuple[int, str, ExploredState]] = []
        for rank in range(len(state.at)):
            own = [*self._steps_of(rank, state)]
            if own and not self._races(rank, state):
                yield from own  # the others can wait: nothing that they do changes these steps
                return
            kept += own
        yield from kept

    def stuck(self, state: ExploredState) -> dict[int, str]:
        """Returns what each rank waits for that has not reached its end."""
        texts = {}
        for rank, at in enumerate(state.at):
            if at >= 2 * len(self.program.ranks[rank]):
                continue
            op = rank, at // 2
            for needed in self._needs(op):
                if not self._is_done(needed, state):
                    texts[rank] = f"waits in {self._words(needed, state)}"
                    break
        return texts

    def leftovers(self, state: ExploredState) -> list[str]:
        """Returns the messages that have one side, where all ranks have ended."""
        texts = []
        for channel, ops in self.boxes.items():
            for op in ops:
                if not self._is_met(op, state):
                    call = self.call(op)
                    side = "takes" if channel[-1] else "sends"
                    other = "no rank" if call.peer == ANY else f"rank {call.peer} never"
                    texts.append(f"rank {op[0]} calls {call.text}, which {other} {side}")
        return texts

    # ---- reading the program

    def _read(self, rank: int) -> None:
        counts: Counter[Any] = Counter()
        handles: dict[str, Op] = {}
        for number, call in enumerate(self.program.ranks[rank]):
            op = rank, number
            if call.operation == "wait":
                names = [call.handle] if call.handle else [*handles]
                self.waited[op] = [handles.pop(name) for name in names]
                continue
            if call.handle:
                handles[call.handle] = op
            if call.operation in COLLECTIVES:
                key = call.backend, self.program.members(call)
                counts[key] += 1
                self.meetings.setdefault((key, counts[key]), {})[rank] = number
                self.meeting_of[op] = key, counts[key]
                continue
            sends = call.operation in SENDS
            if call.backend in STREAMED:
                stream = self.streams.setdefault((call.backend, rank, call.peer), [])
                if stream and call.batch and self.call(stream[-1][-1]).batch == call.batch:
                    stream[-1].append(op)
                else:
                    stream.append([op])
                continue
            source, target = (rank, call.peer) if sends else (call.peer, rank)
            box = self.boxes.setdefault((source, target, call.backend, call.tag, sends), [])
            self.place[op] = len(box)
            box.append(op)

    def _compare(self, members: dict[int, int]) -> None:
        calls = {rank: self.call((rank, number)) for rank, number in members.items()}
        first, call = next(iter(calls.items()))
        for rank, other in calls.items():
            if other.text != call.text:
                self.mismatches.append(
                    f"rank {first} calls {call.text} over {call.backend} where rank {rank} of the "
                    f"same group calls {other.text}"
                )
                return

    def _compare_sides(self, send: Op, receive: Op) -> None:
        sent, expected = self.call(send), self.call(receive)
        if (sent.num_bytes, sent.dtype) != (expected.num_bytes, expected.dtype):
            self.mismatches.append(
                f"rank {send[0]} calls {sent.text} where rank {receive[0]} calls {expected.text}"
            )

    # ---- steps

    def _steps_of(
        self, rank: int, state: ExploredState
    ) -> Iterator[tuple[int, str, ExploredState]]:
        at, calls = state.at[rank], self.program.ranks[rank]
        if at >= 2 * len(calls):
            return
        op, call = (rank, at // 2), calls[at // 2]
        if at % 2 == 0:
            blocks = call.is_blocking
            for met in self._begun(op, state):
                yield rank, self._line(call), ExploredState(_moved(state.at, rank, 2 - blocks), met)
        elif all(self._is_done(needed, state) for needed in self._needs(op)):
            yield rank, "", ExploredState(_moved(state.at, rank, 1), state.met)

    def _begun(self, op: Op, state: ExploredState) -> list[tuple[tuple[Op, Op], ...]]:
        # The messages that have met once a call has begun: several where a receive from any rank
        # may take one of several.
        call, rank = self.call(op), op[0]
        if call.operation == "wait" or op not in self.place:
            return [state.met]
        after = ExploredState(_moved(state.at, rank, 1), state.met)
        if call.operation in SENDS and (call.peer, call.backend, call.tag) in self.racing:
            receive = self._first_receive(op, after)
            return [(*state.met, (op, receive))] if receive else [state.met]
        if call.operation in RECEIVES and (rank, call.backend, call.tag) in self.racing:
            sends = self._waiting_sends(op, after)
            return [(*state.met, (send, op)) for send in sends] or [state.met]
        return [state.met]

    def _first_receive(self, send: Op, state: ExploredState) -> Op | None:
        """Returns the oldest receive that a message of a racing box meets, if one is posted."""
        call, taken = self.call(send), {receive for _, receive in state.met}
        for number in range(len(self.program.ranks[call.peer])):
            op = call.peer, number
            if op in taken or not self._has_begun(op, state):
                continue
            other = self.call(op)
            fits = (other.backend, other.tag) == (call.backend, call.tag)
            if other.operation in RECEIVES and fits and other.peer in (ANY, send[0]):
                return op
        return None

    def _waiting_sends(self, receive: Op, state: ExploredState) -> list[Op]:
        """Returns the oldest message of each source that a receive of a racing box may take."""
        call, taken = self.call(receive), {send for send, _ in state.met}
        sources = range(len(state.at)) if call.peer == ANY else [call.peer]
        found = []
        for source in sources:
            box = self.boxes.get((source, receive[0], call.backend, call.tag, True), ())
            waits = [op for op in box if op not in taken and self._has_begun(op, state)]
            found += waits[:1]
        return found

    def _races(self, rank: int, state: ExploredState) -> bool:
        """Whether the next step of a rank posts into a box with a receive from any rank."""
        at = state.at[rank]
        call = self.program.ranks[rank][at // 2]
        if at % 2 or (rank, at // 2) not in self.place:
            return False
        target = call.peer if call.operation in SENDS else rank
        return (target, call.backend, call.tag) in self.racing

    # ---- what is complete

    def _has_begun(self, op: Op, state: ExploredState) -> bool:
        return state.at[op[0]] > 2 * op[1]

    def _needs(self, op: Op) -> list[Op]:
        # The operations whose end a rank waits for inside a call.
        return self.waited.get(op, [op])

    def _is_done(self, op: Op, state: ExploredState) -> bool:
        call = self.call(op)
        if op in self.meeting_of:
            members = self.meetings[self.meeting_of[op]]
            if self.is_buffered and self._leaves_early(op[0], call):
                return True
            all_ranks = self.program.members(call)
            return all(r in members and self._has_begun((r, members[r]), state) for r in all_ranks)
        if self.is_buffered and call.operation in SENDS and op in self.place:
            return True
        return self._is_met(op, state)

    def _leaves_early(self, rank: int, call: CommCall) -> bool:
        if call.operation in ("broadcast", "scatter"):
            return rank == call.peer
        return call.operation in ("reduce", "gather") and rank != call.peer

    def _is_met(self, op: Op, state: ExploredState) -> bool:
        call, rank = self.call(op), op[0]
        if call.backend in STREAMED:
            return self._stream_reaches(op, state)
        sends = call.operation in SENDS
        target = call.peer if sends else rank
        if (target, call.backend, call.tag) in self.racing:
            return any(op in pair for pair in state.met)
        source = rank if sends else call.peer
        other = self.boxes.get((source, target, call.backend, call.tag, not sends), [])
        place = self.place[op]
        return len(other) > place and self._has_begun(other[place], state)

    def _stream_reaches(self, op: Op, state: ExploredState) -> bool:
        # Both ranks run their units for each other in order: a unit ends when each of its posts has
        # met one of the unit that stands first on the other side.
        call, rank = self.call(op), op[0]
        here = self.streams[call.backend, rank, call.peer]
        there = self.streams.get((call.backend, call.peer, rank), [])
        sides = [[*unit] for unit in here], [[*unit] for unit in there]
        first = [0, 0]
        while first[0] < len(here) and first[1] < len(there):
            own, other = sides[0][first[0]], sides[1][first[1]]
            pair = next(
                (
                    (a, b)
                    for a in own
                    for b in other
                    if (self.call(a).operation in SENDS) != (self.call(b).operation in SENDS)
                    and self._has_begun(here[first[0]][-1], state)
                    and self._has_begun(there[first[1]][-1], state)
                ),
                None,
            )
            if pair is None:
                return False
            own.remove(pair[0])
            other.remove(pair[1])
            first[0] += not own
            first[1] += not other
            if not own and op in here[first[0] - 1]:
                return True
        return False

    # ---- words

    def _line(self, call: CommCall) -> str:
        where = "" if call.operation == "wait" else f" over {call.backend}"
        begin = f"{call.handle} = " if call.handle and call.operation != "wait" else ""
        return f"{begin}{call.text}{where}"

    def _words(self, op: Op, state: ExploredState) -> str:
        call = self.call(op)
        text = f"{call.text} over {call.backend}"
        if op in self.meeting_of:
            members = self.meetings[self.meeting_of[op]]
            absent = [
                rank
                for rank in self.program.members(call)
                if rank not in members or not self._has_begun((rank, members[rank]), state)
            ]
            listed = " and ".join(map(str, absent))
            never = " and never does" if all(rank not in members for rank in absent) else ""
            return f"{text}, to which rank {listed} has not come{never}"
        return text


def _moved(at: tuple[int, ...], rank: int, steps: int) -> tuple[int, ...]:
    return (*at[:rank], at[rank] + steps, *at[rank + 1 :])
