"""Runs a planned sweep and writes its tables.

Every point that lacks attempts is frozen in its run folder, ``campaign.json`` records the plan of
the sweep, the launcher gets the run folders, and the tables of the whole campaign follow.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.cli.screens.progress import SweepProgress
from hires.cli.screens.screen import plural, print_table
from hires.cli.start_run import submit
from hires.cli.sweep.sweep_points import ORDERS, Points, SweepPoint, in_order
from hires.cli.sweep.sweep_tables import as_json, print_points
from hires.core.errors import ConfigError, PlanError, RunError
from hires.core.store import campaign, provenance, rundir
from hires.core.store.naming import model_label
from hires.core.store.records import read_record
from hires.launcher.attempt_queue import LocalQueue, PlannedAttempt, Share
from hires.launcher.interface import CANCELLED, FrozenRun, SubmitOptions, launcher_of
from hires.launcher.status import running_elsewhere
from hires.plan.memory import machine_bytes
from hires.report.tables import campaign_tables, write, write_tables


@dataclass
class Sweep:
    """A sweep with its points and options."""

    points: Points
    argv: list[str]
    """The command line as typed."""
    options: argparse.Namespace
    """Options of the verb, those of an experiment included."""
    folder: Path
    """The folder of its campaign, which all points share."""
    has_jobs: bool
    """Whether its points are submitted to a scheduler."""
    after: str | None = None
    """What its jobs wait for, in the scheduler's words."""

    def attempts(self) -> list[SweepPoint]:
        """Returns each point once for every attempt that it lacks, in the order of their start."""
        options = self.options
        ready = [point for point in self.points.valid if point.planned is not None]
        return list(in_order(ready, options.repeat, options.order, options.again))

    def argv_of(self, point: SweepPoint) -> tuple[str, ...]:
        """Returns the command line that makes one point alone."""
        folder = self.options.config_dir
        return ("hires", "run", *point.words, *(("--config-dir", folder) if folder else ()))

    def freeze(self, point: SweepPoint) -> None:
        """Freezes a point in its run folder."""
        rundir.freeze(point.ready, point.plan.facts(), self.argv_of(point))


def check_launcher(points: Points, options: argparse.Namespace) -> None:
    """Refuses points of several launchers, and repeats in an order that no job array can make."""
    configs = [point.config for point in points.listed if point.config]
    names = sorted({config.launcher.name for config in configs})
    if len(names) > 1:
        raise ConfigError(
            f"launcher={','.join(names)}: a sweep has one launcher; sweep once with each"
        )
    if options.repeat == 1 or not launcher_of(configs[0]).has_jobs:
        return
    if options.order != ORDERS[0]:
        raise ConfigError(
            f"--order {options.order}: with launcher=slurm each point is one task of an array, "
            f"which makes all its attempts one after the other; leave --order out"
        )
    packs = {config.launcher.pack for config in configs} - {1}
    if packs:
        raise ConfigError(
            f"launcher.pack={max(packs)} and --repeat {options.repeat}: runs that share a job make "
            f"one attempt each; use launcher.pack=1, or sweep seed=0,1 instead of repeats"
        )


def refuse_costly(sweep: Sweep) -> None:
    """Refuses jobs that may need more than the budget: none is stopped early, so all count in full.

    Local attempts are stopped in time.
    """
    hours = sweep.options.budget_gpu_hours
    if hours is None or not sweep.has_jobs:
        return
    most = 0.0
    for point in sweep.attempts():
        job = point.ready.launcher
        most += point.plan.ranks * job.minutes * (1 + job.requeues) / 60
    if most > hours:
        raise ConfigError(
            f"--budget-gpu-hours {hours:g}: with launcher=slurm these attempts may need {most:g} "
            f"rank hours (the sum of ranks x launcher.minutes x (1 + launcher.requeues)); lower "
            f"launcher.minutes or launcher.requeues, sweep fewer points, or raise the budget"
        )


def run_sweep(sweep: Sweep) -> int:
    """Runs the points of a planned sweep and prints its tables; returns the exit code.

    The caller holds the lock of its campaign.
    """
    points, options = sweep.points, sweep.options
    if not options.json:
        print_points(points, options.repeat)
    recorded = _record(sweep)
    if not points.valid:
        if options.json:
            print(json.dumps(as_json(points), indent=2))
        return PlanError.exit_code
    attempts = sweep.attempts()
    if attempts and sweep.has_jobs:
        return _submit(sweep, attempts)
    queue = _run_here(sweep, attempts)
    for path in dict.fromkeys(end.task.path for end in queue.ends if end.state == "done"):
        record = read_record(path)
        if record is not None:
            write(path, record)
    tables = campaign_tables(sweep.folder, recorded)
    write_tables(sweep.folder, tables)
    if options.json:
        print(json.dumps(as_json(points, queue.ends, options.repeat), indent=2))
    else:
        for table in tables:
            print_table(table.title, table.columns, table.text_rows())
    return _explain(queue, sweep.folder)


def _record(sweep: Sweep) -> campaign.Campaign:
    """Adds the sweep to ``campaign.json`` and returns the campaign."""
    options, recorded = sweep.options, campaign.read(sweep.folder)
    facts = {"argv": sweep.argv, "time": provenance.now(), "repeat": options.repeat}
    facts |= {"order": options.order, "max_parallel": options.max_parallel}
    points = [
        campaign.PlannedPoint(point.path.name, point.words, options.repeat)
        for point in sweep.points.valid
        if point.path is not None
    ]
    excluded = []
    for point in sweep.points.excluded:
        config, what = point.config, None
        if config is not None:  # in the words of a record
            what = {
                "model": model_label(config.model),
                "image": [config.height, config.width],
                "layout": config.parallel.name,
                "precision": config.precision.name,
                "task": config.task.name,
                "batch": config.batch,
                "limit": config.memory.limit,
            }
        one = campaign.ExcludedPoint(point.words, point.reason, point.nearest, what=what)
        excluded.append(one)
    recorded.add(facts, points, excluded)
    campaign.write(sweep.folder, recorded)
    return recorded


def _run_here(sweep: Sweep, attempts: Sequence[SweepPoint]) -> LocalQueue:
    """Runs the attempts on this machine, but those of runs that are under way elsewhere."""
    points = {point.folder: point for point in attempts}
    with campaign.starting([sweep.folder]):
        elsewhere = running_elsewhere.holders(points)
        for path, point in points.items():
            if path in elsewhere:
                print(f"{path.name} is left out: {elsewhere[path]}", file=sys.stderr)
            else:
                sweep.freeze(point)
    tasks = [
        PlannedAttempt(
            point.folder,
            sweep.argv_of(point),
            point.plan.ranks,
            Share(1, point.plan.ranks * point.ready.launcher.threads, point.plan.needs_bytes),
            len(point.done),
        )
        for point in attempts
        if point.path not in elsewhere
    ]
    options, cores = sweep.options, provenance.collect()["hardware"]["cores"]
    most = max((task.needs.cores for task in tasks), default=0)
    if most > cores:
        print(
            f"warning: a point keeps {most} cores busy (ranks times launcher.threads) and this "
            f"machine has {cores}: ranks take turns, and their times say little of other machines",
            file=sys.stderr,
        )
    rooms = Share(options.max_parallel or 1, cores, machine_bytes() or math.inf)
    hours = options.budget_gpu_hours
    with SweepProgress(len(tasks), {path: p.ready for path, p in points.items()}) as progress:
        stopped = functools.partial(campaign.is_stopped, sweep.folder)
        queue = LocalQueue(tasks, rooms, progress, rank_hours=hours, cancelled=stopped)
        queue.work()
    return queue


def _submit(sweep: Sweep, attempts: Sequence[SweepPoint]) -> int:
    """Submits the points, each as one job that makes all its attempts; returns the exit code."""
    points = {point.folder: point for point in attempts}
    counts = collections.Counter(point.path for point in attempts)
    runs = [
        FrozenRun(path, sweep.argv_of(point), point.plan.ranks, point.ready, counts[path])
        for path, point in points.items()
    ]
    options = SubmitOptions(sweep.argv, sweep.options.max_parallel, sweep.after)
    with campaign.starting([sweep.folder]):
        submitted = submit(runs, options, lambda path: sweep.freeze(points[path]))
    jobs = [one for one in submitted if one.job is not None]
    if sweep.options.json:
        lines = [{"run": str(one.path), "job": one.job, "why": one.why} for one in submitted]
        print(json.dumps(as_json(sweep.points) | {"submitted": lines}, indent=2))
    elif jobs:
        watch = f"`hires status {sweep.folder.name}` watches"
        print(f"{len(jobs)} of {len(submitted)} points submitted; {watch}")
    return 0 if len(jobs) == len(submitted) else RunError.exit_code


def _explain(queue: LocalQueue, folder: Path) -> int:
    """Prints how the attempts ended; returns 130 after Ctrl-C, 1 if a point failed, else 0."""
    bad = [end for end in queue.ends if end.state != "done"]
    total = len(queue.ends) + len(queue.waiting)
    if total:
        done = f"{len(queue.ends) - len(bad)} of {total} attempts done"
        print(f"{done}; tables and campaign.json: {folder}", file=sys.stderr)
    for end in bad:
        print(f"hires: {end.task.path.name} {end.state}: {end.cause}", file=sys.stderr)
    if queue.waiting:
        verb = "are" if len(queue.waiting) > 1 else "is"
        pending = f"{plural(len(queue.waiting), 'attempt')} {verb} pending ({queue.stopped})"
        print(f"{pending}; the same command goes on", file=sys.stderr)
    if queue.interrupts.received:
        return CANCELLED
    return RunError.exit_code if bad else 0
