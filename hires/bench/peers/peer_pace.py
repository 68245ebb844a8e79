"""The steps that show how fast the machine is at a moment; each rank runs them by itself."""

from __future__ import annotations

from hires.bench.bench_rows import BenchRow
from hires.bench.calibration_chains import pace_steps
from hires.bench.race import Runner
from hires.engine.device import RankDevice


def build(row: BenchRow, rank: int, device: RankDevice) -> Runner:
    """Returns the steps on this rank."""
    return pace_steps()
