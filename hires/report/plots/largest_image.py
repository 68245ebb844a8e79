"""Plots the largest image that each layout was run with, and those that memory refused."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import yaml

from hires.core.config.run_config import RunConfig
from hires.core.store.naming import model_label
from hires.core.units import size
from hires.report.frames import Frames, numeric, plain_rows
from hires.report.load.measured_points import defaults, group_key, point_name
from hires.report.load.rows import model_of
from hires.report.plots import style
from hires.report.plots.base import Drawing, NotDrawnError, PlotData, plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


MAX_PANELS = 6
"""Combinations that fit into a figure; the others are in the tables."""
_PANEL = ("campaign", "model", "precision", "task", "batch", "limit")
"""Columns that the bars of one panel share."""
_COLUMNS = [*_PANEL, "layout", "ranks", "image", "height", "width", "peak_bytes_max"]
_NETWORK = "model."
_Ran = list[tuple[dict[str, str], dict[str, Any]]]
"""Overrides of planned points that were run, each with the config of its network."""


@plot(40, "largest_image", "The largest image each layout fits")
def largest_image(data: PlotData) -> Drawing:
    """Draws the image sizes of each layout: those that ran, and those that memory refused."""
    frame = _points(data.frames)
    refused = frame["refused"]
    if frame["pixels"].nunique() < 2 and not refused.any():
        raise NotDrawnError("all runs have one image size, and memory refused none")
    groups = [part for _, part in frame.groupby(group_key(frame, _PANEL))]
    groups.sort(key=lambda part: (-int(part["refused"].any()), -part["pixels"].nunique()))
    shown = groups[:MAX_PANELS]
    most = max(part["layout"].nunique() for part in shown)
    fig, axes = style.panels(len(shown), 2 if len(shown) > 1 else 1, 0.9 + 0.36 * most)
    caption = "Ticks are image sizes that ran to the end."
    for axis, part in zip(axes, shown, strict=True):
        heading = _heading(part, frame)
        axis.set_title(style.short(heading, 48), fontsize=8.5)
        caption += f" {heading}: {_draw(axis, part)}."
        axis.set_ylim(most - 0.5, -0.5)  # bars are equally high everywhere
    style.legend(fig, axes)
    if not refused.any():
        caption += " Memory refused none, so larger images may fit."
    if len(groups) > len(shown):
        caption += f" The tables have {len(groups) - len(shown)} more of such combinations."
    return Drawing(fig, caption)


def _heading(part: pd.DataFrame, frame: pd.DataFrame) -> str:
    """Returns what the bars of a panel share."""
    row = plain_rows(part)[0]
    words = [str(row["campaign"])] if frame["campaign"].nunique() > 1 else []
    words += [str(row[key] or "?") for key in ("model", "precision", "task")]
    words.append(f"batch {row['batch'] or '?'}")
    words += [f"limit {row['limit']}"] if row["limit"] not in (None, "null") else []
    return ", ".join(words)


def _draw(axis: Axes, part: pd.DataFrame) -> str:
    """Draws the layouts of one panel, and returns them in words."""
    layouts = sorted(set(part["layout"]))
    largest, too_large = [], []
    for row, layout in enumerate(layouts):
        look = style.layout_style(layout)
        own = part[part["layout"] == layout]
        ran, refused = own[~own["refused"]], own[own["refused"]]
        edges = sorted(set(ran["edge"]))
        if edges:
            axis.barh(row, max(edges), 0.5, color=look.colour, hatch=look.hatch, alpha=0.85)
            axis.plot(edges, [row] * len(edges), ls="", marker="|", color=style.INK, ms=8)
            largest.append(_largest_words(ran))
        if len(refused):
            axis.plot(
                refused["edge"], [row] * len(refused), ls="", marker="X", ms=8,
                color=style.VERMILION, markeredgecolor=style.PAPER,
                label="needs more memory than there is",
            )  # fmt: skip
            too_large += [f"{layout} {image}" for image in dict.fromkeys(refused["image"])]
    axis.set_yticks(range(len(layouts)), [style.short(layout) for layout in layouts])
    axis.set_xlabel("edge of a square image with as many pixels [pixels]", fontsize=8)
    axis.set_xlim(left=0)
    style.no_grid(axis, "y")
    text = f"largest {', '.join(largest[:10])}" if largest else "none ran to the end"
    return f"{text}; too large: {', '.join(too_large[:10])}" if too_large else text


def _largest_words(ran: pd.DataFrame) -> str:
    """Returns the largest image of a layout, with the fullest rank of that very run."""
    order = ran.sort_values(["edge", "peak_bytes_max"], ascending=False, na_position="last")
    row = plain_rows(order)[0]
    needs = f" ({size(int(row['peak_bytes_max']))} a rank)" if row["peak_bytes_max"] else ""
    return f"{point_name(row, ran)} {row['image']}{needs}"


def _points(frames: Frames) -> pd.DataFrame:
    """Returns the points that ran, and those that failed or were excluded for lack of memory."""
    import pandas as pd

    rows = [
        {**run, "limit": run["memory_limit"], "refused": run["state"] != "done"}
        for run in plain_rows(frames.runs)
        if run["state"] == "done" or run["reason"] == "oom"
    ]
    ran = _ran(frames)
    for point in frames.planned_rows:
        if point["state"] == "infeasible" and "[memory." in (point["reason"] or ""):
            row = point["what"] or _from_overrides(str(point["overrides"] or ""), ran)
            rows.append({**row, "campaign": point["campaign"], "refused": True})
    frame = pd.DataFrame(rows, columns=[*_COLUMNS, "refused"])
    frame = frame[frame["height"].notna() & frame["width"].notna()].copy()
    frame["layout"] = frame["layout"].fillna("?")
    frame["refused"] = frame["refused"].astype(bool)
    frame["pixels"] = numeric(frame, "height") * numeric(frame, "width")
    frame["edge"] = frame["pixels"] ** 0.5
    return frame


def _ran(frames: Frames) -> _Ran:
    runs = [(frames.run(p["campaign"], str(p["run"])), p) for p in frames.planned_rows]
    pairs = [(_values(str(p["overrides"] or "")), r.config.get("model")) for r, p in runs if r]
    return [(values, model) for values, model in pairs if isinstance(model, dict)]


def _from_overrides(words: str, ran: _Ran) -> dict[str, object]:
    """Returns the point that overrides select; what they leave out has its default."""
    values, default = _values(words), RunConfig()
    sizes = re.fullmatch(r"\[?\s*(\d{1,6})\s*(?:,\s*(\d{1,6})\s*)?\]?", values.get("image", ""))
    height, width = default.height, default.width
    if sizes is not None:
        height, width = int(sizes[1]), int(sizes[2] or sizes[1])
    batch = values.get("batch", "")
    return {
        "model": _model(values, ran),
        "precision": values.get("precision", default.precision.name),
        "task": values.get("task", default.task.name),
        "batch": int(batch) if batch.isdecimal() and len(batch) < 10 else default.batch,
        "limit": values.get("memory.limit", defaults().get("memory.limit")),
        "layout": values.get("parallel", default.parallel.name),
        "image": f"{height}x{width}",
        "height": height,
        "width": width,
    }


def _model(values: dict[str, str], ran: _Ran) -> str:
    """Returns the label of the network that overrides select.

    The config of ``model=NAME`` is taken from a run of the same name that overrides no other key
    of the network.
    """
    name = values.get("model")
    own = {key: value for key, value in values.items() if key.startswith(_NETWORK)}
    base: dict[str, Any] | None = {} if name is None else None
    for others, config in ran if name is not None else ():
        changed = {key for key in others if key.startswith(_NETWORK)}
        if others.get("model") == name and own.keys() >= changed:
            base = config
            break
    if base is not None:
        try:
            typed = {key.removeprefix(_NETWORK): yaml.safe_load(v) for key, v in own.items()}
        except yaml.YAMLError:  # campaign files may be edited by hand
            typed = {}
        label = model_of({**base, **typed})
        if label is not None:
            return label
    changes = [f"{key.removeprefix(_NETWORK)}={value}" for key, value in own.items()]
    return " ".join([name or model_label(RunConfig().model), *changes])


def _values(words: str) -> dict[str, str]:
    """Returns the keys and values of overrides."""
    try:
        parts = shlex.split(words)
    except ValueError:  # unbalanced quotes
        parts = words.split()
    pairs = (part.partition("=") for part in parts)
    return {key.lstrip("+"): value for key, sign, value in pairs if sign}
