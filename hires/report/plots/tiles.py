"""How do the tiles of a layout lie over the image, and how wide is what they borrow?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.plan.graph import INPUT
from hires.plan.plan import Plan
from hires.plan.tiling import own_rect
from hires.report.plots import style
from hires.report.plots.base import Material, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW, style.BLUE)


def grid(material: Material) -> Plot:
    """Returns the image with the tiles of the first stage, for every run that has some."""
    plot = Plot("tile_grid", "The tile grid over the image")
    held = [
        (shown, shown.plan)
        for shown in material.shown
        if shown.plan is not None and shown.plan.stages[0].num_tiles > 1
    ]
    if not held:
        plot.missing = "no run that is drawn cuts the image into tiles"
        return plot
    made, axes = style.panels(len(held), 3, 2.4)
    said = []
    for axis, (shown, plan) in zip(axes, held, strict=True):
        borrowed = _draw(axis, plan)
        axis.set_title(style.short(shown.label, 30), fontsize=8.5)
        rows, cols = plan.stages[0].tiles
        said.append(f"{shown.label} {rows}x{cols} tiles, widest halo {borrowed} pixels")
    plot.figure = made
    plot.caption = (
        f"The tiles of the first stage with the ranks that hold them; hatched is what a tile "
        f"borrows for the first operation that needs pixels of its neighbours. {'; '.join(said)}."
    )
    return plot


def _draw(axis: Axes, plan: Plan) -> int:
    """Draws the tiles of one plan, and returns the widest halo of the image in pixels."""
    from matplotlib.patches import Rectangle

    height, width = plan.graph.input_shape[2:]
    stage = plan.stages[0]
    for tile in range(stage.num_tiles):
        r0, r1, c0, c1 = own_rect([height, width], stage.tiles, tile)
        colour = _COLOURS[(tile // stage.tiles[1] + tile % stage.tiles[1]) % len(_COLOURS)]
        axis.add_patch(
            Rectangle((c0, r0), c1 - c0, r1 - r0, facecolor=colour, edgecolor=style.PAPER, lw=1.5)
        )
        ranks = [plan.rank_of(0, d, 0, tile) for d in range(plan.num_directions)]
        if stage.num_tiles <= 36:
            axis.text(
                (c0 + c1) / 2, (r0 + r1) / 2, "\n".join(map(_rank_words, ranks, ("", " up"))),
                ha="center", va="center", fontsize=8, color="black",
            )  # fmt: skip
    widest = 0
    for r0, r1, c0, c1 in _borrowed(plan):
        widest = max(widest, min(r1 - r0, c1 - c0))
        axis.add_patch(
            Rectangle(
                (c0, r0), c1 - c0, r1 - r0, facecolor="none", edgecolor="black", hatch="////", lw=0
            )
        )
    axis.set_xlim(0, width)
    axis.set_ylim(height, 0)
    axis.set_aspect("equal")
    axis.set_xticks([0, width])
    axis.set_yticks([0, height])
    axis.grid(False)
    axis.set_xlabel("column")
    axis.set_ylabel("row")
    return widest


def _rank_words(rank: int, way: str) -> str:
    """Returns what stands in a tile."""
    return f"rank {rank}{way}"


def _borrowed(plan: Plan) -> list[list[int]]:
    """Returns the rectangles of the image that some tile borrows first."""
    for op in plan.stages[0].comm:
        if op.kind == "halo" and op.value == INPUT:
            return [list(message[2:]) for message in op.messages]
    return []
