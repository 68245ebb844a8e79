"""``hires run``: run an experiment and print its throughput and memory."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from pathlib import Path

from hires.cli.choosing import is_open
from hires.cli.compose_config import compose
from hires.cli.options import AFTER, JSON, STARTING, Parser, composing, flag
from hires.cli.planning import Planner, require_feasible, require_hardware
from hires.cli.prepare import EarlierRuns, prepare
from hires.cli.screen import print_config, print_json, print_result
from hires.cli.start_run import print_failure, wait_for
from hires.cli.verbs.verb_show import print_record
from hires.core.store import campaign, checkpoints
from hires.core.store.attempts import next_attempt
from hires.core.store.file_names import RECORD, last_number
from hires.core.store.records import done_attempt, read_record
from hires.core.store.rundir import RunDir
from hires.launcher.interface import launcher_of
from hires.launcher.ranks import spawn
from hires.launcher.status.running_elsewhere import exclusive_start, refuse_begun
from hires.report.tables import record_of, write_run_tables

PARSER = Parser(
    "run",
    (
        "hires run                                        ResNet-50, one process, made-up images",
        "hires run parallel=sp+lp precision=bf16          tiles first, then a second stage",
        "hires run 'image=[480,640]' parallel=dp          quotes keep the shell off the brackets",
        "hires run data=folder data.path=data/textures    your own images",
        "hires run parallel=pp --cfg job                  only show the config",
        "hires run parallel=sp launcher=slurm --wait      as a Slurm job",
        "hires run parallel=sp launcher=slurm --dry-run   only write the scripts",
        "hires run steps=10000 checkpoint.every=500       saved; a crash costs 500 steps at most",
    ),
    *composing(),
    flag("--again", "run even if it is complete already"),
    *STARTING,
    flag(
        "--dry-run",
        "plan, write the run folder and its scripts, and start nothing (sweep writes none)",
    ),
    flag("--wait", "launcher=slurm: wait for the job, then print the tables"),
    *AFTER,
    JSON,
)


def main(args: Namespace) -> int:
    """Runs an experiment, or shows it if it is complete; returns the exit code."""
    config = compose(args.overrides, args.config_dir)
    if args.cfg:
        return print_config(config, args.json)
    if not is_open(config):
        require_hardware(config)
    launcher = launcher_of(config)
    after = launcher.dependency(args.after, args.after_any, config.results)
    argv = [word for word in args.argv if word != "--dry-run"]
    if args.config_dir and not any(word.startswith("--config-dir") for word in argv):
        argv += ["--config-dir", args.config_dir]  # HIRES_CONF may be unset where it is run again
    with spawn.warm(config.launcher.threads):
        with Planner() as planner:
            ready = prepare(config, args.overrides, planner, argv)
            ready.name(planner)
            path = ready.path
            if not args.again and ready.done:
                again = "(--again runs it anew)"
                print(f"complete since an earlier time: {path} {again}", file=sys.stderr)
                _print(path, args.json)
                return 0
            seen = last_number(path)
            ready.begin(EarlierRuns(), getattr(args, "continue"))
            config = ready.config
            plan = planner.plan(config, argv).with_findings(*ready.findings)
        require_feasible(plan)
        for note in ready.notes:  # of a run that is not refused
            print(f"note: {note}", file=sys.stderr)
        if args.dry_run:
            with campaign.starting([path.parent]), exclusive_start(path, closes=False):
                ready.freeze(plan)
                scripts = launcher.write_scripts(path, config, ready.argv)
            print(f"run folder: {path}", file=sys.stderr)
            files = [str(one) for one in scripts]
            print_result(args.json, {"run": str(path), "scripts": files}, *files)
            return 0
        with campaign.starting([path.parent]):
            if not args.again and done_attempt(path) is not None:
                _print(path, args.json)  # another command completed it while this one planned
                return 0
            refuse_begun(path, seen)
            with exclusive_start(path):
                ready.freeze(plan)
                run = RunDir(path, next_attempt(path, ready.argv))
                launcher.write_scripts(path, config, ready.argv)
                print(f"run folder: {path}", file=sys.stderr)
                job = launcher.submit(run, config, after)
        if job is not None and not args.wait:
            facts = {"run": str(run.path), "attempt": run.attempt, "job": job}
            lines = [f"  hires {v} {shlex.quote(str(path))}" for v in ("status", "show", "cancel")]
            print_result(args.json, facts, f"job {job} is attempt {run.attempt} of {path}", *lines)
            return 0
        if job is not None:
            print(f"job {job}", file=sys.stderr)
        outcome = wait_for(config, run, plan.num_processes, job)
        print_failure(outcome, run)
    _print(path, args.json)
    return outcome.exit_code


def _print(path: Path, as_json: bool) -> None:
    record = read_record(path)
    if record is None:
        print(f"note: {path / RECORD} is missing, so there is no result to show", file=sys.stderr)
        if as_json:
            print_json({"run": str(path), "record": None})
        return
    write_run_tables(path, record)
    for damaged in checkpoints.whole_checkpoints(path)[1]:
        print(f"note: {damaged}", file=sys.stderr)
    if as_json:
        print_json(record)
    elif record["state"] == "done":  # numbers of half a run would look like a result
        print_record(record_of(record), path)
