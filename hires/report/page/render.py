"""Renders the page of a report: one file, light and dark, without network access.

Its only script is its own, which the page's policy allows by hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import hires
from hires.core.store import provenance
from hires.report import figures
from hires.report.columns import Cell, Column, Table
from hires.report.frames import Frames
from hires.report.load.machines import setting
from hires.report.page.facts import RunCard, counts, headline, origins, run_card
from hires.report.plots.base import Plot
from hires.report.tables.summaries import Summary

if TYPE_CHECKING:
    from markupsafe import Markup

HERE = Path(__file__).parent
MAX_ROWS = 2000
"""Rows of one table on the page; files hold all of them."""
MAX_CARDS = 2000
MAX_NOTES = 200

Cards = dict[tuple[str, str], RunCard]
"""Cards by campaign and run; by the run alone for tables of one campaign."""


class PageCell(NamedTuple):
    """A cell as it is shown and as it is sorted."""

    text: str
    value: str | None = None
    """A number in full, where the text is rounded."""
    title: str = ""
    """A text in full, where it is shortened."""
    anchor: str = ""
    """Link to the run's card."""


class PageTable(NamedTuple):
    """A table on the page."""

    name: str
    title: str
    caption: str
    missing: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[PageCell]]
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
        title: heading; unset: the names of the campaigns.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, css = ((HERE / n).read_text(encoding="utf-8") for n in ("script.js", "style.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    cards = [run_card(run, number) for number, run in enumerate(frames.held[:MAX_CARDS])]
    by_run = {(card.campaign, card.name): card for card in cards}
    by_run |= {("", card.name): card for card in cards}
    campaigns = ", ".join(dict.fromkeys(run.campaign for run in frames.held[:1000])) or "hires"
    notes = frames.all_notes()
    layouts = [str(name) for name in frames.runs["layout"].dropna().unique()]
    return environment.get_template("page.html").render(
        title=(title or f"Report of {campaigns}")[:200],
        made=provenance.now()[:16].replace("T", " "),
        version=hires.__version__,
        script=Markup(script),
        style=Markup(css),
        script_hash=digest,
        setting=setting(frames),
        origins=origins(frames),
        counts=counts(frames),
        headline=_page_table(headline(frames), "", "No run is complete.", by_run),
        swatches={name: figures.page_colour(name) for name in layouts},
        figures=[plot for plot in plots if plot.figure is not None],
        svg=_svg,
        missing=figures.missing(plots),
        tables=[_page_table(s.table, s.caption, s.missing, by_run) for s in tables],
        cards=cards,
        num_cards=len(frames.held),
        colours={card.layout: figures.page_colour(card.layout) for card in cards},
        notes=notes[:MAX_NOTES],
        num_notes=len(notes),
    )


def _svg(plot: Plot) -> Markup:
    """Returns the drawing of a plot, whose texts matplotlib has escaped."""
    from markupsafe import Markup

    return Markup(figures.inline(figures.text_of(plot), plot.name))


def _page_table(table: Table, caption: str, missing: str, cards: Cards) -> PageTable:
    keys = [column.key for column in table.columns]
    rows = []
    for row in table.rows[:MAX_ROWS]:
        cells = [_page_cell(column, cell) for column, cell in zip(table.columns, row, strict=True)]
        if "run" in keys:
            campaign = str(row[keys.index("campaign")]) if "campaign" in keys else ""
            place = keys.index("run")
            card = cards.get((campaign, cells[place].text))
            if card is not None:
                cells[place] = PageCell(card.short, None, card.name, card.anchor)
        rows.append(cells)
    return PageTable(
        table.name, table.title, caption, missing, table.columns, rows, len(table.rows)
    )


def _page_cell(column: Column, cell: Cell) -> PageCell:
    """Returns a cell; a missing number sorts as the smallest one."""
    if not column.numeric:
        return PageCell(column.text(cell))
    return PageCell(column.text(cell), "" if cell is None else f"{cell:.12g}")
