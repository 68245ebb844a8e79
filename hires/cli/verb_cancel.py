"""``hires cancel``: stop runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hires.cli.options import Parser, add_results
from hires.core.errors import ConfigError, RunError
from hires.launcher.cancel import cancel_all
from hires.launcher.points import select
from hires.launcher.state import PENDING, RUNNING, states

_EXAMPLES = (
    "hires cancel 0123abcd           one run, by the beginning of its hash",
    "hires cancel mycampaign         all runs of a campaign that wait or run",
)


def main(words: Sequence[str]) -> int:
    """Stops runs; returns 0 if none that runs is left, 1 if some could not be stopped."""
    text = "Stop runs: the launcher is told as by Ctrl-C, a job's scheduler as by scancel."
    parser = Parser("cancel", text, _EXAMPLES)
    parser.add_argument("names", nargs="*", metavar="CAMPAIGN|RUN", help="what to stop")
    add_results(parser)
    args = parser.read(words)
    if not args.names:
        raise ConfigError("name the runs or campaigns to cancel; `hires status` shows them")
    found = states(select(args.names, args.results).paths)
    live = [state for state in found if state.state in (PENDING, RUNNING)]
    failed = False
    # Those that wait go first: none of them begins in the place of one that was stopped.
    chosen = sorted(live or found[:1], key=lambda state: state.state != PENDING)
    for state, told, good in cancel_all(chosen):
        if good:
            print(f"{state.name}: {told}")
        else:
            failed = True
            print(f"hires: {told}", file=sys.stderr)
    return RunError.exit_code if failed else 0
