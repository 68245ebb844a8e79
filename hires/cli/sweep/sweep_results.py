"""Prints how the points of a sweep ended, in one table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from hires.cli.screens.screen import print_table
from hires.cli.sweep.sweep_points import Points, SweepPoint, attempts_of, end_of
from hires.core.units import MIB
from hires.launcher.attempt_queue import Ended
from hires.report.columns import ACCURACY, POINT, QUANT, RANKS, RUN, Column, Table, keys, table_of
from hires.report.read.evaluation_rows import (
    AGREEMENT,
    best_column,
    best_of,
    evaluation_rows,
    with_reference,
)
from hires.report.read.measured_points import median_speed
from hires.report.read.plain_values import dicts
from hires.report.read.rows import largest
from hires.report.read.runs import read_runs

_SPEED = Column("img_per_s_median", "median", "img/s", digits=2)
_MEMORY = (
    Column("peak", "fullest rank", "MiB", 1 / MIB, 1),
    Column("predicted", "predicted", "MiB", 1 / MIB, 1),
)
_SHOWN = ("precision", QUANT.key, "data", "top1", "difference", "difference_low", "difference_high")
"""Columns of an accuracy that stay where the terminal is narrow."""


def print_results(points: Points, ends: Sequence[Ended], repeat: int, memory: bool) -> None:
    """Prints the state and the speed of every point, with ``memory`` that of its fullest rank.

    Trainings that were evaluated as they went on have the number of their best evaluation, too.
    """
    attempts, rows = attempts_of(ends), []
    runs = read_runs(point.path for point in points.valid)
    records = {run.path: [one.record for one in run.repeats] for run in runs}
    best = {path: best_of(own) for path, own in records.items()}
    metrics = [*dict.fromkeys(one[0] for one in best.values() if one is not None)]
    for number, point in enumerate(points.listed, start=1):
        ranks = point.resolved.parallel.num_ranks if point.resolved else None
        row: list[Any] = [number, *points.values(point), ranks, point.state, *[None] * 3]
        if not point.reason:
            state = end_of(point, attempts[point.path], repeat)
            row[-4:] = [state, *_numbers(point, records[point.path])]
        own = best.get(point.path)
        learnt = [own[1] if own and own[0] == metric else None for metric in metrics]
        rows.append([*(row if memory else row[:-2]), *learnt, point.path.name or None])
    columns = [*points.columns(), RANKS, Column("state", "state"), _SPEED]
    learnt_columns = [best_column(metric) for metric in metrics]
    columns += [*(_MEMORY if memory else ()), *learnt_columns, RUN]
    shown = Table("results", "Results", columns, rows).text_rows()
    title = "Results, medians over the attempts of each" if repeat > 1 else "Results"
    keep = ("state", _SPEED.key, *(column.key for column in learnt_columns))
    print_table(title, columns, shown, keep)
    _print_accuracy(points)


def _print_accuracy(points: Points) -> None:
    """Prints what evaluations counted, beside the most exact precision of the same point."""
    paths = [point.path for point in points.valid if point.ready.config.task.name == "evaluate"]
    rows = [*evaluation_rows(read_runs(paths))] if paths else []
    if rows:
        columns = [*POINT, QUANT, Column("data", "data"), *ACCURACY, *AGREEMENT]
        columns = with_reference(columns, [row["reference"] for row in rows])
        optional = keys([QUANT], ACCURACY, AGREEMENT)
        table = table_of("accuracy", "Accuracy", columns, rows, optional=optional).trimmed()
        print_table(table.title, table.columns, table.text_rows(), _SHOWN)


def _numbers(
    point: SweepPoint, records: Sequence[dict[str, Any]]
) -> tuple[float | None, float | None, int | None]:
    """Returns images per second, and the bytes of the fullest rank, measured and predicted."""
    peaks = [largest(dicts(one.get("memory")), "peak_bytes") for one in records]
    known = [peak for peak in peaks if peak]
    predicted = [largest(dicts(one.get("memory")), "predicted_bytes") for one in records]
    peak = statistics.median(known) if known else None
    return median_speed(records), peak, next(filter(None, predicted), point.planned.peak_bytes)
