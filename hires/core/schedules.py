"""Orders the passes of each rank: GPipe, 1F1B, GEMS, GEMS with 1F1B.

A schedule is data: for every rank of a replica the list of its actions. To add one: a function
under ``@schedule``, from which the config, the search and the plan know it. Each rank holds one
stage of a direction: an action names no stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hires.core.registry import Registry

Schedule = list[list[str]]
"""Per rank of a replica, actions as ``F3`` (forward of microbatch 3) and ``B3`` (its backward)."""


class Task(NamedTuple):
    """One action of one stage: all ranks of the stage do it together."""

    stage: int
    microbatch: int
    back: bool

    @property
    def action(self) -> str:
        """Its name in a schedule."""
        return f"{'B' if self.back else 'F'}{self.microbatch}"


@dataclass(frozen=True)
class Pipeline:
    """The replica that a schedule is made for.

    Model pass p of ``num_passes`` goes in direction p % num_directions, in ``num_microbatches``;
    they are counted through all passes.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """Ranks of each stage in each direction."""
    num_microbatches: int
    num_passes: int = 1
    training: bool = True

    @property
    def num_stages(self) -> int:
        """Stages of the network."""
        return len(self.ranks[0])

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica."""
        return 1 + max(rank for stages in self.ranks for ranks in stages for rank in ranks)

    @property
    def total(self) -> int:
        """Microbatches of all passes."""
        return self.num_passes * self.num_microbatches

    def direction_of(self, microbatch: int) -> int:
        """Returns the direction in which a microbatch runs."""
        return microbatch // self.num_microbatches % len(self.ranks)

    def ranks_of(self, task: Task) -> tuple[int, ...]:
        """Returns the ranks that do a task together."""
        return self.ranks[self.direction_of(task.microbatch)][task.stage]

    def before(self, task: Task) -> Task | None:
        """Returns the task whose result another one needs."""
        stage, microbatch, back = task
        if not back:
            return Task(stage - 1, microbatch, False) if stage > 0 else None
        last = stage == self.num_stages - 1
        return Task(stage, microbatch, False) if last else Task(stage + 1, microbatch, True)

    @functools.cached_property
    def stage_of(self) -> list[dict[int, int]]:
        """The stage of every rank, by direction."""
        return [
            {rank: stage for stage, ranks in enumerate(stages) for rank in ranks}
            for stages in self.ranks
        ]

    def tasks_of(self, schedule: Schedule) -> list[list[Task]]:
        """Returns the actions of every rank as tasks."""
        return [
            [
                Task(self.stage_of[self.direction_of(number)][rank], number, action[0] == "B")
                for action in actions
                for number in [int(action[1:])]
            ]
            for rank, actions in enumerate(schedule)
        ]

    def tasks(self) -> Iterator[Task]:
        """Yields everything that one step consists of."""
        for microbatch in range(self.total):
            for stage in range(self.num_stages):
                yield Task(stage, microbatch, False)
                if self.training:
                    yield Task(stage, microbatch, True)


Order = Callable[[Pipeline], Schedule]


@dataclass(frozen=True)
class NamedSchedule:
    """A value of ``parallel.schedule``."""

    order: Order
    directions: int
    """Of the pipelines that it is for."""
    overlaps: bool
    """Whether it runs both directions at once: the layout is a mirrored pipeline, ``pp+gems``."""
    torch_class: str
    """The class of ``torch.distributed.pipelining`` with the same order; empty: it has none."""

    @property
    def summary(self) -> str:
        """The first sentence of its docstring."""
        return (self.order.__doc__ or "").partition("\n")[0]


SCHEDULES: Registry[NamedSchedule] = Registry("parallel.schedule")


def schedule(
    name: str, directions: int = 1, overlaps: bool = False, torch_class: str = ""
) -> Callable[[Order], Order]:
    """Returns a decorator that makes a function a value of ``parallel.schedule``."""

    def named(order: Order) -> Order:
        SCHEDULES.register(name)(NamedSchedule(order, directions, overlaps, torch_class))
        return order

    return named


def usual_schedule(directions: int = 1, overlaps: bool = False) -> str:
    """Returns the name of the first schedule of so many directions, at once or in turn."""
    wanted = directions, overlaps
    every = ((name, SCHEDULES[name]) for name in SCHEDULES)
    return next(name for name, one in every if (one.directions, one.overlaps) == wanted)


@schedule("gpipe", torch_class="ScheduleGPipe")
def gpipe(pipeline: Pipeline) -> Schedule:
    """All forward passes, then all backward passes.

    Source:
        Huang et al., "GPipe", NeurIPS 2019.
    """
    mbs = range(pipeline.total)
    actions = [f"F{m}" for m in mbs] + [f"B{m}" for m in mbs]
    return [list(actions) for _ in range(pipeline.num_ranks)]


@schedule("1f1b", torch_class="Schedule1F1B")
def one_forward_one_backward(pipeline: Pipeline) -> Schedule:
    """As few microbatches in flight as keep the last stage busy.

    Source:
        Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-Flush),
        ICML 2021.
    """
    schedule: Schedule = [[] for _ in range(pipeline.num_ranks)]
    total = pipeline.total
    for stage, ranks in enumerate(pipeline.ranks[0]):
        ahead = min(pipeline.num_stages - 1 - stage, total)
        actions = [f"F{m}" for m in range(ahead)]
        for m in range(total - ahead):
            actions += [f"F{ahead + m}", f"B{m}"]
        actions += [f"B{m}" for m in range(total - ahead, total)]
        for rank in ranks:
            schedule[rank] = list(actions)
    return schedule


@schedule("gems", directions=2)
def gems(pipeline: Pipeline) -> Schedule:
    """Two directions in turn: one model pass down, the next one up, in the memory of one.

    A pass starts when the last stage of the pass before has done its backward: its rank, which
    holds the first stage of the other direction, is free, and so are the others in turn.

    Source:
        Jain et al., "GEMS: GPU-enabled memory-aware model-parallelism system for distributed DNN
        training", SC 2020.
    """
    size = pipeline.num_microbatches

    def may_start(task: Task, done: dict[Task, int]) -> bool:
        model_pass, index = divmod(task.microbatch, size)
        if task.back:  # as in GPipe, after all forward passes of the model pass
            return Task(task.stage, model_pass * size + size - 1, False) in done
        if index or model_pass == 0 or task.stage:
            return True
        return Task(pipeline.num_stages - 1, model_pass * size - 1, True) in done

    def rank_first(task: Task) -> tuple[int, ...]:
        return task.microbatch // size, -task.back, task.microbatch

    return _arranged(pipeline, may_start, rank_first)


@schedule("gems_1f1b", directions=2, overlaps=True)
def gems_both_ways(pipeline: Pipeline) -> Schedule:
    """Two directions at once, each with as few microbatches in flight as 1F1B: bubbles filled.

    Source:
        The idea is that of Li and Hoefler, "Chimera: efficiently training large-scale neural
        networks with bidirectional pipelines", SC 2021; the order is a list schedule of our own.
    """
    size, directions = pipeline.num_microbatches, len(pipeline.ranks)

    def turn(microbatch: int) -> int:
        """Position of a microbatch within its direction."""
        return microbatch // size // directions * size + microbatch % size

    def may_start(task: Task, done: dict[Task, int]) -> bool:
        earlier = turn(task.microbatch) - (pipeline.num_stages - task.stage)
        if task.back or earlier < 0:
            return True
        first = pipeline.direction_of(task.microbatch) * size
        same = first + earlier // size * directions * size + earlier % size
        return Task(task.stage, same, True) in done

    def rank_first(task: Task) -> tuple[int, ...]:
        return -task.back, turn(task.microbatch), task.microbatch

    return _arranged(pipeline, may_start, rank_first)


def forward_only(pipeline: Pipeline) -> Schedule:
    """Forward passes only: inference, all directions at once."""
    forward = dataclasses.replace(pipeline, training=False)
    return _arranged(forward, lambda task, done: True, lambda task: (task.microbatch,))


def timeline(pipeline: Pipeline, schedule: Schedule) -> list[str]:
    """Draws a schedule in which every pass takes the same time, idle as ``.``.

    One line a stage, or a rank in two directions. Actions that can never run are left out.
    """
    start = started(pipeline, schedule)
    length = max(start.values(), default=-1) + 1
    lines = [["."] * length for _ in range(pipeline.num_ranks)]
    for task, time in start.items():
        for rank in pipeline.ranks_of(task):
            lines[rank][time] = task.action
    if len(pipeline.ranks) == 1:
        lines = [lines[ranks[0]] for ranks in pipeline.ranks[0]]
    width = max((len(cell) for line in lines for cell in line), default=1)
    return [" ".join(cell.ljust(width) for cell in line).rstrip() for line in lines]


def started(pipeline: Pipeline, schedule: Schedule) -> dict[Task, int]:
    """Returns when each task of a schedule begins, as far as it can run; each takes one unit."""
    todo = [tasks[::-1] for tasks in pipeline.tasks_of(schedule)]  # the next one is last
    start: dict[Task, int] = {}
    time, moved = 0, True
    while moved:
        heads = {rank: tasks[-1] for rank, tasks in enumerate(todo) if tasks}
        begun = {
            task
            for task in set(heads.values())
            if all(heads.get(rank) == task for rank in pipeline.ranks_of(task))
            and _is_ready(pipeline, task, start, time)
        }
        for task in begun:
            start[task] = time
            for rank in pipeline.ranks_of(task):
                todo[rank].pop()
        time, moved = time + 1, bool(begun)
    return start


def _is_ready(pipeline: Pipeline, task: Task, start: dict[Task, int], time: int) -> bool:
    before = pipeline.before(task)
    return before is None or start.get(before, time) < time


def _arranged(
    pipeline: Pipeline,
    may_start: Callable[[Task, dict[Task, int]], bool],
    urgency: Callable[[Task], tuple[int, ...]],
) -> Schedule:
    """Returns the order in which free ranks take the most urgent task that they can.

    All ranks of a task are taken at once, so the order of any rank is that of one common sequence:
    tiles that belong to both directions cannot wait for each other crosswise. ``may_start`` says
    whether a task is allowed, given what is done; the smallest ``urgency`` comes first.
    """
    schedule: Schedule = [[] for _ in range(pipeline.num_ranks)]
    # Tasks of one stage, direction and kind run in order; the first is at the end of its queue.
    queues: dict[tuple[int, int, bool], list[Task]] = {}
    for task in reversed([*pipeline.tasks()]):
        key = task.stage, pipeline.direction_of(task.microbatch), task.back
        queues.setdefault(key, []).append(task)
    done: dict[Task, int] = {}
    time = 0
    while any(queues.values()):
        heads = [queue[-1] for queue in queues.values() if queue]
        able = [t for t in heads if _is_ready(pipeline, t, done, time) and may_start(t, done)]
        busy: set[int] = set()
        for task in sorted(able, key=urgency):
            ranks = pipeline.ranks_of(task)
            if busy.isdisjoint(ranks):
                busy.update(ranks)
                done[task] = time
                for rank in ranks:
                    schedule[rank].append(task.action)
                queues[task.stage, pipeline.direction_of(task.microbatch), task.back].pop()
        time += 1
    return schedule
