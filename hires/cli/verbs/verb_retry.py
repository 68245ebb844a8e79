"""``hires retry``: run what failed or was lost again, as the next attempt of the same points."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hires.cli.compose.nearest import offer
from hires.cli.compose.repeat_keys import free_keys, with_keys
from hires.cli.options import Parser
from hires.cli.screens.show_status import count, repeats
from hires.cli.start_run import explain, launched
from hires.cli.sweep.submission import submit
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError, RunError
from hires.core.store import attempts, campaign, records, rundir
from hires.core.store.file_names import last_number
from hires.core.store.rundir import RunDir
from hires.launcher.interface import (
    CANCELLED,
    FrozenRun,
    SubmitOptions,
    launcher_named,
    launcher_of,
)
from hires.launcher.status import running_elsewhere
from hires.launcher.status.run_selection import select
from hires.launcher.status.run_state import FAILED, INFEASIBLE, RUNNING, STATES, RunState
from hires.launcher.status.running_elsewhere import refuse_begun
from hires.launcher.status.state import states

Run = tuple[RunState, RunConfig]
"""How a point ended, and the config with which it is repeated."""
Seen = Mapping[Path, int | None]
"""The latest attempt of every run when it was looked at."""

_NEVER = (RUNNING, INFEASIBLE)
RETRIED = tuple(state for state in STATES if state not in _NEVER)
"""States of runs that may be run again."""

_EXAMPLES = (
    "hires retry                                       all runs that failed or were lost",
    "hires retry mycampaign --state failed,cancelled   those of a campaign in these states",
    "hires retry 0123abcd --set comm.timeout_s=600     one run, with more patience",
)


def parser() -> Parser:
    """Returns the parser of the verb."""
    text = "Run points again as their next attempt: same config, same plan, same run folder."
    parser = Parser("retry", text, _EXAMPLES)
    parser.add_names()
    text = f"which ones, of {', '.join(RETRIED)} (default: failed,lost)"
    parser.add("--state", default="failed,lost", metavar="STATES", complete=RETRIED, help=text)
    parser.add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        complete=[f"{key}=" for key in free_keys()],
        help="change a key that does not change the point, as comm.timeout_s",
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Runs points again: those of Slurm are submitted, others run here, one after the other."""
    args = parser().read(words)
    wanted = _wanted(args.state)
    paths = select(args.names, args.results).paths
    seen = {path: last_number(path) for path in paths}
    found = states(paths)
    chosen = [state for state in found if state.state in wanted or _lacks(state, wanted)]
    if not chosen:
        print(f"nothing to retry: no run is {' or '.join(wanted)}")
        if found:
            print(count(found))
        return 0
    # All are checked before the first one starts.
    runs = _readable(chosen, args.set)
    code = 0 if len(runs) == len(chosen) else RunError.exit_code
    for name in sorted({config.launcher.name for _, config in runs}):
        own = [run for run in runs if run[1].launcher.name == name]
        if launcher_named(name).has_jobs:
            code = _submit_all(own, seen, ["hires", "retry", *words]) or code
    here = [run for run in runs if not launcher_of(run[1]).has_jobs]
    return _run_all(here, seen) or code


def _lacks(state: RunState, wanted: Sequence[str]) -> bool:
    """Whether repeats of a run are to be made which failed, though the run itself is done."""
    return state.missing > 0 and FAILED in wanted


def _wanted(text: str) -> list[str]:
    """Returns the states that ``--state`` names."""
    wanted = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in wanted:
        if name in _NEVER:
            raise ConfigError(f"a run that is {name} cannot be run again; {offer('', RETRIED)}")
        if name not in RETRIED:
            raise ConfigError(f"unknown state {name!r}; {offer(name, RETRIED)}")
    if not wanted:
        raise ConfigError(f"--state names no state; {offer('', RETRIED)}")
    return wanted


def _readable(chosen: Sequence[RunState], changes: Sequence[str]) -> list[Run]:
    """Returns the runs that can be repeated; of the others, which an old hires made, it tells.

    Raises:
        ConfigError: ``changes`` make no sense.
    """
    found = []
    for state in chosen:
        assert state.path is not None
        try:
            config = records.read_config(state.path)
        except HiresError as error:
            print(f"hires: {state.path.name} is left out: {error}", file=sys.stderr)
            continue
        if changes:
            config = with_keys(config, changes, _command(state.path))
        found.append((state, config))
    return found


def _submit_all(runs: Sequence[Run], seen: Seen, argv: list[str]) -> int:
    """Submits the next attempts of points; returns 0 if all were submitted.

    Args:
        runs: how the points ended, and their configs.
        seen: the latest attempts when the points were looked at.
        argv: the command line as typed.
    """
    with campaign.starting(state.path.parent for state, _ in runs if state.path is not None):
        return _submit_alone(runs, seen, argv)


def _submit_alone(runs: Sequence[Run], seen: Seen, argv: list[str]) -> int:
    """Submits them while no other command can; the arguments are those of ``_submit_all``."""
    wanted, configs, code = [], {}, 0
    for state, config in runs:
        assert state.path is not None
        try:
            refuse_begun(state.path, seen[state.path])
            ranks = int(records.read_plan(state.path)["world"])
        except RunError as error:
            print(f"hires: {error}", file=sys.stderr)
            code = RunError.exit_code
            continue
        wanted.append(FrozenRun(state.path, None, ranks, config, max(1, state.missing)))
        configs[state.path] = config
    launcher = launcher_of(runs[0][1])
    exclude = launcher.avoided_nodes([state for state, _ in runs], [config for _, config in runs])
    if exclude:
        print(f"not on {', '.join(exclude)}, where an attempt failed", file=sys.stderr)
    options = SubmitOptions(argv, exclude=tuple(exclude))
    found = submit(wanted, options, lambda path: rundir.refreeze(path, configs[path]))
    jobs = [one for one in found if one.job is not None]
    print(f"{len(jobs)} of {len(runs)} runs submitted; `hires status` watches")
    return code if len(jobs) == len(found) else RunError.exit_code


def _run_all(chosen: Sequence[Run], seen: Seen) -> int:
    """Runs points one after the other, each as often as it lacks attempts; returns the code."""
    code, own = 0, dict(seen)
    todo = [run for run in chosen for _ in range(max(1, run[0].missing))]
    for number, (state, config) in enumerate(todo, start=1):
        assert state.path is not None
        try:
            run = _next(state.path, config, own)
            own[state.path] = run.attempt
            told = f"{number} of {len(todo)}: {run.name}, attempt {run.attempt}"
            print(f"{told}; it was {state.state}{repeats(state)}", file=sys.stderr)
            outcome = launched(config, run, int(records.read_plan(run.path)["world"]))
        except RunError as error:
            print(f"hires: {error}", file=sys.stderr)
            code = RunError.exit_code
            continue
        explain(outcome, run)
        print(f"{run.name}: {outcome.state}")
        code = code or outcome.exit_code
        if outcome.exit_code == CANCELLED:
            return CANCELLED
    return code


def _next(path: Path, config: RunConfig, seen: Seen) -> RunDir:
    """Returns a run with a fresh attempt, its config frozen anew if it has changed."""
    with campaign.starting([path.parent]):
        refuse_begun(path, seen[path])
        with running_elsewhere.alone(path, None, None):
            rundir.refreeze(path, config)
            return RunDir(path, attempts.next_attempt(path), complete=False)


def _command(path: Path) -> str:
    """Returns the command line that makes a run."""
    return attempts.reproduce_line_of(path) or "hires run ..."
