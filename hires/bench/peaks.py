"""Measures how much memory every rank of a layout takes, beside the prediction.

Rows that share a process cannot be told apart by the size of the process, so each layout of hires
runs three steps in fresh processes, measured and predicted exactly as ``hires run`` does it.
"""

from __future__ import annotations

import dataclasses
import logging

import torch

from hires.bench.contestants import Contestant
from hires.bench.layouts_table import prediction_error
from hires.bench.ranks import run_ranks
from hires.comm import all_gather, barrier, make_groups
from hires.core.config.run_config import MeasureConfig, RunConfig
from hires.engine.build import build_rank
from hires.engine.footprint import footprint
from hires.engine.memory_meter import PeakMeter
from hires.plan.plan import Plan

MEASURE = MeasureConfig(warmup=2)
"""The second step is measured: the optimiser's state is there by then."""

log = logging.getLogger(__name__)


def peaks(row: Contestant, timeout_s: float) -> list[dict[str, int]] | None:
    """Returns measured and predicted bytes of each rank of a row; None if it is no layout of hires.

    Raises:
        RunError: a rank failed or the time was over.
    """
    if row.kind != "hires" or row.plan is None or row.threads > 1:
        return None
    config = dataclasses.replace(row.config, steps=MEASURE.warmup + 1, measure=MEASURE)
    predicted = footprint(config, row.plan)
    measured = run_ranks(measure_peaks, row.num_ranks, timeout_s, config, row.plan)
    found = [
        {"measured_bytes": size, "predicted_bytes": predicted[rank % len(predicted)].peak_bytes}
        for rank, size in enumerate(measured)
    ]
    log.info("%s: %s", row.name, ", ".join(f"{prediction_error(entry):+.1f} %" for entry in found))
    return found


def measure_peaks(rank: int, config: RunConfig, plan: Plan) -> list[int]:
    """Runs a layout on one rank; returns the peak of every rank in bytes."""
    meter = PeakMeter(config)
    engine = build_rank(config, plan, rank, config.steps)
    for step in range(config.steps):
        barrier()
        with meter.watch(step):
            engine.executor.step(engine.loader)
    engine.loader.close()
    own = torch.tensor([int(meter.line()["peak_bytes"])])
    world = make_groups([[*range(plan.world)]])[0]
    return [int(size) for size in all_gather(own, world).view(-1)]
