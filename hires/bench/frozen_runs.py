"""Executes copies of run folders that ``hires run --dry-run`` froze elsewhere, and checks them.

    there    hires run --dry-run device=cuda cluster.gpus=1 ...     a folder, no GPU needed
    here     copy | run to its end | the first steps again, on the CPU in float64

The loss of a step differs from that on the CPU by what the forward pass rounds and, for every step
before it, by what the gradients were off, each within the bounds of ``hires verify``. A run of
inference has no losses: its outputs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hires.bench.gpu_runs import NotRunError, Runs, losses, memory_ratio, skipped_steps
from hires.core.config.launcher_config import ClusterConfig, LauncherConfig
from hires.core.config.run_config import EngineConfig, RunConfig, from_dict
from hires.core.errors import ConfigError, RunError
from hires.core.store import attempts, edits, file_names, frozen, reading, records, rundir
from hires.core.store.files import write_atomically
from hires.core.store.naming import identity, plain
from hires.core.store.rundir import RunDir
from hires.engine.verify_bounds import bounds_of, in_float64
from hires.plan.hardware import CPU, CUDA, GLOO, NCCL
from hires.plan.plan import Plan

COMPARED = 4
"""Most steps of a run that are repeated on the CPU."""


def run_folders(flag: str, places: Sequence[str]) -> list[Path]:
    """Returns the run folders that are named, or lie in a named campaign; ConfigError: none."""
    folders: list[Path] = []
    for place in places:
        inside = sorted(Path(place).glob(f"*/{file_names.CONFIG}"))
        files = [Path(place, file_names.CONFIG)] if _is_run(Path(place)) else inside
        if not files:
            raise ConfigError(
                f"{flag} {place} is no run folder and holds none; `hires run --dry-run "
                f"device=cuda cluster.gpus=1 ...` makes one"
            )
        folders += [file.parent.absolute() for file in files]
    return folders


def check_folder(runs: Runs, folder: Path, most: float) -> tuple[bool, str]:
    """Executes a copy of a run folder; returns whether all is well, and the details.

    HiresError: it is damaged, of another hires, does not fit this machine, or failed. NotRunError:
    this is a rehearsal, and the folder is for another device. Predicted and measured memory may
    differ by the factor ``most``.
    """
    config, plan = _readable(folder)
    require_fit(config, plan, runs.device, torch.cuda.device_count())
    run = _copied(folder, config, runs.folder / "frozen")
    runs.launch(run)
    passed, details = [], []
    if config.task.name == "train":
        first = replace(_on_cpu(config, runs.folder), steps=min(config.steps, COMPARED))
        fine, text = compare_losses(run, runs.run(first), config, plan)
    else:
        again = RunDir(run.path, attempts.next_attempt(run.path))
        fine, text = runs.compared(again)
    passed.append(fine)
    details.append(text)
    ratio = memory_ratio(run)
    if not math.isnan(ratio) and runs.device in (CPU, CUDA):
        passed.append(1 / most <= ratio <= most)
        details.append(f"memory predicted {ratio - 1:+.1%} of the measured peak")
    return all(passed), "; ".join(details)


def require_fit(config: RunConfig, plan: Plan, device: str, gpus: int) -> None:
    """Raises a RunError if a frozen run cannot be executed on this machine's ``gpus``.

    NotRunError: a rehearsal without a GPU leaves out the folders for another device.
    """
    if plan.device != device:
        why = f"frozen for device={plan.device}"
        if device == CUDA:
            raise RunError(f"it is {why}; use device=cuda cluster.gpus=1")
        where = " on a machine with a GPU" if plan.device == CUDA else ""
        raise NotRunError(f"{why}; use --device {plan.device}{where}")
    if not config.launcher.is_here:
        name = config.launcher.name if config.launcher.has_jobs else "hosts"
        raise RunError(f"it is frozen for other machines ({name}); use launcher=local")
    if device != CUDA:
        return
    needed = plan.world if plan.backend == NCCL else min(plan.world, config.cluster.gpus or 1)
    if needed > gpus:
        raise RunError(
            f"it is frozen for {needed} GPUs with {plan.backend}, and this machine shows {gpus}; "
            f"use cluster.gpus={max(1, gpus)}, with which ranks share GPUs, or fewer ranks"
        )


def compare_losses(
    run: RunDir, reference: RunDir, config: RunConfig, plan: Plan
) -> tuple[bool, str]:
    """Returns whether the losses of a run are those of the reference, within the bound."""
    expected, got = losses(reference), losses(run)
    # A step whose gradients overflowed moved nothing: the losses behind it are of other weights.
    skipped = skipped_steps(run)
    compared = min(len(expected), len(got), *(step + 1 for step in skipped))
    if not compared:
        return False, "no step has a loss"
    bounds, scale = bounds_of(config, plan.graph).by_kind, max(map(abs, expected[:compared]))
    pairs = zip(got[:compared], expected[:compared], strict=True)
    errors = [abs(one - other) / scale for one, other in pairs]
    allowed = [bounds["loss"] + step * bounds["gradients"] for step in range(compared)]
    fine = all(error <= most for error, most in zip(errors, allowed, strict=True))
    worst = max(range(compared), key=lambda step: errors[step] / allowed[step])
    behind = f", then step {skipped[0] + 1} overflowed" if skipped else ""
    text = f"losses of {compared} steps differ from the CPU by {errors[worst]:.1e} "
    text += f"of {allowed[worst]:.0e}"
    return fine, f"{text}{behind}"


def _readable(folder: Path) -> tuple[RunConfig, Plan]:
    edits.require_unchanged(rundir.frozen_folder(folder))
    if reading.HAS_YAML:
        config = records.read_config(folder)
    else:
        # ``config.yaml`` is what was frozen, and so is this copy of it if the digests agree.
        values = reading.read_json(folder / file_names.PLANNED).get("config")
        held = frozen.read(folder)
        config = from_dict(values) if isinstance(values, dict) else RunConfig()
        if held is None or frozen.digest(identity(plain(config))) != held.config:
            raise RunError(
                f"{folder} cannot be read without PyYAML: it was not frozen by `hires run "
                f"--dry-run` of this hires; freeze it again, or install pyyaml"
            )
    return config, Plan.from_dict(records.read_plan(folder))


def _copied(folder: Path, config: RunConfig, place: Path) -> RunDir:
    # Two campaigns may hold runs of one name.
    number = len([*place.glob("*")]) if place.exists() else 0
    copy, plan = place / str(number) / folder.name, folder / file_names.PLAN
    copy.mkdir(parents=True)
    files = {file_names.CONFIG: reading.yaml_text(plain(config)), plan.name: plan.read_text()}
    held = frozen.read(folder)
    if held is not None:
        files[file_names.FROZEN] = replace(held, files=frozen.hashes(files)).text()
    for name, text in files.items():
        write_atomically(copy / name, text)
    return RunDir(copy, attempts.next_attempt(copy))


def _on_cpu(config: RunConfig, results: Path) -> RunConfig:
    """Returns the run on the CPU in float64, in the same layout: microbatches are the same.

    Nothing is compiled: the compiler may be what is wrong.
    """
    return replace(
        in_float64(config),
        device=CPU,
        engine=EngineConfig(),
        comm=replace(config.comm, backend=GLOO, dtype="value"),
        launcher=LauncherConfig(threads=config.launcher.threads),
        cluster=ClusterConfig(),
        memory=replace(config.memory, limit=None),
        measure=replace(config.measure, warmup=0, steps=None),
        results=str(results),
        campaign="reference",
    )


def _is_run(folder: Path) -> bool:
    return (folder / file_names.CONFIG).is_file()
