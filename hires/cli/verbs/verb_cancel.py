"""``hires cancel``: stop runs: ranks end as after Ctrl-C, Slurm's jobs are cancelled."""

from __future__ import annotations

import sys
import time
from argparse import Namespace

from hires.cli.options import JSON, Parser, named_runs
from hires.cli.screens.screen import print_json
from hires.core.errors import ConfigError, RunError
from hires.core.store import campaign
from hires.core.store.ends import State
from hires.launcher import cancel
from hires.launcher.status.run_selection import select
from hires.launcher.status.state import states

_POLL_S = 0.1
PARSER = Parser(
    "cancel",
    (
        "hires cancel 0123abcd           one run, by the beginning of its hash",
        "hires cancel mycampaign         all runs of a campaign that wait or run, and its sweep",
    ),
    *named_runs("what to stop"),
    JSON,
)


def main(args: Namespace) -> int:
    """Stops runs; returns 0 if none is left running, 1 if some could not be stopped."""
    if not args.names:
        raise ConfigError("name the runs or campaigns to cancel; `hires status` shows them")
    selection, code, ended = select(args.names, args.results), 0, list[str]()
    for folder in selection.campaigns:
        if campaign.stop(folder):  # its sweep starts nothing more
            deadline = time.monotonic() + cancel.WAIT_S
            while campaign.is_locked(folder) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if campaign.is_locked(folder):
                code, pid = RunError.exit_code, campaign.sweep_process(folder).get("pid")
                text = (
                    f"process {pid} was asked to end, and has not ended within {cancel.WAIT_S:g} s"
                )
                print(f"hires: {folder.name}: its sweep, {text}; `kill {pid}`", file=sys.stderr)
            else:
                ended.append(f"{folder.name}: its sweep starts nothing more, and has ended")
    all_states = states(selection.paths)
    live = [state for state in all_states if state.state in (State.PENDING, State.RUNNING)]
    # Pending runs are cancelled first, so that none starts in the place of one that was stopped.
    order = sorted(live or all_states[:1], key=lambda state: state.state != State.PENDING)
    for state, message, stopped in cancel.cancel_all(order):
        if stopped:
            ended.append(f"{state.name}: {message}")
        else:
            code = RunError.exit_code
            print(f"hires: {message}", file=sys.stderr)
    if args.json:
        print_json({"ended": ended, "all": code == 0})
    else:
        print("".join(f"{line}\n" for line in ended), end="")
    return code
