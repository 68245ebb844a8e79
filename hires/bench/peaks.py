"""How much memory does every rank of a layout take, and how much was predicted?

Rows that share a process cannot be told apart by the size of the process, so each layout of hires
runs three steps in fresh processes, measured and predicted exactly as ``hires run`` does it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from hires.bench.contestants import Contestant
from hires.bench.ranks import run_ranks
from hires.comm import all_gather, barrier, make_groups
from hires.core.config.run_config import MeasureConfig, RunConfig
from hires.core.units import MIB
from hires.engine.build import build_rank
from hires.engine.footprint import footprint
from hires.engine.memory_meter import PeakMeter
from hires.engine.run import run_step
from hires.plan.plan import Plan

HEADINGS = ("row", "rank", "measured MiB", "predicted MiB", "error %")
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
    log.info("%s: %s", row.name, ", ".join(f"{_error(entry):+.1f} %" for entry in found))
    return found


def measure_peaks(rank: int, config: RunConfig, plan: Plan) -> list[int]:
    """Runs a layout on one rank; returns the peak of every rank in bytes."""
    meter = PeakMeter(config)
    engine = build_rank(config, plan, rank, config.steps)
    for step in range(config.steps):
        barrier()
        with meter.watch(step):
            run_step(engine)
    engine.loader.close()
    own = torch.tensor([int(meter.line()["peak_bytes"])])
    world = make_groups([[*range(plan.world)]])[0]
    return [int(size) for size in all_gather(own, world).view(-1)]


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Returns one line of text a rank, of the rows whose memory is known."""
    return [
        [
            row["name"] if rank == 0 else "",
            str(rank),
            f"{entry['measured_bytes'] / MIB:.1f}",
            f"{entry['predicted_bytes'] / MIB:.1f}",
            f"{_error(entry):+.1f}",
        ]
        for row in rows
        for rank, entry in enumerate(row["memory"] or ())
    ]


def _error(entry: dict[str, int]) -> float:
    """Returns how far the prediction lies above the measured peak, in percent of it."""
    return 100 * (entry["predicted_bytes"] / max(entry["measured_bytes"], 1) - 1)
