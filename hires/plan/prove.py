"""Proves a plan before any rank starts: the events of a step have an order in which all end.

Where they have none, it says which rank waits for which. All ranks begin sums of gradients in the
order of the plan, however early a gradient is ready, so that order is proved with all others. Only
where an order is free (:mod:`hires.core.gradient_orders`) a rank may begin those between two waits
in any order, and two such ranks are proved, too.
"""

from __future__ import annotations

import gc
import graphlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hires.core.gradient_orders import is_free
from hires.plan.event import ALONE, MEETING, WORLD, Event
from hires.plan.groups import gradient_group, groups
from hires.plan.plan import Finding, Plan
from hires.plan.program import events
from hires.plan.rank_kinds import equal_programs, replicas_apart
from hires.plan.step_order import (
    MESSAGE,
    OTHER,
    Node,
    RankEvent,
    StepGraph,
    prove_merged,
    reached,
    tag_of,
)
from hires.plan.traffic import backends_of_plan, calls, counted_events

SHOWN = 8
"""Most problems that become findings."""


@dataclass
class Verdict:
    """The proof of a whole plan."""

    backends: list[str]
    """Those that carry its messages."""
    problems: list[str]
    """Why the events have no such order; nothing: they have one."""
    messages: int
    collectives: int
    seconds: float

    @property
    def text(self) -> str:
        """The answer, without the reasons."""
        if self.problems:
            return f"problems: {len(self.problems)}"
        return f"deadlock-free, {self.messages} messages and {self.collectives} collectives a step"

    @property
    def findings(self) -> list[Finding]:
        """The first problems, as errors."""
        return [Finding("error", "parallel", text) for text in self.problems[:SHOWN]]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for ``hires plan --prove --json``."""
        return {**vars(self), "ok": not self.problems}


def judged(plan: Plan) -> Verdict:
    """Returns the verdict on one step of a plan, after the creation of its groups.

    Replicas do the same and meet in the gradient groups only, at the end of the step, so one stands
    for all that nodes divide alike; the groups are cut down to its ranks.
    """
    began = time.perf_counter()
    was_on = gc.isenabled()
    gc.disable()  # a search for cycles, which events cannot have, would visit all of them
    try:
        found = (_problems_of(plan, first) for first in replicas_apart(plan))
        problems = next(filter(None, found), []) or problems_of_readiness(plan)
    finally:
        if was_on:
            gc.enable()
    took = time.perf_counter() - began
    counts = {True: 0, False: 0}
    for call, number in calls(plan).items():
        counts[call.operation == "send"] += number // call.num_ranks
    return Verdict(backends_of_plan(plan), problems, counts[True], counts[False], took)


def _problems_of(plan: Plan, first: int) -> list[str]:
    ranks = range(first, first + plan.ranks_per_replica)
    members = [[rank for rank in group if rank in ranks] for group in groups(plan)]

    def begun() -> list[Iterator[Event]]:
        programs = (counted_events(plan, rank) for rank in ranks)
        return [
            chain(creation(members, rank), (event for event in program if event.role != ALONE))
            for rank, program in zip(ranks, programs, strict=True)
        ]

    if prove_merged(begun(), members, equal_programs(plan, first), first):
        return []
    return prove_each([[*program] for program in begun()], members, first)


def problems_of_readiness(plan: Plan) -> list[str]:
    """Returns why ranks whose gradients get ready in different orders wait for each other.

    Any two sums that a rank may begin in either order are begun in both by two ranks of which one
    begins those between two waits backwards. Without a bound a rank may have any number of sums to
    carry at once. No library promises that, so one at a time is carried, each to its end:

        rank 0   sum 0 ....    (then 1, 2)        needs sum 0 of rank 1, which carries sum 2
        rank 1   sum 2 ....    (then 1, 0)        needs sum 2 of rank 0, which carries sum 0
    """
    for stage in plan.stages if plan.training and is_free(plan.gradients) else ():
        holders = groups(plan)[gradient_group(plan, stage.index)]
        words = f"gradients of stage {stage.index}"
        own = [e for e in events(plan, holders[0]) if e.role in ("issue", "wait_issued")]
        own = [event for event in own if event.what.startswith(f"{words},")]
        programs = dict.fromkeys(holders[:: len(holders) - 1 or 1], own)
        for rank in [*programs][1:]:
            runs = itertools.groupby(own, lambda event: event.role)
            turned = ([*run][::-1] if role == "issue" else run for role, run in runs)
            programs[rank] = [*chain.from_iterable(turned)]
        if not plan.outstanding:
            programs = {rank: [*_one_by_one(some)] for rank, some in programs.items()}
        largest = max((event.peer for some in programs.values() for event in some), default=0)
        if found := prove_each(programs, [[*programs]] * (largest + 1)):
            return [
                f"comm.gradient_order={plan.gradients} with comm.outstanding="
                f"{plan.outstanding or 'null'}, and gradients that are ready in another order on "
                f"rank {[*programs][-1]} than on rank {holders[0]}: {found[0]}; use "
                f"comm.outstanding=2, or comm.gradient_order=chain"
            ]
    return []


def _one_by_one(own: Iterable[Event]) -> Iterator[Event]:
    for event in own:
        if event.role == "issue":  # on a communicator of its own
            alone = event._replace(peer=event.tag)
            yield from (alone, alone._replace(kind="wait_issued"))


def creation(members: list[list[int]], rank: int) -> Iterator[Event]:
    """Yields the groups that a rank creates before the first step, in their order."""
    for index, ranks in enumerate(members):
        if rank in ranks and len(ranks) > 1:
            yield Event("create", index, 0, what=f"the creation of group {index}")


def prove_each(
    programs: Sequence[Sequence[Event]] | Mapping[int, Sequence[Event]],
    members: Sequence[Sequence[int]],
    first: int = 0,
) -> list[str]:
    """Returns the problems of one list of events per rank, in time in proportion to their number.

    The ranks of a sequence are numbered from ``first`` on. There are none if every rank reaches its
    end with every message received.
    """
    by_rank = programs if isinstance(programs, Mapping) else enumerate(programs, start=first)
    return Steps(dict(by_rank), members).problems


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
                    words = f"{event.words} from rank {event.peer}"
                    problems.append(f"rank {rank} never waits for {words}")
        for meeting, came in self.step.came.items():
            present = self._present(meeting)
            absent = [rank for rank in self._members(meeting) if rank not in came]
            if present and absent:
                rank, event = present[0]
                missing = f"rank {_listed(absent)} of its group never does"
                problems.append(f"rank {rank} calls {event.words}, but {missing}")
        if self.standing and len(problems) == compared and not compared:
            problems.append(f"no end: {chain}")

    def _followed(self) -> tuple[list[Node], bool]:
        """Returns ranks and units that each wait for the next, and if the last one for the first.

        Every node needs all that it waits for, so any cycle is a deadlock. Without one it is the
        way from the first rank.
        """
        unreached = {
            node: [other for other in behind if other not in self.reached]
            for node, behind in self.step.graph.items()
            if node not in self.reached
        }
        path: list[Node] = [wait.node for wait in self.standing.values()][:1]
        try:
            graphlib.TopologicalSorter(unreached).prepare()
        except graphlib.CycleError as error:
            cycle = error.args[1][::-1]  # its first one stands at both ends
            found = [one for pair in itertools.pairwise(cycle) for one in self._waiter(*pair)]
            waiters = [one for one, _ in itertools.groupby(found)]
            waiters = waiters[:-1] if waiters[1:] and waiters[0] == waiters[-1] else waiters
            order = [(self._rank_of(one), not isinstance(one, int)) for one in waiters]
            first = order.index(min(order))
            return waiters[first:] + waiters[:first], True
        while path and unreached.get(path[-1]):
            path.append(unreached[path[-1]][0])
        pairs = itertools.zip_longest(path, path[1:])
        found = [one for pair in pairs for one in self._waiter(*pair)]
        return [one for one, _ in itertools.groupby(found)], False

    def _waiter(self, node: Node, behind: Node) -> list[Node]:
        """Returns the rank, or unit that has begun, that holds up a node behind another one."""
        if node in self.step.units:
            return [node] if ("head", self.step.units[node].posts[0][0]) in self.reached else []
        if node in self.step.came:
            came = self.step.came[node].items()
            return [rank for rank, before in came if before == behind][:1]
        if node in self.step.events:
            return [self.step.events[node][0]]
        return [node[0]] if isinstance(node[0], int) else []

    def _rank_of(self, waiter: Node) -> int:
        return waiter if isinstance(waiter, int) else self.step.units[waiter].rank

    def _sentence(self, waiter: Node) -> str:
        if not isinstance(waiter, int):
            unit = self.step.units[waiter]
            post = next(event for post, event in unit.posts if not self._has_met(post))
            verb, side = ("send", "to") if post.role == "send" else ("receive", "from")
            return (
                f"the stream of rank {unit.rank} must first {verb} {post.words} {side} "
                f"rank {post.peer}"
            )
        wait = self.standing[waiter]
        event, waits = wait.event, f"rank {waiter} waits for"
        words = event.words
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
        return f"{waits} rank {others} to receive {' and '.join(send.words for send in sends)}"

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
            words = event.words
            problems.append(
                f"rank {source} sends {words} to rank {target}, which never receives it"
                if more is sends
                else f"rank {target} expects {words} from rank {source}, which never sends it"
            )
        return problems


def _by(event: Event, other: Event) -> str:
    return f" by {event.route}" if event.route != other.route else ""


def _listed(ranks: Iterable[int]) -> str:
    return " and ".join(map(str, ranks))
