"""``hires list runs``: lists runs and their results."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hires.cli.run_rows import RunRow, RunsWhere, run_rows, sorted_rows
from hires.cli.screens.notes import plural, print_notes
from hires.cli.screens.screen import print_table
from hires.core.errors import ConfigError
from hires.core.units import MIB
from hires.report.columns import Column, Table
from hires.report.load.rows import RUN_COLUMNS
from hires.report.tables.formats import safe_csv

_SHOWN = (
    Column("hash", "run"),
    Column("campaign", "campaign"),
    Column("model", "model"),
    Column("image", "image"),
    Column("layout", "layout"),
    Column("precision", "precision"),
    Column("batch", "batch", digits=0),
    Column("ranks", "ranks", digits=0),
    Column("state", "state"),
    Column("img_per_s_median", "last attempt", "img/s", digits=2),
    Column("peak_bytes_max", "fullest rank", "MiB", 1 / MIB, 1),
    Column("loss_last", "last loss", digits=4),
    Column("started", "started"),
)


def list_runs(args: Any) -> int:
    """Prints runs as a table, CSV or JSON; returns 0.

    Args:
        args: options ``where``, ``campaign``, ``sort``, ``csv``, ``json`` and ``results``.

    Raises:
        ConfigError: an option makes no sense.
    """
    if args.csv and args.json:
        raise ConfigError("--csv and --json exclude each other; choose one")
    where = None if args.where is None else RunsWhere(args.where)
    rows, notes = run_rows([] if args.campaign is None else [args.campaign], args.results)
    if where is not None:
        rows, more = where.kept(rows)
        notes += more
    if args.sort is not None:
        rows = sorted_rows(rows, args.sort)
    print_notes(notes)
    if args.json:
        values = [{**row.values, "path": str(row.run.path)} for row in rows]
        remarks = [{"where": note.where, "text": note.text} for note in notes]
        print(json.dumps({"runs": values, "notes": remarks}, indent=2))
    elif args.csv:
        print(safe_csv(_table(rows, [Column(key, key) for key in RUN_COLUMNS])), end="")
    else:
        _print(rows)
    return 0


def _print(rows: list[RunRow]) -> None:
    if not rows:
        print("no runs")
        return
    table = _table(rows, list(_SHOWN))
    shown = [[_brief(cell) for cell in cells] for cells in table.text_rows()]
    print_table(plural(len(rows), "run"), table.columns, shown)


def _brief(cell: str) -> str:
    """Returns a cell as it fits: of a time stamp day and minute."""
    return cell[:16].replace("T", " ") if cell[10:11] == "T" and cell[4:5] == "-" else cell


def _table(rows: list[RunRow], columns: list[Column]) -> Table:
    columns = [dataclasses.replace(column) for column in columns]
    cells = [[row.values.get(column.key) for column in columns] for row in rows]
    return Table("runs", "Runs", columns, cells)
