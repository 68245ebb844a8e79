"""Reads ``experiment=NAME``, a sweep stored in a file of ``conf/experiment``.

    # What it compares, on the first line
    overrides:            # words as one types them, each with one or several values
      - model=resnet18
      - parallel=sp,sp+gems
    zip: [image,batch]    # options of `hires sweep` by their names, all of them optional
    where: image * batch <= 8192
    repeat: 3

What stands on the command line wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.cli.compose.choices import experiments, offer
from hires.cli.compose.user_files import read_mapping
from hires.core.errors import ConfigError

KEY = "experiment"


@dataclass
class Stored:
    """What a file holds."""

    words: list[str] = field(default_factory=list)
    """Overrides."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the verb by their names in its parser."""


OPTIONS: dict[str, type | tuple[type, ...]] = {
    "zip": list,
    "where": str,
    "repeat": int,
    "order": str,
    "max_parallel": int,
    "budget_gpu_hours": (int, float),
}
"""Options that a file may hold, and what each must be."""


def taken_out(words: Sequence[str], extra: Path | None) -> tuple[list[str], Stored]:
    """Returns the words without ``experiment=NAME``, and what that stands for.

    Args:
        words: overrides as typed.
        extra: the folder of ``--config-dir``, which may hold experiments too.

    Raises:
        ConfigError: the experiment is unknown, or its file holds something else.
    """
    names = [word.partition("=")[2].strip("'\"") for word in words if _is_experiment(word)]
    rest = [word for word in words if not _is_experiment(word)]
    if not names:
        return rest, Stored()
    if len(names) > 1 or "," in names[0]:
        raise ConfigError(f"{KEY}={','.join(names)} names more than one; a sweep has one")
    known = experiments(extra)
    if names[0] not in known:
        raise ConfigError(f"unknown {KEY} {names[0]!r}; {offer(names[0], known)}")
    return rest, _read(known[names[0]])


def _is_experiment(word: str) -> bool:
    return word.lstrip("+").startswith(f"{KEY}=")


def _read(path: Path) -> Stored:
    example = "overrides: [model=resnet18]"
    held = read_mapping(path, example)
    if not held:
        raise ConfigError(f"{path} is empty; it must hold keys, as `{example}`")
    words = held.pop("overrides", [])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{path}: overrides must be a list of words, as [model=resnet18]")
    nested = [word for word in words if _is_experiment(word)]
    if nested:
        raise ConfigError(f"{path}: {nested[0]} names another experiment, which none may")
    options = {str(name).replace("-", "_"): value for name, value in held.items()}
    for name, value in options.items():
        _check(path, name, value)
    return Stored(words, options)


def _check(path: Path, name: str, value: Any) -> None:
    if name not in OPTIONS:
        raise ConfigError(f"{path}: unknown key {name!r}; {offer(name, ['overrides', *OPTIONS])}")
    if isinstance(value, bool) or not isinstance(value, OPTIONS[name]):
        raise ConfigError(f"{path}: {name}={value!r} has the wrong type; see `hires sweep --help`")
