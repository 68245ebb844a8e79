"""Chooses layouts: ranks those that fit by what they cost, and says why the others are out.

    all layouts of so many ranks     estimated: numbers, sums, the schedule      a millisecond each
      -> the best of each shape      planned, proved, simulated                  a second each
        -> the best of these         their memory rehearsed, until one fits      seconds each
          -> ranked                  by step time or memory

The layouts that were rehearsed show how far the estimates of memory are off, and correct the
others. Where none of the planned ones fits, those that fit by the corrected estimates are next.
How many are looked at follows from counts of their work, never from a clock: the same question has
the same answer on a busy machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hires.core.config.parallel_config import OBJECTIVES, ParallelConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError
from hires.core.precisions import PRECISIONS
from hires.core.units import size
from hires.plan.checks import check_numbers
from hires.plan.graph import Graph, Node
from hires.plan.memory import Room, rooms_of
from hires.plan.passes.rewriting import rewritten
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.route_choice import resolve
from hires.plan.search.advice import fewer_on_a_node
from hires.plan.search.candidates import (
    FUSED,
    NOTHING_GIVEN,
    Candidate,
    GivenKeys,
    LayoutShape,
    orders,
    shapes,
    variants,
)
from hires.plan.search.choice import Choice, NoRoomError, Option
from hires.plan.search.estimate import Estimator, LayoutEstimate
from hires.plan.search.memory_rehearsal import OUT_ABOVE, PlannedOption, Rehearsal
from hires.plan.search.no_layout import (
    MOST_REASONS,
    limit_bytes,
    no_plan,
    none_of,
    nothing_fits,
)
from hires.plan.simulation.machine_model import MachineModel
from hires.plan.simulation.node_work import NodeWork, node_work

ESTIMATED_ACTIONS = 2_000_000
"""Actions of the schedules that are estimated, about 5 s. Where there are more, those whose ranks
have the least to do come first."""
VARIED = 2000
"""Layouts above the memory whose variants are estimated, the nearest to it first."""
PLANNED_WORK, FUSED_WORK = 240_000, 60_000
"""Node passes of the layouts that are planned, about 20 s, and of those with fused halos."""
TRIAL = 6000
"""Node passes that take as long as a trial without any, so that few are planned for few ranks."""
FUSED_WITHIN = 1.3
"""Of the best planned cost: layouts in tiles that are so near it are tried with fused halos."""
MOST_ROUNDS = 6
"""Of planning and predicting memory where nothing fits."""
GOOD_LAYOUTS, FAR_BEHIND = 10, 1.5
"""Once so many layouts are planned, one that is so far behind the best so many is not."""
PER_SHAPE = 3
"""Orders of one shape that are planned, the best ones."""
MARGIN = 1.15
"""An estimate of memory may be so much too high; above it a layout is out without a plan."""
MEMORY = OBJECTIVES[1]

Estimated = tuple[LayoutEstimate, Candidate]


@dataclass
class Chooser:
    """Looks for the layouts of one config."""

    config: RunConfig
    graph_of: Callable[[int], Graph]
    """Number of samples of a microbatch -> the network's graph."""
    machine: MachineModel
    rehearse: Callable[[RunConfig, Plan], list[dict[str, int]]]
    """Returns the memory of every rank; HiresError: it cannot be predicted."""
    given: GivenKeys = NOTHING_GIVEN
    """Keys that the user gave: layouts with other values are not looked at."""
    objective: str = OBJECTIVES[0]
    report: Callable[[str], None] = lambda text: None
    """Shows what the search does."""
    effort: float = 1.0
    """The share of the usual work that a search may take."""
    impossible: dict[Candidate, str] = field(default_factory=dict)
    """Layouts that make no plan, with the whole error."""

    def choose(self, ranks: int) -> Choice:
        """Returns the layouts of exactly so many ranks.

        PlanError: no layout has so many ranks, or none fits; it states what would.
        """
        began_s = time.monotonic()
        choice = Choice(ranks, self.objective, self._source())
        estimator = self._estimator(ranks)
        estimates = self._estimated(estimator, choice)
        if not estimates:
            raise PlanError(none_of(self.config, len(estimator.layers), ranks, self.given))
        rooms = self._rooms(ranks)
        limit, planned = limit_bytes(rooms[0], ranks), list[PlannedOption]()
        rehearsal = Rehearsal(planned, rooms, limit, self.rehearse, self._cost)
        bound = MARGIN * limit
        for _ in range(MOST_ROUNDS):
            fitting, short = self._fitting(estimator, estimates, bound, choice)
            tried = {*self.impossible, *(option.candidate for option, _ in planned)}
            fitting = [pair for pair in fitting if pair[1] not in tried]
            if not fitting:
                break
            self._plan_more(planned, fitting, bound, estimator, choice)
            correction = rehearsal.run(self.report)
            if rehearsal.is_vain or any(option.fits for option, _ in planned):
                break
            bound = OUT_ABOVE * limit / correction
        choice.reasons += short
        options = [option for option, _ in planned]
        choice.options = sorted((o for o in options if o.fits), key=self._cost)
        choice.out = sorted((o for o in options if not o.fits), key=self._cost)
        choice.planned = len(options)
        choice.left = max(0, choice.considered - choice.planned - choice.reasons.total())
        choice.seconds = time.monotonic() - began_s
        if choice.reasons.total() > short.total() and not planned:
            raise PlanError(no_plan(choice, self.impossible.values()))
        if not choice.options:
            raise self._none_fits(estimator, choice, rehearsal)
        return choice

    def _none_fits(self, estimator: Estimator, choice: Choice, rehearsal: Rehearsal) -> PlanError:
        """Returns the error of a search that has nothing to offer."""
        failures = rehearsal.failures
        if failures and not rehearsal.ratios:
            every = "; ".join([*dict.fromkeys(failures)][:MOST_REASONS])
            return PlanError(f"no layout of ranks={choice.ranks} can run: {every}")
        if rehearsal.beside:
            config = rehearsal.planned[0][0].config
            text = f"{rehearsal.beside}; {fewer_on_a_node(config)}"
            return NoRoomError(f"no layout of ranks={choice.ranks} fits: {text}")
        facts = rehearsal.rooms[0], choice, self.given, rehearsal.correction
        return NoRoomError(nothing_fits(estimator, *facts))

    def _rooms(self, ranks: int) -> list[Room]:
        """Returns how much memory so many ranks may need; the layout itself is still open."""
        parallel = ParallelConfig(replicas=ranks)
        return rooms_of(dataclasses.replace(self.config, parallel=parallel))

    def _cost(self, option: Option) -> float:
        return option.peak_bytes if self.objective == MEMORY else option.time.step_s

    @cached_property
    def _graph(self) -> Graph:
        """Returns the network's graph of the whole batch, as its ranks compute it."""
        return rewritten(self.config, self.graph_of(max(1, self.config.batch)))

    def _work(self, node: Node, share: float, back: bool) -> NodeWork | None:
        """Returns what a pass over a share of a node of that graph asks for."""
        config = self.config
        phase = {"training": config.task.name == "train", "back": back}
        dtype = PRECISIONS[config.precision.name]
        return node_work(self._graph, node, share, dtype=dtype, **phase)

    def _source(self) -> str:
        """Returns where the step times come from."""
        passes = (False, True) if self.config.task.name == "train" else (False,)
        pairs = itertools.product(self._graph.nodes, passes)
        works = (self._work(node, 1.0, back) for node, back in pairs)
        return self.machine.source_of(work for work in works if work is not None)

    def _estimator(self, ranks: int) -> Estimator:
        config, graph = self.config, self._graph
        of_node = min(-(-ranks // config.launcher.num_nodes), ranks)
        device = self.machine.speed(of_node)

        def seconds(node: Node, share: float, back: bool) -> float:
            work = self._work(node, share, back)
            return device.seconds(work) if work is not None else 0.0

        network = dataclasses.replace(self.machine.network, ranks_per_node=of_node)
        rate = 1 / max(device.update_s(1e9) / 1e9, 1e-15)
        return Estimator(config, graph, seconds, network, rate, self.machine.cores)

    def _estimated(self, estimator: Estimator, choice: Choice) -> list[Estimated]:
        """Returns the estimates of all layouts of so many ranks that the user's keys allow."""
        self.report("looking at the layouts ...")
        estimates: list[Estimated] = []
        limit = limit_bytes(self._rooms(choice.ranks)[0], choice.ranks)
        every = [*shapes(self.config, choice.ranks, len(estimator.layers), self.given)]
        every.sort(key=lambda shape: self._promise(estimator, shape, limit))
        counts: dict[tuple[int, ...], int] = {}
        left = self.effort * ESTIMATED_ACTIONS
        for shape in every:
            if left < 0:  # those left are counted
                key = shape.replicas, shape.stages, shape.local_dp, shape.directions
                if key not in counts:
                    counts[key] = sum(1 for _ in orders(self.config, shape, self.given))
                choice.considered += counts[key]
                continue
            for order in orders(self.config, shape, self.given):
                choice.considered += 1
                estimates.append((estimator.estimate(order), order))
                left -= _num_actions(order)
        return estimates

    def _promise(
        self, estimator: Estimator, shape: LayoutShape, limit: float
    ) -> tuple[bool, float]:
        """Returns by what shapes are sorted before they are estimated: what may fit comes first.

        All ranks share the work, so the fewest stages (bubbles) and tiles (halos) come next.
        """
        ranks = max(1, sum(shape.ranks_of_stages))
        needs = estimator.rough_bytes * shape.directions / ranks
        return needs > limit, shape.stages * shape.directions + 0.1 * shape.tiles

    def _fitting(
        self,
        estimator: Estimator,
        estimates: Sequence[Estimated],
        limit: float,
        choice: Choice,
    ) -> tuple[list[Estimated], Counter[str]]:
        """Returns what may fit, with what makes others fit, in the order in which it is planned.

        Also why others do not. What makes them fit is looked for in the nearest to the ``limit``.
        """
        fitting: list[Estimated] = []
        num_varied = 0
        short: Counter[str] = Counter()
        choice.least_bytes = min(estimate.peak_bytes for estimate, _ in estimates)
        for estimate, candidate in sorted(estimates, key=lambda pair: pair[0].peak_bytes):
            is_last = bool(fitting) and num_varied >= VARIED * self.effort
            if estimate.peak_bytes <= limit and (is_last or self.objective != MEMORY):
                fitting.append((estimate, candidate))
                continue
            if is_last:
                continue
            num_varied += 1
            others = variants(self.config, candidate, self.given)
            more = [(estimator.estimate(one), one) for one in others]
            least = min((e.peak_bytes for e, _ in more), default=estimate.peak_bytes)
            choice.least_bytes = min(choice.least_bytes, least)
            inside = [pair for pair in more if pair[0].peak_bytes <= limit]
            if inside:
                fitting.append(min(inside, key=lambda pair: self._estimated_cost(pair[0])))
            else:
                short[f"needs {_rough(least)} or more on a rank"] += 1
        fitting.sort(key=lambda pair: self._estimated_cost(pair[0]))
        return fitting, short

    def _estimated_cost(self, estimate: LayoutEstimate) -> float:
        return estimate.peak_bytes if self.objective == MEMORY else estimate.step_s

    def _plan_more(
        self,
        planned: list[PlannedOption],
        fitting: Sequence[Estimated],
        bound: float,
        estimator: Estimator,
        choice: Choice,
    ) -> None:
        """Plans and simulates the best orders of each shape, the best shapes first; at least one.

        They are planned with other cuts, too, and the best ones in tiles with fused halos.
        ``bound`` is the most that an estimate of memory may be.
        """
        tried: Counter[LayoutShape] = Counter()
        before, left = len(planned), self.effort * PLANNED_WORK
        least = min(self._trial_work(candidate) for _, candidate in fitting)
        for estimate, candidate in _best_of_each_first(fitting):
            if tried[candidate.shape] >= PER_SHAPE or self._is_hopeless(estimate, planned):
                continue
            # What takes more work than is left is left out, but for one that takes the least.
            work = self._trial_work(candidate)
            if work > left and (len(planned) > before or work > least):
                continue
            so_far = len(planned)
            by_bytes = self.objective == MEMORY or estimate.peak_bytes > bound / 2
            for one in self._with_cuts(estimator, candidate, by_bytes):
                if one != candidate and work > left:
                    break
                left -= work
                choice.considered += one != candidate
                planned += self._trial(estimator.estimate(one), one, choice)
            tried[candidate.shape] += len(planned) > so_far
        fuse_left = self.effort * FUSED_WORK
        for one in self._fused([option for option, _ in planned[before:]]):
            work = self._trial_work(one)
            if work <= fuse_left:
                fuse_left -= work
                choice.considered += 1
                planned += self._trial(estimator.estimate(one), one, choice)

    def _trial_work(self, candidate: Candidate) -> float:
        """Returns the node passes of all ranks of a replica, by which planning takes longer."""
        nodes = len(self._graph.nodes) / candidate.shape.stages
        return TRIAL + _num_actions(candidate) * nodes

    def _trial(
        self, estimate: LayoutEstimate, candidate: Candidate, choice: Choice
    ) -> list[PlannedOption]:
        """Returns a layout, planned and simulated; none if it makes no plan: that is counted."""
        try:
            config = resolve(candidate.change.applied(self.config))
            for problem in check_numbers(config):
                raise PlanError(problem.text)
            self.report(f"planning {config.parallel.label} ({candidate.change.text}) ...")
            plan = make_plan(config, self.graph_of(max(1, config.batch // config.parallel.pieces)))
            if not plan.ok:
                raise PlanError(next(f.text for f in plan.findings if f.severity == "error"))
        except (ConfigError, PlanError) as error:
            choice.reasons[str(error).split(";")[0]] += 1
            self.impossible[candidate] = str(error)
            return []
        step = self.machine.step_time(plan)
        sent = int(plan.totals.get("bytes", 0)), int(plan.totals.get("messages", 0))
        peak = int(estimate.peak_bytes)
        return [(Option(candidate, config, step, peak, False, *sent, limit=step.limit), plan)]

    def _is_hopeless(self, estimate: LayoutEstimate, planned: Sequence[PlannedOption]) -> bool:
        """Whether a layout would be far behind several of those that were planned."""
        costs = sorted(self._cost(option) for option, _ in planned if option.fits)
        if len(costs) < GOOD_LAYOUTS:
            return False
        return self._estimated_cost(estimate) > FAR_BEHIND * costs[GOOD_LAYOUTS - 1]

    def _with_cuts(
        self, estimator: Estimator, candidate: Candidate, by_bytes: bool
    ) -> Iterable[Candidate]:
        """Yields a layout with the usual cut of its stages, and with those that are better."""
        yield candidate
        if "parallel.balance" in self.given.values:
            return
        cuts = [estimator.balanced(candidate, "seconds")]
        cuts += [estimator.balanced(candidate, "bytes")] if by_bytes else []
        for cut in {cut for cut in cuts if cut is not None}:
            yield dataclasses.replace(candidate, balance=cut)

    def _fused(self, options: Sequence[Option]) -> Iterable[Candidate]:
        """Yields the best layout of each shape in tiles with fused halos, if it is a good one."""
        best: dict[LayoutShape, Candidate] = {}
        ranked = sorted(options, key=self._cost)
        for option in ranked:
            shape = option.candidate.shape
            if shape.spatial_stages and self._cost(option) <= FUSED_WITHIN * self._cost(ranked[0]):
                best.setdefault(shape, option.candidate)
        for candidate, fuse in itertools.product(best.values(), FUSED[1:]):
            if self.given.allow({"parallel.halo.fuse": fuse}) and fuse != candidate.fuse:
                yield dataclasses.replace(candidate, fuse=fuse)


def _num_actions(candidate: Candidate) -> int:
    """Returns the actions of the ranks of a replica in a direction of time."""
    shape = candidate.shape
    passes = candidate.pairs * candidate.microbatches * shape.directions
    return sum(shape.ranks_of_stages) * passes


def _best_of_each_first(fitting: Sequence[Estimated]) -> list[Estimated]:
    """Returns the first layout of each shape, then the others, both in their order."""
    seen: set[LayoutShape] = set()
    first: list[Estimated] = []
    others: list[Estimated] = []
    for pair in fitting:
        (others if pair[1].shape in seen else first).append(pair)
        seen.add(pair[1].shape)
    return [*first, *others]


def _rough(num_bytes: float) -> str:
    """Returns bytes to a power of two, so that reasons of about the same are one."""
    power = 2.0 ** max(0, int(num_bytes).bit_length() - 1)
    return size(power)
