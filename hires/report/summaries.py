"""Declares the tables of a report, and writes them for a paper, a spreadsheet or a program.

A new column goes here, or into ``columns.py`` if it is read from a record; every format follows.
"""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pandas as pd

from hires.core.store.files import make_folder, write_atomically
from hires.core.units import MIB
from hires.report.columns import (
    ACCURACY,
    ATTEMPT,
    CAMPAIGN,
    MEMORY,
    POINT,
    PREDICTION,
    QUANT,
    RANKS,
    RATES,
    RUN,
    SPEED,
    VALIDATION,
    Cell,
    Column,
    Table,
    safe_csv,
    texts,
)
from hires.report.frames import Frames, plain_cells, plain_rows
from hires.report.message_tables import CAPTION
from hires.report.read.evaluation_rows import AGREEMENT, TRAINING, with_reference
from hires.report.read.measured_points import efficiency, single_speeds
from hires.report.templates import rendered

FORMATS = ("csv", "md", "tex", "parquet")
FRAMES = (
    "runs", "attempts", "samples", "memory", "communication", "messages", "precision",
    "evaluations", "validations", "predictions", "failures", "planned", "configs",
)  # fmt: skip
"""Frames that ``hires export`` writes, by their names in :class:`Frames`."""
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
    }
)
_MARKDOWN = str.maketrans({"&": "&amp;", "<": "&lt;", **{c: f"\\{c}" for c in "`*_[]\\"}})
OPTION = "--out DIR"
_MARKS = {
    "block_start_string": "<%", "block_end_string": "%>",
    "variable_start_string": "<<", "variable_end_string": ">>",
}  # fmt: skip
"""Of a template for LaTeX, which needs Jinja's own braces."""


def summaries(frames: Frames) -> list[Table]:
    """Returns all tables of a report, each with those columns that have any value."""
    tables = []
    for table in _TABLES:
        name = table.name
        frame = _FRAMES[name](frames) if name in _FRAMES else getattr(frames, name)
        columns = [
            column
            for column in (CAMPAIGN, RUN, *table.columns, _REPRODUCE)
            if column in (RUN, _REPRODUCE) or (len(frame) and frame[column.key].notna().any())
        ]
        if len(frame) and frame["campaign"].nunique() < 2:
            columns.remove(CAMPAIGN)
        if name == "evaluations":
            columns = with_reference(columns, frame["reference"].dropna())
        own = frame[[column.key for column in columns]]
        tables.append(replace(table, columns=columns, rows=cells(own), frame=own))
    return tables


def cells(frame: pd.DataFrame) -> list[list[Cell]]:
    """Returns the rows of a frame as cells of a table."""
    words = {True: "yes", False: "no"}
    return [
        [words[cell] if isinstance(cell, bool) else cell for cell in row]
        for row in plain_cells(frame)
    ]


def encoded(table: Table, form: str) -> bytes | None:
    """Returns a table as a file, None if it has no rows."""
    if not table.rows:
        return None
    if form in _TEXTS:
        return _TEXTS[form](table).encode()
    data = io.BytesIO()
    table.frame.to_parquet(data, index=False)
    return data.getvalue()


def write_frames(frames: Frames, out: Path) -> list[Path]:
    """Writes all frames that have rows as CSV, and returns the files; ConfigError: it cannot."""
    make_folder(out, OPTION)
    files = []
    for name in FRAMES:
        frame = getattr(frames, name)
        if len(frame):
            columns = [Column(str(key), str(key)) for key in frame.columns]
            files.append(out / f"{name}.csv")
            text = safe_csv(Table(name, name, columns, cells(frame)))
            write_atomically(files[-1], text, option=OPTION)
    return files


def markdown_text(table: Table) -> str:
    """Returns a table as Markdown, its caption below it."""
    text = table.mapped(lambda cell: cell.translate(_MARKDOWN)).to_markdown()
    return f"{text}\n{table.caption.translate(_MARKDOWN)}\n"


def latex_text(table: Table) -> str:
    """Returns a table for LaTeX: booktabs rules, as wide as the text, everything escaped.

    The reproduce lines, its last column and too long for a page, follow the table as comments.
    """
    *shown, _ = table.columns
    rows = [[column.heading for column in shown], *(row[:-1] for row in table.text_rows())]
    heads, *lines = [" & ".join(cell.translate(_LATEX) for cell in row) for row in rows]
    run = [column.key for column in shown].index("run")
    values = {
        "name": table.name,
        "caption": f"{table.title}. {table.caption}".translate(_LATEX),
        "sides": "".join("r" if column.numeric else "l" for column in shown),
        "heads": heads,
        "rows": lines,
        "again": dict.fromkeys(f"{row[run] or '-'}: {row[-1] or '-'}" for row in table.rows),
    }
    return rendered("table.tex", values, autoescape=False, **_MARKS)


def _throughput(frames: Frames) -> pd.DataFrame:
    singles = single_speeds(plain_rows(frames.points))
    share = [efficiency(row, singles) for row in plain_rows(frames.attempts)]
    frame = frames.attempts.assign(efficiency_percent=pd.array(share, dtype="Float64"))
    return frame.sort_values(["campaign", "model", "height", "layout", "precision"])


def _planned(frames: Frames) -> pd.DataFrame:
    order = frames.planned["state"].map(_ORDER.__getitem__)
    return frames.planned.loc[order.sort_values(kind="stable").index]


_ORDER = defaultdict(lambda: 2, infeasible=0, failed=1, done=9)  # order of the states of points
_REPRODUCE = Column("reproduce", "reproduce")

_TABLES = (
    Table(
        "throughput",
        "Throughput",
        (
            *(*POINT, *texts(task="task"), RANKS, Column("batch", "images/step", digits=0)),
            *(ATTEMPT, *SPEED, Column("efficiency_percent", "efficiency", "%", digits=1)),
        ),
        caption="Every complete attempt; a step takes as long as its slowest rank, and p10 and "
        "p90 are of the steps after the warm-up. The headline and the plots have the median "
        "over the attempts of a point by its latest commit and machine. Efficiency is the "
        "share of as many single processes at the same point.",
        missing="No run is complete, so there is no throughput.",
    ),
    Table(
        "memory",
        "Memory per rank",
        (*POINT, *MEMORY),
        caption="Of the last attempt: the measured peak beside the predicted one. An error "
        "above 0 means that more was predicted than was needed.",
        missing="No rank recorded its memory.",
    ),
    Table(
        "communication",
        "Communication by size class",
        (
            *(*POINT, RANKS, *texts(kind="kind", size_class="size of a message")),
            Column("messages_per_step", "messages/step", digits=0),
            Column("bytes_per_step", "sent per step", "MiB", 1 / MIB, 3),
        ),
        caption="What one step of the plan sends over all ranks. A sum of gradients counts as "
        "the least bytes that any algorithm sends.",
        missing="All runs have one rank, or no plan that can be read: nothing is sent.",
    ),
    Table(
        "messages",
        "What messages cost",
        (
            *(*POINT, *texts(operation="operation", kind="kind", backends="backend")),
            Column("least_bytes", "from", "B", digits=0),
            Column("calls_per_step", "calls", "/step", digits=0),
            Column("planned_calls_per_step", "planned", "/step", digits=0),
            Column("bytes_per_step", "bytes", "MiB/step", 1 / MIB, 3),
            Column("issue_s", "calling", "ms/step", 1e3, 2),
            Column("wait_s", "waiting", "ms/step", 1e3, 2),
            Column("share_percent", "of a step", "%", digits=1),
        ),
        caption=f"{CAPTION} Sizes go from a power of two to the next one.",
        missing="No run logged messages: they have one rank, or comm.log=off.",
    ),
    Table(
        "precision",
        "Precision and accuracy",
        (
            *(*POINT, QUANT),
            Column("loss_first", "first loss", digits=4),
            Column("loss_last", "last loss", digits=4),
            Column("loss", "evaluated loss", digits=4),
            Column("top1", "top-1", "%", 100.0, 2),
            *texts(loss_finite="finite", reference="beside"),
            Column("first_loss_error", "error of first", "%", 100.0, 4),
            Column("last_loss_error", "error of last", "%", 100.0, 4),
            Column("loss_error", "error of evaluated", "%", 100.0, 4),
            Column("skipped_steps", "skipped steps", digits=0),
            Column("loss_scale", "loss scale", digits=0),
            RATES[0],
        ),
        caption="Errors are relative to the same point in the most exact precision that was "
        "run. The first loss has the same weights and images in both, and so has the mean loss "
        "of an evaluation. A skipped step is one of fp16 whose gradients overflowed; the loss "
        "scale is that of the last step. Losses are of the last attempt, images per second the "
        "median over those of the latest code.",
        missing="No complete run recorded a loss.",
    ),
    Table(
        "evaluations",
        "Accuracy",
        (*POINT, QUANT, *texts(data="data"), *ACCURACY, *AGREEMENT),
        caption="Of every evaluation: shares of images or pixels, means over the classes that "
        "occur, for how many images the class is the one that the most exact precision predicts, "
        "and top-1 less that of that precision. Intervals of shares are Wilson's, those of "
        "differences are of pairs (Bonett and Price).",
        missing="No run evaluated (task=evaluate).",
    ),
    Table(
        "validations",
        "Evaluations of trainings",
        (*POINT, *texts(data="data"), *VALIDATION, TRAINING[-1]),
        caption="The best and the last evaluation of every training (validate.every), on images "
        "that it did not learn from; weights=RUN/best are those of the best one. A training that "
        "ended early had no better one for validate.patience evaluations.",
        missing="No run was evaluated while it trained (validate.every).",
    ),
    Table(
        "predictions",
        "Predictions",
        (*POINT, *texts(data="data"), *PREDICTION),
        caption="What every prediction wrote: the table lies in the folder of the run, and names "
        "the file of each image where the network returns maps or images.",
        missing="No run predicted (task=predict).",
    ),
    Table(
        "failures",
        "Failures",
        (
            *(*POINT, ATTEMPT),
            *texts(ended_as="ended as", reason="reason", cause="cause", state="run is now"),
        ),
        caption="Every attempt that did not complete, with the cause if it is known.",
        missing="Nothing failed.",
    ),
    Table(
        "points",
        "Planned and excluded points",
        texts(state="state", overrides="overrides", reason="why not"),
        caption="What the sweeps planned. An infeasible point was excluded before anything "
        "started.",
        missing="No sweep planned these runs.",
    ),
)
_FRAMES = {"throughput": _throughput, "points": _planned}  # others are an attribute of that name
_TEXTS = {"csv": safe_csv, "md": markdown_text, "tex": latex_text}
