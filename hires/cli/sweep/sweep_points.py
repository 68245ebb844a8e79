"""Composes, filters, plans and shows the points of a sweep, before anything is started."""

from __future__ import annotations

import collections
import itertools
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hires.cli.compose.choices import config_keys
from hires.cli.compose.compose_config import Composer, config_of
from hires.cli.compose.expression import Expression
from hires.cli.earlier_runs import EarlierRuns
from hires.cli.planning import PackedPlan, Planner
from hires.cli.prepare import Prepared, prepare
from hires.cli.screens.progress import show_planning
from hires.cli.screens.screen import plural, print_table
from hires.cli.sweep.axes import SweepAxis
from hires.core import terminal
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError, PlanError, StoppedError
from hires.core.screen_table import screen_lines
from hires.core.units import MIB
from hires.launcher.attempt_queue import Ended
from hires.plan.checks import WEIGHTS
from hires.report.columns import RANKS, RUN, Column, Table

INFEASIBLE, COMPLETE, READY, FAILED = "infeasible", "complete", "ready", "failed"
_SHOWN = 3  # reasons that one error names
_SHOWN_NOTES = 10  # texts; points of the same text are counted
_DERIVED = ("height", "width", "ranks")
"""What ``--where`` may name besides keys and groups."""
_WIDTH = 120  # of the excluded points when the output is no terminal
_FACTS = (RANKS, Column("peak", "memory", "MiB", 1 / MIB, 0), Column("state", "state"), RUN)


@dataclass
class SweepPoint:
    """One combination of values."""

    place: tuple[int, ...]
    """One number for each axis."""
    words: list[str]
    config: RunConfig | None = None
    """As its words compose it; None if its values do not go together."""
    run: Prepared | None = None
    """What becomes of that; None if it cannot be prepared."""
    before: SweepPoint | None = None
    """The run whose weights it begins with."""
    planned: PackedPlan = field(default_factory=PackedPlan)
    """Empty if it is complete, or its values do not go together."""
    reason: str = ""
    """Why it cannot run; nothing if it can."""
    failed: bool = False
    """Whether something raised an error where it was planned, as a network's own code or its data:
    `hires run` would not call it infeasible either."""
    nearest: str | None = None
    """What to change to come to the nearest point that can run."""

    @property
    def warnings(self) -> Sequence[str]:
        """Those of its plan, which lacks the weights of a run before it until that has ended."""
        texts = [*self._texts("warning"), *self.planned.texts("warning")]
        return [one for one in texts if self.before is None or not one.endswith(f"[{WEIGHTS}]")]

    @property
    def notes(self) -> Sequence[str]:
        """What its keys and earlier runs have to be known for."""
        return [*self._texts("note"), *(self.run.notes if self.run else ())]

    def _texts(self, severity: str) -> list[str]:
        findings = self.run.findings if self.run else ()
        return [finding.text for finding in findings if finding.severity == severity]

    @property
    def ready(self) -> Prepared:
        """The run of a point that is not excluded."""
        assert self.run is not None
        return self.run

    @property
    def resolved(self) -> RunConfig | None:
        """Its config, as far as that is known."""
        return self.run.config if self.run else self.config

    @property
    def path(self) -> Path:
        """Its run folder, there or not."""
        return self.run.path if self.run else Path()

    @property
    def done(self) -> Sequence[int]:
        """Attempts that completed it earlier."""
        return self.run.done if self.run else ()

    @property
    def state(self) -> str:
        """``infeasible``, ``failed``, ``complete`` (it needs no plan) or ``ready``."""
        if self.reason:
            return FAILED if self.failed else INFEASIBLE
        return READY if self.planned.packed else COMPLETE


@dataclass
class Points:
    """All points of a sweep."""

    axes: list[SweepAxis]
    listed: list[SweepPoint] = field(default_factory=list)
    """In order, those that cannot run included."""
    left_out: int = 0
    """How many ``--where`` does not keep."""
    alike: int = 0
    """How many were the same run as an earlier one."""

    @property
    def valid(self) -> list[SweepPoint]:
        """Those that can run, or are complete."""
        return [point for point in self.listed if not point.reason]

    @property
    def excluded(self) -> list[SweepPoint]:
        """Those that cannot run."""
        return [point for point in self.listed if point.reason]

    def columns(self) -> list[Column]:
        """Returns the columns that name a point: its number and the keys that differ."""
        keys = [key for axis in self.axes if len(axis.steps) > 1 for key in axis.keys]
        return [Column("point", "point", digits=0), *(Column(key, key) for key in keys)]

    def swept(self, point: SweepPoint) -> list[str]:
        """Returns the overrides of a point that are not the same in all."""
        places = zip(self.axes, point.place, strict=True)
        return [word for axis, at in places if len(axis.steps) > 1 for word in axis.steps[at]]

    def values(self, point: SweepPoint) -> list[str]:
        """Returns the cells of a point below the keys of :meth:`columns`."""
        return [_cell(word, point.resolved) for word in self.swept(point)]


class Where(Expression):
    """An expression that is true or false of a point."""

    def __init__(self, text: str, groups: Iterable[str]) -> None:
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
    """Returns every combination of the axes with its config; ConfigError: there is none."""
    points = Points(axes)
    for place in itertools.product(*(range(len(axis.steps)) for axis in axes)):
        steps = (axis.steps[at] for axis, at in zip(axes, place, strict=True))
        point = SweepPoint(place, list(itertools.chain.from_iterable(steps)))
        values, choices = composer.composed(point.words)
        try:
            point.config = config_of(values, point.words)
        except ConfigError as error:  # values that make no sense together
            point.reason = str(error)
        if where is not None and point.config and not where.keeps(point.config, choices):
            points.left_out += 1
        else:
            points.listed.append(point)
    if where is not None and not points.listed:
        raise where.wrong(f"keeps none of {points.left_out} points")
    if all(point.config is None for point in points.listed):
        reasons = list(dict.fromkeys(point.reason for point in points.listed))
        raise ConfigError("no point has values that go together: " + "; ".join(reasons[:_SHOWN]))
    return points


def plan_all(
    points: Points,
    planner: Planner,
    wanted: int | None,
    go_on: bool = False,
    config_dir: str | None = None,
    assumed: str | None = None,
) -> None:
    """Plans all points, and finds the nearest valid one of those that cannot run.

    Points that are the same run as another are dropped. One with as many complete attempts as
    ``wanted`` needs no plan. With ``go_on`` points begin where shorter runs were saved.
    ``assumed`` is a folder for scales in place of those that would be calibrated.
    """
    runs: dict[Path, SweepPoint] = {}
    earlier = EarlierRuns()
    listed: list[SweepPoint] = []
    for point in show_planning(
        points.listed, lambda point: " ".join(points.swept(point)), planner.begin_point
    ):
        if point.config is not None:
            argv = ["hires", "run", *point.words]
            argv += ["--config-dir", config_dir] if config_dir else []
            try:
                run = prepare(point.config, point.words, planner, argv, assumed)
                run.name(planner)
                point.run = run
                if wanted is None or len(run.done) < wanted:
                    run.begin(earlier, go_on)
                    point.planned = planner.packed(run.config)
                    point.reason = "; ".join(point.planned.texts("error"))
            except StoppedError:  # Ctrl-C in a calibration ends the sweep, not the point
                raise
            except PlanError as error:
                point.reason = str(error)
            except HiresError as error:
                point.reason, point.failed = str(error), True
        if not point.reason and point.path in runs:
            points.alike += 1
            continue
        listed.append(point)
        if not point.reason:
            runs[point.path] = point
    points.listed, valid = listed, [point for point in listed if not point.reason]
    for point in points.excluded:
        point.nearest = _nearest(point, valid)


def print_points(points: Points, repeat: int) -> None:
    """Prints the points that can run, then those that cannot with the reason, then the counts."""
    width = terminal.columns()
    rest = max((width or _WIDTH) - 14, 40)
    rows: list[list[Any]] = []
    excluded = [("point", "overrides", "reason", "nearest that can run")]
    for number, point in enumerate(points.listed, start=1):
        state = point.state
        if point.reason:  # a sentence, which is wrapped
            reason = textwrap.fill(point.reason, rest // 2)
            nearest = textwrap.fill(point.nearest or "-", rest // 4)
            typed = "\n".join(points.swept(point)) or " ".join(point.words)
            excluded.append((str(number), typed, reason, nearest))
            continue
        if repeat > 1:
            state += f" ({len(point.done)} of {repeat})"
        facts = point.ready.config.parallel.num_ranks, point.planned.peak_bytes, state
        rows.append([number, *points.values(point), *facts, point.path.name])
    if rows:
        columns = [*points.columns(), *_FACTS]
        shown = Table("points", "Points", columns, rows).text_rows()
        print_table("Points", columns, shown, ("state",))
    if len(excluded) > 1:
        lines, note = screen_lines(excluded, width, "llll", excluded[0])
        print("\n".join(["Excluded", "", *lines, *note, ""]))
    _print_counts(points)


def as_json(points: Points, ends: Sequence[Ended] | None = None, repeat: int = 1) -> dict[str, Any]:
    """Returns the points as plain values; ``ends`` is None if no attempt was to be started."""
    by_path = attempts_of(ends or ())
    listed = []
    for point in points.valid:
        attempts = by_path[point.path]
        listed.append(
            {
                "run": point.path.name,
                "path": str(point.path),
                "overrides": point.words,
                "state": point.state if ends is None else end_of(point, attempts, repeat),
                "ranks": point.ready.config.parallel.num_ranks,
                "peak_bytes": point.planned.peak_bytes,
                "warnings": point.warnings,
                "notes": point.notes,
                "complete_attempts": point.done,
                "attempts": attempts,
            }
        )
    excluded = [
        {"overrides": p.words, "state": p.state, "reason": p.reason, "nearest": p.nearest}
        for p in points.excluded
    ]
    counted = {"left_out": points.left_out, "alike": points.alike}
    return {"points": listed, "excluded": excluded, **counted}


def attempts_of(ends: Sequence[Ended]) -> dict[Path, list[dict[str, Any]]]:
    """Returns the attempts that ended by run folder, as plain values."""
    by_path: dict[Path, list[dict[str, Any]]] = collections.defaultdict(list)
    for end in ends:
        attempt = {"attempt": end.attempt, "state": end.state, "cause": end.cause}
        by_path[end.task.path].append(attempt)
    return by_path


def end_of(point: SweepPoint, attempts: Sequence[dict[str, Any]], repeat: int) -> str:
    """Returns the state of a point after its attempts: that of one that failed, done or pending."""
    bad = [attempt["state"] for attempt in attempts if attempt["state"] != "done"]
    if bad:
        return str(bad[-1])
    return "done" if len(point.done) + len(attempts) >= repeat else "pending"


def _cell(word: str, config: RunConfig | None) -> str:
    """Returns the value of a word; for a layout its name once all other words are applied."""
    key, _, value = word.partition("=")
    if key != "parallel" or config is None:
        return value
    return replace(config.parallel, name=value).label


def _nearest(point: SweepPoint, valid: list[SweepPoint]) -> str | None:
    # Near is what differs in few axes, and of those what stands close in the order of values.

    def distance(other: SweepPoint) -> tuple[int, int]:
        steps = [abs(a - b) for a, b in zip(point.place, other.place, strict=True)]
        return sum(step > 0 for step in steps), sum(steps)

    if not valid:
        return None
    return " ".join(word for word in min(valid, key=distance).words if word not in point.words)


def _print_counts(points: Points) -> None:
    texts = collections.Counter(text for point in points.valid for text in point.warnings)
    for text, count in texts.items():
        print(f"warning: {text} ({plural(count, 'point')})", file=sys.stderr)
    names = collections.defaultdict(list)
    for point in points.valid:
        for note in point.notes:
            names[note].append(point.path.name)
    for note, alike in itertools.islice(names.items(), _SHOWN_NOTES):
        which = alike[0] if len(alike) == 1 else plural(len(alike), "point")
        print(f"note: {which}: {note}", file=sys.stderr)
    if len(names) > _SHOWN_NOTES:
        more = plural(len(names) - _SHOWN_NOTES, "other note")
        print(f"note: {more}, which --json lists", file=sys.stderr)
    states = collections.Counter(point.state for point in points.listed)
    parts = [f"{states[READY]} to run", f"{states[COMPLETE]} complete"]
    parts.append(f"{states[INFEASIBLE]} excluded")
    if states[FAILED]:
        parts.append(f"{states[FAILED]} failed")
    if points.left_out:
        parts.append(f"{points.left_out} left out by --where")
    if points.alike:
        parts.append(f"{points.alike} the same run as another")
    print(f"{len(points.listed)} points: {', '.join(parts)}")
