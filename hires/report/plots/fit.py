"""Which is the largest image that each layout was run with, and which was too large?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.core.units import size
from hires.report.frames import numeric
from hires.report.plots import style
from hires.report.plots.base import Material, Plot

if TYPE_CHECKING:
    import pandas as pd


def largest_image(material: Material) -> Plot:
    """Returns the image sizes of each layout: those that ran, and those that memory forbade."""
    plot = Plot("largest_image", "The largest image each layout fits")
    ran, refused = _ran(material), _refused(material)
    sizes = set(ran["pixels"]) | set(refused["pixels"])
    if len(sizes) < 2 and not len(refused):
        plot.missing = "all runs have one image size, and memory refused none"
        return plot
    layouts = sorted({*ran["layout"], *refused["layout"]})
    made, axes = style.figure(1, 1, 0.9 + 0.36 * len(layouts))
    axis = axes[0][0]
    said = []
    for row, layout in enumerate(layouts):
        found = style.mark(layout)
        here = ran[ran["layout"] == layout]
        out = refused[refused["layout"] == layout]
        edges = list(here["edge"])
        if edges:
            axis.barh(row, max(edges), 0.5, color=found.colour, hatch=found.hatch, alpha=0.85)
            axis.plot(edges, [row] * len(edges), ls="", marker="|", color=style.INK, ms=8)
            peak = here.loc[here["edge"].idxmax(), "peak_bytes_max"]
            needs = f" ({size(peak)} a rank)" if peak == peak and peak is not None else ""
            said.append(f"{layout} {here.loc[here['edge'].idxmax(), 'image']}{needs}")
        axis.plot(
            out["edge"], [row] * len(out), ls="", marker="X", ms=8, color=style.VERMILION,
            markeredgecolor=style.PAPER, label="needs more memory than there is",
        )  # fmt: skip
    axis.set_yticks(range(len(layouts)), [style.short(layout) for layout in layouts])
    axis.invert_yaxis()
    axis.set_xlabel("edge of a square image with as many pixels [pixels]")
    axis.set_xlim(left=0)
    style.no_grid(axis, "y")
    if len(refused):
        style.legend(made, [axis])
    plot.figure = made
    plot.caption = _caption(said, refused)
    return plot


def _caption(said: list[str], refused: pd.DataFrame) -> str:
    """Returns the sizes in words."""
    text = "Ticks are image sizes that ran to the end. "
    text += f"Largest: {'; '.join(said[:10])}. " if said else "None ran to the end. "
    if not len(refused):
        return text + "Memory refused none, so larger images may fit."
    points = [f"{row.layout} {row.image}" for row in refused.itertuples()]
    return text + f"Too large: {'; '.join(dict.fromkeys(points[:10]))}."


def _ran(material: Material) -> pd.DataFrame:
    """Returns the complete runs with the edge of their images."""
    runs = material.frames.runs
    return _edged(runs[(runs["state"] == "done")])


def _refused(material: Material) -> pd.DataFrame:
    """Returns points that failed, or were excluded, for want of memory."""
    import pandas as pd

    runs = material.frames.runs
    died = _edged(runs[(runs["reason"] == "oom").fillna(False)])
    planned = material.frames.planned
    infeasible = planned[(planned["state"] == "infeasible").fillna(False)]
    memory = infeasible[infeasible["reason"].fillna("").str.contains(r"\[memory\.", regex=True)]
    rows = [_from_words(str(words)) for words in memory["overrides"].fillna("")]
    frame = pd.DataFrame(
        [row for row in rows if row], columns=["layout", "image", "height", "width"]
    )
    columns = ["layout", "image", "pixels", "edge"]
    return pd.concat([died[columns], _edged(frame)[columns]]).drop_duplicates()


def _from_words(words: str) -> tuple[str, str, int, int] | None:
    """Returns layout and image of a point that has no run; None if its words do not say them."""
    import re

    layout = re.search(r"(?:^|\s|')parallel=([\w+]+)", words)
    image = re.search(r"(?:^|\s|')image=\[?(\d{1,6})(?:,(\d{1,6}))?\]?", words)
    if image is None:
        return None
    height = int(image[1])
    width = int(image[2] or height)
    return layout[1] if layout else "single", f"{height}x{width}", height, width


def _edged(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns rows with an image size, with its pixels and their square root."""
    kept = frame[frame["height"].notna() & frame["width"].notna()].copy()
    kept["layout"] = kept["layout"].fillna("?")
    kept["pixels"] = numeric(kept, "height") * numeric(kept, "width")
    kept["edge"] = kept["pixels"] ** 0.5
    return kept
