"""Holds the data of many runs as pandas DataFrames, one row for each run, attempt, rank or class.

The names of columns end with units; what a run did not record is missing, never 0. Frames join by
``campaign`` and ``run`` (the name of the folder). Notes tell what of a damaged folder is left out.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from hires.core.store import campaign
from hires.core.store.file_names import StrPath
from hires.core.store.reading import Note, text
from hires.report.columns import MEMORY, POINT, Row
from hires.report.read import (
    evaluation_rows,
    measured_points,
    rows,
)
from hires.report.read.plain_values import count, dicts, dig, value_text
from hires.report.read.runs import Run, campaign_labels, read_runs

DEVICE = "device"  # source of a rank's memory in a record, if it computed on an accelerator


def _frame_of(
    columns: Sequence[str], rows_of: Callable[[list[Run]], Iterable[Row]]
) -> functools.cached_property[pd.DataFrame]:
    """Returns a property of :class:`Frames`: the rows of all its runs, made on first use."""
    return functools.cached_property(lambda self: _frame(columns, rows_of(self.run_list)))


def _each(rows_of: Callable[[Run], Iterable[Row]]) -> Callable[[list[Run]], Iterable[Row]]:
    return lambda runs: (row for run in runs for row in rows_of(run))


@dataclass
class Frames:
    """The data of some runs."""

    run_list: list[Run]
    planned_rows: list[Row] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    runs = _frame_of(rows.RUN_COLUMNS, lambda runs: map(rows.run_row, runs))
    """One row a run, in their order: what it is, how it ended, its latest numbers."""
    attempts = _frame_of(rows.ATTEMPT_COLUMNS, _each(rows.attempt_rows))
    """One row a complete attempt: throughput and step time."""
    samples = _frame_of(rows.SAMPLE_COLUMNS, _each(rows.sample_rows))
    """One row a step of a complete attempt: its seconds, and whether it counts."""
    memory = _frame_of(rows.MEMORY_COLUMNS, _each(rows.rank_rows))
    """One row a rank that recorded its memory: its place and its bytes."""
    communication = _frame_of(rows.COMMUNICATION_COLUMNS, rows.traffic_rows)
    """One row a kind and size class of messages in a step of the plan."""
    messages = _frame_of(rows.MESSAGE_COLUMNS, _each(rows.message_rows))
    """One row an operation, kind and size of messages that a run has logged."""
    calls = _frame_of(rows.CALL_COLUMNS, _each(rows.call_rows))
    """One row a call of a rank that ``comm.log=full`` has kept; times by the clock of a machine."""
    failures = _frame_of(rows.FAILURE_COLUMNS, _each(rows.failure_rows))
    """One row an attempt that failed, with the state of its run."""
    precision = _frame_of(rows.PRECISION_COLUMNS, rows.precision_rows)
    """One row a training or evaluation with a loss, beside the same in the most exact precision."""

    evaluations = _frame_of(evaluation_rows.COLUMNS, evaluation_rows.evaluation_rows)
    """One row an evaluation: its accuracy, and what agrees with the most exact precision."""

    validations = _frame_of(evaluation_rows.TRAINING_COLUMNS, evaluation_rows.training_rows)
    """Two rows a training that was evaluated as it went on: its best and its last evaluation."""

    predictions = _frame_of(evaluation_rows.PREDICTION_COLUMNS, evaluation_rows.prediction_rows)
    """One row a prediction: of how many images, and where in the folder of the run it lies."""

    @functools.cached_property
    def points(self) -> pd.DataFrame:
        """One row a point: the median over its attempts, and its share of single processes."""
        attempts = [row for run in self.run_list for row in rows.attempt_rows(run)]
        return _frame(measured_points.COLUMNS, measured_points.point_rows(attempts))

    @functools.cached_property
    def planned(self) -> pd.DataFrame:
        """One row a point of a campaign: the state of its run, or why it was excluded."""
        states = {(run.campaign, run.name): run.end[0] for run in self.run_list}
        now = [states.get((row["campaign"], row["run"]), row["state"]) for row in self.planned_rows]
        points = [{**row, "state": s} for row, s in zip(self.planned_rows, now, strict=True)]
        return _frame(rows.PLANNED_COLUMNS, points)

    @functools.cached_property
    def configs(self) -> pd.DataFrame:
        """One row a run, one column for every key of its config, as ``parallel.stages``."""
        configs = []
        for run in self.run_list:
            texts = {key: value_text(value) for key, value in run.flat_config.items()}
            configs.append({"campaign": run.campaign, "run": run.name, **texts})
        columns = dict.fromkeys(("campaign", "run", *(key for row in configs for key in row)))
        return _frame(list(columns), configs)

    @functools.cached_property
    def setting(self) -> str:
        """What kind of device was measured, as it stands below every figure."""
        machines = [machine for run in self.run_list for machine in _machines(run)]
        known = [(ranks, cores) for _, ranks, cores, _ in machines if cores]
        if not known:
            return "device not recorded"
        several = len({host for host, *_ in machines})
        every = sorted({cores for _, cores in known})
        sources = set(self.memory["source"].dropna())
        kinds = ["accelerator"] if DEVICE in sources else []
        kinds += ["CPU"] if sources != {DEVICE} else []
        number = f"{every[0]} to {every[-1]}" if len(every) > 1 else f"{every[0]}"
        where = "1 machine" if several == 1 else f"{several} machines"
        parts = [f"{' and '.join(kinds)}, {number} cores{'' if several == 1 else ' each'}, {where}"]
        crowded = [ranks for ranks, cores in known if ranks > cores]
        if crowded and "CPU" in kinds:
            parts.append(f"simulated ranks: up to {max(crowded)} share the cores")
        elif several == 1 and max(ranks for _, ranks, *_ in machines) > 1:
            parts.append("ranks are processes of one machine")
        most = max(shared for *_, shared in machines)
        if most > 1 and DEVICE in sources:
            parts.append(f"up to {most} ranks share one accelerator")
        return "; ".join(parts)

    def all_notes(self) -> list[Note]:
        """Returns everything that could not be used, each once."""
        notes = [*self.notes, *(note for run in self.run_list for note in run.notes)]
        for point in plain_rows(self.points):
            if point["left_out"]:
                why = (
                    f"{point['left_out']} complete attempts of another commit or machine than "
                    f"{(point['git'] or '?')[:10]} on {point['host'] or '?'} count in no median"
                )
                notes.append(Note(f"{point['campaign']}/{point['run']}", why))
        return list(dict.fromkeys(notes))


def load(
    paths: Iterable[Path],
    campaigns: Iterable[StrPath] = (),
    add_states: Callable[[Iterable[Run]], None] = lambda runs: None,
) -> Frames:
    """Returns the frames of some run folders, and of the points that some campaigns planned.

    ``add_states`` sets the status of runs without an exit record.
    """
    frames = Frames(read_runs(paths))
    add_states(frames.run_list)
    labels = {run.path.parent: run.campaign for run in frames.run_list}
    for folder in map(Path, campaigns):
        name = labels.setdefault(folder, campaign_labels([*labels, folder])[folder])
        frames.planned_rows += rows.planned_rows(name, campaign.read(folder, frames.notes))
    return frames


def plain_rows(frame: pd.DataFrame) -> list[Row]:
    """Returns the rows of a frame as plain values; None where one is missing."""
    return [dict(zip(frame.columns, cells, strict=True)) for cells in plain_cells(frame)]


def plain_cells(frame: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Returns the cells of a frame row by row as plain values; None where one is missing."""
    columns = [frame[key].astype(object).where(frame[key].notna(), None) for key in frame.columns]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def numeric(frame: pd.DataFrame, column: str) -> pd.Series:
    """Returns a column as numbers; what is none is missing."""
    return pd.to_numeric(frame[column], errors="coerce").astype("float64")


def _machines(run: Run) -> Iterator[tuple[str, int, int | None, int]]:
    """Yields the machines that a run recorded: host, ranks on it, their cores, None if unknown.

    The last number is that of the ranks which share one accelerator at most, 0 if unknown.
    """
    origin = run.provenance
    host, rank0_cores = text(origin.get("host"), 60), count(dig(origin, "hardware", "cores"))
    by_host: dict[str, list[Row]] = {}
    for rank in dicts(origin.get("ranks")):
        by_host.setdefault(text(rank.get("host"), 60) or host or "?", []).append(rank)
    if host and not by_host:  # its ranks could not be read
        by_host[host] = [{}] * (count(run.record.get("world")) or 1)
    for name, ranks in by_host.items():
        lists = [rank.get("cores") for rank in ranks]
        used = {n for own in lists if isinstance(own, list) for n in map(count, own)} - {None}
        visible = Counter(words for rank in ranks if (words := text(rank.get("devices"), 200)))
        shares = [-(-number // len(words.split(","))) for words, number in visible.items()]
        yield name, len(ranks), len(used) or rank0_cores, max(shares, default=0)


_DTYPES = {
    (): "Float64",
    (bool,): "boolean",
    (int,): "Int64",
    (float,): "Float64",
    (float, int): "Float64",
}
"""Types of pandas for what a column holds; all else is text."""
_FIXED = {column.key: "string" for column in (*POINT, *MEMORY) if not column.numeric}
_FIXED |= dict.fromkeys((
    "campaign", "run", "hash", "task", "state", "reason", "cause", "memory_limit", "git", "host",
    "started", "reproduce", "kind", "size_class", "operation", "backends", "ended_as", "overrides",
    "reference", "quant", "arranged", "settings", "ended", "data", "evaluation",
    "metric",
), "string") | {"loss_finite": "boolean"}  # fmt: skip
"""Types of columns whatever they hold, even if all their values are missing."""


def _frame(columns: Sequence[str], rows: Iterable[Row]) -> pd.DataFrame:
    """Returns rows as a frame of these columns, which exist even if there is no row.

    Their types hold missing values. ``convert_dtypes`` would turn seconds that happen to be whole
    into integers.
    """
    every = list(rows)
    frame = {}
    for key in columns:
        cells = [row.get(key) for row in every]
        types = {type(cell) for cell in cells if cell is not None}
        held = tuple(sorted(types, key=lambda one: one.__name__))
        dtype = _FIXED.get(key) or _DTYPES.get(held, "string")
        if dtype == "string":
            cells = [None if cell is None else str(cell) for cell in cells]
        frame[key] = pd.array(cells, dtype=dtype)
    return pd.DataFrame(frame)
