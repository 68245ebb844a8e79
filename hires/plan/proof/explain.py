"""Explains why the ranks of a step do not come to their end: which waits for which, in words."""

from __future__ import annotations

import graphlib
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hires.plan.event import MEETING, OF_MESSAGES, WORLD, Event
from hires.plan.proof.step_order import (
    MESSAGE,
    OTHER,
    Node,
    RankEvent,
    StepGraph,
    reached,
    tag_of,
)


def prove_each(
    programs: Sequence[Sequence[Event]], members: Sequence[Sequence[int]], first: int = 0
) -> list[str]:
    """Returns the problems of one list of events per rank, in time in proportion to their number.

    The ranks are numbered from ``first`` on. There are none if every rank reaches its end with
    every message received.
    """
    return Steps(dict(enumerate(programs, start=first)), members).problems


class Steps:
    """All events of all ranks as nodes of their own, and those that are reached."""

    standing: dict[int, RankEvent]
    """Ranks that never reach their end, and where each of them stands."""

    def __init__(
        self, programs: Mapping[int, Sequence[Event]], members: Sequence[Sequence[int]]
    ) -> None:
        self.groups = {index: [*dict.fromkeys(ranks)] for index, ranks in enumerate(members)}
        self.groups[WORLD] = [*programs]
        self.programs, self.step = programs, StepGraph()
        self.problems: list[str] = []
        self.read = {rank: self.step.read(rank, self._own(rank)) for rank in programs}
        for meeting, came in self.step.came.items():
            absent = [rank for rank in self._members(meeting) if rank not in came]
            self.step.graph[meeting] += [("absent", rank, meeting) for rank in absent]
        self.reached = reached(self.step.graph)
        self.standing = {}
        for rank, program in self.read.items():
            wait = next((one for one in program.waits if one.node not in self.reached), None)
            if wait is not None:
                self.standing[rank] = wait
        self._compare()
        is_open = not all(map(self._has_met, self.step.events))
        if self.standing or is_open or any(program.unread for program in self.read.values()):
            self._explain()

    def _own(self, rank: int) -> Iterator[Event]:
        """Yields the events of a rank but the collectives of groups that it is no member of."""
        for event in self.programs[rank]:
            group = self.groups.get(event.peer, [])
            if event.role in (MEETING, "issue") and rank not in group:
                self.problems.append(
                    f"rank {rank} is no member of the group {group} of {event.words}"
                )
            else:
                yield event

    def _members(self, meeting: Node) -> list[int]:
        return self.groups[meeting[1]]

    def _compare(self) -> None:
        """Compares what the sides of messages and collectives say that have met."""
        problems = self.problems
        for post, (source, send) in self.step.events.items():
            if send.role != "send" or not self._has_met(post):
                continue
            target, receive = self.step.events[OTHER["send"], post[1]]
            if send.agreed != receive.agreed:
                problems.append(
                    f"rank {source} sends {send.words} as {list(send.shape)} {send.dtype}"
                    f"{_by(send, receive)} where rank {target} expects {receive.words} as "
                    f"{list(receive.shape)} {receive.dtype}{_by(receive, send)}"
                )
        for meeting in self.step.came:
            if meeting not in self.reached:
                continue
            (first_rank, first), *others = self._present(meeting)
            for rank, event in others:
                if event != first:
                    problems.append(
                        f"rank {first_rank} calls {first.words} {list(first.shape)}"
                        f"{_by(first, event)} where rank {rank} of the same group calls "
                        f"{event.words} {list(event.shape)}{_by(event, first)}"
                    )

    def _has_met(self, post: Node) -> bool:
        """Whether both sides of a message are under way."""
        return (MESSAGE, post[1]) in self.reached

    def _present(self, meeting: Node) -> list[tuple[int, Event]]:
        """Returns the ranks that have come to a collective, and what each calls there."""
        _, group, backend, number = meeting
        return [
            (rank, self.read[rank].meetings[group, backend][number])
            for rank, before in self.step.came[meeting].items()
            if before is None or before in self.reached
        ]

    def _explain(self) -> None:
        """Adds a sentence for each thing that is wrong."""
        self.backends: dict[Hashable, set[str]] = defaultdict(set)
        for event in itertools.chain.from_iterable(self.programs.values()):
            self.backends[_likeness(event)].add(event.backend)
        problems = self.problems
        compared = len(problems)
        path, is_cycle = self._followed()
        chain = "; ".join(map(self._sentence, path))
        if is_cycle:
            problems.append(f"deadlock: {chain}")
        problems += self._one_sided()
        for program in self.read.values():
            for post, event in program.unread:
                if self._has_met(post):
                    rank = self.step.events[post][0]
                    words = f"{self._words(event)} from rank {event.peer}"
                    problems.append(f"rank {rank} never waits for {words}")
        for meeting, came in self.step.came.items():
            present = self._present(meeting)
            absent = [rank for rank in self._members(meeting) if rank not in came]
            if present and absent:
                rank, event = present[0]
                missing = f"rank {_listed(absent)} of its group never does"
                problems.append(f"rank {rank} calls {self._words(event)}, but {missing}")
        if self.standing and len(problems) == compared and not compared:
            problems.append(f"no end: {chain}")

    def _followed(self) -> tuple[list[Node], bool]:
        """Returns nodes that each wait for the next, and whether the last waits for the first.

        Every node needs all that it waits for, so any cycle is a deadlock. Without one it is the
        way from the first rank. Nodes are ranks and, on streams, ends of units that have begun.
        """
        blockers: dict[Node, list[Node]] = {}
        todo: list[Node] = [*self.standing][::-1]
        while todo:
            node = todo.pop()
            if node not in blockers:
                blockers[node] = self._blockers(node)
                todo += reversed(blockers[node])
        try:
            graphlib.TopologicalSorter(blockers).prepare()
        except graphlib.CycleError as error:
            cycle: list[Node] = error.args[1][:0:-1]  # its first one stands at both ends
            first = cycle.index(
                min(cycle, key=lambda node: (self._rank_of(node), not isinstance(node, int)))
            )
            return cycle[first:] + cycle[:first], True
        path: list[Node] = [*self.standing][:1]
        while path and blockers[path[-1]]:
            path.append(blockers[path[-1]][0])
        return path, False

    def _blockers(self, waiter: Node) -> list[Node]:
        """Returns the ranks and units that a rank or unit waits for."""
        node = self.standing[waiter].node if isinstance(waiter, int) else waiter
        if node in self.step.came:
            return self._waiters(node)
        behind = (self._waiters(other) for other in self.step.graph[node])
        return [*dict.fromkeys(one for waiters in behind for one in waiters)]

    def _waiters(self, node: Node) -> list[Node]:
        """Returns the ranks and units that hold up a node; none if it is reached or never comes."""
        step, is_open = self.step, node not in self.reached and isinstance(node, tuple)
        while is_open:
            if node in step.units:
                unit = step.units[node]
                if ("head", unit.posts[0][0]) in self.reached:
                    return [node]
                node = ("head", unit.posts[0][0])
            elif node[0] in ("head", MESSAGE):
                unmet = [other for other in step.graph.get(node, ()) if other not in self.reached]
                if not unmet:  # of a post that no rank has
                    return []
                node = unmet[0]
            elif node in step.events:
                return [step.events[node][0]]
            elif node in step.came:
                came = step.came[node].items()
                return [rank for rank, before in came if not self._is_past(before)]
            else:
                return [node[0]] if isinstance(node[0], int) else []
        return []

    def _is_past(self, node: Node | None) -> bool:
        return node is None or node in self.reached

    def _rank_of(self, waiter: Node) -> int:
        return waiter if isinstance(waiter, int) else self.step.units[waiter].rank

    def _sentence(self, waiter: Node) -> str:
        if not isinstance(waiter, int):
            unit = self.step.units[waiter]
            post = next(event for post, event in unit.posts if not self._has_met(post))
            verb, side = ("send", "to") if post.role == "send" else ("receive", "from")
            return (
                f"the stream of rank {unit.rank} must first {verb} {self._words(post)} {side} "
                f"rank {post.peer}"
            )
        wait = self.standing[waiter]
        event, waits = wait.event, f"rank {waiter} waits for"
        words = self._words(event)
        if wait.meeting is not None:
            if wait.meeting not in self.step.came:
                return f"{waits} {words}, which it has not begun"
            came = {rank for rank, _ in self._present(wait.meeting)}
            absent = _listed(rank for rank in self._members(wait.meeting) if rank not in came)
            return f"{waits} rank {absent} to join {words}"
        if event.role == "wait_recv":
            tail = ", which it has not begun to receive" if wait.is_early else ""
            return f"{waits} {words} from rank {event.peer}{tail}"
        unmet = [send for end, send in wait.messages if end not in self.reached]
        first = {(send.peer, tag_of(send)): send for send in reversed(unmet)}
        sends = [send for send in unmet if first[send.peer, tag_of(send)] is send]
        others = _listed(dict.fromkeys(send.peer for send in sends))
        return f"{waits} rank {others} to receive {' and '.join(map(self._words, sends))}"

    def _one_sided(self) -> list[str]:
        """Returns what one side posts more often; of several what the other does not name."""
        sides: dict[tuple[Any, ...], tuple[list[Event], list[Event]]] = {}
        for post, (_, event) in self.step.events.items():
            _, (*ends, _) = post
            sides.setdefault(tuple(ends), ([], []))[event.role == "recv"].append(event)
        problems = []
        for (source, target, _), (sends, receives) in sides.items():
            more, fewer = (sends, receives) if len(sends) > len(receives) else (receives, sends)
            if len(more) == len(fewer):
                continue
            named = {event.what for event in fewer}
            event = next((event for event in more if event.what not in named), more[len(fewer)])
            words = self._words(event)
            problems.append(
                f"rank {source} sends {words} to rank {target}, which never receives it"
                if more is sends
                else f"rank {target} expects {words} from rank {source}, which never sends it"
            )
        return problems

    def _words(self, event: Event) -> str:
        """Returns the words of an event, with its backend where another one carries the like."""
        several = len(self.backends[_likeness(event)]) > 1
        return f"{event.words} through {event.backend}" if several else event.words


def _likeness(event: Event) -> Hashable:
    # A message and its waits, or all that a group does.
    return (event.tag, event.what) if event.role in OF_MESSAGES else event.peer


def _by(event: Event, other: Event) -> str:
    return f" by {event.route}" if event.route != other.route else ""


def _listed(ranks: Iterable[int]) -> str:
    return " and ".join(map(str, ranks))
