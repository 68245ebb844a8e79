"""``hires cancel``: stop runs: ranks end as after Ctrl-C, Slurm's jobs are cancelled."""

from __future__ import annotations

import sys
import time
from argparse import Namespace

from hires.cli.options import JSON, Parser, named_runs
from hires.cli.screen import print_json
from hires.core.errors import ConfigError, RunError
from hires.core.store import campaign
from hires.core.store.ends import State
from hires.launcher.status import running_elsewhere
from hires.launcher.status.state import select, states

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
    selection = select(args.names, args.results)
    sweeps: list[dict[str, object]] = []
    runs: list[dict[str, object]] = []

    def tell(name: str, message: str, stopped: bool) -> None:
        if not stopped:
            print(f"hires: {message}", file=sys.stderr)
        elif not args.json:
            print(f"{name}: {message}", flush=True)

    for folder in selection.campaigns:
        if campaign.stop(folder):  # its sweep starts nothing more
            deadline = time.monotonic() + running_elsewhere.WAIT_S
            while campaign.is_locked(folder) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            stopped = not campaign.is_locked(folder)
            text = "its sweep starts nothing more, and has ended"
            if not stopped:
                pid = campaign.sweep_process(folder).get("pid")
                text = (
                    f"{folder.name}: its sweep, process {pid} was asked to end, and has not ended "
                    f"within {running_elsewhere.WAIT_S:g} s; `kill {pid}`"
                )
            tell(folder.name, text, stopped)
            sweeps.append({"campaign": folder.name, "stopped": stopped, "message": text})
    all_states = states(selection.paths)
    live = [state for state in all_states if state.state in (State.PENDING, State.RUNNING)]
    # Pending runs are cancelled first, so that none starts in the place of one that was stopped.
    order = sorted(live or all_states[:1], key=lambda state: state.state != State.PENDING)
    for state, message, stopped in running_elsewhere.cancel_all(order):
        tell(state.name, message, stopped)
        runs.append({"run": state.name, "stopped": stopped, "message": message})
    if args.json:
        now = states([state.path for state in order if state.path])
        named = {state.name: state.state for state in now}
        runs = [{**one, "state": named[str(one["run"])]} for one in runs]
        print_json({"sweeps": sweeps, "runs": runs})
    return 0 if all(one["stopped"] for one in [*sweeps, *runs]) else RunError.exit_code
