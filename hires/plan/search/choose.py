"""Chooses layouts: ranks those that fit by what they cost, and says why the others are out.

    all layouts of so many ranks     estimated: numbers, sums, the schedule      a millisecond each
      -> the best of each shape      planned, proved, simulated                  a second each
        -> the best of these         their memory rehearsed, until one fits      seconds each
          -> ranked                  by step time or memory

What was rehearsed tells by how much the estimates of memory are off, and corrects the others. A
search ends when its time is used; it says then how many layouts it has not looked at.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.parallel_config import OBJECTIVES
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError, PlanError
from hires.core.precisions import PRECISIONS
from hires.core.units import size
from hires.plan.checks import check_numbers
from hires.plan.graph import Graph
from hires.plan.memory import Room, needed_bytes, room_of
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.search.candidates import (
    FUSED,
    Candidate,
    LayoutShape,
    orders,
    shapes,
    variants,
)
from hires.plan.search.choice import Choice, Option
from hires.plan.search.estimate import Estimator, LayoutEstimate
from hires.plan.search.layout_search import Budget
from hires.plan.search.no_layout import limit_bytes, none_of, nothing_fits
from hires.plan.simulation.machine_model import MachineModel
from hires.plan.simulation.node_work import node_work

FEW_S, MANY_S = 8.0, 45.0
"""Seconds of a search for a few ranks, and for many."""
MANY_RANKS = 16
ESTIMATING = 0.35
"""Share of the time in which layouts are estimated; where there are more, those whose ranks have
the least to do come first."""
PER_SHAPE = 3
"""Orders of one shape that are planned, the best ones."""
MARGIN = 1.15
"""An estimate of memory may be so much too high; above it a layout is out without a plan."""
NEAR_LIMIT = 0.9
"""A layout that needs so much of the limit is one that the memory decides."""


@dataclass
class Chooser:
    """Looks for the layouts of one config."""

    config: RunConfig
    graph_of: Callable[[int], Graph]
    """Number of samples of a microbatch -> the network's graph."""
    machine: MachineModel
    rehearse: Callable[[RunConfig, Plan], list[dict[str, int]]]
    """Returns the memory of every rank; HiresError: it cannot be predicted."""
    fixed: frozenset[str] = frozenset()
    """Keys that the user gave: layouts with other values are out."""
    objective: str = OBJECTIVES[0]
    tell: Callable[[str], None] = lambda text: None
    budget_s: float | None = None

    def choose(self, ranks: int) -> Choice:
        """Returns the layouts of exactly so many ranks.

        PlanError: no layout has so many ranks, or none fits; it says what would.
        """
        began_s = time.monotonic()
        allowed_s = self.budget_s or (FEW_S if ranks <= MANY_RANKS else MANY_S)
        budget = Budget(began_s + allowed_s, trials=10**6)
        choice = Choice(ranks, self.objective, self.machine.source)
        estimator = self._estimator(ranks)
        found = self._estimated(estimator, choice, began_s + ESTIMATING * allowed_s)
        if not found:
            raise PlanError(none_of(self.config, len(estimator.layers), ranks, self.fixed))
        room = room_of(self.config)
        fitting = self._fitting(estimator, found, room, choice)
        options = self._planned(fitting, estimator, budget, choice)
        self._rehearsed(options, room, budget, choice)
        choice.options = sorted((o for o in options if o.fits), key=self._cost)
        choice.out = sorted((o for o in options if not o.fits), key=self._cost)
        choice.seconds = time.monotonic() - began_s
        if not choice.options:
            raise PlanError(nothing_fits(estimator, room, choice))
        return choice

    def _cost(self, option: Option) -> float:
        if self.objective == "memory":
            return option.peak_bytes
        return option.time.step_s

    def _estimator(self, ranks: int) -> Estimator:
        config = self.config
        of_node = min(-(-ranks // config.launcher.num_nodes), ranks)
        device = self.machine.speed(of_node)
        graph = self.graph_of(max(1, config.batch))
        training = config.task.name == "train"
        dtype = _dtype(config)

        def seconds(node: Any, share: float, back: bool) -> float:
            work = node_work(graph, node, share, dtype=dtype, training=training, back=back)
            return device.seconds(work) if work is not None else 0.0

        network = dataclasses.replace(self.machine.network, ranks_per_node=of_node)
        rate = 1 / max(device.update_s(1e9) / 1e9, 1e-15)
        return Estimator(config, graph, seconds, network, rate, self.machine.cores)

    def _estimated(
        self, estimator: Estimator, choice: Choice, deadline_s: float
    ) -> list[tuple[LayoutEstimate, Candidate]]:
        """Returns the estimates of all layouts of so many ranks that the user's keys allow."""
        self.tell("looking at the layouts ...")
        layers, ranks = len(estimator.layers), choice.ranks
        found: list[tuple[LayoutEstimate, Candidate]] = []
        every = [one for one in shapes(self.config, ranks, layers) if self._allows(one.keys)]
        limit = limit_bytes(room_of(self.config), ranks)
        every.sort(key=lambda shape: self._promise(estimator, shape, limit))
        for shape in every:
            for order in orders(self.config, shape):
                choice.considered += 1
                if found and time.monotonic() > deadline_s:
                    choice.left += 1
                    choice.ended_early = True
                    continue
                if not self._allows(_order_keys(order)):
                    continue
                found.append((estimator.estimate(order), order))
        return found

    def _promise(
        self, estimator: Estimator, shape: LayoutShape, limit: float
    ) -> tuple[bool, float]:
        """Returns by what shapes are sorted before they are estimated: what may fit comes first.

        All ranks share the work, so the fewest stages (bubbles) and tiles (halos) come next.
        """
        ranks = max(1, sum(shape.ranks_of_stages))
        needs = estimator.rough_bytes * shape.directions / ranks
        return needs > limit, shape.stages * shape.directions + 0.1 * shape.tiles

    def _allows(self, keys: dict[str, Any]) -> bool:
        """Whether some keys of a layout have the values that the user gave."""
        return all(self._value(key) == keys[key] for key in self.fixed if key in keys)

    def _value(self, key: str) -> Any:
        value: Any = self.config
        for name in key.split("."):
            value = getattr(value, name)
        return value

    def _fitting(
        self,
        estimator: Estimator,
        found: Sequence[tuple[LayoutEstimate, Candidate]],
        room: Room,
        choice: Choice,
    ) -> list[tuple[LayoutEstimate, Candidate]]:
        """Returns what may fit, with what makes others fit, in the order in which it is planned."""
        limit = limit_bytes(room, choice.ranks)
        fitting: list[tuple[LayoutEstimate, Candidate]] = []
        choice.least_bytes = min(estimate.peak_bytes for estimate, _ in found)
        for estimate, candidate in found:
            fits = self.objective != "memory" and estimate.peak_bytes <= limit * MARGIN
            if fits and self._allows(_variant_keys(candidate)):
                fitting.append((estimate, candidate))
                continue
            more = [
                (estimator.estimate(one), one)
                for one in variants(self.config, candidate)
                if one.fuse == 1 and self._allows(_variant_keys(one))
            ]
            least = min((e.peak_bytes for e, _ in more), default=estimate.peak_bytes)
            choice.least_bytes = min(choice.least_bytes, least)
            inside = [pair for pair in more if pair[0].peak_bytes <= limit * MARGIN]
            if inside:
                fitting.append(min(inside, key=lambda pair: self._estimated_cost(pair[0])))
            else:
                choice.reasons[f"needs {_rough(least)} or more on a rank"] += 1
        fitting.sort(key=lambda pair: self._estimated_cost(pair[0]))
        return fitting

    def _estimated_cost(self, estimate: LayoutEstimate) -> float:
        return estimate.peak_bytes if self.objective == "memory" else estimate.step_s

    def _planned(
        self,
        fitting: Sequence[tuple[LayoutEstimate, Candidate]],
        estimator: Estimator,
        budget: Budget,
        choice: Choice,
    ) -> list[Option]:
        """Plans and simulates the best orders of each shape, the best shapes first.

        The best are planned with other cuts and fused halos, too.
        """
        counts: Counter[LayoutShape] = Counter()
        queue: list[tuple[LayoutEstimate, Candidate]] = []
        rest: list[tuple[LayoutEstimate, Candidate]] = []
        for pair in fitting:
            counts[pair[1].shape] += 1
            (queue if counts[pair[1].shape] == 1 else rest).append(pair)
        queue += [pair for pair in rest if counts[pair[1].shape] >= 1]
        options: list[Option] = []
        tried: Counter[LayoutShape] = Counter()
        seen: set[Candidate] = set()
        half_s = (budget.deadline_s + time.monotonic()) / 2
        for estimate, candidate in queue:
            if tried[candidate.shape] >= PER_SHAPE:
                choice.left += 1
                continue
            if options and self._hopeless(estimate, options):
                choice.left += 1
                continue
            if options and not (time.monotonic() < half_s and budget.allows_trial()):
                choice.left += 1
                choice.ended_early = True
                continue
            tried[candidate.shape] += 1
            for one in self._with_cuts(estimator, candidate):
                if one not in seen:
                    seen.add(one)
                    self._plan_one(estimate, one, budget, choice, options)
        for one in self._fused(options):
            if not budget.allows_trial():
                break
            if one not in seen:
                seen.add(one)
                self._plan_one(estimator.estimate(one), one, budget, choice, options)
        return options

    def _hopeless(self, estimate: LayoutEstimate, options: Sequence[Option]) -> bool:
        """Whether a layout would be far behind the tenth of those that were planned."""
        costs = sorted(map(self._cost, options))
        return len(costs) > 10 and self._estimated_cost(estimate) > 1.5 * costs[10]

    def _with_cuts(self, estimator: Estimator, candidate: Candidate) -> Iterable[Candidate]:
        yield candidate
        if "parallel.balance" in self.fixed:
            return
        cut = estimator.balanced(candidate)
        if cut is not None:
            yield dataclasses.replace(candidate, balance=cut)

    def _fused(self, options: Sequence[Option]) -> Iterable[Candidate]:
        """Yields the best layouts in tiles with fused halos."""
        tiled = [o.candidate for o in sorted(options, key=self._cost) if _is_tiled(o)]
        for candidate, fuse in itertools.product(tiled[:2], FUSED[1:]):
            one = dataclasses.replace(candidate, fuse=fuse)
            if self._allows(_variant_keys(one)):
                yield one

    def _plan_one(
        self,
        estimate: LayoutEstimate,
        candidate: Candidate,
        budget: Budget,
        choice: Choice,
        options: list[Option],
    ) -> None:
        config = candidate.change.apply(self.config)
        if config is None:
            return
        problems = check_numbers(config)
        if problems:
            choice.reasons[problems[0].text.split(";")[0]] += 1
            return
        began_s = time.monotonic()
        self.tell(f"planning {config.parallel.label} ({len(options) + 1}) ...")
        try:
            plan = make_plan(config, self.graph_of(max(1, config.batch // config.parallel.pieces)))
        except (ConfigError, PlanError) as error:
            choice.reasons[str(error).split(";")[0]] += 1
            return
        choice.planned += 1
        if not plan.ok:
            wrong = next(f for f in plan.findings if f.severity == "error")
            choice.reasons[wrong.text.split(";")[0]] += 1
            return
        step = self.machine.step_time(plan)
        budget.longest_s = max(budget.longest_s, time.monotonic() - began_s)
        totals = plan.totals
        option = Option(
            candidate,
            config,
            step,
            int(estimate.peak_bytes),
            False,
            int(totals.get("bytes", 0)),
            int(totals.get("messages", 0)),
        )
        option.limit = step.limit
        self._plans[id(option)] = plan
        options.append(option)

    _plans: dict[int, Plan] = field(default_factory=dict)
    """Of options, until their memory was rehearsed."""

    def _rehearsed(self, options: list[Option], room: Room, budget: Budget, choice: Choice) -> None:
        """Predicts the memory of the best options until one fits, and corrects the estimates."""
        ratios: list[float] = []
        for option in sorted(options, key=self._cost):
            fitted = any(one.rehearsed and one.fits for one in options)
            if fitted and not budget.allows_trial():
                break
            if fitted and len(ratios) >= 3:
                break
            self.tell(f"predicting the memory of {option.config.parallel.label} ...")
            began_s = time.monotonic()
            plan = self._plans[id(option)]
            try:
                plan.memory = self.rehearse(option.config, plan)
            except HiresError as error:
                option.fits = False
                option.limit = str(error)
                continue
            budget.longest_s = max(budget.longest_s, time.monotonic() - began_s)
            peak = max(map(needed_bytes, plan.memory))
            ratios.append(peak / max(1, option.peak_bytes))
            option.peak_bytes, option.rehearsed = peak, True
            option.fits = room.shortage(option.config, plan) is None
        correction = sorted(ratios)[len(ratios) // 2] if ratios else 1.0
        limit = limit_bytes(room, choice.ranks)
        for option in options:
            if not option.rehearsed and option.fits:
                option.peak_bytes = int(option.peak_bytes * correction)
                option.fits = option.peak_bytes <= limit
            recomputes = option.candidate.checkpoint != "none"
            if option.peak_bytes > NEAR_LIMIT * limit or (recomputes and option.fits):
                option.limit = "memory"
        self._plans.clear()


def _order_keys(order: Candidate) -> dict[str, Any]:
    return {
        "parallel.microbatches": order.microbatches,
        "parallel.pairs": order.pairs,
        "parallel.schedule": order.schedule,
    }


def _variant_keys(candidate: Candidate) -> dict[str, Any]:
    return {
        "memory.checkpoint": candidate.checkpoint,
        "optimizer.shard": candidate.shards_optimizer,
        "parallel.halo.fuse": candidate.fuse,
    }


def _is_tiled(option: Option) -> bool:
    return option.candidate.shape.spatial_stages > 0


def _dtype(config: RunConfig) -> str:
    return PRECISIONS[config.precision.name]


def _rough(num_bytes: float) -> str:
    """Returns bytes to a power of two, so that reasons of about the same are one."""
    power = 2.0 ** max(0, int(num_bytes).bit_length() - 1)
    return size(power)
