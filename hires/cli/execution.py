"""Shows a planned sweep, records it in ``campaign.json``, runs it, and writes its tables."""

from __future__ import annotations

import argparse
import collections
import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.cli.planning import Planner
from hires.cli.screen import plural, print_notes, print_table
from hires.cli.start_run import SweepProgress, submit
from hires.cli.sweep_points import COMPLETE, FAILED, INFEASIBLE, READY, Points, SweepPoint
from hires.core.errors import INTERRUPTED, PREEMPTED, ConfigError, HiresError, PlanError, RunError
from hires.core.ranks.machine import visible_gpus
from hires.core.store import campaign, provenance, rundir
from hires.core.store.naming import model_label
from hires.core.store.reading import Note
from hires.core.store.records import read_record
from hires.core.units import size
from hires.launcher.attempt_queue import LocalQueue
from hires.launcher.interface import FrozenRun, Share, SubmitOptions, launcher_of
from hires.launcher.status import running_elsewhere
from hires.plan.memory import machine_bytes
from hires.report.tables import campaign_tables, write_run_tables, write_tables

GROUPED, INTERLEAVED = "grouped", "interleaved"
"""Orders: all attempts of a point together, or one attempt of every point, then the next ones."""


@dataclass
class Sweep:
    """A sweep with its points and options, all of one campaign and one launcher."""

    points: Points
    options: argparse.Namespace
    """Options of the verb, those of an experiment included, and ``argv`` as typed."""
    planner: Planner
    """Plans the points, and again those that start: thousands of plans would fill the memory."""

    def __post_init__(self) -> None:
        configs = [point.config for point in self.points.listed if point.config]
        names, first = sorted({config.launcher.name for config in configs}), configs[0]
        if len(names) > 1:
            raise ConfigError(
                f"launcher={','.join(names)}: a sweep has one launcher; sweep once with each"
            )
        launcher, options = launcher_of(first), self.options
        self.folder, self.threads = rundir.run_path(first).parent, first.launcher.threads
        self.has_jobs = first.launcher.has_jobs
        self.after = launcher.dependency(options.after, options.after_any, first.results)
        if options.repeat == 1 or not self.has_jobs:
            return
        if options.order != GROUPED:
            raise ConfigError(
                f"--order {options.order}: with launcher=slurm each point is one task of an array, "
                f"which makes all its attempts one after the other; leave --order out"
            )

    def attempts(self) -> list[SweepPoint]:
        """Returns each point once for every attempt that it lacks, in the order of their start."""
        options = self.options
        ready = [point for point in self.points.valid if point.state == READY]
        lacking = [options.repeat - (0 if options.again else len(point.done)) for point in ready]
        turns = [(turn, number) for number, n in enumerate(lacking) for turn in range(n)]
        if options.order == INTERLEAVED:
            turns.sort()
        return [ready[number] for _, number in turns]

    def run_of(self, point: SweepPoint, attempts: int = 1) -> FrozenRun:
        """Returns a point as what a launcher starts."""
        run, needs = point.ready, point.needs
        assert needs is not None
        # One whose memory is unknown has the machine for itself.
        host_bytes = needs.host_bytes or machine_bytes() or 0
        argv, done = tuple(run.argv), len(run.done)
        return FrozenRun(run.path, argv, run.config, attempts, host_bytes, done, needs.gpus)

    def freeze(self, point: SweepPoint) -> None:
        """Freezes a point in its run folder."""
        point.ready.freeze(self.planner.plan(point.ready.config))


def run_sweep(sweep: Sweep) -> tuple[int, dict[str, Any]]:
    """Records a planned sweep and runs it under its lock.

    Returns the exit code, and the points as plain values.
    """
    points, options = sweep.points, sweep.options
    recorded = None if options.dry_run else _record(sweep)
    code, facts = 0 if points.valid else PlanError.exit_code, as_json(points, None)
    if points.valid and recorded is not None:
        attempts = sweep.attempts()
        if attempts and sweep.has_jobs:
            code, facts["submitted"] = _submit(sweep, attempts)
        else:
            queue = _run_here(sweep, attempts)
            code, facts = _finish(sweep, queue, recorded), as_json(points, queue, options.repeat)
    failed = [point for point in points.excluded if point.failed]
    for point in failed:
        words = " ".join(point.swept or point.words)
        print(f"hires: {words} failed before it was started: {point.reason}", file=sys.stderr)
    if failed and code in (0, PlanError.exit_code):
        code = RunError.exit_code
    return code, facts


def print_points(points: Points, repeat: int) -> None:
    """Prints the points that can run, then why the others cannot, then the counts."""
    rows, notes = [], []
    for number, point in enumerate(points.listed, start=1):
        if not point.reason:
            state = point.state + (f" ({len(point.done)} of {repeat})" if repeat > 1 else "")
            peak = point.needs.peak_bytes if point.needs else None
            ranks = str(point.ready.config.parallel.num_processes)
            name = "-" if point.calibrates else point.path.name
            facts = ranks, size(peak) if peak else "-", state, name
            rows.append([str(number), " ".join(point.swept), *facts])
            notes += [Note(point.path.name, text) for text in point.notes]
    if rows:
        print_table("Points", ("point", "overrides", "ranks", "memory", "state", "run"), rows)
    for number, point in enumerate(points.listed, start=1):
        if point.reason:
            print(f"point {number}, {' '.join(point.swept or point.words)}: {point.reason}\n")
    texts = collections.Counter(text for point in points.valid for text in point.warnings)
    for text, count in texts.items():
        print(f"warning: {text} ({plural(count, 'point')})", file=sys.stderr)
    print_notes([*{note.text: note for note in reversed(notes)}.values()][::-1])
    states = collections.Counter(point.state for point in points.listed)
    others = {
        "failed": states[FAILED],
        "left out by --where": points.left_out,
        "the same run as another": points.duplicates,
    }
    counts = {"to run": READY, "complete": COMPLETE, "excluded": INFEASIBLE}
    parts = [f"{states[state]} {what}" for what, state in counts.items()]
    parts += [f"{number} {what}" for what, number in others.items() if number]
    print(f"{len(points.listed)} points: {', '.join(parts)}")


def as_json(points: Points, queue: LocalQueue | None, repeat: int = 1) -> dict[str, Any]:
    """Returns the points as plain values; ``queue`` is None if no attempt was to be started."""
    by_path: dict[Path, list[dict[str, Any]]] = collections.defaultdict(list)
    for end in queue.ends if queue else ():
        attempt = {"attempt": end.attempt, "state": end.state, "cause": end.end.cause}
        by_path[end.task.path].append(attempt)

    def state_of(point: SweepPoint) -> str:
        if queue is None:
            return point.state
        bad = [one["state"] for one in by_path[point.path] if one["state"] != "done"]
        is_done = len(point.done) + len(by_path[point.path]) >= repeat
        return str(bad[-1]) if bad else "done" if is_done else "pending"

    listed = [
        {
            "run": point.path.name,
            "path": str(point.path),
            "overrides": point.words,
            "state": state_of(point),
            "ranks": point.ready.config.parallel.num_processes,
            "peak_bytes": point.needs.peak_bytes if point.needs else None,
            "warnings": point.warnings,
            "notes": point.notes,
            "complete_attempts": point.done,
            "attempts": by_path[point.path],
        }
        for point in points.valid
    ]
    out = [{"overrides": p.words, "state": p.state, "reason": p.reason} for p in points.excluded]
    counted = {"left_out": points.left_out, "duplicates": points.duplicates}
    return {"points": listed, "excluded": out, **counted}


def _record(sweep: Sweep) -> campaign.Campaign:
    options, recorded = sweep.options, campaign.read(sweep.folder)
    facts = {"argv": options.argv, "time": provenance.now(), "repeat": options.repeat}
    facts |= {"order": options.order, "max_parallel": options.max_parallel}
    excluded = []
    for point in sweep.points.excluded:
        config = point.run.config if point.run else point.config
        what: dict[str, Any] | None = None
        if config is not None:  # in the words of a record
            what = {name: getattr(config, name).name for name in ("precision", "task")}
            what |= {"model": model_label(config.model), "layout": config.parallel.name}
            what |= {"image": [config.height, config.width], "batch": config.batch}
            what |= {"limit": config.memory.limit}
        excluded.append(campaign.ExcludedPoint(point.words, point.reason, point.state, what))
    valid = sweep.points.valid
    runs = [campaign.PlannedPoint(p.path.name, p.words, options.repeat) for p in valid]
    recorded.add(facts, runs, excluded)
    campaign.write(sweep.folder, recorded)
    return recorded


def _run_here(sweep: Sweep, attempts: Sequence[SweepPoint]) -> LocalQueue:
    """Runs the attempts on this machine, but those of runs that are under way elsewhere."""
    points = {point.path: point for point in attempts}
    with campaign.starting([sweep.folder]):
        elsewhere = running_elsewhere.holders(points)
        for path, point in points.items():
            if path in elsewhere:
                print(f"{path.name} is left out: {elsewhere[path]}", file=sys.stderr)
                continue
            try:
                sweep.freeze(point)
            except HiresError as error:  # it does not stop the others
                point.reason, point.failed = str(error), True
    free = [point for point in attempts if point.path not in elsewhere and not point.reason]
    tasks = [sweep.run_of(point) for point in free]
    options, cores = sweep.options, provenance.collect()["hardware"]["cores"]
    most = max((task.needs.cores for task in tasks), default=0)
    if most > cores:
        print(
            f"warning: a point keeps {most} cores busy (ranks times launcher.threads) and this "
            f"machine has {cores}: ranks take turns, and their times say little of other machines",
            file=sys.stderr,
        )
    rooms = Share(options.max_parallel or 1, cores, machine_bytes() or math.inf)
    with SweepProgress(len(tasks)) as progress:
        stopped = functools.partial(campaign.is_stopped, sweep.folder)
        queue = LocalQueue(tasks, rooms, progress, cancelled=stopped, gpus=_gpus_of(tasks))
        queue.work()
    return queue


def _gpus_of(tasks: Sequence[FrozenRun]) -> list[str]:
    """Returns the GPUs of this machine that runs may take, as the runs' cluster describes them."""
    counts = [task.config.cluster.gpus for task in tasks if task.gpus]
    # Of points that describe them in different ways, the least holds.
    known = [count for count in counts if count is not None]
    return visible_gpus(min(known, default=None)) if counts else []


def _submit(sweep: Sweep, attempts: Sequence[SweepPoint]) -> tuple[int, list[Any]]:
    points = {point.path: point for point in attempts}
    counts = collections.Counter(point.path for point in attempts)
    runs = [sweep.run_of(point, counts[point.path]) for point in points.values()]
    options = SubmitOptions(sweep.options.argv, sweep.options.max_parallel, sweep.after)
    submitted = submit(runs, options, lambda path: sweep.freeze(points[path]))
    lines = [{"run": str(one.path), "job": one.job, "why": one.why} for one in submitted]
    jobs = [one for one in submitted if one.job is not None]
    if jobs and not sweep.options.json:
        watch = f"`hires status {sweep.folder.name}` watches"
        print(f"{len(jobs)} of {len(submitted)} points submitted; {watch}")
    return 0 if len(jobs) == len(submitted) else RunError.exit_code, lines


def _finish(sweep: Sweep, queue: LocalQueue, recorded: campaign.Campaign) -> int:
    for path in dict.fromkeys(end.task.path for end in queue.ends if end.state == "done"):
        record = read_record(path)
        if record is not None:
            write_run_tables(path, record)
    tables = campaign_tables(sweep.folder, recorded)
    write_tables(sweep.folder, tables)
    long = {"classes"} if sweep.options.memory else {"classes", "memory"}
    for table in () if sweep.options.json else tables:
        if table.name not in long:
            print_table(table.title, table.columns, table.text_rows())
    states = collections.Counter(end.state for end in queue.ends)
    bad = [end for end in queue.ends if end.state not in ("done", "saved")]
    total = len(queue.ends) + len(queue.waiting)
    if total:
        done = f"{states['done']} of {total} attempts done"
        print(f"{done}; tables and campaign.json: {sweep.folder}", file=sys.stderr)
    for end in bad:
        print(f"hires: {end.task.path.name} {end.state}: {end.end.cause}", file=sys.stderr)
    if states["saved"]:
        print(
            f"{plural(states['saved'], 'attempt')} saved; run the same command again to resume",
            file=sys.stderr,
        )
    if queue.waiting:
        verb = "are" if len(queue.waiting) > 1 else "is"
        pending = f"{plural(len(queue.waiting), 'attempt')} {verb} pending ({queue.stopped})"
        print(f"{pending}; run the same command again to resume", file=sys.stderr)
    if queue.interrupts.count:
        return INTERRUPTED
    if states["saved"] or (queue.interrupts.requests and queue.waiting):
        return PREEMPTED
    return RunError.exit_code if bad else 0
