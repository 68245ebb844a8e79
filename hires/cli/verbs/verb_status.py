"""``hires status``: show the state of runs: step, speed, memory, and why one waits or failed."""

from __future__ import annotations

import collections
import dataclasses
import shutil
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Sequence

from hires.cli.options import JSON, Parser, flag, named_runs
from hires.cli.screen import plural, print_json, print_lines, table_lines
from hires.core import streams, units
from hires.core.errors import INTERRUPTED, ConfigError
from hires.core.store.ends import State
from hires.core.store.reading import printable
from hires.core.streams import behind
from hires.core.units import listed
from hires.launcher.status.state import RunState, select, states

WATCH_S = 2.0
TITLES = ("run", "campaign", "state", "step", "left", "img/s", "peak", "attempt", "note")
_SIDES = "lllrrrrll"
_MAX_NOTES = 20  # below a table that has no room for them
_MAX_NAMES = 2  # runs that one note names
_CLEAR = "\x1b[H\x1b[2J"
_EXAMPLES = (
    "hires status                    all campaigns under results/",
    "hires status default --watch    one campaign, again and again, until nothing is left to do",
    "hires status 0123abcd --json    one run, by the beginning of its hash",
)
PARSER = Parser(
    "status", _EXAMPLES, *named_runs(), flag("--watch", "look again every two seconds"), JSON
)


def main(args: Namespace) -> int:
    """Prints the states of runs; returns 0, or 130 if Ctrl-C ended ``--watch``."""
    if args.watch and args.json:
        raise ConfigError("--watch prints again and again, and --json one object; leave one out")
    on_screen = args.watch and streams.moves()
    try:
        while True:
            selection = select(args.names, args.results)
            shown = [*states(selection.paths), *selection.planned]
            shown.sort(key=lambda state: on_screen and state.state == State.DONE)  # stable
            if args.json:
                print_json({"runs": [dataclasses.asdict(state) for state in shown]})
                return 0
            none = "no runs here; start one with `hires run`, or name a folder with --results"
            table = lines(shown) if shown else [none]
            if on_screen:
                behind(sys.stdout).write(_CLEAR)
                height = shutil.get_terminal_size().lines - 2
                if len(table) > height:
                    more = f"... {len(table) - height} more lines"
                    table = [*table[: height - 1], more, table[-1]]
            print_lines(table)
            if (
                streams.output_is_lost()
                or not args.watch
                or not any(state.state in (State.PENDING, State.RUNNING) for state in shown)
            ):
                return 0
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        if not args.watch:
            raise
        return INTERRUPTED


def lines(states: Sequence[RunState]) -> list[str]:
    """Returns a table of runs, those that are done last, and a line that counts several.

    On a screen the notes of runs, which say why one waits or failed, stand below their table.
    """
    width, rows = streams.columns(), [_cells(state) for state in states]
    total = [count(states)] if len(states) > 1 else []
    if width is None:
        return [*table_lines([TITLES, *rows], _SIDES), *total]
    if len(rows) == 1:
        return table_lines([TITLES, *rows], _SIDES)
    table = table_lines([row[:-1] for row in (TITLES, *rows)], _SIDES[:-1])
    notes: dict[str, list[str]] = {}
    for state in sorted(states, key=lambda state: not state.cause):
        if note := _note(state):
            notes.setdefault(note, []).append(state.name)
    for note, names in [*notes.items()][:_MAX_NOTES]:
        table += textwrap.wrap(printable(f"note: {listed(names, _MAX_NAMES)}: {note}"), width)
    if len(notes) > _MAX_NOTES:
        table.append(f"note: and {len(notes) - _MAX_NOTES} more, which --json lists")
    return [*table, *total]


def count(states: Sequence[RunState]) -> str:
    """Returns how many runs are in which state."""
    counts = collections.Counter(state.state for state in states)
    parts = ", ".join(f"{counts[name]} {name}" for name in State if counts[name])
    return f"{plural(len(states), 'run')}: {parts}"


def repeats(state: RunState) -> str:
    """Returns how many repeats of a run there are, if some are missing."""
    complete = state.repeats - state.missing
    return f", {complete} of {state.repeats} repeats" if state.missing else ""


def _cells(state: RunState) -> tuple[str, ...]:
    return (
        state.name,
        state.campaign,
        state.state + (f" ({state.reason})" if state.reason else "") + repeats(state),
        f"{state.step}/{state.steps}" if state.steps else "-",
        "-" if state.left_s is None else units.rough(state.left_s),
        "-" if state.img_per_s is None else f"{state.img_per_s:.4g}",
        "-" if state.peak_bytes is None else units.size(state.peak_bytes),
        "-" if state.attempt is None else f"a{state.attempt}",
        _note(state),
    )


def _note(state: RunState) -> str:
    notes = [] if state.job is None else [f"job {state.job}"]
    if state.cause:
        notes.append(" ".join(state.cause.split()))
    if state.expected is not None:
        notes.append(f"expected to start {state.expected}")
    return ", ".join(notes)
