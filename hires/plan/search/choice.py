"""Holds what a search for layouts answers: those that fit, the best first, and the reasons."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.fields import build
from hires.core.config.run_config import RunConfig
from hires.core.errors import PlanError
from hires.plan.graph import plain
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
    """By all ranks, in a step."""
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
    """Where the step times come from."""
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
