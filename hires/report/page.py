"""Renders the page of a report: one file, light and dark, without network access.

Its only script is its own, which the page's policy allows by hash.
"""

from __future__ import annotations

import base64
import collections
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

import hires
from hires.core.store import provenance
from hires.core.store.attempts import Attempt
from hires.core.units import size
from hires.report.columns import CAMPAIGN, RANKS, Table, filled, table_of, texts
from hires.report.compare.comparison import origin
from hires.report.config_values import listed, value_text
from hires.report.frames import Frames, plain_rows, setting
from hires.report.plots import base as figures
from hires.report.plots import style
from hires.report.plots.base import Plot
from hires.report.points import (
    ATTEMPTS,
    KEYS_OF_RUN,
    PEAK,
    RATES,
    RIVALS,
    SPEEDUP,
    WORK,
    common_work,
    differing_keys,
    fastest,
    group_key,
    median_peak,
    median_speed,
)
from hires.report.record import RunRecord
from hires.report.runs import Run, defaults

MAX_ROWS = 2000  # rows of one table on the page, and cards of runs; files hold all of them
MAX_NOTES = 200
_FOLDER = Path(__file__).parent / "templates"
_MOST = 6  # values that a line lists before it counts the others
_MAX_RANKS = 64
_PLACE = ("campaign", "layout", "ranks")
"""Columns of which the headline has a row for each combination."""


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
        "headline": headline(frames),
        "colour": _colour,
        "figures": [plot for plot in plots if plot.figure is not None],
        # matplotlib has escaped the texts of a drawing.
        "svg": lambda plot: Markup(figures.inline(plot)),
        "missing": figures.missing(plots),
        "tables": tables,
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
    """Returns what was run, where and with which versions, as lines with a name each."""
    runs = frames.run_list
    records = [record for run in runs for record in run.records]
    facts = [origin(record.provenance) for record in records if record.provenance]
    facts += [origin(run.provenance) for run in runs]
    times = sorted(run.provenance.started[:16].replace("T", " ") for run in runs
                   if run.provenance.started)  # fmt: skip
    points = {"model": "networks"} | {k: f"{k}s" for k in ("image", "layout", "precision", "task")}
    lines = [
        *((name, _different(run.point.get(key) for run in runs)) for key, name in points.items()),
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


def headline(frames: Frames) -> Table:
    """Returns one row a campaign, layout and number of ranks, all of a campaign of the same work.

    It is the work that most layouts were run with, or in a campaign without it, most layouts of the
    campaign; the caption counts the rows that are of other work only.
    """
    every = fastest(frames.points)
    points = _of_common_work(every).sort_values("img_per_s_median", ascending=False, kind="stable")
    others = every[~group_key(every, _PLACE).isin({*group_key(points, _PLACE)})]
    rows, rivals = plain_rows(points), group_key(frames.points, RIVALS)
    for row, own in zip(rows, group_key(points, RIVALS), strict=True):
        alike = plain_rows(frames.points[rivals == own])
        row["layout_keys"] = differing_keys([row, *alike], ("layout_keys",))[0] or None
        row["speedup"] = row["speedup"] if any(one["layout"] != "single" for one in rows) else None
    layout, *_ = texts(layout="layout")
    columns = [layout, KEYS_OF_RUN[0], RANKS, RATES[0], SPEEDUP, PEAK, ATTEMPTS[0]]
    columns = [CAMPAIGN] * (points["campaign"].nunique() > 1) + columns
    table = table_of("headline", "Layouts side by side", columns, rows)
    works = {}
    for row in rows:
        words = " ".join(str(row[key] or "?") for key in ("model", "image", "precision", "task"))
        works[f"{words}, batch {row['batch'] or '?'}"] = row["campaign"]
    named = [f"{name}: {work}" if len(works) > 1 else work for work, name in works.items()]
    left_out = len(others.drop_duplicates([*_PLACE]))
    were = "layout was" if left_out == 1 else "layouts were"
    more = f" {left_out} more {were} not run with this work." if left_out else ""
    caption = f"{listed(named, _MOST, '; ')}.{more}" if rows else ""
    return filled(replace(table, caption=caption, empty="No run is complete."))


def _of_common_work(points: pd.DataFrame) -> pd.DataFrame:
    """Returns the points of one work of each campaign: the commonest of all where it has it."""
    works, parts = group_key(points, WORK), []
    common = works[common_work(points, WORK).index[0]] if len(points) else None
    for _, part in points.groupby("campaign", sort=False):
        own = part[works[part.index] == common]
        parts.append(own if len(own) else common_work(part, WORK))
    return pd.concat(parts) if parts else points


def run_card(run: Run, number: int) -> dict[str, Any]:
    """Returns what the page shows of a run; ``number`` differs for every run of a page."""
    state, reason, cause = run.end
    repeats = run.repeats
    rate, peak = median_speed(repeats), median_peak(repeats or [run.record])
    summary = [f"{rate:.2f} img/s"] if rate is not None else []
    if summary and len(repeats) > 1:
        summary = [f"{summary[0]}, median of {len(repeats)} attempts"]
    summary += [f"highest peak {size(peak)}"] if peak else []
    settings = [(key, value_text(value)) for key, value in run.flat_config.items()]
    ranks = run.record.memory
    placement = [(f"rank {one.rank}", _place(vars(one))) for one in ranks[:_MAX_RANKS]]
    if len(ranks) > _MAX_RANKS:
        placement.append(("...", f"{len(ranks) - _MAX_RANKS} more ranks"))
    records = {record.attempt: record for record in run.records}
    return {
        "run": run,
        "anchor": f"run-{number}",
        "state": state,
        "layout": run.point["layout"] or "?",
        "summary": ", ".join(summary),
        "cause": ": ".join(filter(None, (reason, cause))),
        "attempts": [
            (f"attempt {a.number}", _attempt_words(a, records.get(a.number)))
            for a in run.attempts[-20:]
        ],
        "settings": [pair for pair in settings if defaults().get(pair[0]) != pair[1]][:80],
        "placement": placement,
    }


def _attempt_words(attempt: Attempt, record: RunRecord | None) -> str:
    state = (record and record.state) or str(attempt.exit.get("state") or "not ended")[:20]
    rate = record.img_per_s if record is not None and state == "done" else None
    return state + (f", {rate:.2f} img/s" if rate is not None else "")


def _place(entry: dict[str, Any]) -> str:
    places = {key: entry[key] for key in ("replica", "stage", "tile", "shard")}
    words = [f"{key} {place}" for key, place in places.items() if place is not None]
    return ", ".join(words) or "not recorded"


def _different(values: Iterable[Any]) -> str:
    """Returns the different values, in the order of the first of each."""
    return listed([*dict.fromkeys(str(value) for value in values if value)], _MOST)


def _processor(facts: dict[str, str | None]) -> str | None:
    cores = facts["cores"] and f"{facts['cores']} cores"
    return ", ".join(filter(None, (facts["processor"], cores, facts["memory"]))) or None


def _colour(layout: str) -> str:
    colour = style.layout_style(layout).colour
    return figures.COLOURS.get(colour, colour)
