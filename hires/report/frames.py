"""Holds the data of many runs as pandas DataFrames, one row for each run, attempt, rank or class.

Every number has its unit in the name of its column; what a run did not record is missing, never 0.
All frames share the columns ``campaign`` and ``run`` (the name of the folder), by which they join.
A damaged folder raises nothing here; notes say what could not be used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hires.core.store import campaign
from hires.core.store.reading import Note
from hires.report.columns import MEMORY, POINT, Row
from hires.report.load import measured_points, rows
from hires.report.load.plain_values import value_text
from hires.report.load.runs import End, Run, campaign_labels, read_runs

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Frames:
    """The data of some runs; a frame is made on first use."""

    held: list[Run]
    planned_rows: list[Row]
    notes: list[Note] = field(default_factory=list)
    labels: dict[Path, str] = field(default_factory=dict)
    """Names of the campaigns by their folders."""

    @functools.cached_property
    def runs(self) -> pd.DataFrame:
        """One row a run: what it is, how it ended, its latest numbers, how to reproduce it."""
        return _frame(rows.RUN_COLUMNS, map(rows.run_row, self.held))

    @functools.cached_property
    def attempts(self) -> pd.DataFrame:
        """One row a complete attempt: throughput and step time."""
        return _frame(rows.ATTEMPT_COLUMNS, self._each(rows.attempt_rows))

    @functools.cached_property
    def samples(self) -> pd.DataFrame:
        """One row a step of a complete attempt: its seconds, and whether it counts."""
        return _frame(rows.SAMPLE_COLUMNS, self._each(rows.sample_rows))

    @functools.cached_property
    def points(self) -> pd.DataFrame:
        """One row a point: the median over its attempts, and its share of single processes."""
        steps: dict[tuple[str, str, int], list[float]] = {}
        for row in self._each(rows.sample_rows):
            if row["counted"] and row["step_s"] is not None:
                key = row["campaign"], row["run"], row["attempt"]
                steps.setdefault(key, []).append(row["step_s"])
        points = measured_points.point_rows(plain_rows(self.attempts), steps)
        return _frame(measured_points.COLUMNS, points)

    @functools.cached_property
    def memory(self) -> pd.DataFrame:
        """One row a rank that recorded its memory: its place and its bytes."""
        return _frame(rows.MEMORY_COLUMNS, self._each(rows.rank_rows))

    @functools.cached_property
    def communication(self) -> pd.DataFrame:
        """One row a kind and size class of messages in a step of the plan."""
        return _frame(rows.COMMUNICATION_COLUMNS, rows.traffic_rows(self.held))

    @functools.cached_property
    def failures(self) -> pd.DataFrame:
        """One row an attempt that failed, with the state of its run."""
        return _frame(rows.FAILURE_COLUMNS, self._each(rows.failure_rows))

    @functools.cached_property
    def planned(self) -> pd.DataFrame:
        """One row a point of a campaign: the state of its run, or why it was excluded."""
        states = {(run.campaign, run.name): run.end[0] for run in self.held}
        points = []
        for row in self.planned_rows:
            if row["state"] != "infeasible":
                row = {**row, "state": states.get((row["campaign"], row["run"]), "pending")}
            points.append(row)
        return _frame(rows.PLANNED_COLUMNS, points)

    @functools.cached_property
    def precision(self) -> pd.DataFrame:
        """One row a run with a loss, beside the same point in the most exact precision."""
        return _frame(rows.PRECISION_COLUMNS, rows.precision_rows(self.held))

    @functools.cached_property
    def configs(self) -> pd.DataFrame:
        """One row a run, one column for every key of its config, as ``parallel.stages``."""
        configs = [
            {
                "campaign": run.campaign,
                "run": run.name,
                **{key: value_text(value) for key, value in run.flat_config.items()},
            }
            for run in self.held
        ]
        keys = dict.fromkeys(["campaign", "run", *(key for row in configs for key in row)])
        return _frame(list(keys), configs)

    def run(self, campaign: str, name: str) -> Run | None:
        """Returns a run by the columns ``campaign`` and ``run`` of every frame."""
        return self._by_name.get((campaign, name))

    @functools.cached_property
    def _by_name(self) -> dict[tuple[str, str], Run]:
        return {(run.campaign, run.name): run for run in self.held}

    def _each(self, rows_of: Callable[[Run], Iterable[Row]]) -> Iterable[Row]:
        return (row for run in self.held for row in rows_of(run))

    def all_notes(self) -> list[Note]:
        """Returns everything that could not be used, each once."""
        notes = [*self.notes, *(note for run in self.held for note in run.notes)]
        for point in plain_rows(self.points):
            if point["left_out"]:
                why = (
                    f"{point['left_out']} complete attempts of another commit or machine than "
                    f"{(point['git'] or '?')[:10]} on {point['host'] or '?'} count in no median"
                )
                notes.append(Note(f"{point['campaign']}/{point['run']}", why))
        return list(dict.fromkeys(notes))


def load(paths: Sequence[Path], states: Mapping[Path, End] | None = None) -> Frames:
    """Returns the frames of some runs.

    Args:
        paths: run folders.
        states: (state, reason, cause) of runs without an exit record, by folder.
    """
    held = read_runs(paths, states)
    return Frames(held, [], labels={run.path.parent: run.campaign for run in held})


def add_campaign(frames: Frames, folder: Path) -> None:
    """Adds the points that the sweeps of a campaign planned."""
    name = frames.labels.setdefault(folder, campaign_labels([*frames.labels, folder])[folder])
    frames.planned_rows += rows.planned_rows(name, campaign.read(folder, frames.notes))


def plain_rows(frame: pd.DataFrame) -> list[Row]:
    """Returns the rows of a frame as plain values; None where one is missing."""
    return [dict(zip(frame.columns, cells, strict=True)) for cells in plain_cells(frame)]


def plain_cells(frame: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Returns the cells of a frame row by row as plain values; None where one is missing."""
    columns = [frame[key].astype(object).where(frame[key].notna(), None) for key in frame.columns]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def numeric(frame: pd.DataFrame, column: str) -> pd.Series:
    """Returns a column as numbers; what is none is missing."""
    import pandas as pd

    return pd.to_numeric(frame[column], errors="coerce").astype("float64")


def column_of(numbers: list[float | None]) -> Any:
    """Returns numbers as a column that holds missing ones."""
    import pandas as pd

    return pd.array(numbers, dtype="Float64")


def _frame(columns: Sequence[str], held: Iterable[Row]) -> pd.DataFrame:
    """Returns rows as a frame of these columns, which exist even if there is no row."""
    import pandas as pd

    held = list(held)
    return pd.DataFrame({key: _column(key, [row.get(key) for row in held]) for key in columns})


def _column(key: str, cells: list[Any]) -> Any:
    """Returns one column of a type that holds missing values.

    ``convert_dtypes`` would turn seconds that happen to be whole into integers.
    """
    import pandas as pd

    types = {type(cell) for cell in cells if cell is not None}
    if types == {bool} or key == "loss_finite":
        return pd.array(cells, dtype="boolean")
    if types <= {int, float} and key not in _TEXTS:
        return pd.array(cells, dtype="Int64" if types == {int} else "Float64")
    return pd.array([None if cell is None else str(cell) for cell in cells], dtype="string")


_TEXTS = frozenset(
    (
        *(column.key for column in (*POINT, *MEMORY) if not column.numeric),
        "campaign", "run", "hash", "task", "state", "reason", "cause", "memory_limit", "git",
        "host", "started", "reproduce", "kind", "size_class", "ended_as", "overrides", "nearest",
        "reference", "arranged", "settings", "ended",
    )
)  # fmt: skip
"""Columns of text, even if all their values are missing."""
