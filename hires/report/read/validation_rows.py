"""Turns the evaluations in the middle of trainings into rows: the best and the last of each."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hires.core.config.validate_config import METRICS
from hires.core.store.reading import text
from hires.report.columns import (
    ACCURACY,
    VALIDATION,
    Column,
    Row,
    keys,
    texts,
    validation_rows,
)
from hires.report.read.evaluation_rows import data_label
from hires.report.read.plain_values import count, dig, number
from hires.report.read.rows import what
from hires.report.read.runs import Run

TRAINING = (*texts(metric="judged by"), Column("ended_early", "ended early at", digits=0))
"""The number that says which evaluation is the best, and the step at which the training ended for
want of a better one."""
COLUMNS = (
    "campaign", "run", "model", "image", "layout", "precision", "settings", "data",
    *keys(VALIDATION, TRAINING), "reproduce",
)  # fmt: skip


def training_rows(runs: Sequence[Run]) -> Iterator[Row]:
    """Yields the best and the last evaluation of every training that was evaluated."""
    for run in runs:
        for row in validation_rows(run.record):
            facts = {
                "metric": text(dig(run.record, "validation", "metric"), 20),
                "ended_early": count(dig(run.record, "validation", "ended_early")),
            }
            yield {**what(run), "data": data_label(run), **row, **facts}


def best_column(metric: str) -> Column:
    """Returns the column of a number of best evaluations, which says what they are judged by."""
    own = next(column for column in ACCURACY if column.key == metric)
    return replace(own, key=f"best_{metric}", title=f"best {own.title}")


def best_of(records: Sequence[Mapping[str, Any]]) -> tuple[str, float] | None:
    """Returns what the best evaluation of a training is judged by, and its median over attempts.

    None: the training was not evaluated.
    """
    for metric in METRICS:
        own = [one for one in records if dig(one, "validation", "metric") == metric]
        numbers = [number(dig(one, "validation", "best", metric)) for one in own]
        if found := [one for one in numbers if one is not None]:
            return metric, statistics.median(found)
    return None
