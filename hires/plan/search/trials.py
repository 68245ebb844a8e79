"""Plans and simulates the layouts that a search tries, and keeps what the trials took.

candidate  ->  config  ->  graph of its microbatch  ->  plan  ->  step time
|                                       |
'------------ it is impossible ---------'  the reason is counted, once
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError
from hires.plan.checks import check_numbers
from hires.plan.graph import Graph
from hires.plan.planner import make_plan
from hires.plan.route_choice import resolve
from hires.plan.search.candidates import Candidate
from hires.plan.search.choice import Choice, Option
from hires.plan.search.estimate import LayoutEstimate
from hires.plan.search.memory_rehearsal import PlannedOption
from hires.plan.simulation.machine_model import MachineModel


@dataclass
class Trials:
    """The trials of one search."""

    config: RunConfig
    graph_of: Callable[[int], Graph]
    """Number of samples of a microbatch -> the network's graph."""
    machine: MachineModel
    report: Callable[[str], None]
    s_per_action: float = 0.0
    """Seconds that planning and simulating took for each action of a replica, the most so far."""
    tracing_s: float = 0.0
    """Seconds of traces that single layouts needed; they are kept, and are no time of trials."""
    impossible: set[Candidate] = field(default_factory=set)
    """Layouts that make no plan."""
    remedies: dict[str, str] = field(default_factory=dict)
    """The first whole error of each reason, which says what would help."""

    def now_s(self) -> float:
        """Returns the time on a clock that stands still while a layout's network is traced."""
        return time.monotonic() - self.tracing_s

    def takes_s(self, candidate: Candidate) -> float:
        """Returns how long a trial may take, by those so far."""
        return self.s_per_action * num_actions(candidate)

    def plan(
        self, estimate: LayoutEstimate, candidate: Candidate, choice: Choice
    ) -> list[PlannedOption]:
        """Returns the option of a layout; none if it makes no plan, whose reason is counted."""
        try:
            return [self._planned(estimate, candidate)]
        except (ConfigError, PlanError) as error:
            reason = str(error).split(";")[0]
            choice.reasons[reason] += 1
            self.remedies.setdefault(reason, str(error))
            self.impossible.add(candidate)
            return []

    def _planned(self, estimate: LayoutEstimate, candidate: Candidate) -> PlannedOption:
        """Returns the option; ConfigError or PlanError: why there is none."""
        config = resolve(candidate.change.applied(self.config))
        for problem in check_numbers(config):
            raise PlanError(problem.text)
        self.report(f"planning {config.parallel.label} ({candidate.change.text}) ...")
        graph = self._traced(max(1, config.batch // config.parallel.pieces))
        began_s = time.monotonic()
        plan = make_plan(config, graph)
        if not plan.ok:
            raise PlanError(next(f.text for f in plan.findings if f.severity == "error"))
        step = self.machine.step_time(plan)
        action_s = (time.monotonic() - began_s) / num_actions(candidate)
        self.s_per_action = max(self.s_per_action, action_s)
        sent = int(plan.totals.get("bytes", 0)), int(plan.totals.get("messages", 0))
        peak = int(estimate.peak_bytes)
        return Option(candidate, config, step, peak, False, *sent, limit=step.limit), plan

    def _traced(self, samples: int) -> Graph:
        """Returns the graph of a microbatch; the seconds that it takes are no time of trials."""
        began_s = time.monotonic()
        try:
            return self.graph_of(samples)
        finally:
            self.tracing_s += time.monotonic() - began_s


def num_actions(candidate: Candidate) -> int:
    """Returns the actions of the ranks of a replica, by which planning takes longer."""
    shape = candidate.shape
    passes = candidate.pairs * candidate.microbatches * shape.directions
    return sum(shape.ranks_of_stages) * passes
