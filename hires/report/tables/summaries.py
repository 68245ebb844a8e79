"""Which tables does a report hold? Six, each from a frame, with headings and units for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hires.core.units import MIB
from hires.report.frames import Frames, column_of, plain_rows
from hires.report.load import measured_points
from hires.report.tables.run_tables import Cell, Column, Table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Summary:
    """One table of a report, as data and as people read it."""

    table: Table
    frame: pd.DataFrame
    """The same rows and columns, with types."""
    caption: str
    """What it says, in one sentence."""
    missing: str
    """What to say if it has no rows."""

    @property
    def name(self) -> str:
        """File name without its ending."""
        return self.table.name


def summaries(frames: Frames) -> list[Summary]:
    """Returns all tables of a report, the empty ones too."""
    return [
        _throughput(frames),
        _memory(frames),
        _communication(frames),
        _precision(frames),
        _failures(frames),
        _planned(frames),
    ]


def _throughput(frames: Frames) -> Summary:
    """Returns images per second of every complete attempt."""
    frame = frames.attempts
    base = measured_points.single_speeds(plain_rows(frames.points))
    share = [measured_points.efficiency(row, base) for row in plain_rows(frame)]
    frame = frame.assign(efficiency_percent=column_of(share))
    frame = frame.sort_values(["campaign", "model", "height", "layout", "precision"])
    return _summary(
        "throughput",
        "Throughput",
        frame,
        _THROUGHPUT,
        "Every complete attempt; a step takes as long as its slowest rank, and p10 and p90 are of "
        "the steps after the warm-up. The headline and the plots have the median over the attempts "
        "of a point by its latest commit and machine. Efficiency is the share of as many single "
        "processes at the same point.",
        "No run is complete, so there is no throughput.",
    )


def _memory(frames: Frames) -> Summary:
    """Returns the memory of every rank."""
    return _summary(
        "memory",
        "Memory per rank",
        frames.memory,
        _MEMORY,
        "Of the last attempt: the measured peak beside the predicted one. An error above 0 means "
        "that more was predicted than was needed.",
        "No rank recorded its memory.",
    )


def _communication(frames: Frames) -> Summary:
    """Returns messages by kind and size."""
    return _summary(
        "communication",
        "Communication by size class",
        frames.communication,
        _COMMUNICATION,
        "What one step of the plan sends over all ranks. A sum of gradients counts as the least "
        "bytes that any algorithm sends.",
        "All runs have one rank, or no plan that can be read: nothing is sent.",
    )


def _precision(frames: Frames) -> Summary:
    """Returns losses by precision."""
    return _summary(
        "precision",
        "Precision and accuracy",
        frames.precision,
        _PRECISION,
        "Errors are relative to the same point in the most exact precision that was run. The "
        "first loss has the same weights and images in both. Losses are of the last attempt, "
        "images per second the median over those of the latest code.",
        "No complete run recorded a loss.",
    )


def _failures(frames: Frames) -> Summary:
    """Returns attempts that failed."""
    return _summary(
        "failures",
        "Failures",
        frames.failures,
        _FAILURES,
        "Every attempt that did not come to its end, with what is known of the cause.",
        "Nothing failed.",
    )


def _planned(frames: Frames) -> Summary:
    """Returns the points of campaigns, those that did not come to a result first."""
    order = frames.planned["state"].map(lambda state: _LAST if state == "done" else _FIRST[state])
    return _summary(
        "points",
        "Planned and excluded points",
        frames.planned.loc[order.sort_values(kind="stable").index],
        _POINTS,
        "What the sweeps planned. An infeasible point was excluded before anything started.",
        "No sweep planned these runs.",
    )


def _summary(
    name: str,
    title: str,
    frame: pd.DataFrame,
    columns: Sequence[Column],
    caption: str,
    missing: str,
) -> Summary:
    """Returns a table with those columns in which something is known."""
    kept = [c for c in columns if c.key in _ALWAYS or (len(frame) and frame[c.key].notna().any())]
    if len(frame) and "campaign" in frame and frame["campaign"].nunique() < 2:
        kept = [column for column in kept if column.key != "campaign"]
    own = frame[[column.key for column in kept]]
    return Summary(Table(name, title, kept, cells(own)), own, caption, missing)


def cells(frame: pd.DataFrame) -> list[list[Cell]]:
    """Returns the rows of a frame as plain values; None where nothing is known."""
    columns = [_plain(frame[key]) for key in frame.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _plain(column: pd.Series) -> list[Cell]:
    """Returns one column as plain values."""
    if str(column.dtype) == "boolean":
        return [None if v is None else ("yes" if v else "no") for v in _objects(column)]
    return _objects(column)


def _objects(column: pd.Series) -> list[Cell]:
    """Returns a column's values as Python's own, None where one is missing."""
    whole: list[Cell] = column.astype(object).where(column.notna(), None).tolist()
    return whole


_LAST = 9
_FIRST = defaultdict(lambda: 2, infeasible=0, failed=1)
"""Order of the states of points."""
_ALWAYS = ("run", "reproduce")
_RUN = (Column("campaign", "campaign"), Column("run", "run"))
_POINT = (
    Column("model", "model"),
    Column("image", "image"),
    Column("layout", "layout"),
    Column("precision", "precision"),
)
_AGAIN = Column("reproduce", "reproduce")

_THROUGHPUT = (
    *_RUN,
    *_POINT,
    Column("task", "task"),
    Column("ranks", "ranks", digits=0),
    Column("batch", "images/step", digits=0),
    Column("attempt", "attempt", digits=0),
    Column("img_per_s_median", "median", "img/s", digits=2),
    Column("img_per_s_p10", "p10", "img/s", digits=2),
    Column("img_per_s_p90", "p90", "img/s", digits=2),
    Column("efficiency_percent", "efficiency", "%", digits=1),
    Column("step_s_median", "step median", "s", digits=4),
    Column("step_s_p10", "step p10", "s", digits=4),
    Column("step_s_p90", "step p90", "s", digits=4),
    Column("samples", "samples", digits=0),
    _AGAIN,
)
_MEMORY = (
    *_RUN,
    *_POINT,
    Column("rank", "rank", digits=0),
    Column("replica", "replica", digits=0),
    Column("stage", "stage"),
    Column("tile", "tile"),
    Column("peak_bytes", "measured", "MiB", 1 / MIB, 1),
    Column("predicted_bytes", "predicted", "MiB", 1 / MIB, 1),
    Column("error_percent", "error", "%", digits=1),
    Column("source", "measured by"),
    Column("params_bytes", "parameters", "MiB", 1 / MIB, 1),
    Column("grads_bytes", "gradients", "MiB", 1 / MIB, 1),
    Column("optimizer_bytes", "optimiser", "MiB", 1 / MIB, 1),
    _AGAIN,
)
_COMMUNICATION = (
    *_RUN,
    *_POINT,
    Column("ranks", "ranks", digits=0),
    Column("kind", "kind"),
    Column("size_class", "size of a message"),
    Column("messages_per_step", "messages/step", digits=0),
    Column("bytes_per_step", "sent per step", "MiB", 1 / MIB, 3),
    _AGAIN,
)
_PRECISION = (
    *_RUN,
    *_POINT,
    Column("loss_first", "first loss", digits=4),
    Column("loss_last", "last loss", digits=4),
    Column("loss_finite", "finite"),
    Column("reference", "beside"),
    Column("first_loss_error", "error of first", "%", 100.0, 4),
    Column("last_loss_error", "error of last", "%", 100.0, 4),
    Column("img_per_s_median", "median", "img/s", digits=2),
    _AGAIN,
)
_FAILURES = (
    *_RUN,
    *_POINT,
    Column("attempt", "attempt", digits=0),
    Column("ended_as", "ended as"),
    Column("reason", "reason"),
    Column("cause", "cause"),
    Column("state", "run is now"),
    _AGAIN,
)
_POINTS = (
    *_RUN,
    Column("state", "state"),
    Column("overrides", "overrides"),
    Column("reason", "why not"),
    Column("nearest", "nearest that can run"),
    _AGAIN,
)
