"""Explains why ranks do not come to their end: which rank waits for which, in words."""

from __future__ import annotations

import graphlib
from collections.abc import Hashable, Iterable

from hires.plan.event import MEETINGS, POSTS, Event
from hires.plan.proof.machine import OTHER, AbstractMachine, Waiter, on_stream

GATHERED = (*MEETINGS, "wait_issued")
"""Events that end when all members of a group have come."""


class Explanation:
    """What keeps ranks from their end in a machine that has got as far as it gets."""

    def __init__(self, machine: AbstractMachine) -> None:
        self.machine = machine
        # The events that stuck ranks have not passed, by (kind, rank, peer or group), in order.
        self.coming: dict[tuple[str, int, int], list[Event]] = {}
        for rank in machine.proof.stuck:
            for event in machine.programs[rank][machine.at[rank] :]:
                self.coming.setdefault((event.kind, rank, event.peer), []).append(event)

    def problems(self) -> list[str]:
        """Returns a sentence for each thing that is wrong."""
        machine, stuck = self.machine, self.machine.proof.stuck
        path, is_circle = self._followed()
        chain = "; ".join(map(self._sentence, path))
        problems = [f"deadlock: {chain}"] if is_circle else []
        if stuck or machine.num_open:
            problems += self._one_sided()
        for (source, target, _), arrived in machine.arrived.items():
            waits = self.coming.get(("wait_recv", target, source), ())
            if arrived and all(
                machine.tag_of(wait) != machine.tag_of(arrived[0]) for wait in waits
            ):
                text = (
                    f"rank {target} never waits for {machine.words(arrived[0])} from rank {source}"
                )
                problems.append(text)
        for present in machine.meeting.values():
            rank, event = next(iter(present.items()))
            members = machine.members[event.peer]
            if absent := [m for m in members if m not in present and not self._meets(m, event)]:
                missing = f"rank {_listed(absent)} of its group never does"
                problems.append(f"rank {rank} calls {machine.words(event)}, but {missing}")
        if stuck and not problems and not machine.proof.problems:
            problems.append(f"no end: {chain}")
        return problems

    def _followed(self) -> tuple[list[Waiter], bool]:
        """Returns waiters that each wait for the next, and whether the last waits for the first.

        Every waiter needs all that it waits for, so any circle is a deadlock. Without one it is
        the way from the first waiter.
        """
        stuck = [Waiter(rank) for rank in self.machine.proof.stuck]
        blockers: dict[Waiter, list[Waiter]] = {}
        todo = stuck[::-1]
        while todo:
            waiter = todo.pop()
            if waiter not in blockers:
                blockers[waiter] = self._blockers(waiter)
                todo += reversed(blockers[waiter])
        try:
            graphlib.TopologicalSorter(blockers).prepare()
        except graphlib.CycleError as error:
            circle: list[Waiter] = error.args[1][:0:-1]  # its first one stands at both ends
            first = circle.index(min(circle, key=lambda one: (one.rank, one.peer is not None)))
            return circle[first:] + circle[:first], True
        path = stuck[:1]
        while path and blockers[path[-1]]:
            path.append(blockers[path[-1]][0])
        return path, False

    def _blockers(self, waiter: Waiter) -> list[Waiter]:
        """Returns what holds a waiter up and cannot go on itself."""
        machine, rank = self.machine, waiter.rank
        if waiter.peer is not None:
            return self._stream_blockers(waiter)
        event = machine.next_of(rank)
        assert event is not None
        if event.kind in GATHERED:
            absent = machine.absent(rank, event)
            return [Waiter(other) for other in absent if self._meets(other, event)]
        if self._is_too_early(rank, event):
            receives = self.coming.get(("recv", rank, event.peer), ())
            return [waiter] if any(receive.tag == event.tag for receive in receives) else []
        posts, kind, needed = [event], "recv", "send"
        if event.kind == "send":  # to a mailbox that is full
            kind, needed = "send", "wait_recv"
        elif event.kind != "wait_recv":
            posts, kind, needed = machine.unmet(rank, event), "send", "recv"
        held = [p for p in posts if on_stream(p)]
        # A stream of one tag waits for nothing but the messages that the rank waits for.
        comes = [p for p in posts if p not in held and self._comes(needed, p.peer, rank, p)]
        streams = [machine.stream_of(rank, post.peer, post, kind) for post in held]
        return streams + [Waiter(post.peer) for post in comes if rank not in machine.halted]

    def _stream_blockers(self, stream: Waiter) -> list[Waiter]:
        machine, rank = self.machine, stream.rank
        holders = []
        for post in machine.streams[stream][0].open:
            # The other side stands on its stream behind another unit, or was not posted yet.
            kind = OTHER[post.kind]
            facing = machine.stream_of(post.peer, rank, post, kind)
            behind = [*machine.streams.get(facing, ())][1:]
            if any(other.kind == kind for unit in behind for other in unit.posts):
                holders.append(facing)
            elif self._comes(kind, post.peer, rank, post):
                holders.append(Waiter(post.peer))
        return holders

    def _comes(self, kind: str, rank: int, peer: int, message: Event) -> bool:
        """Whether a stuck rank would come to such an event for a message, if it went on."""
        way = self.machine.way
        return any(way(one) == way(message) for one in self.coming.get((kind, rank, peer), ()))

    def _meets(self, rank: int, event: Event) -> bool:
        """Whether a stuck rank would come to a collective where others are, or begin a sum."""
        machine = self.machine
        return any(
            machine.communicator(other) == machine.communicator(event)
            for kind in (*MEETINGS, "issue")
            for other in self.coming.get((kind, rank, event.peer), ())
        )

    def _is_too_early(self, rank: int, event: Event) -> bool:
        """Whether a rank waits for a message that it has not begun to receive."""
        past = self.machine.programs[rank][: self.machine.at[rank]]
        own = [other.kind for other in past if other[1:3] == event[1:3]]
        return event.kind == "wait_recv" and own.count("recv") <= own.count("wait_recv")

    def _sentence(self, waiter: Waiter) -> str:
        machine, rank = self.machine, waiter.rank
        if waiter.peer is not None:
            post = machine.streams[waiter][0].open[0]
            verb = (
                f"send {machine.words(post)} to"
                if post.kind == "send"
                else f"receive {machine.words(post)} from"
            )
            return f"the stream of rank {rank} must first {verb} rank {post.peer}"
        event = machine.next_of(rank)
        assert event is not None
        waits = f"rank {rank} waits for"
        if event.kind in GATHERED:
            absent = machine.absent(rank, event)
            if not absent:
                return f"{waits} {machine.words(event)}, which it has not begun"
            return f"{waits} rank {_listed(absent)} to join {machine.words(event)}"
        if event.kind == "wait_recv":
            early = self._is_too_early(rank, event)
            tail = ", which it has not begun to receive" if early else ""
            return f"{waits} {machine.words(event)} from rank {event.peer}{tail}"
        if event.kind == "send":
            room = f"to make room for {machine.words(event)}"
            return f"{waits} rank {event.peer} to read older messages, {room}"
        sends = machine.unmet(rank, event)
        others = _listed(dict.fromkeys(send.peer for send in sends))
        words = " and ".join(map(machine.words, sends))
        return f"{waits} rank {others} to receive {words}"

    def _one_sided(self) -> list[str]:
        """Returns the messages that one side posts more often than the other in its whole program.

        Of several the first that the other side does not name at all is the one that is named.
        """
        sides: dict[tuple[int, int, Hashable], tuple[list[Event], list[Event]]] = {}
        for rank, program in enumerate(self.machine.programs):
            for event in program:
                if event.kind in POSTS:
                    sending = event.kind == "send"
                    ends = (rank, event.peer) if sending else (event.peer, rank)
                    way = self.machine.way(event)
                    sides.setdefault((*ends, way), ([], []))[not sending].append(event)
        problems = []
        for (source, target, _), (sends, receives) in sides.items():
            more, fewer = (sends, receives) if len(sends) > len(receives) else (receives, sends)
            if len(more) == len(fewer):
                continue
            named = {event.what for event in fewer}
            event = next((event for event in more if event.what not in named), more[len(fewer)])
            words = self.machine.words(event)
            problems.append(
                f"rank {source} sends {words} to rank {target}, which never receives it"
                if more is sends
                else f"rank {target} expects {words} from rank {source}, which never sends it"
            )
        return problems


def _listed(ranks: Iterable[int]) -> str:
    return " and ".join(map(str, ranks))
