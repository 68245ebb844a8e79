"""Composes, filters and plans the points of a sweep, before anything is started.

With ``--first`` a run comes before each point, which begins with its weights::

    hires sweep task=evaluate precision=fp32,bf16 data=digits,hard --first task=train

    point            the run before it: the point's words, those of --first in their place
    digits fp32  --> digits train fp32
    digits bf16  -/
    hard fp32    --> hard train fp32
    hard bf16    -/
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.cli.axes import SweepAxis
from hires.cli.choices import config_keys
from hires.cli.compose_config import Composer, config_of
from hires.cli.data_keys import saves_end
from hires.cli.expression import Expression
from hires.cli.overrides import free_keys, key_in, parsed
from hires.cli.planning import MemoryNeeds, Planner
from hires.cli.prepare import EarlierRuns, Prepared, prepare
from hires.cli.start_run import show_planning
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError, PlanError, StoppedError
from hires.core.store.records import done_attempt
from hires.plan.checks import WEIGHTS

INFEASIBLE, COMPLETE, READY, FAILED = "infeasible", "complete", "ready", "failed"
_SHOWN = 3  # reasons that one error names
_DERIVED = ("height", "width", "ranks")
"""What ``--where`` may name besides keys and groups."""


@dataclass
class SweepPoint:
    """One combination of values."""

    words: list[str]
    swept: list[str] = field(default_factory=list)
    """Those of its words that are not the same in all points."""
    config: RunConfig | None = None
    """As its words compose it; None if its values do not go together."""
    run: Prepared | None = None
    """What becomes of that; None if it cannot be prepared."""
    before: SweepPoint | None = None
    """The run whose weights it begins with."""
    needs: MemoryNeeds | None = None
    """Its predicted memory; None if it has no plan: it is complete, or cannot run."""
    calibrates: bool = False
    """Whether its scales, which are a part of its name, stand for those of a calibration."""
    warnings: list[str] = field(default_factory=list)
    reason: str = ""
    """Why it cannot run; nothing if it can."""
    failed: bool = False
    """Whether something raised an error where it was planned, as a network's own code or its data:
    `hires run` would not call it infeasible either."""

    @property
    def notes(self) -> list[str]:
        """What its keys and earlier runs have to be known for."""
        if self.run is None:
            return []
        return [f.text for f in self.run.findings if f.severity == "note"] + self.run.notes

    @property
    def ready(self) -> Prepared:
        """The run of a point that is not excluded."""
        assert self.run is not None
        return self.run

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
        return READY if self.needs else COMPLETE


@dataclass
class Points:
    """All points of a sweep."""

    listed: list[SweepPoint] = field(default_factory=list)
    """In order, those that cannot run included."""
    left_out: int = 0
    """How many ``--where`` does not keep."""
    duplicates: int = 0
    """How many were the same run as an earlier one."""

    @property
    def valid(self) -> list[SweepPoint]:
        """Those that can run, or are complete."""
        return [point for point in self.listed if not point.reason]

    @property
    def excluded(self) -> list[SweepPoint]:
        """Those that cannot run."""
        return [point for point in self.listed if point.reason]


class Where(Expression):
    """An expression that is true or false of a point."""

    def __init__(self, text: str, groups: Iterable[str]) -> None:
        self._groups = set(groups)
        super().__init__(text, {*config_keys(), *self._groups, *_DERIVED, *free_keys()})

    def keeps(self, config: RunConfig, choices: dict[str, str]) -> bool:
        """Returns whether the expression is true of a point, given its choice of every group."""

        def value_of(name: str) -> Any:
            if name == "ranks":
                return config.parallel.num_ranks
            if name in self._groups:
                return choices.get(name)
            if name == "image":  # a square one is a number, as in a list of runs
                height, width = config.height, config.width
                return height if height == width else [height, width]
            value: Any = config
            for part in name.split("."):
                if isinstance(value, dict) and part not in value:
                    raise self.error(f"names {name}, which a point does not have")
                value = value[part] if isinstance(value, dict) else getattr(value, part)
            return value

        return self.truth(value_of)


def compose_all(axes: list[SweepAxis], composer: Composer, where: Where | None) -> Points:
    """Returns every combination of the axes with its config; ConfigError: there is none."""
    points = Points()
    for steps in itertools.product(*(axis.steps for axis in axes)):
        several = [step for step, axis in zip(steps, axes, strict=True) if len(axis.steps) > 1]
        words = [word for step in steps for word in step]
        point = SweepPoint(words, [word for step in several for word in step])
        values, choices = composer.composed(words)
        try:
            point.config = config_of(values, words)
        except ConfigError as error:  # values that make no sense together
            point.reason = str(error)
        if where is not None and point.config and not where.keeps(point.config, choices):
            points.left_out += 1
        else:
            points.listed.append(point)
    if where is not None and not points.listed:
        raise where.error(f"keeps none of {points.left_out} points")
    if all(point.config is None for point in points.listed):
        reasons = list(dict.fromkeys(point.reason for point in points.listed))
        raise ConfigError("no point has values that go together: " + "; ".join(reasons[:_SHOWN]))
    return points


def preceding(points: Points, first: Sequence[str], composer: Composer) -> Points:
    """Returns the runs before the points, each once; every point gets its own as ``before``.

    ConfigError: the words make no run, or one that saves no weights at its end.
    """
    for word in first:
        override = parsed(word)
        if override is None or override.is_sweep_override() or "=" not in word:
            raise ConfigError(f"--first {word!r} must be one KEY=VALUE, as --first task=train")
    last = {key_in(word): word for word in first}  # the last word of a key counts

    def kept(words: Sequence[str]) -> list[str]:
        return [word for word in words if not _begins_with(key_in(word), last)]

    runs: dict[tuple[str, ...], SweepPoint] = {}
    for point in points.listed:
        words = [*kept(point.words), *last.values()]
        if tuple(words) not in runs:
            config = config_of(composer.composed(words)[0], words)
            if not _saves_end(config):
                task, at_end = config.task.name, config.checkpoint.at_end
                remedy = "task=train" if task != "train" else "checkpoint.at_end=always"
                raise ConfigError(
                    f"--first: the run before a point saves no weights after its last step with "
                    f"task={task} and checkpoint.at_end={at_end}; add --first {remedy}"
                )
            runs[tuple(words)] = SweepPoint(words, kept(point.swept), config)
        point.before = runs[tuple(words)]
    return Points([*runs.values()])


def begin_with(points: Points, composer: Composer) -> bool:
    """Gives every point the weights of the run before it; False: some are not complete yet."""
    before = {point.before.path for point in points.listed if point.before is not None}
    if any(done_attempt(path) is None for path in before):
        return False
    for point in points.listed:
        if point.before is not None and point.config is not None:
            point.words = [*point.words, f"weights={point.before.path}"]
            point.config = config_of(composer.composed(point.words)[0], point.words)
    return True


def _saves_end(config: RunConfig) -> bool:
    """Whether a run saves its weights after its last step."""
    saving = config.checkpoint
    at_end = saving.saves_end or (saving.at_end == "auto" and saves_end(config))
    in_turn = saving.every > 0 and config.steps % saving.every == 0
    return config.task.name == "train" and (at_end or in_turn)


def _begins_with(key: str, keys: Iterable[str]) -> bool:
    """Whether a key is one of some keys, or in the group that one of them chooses."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def plan_all(
    points: Points,
    planner: Planner,
    wanted: int | None,
    go_on: bool = False,
    config_dir: str | None = None,
    assumed: str | None = None,
) -> None:
    """Plans all points that are not excluded.

    One with as many complete attempts as ``wanted`` needs no plan. With ``go_on`` points begin
    where shorter runs were saved. ``assumed`` is a folder for scales in place of those that would
    be calibrated.
    """
    earlier = EarlierRuns()
    for point in show_planning(points.listed, lambda point: " ".join(point.swept)):
        if point.config is None or point.reason:
            continue
        argv = ["hires", "run", *point.words]
        argv += ["--config-dir", config_dir] if config_dir else []
        try:
            run = prepare(point.config, point.words, planner, argv, assumed)
            run.name(planner)
            point.run, point.calibrates = run, assumed is not None and run.assumes(assumed)
            findings = list(run.findings)
            if wanted is None or len(run.done) < wanted:
                run.begin(earlier, go_on)
                plan = planner.plan(run.config, argv)
                point.needs = MemoryNeeds.of(run.config, plan)
                point.reason = plan.errors
                findings += plan.findings
            # Before the run of its weights has ended, a point lacks them.
            point.warnings = [
                str(one)
                for one in findings
                if one.severity == "warning" and (point.before is None or one.key != WEIGHTS)
            ]
        except StoppedError:  # Ctrl-C in a calibration ends the sweep, not the point
            raise
        except HiresError as error:
            point.reason, point.failed = str(error), not isinstance(error, PlanError)


def drop_duplicates(points: Points) -> None:
    """Drops points that are the same run as an earlier one, which become known by their folders."""
    first: dict[Path, SweepPoint] = {}
    for point in points.valid:
        first.setdefault(point.path, point)
    kept = [p for p in points.listed if p.reason or first[p.path] is p]
    points.duplicates += len(points.listed) - len(kept)
    points.listed = kept
