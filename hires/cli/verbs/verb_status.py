"""``hires status``: how are the runs doing?"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence

from hires.cli.options import Parser, add_json, add_results
from hires.cli.screens.show_status import lines
from hires.launcher.status.run_selection import select
from hires.launcher.status.run_state import PENDING, RUNNING, RunState
from hires.launcher.status.state import states

INTERRUPTED = 130
WATCH_S = 2.0
"""How often ``--watch`` looks again."""
_CLEAR = "\x1b[H\x1b[2J"

_EXAMPLES = (
    "hires status                    all campaigns under results/",
    "hires status default --watch    one campaign, again and again, until nothing is left to do",
    "hires status 0123abcd --json    one run, by the beginning of its hash",
)


def main(words: Sequence[str]) -> int:
    """Prints the states of runs; returns 0, whatever they are."""
    text = "Show how runs are doing: state, step, speed, memory, and why one waits or failed."
    parser = Parser("status", text, _EXAMPLES)
    parser.add_argument("names", nargs="*", metavar="CAMPAIGN|RUN", help="unset: all campaigns")
    parser.add_argument("--watch", action="store_true", help="look again every two seconds")
    add_results(parser)
    add_json(parser)
    args = parser.read(words)
    if not args.watch:
        _show(_states(args.names, args.results), args.json)
        return 0
    try:
        return _watch(args.names, args.results, args.json)
    except KeyboardInterrupt:
        return INTERRUPTED


def _watch(names: Sequence[str], results: str, as_json: bool) -> int:
    """Prints the states until no run is pending or running; returns 0."""
    on_screen = sys.stdout.isatty() and not as_json
    while True:
        found = _states(names, results)
        if on_screen:
            print(_CLEAR, end="")
        _show(found, as_json, shutil.get_terminal_size().lines if on_screen else None)
        sys.stdout.flush()
        if not any(state.state in (PENDING, RUNNING) for state in found):
            return 0
        time.sleep(WATCH_S)


def _states(names: Sequence[str], results: str) -> list[RunState]:
    """Returns the states of what the names mean."""
    chosen = select(names, results)
    return [*states(chosen.paths), *chosen.planned]


def _show(found: Sequence[RunState], as_json: bool, height: int | None = None) -> None:
    """Prints the states."""
    if as_json:
        print(json.dumps({"runs": [state.to_dict() for state in found]}, indent=2))
    elif not found:
        print("no runs here; start one with `hires run`, or name a folder with --results")
    elif len(found) == 1:
        print("\n".join(lines(found, None, height)[:-1]))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(lines(found, width, height)))
