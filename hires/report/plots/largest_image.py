"""Which is the largest image that each layout was run with, and which was too large?"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import yaml

from hires.core.config.run_config import RunConfig
from hires.core.store.naming import model_label
from hires.core.units import size
from hires.report.frames import Frames, numeric, plain_rows
from hires.report.load import measured_points as known
from hires.report.load.rows import model_of
from hires.report.plots import style
from hires.report.plots.base import Material, Plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


MAX_PANELS = 6
"""Combinations that a figure has room for; the rest is in the tables."""
_EACH = ("campaign", "model", "precision", "task", "batch", "limit")
"""What the bars of one panel share."""
_NETWORK = "model."
_Ran = list[tuple[dict[str, str], dict[str, Any]]]
_COLUMNS = [*_EACH, "layout", "ranks", "image", "height", "width", "peak_bytes_max"]


def largest_image(material: Material) -> Plot:
    """Returns the image sizes of each layout: those that ran, and those that memory forbade."""
    plot = Plot("largest_image", "The largest image each layout fits")
    frame = _points(material.frames)
    refused = frame["refused"]
    if frame["pixels"].nunique() < 2 and not refused.any():
        plot.missing = "all runs have one image size, and memory refused none"
        return plot
    groups = [part for _, part in frame.groupby(known.same(frame, _EACH))]
    groups.sort(key=lambda part: (-int(part["refused"].any()), -part["pixels"].nunique()))
    shown = groups[:MAX_PANELS]
    most = max(part["layout"].nunique() for part in shown)
    made, axes = style.panels(len(shown), 2 if len(shown) > 1 else 1, 0.9 + 0.36 * most)
    said = []
    for axis, part in zip(axes, shown, strict=True):
        heading = _heading(part, frame)
        axis.set_title(style.short(heading, 48), fontsize=8.5)
        said.append(f"{heading}: {_draw(axis, part)}.")
        axis.set_ylim(most - 0.5, -0.5)  # bars are equally high everywhere
    style.legend(made, axes)
    plot.figure = made
    left = len(groups) - len(shown)
    more = f" {left} more combinations are in the tables." if left else ""
    none = "" if refused.any() else " Memory refused none, so larger images may fit."
    plot.caption = f"Ticks are image sizes that ran to the end. {' '.join(said)}{none}{more}"
    return plot


def _heading(part: pd.DataFrame, frame: pd.DataFrame) -> str:
    """Returns what the bars of a panel share."""
    row = plain_rows(part)[0]
    said = [str(row[key] or "?") for key in ("model", "precision", "task")]
    said.append(f"batch {row['batch'] or '?'}")
    if row["limit"] not in (None, "null"):
        said.append(f"limit {row['limit']}")
    return ", ".join([str(row["campaign"]), *said] if frame["campaign"].nunique() > 1 else said)


def _draw(axis: Axes, part: pd.DataFrame) -> str:
    """Draws the layouts of one panel, and returns them in words."""
    layouts = sorted(set(part["layout"]))
    largest, out_words = [], []
    for row, layout in enumerate(layouts):
        found = style.mark(layout)
        here = part[(part["layout"] == layout) & ~part["refused"]]
        out = part[(part["layout"] == layout) & part["refused"]]
        edges = sorted(set(here["edge"]))
        if edges:
            axis.barh(row, max(edges), 0.5, color=found.colour, hatch=found.hatch, alpha=0.85)
            axis.plot(edges, [row] * len(edges), ls="", marker="|", color=style.INK, ms=8)
            largest.append(_largest_words(here))
        if len(out):
            axis.plot(
                out["edge"], [row] * len(out), ls="", marker="X", ms=8, color=style.VERMILION,
                markeredgecolor=style.PAPER, label="needs more memory than there is",
            )  # fmt: skip
            out_words += [f"{layout} {image}" for image in dict.fromkeys(out["image"])]
    axis.set_yticks(range(len(layouts)), [style.short(layout) for layout in layouts])
    axis.set_xlabel("edge of a square image with as many pixels [pixels]", fontsize=8)
    axis.set_xlim(left=0)
    style.no_grid(axis, "y")
    text = f"largest {', '.join(largest[:10])}" if largest else "none ran to the end"
    return f"{text}; too large: {', '.join(out_words[:10])}" if out_words else text


def _largest_words(here: pd.DataFrame) -> str:
    """Returns the largest image of a layout, with the fullest rank of the very run."""
    order = here.sort_values(["edge", "peak_bytes_max"], ascending=False, na_position="last")
    row = plain_rows(order)[0]
    needs = f" ({size(int(row['peak_bytes_max']))} a rank)" if row["peak_bytes_max"] else ""
    return f"{known.name_of(row, here)} {row['image']}{needs}"


def _points(frames: Frames) -> pd.DataFrame:
    """Returns what ran, and what failed or was excluded for want of memory."""
    import pandas as pd

    rows = []
    for run in plain_rows(frames.runs):
        if run["state"] == "done" or run["reason"] == "oom":
            kept = {key: run.get(key) for key in _COLUMNS}
            limit = run["memory_limit"]
            rows.append({**kept, "limit": limit, "refused": run["state"] != "done"})
    ran = _ran(frames)
    for point in frames.planned_rows:
        if point["state"] == "infeasible" and "[memory." in (point["reason"] or ""):
            row = point["what"] or _from_words(str(point["overrides"] or ""), ran)
            rows.append({**row, "campaign": point["campaign"], "refused": True})
    frame = pd.DataFrame(rows, columns=[*_COLUMNS, "refused"])
    frame = frame[frame["height"].notna() & frame["width"].notna()].copy()
    frame["layout"] = frame["layout"].fillna("?")
    frame["refused"] = frame["refused"].astype(bool)
    frame["pixels"] = numeric(frame, "height") * numeric(frame, "width")
    frame["edge"] = frame["pixels"] ** 0.5
    return frame


def _ran(frames: Frames) -> _Ran:
    """Returns the overrides and the network's config of the planned points that have a run."""
    held = [(frames.run(p["campaign"], str(p["run"])), p) for p in frames.planned_rows]
    found = [(_values(str(p["overrides"] or "")), r.config.get("model")) for r, p in held if r]
    return [(values, model) for values, model in found if isinstance(model, dict)]


def _model(values: dict[str, str], ran: _Ran) -> str:
    """Returns what the network of some overrides is called.

    What its word means is known from a run of the same word that overrides nothing else of it.
    """
    word = values.get("model")
    own = {key: value for key, value in values.items() if key.startswith(_NETWORK)}
    base: dict[str, Any] | None = {} if word is None else None
    for others, config in ran if word is not None else ():
        if others.get("model") == word and own.keys() >= _network(others):
            base = config
            break
    if base is not None:
        try:
            typed = {key.removeprefix(_NETWORK): yaml.safe_load(v) for key, v in own.items()}
        except yaml.YAMLError:  # somebody else's words
            typed = {}
        label = model_of({**base, **typed})
        if label is not None:
            return label
    said = [f"{key.removeprefix(_NETWORK)}={value}" for key, value in own.items()]
    return " ".join([word or model_label(RunConfig().model), *said])


def _network(values: dict[str, str]) -> set[str]:
    """Returns the keys of some overrides that are the network's."""
    return {key for key in values if key.startswith(_NETWORK)}


def _values(words: str) -> dict[str, str]:
    """Returns the keys and values of overrides."""
    try:
        parts = shlex.split(words)
    except ValueError:  # somebody else's quotes
        parts = words.split()
    return {
        key.lstrip("+"): value for key, sign, value in (p.partition("=") for p in parts) if sign
    }


def _from_words(words: str, ran: _Ran) -> dict[str, object]:
    """Returns a point that has no run; what its words do not say has the default.

    Args:
        words: overrides that make it.
        ran: overrides of other points, and what network they mean.
    """
    values, default = _values(words), RunConfig()
    sizes = re.fullmatch(r"\[?\s*(\d{1,6})\s*(?:,\s*(\d{1,6})\s*)?\]?", values.get("image", ""))
    height, width = default.height, default.width
    if sizes is not None:
        height = int(sizes[1])
        width = int(sizes[2] or height)
    batch = values.get("batch", "")
    return {
        "model": _model(values, ran),
        "precision": values.get("precision", default.precision.name),
        "task": values.get("task", default.task.name),
        "batch": int(batch) if batch.isdecimal() and len(batch) < 10 else default.batch,
        "limit": values.get("memory.limit", known.defaults().get("memory.limit")),
        "layout": values.get("parallel", default.parallel.name),
        "image": f"{height}x{width}",
        "height": height,
        "width": width,
    }
