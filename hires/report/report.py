"""Writes a report: run folders become frames, tables, plots and one page, in one folder.

DIR/index.html   tables/throughput.csv ...   plots/memory_per_rank.svg ...
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core.store.files import make_folder, write_atomically
from hires.core.store.reading import Note
from hires.report import summaries
from hires.report.frames import load
from hires.report.plots import base as figures
from hires.report.plots.base import Plot, PlotData
from hires.report.read.runs import Run

PAGE = "index.html"
OPTION = "--out DIR"
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
) -> ReportFiles:
    """Writes a report of some run folders, and of the planned points of some campaigns, to ``out``.

    ``formats`` are ``html`` and those of tables and plots; without a ``title`` the page is headed
    by the campaigns' names; ``add_states`` sets the status of runs without an exit record.
    ConfigError: a file cannot be written.
    """
    with contextlib.ExitStack() as stack:
        # Hundreds of thousands of plain values are made, and no cycle that must be searched for.
        if gc.isenabled():
            gc.disable()
            stack.callback(gc.enable)
        frames = load(paths, campaigns, add_states)
        report = ReportFiles(len(frames.run_list))
        tables, data = summaries.summaries(frames), PlotData(frames)
        plots: list[Plot] = []
        if {"html", *figures.FORMATS} & set(formats):
            plots = figures.draw(data)
        for form in (form for form in summaries.FORMATS if form in formats):
            files = {table.name: summaries.encoded(table, form) for table in tables}
            report.files += _written(out / "tables", files, form)
        for form in (form for form in figures.FORMATS if form in formats):
            files = {plot.name: figures.encoded(plot, form) for plot in plots}
            report.files += _written(out / "plots", files, form)
        report.left_out = figures.missing(plots)
        report.notes = frames.all_notes()
        if "html" in formats:
            from hires.report.page import render

            make_folder(out, OPTION)
            text = render(frames, tables, plots, title)
            write_atomically(out / PAGE, text, option=OPTION)
            report.files.insert(0, out / PAGE)
    return report


def _written(folder: Path, files: Mapping[str, bytes | None], form: str) -> list[Path]:
    """Writes tables or plots in one format; removes those of an earlier report that lack here."""
    make_folder(folder, OPTION)
    paths = []
    for name, data in files.items():
        path = folder / f"{name}.{form}"
        if data is not None:
            write_atomically(path, data, option=OPTION)
            paths.append(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return paths
