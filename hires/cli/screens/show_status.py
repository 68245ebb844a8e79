"""Shows the states of many runs as a table.

Plain text in columns: a table of 1,500 rows is ready at once, and can be searched with grep.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from hires.cli.screens.notes import plural
from hires.core import units
from hires.core.text_table import aligned
from hires.launcher.status.run_state import DONE, STATES, RunState

TITLES = ("run", "state", "step", "img/s", "peak", "attempt", "")
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
    table = aligned([TITLES, *map(_cells, shown)], "llrrrll")
    if width is not None:  # the note, which is last, takes what is left of the screen
        most = max(width, len(table[0]) + 2 + _NOTE_MIN)
        table = [line if len(line) <= most else f"{line[: most - 3]}..." for line in table]
    if left_out:
        table.append(f"... and {left_out} more")
    return [*table, count(states)]


def count(states: Sequence[RunState]) -> str:
    """Returns how many runs are in which state."""
    counts = collections.Counter(state.state for state in states)
    parts = ", ".join(f"{counts[name]} {name}" for name in STATES if counts[name])
    return f"{plural(len(states), 'run')}: {parts}"


def _that_fit(states: Sequence[RunState], height: int | None) -> tuple[Sequence[RunState], int]:
    """Returns the runs that fit on the screen, and how many do not."""
    room = len(states) if height is None else max(1, height - 4)
    if len(states) <= room:
        return states, 0
    first = [state for state in states if state.state != DONE]
    kept = (first + [state for state in states if state.state == DONE])[:room]
    return kept, len(states) - room


def _cells(state: RunState) -> tuple[str, ...]:
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
    """Returns how many repeats of a run there are, if some are missing."""
    complete = state.repeats - state.missing
    return f", {complete} of {state.repeats} repeats" if state.missing else ""


def _note(state: RunState) -> str:
    parts = [" ".join(state.cause.split())] if state.cause else []
    if state.job is not None:
        parts.insert(0, f"job {state.job}")
    if state.expected is not None:
        parts.append(f"expected to start {state.expected}")
    return ", ".join(parts)
