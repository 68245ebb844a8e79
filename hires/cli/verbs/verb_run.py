"""``hires run``: one command from a config to throughput and memory tables."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hires.cli.compose.compose_config import compose
from hires.cli.options import AFTER, JSON, Parser, composing, flag
from hires.cli.planning import planned, require_feasible, with_classes
from hires.cli.screens.screen import print_config, print_record
from hires.cli.start_run import explain, wait_for
from hires.core.config.run_config import RunConfig
from hires.core.store import campaign, rundir
from hires.core.store.file_names import last_number
from hires.core.store.records import done_attempt, read_record
from hires.core.store.rundir import RunDir, run_path
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import spawn
from hires.launcher.status import running_elsewhere
from hires.plan.plan import Plan
from hires.report.tables import write

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
    launcher, path = launcher_of(config), run_path(config)
    after = launcher.dependency(args.after, args.after_any, config.results)
    if not args.again and done_attempt(path) is not None:
        print(f"complete since an earlier time: {path} (--again runs it anew)", file=sys.stderr)
        _print(path, args.json)
        return 0
    argv = ["hires", "run", *(word for word in words if word != "--dry-run")]
    if args.config_dir and not any(word.startswith("--config-dir") for word in words):
        argv += ["--config-dir", args.config_dir]  # HIRES_CONF may be unset where it is run again
    code = 0
    with spawn.warm(config.launcher.threads):
        seen = last_number(path)
        plan = planned(config)
        require_feasible(plan)
        begun = _begin(config, plan, argv, args, seen, after)
        if begun is None:  # only the scripts were wanted
            return 0
        run, job = begun
        if job is not None and not args.wait:
            _print_job(config, run, job, args.json)
            return 0
        if not run.complete:
            if job is not None:
                print(f"job {job}", file=sys.stderr)
            outcome = wait_for(config, run, plan.world, job)
            explain(outcome, run)
            code = outcome.exit_code
    _print(path, args.json)
    return code


def _begin(
    config: RunConfig,
    plan: Plan,
    argv: list[str],
    args: Namespace,
    seen: int | None,
    after: str | None,
) -> tuple[RunDir, str | None] | None:
    """Returns the folder of a run with a fresh attempt, and its job if its launcher has jobs.

    Args:
        config: the config to freeze.
        plan: its plan.
        argv: the command line to record.
        args: with ``dry_run`` only the folder and its scripts are written; a run that is complete
            gets another attempt with ``again``, else it is returned as it is.
        seen: the latest attempt before the run was planned; None: it had none.
        after: what the job waits for.
    """
    path, launcher, facts = run_path(config), launcher_of(config), plan.to_dict()
    with contextlib.ExitStack() as stack:
        stack.enter_context(campaign.starting([path.parent]))
        fresh = args.again or done_attempt(path) is None
        if fresh and not args.dry_run:
            running_elsewhere.refuse_begun(path, seen)
        if fresh or args.dry_run:
            stack.enter_context(running_elsewhere.alone(path))
        if args.dry_run:
            rundir.freeze(config, facts, argv)
        else:
            run = rundir.create(config, facts, argv, again=args.again)
            if run.complete:  # by another command, while this one planned
                return run, None
        scripts = launcher.write_scripts(path, config, plan.world, argv)
        print(f"run folder: {path}", file=sys.stderr)
        if args.dry_run:
            print("\n".join(map(str, scripts)))
            return None
        return run, launcher.submit(run, config, after)


def _print_job(config: RunConfig, run: RunDir, job: str, as_json: bool) -> None:
    """Prints the job of a run, and the commands that watch and stop it."""
    if as_json:
        print(json.dumps({"run": str(run.path), "attempt": run.attempt, "job": job}, indent=2))
        return
    print(f"job {job} is attempt {run.attempt} of {run.path}")
    path = shlex.quote(str(run.path))
    hints = launcher_of(config).hints(run, job)
    hints += [("its tables:", f"hires show {path}"), ("to stop it:", f"hires cancel {path}")]
    for what, command in hints:
        print(f"  {what:<16}{command}")


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
