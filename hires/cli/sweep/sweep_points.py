"""Composes and plans the points of a sweep.

Every combination of the axes is composed, filtered by ``--where``, planned and proved before
anything is started.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.cli.compose.choices import config_keys
from hires.cli.compose.compose_config import Composer, config_of
from hires.cli.compose.expression import Expression
from hires.cli.planning import PackedPlan, Planner, with_classes
from hires.cli.sweep.axes import SweepAxis
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError
from hires.core.store.rundir import done_attempts, run_path

ORDERS = ("grouped", "interleaved")
_SHOWN = 3
"""Reasons that one error names."""
_DERIVED = ("height", "width", "ranks")
"""What ``--where`` may name besides keys and groups."""


@dataclass
class SweepPoint:
    """One combination of values."""

    place: tuple[int, ...]
    """One number for each axis."""
    words: list[str]
    """Its overrides."""
    config: RunConfig | None = None
    """None if its values do not go together."""
    path: Path | None = None
    """Its run folder, there or not."""
    done: list[int] = field(default_factory=list)
    """Attempts that completed it earlier."""
    planned: PackedPlan | None = None
    """None if it is complete, or its values do not go together."""
    reason: str = ""
    """Why it cannot run; nothing if it can."""
    nearest: str | None = None
    """What to change to come to the nearest point that can run."""

    @property
    def ready(self) -> RunConfig:
        """The config of a point whose values go together."""
        assert self.config is not None
        return self.config

    @property
    def folder(self) -> Path:
        """The run folder of a point whose values go together."""
        assert self.path is not None
        return self.path

    @property
    def plan(self) -> PackedPlan:
        """The plan of a point that is to run."""
        assert self.planned is not None
        return self.planned

    @property
    def state(self) -> str:
        """``infeasible``, ``complete`` (it needs no plan) or ``ready``."""
        if self.reason:
            return "infeasible"
        return "complete" if self.planned is None else "ready"


@dataclass
class Points:
    """All points of a sweep."""

    axes: list[SweepAxis]
    listed: list[SweepPoint] = field(default_factory=list)
    """In order, those that cannot run included."""
    left_out: int = 0
    """How many ``--where`` does not keep."""
    alike: int = 0
    """How many are the same run as an earlier one."""

    @property
    def valid(self) -> list[SweepPoint]:
        """Those that can run, or are complete."""
        return [point for point in self.listed if not point.reason]

    @property
    def excluded(self) -> list[SweepPoint]:
        """Those that cannot run."""
        return [point for point in self.listed if point.reason]

    def varied_words(self, point: SweepPoint) -> list[str]:
        """Returns what sets a point apart: its words of the axes with several values."""
        return [
            word
            for axis, at in zip(self.axes, point.place, strict=True)
            for word in (axis.steps[at] if len(axis.steps) > 1 else ())
        ]


class Where(Expression):
    """An expression that is true or false of a point."""

    def __init__(self, text: str, groups: Iterable[str]) -> None:
        """Takes the expression and the groups of the config."""
        self._groups = set(groups)
        super().__init__(text, {*config_keys(), *self._groups, *_DERIVED, "model.args."})

    def keeps(self, config: RunConfig, choices: dict[str, str]) -> bool:
        """Returns whether the expression is true of a point, given its choice of every group."""

        def value_of(name: str) -> Any:
            if name == "ranks":
                return config.parallel.num_ranks
            if name in self._groups:
                return choices.get(name)
            if name == "image":
                if config.height != config.width:
                    size = f"[{config.height},{config.width}]"
                    raise self.wrong(f"needs one number where image={size}; write height or width")
                return config.height
            value: Any = config
            for part in name.split("."):
                if isinstance(value, dict) and part not in value:
                    raise self.wrong(f"names {name}, which a point does not have")
                value = value[part] if isinstance(value, dict) else getattr(value, part)
            return value

        return self.truth(value_of)


def compose_all(axes: list[SweepAxis], composer: Composer, where: Where | None) -> Points:
    """Returns every combination of the axes with its config; nothing is planned.

    Raises:
        ConfigError: a value has the wrong type, no point has values that go together, or
            ``--where`` has no value at some point.
    """
    points = Points(axes)
    for place in itertools.product(*(range(len(axis.steps)) for axis in axes)):
        steps = (axis.steps[at] for axis, at in zip(axes, place, strict=True))
        point = SweepPoint(place, list(itertools.chain.from_iterable(steps)))
        values, choices = composer.composed(point.words)
        try:
            point.config = config_of(values)
        except ConfigError as error:  # values that make no sense together
            point.reason = str(error)
        if where is None or point.config is None or where.keeps(point.config, choices):
            points.listed.append(point)
        else:
            points.left_out += 1
    if points.listed and all(point.config is None for point in points.listed):
        reasons = list(dict.fromkeys(point.reason for point in points.listed))
        raise ConfigError("no point has values that go together: " + "; ".join(reasons[:_SHOWN]))
    return points


def plan_all(
    points: Points, planner: Planner, wanted: int | None, report: Callable[[int, int], None]
) -> None:
    """Plans all points that are not complete, and finds the nearest valid one of the others.

    Points that are the same run as another are dropped.

    Args:
        points: as :func:`compose_all` returns them.
        planner: plans them.
        wanted: complete attempts after which a point needs no plan; None: it always does.
        report: called before each point, with its number and that of all points.
    """
    seen: dict[str, SweepPoint] = {}
    listed: list[SweepPoint] = []
    for number, point in enumerate(points.listed):
        report(number, len(points.listed))
        if point.config is not None:
            try:
                point.config = with_classes(point.config, planner.classes)
                point.path = run_path(point.config)
                point.done = done_attempts(point.path)
                if wanted is None or len(point.done) < wanted:
                    point.planned = planner.packed(point.config)
                    point.reason = point.planned.refusal
            except HiresError as error:
                point.reason = str(error)
        if point.path is None or point.reason or seen.setdefault(point.path.name, point) is point:
            listed.append(point)
        else:
            points.alike += 1
    points.listed = listed
    valid = points.valid
    for point in points.excluded:
        point.nearest = _nearest(point, valid)


def in_order(
    points: Sequence[SweepPoint], repeat: int, order: str, again: bool
) -> Iterator[SweepPoint]:
    """Yields the points once for every attempt that is missing, in the order of their start.

    The order is ``grouped`` (all attempts of a point together) or ``interleaved`` (one attempt of
    every point, then the next one of each). With ``again`` complete attempts do not count.
    """
    missing = [repeat if again else max(0, repeat - len(point.done)) for point in points]
    turns = [(turn, number) for number, count in enumerate(missing) for turn in range(count)]
    if order == "interleaved":
        turns.sort()
    for _, number in turns:
        yield points[number]


def _nearest(point: SweepPoint, valid: list[SweepPoint]) -> str | None:
    """Returns the words that the nearest point that can run has instead; None if there is none.

    Near is what differs in few axes, and of those what stands close to it in the order of values.
    """

    def distance(other: SweepPoint) -> tuple[int, int]:
        steps = [abs(a - b) for a, b in zip(point.place, other.place, strict=True)]
        return sum(step > 0 for step in steps), sum(steps)

    best = min(valid, key=distance, default=None)
    if best is None:
        return None
    return " ".join(word for word in best.words if word not in point.words)
