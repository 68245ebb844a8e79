"""What do many runs say together? pandas DataFrames, one row for each run, attempt, rank or class.

Every number has its unit in the name of its column; what a run did not record is missing, never 0.
All frames share the columns ``campaign`` and ``run`` (the name of the folder), by which they join.
Nothing here raises because of what a folder holds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hires.core.store import campaign
from hires.core.store.attempts import Attempt
from hires.core.store.reading import Note, text
from hires.report.load import measured_points, plain_values, rows, traffic_matrix
from hires.report.load.plain_values import count, dicts, number, spoken
from hires.report.load.rows import Row, words_of
from hires.report.load.runs import Run, attempt_origin, campaign_labels, read_runs

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Frames:
    """Everything that a report or a comparison asks about some runs.

    A frame is made when it is first asked for.
    """

    held: list[Run]
    planned_rows: list[Row]
    notes: list[Note] = field(default_factory=list)
    labels: dict[Path, str] = field(default_factory=dict)
    """What the folders of campaigns are called."""

    @functools.cached_property
    def runs(self) -> pd.DataFrame:
        """One row a run: what it is, how it ended, its latest numbers, what makes it again."""
        return _frame([rows.run_row(run) for run in self.held], rows.RUN_COLUMNS)

    @functools.cached_property
    def attempts(self) -> pd.DataFrame:
        """One row a complete attempt: throughput and step time."""
        found = [
            {
                **rows.named(run),
                **rows.what(run),
                **rows.speed(attempt.record),
                "attempt": attempt.number,
                **dict(zip(("git", "host", "ended"), attempt_origin(attempt.record), strict=True)),
                "peak_bytes_max": rows.largest(dicts(attempt.record.get("memory")), "peak_bytes"),
            }
            for run, attempt in self._complete()
        ]
        return _frame(found, rows.ATTEMPT_COLUMNS)

    @functools.cached_property
    def samples(self) -> pd.DataFrame:
        """One row a step of a complete attempt: its seconds, and whether it counts."""
        found = []
        for run, attempt in self._complete():
            out = plain_values.discarded_steps(attempt.record)
            found += [
                {**rows.named(run), "attempt": attempt.number, "step": step, "step_s": number(took)}
                | {"counted": step not in out}
                for step, took in (
                    (count(s.get("step")), s.get("step_s"))
                    for s in dicts(attempt.record.get("samples"))
                )
                if step is not None
            ]
        return _frame(found, ("campaign", "run", "attempt", "step", "step_s", "counted"))

    @functools.cached_property
    def points(self) -> pd.DataFrame:
        """One row a point: the median over its attempts, and its share of single processes."""
        steps: dict[tuple[str, str, int], list[float]] = {}
        for row in plain_rows(self.samples):
            if row["counted"] and row["step_s"] is not None:
                key = row["campaign"], row["run"], row["attempt"]
                steps.setdefault(key, []).append(row["step_s"])
        return _frame(
            measured_points.point_rows(plain_rows(self.attempts), steps), measured_points.COLUMNS
        )

    @functools.cached_property
    def memory(self) -> pd.DataFrame:
        """One row a rank of a run that measured: its place and its bytes."""
        found = [
            {
                **rows.named(run),
                **rows.what(run),
                **rows.rank_row(entry, begun=bool(dicts(run.record.get("samples")))),
                "reproduce": run.reproduce,
            }
            for run in self.held
            for entry in dicts(run.record.get("memory"))
        ]
        return _frame(found, rows.MEMORY_COLUMNS)

    @functools.cached_property
    def communication(self) -> pd.DataFrame:
        """One row a kind and size class of messages: what a step of the plan says."""
        found = []
        known: dict[tuple[Any, ...], dict[tuple[str, int], tuple[int, int]]] = {}
        for run in self.held:
            for (kind, size), (messages, num_bytes) in rows.by_class(run, known).items():
                found.append(
                    {
                        **rows.named(run),
                        **rows.what(run),
                        "kind": kind,
                        "size_class": traffic_matrix.CLASSES[size],
                        "messages_per_step": messages,
                        "bytes_per_step": num_bytes,
                        "reproduce": run.reproduce,
                    }
                )
        return _frame(found, rows.COMMUNICATION_COLUMNS)

    @functools.cached_property
    def failures(self) -> pd.DataFrame:
        """One row an attempt that did not come to its end, the runs' states beside them."""
        found = []
        for run in self.held:
            state = run.end[0]
            ends = [(a.number, a.exit) for a in run.attempts if a.exit.get("state") != "done"]
            told = [(n, rows.ended_as(values)) for n, values in ends if values]
            if not told and state in ("failed", "lost", "cancelled", "unknown"):
                told = [(run.shown, run.end)]
            found += [
                {**rows.named(run), **rows.what(run), "state": state, "attempt": attempt}
                | {"ended_as": end[0], "reason": end[1], "cause": end[2]}
                | {"reproduce": run.reproduce}
                for attempt, end in told
            ]
        return _frame(found, rows.FAILURE_COLUMNS)

    @functools.cached_property
    def planned(self) -> pd.DataFrame:
        """One row a point of a campaign: that it is a run, or why it cannot be one."""
        states = {(run.campaign, run.name): run.end for run in self.held}
        found = []
        for row in self.planned_rows:
            end = states.get((row["campaign"], row["run"]))
            if row["state"] != "infeasible":
                row = {**row, "state": end[0] if end else "pending"}
            found.append(row)
        return _frame(found, rows.PLANNED_COLUMNS)

    @functools.cached_property
    def precision(self) -> pd.DataFrame:
        """One row a run with a loss: beside the same point in the most exact precision there is."""
        return _frame(rows.precision_rows(self.held), rows.PRECISION_COLUMNS)

    @functools.cached_property
    def configs(self) -> pd.DataFrame:
        """One row a run, one column for every key of its config, as ``parallel.stages``."""
        found = [
            {**rows.named(run), **{key: spoken(v) for key, v in run.flat_config.items()}}
            for run in self.held
        ]
        return _frame(found, ("campaign", "run"))

    def run(self, campaign: str, name: str) -> Run | None:
        """Returns a run by what stands in every frame."""
        return self._by_name.get((campaign, name))

    @functools.cached_property
    def _by_name(self) -> dict[tuple[str, str], Run]:
        """The runs by campaign and name."""
        return {(run.campaign, run.name): run for run in self.held}

    def all_notes(self) -> list[Note]:
        """Returns everything that could not be used, each once."""
        found = [*self.notes, *(note for run in self.held for note in run.notes)]
        return list(dict.fromkeys([*found, *self._left_out()]))

    def _left_out(self) -> list[Note]:
        """Returns which attempts count in no median, because later code or others made the rest."""
        told = []
        for point in plain_rows(self.points):
            if point["left_out"]:
                why = f"{point['left_out']} complete attempts of another commit or machine than "
                why += f"{(point['git'] or '?')[:10]} on {point['host'] or '?'} count in no median"
                told.append(Note(f"{point['campaign']}/{point['run']}", why))
        return told

    def _complete(self) -> Iterable[tuple[Run, Attempt]]:
        """Yields the complete attempts; a run of before attempts kept records has one."""
        for run in self.held:
            yield from ((run, attempt) for attempt in run.complete)


def load(paths: Sequence[Path], told: Mapping[Path, Any] | None = None) -> Frames:
    """Returns the frames of some runs, and of what their campaigns planned.

    Args:
        paths: run folders.
        told: (state, reason, cause) of runs that left no last word, by folder.
    """
    held = read_runs(paths, told)
    return Frames(held, [], labels={run.path.parent: run.campaign for run in held})


def add_campaign(frames: Frames, folder: Path) -> None:
    """Adds the points that the sweeps of a campaign planned."""
    plans = campaign.read(folder, frames.notes)
    name = frames.labels.setdefault(folder, campaign_labels([*frames.labels, folder])[folder])
    for point in plans.points:
        words = words_of(point.overrides)
        row: Row = {"campaign": name, "run": text(point.run, 160), "overrides": words}
        again = f"hires run {words}" if words else None
        frames.planned_rows.append({**row, "state": "pending", "reproduce": again})
    for out in plans.excluded:
        words = words_of(out.overrides)
        row = {"campaign": name, "overrides": words, "reason": text(out.reason)}
        row |= {"nearest": text(out.nearest, 300), "state": "infeasible", "run": None}
        row["what"] = rows.planned_what(out.what)
        frames.planned_rows.append({**row, "reproduce": f"hires plan {words}" if words else None})


def plain_rows(frame: pd.DataFrame) -> list[Row]:
    """Returns the rows of a frame as plain values; None where nothing is known."""
    columns = [frame[key].astype(object).where(frame[key].notna(), None) for key in frame.columns]
    return [dict(zip(frame.columns, row, strict=True)) for row in zip(*columns, strict=True)]


def numeric(frame: pd.DataFrame, column: str) -> pd.Series:
    """Returns a column as numbers; what is none is missing."""
    import pandas as pd

    return pd.to_numeric(frame[column], errors="coerce").astype("float64")


def _frame(rows: Sequence[Row], columns: Sequence[str]) -> pd.DataFrame:
    """Returns rows as a frame whose columns always exist, in this order, others behind."""
    import pandas as pd

    others = dict.fromkeys(key for row in rows for key in row if key not in columns)
    wanted = columns if len(columns) > 2 else [*columns, *others]
    return pd.DataFrame({key: _column(key, [row.get(key) for row in rows]) for key in wanted})


def column_of(values: list[float | None]) -> Any:
    """Returns numbers as a column that holds missing ones."""
    import pandas as pd

    return pd.array(values, dtype="Float64")


def _column(key: str, values: list[Any]) -> Any:
    """Returns one column with a type that holds missing values."""
    import pandas as pd

    known = [value for value in values if value is not None]
    if key == "loss_finite" or (known and all(isinstance(value, bool) for value in known)):
        return pd.array(values, dtype="boolean")
    if key in _TEXTS or not known or not all(map(_is_number, known)):
        if key not in _TEXTS and not known:
            return pd.array(values, dtype="Float64")
        return pd.array([None if v is None else str(v) for v in values], dtype="string")
    whole = all(isinstance(value, int) for value in known)
    return pd.array(values, dtype="Int64" if whole else "Float64")


def _is_number(value: Any) -> bool:
    """Whether a value is a number, as true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_TEXTS = frozenset(
    (
        "campaign", "run", "hash", "model", "image", "layout", "precision", "task", "state",
        "reason", "cause", "memory_limit", "git", "host", "started", "reproduce", "stage", "tile",
        "source", "kind", "size_class", "ended_as", "overrides", "nearest", "reference",
        "arranged", "settings", "ended",
    )
)  # fmt: skip
"""Columns of text, even where nobody has written any."""
