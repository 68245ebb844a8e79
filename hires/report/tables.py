"""Builds the tables of runs, campaigns and reports from their declarations, and writes them.

CSV holds plain numbers in bytes and seconds; Markdown and the screen round them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError, RunError
from hires.core.store import file_names, records
from hires.core.store.campaign import Campaign
from hires.core.store.file_names import StrPath
from hires.core.store.files import write_atomically
from hires.report import evaluations, logged_messages, run_tables  # noqa: F401  (their tables)
from hires.report.columns import (
    CAMPAIGN,
    KEYS,
    POINT,
    REPRODUCE,
    RUN,
    TABLES,
    Column,
    DeclaredTable,
    Row,
    Table,
    filled,
    table_of,
)
from hires.report.points import differing_keys
from hires.report.record import RunRecord
from hires.report.runs import Found, Run, find
from hires.report.typed_values import typed

_OF_POINT = tuple(column.key for column in POINT)
OF_A_RUN: dict[str, Sequence[str]] = {
    "validations": (*_OF_POINT, "data"), "predictions": ("data",), "evaluations": ("data",),
    "classes": _OF_POINT,
    "throughput": ("task", "efficiency_percent"), "memory": _OF_POINT,
}  # fmt: skip
"""Tables in the folder of a run, each with the columns of a report that it has not."""


def rows_of(found: Found, name: str) -> list[Row]:
    """Returns the rows of a table."""
    rows = [*TABLES[name].rows(found)]
    if KEYS in TABLES[name].columns:
        for row, keys in zip(
            rows, differing_keys(rows, ("layout_keys", "other_keys")), strict=True
        ):
            row[KEYS.key] = keys or None
    return rows


def tables(found: Found) -> list[Table]:
    """Returns the tables of a report, with those columns that have a value."""
    wanted = sorted((one for one in TABLES.values() if one.empty), key=lambda one: one.place)
    return [_table(found, declared, [CAMPAIGN, RUN], [REPRODUCE]) for declared in wanted]


def tables_of_run(record: RunRecord) -> list[Table]:
    """Returns the tables of a record that have a row, as they lie in the folder of its run."""
    found = Found([Run(Path(), record=record)], last_only=True)
    made = []
    for name, without in OF_A_RUN.items():
        columns = [c for c in TABLES[name].columns if c.key not in (*without, "attempt")]
        made.append(_table(found, replace(TABLES[name], columns=columns), [], []))
    return [table for table in made if table.rows]


def campaign_tables(folder: Path, campaign: Campaign) -> list[Table]:
    """Returns the tables of a campaign that have a row, of those that a run has.

    They name a run by its hash.
    """
    found = find(path for point in campaign.points if (path := folder / point.run).is_dir())
    short = {run.name: run.short for run in found.runs}
    made = [_table(found, TABLES[name], [RUN], []) for name in OF_A_RUN]
    return [table.mapped(lambda cell: short.get(cell, cell)) for table in made if table.rows]


def _table(
    found: Found, declared: DeclaredTable, before: list[Column], behind: list[Column]
) -> Table:
    rows = rows_of(found, declared.name)
    columns = [*before, *declared.columns, *behind]
    if len({*(run.campaign for run in found.runs), *found.campaigns}) < 2:
        columns = [column for column in columns if column is not CAMPAIGN]
    table = table_of(declared.name, declared.title, columns, rows)
    table = replace(table, caption=declared.caption if behind else "", empty=declared.empty)
    return filled(table, (RUN.key, REPRODUCE.key))


def write_run_tables(run_dir: StrPath, values: dict[str, Any]) -> list[Path]:
    """Writes the tables of a run as :func:`write_tables`, but none before it is done."""
    return (
        write_tables(run_dir, tables_of_run(record_of(values))) if values["state"] == "done" else []
    )


def record_of(values: dict[str, Any]) -> RunRecord:
    """Returns a record with types; RunError: it is damaged."""
    try:
        record: RunRecord = typed(RunRecord, values)
    except ValueError as error:
        raise RunError(
            f"{file_names.RECORD} is damaged: {error}; run the experiment again"
        ) from None
    return record


def write_tables(folder: StrPath, tables: Iterable[Table]) -> list[Path]:
    """Writes tables as CSV and Markdown, and returns the files; RunError: it cannot write one."""
    files = []
    for table in tables:
        for ending, data in (("csv", table.to_csv()), ("md", table.to_markdown())):
            files.append(Path(folder) / f"{table.name}.{ending}")
            write_atomically(files[-1], data)
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Writes and prints the tables of a run folder; the last line of every ``launch.sh``."""
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) != 1 or words[0] in ("-h", "--help"):
        sys.stdout.write("usage: python -m hires.report.tables RUN_DIR\n")
        return 0 if words in (["-h"], ["--help"]) else 2
    try:
        values = records.read_record(words[0])
        if values is None:
            sys.stderr.write(f"{words[0]} holds no record.json: no attempt has ended yet\n")
            return 1
        write_run_tables(words[0], values)
        made = tables_of_run(record_of(values))
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write("\n".join(table.to_markdown() for table in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
