"""Writes a report: run folders become frames, tables, plots and one page, in one folder.

DIR/index.html   tables/throughput.csv ...   plots/memory_per_rank.svg ...
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core.store.files import make_folder, write_atomically
from hires.core.store.reading import Note
from hires.report import tables
from hires.report.columns import TABLES, Table
from hires.report.frames import Frames, load
from hires.report.plots import base as figures
from hires.report.plots import style
from hires.report.runs import Run

PAGE = "index.html"
OPTION = "--out DIR"
TABLE_FORMATS = ("csv", "md", "tex", "parquet")
_MAX_NOTES = 20  # notes that are printed one by one


@dataclass
class ReportFiles:
    """The files of a report, and what they lack."""

    num_runs: int
    files: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # plots that were not drawn, with the reason
    notes: list[Note] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Returns everything as text."""
        lines = [f"note: {note.where}: {note.text}" for note in self.notes[:_MAX_NOTES]]
        if len(self.notes) > _MAX_NOTES:
            lines.append(f"note: and {len(self.notes) - _MAX_NOTES} more")
        lines += [f"not drawn: {line}" for line in self.left_out]
        runs = f"{self.num_runs} run{'' if self.num_runs == 1 else 's'}"
        first = self.files[0] if self.files else None
        where = first if first is None or first.name == PAGE else first.parent
        return [*lines, f"{runs}, {len(self.files)} files; open {where or 'nothing'}"]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "runs": self.num_runs,
            "files": [str(file) for file in self.files],
            "not_drawn": self.left_out,
            "notes": [vars(note) for note in self.notes],
        }


def write_report(
    paths: Sequence[Path],
    campaigns: Sequence[Path],
    formats: Collection[str],
    out: Path,
    title: str | None = None,
    add_states: Callable[[Iterable[Run]], None] = lambda runs: None,
    width: float = style.WIDTH,
) -> ReportFiles:
    """Writes a report of some run folders, and of the planned points of some campaigns, to ``out``.

    It replaces an earlier report there: its page, and its folders of tables and plots. ``formats``
    are ``html`` and those of tables and plots; without a ``title`` the page is headed by the
    campaigns' names; ``add_states`` sets the status of runs without an exit record; ``width`` is of
    a figure, in inches. ConfigError: a file cannot be written.
    """
    frames = load(paths, campaigns, add_states)
    report = ReportFiles(len(frames.run_list))
    make_folder(out, OPTION)
    _remove_earlier(out)
    of_report = tables.tables(frames.found)
    plots: list[figures.Plot] = []
    if {"html", *figures.FORMATS} & {*formats}:
        plots = figures.draw(figures.PlotData(frames), width)
    files = {
        out / "tables" / f"{table.name}.{form}": _encoded(table, form, frames)
        for form in TABLE_FORMATS
        for table in of_report
        if form in formats and table.rows
    }
    for form in (form for form in figures.FORMATS if form in formats):
        drawn = {
            out / "plots" / f"{plot.name}.{form}": figures.encoded(plot, form) for plot in plots
        }
        files |= {path: data for path, data in drawn.items() if data is not None}
    report.left_out = figures.missing(plots)
    report.notes = frames.all_notes()
    if "html" in formats:
        from hires.report.page import render

        files = {out / PAGE: render(frames, of_report, plots, title).encode(), **files}
    for path, data in files.items():
        make_folder(path.parent, OPTION)
        write_atomically(path, data, option=OPTION)
    report.files = [*files]
    return report


def _remove_earlier(out: Path) -> None:
    """Removes the files of an earlier report, which may be of other runs."""
    names = [Path(PAGE)]
    names += [Path("tables", f"{name}.{form}") for name in TABLES for form in TABLE_FORMATS]
    plots = [plot.name for plot in figures.registered().values()]
    names += [Path("plots", f"{name}.{form}") for name in plots for form in figures.FORMATS]
    for name in names:
        (out / name).unlink(missing_ok=True)


def _encoded(table: Table, form: str, frames: Frames) -> bytes:
    if form == "parquet":
        data = io.BytesIO()
        columns = [column.key for column in table.columns]
        getattr(frames, table.name)[columns].to_parquet(data, index=False)
        return data.getvalue()
    texts = {"csv": table.to_csv, "md": table.to_markdown, "tex": table.to_latex}
    return texts[form]().encode()
