"""What happens to a sweep between its plan and its tables?

Every point that needs attempts is frozen in its run folder, ``campaign.json`` says what was
planned, the launcher of the machine gets the list of folders, and the tables of the whole campaign
follow.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.cli.screens.screen import print_table
from hires.cli.sweep.submission import Freeze, has_jobs, refuse_beyond, submit_all
from hires.cli.sweep.sweep_points import Point, Points, in_order
from hires.cli.sweep.sweep_progress import SweepProgress
from hires.cli.sweep.sweep_tables import as_json, print_points
from hires.core.errors import PlanError, RunError
from hires.core.store import campaign, provenance, rundir
from hires.core.store.naming import model_label
from hires.core.store.records import read_record
from hires.launcher.interface import CANCELLED, SubmitOptions
from hires.launcher.local.local_queue import run_all
from hires.launcher.local.queue_tasks import Ended, Limits, Result, Task
from hires.launcher.status import running_elsewhere
from hires.plan.memory import machine_bytes
from hires.report.tables import campaign_tables as report
from hires.report.tables.run_tables import write, write_tables


@dataclass
class Sweep:
    """A sweep as it was asked for."""

    points: Points
    argv: list[str]
    """The command line as typed."""
    config_dir: str | None
    """The folder of ``--config-dir``."""
    options: argparse.Namespace
    """Options of the verb, those of an experiment included."""
    after: str | None = None
    """What its jobs wait for, as sbatch's ``--dependency`` has it."""


def run_sweep(sweep: Sweep) -> int:
    """Runs the points of a planned sweep and prints its tables; returns the exit code.

    Its campaign is locked by the caller.
    """
    points, options = sweep.points, sweep.options
    if not options.json:
        print_points(points, options.repeat)
    folder = campaign_folder(points)
    held = _written(sweep, folder)
    if not points.valid:
        if options.json:
            print(json.dumps(as_json(points), indent=2))
        return PlanError.exit_code
    tasks = tasks_of(sweep)
    if tasks and _has_jobs(sweep):
        return _submit(sweep, tasks, folder)
    result = _run(sweep, freeze(sweep, tasks, folder))
    for path in dict.fromkeys(end.task.path for end in result.ended if end.state == "done"):
        record = read_record(path)
        if record is not None:
            write(path, record)
    rows = report.rows_of(folder, held)
    made = report.campaign_tables(rows)
    write_tables(folder, made)
    if options.json:
        print(json.dumps(as_json(points, result.ended, options.repeat), indent=2))
    else:
        for table in made:
            print_table(table.title, table.columns, table.text_rows())
    _say_end(result, folder)
    return exit_code(result)


def campaign_folder(points: Points) -> Path:
    """Returns the folder of a sweep's campaign, which all its points share."""
    config = next(point.config for point in points.held if point.config is not None)
    return campaign.folder_of(config)


def tasks_of(sweep: Sweep) -> list[Task]:
    """Returns the attempts that points need, in the order of their start.

    This list is all that a launcher needs, once their folders are frozen.
    """
    order = _attempts(sweep)
    tasks = {id(point): _task(point, sweep.config_dir) for point in order}
    return [tasks[id(point)] for point in order]


def freeze(sweep: Sweep, tasks: Sequence[Task], folder: Path) -> list[Task]:
    """Freezes the points of attempts, and returns those attempts that nobody else makes already.

    Args:
        sweep: the planned sweep.
        tasks: its attempts.
        folder: of its campaign.

    Raises:
        RunError: a run folder cannot be written.
    """
    paths = list(dict.fromkeys(task.path for task in tasks))
    frozen = _freezer(sweep, tasks)
    with campaign.starting([folder]):
        others = running_elsewhere.under_way(paths)
        for path in paths:
            if path in others:
                print(f"{path.name} is left out: {others[path]}", file=sys.stderr)
            else:
                frozen(path)
    return [task for task in tasks if task.path not in others]


def refuse_costly(sweep: Sweep) -> None:
    """Refuses points that jobs may spend more on than the budget; processes stop in time.

    Raises:
        ConfigError: says how much it may be, and what would work.
    """
    budget = sweep.options.budget_gpu_hours
    if budget is not None and _has_jobs(sweep):
        planned = [(point.config, point.planned) for point in _attempts(sweep)]
        refuse_beyond(budget, [(config, plan.ranks) for config, plan in planned if config and plan])


def _attempts(sweep: Sweep) -> list[Point]:
    """Returns the points once for every attempt that they need, in the order of their start."""
    options = sweep.options
    ready = [point for point in sweep.points.valid if point.planned is not None]
    return list(in_order(ready, options.repeat, options.order, options.again))


def _has_jobs(sweep: Sweep) -> bool:
    """Whether the points are to be submitted."""
    configs = [point.config for point in sweep.points.valid if point.config]
    return has_jobs(configs, sweep.options.repeat, sweep.options.order)


def exit_code(result: Result) -> int:
    """Returns 130 if it was interrupted, 1 if a point failed, else 0."""
    if result.interrupted:
        return CANCELLED
    bad = any(end.state != "done" for end in result.ended)
    return RunError.exit_code if bad else 0


def _task(point: Point, config_dir: str | None) -> Task:
    """Returns what a launcher needs to know about an attempt of a point."""
    assert point.config is not None
    assert point.planned is not None
    assert point.path is not None
    argv = ("hires", "run", *point.words)
    argv += ("--config-dir", config_dir) if config_dir else ()
    threads, planned = point.config.launcher.threads, point.planned
    return Task(point.path, argv, planned.ranks, threads, planned.needs_bytes, len(point.done))


def _freezer(sweep: Sweep, tasks: Sequence[Task]) -> Freeze:
    """Returns what freezes a point, by its folder."""
    points = {point.path: point for point in sweep.points.valid}
    argvs = {task.path: task.argv for task in tasks}

    def frozen(path: Path) -> None:
        point = points[path]
        assert point.config is not None
        assert point.planned is not None
        rundir.freeze(point.config, point.planned.facts(), argvs[path])

    return frozen


def _run(sweep: Sweep, tasks: Sequence[Task]) -> Result:
    """Runs the attempts on this machine."""
    options, cores = sweep.options, provenance.collect()["hardware"]["cores"]
    most = max((task.cores for task in tasks), default=0)
    if most > cores:
        print(
            f"warning: a point keeps {most} cores busy (ranks times launcher.threads) and this "
            f"machine has {cores}: ranks take turns, and their times say little of other machines",
            file=sys.stderr,
        )
    limits = Limits(options.max_parallel or 1, cores, machine_bytes(), options.budget_gpu_hours)
    configs = {p.path: p.config for p in sweep.points.valid if p.path and p.config}
    with SweepProgress(len(tasks), configs) as progress:
        folder = campaign_folder(sweep.points)
        return run_all(tasks, limits, progress, cancelled=lambda: campaign.is_stopped(folder))


def _submit(sweep: Sweep, tasks: Sequence[Task], folder: Path) -> int:
    """Submits the points to Slurm; returns the exit code."""
    configs = {p.path: p.config for p in sweep.points.valid if p.path and p.config}
    options = SubmitOptions(sweep.argv, sweep.options.max_parallel, sweep.after)
    found = submit_all(tasks, configs, options, _freezer(sweep, tasks))
    jobs = [one for one in found if one.job is not None]
    if sweep.options.json:
        points = as_json(sweep.points) | {
            "submitted": [{"run": str(one.path), "job": one.job, "why": one.why} for one in found]
        }
        print(json.dumps(points, indent=2))
    elif jobs:
        print(f"{len(jobs)} of {len(found)} points submitted; `hires status {folder.name}` watches")
    return 0 if len(jobs) == len(found) else RunError.exit_code


def _written(sweep: Sweep, folder: Path) -> campaign.Campaign:
    """Adds the sweep to its campaign's file and returns the campaign."""
    options = sweep.options
    held = campaign.read(folder)
    facts = {"argv": sweep.argv, "time": provenance.now(), "repeat": options.repeat}
    facts |= {"order": options.order, "max_parallel": options.max_parallel}
    points = [
        campaign.PlannedPoint(point.path.name, point.words, options.repeat)
        for point in sweep.points.valid
        if point.path is not None
    ]
    excluded = [
        campaign.ExcludedPoint(point.words, point.reason, point.nearest, what=_what(point))
        for point in sweep.points.excluded
    ]
    held.add(facts, points, excluded)
    campaign.write(folder, held)
    return held


def _what(point: Point) -> dict[str, Any] | None:
    """Returns what a point is, as its record would say it; None if its values make no sense."""
    config = point.config
    if config is None:
        return None
    return {
        "model": model_label(config.model),
        "image": [config.height, config.width],
        "layout": config.parallel.name,
        "precision": config.precision.name,
        "task": config.task.name,
        "batch": config.batch,
        "limit": config.memory.limit,
    }


def _say_end(result: Result, folder: Path) -> None:
    """Says what became of the attempts."""
    bad: list[Ended] = [end for end in result.ended if end.state != "done"]
    told = f"{len(result.ended) - len(bad)} of {len(result.ended) + len(result.pending)} attempts"
    if result.ended or result.pending:
        print(f"{told} done; tables and campaign.json: {folder}", file=sys.stderr)
    for end in bad:
        print(f"hires: {end.task.path.name} {end.state}: {end.cause}", file=sys.stderr)
    if result.pending:
        count = len(result.pending)
        print(
            f"{count} attempt{'s are' if count > 1 else ' is'} pending ({result.why}); the same "
            f"command goes on",
            file=sys.stderr,
        )
