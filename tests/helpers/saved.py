"""Runs that stop and go on: attempts of a run folder on real ranks, stopped where a test wants."""

from __future__ import annotations

import os
import shutil
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
from hires.core.store import attempts, checkpoints, file_names, records, rundir
from hires.core.store.reading import read_lines
from hires.engine import checkpoint, run, tensorfile
from hires.engine.device import open_device
from hires.engine.memory_meter import PeakMeter
from hires.parallel.executor import Executor, StepResult
from hires.plan.plan import Plan
from tests.helpers.jobs import join
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

STEPS = 8


def rank_of_attempt(world: World, folder: str, stop_at: int | None) -> int:
    """Runs one attempt on one rank; returns the exit code.

    The last rank, and nobody else, gets the signal while it computes the step before ``stop_at``.
    """
    run.hold_preemption()
    plan = Plan.from_dict(records.read_plan(folder))
    device = open_device(plan.device, world.local_rank)
    join(world, plan, host_empty=device.host_empty)
    step = Executor.step

    def counted(executor: Executor, feed: Any, **keys: Any) -> StepResult:
        if executor.recorder.next_step + 1 == stop_at and world.rank == world.size - 1:
            os.kill(os.getpid(), run.PREEMPTION_SIGNAL)
        return step(executor, feed, **keys)

    Executor.step = counted  # type: ignore[method-assign, assignment]
    config = records.read_config(folder)
    meter = PeakMeter(config, device)
    code = worker.run_attempt(Path(folder), config, plan, world, meter, device)
    comm.shutdown()
    return code


def make(folder: Path, **keys: Any) -> Path:
    """Returns a fresh run folder, with an attempt that nobody has run."""
    config = replace(config_of(**{"steps": STEPS, **keys}), results=str(folder))
    plan = plan_of(config)
    assert plan.ok, plan.findings
    return rundir.create(config, plan.to_dict(), ["hires", "run"]).path


def attempt(path: Path, stop_at: int | None = None) -> list[int]:
    """Runs the latest attempt of a run folder to its end or a step; returns the exit codes.

    A folder whose latest attempt was run gets another one.
    """
    number = rundir.open_run(path).attempt
    if (file_names.attempt_dir(path, number) / "metrics.jsonl").exists():
        number = attempts.next_attempt(path)
    size = int(records.read_plan(path)["world"])
    return run_ranks(numbered, size, str(path), number, stop_at)


def numbered(world: World, folder: str, number: int, stop_at: int | None) -> int:
    """Runs an attempt of a number on one rank."""
    return rank_of_attempt(replace(world, attempt=number), folder, stop_at)


def crashed_attempt(path: Path, where: str) -> None:
    """Runs the latest attempt of a run folder until a rank is killed in its second save.

    ``where``: ``write`` (the last rank writes its files), ``name`` (before rank 0 names the
    folder), ``named`` (after it has) or ``remove`` (while it removes an old checkpoint).
    """
    number = rundir.open_run(path).attempt
    size = int(records.read_plan(path)["world"])
    with pytest.raises(AssertionError, match=r"rank \d failed"):
        run_ranks(crashing, size, str(path), number, where)


def crashing(world: World, folder: str, number: int, where: str) -> int:
    """Runs an attempt on one rank, which is killed if it comes to a place."""
    guilty = world.size - 1 if where == "write" else 0
    module, name, calls = {
        "write": (tensorfile, "write", 2 * 3 - 1),  # of three files in each save
        "name": (checkpoint, "_sync", 3),  # two names in each save
        "named": (checkpoint, "_sync", 4),
        "remove": (shutil, "rmtree", 1),
    }[where]
    whole, left = getattr(module, name), [calls]

    def deadly(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **named)

    if world.rank == guilty:
        setattr(module, name, deadly)
    return numbered(world, folder, number, None)


def killed_attempt(path: Path, step: int, rank: int | None = None) -> None:
    """Runs the latest attempt of a run folder until a rank, or each one, is killed in a step."""
    number = rundir.open_run(path).attempt
    size = int(records.read_plan(path)["world"])
    with pytest.raises(AssertionError, match=r"rank \d failed"):
        run_ranks(killed, size, str(path), number, step, rank)


def killed(world: World, folder: str, number: int, last: int, rank: int | None) -> int:
    """Runs an attempt on one rank, which is killed in a step if it is ``rank``, or that is None."""
    step = Executor.step

    def deadly(executor: Executor, *args: Any, number: int = 0, **keys: Any) -> StepResult:
        if number == last and rank in (None, world.rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(executor, *args, number=number, **keys)

    Executor.step = deadly  # type: ignore[method-assign, assignment]
    return numbered(world, folder, number, None)


def losses(path: Path, *attempts: int) -> dict[tuple[int, int], float | None]:
    """Returns the loss by (step, rank) that some attempts noted; no step may be noted twice."""
    found: dict[tuple[int, int], float | None] = {}
    for number in attempts:
        for line in read_lines(file_names.attempt_dir(path, number) / "metrics.jsonl"):
            if line["kind"] == "step":
                assert (line["step"], line["rank"]) not in found
                found[line["step"], line["rank"]] = line["loss"]
    return found


def mean_losses(path: Path, *attempts: int) -> list[float]:
    """Returns the loss of every step, averaged over the ranks that know it."""
    by_step: dict[int, list[float]] = {}
    for (step, _), loss in losses(path, *attempts).items():
        if loss is not None:
            by_step.setdefault(step, []).append(loss)
    return [sum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)]


def tensors_at(path: Path, step: int) -> dict[tuple[str, str], Tensor]:
    """Returns all tensors of a checkpoint by (file, name)."""
    files = sorted(checkpoints.place(path, step).glob("*.safetensors"))
    return {(file.name, key): one for file in files for key, one in load_file(file).items()}


def config_at(path: Path) -> RunConfig:
    """Returns the config of a run folder."""
    return records.read_config(path)
