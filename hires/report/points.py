"""Groups attempts into points, and computes the throughput of each point.

Two attempts are repeats of one point if their configs differ in nothing but the seed. All plots
and the efficiency in the table use this one definition.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hires.core.config.precision_config import INT8
from hires.core.units import MIB
from hires.report.columns import BATCH, KEYS, POINT, RANKS, Column, Row, counts, table, texts
from hires.report.record import RecordedThroughput, columns_of
from hires.report.runs import JOIN, Found, Run, defaults, repeats_of

if TYPE_CHECKING:
    import pandas as pd

WORK = ("model", "image", "precision", "task", "batch", "other_keys")
"""Columns that two layouts must share to be compared."""
SAME_POINT = ("campaign", *WORK, "layout", "ranks", "layout_keys")
"""Columns that the attempts of one point share."""
RIVALS = ("campaign", *WORK, "layout", "ranks")
"""Columns shared by points that only differ in how a layout is arranged: the fastest is shown."""
_QUANT = "quant."
_IN_LABEL = tuple(
    f"model.{key}"
    for key in ("depth", "layers", "filters", "levels", "blocks", "width", "upsample", "scale")
)
"""Keys that the label of a network already holds."""

PEAK = Column("peak_bytes_max", "highest peak of a rank", "MiB", 1 / MIB, 1)
KEYS_OF_RUN = texts(layout_keys="layout keys", other_keys="other keys")
SIZED = (
    *POINT, *counts(height="height", width="width"), *texts(task="task"), BATCH, RANKS,
    *KEYS_OF_RUN,
)  # fmt: skip
RATES = columns_of(RecordedThroughput)[:3]
SPEEDUP = Column("speedup", "over single", "x", digits=2)
EFFICIENCY = Column("efficiency_percent", "efficiency", "%", digits=1)


@table(
    "points",
    (*POINT, *texts(task="task"), RANKS, BATCH, KEYS, *RATES, SPEEDUP, EFFICIENCY, PEAK,
     *counts(attempts="attempts")),
    "Layouts side by side",
    hidden=(*counts(height="height", width="width", left_out="left out"), *KEYS_OF_RUN,
            *texts(git="commit", host="host")),
    caption="One row a point, the fastest of the same work first: medians over its complete "
    "attempts, p10 and p90 over their steps.",
    empty="No run is complete.",
)  # fmt: skip
def points(found: Found) -> list[Row]:
    """Returns one row a point: the median over its attempts, p10 and p90 over their steps."""
    import numpy as np

    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in found.runs:
        groups.setdefault(tuple(run.point[key] for key in SAME_POINT), []).append(run)
    rows: list[Row] = []
    for runs in groups.values():
        repeats = repeats_of(runs, timed=True)
        if not repeats:
            continue
        run, first = repeats[0]
        records = [record for _, record in repeats]
        spreads = [one for record in records if (one := record.throughput.img_per_s)]
        took = [step_s for record in records for step_s in record.counted_s]
        # A record without its steps still has the spread of each attempt.
        low, high = min(one.p10 for one in spreads), max(one.p90 for one in spreads)
        if took and run.point["batch"]:
            low, high = (run.point["batch"] / float(s) for s in np.quantile(took, (0.9, 0.1)))
        timed = sum(record.img_per_s is not None for one in runs for record in one.complete)
        origin = first.provenance
        rows.append({
            **run.point,
            "layout": run.point["layout"] or "?",
            "img_per_s_median": median_speed(records),
            "img_per_s_p10": low,
            "img_per_s_p90": high,
            "peak_bytes_max": median_peak(records),
            "attempts": len(repeats),
            "left_out": timed - len(repeats),
            "git": origin and origin.git,
            "host": origin and origin.host,
        })  # fmt: skip
    singles = single_speeds(rows)
    for row in rows:
        single = singles.get(_work_of(row))
        row["speedup"] = row["img_per_s_median"] / single if single else None
        row["efficiency_percent"] = efficiency(row, singles)
    return sorted(rows, key=lambda row: (_work_of(row), -row["img_per_s_median"]))


def median_speed(records: Iterable[Any]) -> float | None:
    """Returns images per second over some records, the median of their medians."""
    speeds = [record.img_per_s for record in records if record.img_per_s is not None]
    return statistics.median(speeds) if speeds else None


def median_peak(records: Iterable[Any]) -> int | None:
    """Returns the median over some records of the highest peak of a rank."""
    peaks = [record.peak_bytes for record in records if record.peak_bytes]
    return int(statistics.median(peaks)) if peaks else None


def quant_text(run: Run) -> str | None:
    """Returns the keys of ``quant`` that a run in 8 bits sets, as ``linear=dynamic``, or None."""
    if run.record.precision != INT8:
        return None
    own = {k: v for k, v in run.identity().items() if k.startswith(_QUANT)}
    words = (f"{k.removeprefix(_QUANT)}={v}" for k, v in own.items() if defaults().get(k) != v)
    return ", ".join(sorted(words))[:60] or None


def single_speeds(rows: Iterable[Row]) -> dict[tuple[str, ...], float]:
    """Returns images per second of one process by campaign and work, that of its best point."""
    singles: dict[tuple[str, ...], float] = {}
    for row in rows:
        if row["layout"] == "single":
            key = _work_of(row)
            singles[key] = max(singles.get(key, 0.0), row["img_per_s_median"])
    return singles


def efficiency(row: Row, singles: Mapping[tuple[str, ...], float]) -> float | None:
    """Returns which percentage of as many single processes a row reaches."""
    single, ranks, speed = singles.get(_work_of(row)), row["ranks"], row["img_per_s_median"]
    return 100 * speed / (single * ranks) if single and ranks and speed is not None else None


def parts_of(frame: pd.DataFrame, keys: Sequence[str]) -> list[pd.DataFrame]:
    """Returns the rows that share the values of some columns, missing or not, in their order."""
    return [part for _, part in frame.groupby([*keys], dropna=False)]


def fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns one row for each campaign, work, layout and number of ranks: the fastest point."""
    ordered = frame.sort_values("img_per_s_median", ascending=False, kind="stable")
    return ordered.drop_duplicates([*RIVALS])


def common_work(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Returns of at least one point those of the work with most layouts (:func:`weight`)."""
    return max(parts_of(frame, keys), key=weight)


def weight(part: pd.DataFrame) -> tuple[float, ...]:
    """Returns how much the points of one work show: layouts, points, pixels, fp32, speed."""
    height, width = part["height"].iloc[0], part["width"].iloc[0]
    pixels = float(height * width) if part["height"].notna().all() else 0.0
    plain = float((part["precision"] == "fp32").fillna(False).any())
    speed = float(part["img_per_s_median"].max())
    return float(part["layout"].nunique()), float(len(part)), pixels, plain, speed


def differing_keys(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Returns for each row those keys of some columns that not all rows share, as text."""
    pairs = [[pair for key in columns for pair in str(row[key]).split(JOIN)] for row in rows]
    shared = set.intersection(*map(set, pairs)) if pairs else set()
    shown = [
        [p for p in row if p and p not in shared and not p.startswith(_IN_LABEL)] for row in pairs
    ]
    return [", ".join(re.sub(r"=.*/", "=.../", pair) for pair in row) for row in shown]


def _work_of(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(key)) for key in ("campaign", *WORK))
