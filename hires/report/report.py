"""Writes a report: run folders become frames, tables, plots and one page, in one folder.

DIR/index.html   tables/throughput.csv ...   plots/memory_per_rank.svg ...

The page is one file, light and dark, without network access. Its only script is its own, which the
page's policy allows by hash.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import io
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hires
from hires.core.store import provenance
from hires.core.store.ends import State
from hires.core.store.files import make_folder, write_atomically
from hires.core.store.reading import Note
from hires.core.units import listed, size
from hires.report import tables
from hires.report.columns import TABLES, Table, value_text
from hires.report.compare.comparison import origin
from hires.report.plots import base as figures
from hires.report.plots import style
from hires.report.plots.base import Plot
from hires.report.points import median_peak, median_speed
from hires.report.runs import Run, defaults
from hires.report.tables import Frames, setting

PAGE = "index.html"
OPTION = "--out DIR"
TABLE_FORMATS = ("csv", "md", "tex", "parquet")


@dataclass
class ReportFiles:
    """The files of a report, and what they lack."""

    num_runs: int
    files: list[Path] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # plots that were not drawn, with the reason
    notes: list[Note] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Returns as text what was written, and which plots were not drawn."""
        lines = [f"not drawn: {line}" for line in self.left_out]
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
    frames: Frames, formats: Collection[str], out: Path, title: str | None = None,
    width: float = style.WIDTH,
) -> ReportFiles:  # fmt: skip
    """Writes a report of some runs and planned points to the folder ``out``.

    It replaces an earlier report there: its page, and its folders of tables and plots. ``formats``
    are ``html`` and those of tables and plots; without a ``title`` the page is headed by the
    campaigns' names; ``width`` is of a figure, in inches. ConfigError: a file cannot be written.
    """
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


MAX_ROWS = 2000  # rows of one table on the page, and cards of runs; files hold all of them
MAX_NOTES = 200
_FOLDER = Path(__file__).parent / "templates"
_MOST = 6  # values that a line lists before it counts the others


def render(
    frames: Frames, tables: Sequence[Table], plots: Sequence[Plot], title: str | None
) -> str:
    """Returns the page as HTML; without a ``title`` its heading names the campaigns."""
    import jinja2
    from markupsafe import Markup

    script, css = ((_FOLDER / n).read_text(encoding="utf-8") for n in ("script.js", "style.css"))
    runs = frames.run_list
    cards = [run_card(run, number) for number, run in enumerate(runs[:MAX_ROWS])]
    notes = frames.all_notes()
    values = {
        "title": (title or f"Report of {_different(run.campaign for run in runs) or 'hires'}")[
            :200
        ],
        "made": provenance.now()[:16].replace("T", " "),
        "version": hires.__version__,
        "script": Markup(script),
        "style": Markup(css),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "setting": setting(frames.found),
        "origins": origins(frames),
        "counts": counts(frames),
        "colour": lambda layout: figures.COLOURS.get(
            colour := style.layout_style(layout).colour, colour
        ),
        "states": [*State],
        "figures": [plot for plot in plots if plot.figure is not None],
        # matplotlib has escaped the texts of a drawing.
        "svg": lambda plot: Markup(figures.inline(plot)),
        "missing": [*(table.empty for table in tables if not table.rows), *figures.missing(plots)],
        # One point is the row of its attempts again.
        "tables": [one for one in tables if len(one.rows) > (one.name == "points")],
        "max_rows": MAX_ROWS,
        "cards": cards,
        "card_of": {(card["run"].campaign, card["run"].name): card for card in cards},
        "only_campaign": runs[0].campaign if runs else None,  # of tables without that column
        "num_cards": len(runs),
        "notes": notes[:MAX_NOTES],
        "num_notes": len(notes),
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(values)


def origins(frames: Frames) -> list[tuple[str, str]]:
    """Returns where it was run and with which versions, as lines with a name each."""
    runs = frames.run_list
    records = [record for run in runs for record in run.records]
    facts = [origin(record.provenance) for record in records if record.provenance]
    facts += [origin(run.provenance) for run in runs]
    times = sorted(run.provenance.started[:16].replace("T", " ") for run in runs
                   if run.provenance.started)  # fmt: skip
    lines = [
        ("campaigns", _different(run.campaign for run in runs)),
        ("machines", _different(one["host"] for one in facts)),
        ("processors", _different(map(_processor, facts))),
        *((key, _different(one[key] for one in facts)) for key in ("hires", "commit", "torch")),
        ("started", " to ".join(dict.fromkeys((*times[:1], *times[-1:]))) + " UTC" * bool(times)),
    ]
    return [(name, words) for name, words in lines if words]


def counts(frames: Frames) -> list[tuple[str, str]]:
    """Returns the number of runs in all, of each state, and of excluded points."""
    total = len(frames.run_list)
    states = collections.Counter(run.end[0] for run in frames.run_list)
    numbers = {"run" if total == 1 else "runs": total, **dict(states.most_common())}
    excluded = int(frames.planned["state"].isin(["infeasible", "failed"]).sum())
    numbers |= {"excluded": excluded} if excluded else {}
    return [(name, str(number)) for name, number in numbers.items()]


def run_card(run: Run, number: int) -> dict[str, Any]:
    """Returns what the page shows of a run; ``number`` differs for every run of a page."""
    state, reason, cause = run.end
    rate, peak = median_speed(run.repeats), median_peak(run.repeats or [run.record])
    summary = [] if rate is None else [f"{rate:.2f} img/s"]
    if summary and len(run.repeats) > 1:
        summary = [f"{summary[0]}, median of {len(run.repeats)} attempts"]
    summary += [f"highest peak {size(peak)}"] if peak else []
    settings = [(key, value_text(value)) for key, value in run.flat_config.items()]
    return {
        "run": run,
        "anchor": f"run-{number}",
        "state": state,
        "layout": run.point["layout"] or "?",
        "summary": ", ".join(summary),
        "cause": ": ".join(filter(None, (reason, cause))),
        "settings": [pair for pair in settings if defaults().get(pair[0]) != pair[1]][:80],
    }


def _different(values: Iterable[Any]) -> str:
    """Returns the different values, in the order of the first of each."""
    return listed([*dict.fromkeys(str(value) for value in values if value)], _MOST)


def _processor(facts: dict[str, str | None]) -> str | None:
    cores = facts["cores"] and f"{facts['cores']} cores"
    return ", ".join(filter(None, (facts["processor"], cores, facts["memory"]))) or None
