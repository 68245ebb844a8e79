"""``hires retry``: run failed and lost points again as their next attempt."""

from __future__ import annotations

import functools
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.cli.choices import config_keys, groups
from hires.cli.options import (
    JSON,
    SHARED,
    TRUST_OWNER,
    Parser,
    chosen,
    named_runs,
    option,
)
from hires.cli.overrides import checked, parsed
from hires.cli.screen import print_json
from hires.cli.start_run import print_failure, submit, wait_for
from hires.cli.verbs.verb_status import count
from hires.cli.verbs.verb_status import repeats as lacking
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import INTERRUPTED, ConfigError, HiresError, RunError
from hires.core.registry import offer
from hires.core.store import attempts, campaign, records, rundir, trust
from hires.core.store.attempts import Attempt
from hires.core.store.ends import State
from hires.core.store.file_names import attempt_numbers, last_number
from hires.core.store.naming import COSMETIC, plain
from hires.launcher.interface import FrozenRun, SubmitOptions, launcher_of
from hires.launcher.status.running_elsewhere import exclusive_start, refuse_begun
from hires.launcher.status.state import RunState, select, states

RETRIED = tuple(state for state in State if state not in (State.RUNNING, State.INFEASIBLE))
"""States of runs that may be run again."""
FREE = [
    key
    for key in COSMETIC
    if key not in ("campaign", "results", "checkpoint.continues") and not key.startswith("cluster.")
]
"""Keys that a retry may change."""
States = dict[Path, RunState]
"""Run folder -> how the run ended."""
Seen = dict[Path, int | None]
"""Run folder -> its latest attempt when its state was read."""
PARSER = Parser(
    "retry",
    (
        "hires retry                                       all runs that failed or were lost",
        "hires retry mycampaign --state failed,cancelled   those of a campaign in these states",
        "hires retry 0123abcd --set comm.timeout_s=600     one run, with more patience",
    ),
    *named_runs(),
    option(
        "--state",
        "STATES",
        f"which ones, of {', '.join(RETRIED)} (default: failed,lost)",
        default="failed,lost",
    ),
    TRUST_OWNER,
    SHARED,
    option(
        "--set",
        "KEY=VALUE",
        "change a key that does not change the point, as comm.timeout_s",
        action="append",
        default=[],
    ),
    JSON,
)


def main(args: Namespace) -> int:
    """Runs points again: jobs are submitted, others run here, one after the other."""
    wanted = chosen("--state", args.state, RETRIED)
    paths = select(args.names, args.results).paths
    seen = {path: last_number(path) for path in paths}
    every = states(paths)
    # A run that is done may still lack repeats, which failed.
    lacks = State.FAILED in wanted
    ended = {s.path: s for s in every if s.path and (s.state in wanted or (lacks and s.missing))}
    code, frozen_runs, results = 0, list[FrozenRun](), list[dict[str, Any]]()
    for path, state in ended.items():  # all are checked before the first one starts
        try:
            trust.refuse_untrusted(path)
            config = records.read_config(path)
            records.read_plan(path)
        except HiresError as error:  # another hires wrote it, or it is damaged
            print(f"hires: {path.name} is left out: {error}", file=sys.stderr)
            results.append({"run": path.name, "why": str(error)})
            code = RunError.exit_code
            continue
        if args.set:
            config = with_keys(config, args.set, attempts.reproduce_line_of(path) or "hires run")
        frozen_runs.append(FrozenRun(path, None, config, max(1, state.missing)))
    if not ended and not args.json:
        print(f"nothing to retry: no run is {' or '.join(wanted)}")
        if every:
            print(count(every))
    here = [run for run in frozen_runs if not run.config.launcher.has_jobs]
    jobs = [run for run in frozen_runs if run.config.launcher.has_jobs]
    for name in sorted({run.config.launcher.name for run in jobs}):
        runs = [run for run in jobs if run.config.launcher.name == name]
        code = _submit(runs, ended, seen, args, results) or code
    code = _run_here(here, ended, seen, args, results) or code
    if args.json:
        print_json({"runs": results})
    return code


def with_keys(config: RunConfig, changes: Sequence[str], command: str) -> RunConfig:
    """Returns a config with some keys changed that leave its point as it is.

    For one that makes another point the error adds the change to the command that made the run.
    """
    values = plain(config)
    for change in changes:
        key, equals, _ = change.partition("=")
        if not equals or key not in config_keys():
            raise ConfigError(f"--set {change}: there is no key {key!r}; {offer(key, FREE)}")
        if key not in FREE:
            raise ConfigError(
                f"--set {change} makes another point, which is a run of its own: "
                f"`{command} {shlex.quote(change)}`; a retry may change {', '.join(FREE)}"
            )
        [word] = checked([change], groups())
        override = parsed(word)
        assert override is not None
        *sections, last = key.split(".")
        functools.reduce(dict.__getitem__, sections, values)[last] = override.value()
    return from_dict(values)


def _submit(
    runs: Sequence[FrozenRun], states: States, seen: Seen, args: Namespace,
    results: list[dict[str, Any]],
) -> int:  # fmt: skip
    configs = {run.path: run.config for run in runs}
    every = [Attempt(run.path, number) for run in runs for number in attempt_numbers(run.path)]
    latest = {(path, state.attempt) for path, state in states.items() if state.reason == "node"}
    failed = [
        attempt
        for attempt in every
        if (attempt.run, attempt.number) in latest
        or (attempt.exit is not None and attempt.exit.reason == "node")
    ]
    exclude = tuple(launcher_of(runs[0].config).avoided_nodes(failed, list(configs.values())))
    if exclude:
        print(f"not on {', '.join(exclude)}, where an attempt failed", file=sys.stderr)
    options = SubmitOptions(args.argv, exclude=exclude)
    submitted = submit(runs, options, lambda path: rundir.refreeze(path, configs[path]), seen)
    results += [{"run": one.path.name, "job": one.job, "why": one.why} for one in submitted]
    num_jobs = sum(one.job is not None for one in submitted)
    if not args.json:
        print(f"{num_jobs} of {len(runs)} runs submitted; `hires status` watches")
    return 0 if num_jobs == len(runs) else RunError.exit_code


def _run_here(
    runs: Sequence[FrozenRun], states: States, seen: Seen, args: Namespace,
    results: list[dict[str, Any]],
) -> int:  # fmt: skip
    code = 0
    turns = [run for run in runs for _ in range(run.attempts)]
    for number, turn in enumerate(turns, start=1):
        path, state = turn.path, states[turn.path]
        try:
            with campaign.starting([path.parent]):
                refuse_begun(path, seen[path])
                with exclusive_start(path):
                    rundir.refreeze(path, turn.config)
                    run = rundir.RunDir(path, attempts.next_attempt(path))
            seen[path] = run.attempt
            progress = f"{number} of {len(turns)}: {run.name}, attempt {run.attempt}"
            why = f": {' '.join(state.cause.split())}" if state.cause else ""
            print(f"{progress}; it was {state.state}{lacking(state)}{why}", file=sys.stderr)
            outcome = wait_for(turn.config, run, turn.ranks)
        except RunError as error:
            print(f"hires: {error}", file=sys.stderr)
            results.append({"run": path.name, "why": str(error)})
            code = RunError.exit_code
            continue
        print_failure(outcome, run)
        results.append({"run": run.name, "attempt": run.attempt, "state": outcome.state})
        if not args.json:  # the next run may take hours
            print(f"{run.name}: {outcome.state}", flush=True)
        code = code or outcome.exit_code
        if outcome.exit_code == INTERRUPTED:
            return INTERRUPTED
    return code
