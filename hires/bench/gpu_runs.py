"""Freezes small runs and executes them as ``hires run`` and ``hires verify`` do.

Nothing is composed, so neither Hydra nor a front end is needed: a config is a few plain values.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
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
from hires.engine.footprint import footprint, traced
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

GRACE_S = 20.0
"""How long what has begun may last beyond ``--seconds``; hires and torch start within the rest of
eight minutes."""

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"
"""States of a check."""


class NotRunError(Exception):
    """Why a check was left out."""


SHOWN = ("output", "gradients")
"""Kinds of tensors whose largest difference from float64 is shown beside what is allowed."""

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
    ends_s: float = math.inf
    """Time at which a run under way is stopped (``time.monotonic``)."""

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
        self.launch(run)
        return run

    def verify(self, config: RunConfig) -> tuple[bool, str]:
        """Returns what :meth:`compared` does of a layout that is frozen for it."""
        return self.compared(self.freeze(config))

    def compared(self, run: RunDir) -> tuple[bool, str]:
        """Returns whether one step agrees with one process on the CPU, and the differences."""
        file = run.attempt_dir / file_names.VERIFY
        try:
            self.launch(run, "--verify", "--reference", "cpu")
        except RunError:
            if not file.exists():
                raise
        answer = reading.read_json(file)
        worst = {kind: one for kind in SHOWN if (one := answer["worst"].get(kind)) is not None}
        errors = (f"{k} {one['error']:.1e} of {one['bound']:.0e}" for k, one in worst.items())
        noise = f"; {len(answer['by_noise'])} tensors by their noise" if answer["by_noise"] else ""
        return answer["ok"], f"{', '.join(errors)}{noise}"

    def freeze(self, config: RunConfig, memory: bool = False) -> RunDir:
        """Returns a folder with a fresh attempt; with ``memory`` the plan predicts that."""
        plan = make_plan(config, traced(config))
        plan.require_ok()
        if memory:
            plan.memory = [rank.to_dict() for rank in footprint(config, plan)]
        return rundir.create(config, plan.to_dict(), sys.argv)

    def launch(self, run: RunDir, *args: str) -> None:
        """Executes the ranks of a fresh attempt to their end; RunError: they failed."""
        words = (str(run.path), str(run.attempt), "hires.worker", *args)
        run_program(run.name, module_command("hires.launcher.local", *words), self.left_s())

    def left_s(self, at_most: float = math.inf) -> float:
        """Returns how many seconds a run that begins now may last."""
        return max(0.0, min(at_most, self.timeout_s, self.ends_s - time.monotonic()))


def losses(run: RunDir) -> list[float]:
    """Returns the mean loss of every step of a finished run, over the ranks that have one."""
    steps: dict[int, list[float]] = {}
    for line in _steps(run):
        if line.get("loss") is not None:
            steps.setdefault(line["step"], []).append(line["loss"])
    return [math.fsum(sorted(steps[step])) / len(steps[step]) for step in sorted(steps)]


def skipped_steps(run: RunDir) -> list[int]:
    """Returns the steps whose gradients overflowed, so that no weight moved, in order."""
    return sorted({line["step"] for line in _steps(run) if line.get("skipped")})


def _steps(run: RunDir) -> list[Values]:
    lines = reading.read_lines(run.attempt_dir / file_names.METRICS)
    return [line for line in lines if line.get("kind") == "step"]


def timed_share(run: RunDir) -> float:
    """Returns how much of the last steps' seconds on the clock their time line covers."""
    plan = Plan.from_dict(records.read_plan(run.path))
    kept = timeline.complete_steps(timeline.read(run.attempt_dir), plan.world)
    took: dict[int, float] = {}
    for line in _steps(run):
        took[line["step"]] = max(line["step_s"], took.get(line["step"], 0.0))
    return statistics.median(timeline.length_s(ranks) / took[step] for step, ranks in kept.items())


def reserved_bytes(run: RunDir) -> tuple[int, int]:
    """Returns what the allocators of all ranks reserve, predicted and measured."""
    memory = Plan.from_dict(records.read_plan(run.path)).memory
    predicted = sum(entry["peak_bytes"] + entry["allocator_bytes"] for entry in memory)
    measured = {}
    for line in reading.read_lines(run.attempt_dir / file_names.METRICS):
        if line.get("kind") == "memory":
            measured[line.get("rank")] = line.get("reserved_bytes", 0)
    return predicted, sum(measured.values())


def memory_ratio(run: RunDir) -> float:
    """Returns predicted over measured memory of the rank for which they differ most."""
    record = records.read_record(run.path) or {}
    ratios = [
        rank["predicted_bytes"] / rank["peak_bytes"]
        for rank in record.get("memory", [])
        if rank.get("predicted_bytes") and rank.get("peak_bytes")
    ]
    return max(ratios, key=lambda ratio: abs(math.log(ratio)), default=math.nan)
