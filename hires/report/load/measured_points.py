"""When are two attempts the same point, and how fast is a point?

Two attempts are repeats of one point if their configs differ in nothing but the seed. This is the
one place that says so: the headline, all plots and the efficiency in the table ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hires.core.config.run_config import RunConfig, to_dict
from hires.core.store.naming import COSMETIC
from hires.report.load import reading
from hires.report.load.reading import dig, number, spoken
from hires.report.load.runs import repeat_latest

if TYPE_CHECKING:
    import pandas as pd

    from hires.report.load.runs import Run

WORK = ("model", "image", "precision", "task", "batch", "settings")
"""What two layouts must share to be compared."""
PLACED = ("layout", "ranks", "arranged")
"""How the work is divided."""
POINT = ("campaign", *WORK, *PLACED)
"""Attempts that share all of these are repeats of one point."""
RIVALS = ("campaign", *WORK, "layout", "ranks")
"""Points that share all of these differ in how a layout is arranged: the fastest is shown."""
COLUMNS = (
    *POINT, "height", "width", "img_per_s_median", "img_per_s_p10", "img_per_s_p90", "speedup",
    "efficiency_percent", "peak_bytes_max", "attempts", "left_out",
    "git", "host", "run",
)  # fmt: skip
RULE = "Medians are over the attempts of a point that the latest commit and machine made"
SPREAD = f"{RULE}, bars reach from p10 to p90 of all their counted steps"
"""How a point of several attempts is drawn; captions say it."""

_TOLD = ("image", "batch", "seed", "model.name", "precision.name", "task.name", "parallel.name")
"""Keys that have a column of their own, and the one in which repeats differ."""
_ARRANGED = ("parallel.", "comm.", "launcher.")
_LABEL = tuple(
    f"model.{key}"
    for key in ("depth", "n", "layers", "filters", "levels", "blocks", "width", "upsample", "scale")
)
"""Keys that the name of a network says already."""
_JOIN = "; "
_KNOWN: dict[str, str] = {}


def defaults() -> dict[str, str]:
    """Returns every key of a config with its default, in words."""
    if not _KNOWN:
        values = to_dict(RunConfig())
        _KNOWN.update({key: spoken(value) for key, value in reading.flat(values).items()})
    return _KNOWN


def words(run: Run) -> dict[str, str]:
    """Returns the keys of a run that no column tells and that differ from the defaults.

    ``arranged`` holds those of the layout, ``settings`` all others.
    """
    found: dict[str, list[str]] = {"arranged": [], "settings": []}
    for key, value in run.flat_config.items():
        if key in COSMETIC or key in _TOLD or key.startswith("checkpoint."):
            continue
        if key.startswith("cluster.") and key != "cluster.name":
            continue
        said = spoken(value)
        if defaults().get(key) != said:
            found["arranged" if key.startswith(_ARRANGED) else "settings"].append(f"{key}={said}")
    return {name: _JOIN.join(sorted(kept)) for name, kept in found.items()}


def point_rows(
    attempts: Sequence[dict[str, Any]], steps: dict[tuple[str, str, int], list[float]]
) -> list[dict[str, Any]]:
    """Returns one row a point: the median over its attempts, p10 and p90 over their steps.

    Args:
        attempts: rows of complete attempts.
        steps: seconds of the counted steps by campaign, run and attempt.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in attempts:
        if row["img_per_s_median"] is not None:
            groups.setdefault(tuple(row[key] for key in POINT), []).append(row)
    found = [_point_row(group, steps) for group in groups.values()]
    base = single_speeds(found)
    for row in found:
        single = base.get(work_of(row))
        row["speedup"] = row["img_per_s_median"] / single if single else None
        row["efficiency_percent"] = efficiency(row, base)
    return found


def _point_row(
    group: list[dict[str, Any]], steps: dict[tuple[str, str, int], list[float]]
) -> dict[str, Any]:
    """Returns the row of one point, of those attempts that repeat its latest one."""
    kept = repeat_latest([(row["git"], row["host"], row["ended"] or "") for row in group])
    num_all = len(group)
    group = [row for row, counts in zip(group, kept, strict=True) if counts]
    peaks = [row["peak_bytes_max"] for row in group if row["peak_bytes_max"]]
    batch = group[0]["batch"]
    keys = [(row["campaign"], row["run"], row["attempt"]) for row in group]
    speeds = [batch / took for key in keys for took in steps.get(key, ()) if batch and took > 0]
    lows = [row["img_per_s_p10"] for row in group if row["img_per_s_p10"] is not None]
    highs = [row["img_per_s_p90"] for row in group if row["img_per_s_p90"] is not None]
    return {
        **group[0],
        "layout": group[0]["layout"] or "?",
        "img_per_s_median": quantile([row["img_per_s_median"] for row in group], 0.5),
        # A record without its steps still has the spread of each attempt.
        "img_per_s_p10": quantile(speeds, 0.1) if speeds else min(lows, default=None),
        "img_per_s_p90": quantile(speeds, 0.9) if speeds else max(highs, default=None),
        "peak_bytes_max": int(quantile(peaks, 0.5)) if peaks else None,
        "attempts": len(group),
        "left_out": num_all - len(group),
    }


def median_speed(records: Iterable[dict[str, Any]]) -> float | None:
    """Returns images per second over some records, the median of their medians."""
    found = [number(dig(record, "throughput", "img_per_s", "median")) for record in records]
    kept = [value for value in found if value is not None]
    return quantile(kept, 0.5) if kept else None


def quantile(values: Iterable[float], share: float) -> float:
    """Returns a quantile of some numbers, between two of them in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def work_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns campaign and work of a row."""
    return tuple(str(row[key]) for key in ("campaign", *WORK))


def single_speeds(rows: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Returns images per second of one process by campaign and work, that of its best point."""
    found: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row["layout"] == "single":
            key = work_of(row)
            found[key] = max(found.get(key, 0.0), row["img_per_s_median"])
    return found


def efficiency(row: dict[str, Any], base: dict[tuple[Any, ...], float]) -> float | None:
    """Returns which percentage of as many single processes a row reaches."""
    single, ranks, speed = base.get(work_of(row)), row["ranks"], row["img_per_s_median"]
    return 100 * speed / (single * ranks) if single and ranks and speed is not None else None


def same(frame: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Returns a text for each row that rows share which have the same values, missing or not."""
    import pandas as pd

    columns = [frame[key].astype(object) for key in keys]
    texts = ["\x1f".join(map(str, row)) for row in zip(*columns, strict=True)]
    return pd.Series(texts, index=frame.index, dtype="object")


def fastest(points: pd.DataFrame) -> pd.DataFrame:
    """Returns one row for each campaign, work, layout and number of ranks: the fastest point."""
    ordered = points.sort_values("img_per_s_median", ascending=False, kind="stable")
    return ordered[~same(ordered, RIVALS).duplicated()]


def common(points: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Returns the points of that work which most layouts were run at.

    Of equal ones it is that with the largest images, then that in fp32, then the fastest.

    Args:
        points: at least one.
        keys: that make the work.
    """
    groups = [part for _, part in points.groupby(same(points, keys), sort=True)]
    return max(groups, key=weight)


def weight(part: pd.DataFrame) -> tuple[float, ...]:
    """Returns how much the points of one work show."""
    height, width = part["height"].iloc[0], part["width"].iloc[0]
    pixels = float(height * width) if part["height"].notna().all() else 0.0
    plain = float((part["precision"] == "fp32").fillna(False).any())
    speed = float(part["img_per_s_median"].max())
    return float(part["layout"].nunique()), float(len(part)), pixels, plain, speed


def told(row: Any, among: pd.DataFrame, keys: Sequence[str] = ("settings", "arranged")) -> str:
    """Returns in words what tells a point from others, beyond what columns say.

    Args:
        row: of the point.
        among: points with the same heading.
        keys: columns of words.
    """
    said: list[str] = []
    for key in keys:
        every = [set(str(words).split(_JOIN)) for words in among[key]]
        shared = set.intersection(*every) if every else set()
        own = [word for word in str(row[key]).split(_JOIN) if word and word not in shared]
        said += [word for word in own if not word.startswith(_LABEL)]
    return ", ".join(said)


def name_of(row: Any, among: pd.DataFrame) -> str:
    """Returns layout and ranks of a point, its campaign in front if there are several."""
    name = str(row["layout"])
    ranks = row["ranks"]
    if ranks == ranks and ranks is not None and str(ranks) != "<NA>" and int(ranks) > 1:
        name += f" on {int(ranks)}"
    return f"{row['campaign']}: {name}" if among["campaign"].nunique() > 1 else name
