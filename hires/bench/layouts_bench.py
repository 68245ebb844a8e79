"""Measures layouts beside one process and torch's own: ``hires bench layouts``.

``python -m hires.bench.layouts_bench`` plans all rows, starts two ranks that hold all of them at
once, compares their first steps with one process, and lets them run in turns. Every round is kept
as it ends. Exit codes: 0 done, 1 a rank failed or a row is wrong, 2 bad options, 3 a layout cannot
cut this network and image.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from typing import Any

from hires.bench.bench_output import Progress, Result, add_output, run_benchmark
from hires.bench.contestants import (
    GROUPS,
    SINGLE,
    TASKS,
    Contestant,
    LayoutsOptions,
    line_up,
    model_config,
)
from hires.bench.layouts_table import FORM, Row, measured_rows, result
from hires.bench.peaks import peaks
from hires.bench.ranks import report, run_ranks
from hires.bench.runners import Judge, build
from hires.bench.timing import race
from hires.comm import make_groups
from hires.core.errors import ConfigError

NUM_RANKS = 2

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    return run_benchmark(FORM, argv, _parser().parse_args, _measure_all)


def measure(rank: int, rows: list[Contestant], num_ranks: int, rounds: int, warmup: int) -> None:
    """Runs all rows on one rank; rank 0 reports the deviations, then the samples of each round."""
    world = make_groups([[*range(num_ranks)]])[0]
    log.info("building and checking %d rows on %d ranks", len(rows), num_ranks)
    judge = Judge(rank)
    runners, deviations = {}, {}
    for row in rows:
        runners[row.name] = build(row, rank)
        deviations[row.name] = judge.judge(row, runners[row.name])
    del judge
    race(
        runners,
        rounds,
        warmup,
        world,
        on_round=lambda number, samples: report((number, samples, deviations)),
    )


def _measure_all(parsed: argparse.Namespace, command: str, progress: Progress) -> Result:
    """Returns the tables of all tasks, and the memory of their rows unless it is not wanted."""
    options = _options(parsed)
    line_ups = {task: line_up(options, task) for task in options.tasks}
    tasks: dict[str, list[Row]] = {}

    def kept() -> Result:
        return result(command, dataclasses.asdict(options), tasks)

    for task, rows in line_ups.items():
        done: list[Row] = []
        for race_rows, num_ranks in _races(rows):

            def keep_round(
                reported: Any, task: str = task, done: list[Row] = done, rows: Any = race_rows
            ) -> None:
                number, samples, deviations = reported
                last = {name: [s.step_s[-1], s.cpu_s[-1]] for name, s in samples.items()}
                progress.sample({"task": task, "round": number, "step_s, cpu_s": last})
                tasks[task] = [*done, *measured_rows(rows, samples, deviations)]
                progress.update(kept())

            job = options.timeout_s, race_rows, num_ranks, options.rounds, options.warmup
            run_ranks(measure, num_ranks, *job, on_report=keep_round)
            done[:] = tasks[task]
    for task, rows in line_ups.items() if parsed.memory else ():
        log.info("%s: measuring the memory of each layout alone", task)
        by_name = {row.name: row for row in rows}
        for row in tasks[task]:
            contestant = by_name.get(row["name"])  # not the single that runs beside more ranks
            row["memory"] = peaks(contestant, options.timeout_s) if contestant else None
            progress.update(kept())
    return kept()


def _races(rows: list[Contestant]) -> list[tuple[list[Contestant], int]]:
    """Returns the rows that run in turns, and on how many ranks.

    Rows on more ranks than most have a race of their own against the baseline: every rank of a
    world takes part in every group that is made in it.
    """
    races = []
    for num_ranks in sorted({max(NUM_RANKS, row.num_ranks) for row in rows}):
        own = [row for row in rows if max(NUM_RANKS, row.num_ranks) == num_ranks]
        if num_ranks > NUM_RANKS:
            single = next(row for row in rows if row.name == SINGLE)
            own = [dataclasses.replace(single, name=f"{SINGLE} beside {num_ranks} ranks"), *own]
            own = [dataclasses.replace(row, baseline=own[0].name, peers=()) for row in own]
        races.append((own, num_ranks))
    return races


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    defaults = LayoutsOptions()
    parser = argparse.ArgumentParser(prog="hires bench layouts", description=__doc__)
    add = parser.add_argument
    add(
        "--model",
        default=defaults.model,
        help="resnet18 to 152, preact_resnet110, amoebanet-LAYERS-FILTERS (default: %(default)s)",
    )
    add("--image", default="512", help="n or HxW in pixels (default: %(default)s)")
    add("--batch", type=int, default=defaults.batch, help="images of one microbatch")
    add("--microbatches", type=int, default=defaults.microbatches, help="of the pipelines")
    add("--rounds", type=int, default=defaults.rounds, help="samples of every row")
    add("--warmup", type=int, default=defaults.warmup, help="rounds before them")
    add("--task", default=",".join(TASKS), help="default: %(default)s")
    add("--only", default=",".join(GROUPS), help="layouts to measure (default: %(default)s)")
    add("--no-memory", dest="memory", action="store_false", help="measure no peaks of memory")
    add("--timeout", type=float, default=defaults.timeout_s, help="seconds for everything")
    add_output(parser, FORM.name)
    return parser


def _options(parsed: argparse.Namespace) -> LayoutsOptions:
    """Returns the checked options.

    Raises:
        ConfigError: one of them makes no sense.
    """
    for key in ("batch", "microbatches", "rounds"):
        if getattr(parsed, key) < 1:
            raise ConfigError(f"--{key} {getattr(parsed, key)} must be at least 1")
    if parsed.warmup < 0 or parsed.timeout <= 0:
        raise ConfigError("--warmup must not be negative, and --timeout must be above 0")
    sides = parsed.image.split("x")
    if not all(side.isdecimal() and int(side) for side in sides) or len(sides) > 2:
        raise ConfigError(f"--image {parsed.image} must be n or HxW, as 512 or 480x640")
    model_config(parsed.model)
    return LayoutsOptions(
        model=parsed.model,
        image=[int(sides[0]), int(sides[-1])],
        batch=parsed.batch,
        microbatches=parsed.microbatches,
        rounds=parsed.rounds,
        warmup=parsed.warmup,
        tasks=_choices("--task", parsed.task, TASKS),
        only=_choices("--only", parsed.only, GROUPS),
        timeout_s=parsed.timeout,
    )


def _choices(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the chosen names in their usual order."""
    chosen = set(filter(None, text.split(",")))
    if chosen - set(known):
        wrong = ", ".join(sorted(chosen - set(known)))
        raise ConfigError(f"{option} {wrong} is unknown; choose from {','.join(known)}")
    return tuple(name for name in known if name in chosen)


if __name__ == "__main__":
    sys.exit(main())
