"""What, where, with which versions, and what came out: the head of a report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hires.core.store.attempts import Attempt
from hires.core.store.reading import text
from hires.core.units import MIB, size
from hires.report.columns import Cell, Column, Table
from hires.report.frames import Frames, plain_rows
from hires.report.load import measured_points
from hires.report.load.plain_values import count, dicts, dig, spoken
from hires.report.load.rows import largest
from hires.report.load.runs import Run

if TYPE_CHECKING:
    import pandas as pd

_MOST = 6
"""Values that a line lists before it counts the rest."""
_TITLE = "The layouts beside each other, each the median over its attempts of the latest code"
_MANY = 20
"""Attempts of a run that its box lists."""
HEADLINE = (
    Column("campaign", "campaign"),
    Column("layout", "layout"),
    Column("point", "point"),
    Column("ranks", "ranks", digits=0),
    Column("img_per_s_median", "median", "img/s", digits=2),
    Column("speedup", "beside single", "x", digits=2),
    Column("peak_bytes_max", "fullest rank", "MiB", 1 / MIB, 1),
    Column("attempts", "attempts", digits=0),
)


@dataclass(frozen=True)
class Box:
    """What the page says of one run."""

    anchor: str
    name: str
    short: str
    """The hash of the run."""
    campaign: str
    state: str
    layout: str
    summary: str
    cause: str
    reproduce: str
    attempts: list[tuple[str, str]]
    """What became of each."""
    settings: list[tuple[str, str]]
    """Keys that differ from the defaults."""
    placement: list[tuple[str, str]]
    """Rank and where it stands, ranks of one kind together."""


def origins(frames: Frames) -> list[tuple[str, str]]:
    """Returns what was run, where and with which versions, as lines with a name each."""
    runs = frames.runs
    every = [a.record.get("provenance") for run in frames.held for a in run.attempts]
    origin = [run.provenance for run in frames.held] + [o for o in every if isinstance(o, dict)]
    hardware = [dig(found, "hardware") for found in origin]
    lines = [
        ("networks", _several(runs["model"])),
        ("images", _several(runs["image"])),
        ("layouts", _several(runs["layout"])),
        ("precisions", _several(runs["precision"])),
        ("tasks", _several(runs["task"])),
        ("campaigns", _several(runs["campaign"])),
        ("machines", _several(text(found.get("host"), 60) for found in origin)),
        ("processors", _several(_processor(found) for found in hardware)),
        ("hires", _several(_version(found) for found in origin)),
        ("torch", _several(text(found.get("torch"), 40) for found in origin)),
        ("Python", _several(text(found.get("python"), 40) for found in origin)),
        ("started", _between(runs["started"])),
    ]
    return [(name, said) for name, said in lines if said]


def counts(frames: Frames) -> list[tuple[str, str]]:
    """Returns how many runs there are of each state, and the extremes, as words and numbers."""
    states = frames.runs["state"].value_counts()
    found = [("run" if len(frames.runs) == 1 else "runs", str(len(frames.runs)))]
    found += [(str(state), str(number)) for state, number in states.items()]
    planned = frames.planned
    excluded = int((planned["state"] == "infeasible").sum())
    if excluded:
        found.append(("excluded", str(excluded)))
    return found


def headline(frames: Frames) -> Table:
    """Returns one row a campaign, layout and number of ranks, all of one work where it was run.

    It is the work that most layouts were run at; of a layout that was not, it is its fastest one.
    """
    held = measured_points.fastest(frames.points)
    if len(held):
        # The common work stands first, and the first of each layout is kept.
        order = (
            measured_points.group_key(held, measured_points.WORK)
            != measured_points.group_key(
                measured_points.common_work(held, measured_points.WORK), measured_points.WORK
            ).iloc[0]
        )
        held = held.loc[order.sort_values(kind="stable").index]
        held = held[~measured_points.group_key(held, ("campaign", "layout", "ranks")).duplicated()]
        held = held.sort_values("img_per_s_median", ascending=False, kind="stable")
    rows: list[list[Cell]] = []
    every = measured_points.group_key(frames.points, measured_points.RIVALS)
    for row, rivals in zip(
        plain_rows(held), measured_points.group_key(held, measured_points.RIVALS), strict=True
    ):
        said = _point_words(row, held, frames.points[every == rivals])
        rows.append([said if c.key == "point" else row[c.key] for c in HEADLINE])
    first = 0 if held["campaign"].nunique() > 1 else 1
    return Table("headline", _TITLE, HEADLINE[first:], [cells[first:] for cells in rows])


def _point_words(row: dict[str, Any], held: pd.DataFrame, rivals: pd.DataFrame) -> str:
    """Returns a point in words: its work, and what tells it from others of its layout."""
    said = " ".join(str(row[key] or "?") for key in ("model", "image", "precision"))
    said += f", batch {row['batch'] or '?'}, {row['task'] or '?'}"
    more = [
        measured_points.distinction(row, held, ("settings",)),
        measured_points.distinction(row, rivals, ("arranged",)),
    ]
    return ", ".join([said, *(words for words in more if words)])


def box(run: Run, number: int) -> Box:
    """Returns what the page says of a run.

    Args:
        run: the run.
        number: different for every run of a page.
    """
    state, reason, cause = run.end
    record = run.record
    told = [attempt.record for attempt in run.repeats]
    rate = measured_points.median_speed(told)
    entries = [dicts(values.get("memory")) for values in told or [record]]
    peaks = [n for n in (largest(ranks, "peak_bytes") for ranks in entries) if n]
    said = [f"{rate:.2f} img/s"] if rate is not None else []
    if said and len(told) > 1:
        said = [f"{said[0]}, median of {len(told)} attempts"]
    said += [f"fullest rank {size(int(statistics.median(peaks)))}"] if peaks else []
    ended = f"{reason}: {cause}" if reason and cause else cause or reason or ""
    layout = text(record.get("layout"), 60) or text(dig(run.config, "parallel", "name"), 60) or "?"
    return Box(
        f"run-{number}",
        run.name,
        run.short,
        run.campaign,
        state,
        layout,
        ", ".join(said),
        ended,
        run.reproduce or "not recorded",
        [
            (f"attempt {attempt.number}", _attempt_words(attempt))
            for attempt in run.attempts[:_MANY]
        ],
        _settings(run),
        _placement(record),
    )


def _attempt_words(attempt: Attempt) -> str:
    """Returns how an attempt ended, and how fast it was."""
    state = text(attempt.record.get("state"), 20) or text(attempt.exit.get("state"), 20)
    rate = measured_points.median_speed([attempt.record]) if state == "done" else None
    return (state or "not ended") + (f", {rate:.2f} img/s" if rate is not None else "")


def _settings(run: Run) -> list[tuple[str, str]]:
    """Returns the keys of a config that differ from the defaults, in its own order."""
    default = measured_points.defaults()
    found = [(key, spoken(value)) for key, value in run.flat_config.items()]
    return [(key, said) for key, said in found if default.get(key) != said][:80]


def _placement(record: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns who holds what; of many ranks the first ones."""
    found = []
    entries = dicts(record.get("memory"))
    for entry in entries[:64]:
        words = []
        for key in ("replica", "stage", "tile", "shard"):
            value = entry.get(key)
            places = value if isinstance(value, list) else [value]
            if any(place is not None for place in places[:4]):
                said = " up ".join("-" if p is None else spoken(p) for p in places[:2])
                words.append(f"{key} {said}")
        found.append((f"rank {count(entry.get('rank'))}", ", ".join(words) or "not recorded"))
    if len(entries) > 64:
        found.append(("...", f"{len(entries) - 64} more ranks"))
    return found


def _several(values: Iterable[Any]) -> str:
    """Returns different values in words, in the order of the first of each."""
    known = list(dict.fromkeys(str(v) for v in values if v is not None and not _is_missing(v)))
    left = len(known) - _MOST
    return ", ".join(known[:_MOST]) + (f" and {left} more" if left > 0 else "")


def _between(values: Iterable[Any]) -> str:
    """Returns the first and the last of some times."""
    known = sorted(str(v)[:16].replace("T", " ") for v in values if not _is_missing(v))
    if not known:
        return ""
    return f"{known[0]} UTC" if known[0] == known[-1] else f"{known[0]} to {known[-1]} UTC"


def _processor(hardware: Any) -> str | None:
    """Returns what a machine is, in words."""
    name, cores = text(dig(hardware, "cpu"), 60), count(dig(hardware, "cores"))
    memory = count(dig(hardware, "memory"))
    said = [name or "", f"{cores} cores" if cores else "", size(memory) if memory else ""]
    return ", ".join(word for word in said if word) or None


def _version(provenance: dict[str, Any]) -> str | None:
    """Returns version and commit of hires."""
    version, git = text(provenance.get("hires"), 40), text(provenance.get("git"), 60)
    if version is None:
        return None
    if git is None:
        return version
    return f"{version} ({git[:10]}{'-dirty' if git.endswith('-dirty') else ''})"


def _is_missing(value: Any) -> bool:
    """Whether nothing is known; a frame says so in several ways."""
    return value is None or str(value) in ("<NA>", "nan", "None")
