"""Declares the tables of a report: the frame, columns and caption of each.

To add a column: here, or in ``report/columns.py`` if it is read from a record; the page and every
format follow. To add a table: one more ``_TableKind``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hires.core.units import MIB
from hires.report.columns import (
    MEMORY,
    POINT,
    RATES,
    SPEED,
    Cell,
    Column,
    Table,
)
from hires.report.frames import Frames, column_of, plain_cells, plain_rows
from hires.report.load.measured_points import efficiency, single_speeds

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Summary:
    """One table of a report."""

    table: Table
    frame: pd.DataFrame
    """The same rows and columns, with types."""
    caption: str
    missing: str
    """What is shown instead of a table without rows."""

    @property
    def name(self) -> str:
        """File name without its ending."""
        return self.table.name


@dataclass(frozen=True)
class _TableKind:
    name: str
    title: str
    columns: Sequence[Column]
    frame: Callable[[Frames], pd.DataFrame]
    caption: str
    missing: str


def summaries(frames: Frames) -> list[Summary]:
    """Returns all tables of a report, the empty ones too."""
    return [_summary(kind, kind.frame(frames)) for kind in _KINDS]


def _summary(kind: _TableKind, frame: pd.DataFrame) -> Summary:
    """Returns a table with those columns that have any value."""
    columns = [
        column
        for column in (*_RUN, *kind.columns, _AGAIN)
        if column.key in _ALWAYS or (len(frame) and frame[column.key].notna().any())
    ]
    if len(frame) and frame["campaign"].nunique() < 2:
        columns = [column for column in columns if column.key != "campaign"]
    own = frame[[column.key for column in columns]]
    table = Table(kind.name, kind.title, columns, cells(own))
    return Summary(table, own, kind.caption, kind.missing)


def cells(frame: pd.DataFrame) -> list[list[Cell]]:
    """Returns the rows of a frame as cells of a table."""
    words = {True: "yes", False: "no"}
    return [
        [words[cell] if isinstance(cell, bool) else cell for cell in row]
        for row in plain_cells(frame)
    ]


def _throughput(frames: Frames) -> pd.DataFrame:
    singles = single_speeds(plain_rows(frames.points))
    share = [efficiency(row, singles) for row in plain_rows(frames.attempts)]
    frame = frames.attempts.assign(efficiency_percent=column_of(share))
    return frame.sort_values(["campaign", "model", "height", "layout", "precision"])


def _planned(frames: Frames) -> pd.DataFrame:
    """Returns the points of campaigns, those without a result first."""
    order = frames.planned["state"].map(_ORDER.__getitem__)
    return frames.planned.loc[order.sort_values(kind="stable").index]


_ORDER = defaultdict(lambda: 2, infeasible=0, failed=1, done=9)
"""Order of the states of points."""
_ALWAYS = ("run", "reproduce")
_RUN = (Column("campaign", "campaign"), Column("run", "run"))
_AGAIN = Column("reproduce", "reproduce")
_RANKS = Column("ranks", "ranks", digits=0)
_ATTEMPT = Column("attempt", "attempt", digits=0)

_KINDS = (
    _TableKind(
        "throughput",
        "Throughput",
        (
            *POINT,
            Column("task", "task"),
            _RANKS,
            Column("batch", "images/step", digits=0),
            _ATTEMPT,
            *SPEED,
            Column("efficiency_percent", "efficiency", "%", digits=1),
        ),
        _throughput,
        "Every complete attempt; a step takes as long as its slowest rank, and p10 and p90 are of "
        "the steps after the warm-up. The headline and the plots have the median over the attempts "
        "of a point by its latest commit and machine. Efficiency is the share of as many single "
        "processes at the same point.",
        "No run is complete, so there is no throughput.",
    ),
    _TableKind(
        "memory",
        "Memory per rank",
        (*POINT, *MEMORY),
        lambda frames: frames.memory,
        "Of the last attempt: the measured peak beside the predicted one. An error above 0 means "
        "that more was predicted than was needed.",
        "No rank recorded its memory.",
    ),
    _TableKind(
        "communication",
        "Communication by size class",
        (
            *POINT,
            _RANKS,
            Column("kind", "kind"),
            Column("size_class", "size of a message"),
            Column("messages_per_step", "messages/step", digits=0),
            Column("bytes_per_step", "sent per step", "MiB", 1 / MIB, 3),
        ),
        lambda frames: frames.communication,
        "What one step of the plan sends over all ranks. A sum of gradients counts as the least "
        "bytes that any algorithm sends.",
        "All runs have one rank, or no plan that can be read: nothing is sent.",
    ),
    _TableKind(
        "precision",
        "Precision and accuracy",
        (
            *POINT,
            Column("loss_first", "first loss", digits=4),
            Column("loss_last", "last loss", digits=4),
            Column("loss_finite", "finite"),
            Column("reference", "beside"),
            Column("first_loss_error", "error of first", "%", 100.0, 4),
            Column("last_loss_error", "error of last", "%", 100.0, 4),
            RATES[0],
        ),
        lambda frames: frames.precision,
        "Errors are relative to the same point in the most exact precision that was run. The "
        "first loss has the same weights and images in both. Losses are of the last attempt, "
        "images per second the median over those of the latest code.",
        "No complete run recorded a loss.",
    ),
    _TableKind(
        "failures",
        "Failures",
        (
            *POINT,
            _ATTEMPT,
            Column("ended_as", "ended as"),
            Column("reason", "reason"),
            Column("cause", "cause"),
            Column("state", "run is now"),
        ),
        lambda frames: frames.failures,
        "Every attempt that did not complete, with the cause if it is known.",
        "Nothing failed.",
    ),
    _TableKind(
        "points",
        "Planned and excluded points",
        (
            Column("state", "state"),
            Column("overrides", "overrides"),
            Column("reason", "why not"),
            Column("nearest", "nearest that can run"),
        ),
        _planned,
        "What the sweeps planned. An infeasible point was excluded before anything started.",
        "No sweep planned these runs.",
    ),
)
