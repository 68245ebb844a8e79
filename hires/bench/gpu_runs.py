"""Freezes small runs and executes them as ``hires run`` and ``hires verify`` do.

Nothing is composed, so neither Hydra nor a front end is needed: a config is a few plain values.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from hires.bench.ranks import run_program
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import RunError
from hires.core.python_command import module_command
from hires.core.ranks import timeline
from hires.core.store import file_names, reading, records, rundir
from hires.core.store.reading import Values
from hires.core.store.rundir import RunDir
from hires.engine.footprint import footprint
from hires.nets.trace import trace_config
from hires.plan.plan import Plan
from hires.plan.planner import make_plan

FAMILIES: dict[str, Values] = {
    "single": {},
    "sp": {"parallel": {"tiles": [1, 2]}},
    "sp grid": {"parallel": {"tiles": [2, 2]}},
    "lp": {"parallel": {"stages": 2}},
    "pp": {"parallel": {"stages": 2, "microbatches": 4, "schedule": "gpipe"}},
    "1f1b": {"parallel": {"stages": 2, "microbatches": 4, "schedule": "1f1b"}},
    "gems": {"parallel": {"stages": 2, "directions": 2, "schedule": "gems"}},
    "sp+lp": {"parallel": {"tiles": [1, 2], "stages": 2, "spatial_stages": 1}},
    "sp+gems": {
        "parallel": {
            "tiles": [1, 2],
            "stages": 3,
            "spatial_stages": 1,
            "directions": 2,
            "schedule": "gems",
        }
    },
    "dp": {"parallel": {"replicas": 2}},
    "local_dp": {"parallel": {"tiles": [1, 2], "stages": 2, "spatial_stages": 1, "local_dp": 2}},
    # The flattened maps of its classifier are gathered.
    "gathered": {
        "model": {"name": "mpi4dl_resnet", "n": 1, "head": "flatten", "classes": 10},
        "parallel": {"tiles": [2, 1]},
    },
    "checkpointed": {"memory": {"checkpoint": "block"}, "parallel": {"tiles": [2, 1]}},
}
"""Every family of layouts, on one to four ranks: what differs from ``BASE``."""

BASE: Values = {
    "image": [67, 61],
    "batch": 4,
    "steps": 3,
    "seed": 1,
    "model": {"name": "resnet", "depth": 18, "classes": 10},
    "data": {"length": 16},
    "measure": {"warmup": 1},
    "comm": {"backend": "gloo"},  # NCCL refuses several ranks on one GPU
    "precision": {"name": "fp64"},
}


@dataclass(frozen=True)
class Runs:
    """Makes the run folders of one check, all on one device."""

    folder: Path
    device: str
    timeout_s: float = 300.0
    """Of each run."""

    def config(self, campaign: str, *changes: Values) -> RunConfig:
        """Returns ``BASE`` with changes, each of which may replace another."""
        values = {**BASE, "device": self.device}
        for change in changes:
            for key, value in change.items():
                same = isinstance(value, dict) and "name" not in value
                values[key] = {**values.get(key, {}), **value} if same else value
        values |= {"results": str(self.folder), "campaign": campaign}
        return from_dict(values)

    def run(self, config: RunConfig, memory: bool = False) -> RunDir:
        """Freezes a run and executes its ranks to the end; RunError: they failed."""
        run = self.freeze(config, memory)
        self._launch(run)
        return run

    def verify(self, config: RunConfig) -> Values:
        """Returns ``verify.json`` of a layout: one step against one process on the CPU."""
        run = self.freeze(config)
        file = run.attempt_dir / file_names.VERIFY
        try:
            self._launch(run, "--verify", "--reference", "cpu")
        except RunError:
            if not file.exists():
                raise
        return reading.read_json(file)

    def freeze(self, config: RunConfig, memory: bool = False) -> RunDir:
        """Returns a folder with a fresh attempt; with ``memory`` the plan predicts that."""
        plan = make_plan(config, trace_config(config))
        plan.require_ok()
        if memory:
            plan.memory = [rank.to_dict() for rank in footprint(config, plan)]
        return rundir.create(config, plan.to_dict(), sys.argv)

    def _launch(self, run: RunDir, *args: str) -> None:
        words = (str(run.path), str(run.attempt), "hires.worker", *args)
        run_program(run.name, module_command("hires.launcher.local", *words), self.timeout_s)


def losses(run: RunDir) -> list[float]:
    """Returns the loss of every step of a finished run."""
    steps: dict[int, float] = {}
    for line in reading.read_lines(run.attempt_dir / file_names.METRICS):
        if line.get("kind") == "step" and line.get("loss") is not None:
            steps[line["step"]] = line["loss"]
    return [steps[step] for step in sorted(steps)]


def timed_share(run: RunDir) -> float:
    """Returns how much of the last steps' seconds on the clock their time line covers."""
    plan = Plan.from_dict(records.read_plan(run.path))
    kept = timeline.complete_steps(timeline.read(run.attempt_dir), plan.world)
    took: dict[int, float] = {}
    for line in reading.read_lines(run.attempt_dir / file_names.METRICS):
        if line.get("kind") == "step":
            took[line["step"]] = max(line["step_s"], took.get(line["step"], 0.0))
    return statistics.median(timeline.length_s(ranks) / took[step] for step, ranks in kept.items())


def memory_ratio(run: RunDir) -> float:
    """Returns predicted over measured memory of the rank for which they differ most."""
    record = records.read_record(run.path) or {}
    ratios = [
        rank["predicted_bytes"] / rank["peak_bytes"]
        for rank in record.get("memory", [])
        if rank.get("predicted_bytes") and rank.get("peak_bytes")
    ]
    return max(ratios, key=lambda ratio: abs(math.log(ratio)), default=math.nan)
