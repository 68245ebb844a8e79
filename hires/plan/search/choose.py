"""Chooses layouts: ranks those that fit by what they cost, and says why the others are out.

    all layouts of so many ranks     estimated: numbers, sums, the schedule      a millisecond each
      -> the best of each shape      planned, proved, simulated                  a second each
        -> the best of these         their memory rehearsed, until some fit      seconds each
          -> ranked                  by step time or memory

The layouts that were rehearsed show how far the estimates of memory are off, and correct the
others. Where none of the planned ones fits, those that fit by the corrected estimates are next.
How many are looked at follows from counts of their work, never from a clock: the same question has
the same answer on a busy machine.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hires.core.config.launcher_config import node_starts
from hires.core.config.parallel_config import OBJECTIVES, ParallelConfig
from hires.core.config.precision_config import PRECISIONS
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError
from hires.core.units import size
from hires.plan.checks import check_numbers, check_tiles
from hires.plan.graph import Graph, Node
from hires.plan.memory import rooms_of
from hires.plan.passes.rewriting import rewritten
from hires.plan.plan import Plan
from hires.plan.planner import make_plan, uncut_plan
from hires.plan.route_choice import resolve
from hires.plan.search.candidates import (
    NOTHING_GIVEN,
    Candidate,
    Given,
    LayoutShape,
    orders,
    others,
    shapes,
    variants,
)
from hires.plan.search.choice import (
    OUT_ABOVE,
    Choice,
    NoRoomError,
    Option,
    PlannedOption,
    Rehearsal,
)
from hires.plan.search.estimate import Estimator
from hires.plan.search.remedies import cannot_run, no_plan, none_of, nothing_fits
from hires.plan.search.stage_table import RankShare
from hires.plan.simulation.machine_model import MachineModel
from hires.plan.simulation.node_work import node_work
from hires.plan.updates import scatters_gradients

ESTIMATED_ACTIONS = 4_000_000
"""Actions of the schedules that are estimated, about 8 s. Where there are more, those whose ranks
have the least to do come first."""
VARIED, RECUT = 2000, 64
"""Layouts above the memory whose variants are estimated, the nearest to it first, and those with
other cuts."""
PLANNED_WORK, TRIED_WORK = 150_000, 75_000
"""Node passes of the layouts that are planned, and of the best of these with other values of keys
whose cost is hard to estimate."""
TRIAL = 6000
"""Node passes that take as long as a trial without any, so that few are planned for few ranks."""
TRIED_WITHIN = 1.3
"""Of the best planned cost: layouts that are so near it are planned with these values."""
MOST_ROUNDS = 6
"""Of planning and predicting memory where nothing fits."""
GOOD_LAYOUTS, FAR_BEHIND = 10, 1.3
"""Once so many layouts are planned, one that is so far behind the best so many is not."""
PER_SHAPE = 2
"""Orders of one shape that are planned, the best of those that surely fit and of the others."""
MARGIN = 1.15
"""An estimate of memory may be so much too high; above it a layout is out without a plan."""
MEMORY = OBJECTIVES[1]


@dataclass
class Chooser:
    """Looks for the layouts of one config."""

    config: RunConfig
    graph_of: Callable[[int], Graph]
    """Number of samples of a microbatch -> the network's graph."""
    machine: MachineModel
    rehearse: Callable[[RunConfig, Plan], list[dict[str, int]]]
    """Returns the memory of every rank; HiresError: it cannot be predicted."""
    given: Given = field(default_factory=lambda: NOTHING_GIVEN)
    """Keys that the user gave: layouts with other values are not looked at."""
    objective: str = OBJECTIVES[0]
    report: Callable[[str], None] = lambda text: None
    effort: float = 1.0
    """The share of the usual work that a search may take."""
    errors: dict[Candidate, str] = field(default_factory=dict)
    """Layouts that make no plan, with the whole error."""

    def choose(self, ranks: int) -> Choice:
        """Returns the layouts of so many ranks; PlanError: none exists or fits, and what would."""
        for problem in check_tiles(self.config):
            raise PlanError(str(problem))
        began_s = time.monotonic()
        choice = Choice(ranks, self.objective, self.machine.source)
        estimator = self._estimator(ranks)
        # How much memory so many ranks may need; the layout itself is still open.
        rooms = rooms_of(dataclasses.replace(self.config, parallel=ParallelConfig(replicas=ranks)))
        limit = rooms[0].bytes_of_one(ranks)
        listed = self._listed(estimator, choice, limit)
        if not listed:
            raise PlanError(none_of(self.config, len(estimator.layers), ranks, self.given))
        rehearsal = Rehearsal([], rooms, limit, self.rehearse, self._cost, self.report)
        bound = MARGIN * limit
        for _ in range(MOST_ROUNDS):
            fitting, short = self._fitting(estimator, listed, bound, choice)
            tried = {*self.errors, *(option.candidate for option, _ in rehearsal.planned)}
            fitting = [one for one in fitting if one not in tried]
            if not fitting:
                break
            rehearsal.planned += self._planned(estimator, fitting, bound, choice)
            rehearsal.run()
            if rehearsal.all_failed or any(option.fits for option, _ in rehearsal.planned):
                break
            bound = OUT_ABOVE * limit / rehearsal.correction()
        choice.reasons += short
        options = sorted((option for option, _ in rehearsal.planned), key=self._cost)
        choice.options = [option for option in options if option.fits]
        choice.out = [option for option in options if not option.fits]
        choice.planned = len(options)
        choice.left = max(0, choice.considered - choice.planned - choice.reasons.total())
        choice.seconds = time.monotonic() - began_s
        if choice.options:
            return choice
        if choice.reasons.total() > short.total() and not options:
            raise PlanError(no_plan(choice, self.errors.values()))
        if rehearsal.failures and not rehearsal.ratios:
            raise PlanError(cannot_run(ranks, rehearsal.failures))
        raise NoRoomError(nothing_fits(estimator, choice, self.given, rehearsal))

    def _cost(self, option: Option) -> float:
        return option.peak_bytes if self.objective == MEMORY else option.time.step_s

    def _estimated_cost(self, estimator: Estimator, candidate: Candidate) -> float:
        step_s, peak_bytes = estimator.estimate(candidate)
        return peak_bytes if self.objective == MEMORY else step_s

    @cached_property
    def _graph(self) -> Graph:
        return rewritten(self.config, self.graph_of(max(1, self.config.batch)))

    def _estimator(self, ranks: int) -> Estimator:
        config, graph = self.config, self._graph
        of_node = min(-(-ranks // config.num_nodes), ranks)
        device = self.machine.speed(of_node)

        dtype, training = PRECISIONS[config.precision.name], config.task.name == "train"

        def seconds(node: Node, share: float, back: bool) -> float:
            work = node_work(graph, node, share, dtype=dtype, training=training, back=back)
            return device.seconds(work) if work is not None else 0.0

        starts = node_starts(ranks, config.num_nodes)
        network = dataclasses.replace(self.machine.network, node_starts=starts)
        rate = 1 / max(device.update_s(1e9) / 1e9, 1e-15)
        of_replicas = dataclasses.replace(config, parallel=ParallelConfig(replicas=ranks))
        mode = uncut_plan(resolve(of_replicas), graph).gradients
        scatters = scatters_gradients(config, mode)
        return Estimator(config, graph, seconds, network, rate, self.machine.cores, scatters)

    def _listed(self, estimator: Estimator, choice: Choice, limit: float) -> list[Candidate]:
        """Returns the layouts of so many ranks that the user's keys allow and that are estimated.

        Shapes that may fit come first. All ranks share the work, so the fewest stages (bubbles) and
        tiles (halos) come next.
        """
        self.report("looking at the layouts ...")

        of_all = estimator.stage_bytes(RankShare(1.0), 0, len(estimator.graph.nodes))

        def order(shape: LayoutShape) -> tuple[bool, float]:
            needs = (of_all.weights + of_all.kept) * shape.directions / sum(shape.ranks_of_stages)
            return needs > limit, shape.stages * shape.directions + 0.1 * shape.tiles

        every = shapes(self.config, choice.ranks, len(estimator.layers), self.given)
        listed: list[Candidate] = []
        left = self.effort * ESTIMATED_ACTIONS
        for shape in sorted(every, key=order):
            if left < 0:
                break
            for one in orders(self.config, shape, self.given):
                listed.append(one)
                left -= one.num_actions
        choice.considered = len(listed)
        return listed

    def _fitting(
        self, estimator: Estimator, listed: Iterable[Candidate], bound: float, choice: Choice
    ) -> tuple[list[Candidate], Counter[str]]:
        """Returns what needs no more than ``bound`` by its estimate, the best first.

        That of others which recomputes, or is cut in another way, is among them. Also why others
        are out.
        """

        def need(candidate: Candidate) -> float:
            return estimator.estimate(candidate).peak_bytes

        cost = functools.partial(self._estimated_cost, estimator)
        by_need, sure = sorted(listed, key=need), bound / MARGIN
        fitting = [one for one in by_need if need(one) <= sure and self.objective != MEMORY]
        short, recut = Counter[str](), max(1, int(RECUT * self.effort))
        choice.least_bytes = need(by_need[0])
        for one in by_need[len(fitting) :][: max(1, int(VARIED * self.effort))]:
            forms = sorted(variants(self.config, one, self.given), key=need)
            if need(forms[0]) > bound and one.shape.stages > 1 and one.balance is None and recut:
                recut -= 1
                cut = estimator.balanced(forms[0], "bytes")
                forms.append(dataclasses.replace(forms[0], balance=cut))
            least = min(map(need, forms))
            choice.least_bytes = min(choice.least_bytes, least)
            inside = [form for form in forms if need(form) <= bound]
            if inside:  # the best one, and the best of those that surely fit
                inside.sort(key=cost)
                fitting += dict.fromkeys([inside[0], *[f for f in inside if need(f) <= sure][:1]])
            else:
                about = size(2.0 ** max(0, int(least).bit_length() - 1))  # so that few differ
                short[f"needs {about} or more on a rank"] += 1
        return sorted(fitting, key=cost), short

    def _planned(
        self, estimator: Estimator, fitting: Sequence[Candidate], bound: float, choice: Choice
    ) -> list[PlannedOption]:
        """Returns the best orders of each shape, planned and simulated; at least one is tried.

        They are planned with other cuts, too, and the best ones with fused halos and the like.
        ``bound`` is the most that an estimate of memory may be.
        """
        planned: list[PlannedOption] = []
        tried: Counter[tuple[LayoutShape, bool]] = Counter()
        # Where each takes more than may be spent, one that takes the least is planned.
        left = max(self.effort * PLANNED_WORK, min(map(self._trial_work, fitting)))
        for candidate in fitting:
            work, own = self._trial_work(candidate), self._estimated_cost(estimator, candidate)
            kind = candidate.shape, estimator.estimate(candidate).peak_bytes <= bound / MARGIN
            costs = sorted(self._cost(option) for option, _ in planned)
            is_behind = costs[GOOD_LAYOUTS - 1 :] and own > FAR_BEHIND * costs[GOOD_LAYOUTS - 1]
            if tried[kind] >= PER_SHAPE or work > left or is_behind:
                continue
            before = len(planned)
            for one in self._with_cuts(estimator, candidate, bound / MARGIN):
                if one == candidate or work <= left:
                    left -= work
                    choice.considered += one != candidate
                    planned += self._trial(estimator, one, choice)
            tried[kind] += len(planned) > before
        left = self.effort * TRIED_WORK
        for one in self._tried_again([option for option, _ in planned]):
            if self._trial_work(one) <= left:
                left -= self._trial_work(one)
                choice.considered += 1
                planned += self._trial(estimator, one, choice)
        return planned

    def _trial_work(self, candidate: Candidate) -> float:
        return TRIAL + candidate.num_actions * len(self._graph.nodes) / candidate.shape.stages

    def _trial(
        self, estimator: Estimator, candidate: Candidate, choice: Choice
    ) -> list[PlannedOption]:
        """Returns a layout, planned and simulated; none if it makes no plan: that is counted."""
        try:
            config = resolve(candidate.applied(self.config))
            for problem in check_numbers(config):
                raise PlanError(problem.text)
            self.report(f"planning {config.parallel.label} ({candidate.overrides}) ...")
            plan = make_plan(config, self.graph_of(max(1, config.batch // config.parallel.pieces)))
            if not plan.ok:
                raise PlanError(next(f.text for f in plan.findings if f.severity == "error"))
        except (ConfigError, PlanError) as error:
            choice.reasons[str(error).split(";")[0]] += 1
            self.errors[candidate] = str(error)
            return []
        step, peak = self.machine.step_time(plan), int(estimator.estimate(candidate).peak_bytes)
        sent = plan.totals["bytes"], plan.totals["messages"]
        option = Option(candidate, config, step, peak, False, *sent, True, step.limit, peak)
        return [(option, plan)]

    def _with_cuts(
        self, estimator: Estimator, candidate: Candidate, bound: float
    ) -> Iterator[Candidate]:
        """Yields a layout with its usual cut, and with the best other one within ``bound``."""
        yield candidate
        if "parallel.balance" in self.given:
            return
        cuts = {estimator.balanced(candidate, by): None for by in ("step", "bytes")}
        recut = [dataclasses.replace(candidate, balance=cut) for cut in cuts if cut is not None]

        def order(one: Candidate) -> tuple[float, float]:
            excess = max(0.0, estimator.estimate(one).peak_bytes - bound)
            return excess, self._estimated_cost(estimator, one)

        yield from sorted(recut, key=order)[:1]

    def _tried_again(self, options: Sequence[Option]) -> Iterator[Candidate]:
        """Yields good layouts, one of each shape, with fused halos and the like, the best first."""
        best: dict[LayoutShape, Candidate] = {}
        ranked = sorted(options, key=self._cost)
        for option in ranked:
            if self._cost(option) <= TRIED_WITHIN * self._cost(ranked[0]):
                best.setdefault(option.candidate.shape, option.candidate)
        for candidate in best.values():
            yield from others(self.config, candidate, self.given, "planned")
