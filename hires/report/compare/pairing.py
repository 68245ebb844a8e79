"""Which points of two sets of runs belong together, and what are the repeats of each?

A point is a config without the keys that change nothing (``core.naming.COSMETIC``) and without the
seed. A key of which each side has a single value, another one, is what the sides are compared
about; it keeps no pair apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hires.core.store.naming import COSMETIC
from hires.core.store.reading import text
from hires.report.compare.metrics import Metric
from hires.report.compare.repeated_points import Repeat
from hires.report.load.plain_values import dig, spoken
from hires.report.load.rows import what
from hires.report.load.runs import Attempt, Run, made, repeat_latest

SEED = "seed"
_COLUMNS = ("model", "image", "layout", "precision")
_LONGEST = 160
"""Characters of a label."""
Key = tuple[tuple[str, str], ...]


@dataclass
class Point:
    """The runs of one config."""

    runs: list[Run] = field(default_factory=list)

    def attempts(self) -> list[tuple[Run, Attempt]]:
        """Returns the complete attempts that repeat each other, in order.

        Attempts of another commit or machine than the latest one are no repeats of it.
        """
        found = [(run, attempt) for run in self.runs for attempt in run.complete]
        kept = repeat_latest([made(attempt.record) for _, attempt in found])
        return [pair for pair, counts in zip(found, kept, strict=True) if counts]

    def left_out(self) -> int:
        """Returns how many complete attempts are no repeats of the latest one."""
        return sum(len(run.complete) for run in self.runs) - len(self.attempts())

    def repeats(self, metric: Metric) -> list[Repeat]:
        """Returns the numbers of all repeats that have any."""
        told = [
            Repeat(spoken(dig(run.config, SEED)), metric.values(attempt.record))
            for run, attempt in self.attempts()
        ]
        return [repeat for repeat in told if repeat.values]

    def trouble(self) -> tuple[str, str | None]:
        """Returns state and cause of a run that is not done."""
        ends = [run.end for run in self.runs if run.end[0] != "done"]
        state, reason, cause = ends[0] if ends else ("done", None, None)
        return state, cause or reason


@dataclass
class Pairing:
    """Points of two sides."""

    points: list[tuple[str, Point, Point]]
    """Label, and what is compared."""
    only_a: list[str]
    only_b: list[str]
    """Labels of points that the other side does not have."""
    about: list[str]
    """Keys that the sides are compared about."""


def pair(a: Sequence[Run], b: Sequence[Run]) -> Pairing:
    """Returns which points of two sets of runs belong together."""
    ours, theirs = [_identity(run) for run in a], [_identity(run) for run in b]
    about = _about(ours, theirs)
    left, right = _points(a, ours, about), _points(b, theirs, about)
    keys = list(dict.fromkeys([*left, *right]))
    named = dict(zip(keys, _labels(keys, left, right), strict=True))
    return Pairing(
        [(named[key], left[key], right[key]) for key in left if key in right],
        [named[key] for key in left if key not in right],
        [named[key] for key in right if key not in left],
        about,
    )


def points(runs: Sequence[Run]) -> list[tuple[str, Point]]:
    """Returns the points of one set of runs, each with its label."""
    return [(label, point) for label, point, _ in pair(runs, runs).points]


def _identity(run: Run) -> dict[str, str]:
    """Returns what a run computes and measures, as keys and words."""
    return {
        key: spoken(value)
        for key, value in run.flat_config.items()
        if key not in COSMETIC and key != SEED and not key.startswith("checkpoint.")
    }


def _about(a: Sequence[Mapping[str, str]], b: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the keys of which each side has one value, and not the same."""
    found = []
    for key in dict.fromkeys(key for config in [*a, *b] for key in config):
        sides = [{config.get(key) for config in side} for side in (a, b)]
        if len(sides[0]) == len(sides[1]) == 1 and sides[0] != sides[1]:
            found.append(key)
    return found


def _points(
    runs: Sequence[Run], configs: Sequence[Mapping[str, str]], about: Iterable[str]
) -> dict[Key, Point]:
    """Returns the points of one side."""
    found: dict[Key, Point] = {}
    ignored = set(about)
    for run, config in zip(runs, configs, strict=True):
        key = tuple(sorted((k, v) for k, v in config.items() if k not in ignored))
        found.setdefault(key, Point()).runs.append(run)
    return found


def _labels(
    keys: Sequence[Key], left: Mapping[Key, Point], right: Mapping[Key, Point]
) -> list[str]:
    """Returns a name for every point: its columns, and the keys that tell it from its likes."""
    named: dict[str, list[Key]] = {}
    for key in keys:
        told = [what(side[key].runs[0]) for side in (left, right) if key in side]
        words = " ".join(_both([row.get(column) for row in told]) for column in _COLUMNS)
        named.setdefault(words, []).append(key)
    labels: dict[Key, str] = {}
    for words, alike in named.items():
        configs = [dict(key) for key in alike]
        every = dict.fromkeys(name for config in configs for name in config)
        apart = [n for n in every if len({config.get(n) for config in configs}) > 1]
        for key, config in zip(alike, configs, strict=True):
            told_apart = [f"{name}={config[name]}" for name in apart if name in config]
            labels[key] = text(" ".join([words, *told_apart]), _LONGEST) or "?"
    return [labels[key] for key in keys]


def _both(values: Sequence[object]) -> str:
    """Returns a value of both sides in words, with an arrow if they are not the same."""
    return "->".join(dict.fromkeys(str(value or "?") for value in values))
