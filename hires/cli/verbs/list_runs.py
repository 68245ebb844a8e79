"""``hires list runs``: lists runs and their results, filtered and sorted by names of values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from hires.cli.choices import config_keys, groups
from hires.cli.expression import Expression
from hires.cli.overrides import free_keys
from hires.cli.screen import plural, print_json, print_notes, print_table
from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.store.reading import Note
from hires.launcher.status.state import select, states
from hires.report.columns import TABLES, Row, filled, keys, table_of
from hires.report.compare.verdicts import METRICS
from hires.report.run_tables import EVALUATION, run_row
from hires.report.runs import Run, read_runs

_SHOWN = (
    "hash", "state", "model", "image", "layout", "precision", "img_per_s_median", "peak_bytes_max",
    "batch", "ranks", "loss_last", "best_validation", *keys(EVALUATION), "started", "campaign",
)  # fmt: skip
"""Columns that a screen shows, as far as it has room."""
_GROUPS = {"parallel": "layout", "precision": "precision", "task": "task", "model": "model"}
"""Groups of the config whose choice is a column."""


class RunRow(NamedTuple):
    """One run as a row, with a value for every name that ``--where`` and ``--sort`` take."""

    run: Run
    values: Row
    """By column, as the frame ``runs`` has them."""

    def value(self, name: str) -> Any:
        """Returns what a name stands for; None if the run has no such value."""
        name = METRICS[name].column if name in METRICS else _GROUPS.get(name, name)
        height, width = self.values.get("height"), self.values.get("width")
        if name == "image" and height is not None:  # a square one is a number, as in a sweep
            return height if height == width else [height, width]
        if name in self.values:
            return self.values[name]
        return self.run.flat_config.get(f"{name}.name" if name in groups() else name)


def list_runs(args: Any) -> int:
    """Prints runs as a table or JSON; returns 0."""
    named = {group for group in groups() if f"{group}.name" in config_keys()}
    names = {*config_keys(), *named, *METRICS, *keys(TABLES["runs"].all_columns)}
    where = None
    if args.where is not None:
        columns = TABLES["runs"].all_columns
        shares = {metric.name for metric in METRICS.values() if metric.unit == "%"}
        shares |= {column.key for column in columns if column.unit == "%"}
        where = Expression(args.where, {*names, *free_keys()}, shares)
    paths = select([] if args.campaign is None else [args.campaign], args.results).paths
    runs = read_runs(paths)
    add_live_states(runs)
    notes = [note for run in runs for note in run.notes]
    rows = [RunRow(run, run_row(run)) for run in runs]
    if where is not None:
        rows, more = _filtered(rows, where)
        notes += more
    if args.sort is not None:
        rows = _sorted(rows, args.sort, names)
    print_notes(notes)
    if args.json:
        values = [{**row.values, "path": str(row.run.path)} for row in rows]
        remarks = [{"where": note.where, "text": note.text} for note in notes]
        print_json({"runs": values, "notes": remarks})
    elif rows:
        by_key = {column.key: column for column in TABLES["runs"].all_columns}
        shown_columns = [by_key[key] for key in _SHOWN]
        table = filled(table_of("runs", "Runs", shown_columns, map(_on_screen, rows)))
        # Of a time stamp day and minute fit.
        stamp = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*")
        shown = [[stamp.sub(r"\1 \2", cell) for cell in cells] for cells in table.text_rows()]
        print_table(plural(len(rows), "run"), table.columns, shown)
    else:
        print("no runs")
    return 0


def _on_screen(row: RunRow) -> Row:
    """Returns its values, the best evaluation with its metric; a share is from 0 to 1."""
    best, name = row.values["best_validation"], row.values["validation_metric"]
    if best is None:
        return row.values
    unit = METRICS[name].unit if name in METRICS else "1"
    words = f"{best:.4g}", *([] if unit in ("%", "1") else [unit]), name
    return {**row.values, "best_validation": " ".join(words)}


def add_live_states(runs: Iterable[Run]) -> None:
    """Adds the launcher's state to those runs whose last attempt left no exit record."""
    silent = [r for r in runs if r.record.state != "done" and not (r.last and r.last.exit)]
    for run, state in zip(silent, states([run.path for run in silent]), strict=True):
        run.status = (state.state, state.reason, state.cause)


def _filtered(rows: list[RunRow], where: Expression) -> tuple[list[RunRow], list[Note]]:
    """Returns the rows of which it is true, and a note if it could not be evaluated for some."""
    kept, wrong = [], []
    for row in rows:
        try:
            if where.truth(row.value):
                kept.append(row)
        except ConfigError as error:
            wrong.append(error)
    if wrong and len(wrong) == len(rows):
        raise wrong[0]
    notes = [f"{len(wrong)} runs left out, as the first: {wrong[0]}"] if wrong else []
    return kept, [Note("--where", text) for text in notes]


def _sorted(rows: list[RunRow], key: str, names: set[str]) -> list[RunRow]:
    """Returns rows in the order of a name, descending behind a ``-``; missing values come last."""
    name = key.removeprefix("-")
    if name not in names:
        raise ConfigError(f"--sort {name!r} is no name of a run; {offer(name, sorted(names))}")

    def order(row: RunRow) -> tuple[int, Any]:  # numbers, then all else as text
        value = row.value(name)
        return (0, value) if isinstance(value, (int, float)) else (1, str(value))

    present = [row for row in rows if row.value(name) is not None]
    missing = [row for row in rows if row.value(name) is None]
    return sorted(present, key=order, reverse=key.startswith("-")) + missing
