"""``hires status``: shows the state of runs as plain text, of 1,500 at once, for grep."""

from __future__ import annotations

import collections
import dataclasses
import json
import shutil
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Sequence

from hires.cli.options import JSON, Parser, flag, named_runs
from hires.cli.screens.printable import behind
from hires.cli.screens.screen import plural
from hires.core import streams, terminal, units
from hires.core.errors import INTERRUPTED, ConfigError
from hires.core.screen_table import screen_lines
from hires.core.text_table import aligned, folded, shortened
from hires.launcher.status.run_selection import select
from hires.launcher.status.run_state import DONE, PENDING, RUNNING, STATES, RunState
from hires.launcher.status.state import states
from hires.report.read.plain_values import listed

WATCH_S = 2.0
TITLES = ("run", "campaign", "state", "step", "left", "img/s", "peak", "attempt", "note")
_SIDES = "lllrrrrll"
_KEEP = ("state", "step", "left", "img/s", "note")
"""Columns that stay longest where the screen is narrow."""
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
    on_screen = args.watch and terminal.moves()
    try:
        while True:
            selection = select(args.names, args.results)
            shown = [*states(selection.paths), *selection.planned]
            height = shutil.get_terminal_size().lines if on_screen else None
            text = "no runs here; start one with `hires run`, or name a folder with --results"
            if args.json:
                runs = [dataclasses.asdict(state) for state in shown]
                text = json.dumps({"runs": runs}, indent=2, default=str)
            elif shown:
                table = lines(shown, terminal.columns(), height)
                text = "\n".join(table if len(shown) > 1 else table[:-1])
            if on_screen:
                behind(sys.stdout).write(_CLEAR)
            print(text, flush=True)
            if (
                streams.output_is_lost()
                or not args.watch
                or not any(state.state in (PENDING, RUNNING) for state in shown)
            ):
                return 0
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        if not args.watch:
            raise
        return INTERRUPTED


def lines(states: Sequence[RunState], width: int | None, height: int | None = None) -> list[str]:
    """Returns a table of runs, as many as the screen has lines, with a line that counts them."""
    room = len(states) if height is None else max(1, height - 5)
    shown = list(states)
    if len(states) > room:  # stable: in the order given, those that are done last
        shown = sorted(states, key=lambda state: state.state == DONE)[:room]
    rows = [TITLES, *map(_cells, shown)]
    if len(states) == 1 and width and max(map(len, aligned(rows))) > width:  # of one all is shown
        facts = [fact for fact in zip(*rows, strict=True) if fact[1] not in ("", "-")]
        return [*aligned(folded(facts, width), "ll"), count(states)]
    below: list[str] = []
    if width and max(map(len, aligned(rows))) > width:
        rows = [row[:-1] for row in rows]  # its notes, which say why, are lines below the table
        below = _notes(shown, width, None if height is None else room // 3)
        shown = shown[: len(states) if height is None else max(1, room - len(below))]
        rows = rows[: 1 + len(shown)]
    several = {"campaign"} if len({state.campaign for state in shown}) > 1 else set()
    names = TITLES[: len(rows[0])]
    keep = [names.index(n) for n in (*_KEEP[:3], *several, *_KEEP[3:]) if n in names]
    table, note = screen_lines(rows, width, _SIDES[: len(names)], names, keep)
    if len(shown) < len(states):
        table.append(f"... and {len(states) - len(shown)} more")
    return [*table, *note, *below, count(states)]


def _notes(states: Sequence[RunState], width: int, most: int | None) -> list[str]:
    """Returns the notes of runs as lines, equal ones once, causes before the numbers of jobs.

    With ``most`` each note is cut to one line, and no more lines come back.
    """
    runs: dict[str, list[str]] = {}
    for state in sorted(states, key=lambda state: not state.cause):
        if _note(state):
            runs.setdefault(_note(state), []).append(state.name)
    notes = [f"note: {listed(names, _MAX_NAMES)}: {note}" for note, names in runs.items()]
    kept = notes[: _MAX_NOTES if most is None else most]
    if most is None:
        lines = [line for note in kept for line in textwrap.wrap(note, width)]
    else:
        lines = [shortened(note, width) for note in kept]
    if len(notes) > len(kept) and most is None:
        lines.append(f"note: and {len(notes) - len(kept)} more, which --json lists")
    return lines


def count(states: Sequence[RunState]) -> str:
    """Returns how many runs are in which state."""
    counts = collections.Counter(state.state for state in states)
    parts = ", ".join(f"{counts[name]} {name}" for name in STATES if counts[name])
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
