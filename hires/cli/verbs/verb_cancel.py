"""``hires cancel``: stop runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hires.cli.options import Parser, add_results
from hires.core.errors import ConfigError, RunError
from hires.core.store import campaign
from hires.launcher.cancel import WAIT_S, cancel_all
from hires.launcher.status.run_selection import select
from hires.launcher.status.run_state import PENDING, RUNNING
from hires.launcher.status.state import states

_EXAMPLES = (
    "hires cancel 0123abcd           one run, by the beginning of its hash",
    "hires cancel mycampaign         all runs of a campaign that wait or run, and its sweep",
)

_POLL_S = 0.1


def main(words: Sequence[str]) -> int:
    """Stops runs; returns 0 if none that runs is left, 1 if some could not be stopped."""
    text = "Stop runs: the launcher is told as by Ctrl-C, a job's scheduler as by scancel."
    parser = Parser("cancel", text, _EXAMPLES)
    parser.add_argument("names", nargs="*", metavar="CAMPAIGN|RUN", help="what to stop")
    add_results(parser)
    args = parser.read(words)
    if not args.names:
        raise ConfigError("name the runs or campaigns to cancel; `hires status` shows them")
    chosen = select(args.names, args.results)
    for folder in chosen.campaigns:
        _stop_sweep(folder)
    found = states(chosen.paths)
    live = [state for state in found if state.state in (PENDING, RUNNING)]
    failed = False
    # Those that wait go first: none of them begins in the place of one that was stopped.
    order = sorted(live or found[:1], key=lambda state: state.state != PENDING)
    for state, told, good in cancel_all(order):
        if good:
            print(f"{state.name}: {told}")
        else:
            failed = True
            print(f"hires: {told}", file=sys.stderr)
    return RunError.exit_code if failed else 0


def _stop_sweep(folder: Path) -> None:
    """Tells the sweep of a campaign to start nothing more, and waits until it has stopped."""
    if not campaign.stop(folder):
        return
    deadline = time.monotonic() + WAIT_S
    while campaign.is_locked(folder) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    how = "has yet to say so" if campaign.is_locked(folder) else "has ended"
    print(f"{folder.name}: its sweep was told to start nothing more, and {how}")
