"""Shows the points of a sweep on a screen, and as JSON."""

from __future__ import annotations

import collections
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from hires.cli.screens.screen import plural, print_table
from hires.cli.sweep.sweep_points import Points, SweepPoint
from hires.core.text_table import aligned
from hires.core.units import MIB
from hires.launcher.attempt_queue import Ended
from hires.report.columns import Column, Table

_WIDTH = 120
"""Columns of the excluded points when the output is no terminal."""


def print_points(points: Points, repeat: int) -> None:
    """Prints the points that can run, then those that cannot with the reason, then the counts."""
    if points.valid:
        table = _valid_table(points, repeat)
        print_table(table.title, table.columns, table.text_rows())
    if points.excluded:
        _print_excluded(points)
    warnings = collections.Counter(
        text for point in points.valid if point.planned for text in point.planned.warnings
    )
    for text, number in warnings.items():
        print(f"warning: {text} ({plural(number, 'point')})", file=sys.stderr)
    states = [point.state for point in points.listed]
    parts = [f"{states.count('ready')} to run", f"{states.count('complete')} complete"]
    parts.append(f"{states.count('infeasible')} excluded")
    if points.left_out:
        parts.append(f"{points.left_out} left out by --where")
    if points.alike:
        parts.append(f"{points.alike} the same run as another")
    print(f"{len(points.listed)} points: {', '.join(parts)}")


def as_json(points: Points, ends: Sequence[Ended] | None = None, repeat: int = 1) -> dict[str, Any]:
    """Returns everything about the points as plain values.

    Args:
        points: the sweep.
        ends: how the attempts of this command ended; None if none was to be started.
        repeat: complete attempts that each point shall have.
    """
    by_path: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for end in ends or ():
        attempt = {"attempt": end.attempt, "state": end.state, "cause": end.cause}
        by_path[str(end.task.path)].append(attempt)
    listed = []
    for point in points.valid:
        planned, attempts = point.planned, by_path[str(point.folder)]
        listed.append(
            {
                "run": point.folder.name,
                "path": str(point.folder),
                "overrides": point.words,
                "state": point.state if ends is None else _end(point, attempts, repeat),
                "ranks": planned.ranks if planned else None,
                "peak_bytes": planned.peak_bytes if planned else None,
                "warnings": list(planned.warnings) if planned else [],
                "complete_attempts": point.done,
                "attempts": attempts,
            }
        )
    excluded = [
        {"overrides": p.words, "state": p.state, "reason": p.reason, "nearest": p.nearest}
        for p in points.excluded
    ]
    counted = {"left_out": points.left_out, "alike": points.alike}
    return {"points": listed, "excluded": excluded, **counted}


def _end(point: SweepPoint, attempts: list[dict[str, Any]], repeat: int) -> str:
    """Returns the state of a point after its attempts: that of the last one if some is missing."""
    states = [attempt["state"] for attempt in attempts]
    bad = [state for state in states if state != "done"]
    if not bad and len(point.done) + len(states) >= repeat:
        return "done"
    return bad[-1] if bad else "pending"


def _valid_table(points: Points, repeat: int) -> Table:
    keys = [key for axis in points.axes if len(axis.steps) > 1 for key in axis.keys]
    columns = [Column("point", "point", digits=0), *(Column(key, key) for key in keys)]
    columns += [Column("ranks", "ranks", digits=0), Column("peak", "memory", "MiB", 1 / MIB, 0)]
    columns += [Column("state", "state"), Column("run", "run")]
    rows = []
    for number, point in enumerate(points.listed, start=1):
        if not point.reason:
            values = [word.partition("=")[2] for word in points.varied_words(point)]
            planned, state = point.planned, point.state
            facts = (planned.ranks, planned.peak_bytes) if planned else (None, None)
            if repeat > 1:
                state += f" ({len(point.done)} of {repeat})"
            rows.append([number, *values, *facts, state, point.folder.name])
    return Table("points", "Points", columns, rows)


def _print_excluded(points: Points) -> None:
    """Prints a table whose reasons are wrapped, since they are sentences."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    rest = max(width - 14, 40)
    rows = [("point", "overrides", "reason", "nearest that can run")]
    for number, point in enumerate(points.listed, start=1):
        if point.reason:
            words = "\n".join(points.varied_words(point)) or " ".join(point.words)
            reason = textwrap.fill(point.reason, rest // 2)
            nearest = textwrap.fill(point.nearest or "-", rest // 4)
            rows.append((str(number), words, reason, nearest))
    print("\n".join(["Excluded", "", *aligned(rows), ""]))
