"""Chooses layouts: ranks those that fit by what they cost, and says why the others are out.

    all layouts of so many ranks     estimated: numbers, sums, the schedule      a millisecond each
      -> the best of each shape      planned, proved, simulated                  a second each
        -> the best of these         their memory rehearsed, until one fits      seconds each
          -> ranked                  by step time or memory

The layouts that were rehearsed show how far the estimates of memory are off, and correct the
others. Where none of the planned ones fits, those that fit by the corrected estimates are next. A
search ends when its time is used; it then states how many layouts it left.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hires.core.config.parallel_config import OBJECTIVES, ParallelConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import PlanError
from hires.core.precisions import PRECISIONS
from hires.core.units import size
from hires.plan.graph import Graph, Node
from hires.plan.memory import Room, rooms_of
from hires.plan.passes.rewriting import rewritten
from hires.plan.plan import Plan
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
from hires.plan.search.trials import Trials, num_actions
from hires.plan.simulation.machine_model import MachineModel
from hires.plan.simulation.node_work import NodeWork, node_work

FEW_RANKS_S, MANY_RANKS_S = 8.0, 45.0
"""Seconds of a search for a few ranks, and for many."""
MANY_RANKS = 16
LEAST_S = 3.0
"""Seconds that are left for trials, however long the traces of the network took."""
ESTIMATING, FITTING, PLANNING, FUSING = 0.2, 0.3, 0.5, 0.6
"""Shares of the time after which no more layouts are estimated, made to fit, planned, and planned
with fused halos; the rest is for predictions of memory. Where there are more layouts than can be
estimated, those whose ranks have the least to do come first."""
FUSED_WITHIN = 1.3
"""Of the best planned cost: layouts in tiles that are so near it are tried with fused halos."""
MOST_ROUNDS = 3
"""Of planning and predicting memory where nothing fits; more only while there is time."""
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
    budget_s: float | None = None
    began_s: float | None = None
    """When the search began, on the monotonic clock; unset: with :meth:`choose`. Traces count."""

    def choose(self, ranks: int) -> Choice:
        """Returns the layouts of exactly so many ranks.

        PlanError: no layout has so many ranks, or none fits; it states what would.
        """
        now_s = time.monotonic()
        began_s = now_s if self.began_s is None else self.began_s
        allowed_s = self.budget_s or (FEW_RANKS_S if ranks <= MANY_RANKS else MANY_RANKS_S)
        end_s = max(began_s + allowed_s, now_s + min(LEAST_S, allowed_s))
        choice = Choice(ranks, self.objective, self._source())
        estimator = self._estimator(ranks)
        estimates = self._estimated(estimator, choice, _between(now_s, end_s, ESTIMATING))
        if not estimates:
            raise PlanError(none_of(self.config, len(estimator.layers), ranks, self.given))
        rooms = self._rooms(ranks)
        limit, planned = limit_bytes(rooms[0], ranks), list[PlannedOption]()
        rehearsal = Rehearsal(planned, rooms, limit, self.rehearse, self._cost)
        bound, until_s = MARGIN * limit, _between(now_s, end_s, FITTING)
        for number in itertools.count(1):
            fitting, short = self._fitting(estimator, estimates, bound, choice, until_s)
            tried = self._trials.impossible | {option.candidate for option, _ in planned}
            fitting = [pair for pair in fitting if pair[1] not in tried]
            if not fitting or (number > MOST_ROUNDS and self._trials.now_s() > end_s):
                break
            self._plan_more(planned, fitting, bound, estimator, end_s, choice)
            correction = rehearsal.run(end_s + self._trials.tracing_s, self.report)
            if rehearsal.is_vain or any(option.fits for option, _ in planned):
                break
            bound, until_s = (
                OUT_ABOVE * limit / correction,
                _between(self._trials.now_s(), end_s, FITTING),
            )
        choice.reasons += short
        options = [option for option, _ in planned]
        choice.options = sorted((o for o in options if o.fits), key=self._cost)
        choice.out = sorted((o for o in options if not o.fits), key=self._cost)
        choice.planned = len(options)
        choice.left = max(0, choice.considered - choice.planned - choice.reasons.total())
        choice.seconds = time.monotonic() - began_s
        if choice.reasons.total() > short.total() and not planned:
            raise PlanError(no_plan(choice, self._trials.remedies))
        if not choice.options:
            raise self._none_fits(estimator, choice, rehearsal)
        return choice

    def _none_fits(self, estimator: Estimator, choice: Choice, rehearsal: Rehearsal) -> PlanError:
        """Returns the error of a search that has nothing to offer."""
        failures = rehearsal.failures
        if failures and not rehearsal.ratios:
            every = "; ".join([*dict.fromkeys(failures)][:MOST_REASONS])
            return PlanError(f"no layout of ranks={choice.ranks} can run: {every}")
        is_sure = not (choice.ended_early or failures or rehearsal.is_over)
        if rehearsal.beside:
            config = rehearsal.planned[0][0].config
            text = f"{rehearsal.beside}; {fewer_on_a_node(config)}"
            return NoRoomError(f"no layout of ranks={choice.ranks} fits: {text}", is_sure)
        facts = rehearsal.rooms[0], choice, self.given, rehearsal.correction
        return NoRoomError(nothing_fits(estimator, *facts), is_sure)

    def _rooms(self, ranks: int) -> list[Room]:
        """Returns how much memory so many ranks may need; the layout itself is still open."""
        parallel = ParallelConfig(replicas=ranks)
        return rooms_of(dataclasses.replace(self.config, parallel=parallel))

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self.config, self.graph_of, self.machine, self.report)

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

    def _estimated(
        self, estimator: Estimator, choice: Choice, deadline_s: float
    ) -> list[Estimated]:
        """Returns the estimates of all layouts of so many ranks that the user's keys allow."""
        self.report("looking at the layouts ...")
        estimates: list[Estimated] = []
        limit = limit_bytes(self._rooms(choice.ranks)[0], choice.ranks)
        every = [*shapes(self.config, choice.ranks, len(estimator.layers), self.given)]
        every.sort(key=lambda shape: self._promise(estimator, shape, limit))
        counts: dict[tuple[int, ...], int] = {}
        for shape in every:
            if estimates and time.monotonic() > deadline_s:  # those left are counted
                key = shape.replicas, shape.stages, shape.local_dp, shape.directions
                if key not in counts:
                    counts[key] = sum(1 for _ in orders(self.config, shape, self.given))
                choice.considered += counts[key]
                choice.ended_early = True
                continue
            for order in orders(self.config, shape, self.given):
                choice.considered += 1
                estimates.append((estimator.estimate(order), order))
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
        until_s: float,
    ) -> tuple[list[Estimated], Counter[str]]:
        """Returns what may fit, with what makes others fit, in the order in which it is planned.

        Also why others do not. What makes them fit is looked for until a time, the nearest to the
        ``limit`` first.
        """
        fitting: list[Estimated] = []
        short: Counter[str] = Counter()
        choice.least_bytes = min(estimate.peak_bytes for estimate, _ in estimates)
        for estimate, candidate in sorted(estimates, key=lambda pair: pair[0].peak_bytes):
            late = bool(fitting) and self._trials.now_s() > until_s
            if estimate.peak_bytes <= limit and (late or self.objective != MEMORY):
                fitting.append((estimate, candidate))
                continue
            if late:
                choice.ended_early = True
                continue
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
        end_s: float,
        choice: Choice,
    ) -> None:
        """Plans and simulates the best orders of each shape, the best shapes first; at least one.

        They are planned with other cuts, too, and the best ones in tiles with fused halos.
        ``bound`` is the most that an estimate of memory may be.
        """
        tried: Counter[LayoutShape] = Counter()
        now_s, before = self._trials.now_s(), len(planned)
        shares = PLANNING, FUSING
        plan_until_s, fuse_until_s = (_between(now_s, end_s, share) for share in shares)
        smallest = min(num_actions(candidate) for _, candidate in fitting)
        for estimate, candidate in _best_of_each_first(fitting):
            if tried[candidate.shape] >= PER_SHAPE or self._is_hopeless(estimate, planned):
                continue
            # What would take longer than there is time is left, but for one that takes the least.
            takes_s = self._trials.takes_s(candidate)
            needed = len(planned) == before and num_actions(candidate) == smallest
            if not needed and self._trials.now_s() + takes_s > plan_until_s:
                choice.ended_early = True
                continue
            so_far = len(planned)
            by_bytes = self.objective == MEMORY or estimate.peak_bytes > bound / 2
            for one in self._with_cuts(estimator, candidate, by_bytes):
                if one != candidate and self._trials.now_s() > plan_until_s:
                    choice.ended_early = True
                    break
                choice.considered += one != candidate
                planned += self._trials.plan(estimator.estimate(one), one, choice)
            tried[candidate.shape] += len(planned) > so_far
        for one in self._fused([option for option, _ in planned[before:]]):
            if self._trials.now_s() + self._trials.takes_s(one) > fuse_until_s:
                choice.ended_early = True
                continue
            choice.considered += 1
            planned += self._trials.plan(estimator.estimate(one), one, choice)

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


def _between(begin_s: float, end_s: float, share: float) -> float:
    """Returns when a share of the time between two points has passed."""
    return begin_s + share * (end_s - begin_s)


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
