"""How does a report come about? Frames, tables, plots and the page, into one folder.

DIR/index.html   tables/throughput.csv ...   plots/memory_per_rank.svg ...
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core.store.files import make_folder, write_atomically
from hires.core.store.reading import Note
from hires.report import figures
from hires.report.frames import Frames, add_campaign, load
from hires.report.plots import backends
from hires.report.plots.base import Plot, plot_data
from hires.report.tables import formats
from hires.report.tables.summaries import Summary, summaries

PAGE = "index.html"
OPTION = "--out DIR"


@dataclass(frozen=True)
class Wish:
    """What somebody asks for."""

    formats: tuple[str, ...]
    """``html``, formats of tables and formats of plots."""
    out: Path
    title: str | None = None
    """Heading of the page; unset: the names of the campaigns."""

    def some(self, known: Sequence[str]) -> list[str]:
        """Returns which of some formats are asked for."""
        return [form for form in self.formats if form in known]


@dataclass
class Made:
    """What a report consists of."""

    num_runs: int
    files: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Plots that there are not, with the reason."""
    notes: list[Note] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Returns everything as a person reads it."""
        told = [f"note: {note.where}: {note.text}" for note in self.notes[:_NOTES]]
        if len(self.notes) > _NOTES:
            told.append(f"note: and {len(self.notes) - _NOTES} more")
        told += [f"not drawn: {line}" for line in self.left_out]
        runs = f"{self.num_runs} run{'' if self.num_runs == 1 else 's'}"
        first = next((file for file in self.files if file.name == PAGE), None)
        where = first or (self.files[0].parent if self.files else "nothing")
        return [*told, f"{runs}, {len(self.files)} files; open {where}"]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values."""
        return {
            "runs": self.num_runs,
            "files": [str(file) for file in self.files],
            "not_drawn": self.left_out,
            "notes": [{"where": note.where, "text": note.text} for note in self.notes],
        }


_NOTES = 20
"""Notes that are printed one by one."""


def write_report(
    paths: Sequence[Path],
    campaigns: Sequence[Path],
    wish: Wish,
    told: Mapping[Path, tuple[str, str | None, str | None]] | None = None,
) -> Made:
    """Writes a report.

    Args:
        paths: run folders.
        campaigns: folders whose planned points belong to it.
        wish: what is asked for.
        told: state, reason and cause of runs that left no last word, by folder.

    Returns:
        The files, and what could not be drawn or read.

    Raises:
        RunError: a file cannot be written.
        ConfigError: a format needs a library that is not installed.
    """
    with _no_collection():
        frames = load(paths, told)
        for folder in campaigns:
            add_campaign(frames, folder)
        made = Made(len(frames.held))
        tables = summaries(frames)
        _write_tables(made, tables, wish)
        plots = _plots(frames, paths, wish)
        _write_plots(made, plots, wish)
        made.left_out = figures.missing(plots) if plots else []
        made.notes = frames.all_notes()
        if "html" in wish.formats:
            _write_page(made, frames, tables, plots, wish)
    return made


def _write_tables(made: Made, tables: Sequence[Summary], wish: Wish) -> None:
    """Writes the tables that have rows; files of an earlier report that has more are removed."""
    folder = wish.out / "tables"
    for form in wish.some(formats.FORMATS):
        make_folder(folder, OPTION)
        for table in tables:
            if table.table.rows:
                made.files.append(formats.write_table(folder, table, form))
            else:
                _forget(folder / f"{table.name}.{form}")


def _plots(frames: Frames, paths: Sequence[Path], wish: Wish) -> list[Plot]:
    """Returns the plots if anybody asks for one."""
    if not wish.some(("html", *figures.FORMATS)):
        return []
    data = plot_data(frames)
    roots = dict.fromkeys(path.parent.parent for path in paths)
    data.benches = [b for root in roots for b in backends.read_benches(root, frames.notes)]
    return figures.draw(data)


def _write_plots(made: Made, plots: Sequence[Plot], wish: Wish) -> None:
    """Writes the plots that there are; files of an earlier report that has more are removed."""
    folder = wish.out / "plots"
    for form in wish.some(figures.FORMATS):
        make_folder(folder, OPTION)
        for plot in plots:
            if plot.figure is not None:
                made.files.append(figures.write_plot(folder, plot, form))
            else:
                _forget(folder / f"{plot.name}.{form}")


def _forget(path: Path) -> None:
    """Removes a file that would pass for one of this report."""
    with contextlib.suppress(OSError):
        path.unlink()


def _write_page(
    made: Made, frames: Frames, tables: Sequence[Summary], plots: Sequence[Plot], wish: Wish
) -> None:
    """Writes the page."""
    from hires.report.page import render

    make_folder(wish.out, OPTION)
    text = render(frames, tables, plots, wish.title)
    write_atomically(wish.out / PAGE, text, option=OPTION)
    made.files.insert(0, wish.out / PAGE)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Stops the search for cycles: hundreds of thousands of plain values are made, and no cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
