"""Composes and plans the points of a sweep.

Every combination of the axes is composed, filtered by ``--where``, planned and proved before
anything is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hires.cli.compose.compose_config import labelled
from hires.cli.planning import PackedPlan, Planner
from hires.cli.sweep.axes import SweepGrid
from hires.cli.sweep.configs import Composer
from hires.cli.sweep.where import Where
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError
from hires.core.store.rundir import done_attempts, run_path

_SHOWN = 3
"""Reasons that one error names."""

Report = Callable[[int, int], None]
"""Called with the number of points that are planned, and of all points."""


@dataclass
class SweepPoint:
    """One combination of values."""

    place: tuple[int, ...]
    """One number for each axis of the grid."""
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
    def state(self) -> str:
        """``infeasible``, ``complete`` (it needs no plan) or ``ready``."""
        if self.reason:
            return "infeasible"
        return "complete" if self.planned is None else "ready"


@dataclass
class Points:
    """All points of a sweep."""

    grid: SweepGrid
    held: list[SweepPoint] = field(default_factory=list)
    """In order, those that cannot run included."""
    left_out: int = 0
    """How many ``--where`` does not keep."""
    alike: int = 0
    """How many are the same run as an earlier one."""

    @property
    def valid(self) -> list[SweepPoint]:
        """Those that can run, or are complete."""
        return [point for point in self.held if not point.reason]

    @property
    def excluded(self) -> list[SweepPoint]:
        """Those that cannot run."""
        return [point for point in self.held if point.reason]


def compose_all(grid: SweepGrid, composer: Composer, where: Where | None) -> Points:
    """Returns the points of a grid with their configs; nothing is planned.

    Raises:
        ConfigError: a value has the wrong type, no point has values that go together, or
            ``--where`` has no value at some point.
    """
    points = Points(grid)
    for place in grid.places():
        point = SweepPoint(place, grid.words(place))
        values = composer.values(point.words)
        try:
            point.config = labelled(values)
        except ConfigError as error:  # values that make no sense together
            point.reason = str(error)
        choices = composer.choices(point.words)
        if where is None or point.config is None or where.keeps(point.config, choices):
            points.held.append(point)
        else:
            points.left_out += 1
    if points.held and all(point.config is None for point in points.held):
        reasons = list(dict.fromkeys(point.reason for point in points.held))
        raise ConfigError("no point has values that go together: " + "; ".join(reasons[:_SHOWN]))
    return points


def plan_all(points: Points, planner: Planner, wanted: int | None, report: Report) -> None:
    """Plans all points that are not complete, and finds the nearest valid one of the others.

    Args:
        points: as :func:`compose_all` made them; those that are the same run as another are
            dropped.
        planner: plans them.
        wanted: complete attempts after which a point needs no plan; None: it always does.
        report: called before each point.
    """
    seen: set[str] = set()
    held: list[SweepPoint] = []
    for number, point in enumerate(points.held):
        report(number, len(points.held))
        if point.config is not None:
            _plan(point, planner, wanted)
        if point.path is not None and not point.reason:
            if point.path.name in seen:
                points.alike += 1
                continue
            seen.add(point.path.name)
        held.append(point)
    points.held = held
    valid = points.valid
    for point in points.excluded:
        point.nearest = _nearest(point, valid)


def _plan(point: SweepPoint, planner: Planner, wanted: int | None) -> None:
    """Plans one point, unless it is complete."""
    try:
        point.config = planner.with_classes(point.ready)
        point.path = run_path(point.config)
        point.done = done_attempts(point.path)
        if wanted is None or len(point.done) < wanted:
            point.planned = planner.packed(point.config)
            point.reason = point.planned.refusal
    except HiresError as error:
        point.reason = str(error)


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
    mine = set(point.words)
    return " ".join(word for word in best.words if word not in mine)


def varied_words(points: Points, point: SweepPoint) -> list[str]:
    """Returns what sets a point apart: its words of the axes with several values."""
    return [
        word
        for axis, at in zip(points.grid.axes, point.place, strict=True)
        for word in (axis.steps[at] if len(axis) > 1 else ())
    ]


def in_order(
    points: Sequence[SweepPoint], repeat: int, order: str, again: bool
) -> Iterator[SweepPoint]:
    """Yields the points once for every attempt that is missing, in the order of their start.

    Args:
        points: those that can run.
        repeat: complete attempts that each shall have.
        order: ``grouped`` (all attempts of a point together) or ``interleaved`` (one attempt of
            every point, then the next one of each).
        again: whether complete attempts of earlier times do not count.
    """
    missing = [repeat if again else max(0, repeat - len(point.done)) for point in points]
    if order == "grouped":
        for point, count in zip(points, missing, strict=True):
            yield from [point] * count
        return
    for turn in range(max(missing, default=0)):
        for point, count in zip(points, missing, strict=True):
            if turn < count:
                yield point


ORDERS = ("grouped", "interleaved")
