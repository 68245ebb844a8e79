"""Predicts the memory of planned layouts, the best first, until enough of them fit.

A rehearsal takes seconds, an estimate nothing: what the first ones needed corrects the estimates of
the others, and a layout that is far above the limit by its corrected estimate is not rehearsed. The
layout that ends up first was always rehearsed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError
from hires.plan.memory import Room, needed_bytes
from hires.plan.plan import Plan
from hires.plan.rank_kinds import rehearsal_work
from hires.plan.search.choice import Option

MOST_FITTING, MOST_WORK = 3, 6000
"""Layouts that fit and are rehearsed, and their work, about 10 s, the first not counted; the others
are estimated."""
OUT_ABOVE = 1.1
"""A corrected estimate so far above the limit needs no rehearsal."""
OUT_ABOVE_LATER = 1.02
"""The same once two rehearsals have corrected it."""
MOST_FAILURES = 3
"""Layouts whose steps cannot run, after which no other is rehearsed."""
NEAR_LIMIT = 0.9
"""A layout that needs so much of the limit is one that the memory decides."""

PlannedOption = tuple[Option, Plan]


@dataclass
class Rehearsal:
    """The memory of the options of one search."""

    planned: list[PlannedOption]
    rooms: Sequence[Room]
    """The memory that the ranks share, and that of the machines beside their GPUs."""
    limit: float
    """Bytes of a rank."""
    rehearse: Callable[[RunConfig, Plan], list[dict[str, int]]]
    cost: Callable[[Option], float]
    """By which options are ranked."""
    report: Callable[[str], None]
    ratios: list[tuple[bool, bool, float]] = field(default_factory=list)
    """Of each rehearsal: whether it has tiles, whether it has several stages, and predicted over
    estimated bytes."""
    failures: list[str] = field(default_factory=list)
    """Why ranks cannot run the steps of layouts."""
    beside: str = ""
    """What is too much for the memory of the machines beside the GPUs."""

    def correction(self, option: Option | None = None) -> float:
        """Returns by how much the estimates are too low, for layouts like an option if any was."""
        like = [ratio for *kind, ratio in self.ratios if option and kind == [*_kind(option)]]
        ratios = like or [ratio for *_, ratio in self.ratios]
        return statistics.median(ratios) if ratios else 1.0

    @property
    def all_failed(self) -> bool:
        """Whether ranks cannot run the step of any of several layouts, for one reason."""
        alike = len({*self.failures}) == 1
        return alike and len(self.failures) >= MOST_FAILURES and not self.ratios

    def run(self) -> None:
        """Marks each option as one that fits or not; one that fits is looked for at any price."""
        work = 0
        while not self.all_failed:
            self._correct()
            fitting = [pair for pair in self.planned if pair[0].fits]
            fitting.sort(key=lambda pair: self.cost(pair[0]))
            waiting = [pair for pair in fitting if not pair[0].rehearsed]
            if not waiting:
                break
            if fitting[0][0].rehearsed:
                work += rehearsal_work(waiting[0][1])
                if len(fitting) - len(waiting) >= MOST_FITTING or work > MOST_WORK:
                    break
            self._rehearse(*waiting[0])
        for option, _ in self.planned:
            if self.all_failed:
                option.fits, option.limit = False, self.failures[-1]
            recomputes = option.candidate.checkpoint != "none"
            if option.fits and (option.peak_bytes > NEAR_LIMIT * self.limit or recomputes):
                option.limit = "memory"

    def _rehearse(self, option: Option, plan: Plan) -> None:
        self.report(f"predicting the memory of {option.config.parallel.label} ...")
        option.rehearsed = True
        try:
            plan = plan.with_results(memory=self.rehearse(option.config, plan))
        except (ConfigError, PlanError) as error:
            option.fits, option.limit = False, str(error)
            self.failures.append(str(error))
            return
        option.peak_bytes = max(map(needed_bytes, plan.memory))
        ratio = option.peak_bytes / max(1, option.estimated_bytes)
        self.ratios.append((*_kind(option), ratio))
        own, *beside = (room.shortage(option.config, plan) for room in self.rooms)
        option.fits = own is None and not any(beside)
        if own is None:
            self.beside = next(filter(None, beside), self.beside)

    def _correct(self) -> None:
        sure = OUT_ABOVE if len(self.ratios) < 2 else OUT_ABOVE_LATER
        for option, _ in self.planned:
            if not option.rehearsed:
                option.peak_bytes = int(option.estimated_bytes * self.correction(option))
                # An estimate near the limit decides nothing, but for its place in the order.
                option.fits = option.peak_bytes <= sure * self.limit


def _kind(option: Option) -> tuple[bool, bool]:
    # Estimates are off in another way where images are divided, and where microbatches are in
    # flight.
    return option.candidate.shape.tiles > 1, option.candidate.shape.stages > 1
