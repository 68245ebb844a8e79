"""Holds what a search for layouts answers, and predicts the memory of its best layouts.

A rehearsal takes seconds, an estimate nothing: what the first ones needed corrects the estimates of
the others, and a layout that is far above the limit by its corrected estimate is not rehearsed. The
layout that ends up first was always rehearsed.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.fields import build
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, PlanError
from hires.plan.graph import plain
from hires.plan.memory import Room, needed_bytes
from hires.plan.plan import Plan
from hires.plan.rank_kinds import rehearsal_work
from hires.plan.route_choice import resolve
from hires.plan.search.candidates import Candidate, candidate_of
from hires.plan.simulation.machine_model import StepTime


class NoRoomError(PlanError):
    """There are layouts, and none fits the memory."""


@dataclass
class Option:
    """A layout that was planned and simulated."""

    candidate: Candidate
    config: RunConfig
    time: StepTime
    peak_bytes: int
    """Of the fullest rank."""
    rehearsed: bool
    """Whether that is the prediction of a run, not an estimate."""
    sent_bytes: int
    messages: int
    fits: bool = True
    limit: str = ""
    """What would have to be faster or larger: ``compute``, ``messages``, ``bubble``, ``cores`` or
    ``memory``."""
    estimated_bytes: int = 0
    """Of the fullest rank, before any rehearsal."""

    @property
    def images_per_s(self) -> float:
        """Images of a step by its seconds."""
        return self.config.batch / self.time.step_s

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, with the keys of its layout and what a reader asks for."""
        return {
            "layout": self.config.parallel.label,
            "overrides": self.candidate.overrides,
            "keys": self.candidate.keys,
            "step_s": self.time.step_s,
            "images_per_s": self.images_per_s,
            **{name: plain(getattr(self, name)) for name in _FACTS},
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any], config: RunConfig) -> Option:
        """Returns the option that :meth:`to_dict` described, of the config that is searched for.

        KeyError, TypeError, ValueError or ConfigError: it is damaged.
        """
        candidate = candidate_of(values["keys"])
        facts = {name: values[name] for name in _FACTS}
        facts["time"] = build(StepTime, facts["time"])
        return Option(candidate, resolve(candidate.applied(config)), **facts)


_FACTS = [one.name for one in dataclasses.fields(Option)[2:]]
"""Fields that a file holds as they are."""


@dataclass
class Choice:
    """The answer of a search."""

    ranks: int
    objective: str
    source: str
    options: list[Option] = field(default_factory=list)
    """Those that fit, the best first."""
    out: list[Option] = field(default_factory=list)
    """Those that were planned and do not fit."""
    reasons: Counter[str] = field(default_factory=Counter)
    """How many layouts are out without a plan, by reason."""
    considered: int = 0
    planned: int = 0
    left: int = 0
    """Layouts that fit by their estimate and were not planned: slower by it, or too many."""
    seconds: float = 0.0
    kept: bool = False
    """Whether it is that of an earlier search."""
    refused: str = ""
    """Why the network refuses a larger image, of a search for the largest; nothing: it does not."""
    least_bytes: float = 0.0
    """The least memory of the fullest rank among all layouts, by estimate."""

    @property
    def best(self) -> Option:
        """The first one; PlanError: nothing fits."""
        if not self.options:
            raise PlanError(f"no layout of ranks={self.ranks} fits; use more ranks or memory")
        return self.options[0]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        options, out = ([one.to_dict() for one in some] for some in (self.options, self.out))
        return {**vars(self), "options": options, "out": out, "reasons": dict(self.reasons)}

    @staticmethod
    def from_dict(values: Mapping[str, Any], config: RunConfig) -> Choice:
        """Returns the choice that :meth:`to_dict` described; errors are those of an option."""
        facts = {one.name: values[one.name] for one in dataclasses.fields(Choice)}
        for name in ("options", "out"):
            facts[name] = [Option.from_dict(one, config) for one in values[name]]
        return Choice(**facts | {"reasons": Counter(values["reasons"])})


MOST_FITTING, MOST_WORK = 2, 6000
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
    rehearse: Callable[[RunConfig, Plan], list[dict[str, int]]]
    cost: Callable[[Option], float]
    """By which options are ranked."""
    report: Callable[[str], None]
    ratios: list[tuple[bool, bool, float]] = field(default_factory=list)
    """Of each rehearsal: whether it has tiles, whether it has several stages, and predicted over
    estimated bytes."""
    failures: list[str] = field(default_factory=list)
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
