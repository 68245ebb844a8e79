"""Predicts the memory of planned layouts, the best first, until enough of them fit.

A rehearsal takes seconds, an estimate nothing: what the first ones needed corrects the estimates of
the others, and a layout that is far above the limit by its corrected estimate is not rehearsed. The
layout that ends up first was always rehearsed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError
from hires.plan.memory import Room, needed_bytes
from hires.plan.plan import Plan
from hires.plan.search.choice import Option
from hires.plan.search.layout_search import Budget

MOST_FITTING = 3
"""Layouts that fit and are rehearsed while there is time; the others are estimated."""
SURE = 1.1
"""A corrected estimate so far above the limit needs no rehearsal."""
NEAR_LIMIT = 0.9
"""A layout that needs so much of the limit is one that the memory decides."""

PlannedOption = tuple[Option, Plan]


@dataclass
class Rehearsal:
    """The memory of the options of one search."""

    planned: Sequence[PlannedOption]
    room: Room
    limit: float
    """Bytes of a rank."""
    rehearse: Callable[[RunConfig, Plan], list[dict[str, int]]]
    cost: Callable[[Option], float]
    """By which options are ranked."""
    ratios: list[float] = field(default_factory=list)
    """Predicted over estimated bytes."""

    @property
    def correction(self) -> float:
        """By how much the estimates are too low."""
        return statistics.median(self.ratios) if self.ratios else 1.0

    def run(self, budget: Budget, report: Callable[[str], None]) -> float:
        """Marks each option as one that fits or not, and returns the correction.

        At least one that fits is looked for, whatever the time; more only while there is time.
        """
        estimates = {id(option): option.peak_bytes for option, _ in self.planned}
        while True:
            self._correct(estimates)
            ranked = sorted(self.planned, key=lambda pair: self.cost(pair[0]))
            fitting = [pair for pair in ranked if pair[0].fits]
            if not fitting:
                break
            rehearsed = sum(option.rehearsed for option, _ in fitting)
            if fitting[0][0].rehearsed:
                waiting = [pair for pair in fitting if not pair[0].rehearsed]
                if not waiting or rehearsed >= MOST_FITTING or not budget.allows_trial():
                    break
                fitting = waiting
            option, plan = fitting[0]
            report(f"predicting the memory of {option.config.parallel.label} ...")
            began_s = time.monotonic()
            self._rehearse(option, plan, estimates[id(option)])
            budget.longest_s = max(budget.longest_s, time.monotonic() - began_s)
        for option, _ in self.planned:
            recomputes = option.candidate.checkpoint != "none"
            if option.fits and (option.peak_bytes > NEAR_LIMIT * self.limit or recomputes):
                option.limit = "memory"
        return self.correction

    def _rehearse(self, option: Option, plan: Plan, estimate: float) -> None:
        option.rehearsed = True
        try:
            plan.memory = self.rehearse(option.config, plan)
        except HiresError as error:
            option.fits, option.limit = False, str(error)
            return
        option.peak_bytes = max(map(needed_bytes, plan.memory))
        self.ratios.append(option.peak_bytes / max(1.0, estimate))
        option.fits = self.room.shortage(option.config, plan) is None

    def _correct(self, estimates: dict[int, int]) -> None:
        for option, _ in self.planned:
            if not option.rehearsed:
                option.peak_bytes = int(estimates[id(option)] * self.correction)
                # An estimate near the limit decides nothing, but for its place in the order.
                option.fits = option.peak_bytes <= SURE * self.limit
