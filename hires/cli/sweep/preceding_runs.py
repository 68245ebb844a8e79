"""Puts a run before each point of a sweep: the point begins with its weights.

hires sweep task=evaluate precision=fp32,bf16 data=digits,hard --first task=train

point            the run before it: the point's words, those of --first in their place
digits fp32  --> digits train fp32
digits bf16  -/
hard fp32    --> hard train fp32
hard bf16    -/
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hires.cli.compose.compose_config import Composer, config_of
from hires.cli.compose.overrides import parsed
from hires.cli.sweep.sweep_points import Points, SweepPoint
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.store.records import done_attempt


def preceding(points: Points, first: Sequence[str], composer: Composer) -> Points:
    """Returns the runs before the points, each once; every point gets its own as ``before``.

    ConfigError: the words make no run, or one that saves no weights at its end.
    """
    for word in first:
        override = parsed(word)
        if override is None or override.is_sweep_override() or "=" not in word:
            raise ConfigError(f"--first {word!r} must be one KEY=VALUE, as --first task=train")
    last = {_key(word): word for word in first}  # the last word of a key counts
    first, keys = [*last.values()], [*last]
    kept = [place for place, axis in enumerate(points.axes) if not _replaced(axis.keys, keys)]
    made = Points([points.axes[place] for place in kept])
    by_words: dict[tuple[str, ...], SweepPoint] = {}
    for point in points.listed:
        own = [word for word in point.words if not _replaced([_key(word)], keys)]
        words = [*own, *first]
        if tuple(words) not in by_words:
            config = config_of(composer.composed(words)[0], words)
            _require_saved(config)
            place = tuple(point.place[at] for at in kept)
            by_words[tuple(words)] = SweepPoint(place, words, config)
        point.before = by_words[tuple(words)]
    made.listed = [*by_words.values()]
    return made


def lacking(points: Points) -> list[Path]:
    """Returns the runs before the points that are not complete."""
    paths = {point.before.path for point in points.listed if point.before is not None}
    return sorted(path for path in paths if done_attempt(path) is None)


def begin_with(points: Points, composer: Composer) -> None:
    """Gives every point the weights of the complete run before it."""
    for point in points.listed:
        if point.before is not None and point.config is not None:
            point.words = [*point.words, f"weights={point.before.path}"]
            point.config = config_of(composer.composed(point.words)[0], point.words)


def _require_saved(config: RunConfig) -> None:
    every, steps = config.checkpoint.every, config.steps
    if every == 0 or steps % every:
        raise ConfigError(
            f"--first: the run before a point saves no weights after its last step with "
            f"checkpoint.every={every} and steps={steps}; add --first checkpoint.every={steps}"
        )


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _replaced(keys: Sequence[str], by: Sequence[str]) -> bool:
    """Whether all keys are given anew, by themselves or with their group."""
    return all(any(key == one or key.startswith(f"{one}.") for one in by) for key in keys)
