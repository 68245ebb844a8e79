"""Turns evaluations into rows: accuracy, and agreement with the most exact precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

from hires.core.store.reading import text
from hires.report.columns import ACCURACY, QUANT, Column, Row, keys, texts, values
from hires.report.read.agreement import agreement, evaluated
from hires.report.read.measured_points import quant_text
from hires.report.read.plain_values import dig
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
