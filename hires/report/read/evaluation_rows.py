"""Turns evaluations into rows: accuracy and agreement, those of trainings, and predictions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from hires.core.config.data_config import METRICS
from hires.core.store.reading import text
from hires.report.columns import (
    ACCURACY,
    PREDICTION,
    QUANT,
    VALIDATION,
    Column,
    Row,
    keys,
    texts,
    validation_rows,
    values,
)
from hires.report.read.agreement import agreement, evaluated
from hires.report.read.measured_points import quant_text
from hires.report.read.plain_values import count, dig, number
from hires.report.read.rows import most_exact, precision_mates, what
from hires.report.read.runs import Run

AGREEMENT = (
    *texts(reference="beside"),
    Column("agreement", "same class", "%", 100.0, 2),
    Column("agreement_low", "95 % from", "%", 100.0, 2),
    Column("agreement_high", "to", "%", 100.0, 2),
    Column("difference", "difference", "points", 100.0, 2),
    Column("difference_low", "95 % from", "points", 100.0, 2),
    Column("difference_high", "to", "points", 100.0, 2),
)
"""``difference``: of top-1, on the same images."""
COLUMNS = (
    "campaign", "run", "model", "image", "layout", "precision", QUANT.key, "data", *keys(ACCURACY),
    *keys(AGREEMENT), "reproduce",
)  # fmt: skip

TRAINING = (*texts(metric="judged by"), Column("ended_early", "ended early at", digits=0))
"""The number that says which evaluation is the best, and the step at which the training ended for
want of a better one."""
TRAINING_COLUMNS = (
    "campaign", "run", "model", "image", "layout", "precision", "settings", "data",
    *keys(VALIDATION, TRAINING), "reproduce",
)  # fmt: skip
PREDICTION_COLUMNS = (
    "campaign", "run", "model", "image", "layout", "precision", "data", *keys(PREDICTION),
    "reproduce",
)  # fmt: skip
_OF_FOLDERS = ("folder", "pairs", "slide")
"""Kinds of data whose folder says what the images are."""
_MOST_PATH = 4096


def evaluation_rows(runs: Sequence[Run]) -> Iterator[Row]:
    """Yields the accuracy of every evaluation, beside its most exact mate's predictions."""
    for run, mates in precision_mates(runs, evaluated):
        best = most_exact(run, mates)
        same = None if best is None else agreement(run, best)
        low, high = (None, None) if same is None else same.ci95
        less, more = (None, None) if same is None else same.difference_ci95
        yield {
            **what(run),
            QUANT.key: quant_text(run),
            "data": data_label(run),
            **values(ACCURACY, run.record),
            "reference": None if best is None else text(best.record.get("precision"), 30),
            "agreement": None if same is None else same.share,
            "agreement_low": low,
            "agreement_high": high,
            "difference": None if same is None else same.difference,
            "difference_low": less,
            "difference_high": more,
        }


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


def prediction_rows(runs: Sequence[Run]) -> Iterator[Row]:
    """Yields what every complete prediction wrote."""
    for run in runs:
        if run.end[0] == "done" and isinstance(run.record.get("prediction"), dict):
            yield {**what(run), "data": data_label(run), **values(PREDICTION, run.record)}


def with_reference(columns: Iterable[Column], references: Iterable[object]) -> list[Column]:
    """Returns columns whose heading of the agreement names the precision that all rows share."""
    names = {str(one) for one in references if one is not None}
    title = f"same class as {names.pop()}" if len(names) == 1 else "same class"
    return [replace(one, title=title) if one.key == "agreement" else one for one in columns]


def data_label(run: Run) -> str:
    """Returns the data of a run in a few words, as ``digits, validation``."""
    name, split = _data_name(run), text(dig(run.config, "data", "split"), 60)
    return f"{name}, {split}" if split not in (None, "all") else name or "?"


def _data_name(run: Run) -> str | None:
    name = text(dig(run.config, "data", "name"), 60)
    path = text(dig(run.config, "data", "path"), _MOST_PATH)
    return text(PurePath(path).name, 60) or name if path and name in _OF_FOLDERS else name
