"""``hires run``: one command from a config to throughput and memory tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hires.cli.compose.compose_config import compose
from hires.cli.options import Parser, command_line
from hires.cli.prepare import planned, require_feasible, with_classes
from hires.cli.screens.screen import print_config, print_record
from hires.cli.start_run import explain, launched, warn_of_checkpoints
from hires.cli.submit_run import tell, waited, waits_for
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store.campaign import starting
from hires.core.store.file_names import last_number
from hires.core.store.naming import run_name
from hires.core.store.records import read_record
from hires.core.store.rundir import RunDir, create, freeze, is_complete, open_run
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import spawn
from hires.launcher.status import running_elsewhere
from hires.launcher.status.running_elsewhere import refuse_begun, refuse_queued
from hires.report.tables.run_tables import write

_EXAMPLES = (
    "hires run                                        ResNet-50, one process, made-up images",
    "hires run parallel=sp+lp precision=bf16          tiles first, then a second stage",
    "hires run 'image=[480,640]' parallel=dp          quotes keep the shell off the brackets",
    "hires run data=folder data.path=data/textures    your own images",
    "hires run parallel=pp --cfg job                  only show the config",
    "hires run parallel=sp launcher=slurm --wait      as a Slurm job",
    "hires run parallel=sp launcher=slurm --dry-run   only write the scripts",
    "hires run steps=10000 checkpoint.every=500       saved; the same line goes on after a crash",
    "hires run -m parallel=sp,pp image=256,512        the same as hires sweep",
)
_MANY = ("-m", "--multirun")


def parser() -> Parser:
    """Returns the parser of the verb."""
    parser = Parser("run", "Run an experiment and print its throughput and memory.", _EXAMPLES)
    parser.add_overrides()
    parser.add("--again", action="store_true", help="run even if it is complete already")
    text = "write the run folder with its scripts, and stop"
    parser.add("--dry-run", action="store_true", help=text)
    text = "launcher=slurm: wait for the job, then print the tables"
    parser.add("--wait", action="store_true", help=text)
    parser.add_after()
    parser.add(*_MANY, action="store_true", help="run a sweep, with the options of `hires sweep`")
    parser.add_json()
    return parser


def main(words: Sequence[str]) -> int:
    """Runs an experiment, or shows it if it is complete; returns the exit code."""
    if any(word in _MANY for word in words):
        from hires.cli.verbs import verb_sweep

        return verb_sweep.main([word for word in words if word not in _MANY])
    args = parser().read(words)
    config = compose(args.overrides, args.config_dir)
    if args.cfg:
        return print_config(config)
    config = with_classes(config)
    after = waits_for(config, args)
    run = None if args.again else _complete(config)
    if run is not None:
        print(f"complete since an earlier time: {run.path} (--again runs it anew)", file=sys.stderr)
        _print(run, args.json)
        return 0
    kept = [word for word in words if word != "--dry-run"]
    with spawn.warm(config.launcher.threads):
        return _start(config, command_line("run", kept, args), args, after)


def _complete(config: RunConfig) -> RunDir | None:
    """Returns the run if it was completed earlier, so that nothing needs to be traced."""
    try:
        run = open_run(_path(config))
    except RunError:
        return None
    return run if run.complete else None


def _path(config: RunConfig) -> Path:
    """Returns the place of the run's folder."""
    return Path(config.results).absolute() / config.campaign / run_name(config)


def _start(config: RunConfig, argv: list[str], args: argparse.Namespace, after: str | None) -> int:
    """Plans, freezes and runs; returns the exit code."""
    seen = last_number(_path(config))
    launcher = launcher_of(config)
    plan = planned(config)
    require_feasible(plan)
    if args.dry_run:
        with starting([_path(config).parent]):
            refuse_queued(_path(config))
            with running_elsewhere.alone(_path(config), None, None):
                path = freeze(config, plan.to_dict(), argv)
        print(f"run folder: {path}", file=sys.stderr)
        scripts = launcher.write_scripts(path, config, plan.world, argv)
        print("\n".join(map(str, scripts)))
        return 0
    job = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(starting([_path(config).parent]))
        refuse_queued(_path(config))
        if args.again or not is_complete(_path(config)):
            refuse_begun(_path(config), seen)
            stack.enter_context(running_elsewhere.alone(_path(config), None, None))
        run = create(config, plan.to_dict(), argv, again=args.again)
        if not run.complete:  # another process may have completed it since we looked
            launcher.write_scripts(run.path, config, plan.world, argv)
            print(f"run folder: {run.path}", file=sys.stderr)
            job = launcher.submit(run, config, after)
    if run.complete:
        _print(run, args.json)
        return 0
    if job is None:
        outcome = launched(config, run, plan.world)
    else:
        if not args.wait:
            tell(launcher, run, job, args.json)
            return 0
        print(f"job {job}", file=sys.stderr)
        outcome = waited(launcher, config, run, job, plan.world)
    warn_of_checkpoints(run)
    explain(outcome, run)
    _print(run, args.json)
    return outcome.exit_code


def _print(run: RunDir, as_json: bool) -> None:
    """Prints the run's record, if it has one, and writes its tables into the folder."""
    record = read_record(run.path)
    if record is None:
        return
    write(run.path, record)
    if as_json:
        print(json.dumps(record, indent=2))
    elif record["state"] == "done":  # numbers of half a run would look like a result
        print_record(record)
