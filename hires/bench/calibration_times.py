"""Times nodes of networks, and messages, on started ranks: the jobs of a calibration.

Each value of a step is seen when it is made, and again when its gradient comes back:

    forward     a |--- b ---| c        from one value to the next
    backward    grad c |--- c ---| grad b |--- b ---|

A rank computes in one thread, whose clock stands still while the rank waits for a message and while
another program has its core. So a machine that is in use can be measured, too.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires.bench.bench_rows import BenchRow
from hires.bench.peers.peer_hires import HiresSteps
from hires.bench.peers.peer_torch import ModuleSteps
from hires.bench.race import Runner, race
from hires.bench.start_ranks import join_world
from hires.comm import all_gather_stacked, all_reduce_coalesced, irecv, isend, make_groups
from hires.comm.backends import rendezvous
from hires.core.ranks import meeting, timeline
from hires.core.ranks.timeline import HostClock, MarkedSpan
from hires.core.ranks.world import World
from hires.engine.device import RankDevice
from hires.plan.event import BYTES
from hires.plan.hardware import GLOO
from hires.plan.plan import Plan
from hires.plan.program import steps_of
from hires.plan.routes import MEMORY
from hires.plan.simulation.costs import UPDATE_TOUCHES, works_of
from hires.plan.simulation.node_work import NodeWork
from hires.plan.traffic import backends_of_plan

LEAST_ROUNDS, MOST_ROUNDS = 3, 6  # timed steps of a network besides the first
COPIED, SMALL, LARGE, GRADIENTS = 1 << 24, 256, 1 << 20, 1 << 22
"""Elements of a copy that is larger than caches, of a message whose time is latency, of one whose
time is bandwidth, and of a sum of the gradients of a small network."""
ROUNDS, WARMUP, IN_A_ROW = 100, 10, 10
"""Of the links. In a step an exchange takes as long as in the mean of several in a row."""
PASSES = (timeline.FORWARD, timeline.BACKWARD)
Key = tuple[str, bool]  # a node's name, and whether it is its backward pass
log = logging.getLogger(__name__)


class ThreadClock(HostClock):
    """The seconds in which this thread has computed."""

    now = staticmethod(time.thread_time)


class NodeTimes:
    """Seconds of the nodes of a layout's first slot, step by step."""

    def __init__(self, steps: HiresSteps) -> None:
        self.steps, self.recorder = steps, steps.engine.recorder
        self.recorder.clock = ThreadClock()
        self.nodes: dict[Key, list[float]] = defaultdict(list)
        self.step_s: list[float] = []
        self.passes_s: list[float] = []  # of all passes of a step besides their nodes
        self.update_s: list[float] = []
        self.pace_s: list[float] = []  # of a step that shows the machine's pace, beside each
        self._marks: list[tuple[Key, float]] = []

    def step(self) -> None:
        """Runs one step and keeps what it took."""
        module = self.steps.engine.modules[0]
        self.steps.before_step()
        self._marks.clear()
        module.watch(self._see)
        self.step_s.append(_thread_s(self.steps.step))
        module.watch(None)
        spans = self.recorder.steps[-1].spans
        updates = (s.end - s.begin for s in spans if s.kind == timeline.OPTIMISER)
        self.update_s.append(float(sum(updates)))
        passes = [span for span in spans if span.kind in PASSES]
        self.passes_s.append(sum(s.end - s.begin - self._keep(s) for s in passes))

    def medians(self) -> dict[Key, float]:
        """Returns the seconds of every node's passes, at the pace of the median step.

        They are medians, too: the least of quotients is that in which the pace was most off.
        """
        pace_s, medians = statistics.median(self.pace_s), {}
        for key, seconds in self.nodes.items():
            paces = self.pace_s if len(self.pace_s) == len(seconds) else [pace_s] * len(seconds)
            both = zip(seconds, paces, strict=True)
            medians[key] = statistics.median(s * pace_s / own_s for s, own_s in both)
        return medians

    def _see(self, name: str, value: Any) -> None:
        self._marks.append(((name, False), time.thread_time()))
        if isinstance(value, Tensor) and value.requires_grad:

            def came_back(_: Tensor) -> None:
                self._marks.append(((name, True), time.thread_time()))

            value.register_hook(came_back)  # type: ignore[no-untyped-call]

    def _keep(self, span: MarkedSpan) -> float:
        # Keeps the seconds of the nodes of a pass, and returns their sum.
        marks = [mark for mark in self._marks if span.begin <= mark[1] <= span.end]
        times = [mark[1] for mark in marks]
        # A value is seen at the end of its node, and a gradient at the beginning.
        edges = [span.begin, *times] if span.kind == timeline.FORWARD else [*times, span.end]
        seconds: dict[Key, float] = defaultdict(float)
        for (key, _), begin, end in zip(marks, edges, edges[1:], strict=False):
            seconds[key] += end - begin
        for key, node_s in seconds.items():
            self.nodes[key].append(node_s)
        return sum(seconds.values())


def typical(seconds: list[float]) -> float:
    """Returns the median of the faster half of some times; what disturbed the others is no part."""
    return statistics.median(sorted(seconds)[: (len(seconds) + 1) // 2])


def time_networks(
    world: World,
    networks: list[BenchRow],
    budget_s: float,
    busy: int,
    timeout_s: float,
) -> Iterator[list[dict[str, Any]]]:
    """Yields what a rank takes for each network while ``busy`` ranks of the machine compute.

    The networks take turns, each step between those of the first, which shows the machine's pace.
    All ranks take equally many steps; those of plans of one rank compute the same, each by itself.
    """
    pace_row, *rows = networks
    plans = [row.plan for row in rows if row.plan is not None]
    names = dict.fromkeys(name for plan in plans for name in backends_of_plan(plan))
    rendezvous.torch_world(world, timeout_s)  # in which all wait for each other
    if plans[0].world == 1:
        world = replace(world, rank=0, size=1, local_rank=0, local_size=1)
    join_world(world, timeout_s, [*{GLOO: None, **names}])
    steps = [HiresSteps(row, world.rank, RankDevice()) for row in rows]
    pace_steps = ModuleSteps(pace_row, 0, RankDevice())

    def pace_s() -> float:
        dist.barrier()
        step_s = _thread_s(pace_steps.step)
        pace_steps.after_step()
        return step_s

    round_s = 0.0
    for runner in steps:  # prepares kernels, and shows how long a round takes at the most
        first = NodeTimes(runner)
        first.step()
        round_s += first.step_s[0] + pace_s()
    fitting = torch.tensor(max(LEAST_ROUNDS, min(MOST_ROUNDS, int(budget_s / round_s))))
    dist.all_reduce(fitting, dist.ReduceOp.MAX)
    times = [NodeTimes(one) for one in steps]
    for number in range(int(fitting)):
        log.info("round %d of %d", number + 1, int(fitting))
        paces_s = [pace_s()]
        for one in times:
            dist.barrier()
            one.step()
            paces_s.append(pace_s())
        for index, one in enumerate(times):  # two before its step, and two after it
            one.pace_s.append(statistics.median(paces_s[max(0, index - 1) : index + 3]))
    yield [_parts_of(*both, world.rank, busy) for both in zip(times, plans, strict=True)]


def _parts_of(times: NodeTimes, plan: Plan, rank: int, busy: int) -> dict[str, Any]:
    # The samples of a rank's steps, and the parts of a step.
    medians = times.medians()
    equal: dict[NodeWork, list[float]] = defaultdict(list)  # one sample for each work
    slot = plan.slot_of(rank, 0)
    stage = plan.stages[slot.stage]
    for back in (False, True) if plan.training else (False,):
        works = works_of(plan, stage, slot.tile, back)
        for step, work in zip(steps_of(plan, stage, back), works, strict=True):
            if work is not None and medians.get((step.node.name, step.back)):
                equal[work].append(medians[step.node.name, step.back])
    passes_s, update_s = typical(times.passes_s), typical(times.update_s)
    params = sum(one.params for one in plan.stages) if plan.training else 0
    source, target = torch.ones(COPIED), torch.empty(COPIED)
    copy_s = min(_thread_s(lambda: target.copy_(source)) for _ in range(3))
    besides_s = typical(times.step_s) - sum(medians.values()) - passes_s - update_s
    return {
        "ranks": busy,
        "pace_step_s": statistics.median(times.pace_s),
        "samples": [[[*work], busy, typical(all_s)] for work, all_s in equal.items()],
        "pass_s": passes_s / len(plan.actions_of(rank)),
        "besides_s": max(0.0, besides_s),
        "update_s": update_s,
        "update_bytes": (UPDATE_TOUCHES + 2 * plan.optimizer_states) * params * BYTES["float32"],
        "bytes_per_s": 2 * 4 * COPIED / copy_s,
    }


def _thread_s(run: Callable[[], object]) -> float:
    # The seconds in which this thread computes in a call.
    begin_s = time.thread_time()
    run()
    return time.thread_time() - begin_s


class LinkCalls(Runner):
    """Messages between two ranks, as steps send them."""

    def __init__(self, call: Callable[[], object], in_a_row: int = 1) -> None:
        self.call, self.in_a_row = call, in_a_row

    def step(self) -> None:
        """Makes the calls."""
        for _ in range(self.in_a_row):
            self.call()


def time_links(world: World, timeout_s: float) -> Iterator[list[float]]:
    """Yields what :class:`Links` holds, as two ranks measure it together on the default route."""
    backends = [GLOO, *MEMORY] if meeting.keeps_write_order() else [GLOO]
    join_world(world, timeout_s, backends)
    group, gradients = make_groups([[0, 1]])[0], torch.zeros(GRADIENTS)

    def exchange(elements: int) -> None:  # at once, as two tiles exchange their halos
        received = irecv(torch.zeros(elements), 1 - world.rank, tag=0)
        sent = isend(torch.zeros(elements), 1 - world.rank, tag=0)
        received.wait()
        sent.wait()

    runners = {
        "small": LinkCalls(lambda: exchange(SMALL)),
        "large": LinkCalls(lambda: exchange(LARGE)),
        "sum": LinkCalls(lambda: all_reduce_coalesced([gradients], group, backend=backends[-1])),
        "latency": LinkCalls(lambda: exchange(SMALL), IN_A_ROW),
        # As much as a normalisation of many channels needs.
        "gather": LinkCalls(lambda: all_gather_stacked(torch.zeros(SMALL), group), IN_A_ROW),
    }
    *_, samples = race(runners, ROUNDS, WARMUP, group)
    small_s, large_s, sum_s = (typical(samples[n].rounds_s) for n in ("small", "large", "sum"))
    each = (statistics.median(samples[name].rounds_s) for name in ("latency", "gather"))
    latency_s, gather_s = (seconds / IN_A_ROW for seconds in each)
    bytes_per_s = 4 * (LARGE - SMALL) / max(large_s - small_s, 1e-9)
    # Two ranks send each other half of the sum, and then the other half.
    yield [latency_s, bytes_per_s, gather_s, 4 * GRADIENTS / max(sum_s - 2 * small_s, 1e-9)]
