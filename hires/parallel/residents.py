"""Executes several ranks of a plan in one process, one at a time, each until it has to wait.

A resident is a rank of the plan that a thread of this process executes. It hands its turn on where
a message is not there yet, or where a collective still lacks other ranks:

    rank 0   conv1 . sends rows, needs some: waits |                   | conv1's border . norm1 ...
    rank 1                                         | conv1 . sends ... |

Between residents a message is a copy, and a collective is computed by the last that comes to it,
over the processes where other ranks have a part of it. So each passes through its program as if it
were alone in a process, and the plan and its proof are those of any layout. What belongs to the
process is there once: parameters, to whose gradients the residents add in turn, the optimiser, and
the update of a step, which begins when all residents have done their passes.

    process    barrier  begin  | passes of rank 0, 1, ... |  sums of gradients  statistics  optimise
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hires.comm import CommWorld, Group, activity, all_gather_stacked, all_reduce, post
from hires.core.errors import CommError
from hires.core.ranks.timeline import Recorder
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.executor import Executor, StepResult
from hires.plan.event import Event
from hires.plan.groups import groups, held_stages
from hires.plan.plan import Plan
from hires.plan.program import begin_events, pass_events, update_events

PASSES = "passes"
"""The event of a process at which its residents execute theirs."""
_PAUSE_S = 1e-4
"""Between two looks at messages of other processes, while no resident can go on."""


class _StoppedError(Exception):
    """Ends a resident where another one has failed."""


class Turns:
    """Threads of which one runs at a time, until it waits or ends."""

    def __init__(self, ranks: Sequence[int], limit_s: float) -> None:
        self._ranks, self._limit_s = [*ranks], limit_s
        self._go = {rank: threading.Semaphore(0) for rank in ranks}
        # Of those that wait: what has to be true before they go on, and in words.
        self._waits: dict[int, tuple[Callable[[], bool], str]] = {}
        self._error: BaseException | None = None

    def run(self, jobs: Mapping[int, Callable[[], Any]]) -> None:
        """Runs a job of each rank to its end; raises the error of the first that failed."""
        self._error, self._waits = None, dict.fromkeys(jobs, (lambda: True, ""))
        threads = [
            threading.Thread(target=self._run, args=one, name=f"resident {one[0]}", daemon=True)
            for one in jobs.items()
        ]
        for thread in threads:
            thread.start()
        self._hand_on(self._ranks[-1])
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Returns when something is ready and it is this rank's turn; the others run meanwhile."""
        if not ready():
            self._waits[rank] = ready, what
            self._hand_on(rank)
            self._go[rank].acquire()
        if self._error is not None:
            raise _StoppedError

    def _run(self, rank: int, job: Callable[[], Any]) -> None:
        self._go[rank].acquire()
        try:
            if self._error is None:
                job()
        except _StoppedError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._hand_on(rank)

    def _hand_on(self, rank: int) -> None:
        # To the next one behind this rank that can go on. None can: they all wait for other
        # processes, which is no deadlock of this one.
        first = self._ranks.index(rank) + 1
        order = self._ranks[first:] + self._ranks[:first]
        until, outer = time.monotonic() + self._limit_s, None
        while self._waits:
            for other in order:
                if other in self._waits and (self._error is not None or self._waits[other][0]()):
                    del self._waits[other]
                    if outer is not None:
                        activity.end(outer[0])
                    self._go[other].release()
                    return
            if outer is None:
                what = "; ".join(f"rank {r} of it: {text}" for r, (_, text) in self._waits.items())
                outer = (activity.begin(f"what other processes send ({what})", -1, -1),)
            if time.monotonic() > until:
                self._error = CommError(f"no message came in {self._limit_s:g} s, for {what}")
            time.sleep(_PAUSE_S)


class _Message:
    """One side of a message between two residents; the later side copies."""

    def __init__(self, hub: Hub, rank: int, event: Event, tensor: Tensor) -> None:
        self.tensor, self.sends, self.is_done = tensor, event.kind == "send", False
        self._wait = functools.partial(hub.turns.wait, rank, lambda: self.is_done, event.what)

    def meet(self, other: _Message) -> None:
        source, target = (self, other) if self.sends else (other, self)
        assert source.tensor.shape == target.tensor.shape, "the plan gives both sides one shape"
        target.tensor.copy_(source.tensor)
        self.is_done = other.is_done = True

    def wait(self) -> None:
        """Returns when the other side has come."""
        self._wait()


class _RemoteMessage:
    """A message between a resident and a rank of another process."""

    def __init__(self, hub: Hub, rank: int, event: Event, handle: Any) -> None:
        self._handle = handle
        self._wait = functools.partial(hub.turns.wait, rank, handle.is_completed, event.what)

    def wait(self) -> None:
        """Returns when it is complete."""
        self._wait()
        self._handle.wait()


class _Meeting:
    """A collective of some ranks, to which the residents among them come one by one."""

    def __init__(self) -> None:
        self.terms: dict[int, Tensor] = {}
        self.result: Tensor | None = None


class Hub:
    """What the residents of one process share: their turns, messages and collectives.

    ``made`` are its groups of processes, by their index in ``process_groups``.
    """

    def __init__(self, plan: Plan, process: int, made: dict[int, Group], world: CommWorld) -> None:
        self.plan, self.process, self.groups, self.world = plan, process, made, world
        self.ranks = range(process * plan.resident, (process + 1) * plan.resident)
        self.turns = Turns(self.ranks, world.timeout_s)
        # Sides of messages that wait for the other one, by source, target and tag.
        self._open: dict[tuple[int, int, int], deque[_Message]] = {}
        self._meetings: dict[int, _Meeting] = {}
        self._members = {
            index: [rank for rank in ranks if rank in self.ranks]
            for index, ranks in enumerate(groups(plan))
        }
        self._pairs = self._pairs_apart()

    @torch.no_grad()
    def post(self, rank: int, event: Event, tensor: Tensor) -> _Message | _RemoteMessage:
        """Begins a message of a resident."""
        source, target = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
        other = event.peer // self.plan.resident
        if other != self.process:
            pairs = self._pairs[source // self.plan.resident, target // self.plan.resident]
            tag = event.tag * len(pairs) + pairs.index((source, target))
            place = tag, self.world.all_ranks
            handle = post(event.kind, tensor, other, *place, backend=event.route)
            return _RemoteMessage(self, rank, event, handle)
        mine = _Message(self, rank, event, tensor)
        open_sides = self._open.setdefault((source, target, event.tag), deque())
        if open_sides and open_sides[0].sends != mine.sends:
            mine.meet(open_sides.popleft())
        else:
            open_sides.append(mine)
        return mine

    def gather(self, rank: int, event: Event, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks of a group, stacked in the order of its ranks."""

        def combine(terms: list[Tensor], group: Group) -> Tensor:
            own = torch.stack(terms)
            if group.size == 1:
                return own
            return all_gather_stacked(own, group, backend=event.route).flatten(0, 1)

        return self._meet(rank, event, tensor, combine).clone()

    @torch.no_grad()
    def add_up(self, rank: int, event: Event, tensor: Tensor) -> None:
        """Sums a tensor over the ranks of a group, in place."""

        def combine(terms: list[Tensor], group: Group) -> Tensor:
            total = torch.stack(terms).sum(0)
            if group.size > 1:
                all_reduce(total, group=group, backend=event.route)
            return total

        tensor.copy_(self._meet(rank, event, tensor, combine))

    @torch.no_grad()
    def _meet(
        self,
        rank: int,
        event: Event,
        tensor: Tensor,
        combine: Callable[[list[Tensor], Group], Tensor],
    ) -> Tensor:
        members = self._members[event.peer]
        meeting = self._meetings.setdefault(event.peer, _Meeting())
        meeting.terms[rank] = tensor.detach()
        if len(meeting.terms) == len(members):
            del self._meetings[event.peer]  # the next one is another
            terms = [meeting.terms[one] for one in members]
            # It may wait for other processes here: all members of this one have come, and where
            # these are of several stages, no group is of several processes (``check_residents``).
            meeting.result = combine(terms, self.groups[event.peer])
        else:
            self.turns.wait(rank, lambda: meeting.result is not None, event.what)
        assert meeting.result is not None
        return meeting.result

    def _pairs_apart(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        # By source and target process the ranks between which messages go, alike on both sides:
        # with its position here the tag of a message is that of no other pair.
        pairs: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for rank in self.ranks:
            for event in pass_events(self.plan, rank):
                if event.kind in ("send", "recv"):
                    ends = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
                    of = ends[0] // self.plan.resident, ends[1] // self.plan.resident
                    pairs.setdefault(of, set()).add(ends)
        return {of: sorted(ends) for of, ends in pairs.items()}


class ResidentCursor(Cursor):
    """The place of a resident in its passes; its messages and collectives go through the hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__([*pass_events(hub.plan, rank)], hub.groups, hub.world)
        self.hub, self.rank = hub, rank

    def _begin(self, event: Event, message: Tensor, group: Group | None) -> Any:
        return self.hub.post(self.rank, event, message)

    def gather(self, tensor: Tensor, node: str, back: bool = False) -> Tensor:
        """Returns a tensor of all ranks of the stage, stacked, where a pass comes to a node."""
        return self.hub.gather(self.rank, self._collective(node, back), tensor)

    def add_up(self, tensor: Tensor, node: str) -> None:
        """Sums a tensor over the ranks of the stage, in place, where a pass comes to a node."""
        self.hub.add_up(self.rank, self._collective(node, False), tensor)


def resident_contexts(
    plan: Plan, process: int, made: dict[int, Group], device: torch.device, world: CommWorld
) -> list[Context]:
    """Returns the slots of the residents of a process, rank by rank, one a direction.

    ``made`` are its groups of processes.
    """
    hub, apart, contexts = Hub(plan, process, made, world), CommWorld(), list[Context]()
    for rank in hub.ranks:
        cursor, recorder = ResidentCursor(hub, rank), Recorder()
        own = {
            index: Group(ranks, ranks.index(rank), {}, recorder, world=apart)
            for index, ranks in enumerate(groups(plan))
            if rank in ranks
        }
        ways = [slot.direction for slot in plan.slots_of(rank)]
        contexts += [Context(plan, rank, own, cursor, way, device=device) for way in ways]
    return contexts


class ResidentExecutor(Executor):
    """Runs steps of a process: the passes of its ``residents``, and one update.

    The other arguments are those of :class:`~hires.parallel.executor.Executor`, of the process.
    """

    def __init__(self, residents: list[Executor], *parts: Any) -> None:
        super().__init__([slot for one in residents for slot in one.slots], *parts)
        self.residents = {one.slots[0].context.rank: one for one in residents}
        self.results: dict[int, StepResult] = {}
        """Of the last step, by rank."""
        self.parameters: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Of each rank in order, with the one of the process whose gradient takes its own."""
        first = self.cursor
        assert isinstance(first, ResidentCursor)
        stages = {stage for rank in self.residents for stage in held_stages(self.plan, rank)}
        passes = Event(PASSES, -1, 0, what="the passes of all residents")
        events = [*begin_events(self.plan), passes, *update_events(self.plan, sorted(stages))]
        self.turns, self.cursor = first.hub.turns, Cursor(events, first.groups, first.world)
        self.methods[PASSES] = self._passes

    def _begin_passes(self) -> None:
        """Leaves what a step begins with to the residents."""

    def _end_passes(self) -> None:
        """Leaves to them what it ends with."""

    def _passes(self, event: Event) -> None:
        jobs, ways = {}, self.plan.num_directions
        for index, (rank, one) in enumerate(self.residents.items()):
            if one.recorder is not self.recorder:
                one.recorder.begin_step()
            feed = self.feed[index * ways : (index + 1) * ways]
            jobs[rank] = functools.partial(one.run, feed, self.keep_outputs, self.number, self.see)
        self.turns.run(jobs)
        self.results = {rank: one.result for rank, one in self.residents.items()}
        for own, shared in self.parameters:
            if own is not shared and own.grad is not None:
                shared.grad = own.grad if shared.grad is None else shared.grad.add_(own.grad)
                own.grad = None
        for result in self.results.values():
            self.result.losses |= result.losses
            self.result.counts |= result.counts
