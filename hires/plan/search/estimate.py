"""Estimates a layout's step time and memory from its numbers, before it is planned.

    node tables (one for each size of a rank's part)  ->  seconds and bytes of every stage
    schedule of the layout                            ->  when each rank does what
    parameters, optimiser, microbatches in flight     ->  bytes of the fullest rank

A plan with all its messages takes a tenth of a second to seconds, an estimate less than a
millisecond. It orders the layouts of a search; what is shown was planned.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hires.core.codecs import CODECS, GRADIENT, JOIN, PARAMETERS, STAGE
from hires.core.config.precision_config import PRECISIONS
from hires.core.config.run_config import RunConfig
from hires.core.schedules import SCHEDULES, Pipeline, Task, forward_only
from hires.plan.graph import Graph, Node
from hires.plan.groups import wide_dtype
from hires.plan.partition import (
    SLACK,
    crossing,
    cut_of_least_largest,
    layer_starts,
    partition,
    starts_between_ties,
)
from hires.plan.plan import derived
from hires.plan.search.candidates import Candidate
from hires.plan.search.stage_table import RankShare, Seconds, StageTable, StageTables
from hires.plan.simulation.costs import ADD_TOUCHES, UPDATE_TOUCHES
from hires.plan.simulation.node_work import most_in_flight, params_bytes, value_bytes
from hires.plan.simulation.simulate import Network


class StageBytes(NamedTuple):
    """What a rank of a stage holds, in bytes."""

    weights: float
    """With gradients and the optimiser's states."""
    kept: float
    """Of each microbatch in flight."""
    transient: float
    """Of the largest node while it is computed, with what it reads, and of what a backward pass
    computes once more."""


class LayoutEstimate(NamedTuple):
    """What a layout is expected to take."""

    step_s: float
    peak_bytes: float


@dataclass
class Estimator:
    """Estimates the layouts of one network, batch and machine."""

    config: RunConfig
    graph: Graph
    """Of any number of samples."""
    seconds: Seconds
    network: Network
    bytes_per_s: float
    """Of a rank's memory, for the optimiser."""
    cores: float = math.inf
    """Compute threads that a machine runs at once, divided by those of a rank."""
    scatters: bool = True
    """Whether the gradients of a divided update are scattered, which sends two thirds."""

    def __post_init__(self) -> None:
        self.training = self.config.task.name == "train"
        self.dtype = PRECISIONS[self.config.precision.name]
        self.codecs = self.config.comm.codecs
        self.layers = layer_starts(self.graph)
        facts = self.dtype, self.training, self.codecs
        self.tables = StageTables(self.graph, self.seconds, self.network, *facts)

    def shares(self, candidate: Candidate) -> list[RankShare]:
        """Returns the part of a microbatch that a rank of each stage has."""
        shape, samples = candidate.shape, self.config.batch / candidate.pieces
        tiled = [RankShare(samples, shape.grid)] * shape.spatial_stages
        behind = shape.stages - shape.spatial_stages
        return tiled + [RankShare(samples / shape.local_dp)] * behind

    def bounds(self, candidate: Candidate) -> tuple[int, ...]:
        """Returns the first node of every stage, as the plan cuts the network."""
        return self._cut((*candidate.shape.ranks_of_stages,), candidate.balance)

    @derived
    def _cut(self, ranks: tuple[int, ...], balance: tuple[int, ...] | None) -> tuple[int, ...]:
        layers = None if balance is None else [*balance]
        return tuple(partition(self.graph, [*ranks], layers, self.training))

    def balanced(self, candidate: Candidate, by: str) -> tuple[int, ...] | None:
        """Returns layers per stage whose largest stage takes the least; None: as by FLOPs.

        By seconds of a ``step`` or by ``bytes``. No cut of a training parts the uses of a
        parameter.
        """
        shape = candidate.shape
        starts = starts_between_ties(self.graph) if self.training else self.layers
        if shape.stages < 2 or len(starts) < shape.stages:
            return None
        shares = self.shares(candidate)
        ends, in_flight = [*starts, len(self.graph.nodes)], self._in_flight(candidate)

        def cost_of(stage: int, first: int, last: int) -> float:
            """Returns what a stage of some nodes takes."""
            if by == "bytes":
                own = self.stage_bytes(shares[stage], first, last, candidate.checkpoint)
                return own.weights + in_flight[stage] * own.kept + own.transient
            pass_s = sum(_passes(self.tables.of(shares[stage]), first, last, "none"))
            update_s = self._update_s(candidate, stage, first, last)
            return candidate.microbatches * candidate.pairs * pass_s + update_s

        of_layers = lambda stage, a, b: cost_of(stage, ends[a], ends[b])  # noqa: E731
        cut, slowest = cut_of_least_largest(len(starts), shape.stages, of_layers)
        by_flops = max(
            cost_of(stage, first, last)
            for stage, (first, last) in enumerate(itertools.pairwise(self.bounds(candidate)))
        )
        if slowest * SLACK > by_flops:  # no clear gain: the cut where less crosses stays
            return None
        at = [bisect.bisect_left(self.layers, ends[first]) for first in cut]
        return tuple(b - a for a, b in itertools.pairwise(at))

    @derived
    def estimate(self, candidate: Candidate) -> LayoutEstimate:
        """Returns what a layout is expected to take."""
        shape, bounds = candidate.shape, self.bounds(candidate)
        shares = self.shares(candidate)
        stages = [*itertools.pairwise(bounds)]
        tables = [self.tables.of(share) for share in shares]
        passes = [
            _passes(table, first, last, candidate.checkpoint)
            for table, (first, last) in zip(tables, stages, strict=True)
        ]
        pipeline, ranks = _pipeline(candidate, self.training), sum(shape.ranks_of_stages)
        of_stages = (*shape.ranks_of_stages,)
        facts = candidate.schedule, (*passes,), bounds, shares[0].samples, of_stages
        step_s, busy_s = self._walk(pipeline, *facts)
        node = min((*self.network.node_starts[:1], ranks * shape.replicas))
        if self.cores < node:
            # In one direction a rank of the pipeline stands for all ranks of its stage.
            alike = [1] * ranks if shape.directions > 1 else shape.ranks_of_stages
            all_s = sum(count * own_s for count, own_s in zip(alike, busy_s, strict=True))
            step_s = max(step_s, all_s * node / ranks / self.cores)
        update_s = [self._update_s(candidate, at, *own) for at, own in enumerate(stages)]
        step_s += max(sum(update_s[at] for at in {*held}) for held in _rank_holding(pipeline))
        return LayoutEstimate(step_s, self._peak_bytes(candidate, pipeline))

    @derived
    def _program(self, pipeline: Pipeline, schedule: str) -> list[list[Task]]:
        order = SCHEDULES[schedule].order if self.training else forward_only
        return pipeline.tasks_of(order(pipeline))

    def _in_flight(self, candidate: Candidate) -> list[int]:
        """Returns how many microbatches of each stage a rank has in flight at the most."""
        program = self._program(_pipeline(candidate, self.training), candidate.schedule)
        return [
            max(most_in_flight(one.action for one in own if one.stage == stage) for own in program)
            for stage in range(candidate.shape.stages)
        ]

    @derived
    def _walk(
        self,
        pipeline: Pipeline,
        schedule: str,
        passes: tuple[tuple[float, float], ...],
        bounds: tuple[int, ...],
        samples: float,
        ranks: tuple[int, ...],
    ) -> tuple[float, list[float]]:
        """Returns when the last rank has done its actions, and how long each computes.

        An action begins when its rank is free and the one before it has sent its result. All ranks
        of a stage do it together, so one time stands for them. ``passes`` are the seconds of each
        stage's and ``ranks`` how many it has; a microbatch has so many ``samples``.
        """
        program = self._program(pipeline, schedule)
        crossing = self._crossing(self.dtype)
        link, part = self.network.link([0, sum(ranks) - 1]), self.tables.part(RankShare(samples))
        # Of the values that cross each cut.
        kinds = (STAGE if a == b else JOIN for a, b in itertools.pairwise(ranks))
        sent = self.tables.sent
        sent_s = [
            link.latency_s + sent(kind, crossing[b], self.dtype) * part / link.bytes_per_s
            for kind, b in zip(kinds, bounds[1:-1], strict=True)
        ]
        free_s = [0.0] * pipeline.num_ranks
        at = [0] * pipeline.num_ranks
        busy_s = [0.0] * pipeline.num_ranks
        done: dict[Task, float] = {}
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(program):
                while at[rank] < len(actions):
                    task = actions[at[rank]]
                    before, begin_s = pipeline.before(task), free_s[rank]
                    if before is not None:
                        if before not in done:
                            break
                        crosses = before.stage != task.stage
                        cut_s = sent_s[min(before.stage, task.stage)] if crosses else 0.0
                        begin_s = max(begin_s, done[before] + cut_s)
                    seconds = passes[task.stage][task.back]
                    free_s[rank] = begin_s + seconds
                    busy_s[rank] += seconds
                    done[task] = max(done.get(task, 0.0), free_s[rank])
                    at[rank] += 1
                    moved = True
        return max(free_s), busy_s

    @derived
    def _crossing(self, dtype: str) -> list[int]:
        """Returns the bytes that are made before each node and read from it on; no images."""

        def num_bytes(node: Node | None) -> int:
            return 0 if node is None else value_bytes(self.graph, node.name, dtype)

        return crossing(self.graph, 0, len(self.graph.nodes), num_bytes)

    @derived
    def _params_bytes(self, first: int, last: int) -> int:
        """Returns the bytes of the parameters of some nodes; in training of those that learn."""
        graph = self.graph
        names = {name for node in graph.nodes[first:last] for name in node.params}
        if not self.training:
            return params_bytes(graph, names, self.dtype)
        learned = (name for name in names if graph.params[name].trainable)
        return params_bytes(graph, learned, wide_dtype(self.dtype))

    def _update_s(self, candidate: Candidate, stage: int, first: int, last: int) -> float:
        """Returns the seconds of a stage's gradient sums and update, between two nodes."""
        if not self.training:
            return 0.0
        shape, num_bytes = candidate.shape, self._params_bytes(first, last)
        holders = shape.ranks_of_stages[stage] * shape.replicas * shape.directions
        world = sum(shape.ranks_of_stages) * shape.replicas
        # Replicas lie apart: their holders of a stage are spread over all of the world.
        members = [*range(0, world, max(1, world // holders))][:holders]
        wide, is_divided = wide_dtype(self.dtype), candidate.shards_optimizer
        summed = self.tables.sent(GRADIENT, num_bytes, wide)
        if (codec := self.codecs.get(GRADIENT, "")) and CODECS[codec].leaves:
            summed *= holders / (1 if is_divided and self.scatters else 2)  # codes of each
        # A scatter of the sums, or what brings a divided update to all, is half an all-reduce.
        sum_s = self.network.reduce_s(members, summed) / (1 + (is_divided and self.scatters))
        updates = self.tables.sent(PARAMETERS, num_bytes, wide)
        sum_s += self.network.reduce_s(members, updates) / 2 if is_divided else 0.0
        touches = UPDATE_TOUCHES + 2 * self.config.optimizer.num_states
        share = holders if candidate.shards_optimizer else 1
        added = ADD_TOUCHES * (candidate.microbatches * candidate.pairs - 1)
        sum_s = sum_s if holders > 1 else 0.0
        return sum_s + (touches / share + added) * num_bytes / self.bytes_per_s

    def _peak_bytes(self, candidate: Candidate, pipeline: Pipeline) -> float:
        """Returns the bytes of the fullest rank: those of its weights and of its fullest moment.

        action     F0   F1   B0   B1        bytes of a rank: its weights
        in flight  1    2    1    0                          + in flight x kept
        moment          ^                                    + transient, of the stage at work
        """
        shape, bounds = candidate.shape, itertools.pairwise(self.bounds(candidate))
        stages = []
        for share, own, ranks in zip(
            self.shares(candidate), bounds, shape.ranks_of_stages, strict=True
        ):
            holders = ranks * shape.replicas * shape.directions
            parts = holders if candidate.shards_optimizer else 1
            stages.append(self.stage_bytes(share, *own, candidate.checkpoint, parts))
        program = self._program(pipeline, candidate.schedule)
        return max(
            sum(stages[stage].weights for stage in {*held})
            + _fullest_moment(program[rank], stages, self.training)
            for held, rank in _rank_holding(pipeline).items()
        )

    def stage_bytes(
        self, share: RankShare, first: int, last: int, checkpoint: str = "none", parts: int = 1
    ) -> StageBytes:
        """Returns what a rank of some nodes holds, the optimiser's states in so many ``parts``."""
        table = self.tables.of(share)
        kept = table.kept_bytes[last] - table.kept_bytes[first]
        boundary = self._crossing(self.dtype)[first] * self.tables.part(share)
        # Of blocks, about the root of what is kept is computed again at a time.
        of_block = kept**0.5 * max(1.0, boundary) ** 0.5
        again = {"none": 0.0, "stage": kept}.get(checkpoint, of_block)
        copies = 2 + self.config.optimizer.num_states / parts if self.training else 1
        return StageBytes(
            copies * self._params_bytes(first, last),
            kept if checkpoint == "none" else boundary,
            again + max(table.largest_bytes[first:last], default=0.0),
        )


def _rank_holding(pipeline: Pipeline) -> dict[tuple[int, ...], int]:
    """Returns a rank by the stages that it holds, one a direction: all such ranks do the same."""
    return {tuple(of[r] for of in pipeline.stage_of): r for r in range(pipeline.num_ranks)}


def _fullest_moment(actions: Sequence[Task], stages: Sequence[StageBytes], training: bool) -> float:
    """Returns the most bytes of activations that the passes of a rank have at a moment."""
    in_flight: Counter[int] = Counter()
    most = 0.0
    for stage, _, back in actions:
        if training:
            in_flight[stage] += -1 if back else 1
        kept = sum(count * stages[one].kept for one, count in in_flight.items())
        most = max(most, kept + stages[stage].transient)
    return most


def _passes(table: StageTable, first: int, last: int, checkpoint: str) -> tuple[float, float]:
    forward, back = (sums[last] - sums[first] for sums in (table.forward_s, table.back_s))
    return forward, back + (0.0 if checkpoint == "none" else forward)


def _pipeline(candidate: Candidate, training: bool) -> Pipeline:
    """Returns the replica of a schedule; in one direction with one rank for each stage."""
    shape = candidate.shape
    counts = shape.ranks_of_stages if shape.directions > 1 else [1] * shape.stages
    ends = [0, *itertools.accumulate(counts)]
    down = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))
    up = tuple(tuple(ends[-1] - 1 - rank for rank in ranks) for ranks in down)
    ranks = (down, up)[: shape.directions]
    return Pipeline(ranks, candidate.microbatches, shape.directions * candidate.pairs, training)
