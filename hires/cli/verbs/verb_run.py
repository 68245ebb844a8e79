"""``hires run``: one command from a config to throughput and memory tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hires.cli.compose.compose_config import compose
from hires.cli.options import AFTER, JSON, Parser, composing, flag
from hires.cli.planning import planned, require_feasible, with_classes
from hires.cli.screens.screen import print_config, print_record
from hires.cli.start_run import (
    begin_run,
    explain,
    print_job,
    wait_for,
    write_run,
)
from hires.core.store.file_names import last_number
from hires.core.store.records import done_attempt, read_record
from hires.core.store.rundir import run_path
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import spawn
from hires.report.tables.run_tables import write

_MANY = ("-m", "--multirun")
PARSER = Parser(
    "run",
    "Run an experiment and print its throughput and memory.",
    (
        "hires run                                        ResNet-50, one process, made-up images",
        "hires run parallel=sp+lp precision=bf16          tiles first, then a second stage",
        "hires run 'image=[480,640]' parallel=dp          quotes keep the shell off the brackets",
        "hires run data=folder data.path=data/textures    your own images",
        "hires run parallel=pp --cfg job                  only show the config",
        "hires run parallel=sp launcher=slurm --wait      as a Slurm job",
        "hires run parallel=sp launcher=slurm --dry-run   only write the scripts",
        "hires run steps=10000 checkpoint.every=500       saved; a crash costs 500 steps at most",
        "hires run -m parallel=sp,pp image=256,512        the same as hires sweep",
    ),
    *composing(),
    flag("--again", help="run even if it is complete already"),
    flag("--dry-run", help="write the run folder with its scripts, and stop"),
    flag("--wait", help="launcher=slurm: wait for the job, then print the tables"),
    *AFTER,
    flag(*_MANY, help="run a sweep, with the options of `hires sweep`"),
    JSON,
)


def main(words: Sequence[str]) -> int:
    """Runs an experiment, or shows it if it is complete; returns the exit code."""
    if any(word in _MANY for word in words):
        from hires.cli.verbs import verb_sweep

        return verb_sweep.main([word for word in words if word not in _MANY])
    args = PARSER.read(words)
    config = compose(args.overrides, args.config_dir)
    if args.cfg:
        return print_config(config)
    config = with_classes(config)
    after = launcher_of(config).dependency(args.after, args.after_any, config.results)
    path = run_path(config)
    if not args.again and done_attempt(path) is not None:
        print(f"complete since an earlier time: {path} (--again runs it anew)", file=sys.stderr)
        _print(path, args.json)
        return 0
    argv = ["hires", "run", *(word for word in words if word != "--dry-run")]
    if args.config_dir and not any(word.startswith("--config-dir") for word in words):
        argv += ["--config-dir", args.config_dir]  # HIRES_CONF may be unset where it is run again
    with spawn.warm(config.launcher.threads):
        seen = last_number(path)
        plan = planned(config)
        require_feasible(plan)
        if args.dry_run:
            print("\n".join(map(str, write_run(config, plan, argv))))
            return 0
        run, job = begin_run(config, plan, argv, seen=seen, after=after, again=args.again)
        if job is not None and not args.wait:
            print_job(config, run, job, args.json)
            return 0
        code = 0
        if not run.complete:  # by another command, while this one planned
            if job is not None:
                print(f"job {job}", file=sys.stderr)
            outcome = wait_for(config, run, plan.world, job)
            explain(outcome, run)
            code = outcome.exit_code
    _print(path, args.json)
    return code


def _print(path: Path, as_json: bool) -> None:
    """Prints the run's record, if it has one, and writes its tables into the folder."""
    record = read_record(path)
    if record is None:
        return
    write(path, record)
    if as_json:
        print(json.dumps(record, indent=2))
    elif record["state"] == "done":  # numbers of half a run would look like a result
        print_record(record)
