"""How do the runs of a campaign compare? The tables of all of them, one below the other.

The rows are those of :mod:`hires.report.tables.run_tables`, each behind the hash of its run and
what sets it apart from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.store import file_names, records, rundir
from hires.core.store.campaign import Campaign, PlannedPoint
from hires.core.store.files import write_atomically
from hires.report.tables.run_tables import Cell, Column, Table, tables, to_csv, to_markdown

_SHOWN = ("model", "image", "parallel", "precision", "batch")
"""Keys that have a column of their own in the table of throughput."""

_RUN = Column("run", "run")
_ATTEMPT = Column("attempt", "attempt", digits=0)
_APART = Column("overrides", "overrides")


@dataclass(frozen=True)
class Row:
    """A complete attempt of a point."""

    run: str
    """The hash of its run."""
    apart: str
    """Overrides that not all points share and no column shows."""
    record: dict[str, Any]


def rows_of(folder: Path, campaign: Campaign) -> list[Row]:
    """Returns the complete attempts of a campaign: as many of each point as were asked for.

    Args:
        folder: of the campaign.
        campaign: its points.
    """
    words = [set(point.overrides) for point in campaign.points]
    shared = set.intersection(*words) if words else set()
    return [
        Row(point.run.rpartition("-")[2], _apart(point, shared), record)
        for point in campaign.points
        for record in done_records(folder / point.run, point.repeat)
    ]


def done_records(run: Path, count: int) -> list[dict[str, Any]]:
    """Returns the records of the last ``count`` complete attempts of a run; damaged ones are not.

    A run that completed before attempts kept records of their own has one.
    """
    found = []
    for attempt in rundir.done_attempts(run)[-count:]:
        record = _read(file_names.attempt_dir(run, attempt))
        found += [record] if record is not None else []
    if found:
        return found
    record = _read(run)
    return [record] if record is not None and record.get("state") == "done" else []


def campaign_tables(rows: Sequence[Row]) -> list[Table]:
    """Returns the tables of all rows, each with the columns that tell the rows apart."""
    extra = [_RUN]
    extra += [_APART] if any(row.apart for row in rows) else []
    several = len({row.run for row in rows}) < len(rows)
    extra += [_ATTEMPT] if several else []
    joined: dict[str, Table] = {}
    for row in rows:
        first: dict[Column, Cell] = {_RUN: row.run, _APART: row.apart}
        first[_ATTEMPT] = row.record["attempt"]
        cells = [first[column] for column in extra]
        for table in tables(row.record):
            into = joined.setdefault(
                table.name, Table(table.name, table.title, [*extra, *table.columns], [])
            )
            assert isinstance(into.rows, list)
            into.rows.extend([*cells, *held] for held in table.rows)
    return list(joined.values())


def write(folder: Path, made: Sequence[Table]) -> list[Path]:
    """Writes the tables into the campaign's folder, as CSV and Markdown, and returns the files.

    Raises:
        RunError: a file cannot be written.
    """
    files = []
    for table in made:
        for ending, text in (("csv", to_csv(table)), ("md", to_markdown(table))):
            files.append(folder / f"{table.name}.{ending}")
            write_atomically(files[-1], text)
    return files


def _apart(point: PlannedPoint, shared: set[str]) -> str:
    """Returns the overrides of a point that no column shows and not all points have."""
    return " ".join(
        word
        for word in point.overrides
        if word not in shared and word.partition("=")[0].lstrip("+") not in _SHOWN
    )


def _read(folder: Path) -> dict[str, Any] | None:
    """Returns the record in a folder, if it is there and whole."""
    try:
        return records.read_record(folder)
    except RunError:
        return None
