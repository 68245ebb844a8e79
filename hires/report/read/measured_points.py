"""Groups attempts into points, and computes the throughput of each point.

Two attempts are repeats of one point if their configs differ in nothing but the seed. The headline,
all plots and the efficiency in the table use this one definition.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hires.core.config.run_config import RunConfig, to_dict
from hires.core.precisions import INT8
from hires.core.store.reading import text
from hires.report.columns import Row
from hires.report.read.plain_values import dig, flat, number, value_text
from hires.report.read.repeats import repeat_latest
from hires.report.read.runs import SEED

if TYPE_CHECKING:
    import pandas as pd

    from hires.report.read.runs import Run

WORK = ("model", "image", "precision", "task", "batch", "settings")
"""Columns that two layouts must share to be compared."""
POINT = ("campaign", *WORK, "layout", "ranks", "arranged")
"""Columns that the attempts of one point share."""
RIVALS = ("campaign", *WORK, "layout", "ranks")
"""Columns shared by points that only differ in how a layout is arranged: the fastest is shown."""
COLUMNS = (
    *POINT, "height", "width", "img_per_s_median", "img_per_s_p10", "img_per_s_p90", "speedup",
    "efficiency_percent", "peak_bytes_max", "attempts", "left_out",
    "git", "host", "run",
)  # fmt: skip
SPREAD = (
    "Medians are over the attempts of a point by its latest commit and machine; bars reach from "
    "p10 to p90 of all their counted steps"
)
"""How a point of several attempts is drawn, for captions."""

WITH_COLUMN = (
    SEED, "image", "batch", "model.name", "precision.name", "task.name", "parallel.name",
)  # fmt: skip
"""Keys that have a column of their own, and the one in which repeats differ."""
_ARRANGED = ("parallel.", "comm.", "launcher.")
_QUANT = "quant."
_IN_LABEL = tuple(
    f"model.{key}"
    for key in ("depth", "layers", "filters", "levels", "blocks", "width", "upsample", "scale")
)
"""Keys that the label of a network already holds."""
_JOIN = "; "


@functools.cache
def defaults() -> Mapping[str, str]:
    """Returns every key of a config with its default as text."""
    return {key: value_text(value) for key, value in flat(to_dict(RunConfig())).items()}


def unusual_keys(run: Run) -> dict[str, str]:
    """Returns unusual keys without a column: ``arranged`` of the layout, ``settings`` others."""
    words: dict[str, list[str]] = {"arranged": [], "settings": []}
    for key, value in run.identity(*WITH_COLUMN).items():
        if key.startswith("cluster.") and key != "cluster.name":
            continue
        if defaults().get(key) != value:
            words["arranged" if key.startswith(_ARRANGED) else "settings"].append(f"{key}={value}")
    return {name: _JOIN.join(sorted(kept)) for name, kept in words.items()}


def quant_text(run: Run) -> str | None:
    """Returns the keys of ``quant`` that a run in 8 bits sets, as ``linear=dynamic``, or None."""
    if text(run.record.get("precision"), 30) != INT8:
        return None
    own = {k: v for k, v in run.identity().items() if k.startswith(_QUANT)}
    words = (f"{k.removeprefix(_QUANT)}={v}" for k, v in own.items() if defaults().get(k) != v)
    return text(", ".join(sorted(words)), 60) or None


def point_rows(attempts: Iterable[Row]) -> list[Row]:
    """Returns one row a point: the median over its attempts, p10 and p90 over their steps.

    Only those attempts count that repeat the latest one.
    """
    import numpy as np

    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in attempts:
        if row["img_per_s_median"] is not None:
            groups.setdefault(tuple(row.get(key) for key in POINT), []).append(row)
    points: list[Row] = []
    for group in groups.values():
        latest = repeat_latest([(row["git"], row["host"], row["ended"] or "") for row in group])
        repeats = [row for row, counts in zip(group, latest, strict=True) if counts]
        point = {**repeats[0], "layout": repeats[0]["layout"] or "?"}
        took = [step_s for row in repeats for step_s in row["steps"]]
        # A record without its steps still has the spread of each attempt.
        lows, highs = _known(repeats, "img_per_s_p10"), _known(repeats, "img_per_s_p90")
        spread = [min(lows, default=None), max(highs, default=None)]
        if took and point["batch"]:
            spread = [point["batch"] / float(step_s) for step_s in np.quantile(took, (0.9, 0.1))]
        peaks = [peak for peak in _known(repeats, "peak_bytes_max") if peak]
        speed = statistics.median(_known(repeats, "img_per_s_median"))
        point |= {"img_per_s_median": speed, "img_per_s_p10": spread[0], "img_per_s_p90": spread[1]}
        point["peak_bytes_max"] = int(statistics.median(peaks)) if peaks else None
        points.append(point | {"attempts": len(repeats), "left_out": len(group) - len(repeats)})
    singles = single_speeds(points)
    for point in points:
        single = singles.get(_work_of(point))
        point["speedup"] = point["img_per_s_median"] / single if single else None
        point["efficiency_percent"] = efficiency(point, singles)
    return points


def median_speed(records: Iterable[Row]) -> float | None:
    """Returns images per second over some records, the median of their medians."""
    speeds = [number(dig(record, "throughput", "img_per_s", "median")) for record in records]
    return statistics.median(known) if (known := [s for s in speeds if s is not None]) else None


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


def group_key(frame: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Returns a text for each row, equal for rows that share these columns, missing or not."""
    import pandas as pd

    columns = [frame[key].astype(object) for key in keys]
    texts = ["\x1f".join(map(str, row)) for row in zip(*columns, strict=True)]
    return pd.Series(texts, index=frame.index, dtype="object")


def fastest(points: pd.DataFrame) -> pd.DataFrame:
    """Returns one row for each campaign, work, layout and number of ranks: the fastest point."""
    ordered = points.sort_values("img_per_s_median", ascending=False, kind="stable")
    return ordered[~group_key(ordered, RIVALS).duplicated()]


def common_work(points: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Returns of at least one point those of the work with most layouts (:func:`weight`)."""
    groups = [part for _, part in points.groupby(group_key(points, keys), sort=True)]
    return max(groups, key=weight)


def weight(part: pd.DataFrame) -> tuple[float, ...]:
    """Returns how much the points of one work show: layouts, points, pixels, fp32, speed."""
    height, width = part["height"].iloc[0], part["width"].iloc[0]
    pixels = float(height * width) if part["height"].notna().all() else 0.0
    plain = float((part["precision"] == "fp32").fillna(False).any())
    speed = float(part["img_per_s_median"].max())
    return float(part["layout"].nunique()), float(len(part)), pixels, plain, speed


def distinction(row: Row, among: pd.DataFrame, keys: Sequence[str]) -> str:
    """Returns what of the columns ``keys``, and not of its label, distinguishes a point."""
    words: list[str] = []
    for key in keys:
        every = [set(str(settings).split(_JOIN)) for settings in among[key]]
        shared = set.intersection(*every) if every else set()
        words += [word for word in str(row[key]).split(_JOIN) if word and word not in shared]
    return ", ".join(word for word in words if not word.startswith(_IN_LABEL))


def work_name(row: Row, among: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """Returns what the points of a panel or figure share, its campaign in front if it matters."""
    words = [str(row[key]) for key in columns]
    words += [f"batch {row['batch']}", *filter(None, [distinction(row, among, ("settings",))])]
    return [str(row["campaign"]), *words] if among["campaign"].nunique() > 1 else words


def set_apart(names: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """Returns the words that several names share, and those of each name alone, as texts.

    >>> set_apart([["resnet18", "bf16", "train"], ["resnet18", "fp32", "train"]])
    ('resnet18, train', ['bf16', 'fp32'])
    """
    shared = [word for word in names[0] if all(word in name for name in names[1:])]
    shared = shared if len(names) > 1 else []
    own = [", ".join(word for word in name if word not in shared) for name in names]
    return ", ".join(shared), own


def point_name(row: Row, among: pd.DataFrame) -> str:
    """Returns layout and ranks of a point, its campaign in front if there are several."""
    name = str(row["layout"])
    if row["ranks"] and row["ranks"] > 1:
        name += f" on {int(row['ranks'])}"
    return f"{row['campaign']}: {name}" if among["campaign"].nunique() > 1 else name


def _known(rows: Sequence[Row], key: str) -> list[float]:
    return [row[key] for row in rows if row[key] is not None]


def _work_of(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(key)) for key in ("campaign", *WORK))
