"""How do the states of many runs look on the screen?

Plain text in columns: a table of 1,500 rows is ready at once, and can be searched with grep.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from hires.core import units
from hires.launcher.status.run_state import DONE, STATES, RunState

TITLES = ("run", "state", "step", "img/s", "peak", "attempt", "")
_RIGHT = (2, 3, 4)
_NOTE_MIN = 30
"""Characters that the last column gets even where the screen is narrower."""


def lines(states: Sequence[RunState], width: int | None, height: int | None = None) -> list[str]:
    """Returns a table of runs with a line that counts them.

    Args:
        states: the runs.
        width: characters of a line; None: as many as it takes.
        height: lines of the screen; where there are more runs, those that are done go first.
    """
    shown, left_out = _that_fit(states, height)
    rows = [TITLES, *map(_cells, shown)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(TITLES))]
    found = [_line(row, widths, width) for row in rows]
    if left_out:
        found.append(f"... and {left_out} more")
    return [*found, count(states)]


def count(states: Sequence[RunState]) -> str:
    """Returns how many runs are in which state."""
    counts = collections.Counter(state.state for state in states)
    told = ", ".join(f"{counts[name]} {name}" for name in STATES if counts[name])
    return f"{len(states)} run{'' if len(states) == 1 else 's'}: {told}"


def _that_fit(states: Sequence[RunState], height: int | None) -> tuple[Sequence[RunState], int]:
    """Returns the runs that fit on the screen, and how many do not."""
    room = len(states) if height is None else max(1, height - 4)
    if len(states) <= room:
        return states, 0
    first = [state for state in states if state.state != DONE]
    kept = (first + [state for state in states if state.state == DONE])[:room]
    return kept, len(states) - room


def _cells(state: RunState) -> tuple[str, ...]:
    """Returns one run's cells."""
    reason = f" ({state.reason})" if state.reason else ""
    speed = "-" if state.img_per_s is None else f"{state.img_per_s:.4g}"
    return (
        state.name,
        state.state + reason + repeats(state),
        f"{state.step}/{state.steps}" if state.steps else "-",
        speed,
        "-" if state.peak_bytes is None else units.size(state.peak_bytes),
        "-" if state.attempt is None else f"a{state.attempt}",
        _note(state),
    )


def repeats(state: RunState) -> str:
    """Returns how many repeats of a run there are, if that is not all that were asked for."""
    there = state.repeats - state.missing
    return f", {there} of {state.repeats} repeats" if state.missing else ""


def _note(state: RunState) -> str:
    """Returns what else there is to say, on one line."""
    parts = [" ".join(state.cause.split())] if state.cause else []
    if state.job is not None:
        parts.insert(0, f"job {state.job}")
    if state.expected is not None:
        parts.append(f"expected to start {state.expected}")
    return ", ".join(parts)


def _line(row: tuple[str, ...], widths: Sequence[int], width: int | None) -> str:
    """Returns one line; the last column takes what is left of the screen."""
    *cells, note = row
    set_out = [
        cell.rjust(widths[i]) if i in _RIGHT else cell.ljust(widths[i])
        for i, cell in enumerate(cells)
    ]
    text = "  ".join(set_out)
    if width is not None:
        room = max(_NOTE_MIN, width - len(text) - 2)
        note = note if len(note) <= room else note[: room - 3] + "..."
    return f"{text}  {note}".rstrip()
