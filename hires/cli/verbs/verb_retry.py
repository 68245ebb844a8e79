"""``hires retry``: runs failed and lost points again, as the next attempt of the same runs."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from hires.cli.compose.choices import config_keys
from hires.cli.options import Parser, chosen, named_runs, option
from hires.cli.start_run import explain, submit, wait_for
from hires.cli.verbs.verb_status import count, repeats
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, HiresError, RunError
from hires.core.registry import offer
from hires.core.store import attempts, campaign, records, rundir
from hires.core.store.file_names import last_number
from hires.core.store.naming import COSMETIC, identity, plain
from hires.launcher.interface import CANCELLED, FrozenRun, SubmitOptions, launcher_of
from hires.launcher.status.run_selection import select
from hires.launcher.status.run_state import FAILED, INFEASIBLE, RUNNING, STATES, RunState
from hires.launcher.status.running_elsewhere import alone, refuse_begun
from hires.launcher.status.state import states

_NEVER = (RUNNING, INFEASIBLE)
RETRIED = tuple(state for state in STATES if state not in _NEVER)
"""States of runs that may be run again."""
_PLACES = ("campaign", "results")
"""Cosmetic keys that say where a run is kept."""
FREE = [key for key in COSMETIC if key not in _PLACES]
"""Keys that a retry may change."""
PARSER = Parser(
    "retry",
    "Run points again as their next attempt: same config, same plan, same run folder.",
    (
        "hires retry                                       all runs that failed or were lost",
        "hires retry mycampaign --state failed,cancelled   those of a campaign in these states",
        "hires retry 0123abcd --set comm.timeout_s=600     one run, with more patience",
    ),
    *named_runs(),
    option(
        "--state",
        default="failed,lost",
        metavar="STATES",
        complete=RETRIED,
        help=f"which ones, of {', '.join(RETRIED)} (default: failed,lost)",
    ),
    option(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        complete=[f"{key}=" for key in FREE],
        help="change a key that does not change the point, as comm.timeout_s",
    ),
)


@dataclass(frozen=True)
class _Repeat:
    """A point that is to be run again."""

    path: Path
    state: RunState
    """How it ended."""
    config: RunConfig
    """With the changes of ``--set``."""
    seen: int | None
    """Its latest attempt when its state was read."""

    @property
    def attempts(self) -> int:
        """How many complete attempts it lacks."""
        return max(1, self.state.missing)

    @property
    def world(self) -> int:
        """Its number of ranks."""
        return int(records.read_plan(self.path)["world"])


def main(words: Sequence[str]) -> int:
    """Runs points again: jobs are submitted, others run here, one after the other."""
    args = PARSER.read(words)
    wanted = chosen("--state", args.state, STATES)
    for name in wanted:
        if name in _NEVER:
            raise ConfigError(
                f"a run that is {name} cannot be run again; choose one of {', '.join(RETRIED)}"
            )
    paths = select(args.names, args.results).paths
    seen = {path: last_number(path) for path in paths}
    all_states = states(paths)
    # A run that is done may still lack repeats, which failed.
    ended = [s for s in all_states if s.state in wanted or (s.missing > 0 and FAILED in wanted)]
    if not ended:
        print(f"nothing to retry: no run is {' or '.join(wanted)}")
        if all_states:
            print(count(all_states))
        return 0
    here: list[_Repeat] = []
    jobs: dict[str, list[_Repeat]] = {}
    code = 0
    for state in ended:  # all are checked before the first one starts
        assert state.path is not None
        try:
            config = records.read_config(state.path)
        except HiresError as error:  # an older hires wrote it
            print(f"hires: {state.path.name} is left out: {error}", file=sys.stderr)
            code = RunError.exit_code
            continue
        if args.set:
            command = attempts.reproduce_line_of(state.path) or "hires run ..."
            config = with_keys(config, args.set, command)
        launcher = launcher_of(config)
        group = jobs.setdefault(config.launcher.name, []) if launcher.has_jobs else here
        group.append(_Repeat(state.path, state, config, seen[state.path]))
    for _, runs in sorted(jobs.items()):
        with campaign.starting(run.path.parent for run in runs):
            code = _submit(runs, ["hires", "retry", *words]) or code
    return _run_here(here) or code


def with_keys(config: RunConfig, changes: Sequence[str], command: str) -> RunConfig:
    """Returns a config with some keys changed that leave its point as it is.

    Raises:
        ConfigError: a key is unknown, its value has the wrong type, or it makes another point, for
            which the error adds the change to the command that made the run.
    """
    values = plain(config)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in config_keys():
            raise ConfigError(f"--set {change}: there is no key {key!r}; {offer(key, FREE)}")
        if key in _PLACES:
            raise ConfigError(
                f"--set {change} would keep the run elsewhere; run it there with "
                f"`{command} {shlex.quote(change)}`"
            )
        *sections, last = key.split(".")
        section = functools.reduce(dict.__getitem__, sections, values)
        try:
            section[last] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(
                f"--set {change}: the value cannot be read; put text in quotes"
            ) from None
    changed = from_dict(values)
    if identity(plain(changed)) != identity(plain(config)):
        other = [c for c in changes if c.partition("=")[0] not in FREE]
        raise ConfigError(
            f"--set {' '.join(other)} makes another point, which is a run of its own: "
            f"`{command} {shlex.join(other)}`; a retry may change {', '.join(FREE)}"
        )
    return changed


def _submit(runs: Sequence[_Repeat], argv: list[str]) -> int:
    """Submits the next attempts of points of one launcher; returns 0 if all were submitted."""
    frozen, code = [], 0
    for run in runs:
        try:
            refuse_begun(run.path, run.seen)
            frozen.append(FrozenRun(run.path, None, run.world, run.config, run.attempts))
        except RunError as error:
            print(f"hires: {error}", file=sys.stderr)
            code = RunError.exit_code
    ends, configs = [run.state for run in runs], {run.path: run.config for run in runs}
    exclude = launcher_of(runs[0].config).avoided_nodes(ends, list(configs.values()))
    if exclude:
        print(f"not on {', '.join(exclude)}, where an attempt failed", file=sys.stderr)
    options = SubmitOptions(argv, exclude=tuple(exclude))
    submitted = submit(frozen, options, lambda path: rundir.refreeze(path, configs[path]))
    jobs = [one for one in submitted if one.job is not None]
    print(f"{len(jobs)} of {len(runs)} runs submitted; `hires status` watches")
    return code if len(jobs) == len(submitted) else RunError.exit_code


def _run_here(runs: Sequence[_Repeat]) -> int:
    """Runs points one after the other, each as often as it lacks attempts; returns the code."""
    code = number = 0
    total = sum(run.attempts for run in runs)
    for repeat in runs:
        seen = repeat.seen
        for _ in range(repeat.attempts):
            number += 1
            try:
                with campaign.starting([repeat.path.parent]):
                    refuse_begun(repeat.path, seen)
                    with alone(repeat.path):
                        rundir.refreeze(repeat.path, repeat.config)
                        run = rundir.RunDir(repeat.path, attempts.next_attempt(repeat.path))
                seen, state = run.attempt, repeat.state
                progress = f"{number} of {total}: {run.name}, attempt {run.attempt}"
                print(f"{progress}; it was {state.state}{repeats(state)}", file=sys.stderr)
                outcome = wait_for(repeat.config, run, repeat.world)
            except RunError as error:
                print(f"hires: {error}", file=sys.stderr)
                code = RunError.exit_code
                continue
            explain(outcome, run)
            print(f"{repeat.path.name}: {outcome.state}")
            code = code or outcome.exit_code
            if outcome.exit_code == CANCELLED:
                return CANCELLED
    return code
