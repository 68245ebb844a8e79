"""Turns predictions into rows: of what, how many, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hires.report.columns import PREDICTION, Row, keys, values
from hires.report.read.evaluation_rows import data_label
from hires.report.read.rows import what
from hires.report.read.runs import Run

COLUMNS = (
    "campaign", "run", "model", "image", "layout", "precision", "data", *keys(PREDICTION),
    "reproduce",
)  # fmt: skip


def prediction_rows(runs: Sequence[Run]) -> Iterator[Row]:
    """Yields what every complete prediction wrote."""
    for run in runs:
        if run.end[0] == "done" and isinstance(run.record.get("prediction"), dict):
            yield {**what(run), "data": data_label(run), **values(PREDICTION, run.record)}
