"""Lists runs as rows, with a value for every name that ``--where`` and ``--sort`` take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.cli.compose.choices import groups
from hires.cli.compose.config_keys import keys
from hires.cli.compose.expression import Expression
from hires.cli.compose.nearest import offer
from hires.core.errors import ConfigError
from hires.core.store.reading import Note
from hires.launcher.status.run_selection import select
from hires.launcher.status.state import states
from hires.report.columns import Row
from hires.report.compare.metrics import METRICS
from hires.report.load.plain_values import dig, same_value, value_text
from hires.report.load.rows import RUN_COLUMNS, run_row
from hires.report.load.runs import Run, runs_of

_GROUPS = {"parallel": "layout", "precision": "precision", "task": "task", "model": "model"}
"""Groups of the config whose choice is a column."""


@dataclass(frozen=True)
class RunRow:
    """One run as a row."""

    run: Run
    values: Row
    """By column, as ``rows.RUN_COLUMNS`` has them."""

    def value(self, name: str) -> Any:
        """Returns what a name stands for; None if the run has no such value."""
        name = METRICS[name].column if name in METRICS else _GROUPS.get(name, name)
        if name == "image":
            height, width = self.values.get("height"), self.values.get("width")
            if height is None or width is None:
                return None
            return Square(height) if height == width else Rectangle((height, width))
        if name in self.values:
            return self.values[name]
        if name in groups():
            return dig(self.run.config, name, "name")
        return dig(self.run.config, *name.split("."))


class Square(int):
    """The size of a square image: a number that equals each of its spellings, as ``512x512``."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return same_value(f"{int(self)}x{int(self)}", value_text(other))

    def __ne__(self, other: object) -> bool:
        return not self == other


class Rectangle(list[int]):
    """Height and width of an image, which equal each of their spellings."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return same_value("x".join(map(str, self)), value_text(other))

    def __ne__(self, other: object) -> bool:
        return not self == other


class RunsWhere(Expression):
    """An expression that is true or false of a run."""

    def __init__(self, text: str) -> None:
        """Takes the expression.

        Raises:
            ConfigError: it is no expression, or names what no run has.
        """
        super().__init__(text, {*names(), "model.args."}, gaps=True)

    def kept(self, rows: Sequence[RunRow]) -> tuple[list[RunRow], list[Note]]:
        """Returns the rows of which it is true, and a note if it could not be evaluated for some.

        Raises:
            ConfigError: it could not be evaluated for any row.
        """
        kept, wrong = [], []
        for row in rows:
            try:
                if self.truth(row.value):
                    kept.append(row)
            except ConfigError as error:
                wrong.append(error)
        if wrong and len(wrong) == len(rows):
            raise wrong[0]
        message = f"{len(wrong)} runs left out, as the first: {wrong[0]}" if wrong else ""
        return kept, [Note("--where", message)] if message else []


def names() -> set[str]:
    """Returns every name that a run has a value for."""
    named = {group for group in groups() if f"{group}.name" in keys()}
    return {*keys(), *named, *METRICS, *RUN_COLUMNS}


def run_rows(chosen: Sequence[str], results: str) -> tuple[list[RunRow], list[Note]]:
    """Returns the rows of the runs that some names mean; all if there are none.

    Args:
        chosen: names of campaigns and runs.
        results: folder of all campaigns.

    Raises:
        ConfigError: a name is neither a campaign nor a run.
    """
    paths = select(chosen, results).paths
    runs, notes = runs_of(Path(results), paths)
    add_live_states(runs)
    notes += [note for run in runs for note in run.notes]
    return [RunRow(run, run_row(run)) for run in runs], notes


def add_live_states(runs: Iterable[Run]) -> None:
    """Adds the launcher's state to those runs whose last attempt left no exit record."""
    silent = [
        run
        for run in runs
        if run.record.get("state") != "done" and not (run.last and run.last.exit)
    ]
    if silent:
        for run, state in zip(silent, states([run.path for run in silent]), strict=True):
            run.status = (state.state, state.reason, state.cause)


def sorted_rows(rows: Sequence[RunRow], key: str) -> list[RunRow]:
    """Returns rows in the order of a name, descending behind a ``-``; missing values come last.

    Raises:
        ConfigError: no run has a value of this name.
    """
    name = key.removeprefix("-")
    if name not in names():
        raise ConfigError(f"--sort {name!r} is no name of a run; {offer(name, sorted(names()))}")
    known = [(row, row.value(name)) for row in rows]
    held = [(row, value) for row, value in known if value is not None]
    held.sort(key=lambda pair: _order(pair[1]), reverse=key.startswith("-"))
    return [row for row, _ in held] + [row for row, value in known if value is None]


def _order(value: Any) -> tuple[int, Any]:
    """Returns by what a value is sorted: numbers, then everything else as text."""
    if isinstance(value, (int, float)):
        return 0, value
    return 1, str(value)
