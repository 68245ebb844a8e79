"""Measures layouts beside one process and torch's own: ``hires bench layouts``.

``python -m hires.bench.layouts_bench`` plans all rows, starts two ranks that hold all of them at
once, compares their first steps with one process on the CPU, and lets them run in turns. Device and
backend are those of a run, so ranks without a GPU of their own share one. What a device cannot run
is listed as not run. Exit codes: 0 done, 1 a rank failed, a row is wrong or the device is missing,
2 bad options, 3 a layout cannot cut this network and image.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch

from hires.bench.bench_output import Benchmark, Result, Results
from hires.bench.contestants import SINGLE, Contestant, LayoutsOptions, line_up
from hires.bench.device_name import device_name
from hires.bench.judge import Deviation, Judge
from hires.bench.layouts_table import (
    NOTES,
    Row,
    measured_rows,
    prediction_error,
    row_not_run,
    tables,
)
from hires.bench.ranks import DevicePlace, run_ranks, stream_ranks
from hires.bench.runners import build
from hires.bench.timing import Samples, race
from hires.comm import all_gather_stacked, barrier, make_groups
from hires.core.config.run_config import MeasureConfig, RunConfig
from hires.engine import arithmetic
from hires.engine.build import build_rank
from hires.engine.device import open_device
from hires.engine.footprint import footprint
from hires.engine.memory_meter import PeakMeter
from hires.engine.weights_file import open_weights
from hires.plan.hardware import CPU, CUDA
from hires.plan.plan import Plan

NUM_RANKS = 2
MEASURE = MeasureConfig(warmup=2)
"""Of peaks of memory: in the second step the optimiser's state is there."""

log = logging.getLogger(__name__)


def measure(options: LayoutsOptions) -> Results:
    """Yields the rows of all tasks after each round, then after the memory of each row."""
    line_ups = {task: line_up(options, task) for task in options.task}
    shown = dataclasses.asdict(options)
    shown["device"] = next((row.config.device for rows in line_ups.values() for row in rows), CPU)
    tasks: dict[str, list[Row]] = {}

    for task, rows in line_ups.items():
        done: list[Row] = []
        for race_rows, num_ranks in _races(rows):
            job = options.timeout, race_rows, num_ranks, options.rounds, options.warmup
            place = _place(race_rows)
            for samples, deviations in stream_ranks(run_race, num_ranks, *job, place=place):
                tasks[task] = [*done, *measured_rows(race_rows, samples, deviations)]
                yield result_of(shown, tasks)
            done = tasks[task]
        tasks[task] = [*done, *(row_not_run(row) for row in rows if row.not_run)]
        yield result_of(shown, tasks)
    for task, rows in line_ups.items() if options.memory else ():
        log.info("%s: measuring the memory of each layout alone", task)
        by_name = {row.name: row for row in rows}
        for measured in tasks[task]:
            contestant = by_name.get(measured["name"])  # not the single that runs beside more ranks
            measured["memory"] = peaks(contestant, options.timeout) if contestant else None
            yield result_of(shown, tasks)


def result_of(options: dict[str, Any], tasks: dict[str, list[Row]]) -> Result:
    """Returns all rows, and whether they are right."""
    ok = all(row["ok"] for rows in tasks.values() for row in rows)
    device = device_name(options["device"])
    return {"ok": ok, "device": device, "options": options, "tasks": tasks}


def run_race(
    rank: int, rows: list[Contestant], num_ranks: int, rounds: int, warmup: int
) -> Iterator[tuple[dict[str, Samples], dict[str, Deviation | None]]]:
    """Runs all rows on one rank; yields all samples and the deviations after each round."""
    world = make_groups([[*range(num_ranks)]])[0]
    device = open_device(rows[0].config.device, rank)
    arithmetic.prepare(rows[0].config, device, rank)
    log.info("building and checking %d rows on %d ranks", len(rows), num_ranks)
    judge = Judge(rank, device)
    runners, deviations = {}, {}
    for row in rows:
        runners[row.name] = build(row, rank, device)
        deviations[row.name] = judge.judge(row, runners[row.name])
    del judge
    for samples in race(runners, rounds, warmup, world):
        yield samples, deviations


def _races(rows: list[Contestant]) -> Iterator[tuple[list[Contestant], int]]:
    """Yields the rows that can run in turns, and on how many ranks.

    Rows on more ranks than most have a race of their own against the baseline: every rank of a
    world takes part in every group that is made in it.
    """
    rows = [row for row in rows if not row.not_run]
    for num_ranks in sorted({max(NUM_RANKS, row.num_ranks) for row in rows}):
        own = [row for row in rows if max(NUM_RANKS, row.num_ranks) == num_ranks]
        if num_ranks > NUM_RANKS:
            single = next(row for row in rows if row.name == SINGLE)
            own = [dataclasses.replace(single, name=f"{SINGLE} beside {num_ranks} ranks"), *own]
            own = [dataclasses.replace(row, baseline=own[0].name, peers=()) for row in own]
        yield own, num_ranks


def _place(rows: list[Contestant]) -> DevicePlace:
    # The backend of the row with most ranks: NCCL only if each of them has a GPU of its own.
    config = max(rows, key=lambda row: row.num_ranks).config
    return DevicePlace(config.device, config.comm.backend)


def peaks(row: Contestant, timeout_s: float) -> list[dict[str, int]] | None:
    """Returns measured and predicted bytes of each rank of a row; None if it is no layout of hires.

    The peak of a shared process is not that of one row, so each layout runs three steps in
    fresh processes, measured and predicted as ``hires run`` does it.
    """
    if row.kind != "hires" or row.plan is None or row.threads > 1 or row.not_run:
        return None
    if row.config.device not in (CPU, CUDA):  # whose memory is that of the host beside its own
        return None
    config = dataclasses.replace(row.config, steps=MEASURE.warmup + 1, measure=MEASURE)
    predicted = footprint(config, row.plan)
    job = measure_peaks, row.num_ranks, timeout_s, config, row.plan
    measured = run_ranks(*job, place=_place([row]))
    entries = [
        {"measured_bytes": size, "predicted_bytes": predicted[rank % len(predicted)].peak_bytes}
        for rank, size in enumerate(measured)
    ]
    log.info("%s: %s", row.name, ", ".join(f"{prediction_error(e):+.1f} %" for e in entries))
    return entries


def measure_peaks(rank: int, config: RunConfig, plan: Plan) -> list[int]:
    """Runs a layout on one rank; returns the peak of every rank in bytes."""
    device = open_device(config.device, rank)
    meter = PeakMeter(config, device)
    weights = open_weights(config.weights) if config.weights else None
    engine = build_rank(config, plan, rank, config.steps, device, weights=weights)
    for step in range(config.steps):
        barrier()
        with meter.watch(step):
            engine.executor.step(engine.loaders)
    engine.close()
    own = torch.tensor([int(meter.line()["peak_bytes"])])
    world = make_groups([[*range(plan.world)]])[0]
    return [int(size) for size in all_gather_stacked(own, world).view(-1)]


def _facts(result: Result) -> list[str]:
    return [f"device: {result['device']}"]


BENCHMARK = Benchmark("layouts", __doc__, LayoutsOptions, measure, tables, NOTES["layouts"], _facts)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(sys.argv[1:]))
