"""Pairs the points of two sets of runs.

A point is a config without the seed and the keys that change nothing. A key with one value on each
side, and another on the other side, is what the sides are compared about; it keeps no pair apart,
unless it changes the work of an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hires.core.store.reading import text
from hires.report.compare.bootstrap import Repeat
from hires.report.compare.metrics import Metric
from hires.report.config_values import value_text
from hires.report.runs import INPUTS, SEED, Run, repeats_of

WORK = ("image", "task.name")
"""Keys whose values make the numbers of an image different work."""
_COLUMNS = ("model", "image", "layout", "precision")
_MAX_LABEL = 160  # characters
_Key = tuple[tuple[str, str], ...]


@dataclass
class ComparedPoint:
    """The runs of one config on one side; none if the side lacks it."""

    runs: list[Run] = field(default_factory=list)

    def num_left_out(self) -> int:
        """Returns the number of complete attempts by other code or machines."""
        return sum(len(run.complete) for run in self.runs) - len(repeats_of(self.runs))

    def repeats(self, metric: Metric) -> list[Repeat]:
        """Returns the numbers of all attempts that count and have any."""
        repeats = [
            Repeat(value_text(run.config.get(SEED)), metric.values(record))
            for run, record in repeats_of(self.runs)
        ]
        return [repeat for repeat in repeats if repeat.values]

    def trouble(self) -> tuple[str, str | None]:
        """Returns state and cause of a run that is not done; ``done`` if all are."""
        ends = [run.end for run in self.runs if run.end[0] != "done"]
        state, reason, cause = ends[0] if ends else ("done", None, None)
        return state, cause or reason


Pair = tuple[str, ComparedPoint, ComparedPoint]  # label of a point, and its runs on either side


def pair(a: Sequence[Run], b: Sequence[Run]) -> list[Pair]:
    """Returns the points of two sets of runs, those that only B has last."""
    # Networks are edited between A and B: their source parts runs only if a side has several.
    inputs = () if _differ_in_inputs(a) or _differ_in_inputs(b) else INPUTS.values()
    configs = [[run.identity(SEED, *inputs) for run in side] for side in (a, b)]
    about = set()
    for key in {key for side in configs for config in side for key in config} - {*WORK}:
        ours, theirs = ({config.get(key) for config in side} for side in configs)
        if len(ours) == len(theirs) == 1 and ours != theirs:
            about.add(key)
    points: dict[_Key, tuple[ComparedPoint, ComparedPoint]] = {}
    for side, runs in enumerate((a, b)):
        for run, config in zip(runs, configs[side], strict=True):
            point = tuple(sorted((k, v) for k, v in config.items() if k not in about))
            points.setdefault(point, (ComparedPoint(), ComparedPoint()))[side].runs.append(run)
    labels = _labels(points)
    return [(labels[key], *sides) for key, sides in points.items()]


def _differ_in_inputs(runs: Sequence[Run]) -> bool:
    """Whether two of some runs differ in the contents that their configs name, and in no key."""
    every = {tuple(sorted(run.identity(SEED).items())) for run in runs}
    keys = INPUTS.values()
    return len({tuple(pair for pair in one if pair[0] not in keys) for one in every}) < len(every)


def points(runs: Sequence[Run]) -> list[tuple[str, ComparedPoint]]:
    """Returns the points of one set of runs, each with its label."""
    return [(label, point) for label, point, _ in pair(runs, [])]


def _labels(points: Mapping[_Key, Sequence[ComparedPoint]]) -> dict[_Key, str]:
    """Labels every point by its columns, and by the keys in which equal labels differ."""
    same_columns: dict[str, list[_Key]] = {}
    for key, sides in points.items():
        rows = [side.runs[0].point for side in sides if side.runs]
        # A column with another value on each side is shown as ``fp32->bf16``.
        values = ([str(row.get(column) or "?") for row in rows] for column in _COLUMNS)
        words = " ".join("->".join(dict.fromkeys(sides)) for sides in values)
        same_columns.setdefault(words, []).append(key)
    labels: dict[_Key, str] = {}
    for words, group in same_columns.items():
        configs = [dict(key) for key in group]
        names = dict.fromkeys(name for config in configs for name in config)
        differing = [n for n in names if len({config.get(n) for config in configs}) > 1]
        for key, config in zip(group, configs, strict=True):
            own = [f"{name}={config[name]}" for name in differing if name in config]
            labels[key] = text(" ".join([words, *own]), _MAX_LABEL) or "?"
    return labels
