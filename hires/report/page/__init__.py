"""What does the page look like? One file: no network, no script but its own, light and dark."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hires
from hires.core.store import provenance
from hires.report import figures
from hires.report.columns import Cell, Column, Table
from hires.report.frames import Frames
from hires.report.load import facts
from hires.report.load.machines import setting
from hires.report.plots.base import Plot
from hires.report.tables.summaries import Summary

HERE = Path(__file__).parent
MAX_ROWS = 2000
"""Rows of one table on the page; files hold all of them."""
MAX_BOXES = 2000
MAX_NOTES = 200


Places = dict[tuple[str, str], facts.Box]
"""Boxes by campaign and run; by the run alone where a table has one campaign."""


@dataclass(frozen=True)
class Shown:
    """A cell as it is shown and as it is sorted."""

    text: str
    value: str | None = None
    """A number in full, where the text is rounded."""
    title: str = ""
    """A text in full, where it is shortened."""
    anchor: str = ""
    """Where on the page it is told more of."""


@dataclass(frozen=True)
class Figure:
    """A plot as the page holds it."""

    name: str
    title: str
    caption: str
    svg: Any
    wide: bool
    """Whether it needs the width of the page."""
    setting: str
    """Where it was measured; empty: where the runs were."""


@dataclass(frozen=True)
class Grid:
    """A table as the page holds it."""

    name: str
    title: str
    caption: str
    missing: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Shown]]
    num_rows: int
    """Of the table; the page may hold fewer."""


def render(
    frames: Frames, tables: Sequence[Summary], plots: Sequence[Plot], title: str | None
) -> str:
    """Returns the page as HTML.

    Args:
        frames: the runs.
        tables: of them.
        plots: of them, those without a figure too.
        title: its heading; unset: the names of the campaigns.
    """
    import jinja2
    from markupsafe import Markup

    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, css = (_own(name) for name in ("script.js", "style.css"))
    boxes = [facts.box(run, number) for number, run in enumerate(frames.held[:MAX_BOXES])]
    places = {(box.campaign, box.name): box for box in boxes}
    places |= {("", box.name): box for box in boxes}
    campaigns = ", ".join(dict.fromkeys(run.campaign for run in frames.held[:1000])) or "hires"
    table = facts.headline(frames)
    template = environment.get_template("page.html")
    return template.render(
        title=(title or f"Report of {campaigns}")[:200],
        made=provenance.now()[:16].replace("T", " "),
        version=hires.__version__,
        script=Markup(script),
        style=Markup(css),
        script_hash=_hash(script),
        setting=setting(frames),
        origins=facts.origins(frames),
        counts=facts.counts(frames),
        headline=_grid(table, "", "No run is complete.", places),
        swatches={name: figures.page_colour(name) for name in _layouts(frames)},
        figures=[_figure(plot) for plot in plots if plot.figure is not None],
        missing=figures.missing(plots),
        tables=[_grid(s.table, s.caption, s.missing, places) for s in tables],
        boxes=boxes,
        num_boxes=len(frames.held),
        colours={box.layout: figures.page_colour(box.layout) for box in boxes},
        notes=frames.all_notes()[:MAX_NOTES],
        num_notes=len(frames.all_notes()),
    )


def _layouts(frames: Frames) -> list[str]:
    """Returns the names of all layouts."""
    return [str(name) for name in frames.runs["layout"].dropna().unique()]


def _figure(plot: Plot) -> Figure:
    """Returns a plot with its drawing, whose texts matplotlib has escaped."""
    from markupsafe import Markup

    return Figure(
        plot.name,
        plot.title,
        plot.caption,
        Markup(figures.inline(figures.text_of(plot), plot.name)),
        plot.wide,
        plot.setting,
    )


def _grid(table: Table, caption: str, missing: str, places: Places) -> Grid:
    """Returns a table as the page holds it."""
    keys = [column.key for column in table.columns]
    rows = []
    for row in table.rows[:MAX_ROWS]:
        cells = [_shown(column, cell) for column, cell in zip(table.columns, row, strict=True)]
        if "run" in keys:
            campaign = str(row[keys.index("campaign")]) if "campaign" in keys else ""
            place = keys.index("run")
            found = places.get((campaign, cells[place].text))
            if found is not None:
                cells[place] = Shown(found.short, None, found.name, found.anchor)
        rows.append(cells)
    return Grid(table.name, table.title, caption, missing, table.columns, rows, len(table.rows))


def _shown(column: Column, cell: Cell) -> Shown:
    """Returns a cell; one that is not known sorts as the smallest number."""
    if not column.numeric:
        return Shown(column.text(cell))
    return Shown(column.text(cell), "" if cell is None else f"{cell:.12g}")


def _own(name: str) -> str:
    """Returns a file that belongs to the page."""
    return (HERE / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Returns what the page's policy allows its own script by, and none else."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
