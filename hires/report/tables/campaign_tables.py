"""Builds the tables of a campaign from those of its runs, one below the other.

Each row follows the hash of its run and what distinguishes it from the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.store import file_names, records, rundir
from hires.core.store.campaign import Campaign
from hires.report.columns import Cell, Column, Table
from hires.report.tables.run_tables import tables

_WITH_COLUMN = ("model", "image", "parallel", "precision", "batch")
"""Keys that have a column in the table of throughput."""

_RUN = Column("run", "run")
_ATTEMPT = Column("attempt", "attempt", digits=0)
_OVERRIDES = Column("overrides", "overrides")


@dataclass(frozen=True)
class AttemptRow:
    """A complete attempt of a point."""

    run: str
    """The hash of its run."""
    overrides: str
    """Overrides that not all points share and no column shows."""
    record: dict[str, Any]


def rows_of(folder: Path, campaign: Campaign) -> list[AttemptRow]:
    """Returns the complete attempts of a campaign: as many of each point as it repeats.

    Args:
        folder: of the campaign.
        campaign: its points.
    """
    words = [set(point.overrides) for point in campaign.points]
    shown = set.intersection(*words) if words else set()
    rows = []
    for point in campaign.points:
        own = [word for word in point.overrides if word not in shown]
        own = [word for word in own if word.partition("=")[0].lstrip("+") not in _WITH_COLUMN]
        for record in done_records(folder / point.run, point.repeat):
            rows.append(AttemptRow(point.run.rpartition("-")[2], " ".join(own), record))
    return rows


def done_records(run: Path, count: int) -> list[dict[str, Any]]:
    """Returns the records of the last ``count`` complete attempts of a run, without damaged ones.

    An old run, without records of its attempts, has one.
    """
    attempts = rundir.done_attempts(run)[-count:]
    own = [_read(file_names.attempt_dir(run, attempt)) for attempt in attempts]
    found = [record for record in own if record is not None]
    last = None if found else _read(run)
    return [last] if last is not None and last.get("state") == "done" else found


def campaign_tables(rows: Sequence[AttemptRow]) -> list[Table]:
    """Returns the tables of all rows, each with the columns that distinguish the rows."""
    several = len({row.run for row in rows}) < len(rows)
    extra = [_RUN]
    extra += [_OVERRIDES] if any(row.overrides for row in rows) else []
    extra += [_ATTEMPT] if several else []
    joined: dict[str, Table] = {}
    for row in rows:
        first: dict[Column, Cell] = {_RUN: row.run, _OVERRIDES: row.overrides}
        first[_ATTEMPT] = row.record["attempt"]
        for table in tables(row.record):
            columns = [*extra, *table.columns]
            above = joined[table.name].rows if table.name in joined else ()
            cells = [[*(first[column] for column in extra), *own] for own in table.rows]
            joined[table.name] = Table(table.name, table.title, columns, [*above, *cells])
    return list(joined.values())


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        return records.read_record(folder)
    except RunError:
        return None
