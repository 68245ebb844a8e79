"""Renders the page of a report: one file, light and dark, without network access.

Its only script is its own, which the page's policy allows by hash.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

import hires
from hires.core.store import provenance
from hires.core.store.attempts import Attempt
from hires.core.store.reading import text
from hires.core.units import MIB, size
from hires.report.columns import CAMPAIGN, RANKS, Column, Row, Table, place_text, table_of
from hires.report.compare.comparison import origin
from hires.report.frames import Frames, plain_rows
from hires.report.plots import base as figures
from hires.report.plots.base import Plot
from hires.report.read import measured_points
from hires.report.read.measured_points import RIVALS, WORK, common_work, group_key
from hires.report.read.plain_values import count, dicts, dig, listed, value_text
from hires.report.read.rows import largest
from hires.report.read.runs import Run
from hires.report.templates import FOLDER, rendered

MAX_ROWS = 2000  # rows of one table on the page; files hold all of them
MAX_CARDS = 2000
MAX_NOTES = 200
_MAX_VALUES = 6  # values that a line lists before it counts the others
_MAX_ATTEMPTS = 20
_MAX_KEYS = 80
_MAX_RANKS = 64
_PLACE = ("campaign", "layout", "ranks")
"""Columns of which the headline has a row for each combination."""
HEADLINE = (
    CAMPAIGN,
    Column("layout", "layout"),
    Column("arranged", "arranged"),
    RANKS,
    Column("img_per_s_median", "median", "img/s", digits=2),
    Column("speedup", "over single", "x", digits=2),
    Column("peak_bytes_max", "fullest rank", "MiB", 1 / MIB, 1),
    Column("attempts", "attempts", digits=0),
)


def render(
    frames: Frames,
    tables: Sequence[Table],
    plots: Sequence[Plot],
    title: str | None,
) -> str:
    """Returns the page as HTML; without a ``title`` its heading names the campaigns."""
    from markupsafe import Markup

    script, css = ((FOLDER / n).read_text(encoding="utf-8") for n in ("script.js", "style.css"))
    cards = [run_card(run, number) for number, run in enumerate(frames.run_list[:MAX_CARDS])]
    campaigns = ", ".join(dict.fromkeys(run.campaign for run in frames.run_list[:1000])) or "hires"
    notes = frames.all_notes()
    layouts = {*map(str, frames.runs["layout"].dropna()), *(card["layout"] for card in cards)}
    values = {
        "title": (title or f"Report of {campaigns}")[:200],
        "made": provenance.now()[:16].replace("T", " "),
        "version": hires.__version__,
        "script": Markup(script),
        "style": Markup(css),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "setting": frames.setting,
        "origins": origins(frames),
        "counts": counts(frames),
        "headline": headline(frames),
        "swatches": {name: figures.page_colour(name) for name in layouts},
        "figures": [plot for plot in plots if plot.figure is not None],
        # matplotlib has escaped the texts of a drawing.
        "svg": lambda plot: Markup(figures.inline(plot)),
        "missing": figures.missing(plots),
        "tables": tables,
        "max_rows": MAX_ROWS,
        "cards": cards,
        # Tables of one campaign name a run without it.
        "card_of": {
            k: c for c in cards for k in ((c["run"].campaign, c["run"].name), c["run"].name)
        },
        "num_cards": len(frames.run_list),
        "notes": notes[:MAX_NOTES],
        "num_notes": len(notes),
    }
    return rendered("page.html", values)


def origins(frames: Frames) -> list[tuple[str, str]]:
    """Returns what was run, where and with which versions, as lines with a name each."""
    runs = frames.runs
    every: list[Any] = [run.provenance for run in frames.run_list]
    every += [
        attempt.record.get("provenance") for run in frames.run_list for attempt in run.attempts
    ]
    facts = [origin(one) for one in every]
    columns = ("model", "image", "layout", "precision", "task", "campaign")
    times = sorted({str(t)[:16].replace("T", " ") for t in runs["started"].dropna()})
    lines = [
        *((f"{'network' if key == 'model' else key}s", _different(runs[key])) for key in columns),
        ("machines", _different(one["host"] for one in facts)),
        ("processors", _different(map(_processor, facts))),
        ("hires", _different(map(_version, facts))),
        ("torch", _different(one["torch"] for one in facts)),
        ("Python", _different(one["python"] for one in facts)),
        ("started", " to ".join(dict.fromkeys((*times[:1], *times[-1:]))) + " UTC" * bool(times)),
    ]
    return [(name, words) for name, words in lines if words]


def counts(frames: Frames) -> list[tuple[str, str]]:
    """Returns the number of runs in all, of each state, and of excluded points."""
    total = len(frames.runs)
    numbers = [("run" if total == 1 else "runs", str(total))]
    numbers += [(str(s), str(n)) for s, n in frames.runs["state"].value_counts().items()]
    excluded = int(frames.planned["state"].isin(["infeasible", "failed"]).sum())
    return [*numbers, ("excluded", str(excluded))] if excluded else numbers


def headline(frames: Frames) -> Table:
    """Returns one row a campaign, layout and number of ranks, all of a campaign of the same work.

    It is the work that most layouts were run with, or in a campaign without it, most layouts of the
    campaign; the caption counts the rows that are of other work only.
    """
    every_point = measured_points.fastest(frames.points)
    points = _of_common_work(every_point).sort_values(
        "img_per_s_median", ascending=False, kind="stable"
    )
    shown = {*group_key(points, _PLACE)}
    others = every_point[~group_key(every_point, _PLACE).isin(shown)]
    rows: list[Row] = []
    every = group_key(frames.points, RIVALS)
    for row, rivals in zip(plain_rows(points), group_key(points, RIVALS), strict=True):
        arranged = measured_points.distinction(row, frames.points[every == rivals], ("arranged",))
        rows.append({**row, "arranged": arranged or None})
    columns = [*HEADLINE[0 if points["campaign"].nunique() > 1 else 1 :]]
    # Columns of which these rows have nothing to say.
    empty = {key for key in ("arranged", "speedup") if all(not row[key] for row in rows)}
    columns = [column for column in columns if column.key not in empty]
    title = "Layouts side by side"
    table = table_of("headline", title, columns, rows, missing="No run is complete.")
    left_out = plain_rows(others.drop_duplicates([*_PLACE]))
    return replace(table, caption=_work_words(rows, left_out) if rows else "")


def _of_common_work(points: pd.DataFrame) -> pd.DataFrame:
    """Returns the points of one work of each campaign: the commonest of all where it has it."""
    works, parts = group_key(points, WORK), []
    common = works[common_work(points, WORK).index[0]] if len(points) else None
    for _, part in points.groupby("campaign", sort=False):
        own = part[works[part.index] == common]
        parts.append(own if len(own) else common_work(part, WORK))
    return pd.concat(parts) if parts else points


def _work_words(rows: Sequence[Row], left_out: Sequence[Row]) -> str:
    """Returns what the layouts of the headline were run with, and how many were not."""
    campaigns = collections.defaultdict(list)
    for row in rows:
        words = " ".join(str(row[key] or "?") for key in ("model", "image", "precision"))
        campaigns[f"{words}, batch {row['batch'] or '?'}, {row['task'] or '?'}"].append(
            str(row["campaign"])
        )
    named = [f"{_different(names)}: {words}" for words, names in campaigns.items()]
    text = listed(named, _MAX_VALUES, "; ") if len(campaigns) > 1 else next(iter(campaigns))
    text += "; medians over the attempts of each by the latest commit"
    if left_out:
        num, names = len(left_out), _different(row["campaign"] for row in left_out)
        more = "1 more layout was" if num == 1 else f"{num} more layouts were"
        of = f" ({names})" if len({*itertools.chain(*campaigns.values())}) > 1 else ""
        text += f". {more} not run with this work{of}"
    return f"{text}."


def run_card(run: Run, number: int) -> dict[str, Any]:
    """Returns what the page shows of a run; ``number`` differs for every run of a page."""
    state, reason, cause = run.end
    record = run.record
    repeats = [attempt.record for attempt in run.repeats]
    rate = measured_points.median_speed(repeats)
    peaks = [largest(dicts(one.get("memory")), "peak_bytes") for one in repeats or [record]]
    known = [peak for peak in peaks if peak]
    summary = [f"{rate:.2f} img/s"] if rate is not None else []
    if summary and len(repeats) > 1:
        summary = [f"{summary[0]}, median of {len(repeats)} attempts"]
    summary += [f"fullest rank {size(int(statistics.median(known)))}"] if known else []
    layout = text(record.get("layout"), 60) or text(dig(run.config, "parallel", "name"), 60)
    settings = [(key, value_text(value)) for key, value in run.flat_config.items()]
    changed = [(key, word) for key, word in settings if measured_points.defaults().get(key) != word]
    ranks = dicts(record.get("memory"))
    placement = [
        (f"rank {count(entry.get('rank'))}", _place(entry)) for entry in ranks[:_MAX_RANKS]
    ]
    if len(ranks) > _MAX_RANKS:
        placement.append(("...", f"{len(ranks) - _MAX_RANKS} more ranks"))
    return {
        "run": run,
        "anchor": f"run-{number}",
        "state": state,
        "layout": layout or "?",
        "summary": ", ".join(summary),
        "cause": ": ".join(filter(None, (reason, cause))),
        "attempts": [
            (f"attempt {a.number}", _attempt_words(a)) for a in run.attempts[:_MAX_ATTEMPTS]
        ],
        "settings": changed[:_MAX_KEYS],
        "placement": placement,
    }


def _attempt_words(attempt: Attempt) -> str:
    state = text(attempt.record.get("state"), 20) or text(attempt.exit.get("state"), 20)
    rate = measured_points.median_speed([attempt.record]) if state == "done" else None
    return (state or "not ended") + (f", {rate:.2f} img/s" if rate is not None else "")


def _place(entry: Row) -> str:
    places = {key: place_text(entry.get(key)) for key in ("replica", "stage", "tile", "shard")}
    return ", ".join(f"{key} {place}" for key, place in places.items() if place) or "not recorded"


def _different(values: Iterable[Any]) -> str:
    """Returns the different values, in the order of the first of each."""
    words = dict.fromkeys(map(str, values))
    return listed([word for word in words if word not in ("<NA>", "nan", "None")], _MAX_VALUES)


def _processor(facts: Mapping[str, str | None]) -> str | None:
    cores = facts["cores"] and f"{facts['cores']} cores"
    return ", ".join(filter(None, (facts["processor"], cores, facts["memory"]))) or None


def _version(facts: Mapping[str, str | None]) -> str | None:
    commit, edited, _ = (facts["commit"] or "").partition("-dirty")
    return f"{facts['hires']} ({commit[:10]}{edited})" if commit else facts["hires"]
