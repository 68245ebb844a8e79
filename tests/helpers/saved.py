"""Attempts of run folders that stop, are killed or resumed where a test wants."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from hires import comm, worker
from hires.core.config.run_config import RunConfig
from hires.core.ranks.world import World
from hires.core.store import attempts, checkpoints, records, rundir
from hires.engine import run
from hires.engine.device import open_device
from hires.engine.memory_meter import PeakMeter
from hires.parallel.executor import Executor, StepResult
from hires.plan.plan import Plan
from tests.helpers.jobs import join
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

POOLED = True
STEPS = 8


def numbered(
    world: World,
    folder: str,
    number: int,
    stop_at: int | None = None,
    kill_at: int | None = None,
    kill: int | None = None,
) -> int:
    """Runs an attempt of a number on one rank; returns the exit code.

    The last rank, and nobody else, gets the signal while it computes the step before ``stop_at``.
    The rank ``kill``, or each one, is killed in the step ``kill_at``.
    """
    plan, config = Plan.from_dict(records.read_plan(folder)), records.read_config(folder)
    device, whole = open_device(plan.device, world.local_rank), Executor.step

    def step(executor: Executor, *args: Any, number: int = 0, **keys: Any) -> StepResult:
        if number == kill_at and kill in (None, world.rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if executor.recorder.next_step + 1 == stop_at and world.rank == world.size - 1:
            os.kill(os.getpid(), run.PREEMPTION_SIGNAL)
        return whole(executor, *args, number=number, **keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "step", step)
        run.hold_preemption()
        run.is_preempted(clear=True)
        join(world, plan, host_empty=device.host_empty)
        meter, own = PeakMeter(config, device), replace(world, attempt=number)
        code = worker.run_attempt(Path(folder), config, plan, own, meter, device)
        comm.shutdown()
    return code


def make(folder: Path, **keys: Any) -> Path:
    """Returns a fresh run folder, with an attempt that nobody has run."""
    return run_folder(folder, config_of(**{"steps": STEPS, **keys}))


def run_folder(results: Path, config: RunConfig, **facts: Any) -> Path:
    """Returns a new run folder of a config, with other facts of its plan."""
    config = replace(config, results=str(results))
    plan = plan_of(config)
    assert plan.ok, plan.findings
    return rundir.create(config, plan.to_dict() | facts, ["hires", "run"]).path


def next_number(path: Path) -> int:
    """Returns the latest attempt of a run folder, or another one if that was run."""
    number = rundir.open_run(path).attempt
    was_run = bool(attempts.Attempt(path, number).metrics)
    return attempts.next_attempt(path) if was_run else number


def attempt(path: Path, stop_at: int | None = None) -> list[int]:
    """Runs the next attempt of a run folder to its end or a step; returns the exit codes."""
    size = int(records.read_plan(path)["world"])
    return run_ranks(numbered, size, str(path), next_number(path), stop_at)


def killed_attempt(path: Path, step: int, rank: int | None = None) -> None:
    """Runs the next attempt of a run folder until a rank, or each one, is killed in a step."""
    size = int(records.read_plan(path)["world"])
    with pytest.raises(AssertionError, match=r"rank \d failed"):
        run_ranks(numbered, size, str(path), next_number(path), None, step, rank)


def lines_of(path: Path, number: int, kind: str) -> list[dict[str, Any]]:
    """Returns the lines of a kind that an attempt noted."""
    return [line for line in attempts.Attempt(path, number).metrics if line["kind"] == kind]


def losses(path: Path, *attempts: int) -> dict[tuple[int, int], float | None]:
    """Returns the loss by (step, rank) that some attempts noted; no step may be noted twice."""
    lines = [line for number in attempts for line in lines_of(path, number, "step")]
    found = {(line["step"], line["rank"]): line["loss"] for line in lines}
    assert len(found) == len(lines)
    return found


def mean_losses(path: Path, *attempts: int) -> list[float]:
    """Returns the loss of every step, averaged over the ranks that know it."""
    by_step: dict[int, list[float]] = {}
    for (step, _), loss in losses(path, *attempts).items():
        if loss is not None:
            by_step.setdefault(step, []).append(loss)
    return [sum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)]


def tensors_at(path: Path, step: int) -> dict[tuple[str, str], Tensor]:
    files = sorted(checkpoints.place(path, step).glob("*.safetensors"))
    return {(file.name, key): one for file in files for key, one in load_file(file).items()}


def config_at(path: Path) -> RunConfig:
    return records.read_config(path)
