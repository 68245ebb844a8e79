"""``hires status``: shows the state of runs."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence

from hires.cli.options import Parser
from hires.cli.screens.show_status import lines
from hires.core.errors import INTERRUPTED
from hires.launcher.status.run_selection import select
from hires.launcher.status.run_state import PENDING, RUNNING, RunState
from hires.launcher.status.state import states

WATCH_S = 2.0
"""How often ``--watch`` looks again."""
_CLEAR = "\x1b[H\x1b[2J"

_EXAMPLES = (
    "hires status                    all campaigns under results/",
    "hires status default --watch    one campaign, again and again, until nothing is left to do",
    "hires status 0123abcd --json    one run, by the beginning of its hash",
)


def parser() -> Parser:
    """Returns the parser of the verb."""
    text = "Show the state of runs: step, speed, memory, and why one waits or failed."
    parser = Parser("status", text, _EXAMPLES)
    parser.add_names()
    parser.add("--watch", action="store_true", help="look again every two seconds")
    parser.add_json()
    return parser


def main(words: Sequence[str]) -> int:
    """Prints the states of runs; returns 0, or 130 if Ctrl-C ended ``--watch``."""
    args = parser().read(words)
    try:
        _watch(args)
    except KeyboardInterrupt:
        if not args.watch:
            raise
        return INTERRUPTED
    return 0


def _watch(args: argparse.Namespace) -> None:
    """Prints the states, with ``--watch`` again and again until no run is pending or running."""
    on_screen = args.watch and sys.stdout.isatty() and not args.json
    while True:
        selection = select(args.names, args.results)
        shown = [*states(selection.paths), *selection.planned]
        if on_screen:
            print(_CLEAR, end="")
        _show(shown, args.json, shutil.get_terminal_size().lines if on_screen else None)
        sys.stdout.flush()
        if not args.watch or not any(state.state in (PENDING, RUNNING) for state in shown):
            return
        time.sleep(WATCH_S)


def _show(shown: Sequence[RunState], as_json: bool, height: int | None) -> None:
    if as_json:
        print(json.dumps({"runs": [state.to_dict() for state in shown]}, indent=2))
    elif not shown:
        print("no runs here; start one with `hires run`, or name a folder with --results")
    elif len(shown) == 1:
        print("\n".join(lines(shown, None, height)[:-1]))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(lines(shown, width, height)))
