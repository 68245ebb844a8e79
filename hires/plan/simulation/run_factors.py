"""Refines predicted seconds with runs that exist: measured over predicted, for each network.

A time line has what every action of a run really computed. Runs are those of the index of the
results folder that ended well on this machine with the same versions, network, precision and task;
image, batch and layout may differ. What follows from a run folder is kept in the user's cache. A
folder that is damaged or gone is left out: no prediction fails because of it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError
from hires.core.ranks import timeline
from hires.core.store import cache, file_names, records, run_index
from hires.core.store.naming import plain
from hires.plan.plan import Plan
from hires.plan.simulation.calibrated_device import Factors
from hires.plan.simulation.costs import Roofline, measured_costs
from hires.plan.simulation.machine_calibration import Calibration, Machine
from hires.plan.simulation.machine_model import MachineModel, cores_of

MOST_RUNS = 9
"""The latest ones of a network, whose medians count."""
TRUSTED = 2.0
"""A run whose factor is larger, or below its inverse, was disturbed: other programs had its cores.
"""
CACHE = "run-factors"
_DAMAGE = (HiresError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)
_SECTIONS = ("precision", "engine")
"""That two runs of one network share, beside the network's own keys and the task."""


def refined(calibration: Calibration, config: RunConfig, results: Path) -> Factors:
    """Returns the factors of a config's network by its runs in a folder; all 1 without any.

    Runs with several threads a rank are left out: a calibration is of one.
    """
    if not calibration.is_measured:
        return Factors()
    of_runs: list[Factors] = []
    for folder, attempt in _runs_like(calibration.machine, config, results):
        if len(of_runs) == MOST_RUNS:
            break
        with contextlib.suppress(*_DAMAGE):
            factors = _kept_factors(calibration, folder, attempt)
            if all(1 / TRUSTED <= factor <= TRUSTED for factor in factors):
                of_runs.append(factors)
    return Factors(*map(statistics.median, zip(*of_runs, strict=True))) if of_runs else Factors()


def factors_of(calibration: Calibration, run: Path, attempt: int) -> Factors:
    """Returns the factors of one run: medians over the actions of all ranks.

    HiresError, or another error of Python: its folder is damaged.
    """
    plan = Plan.from_dict(records.read_plan(run))
    steps = timeline.read(file_names.attempt_dir(run, attempt))
    costs = measured_costs(plan, steps)
    # Runs with one thread a rank; ranks that wait leave memory to the others, as in a prediction.
    machine = MachineModel(
        "", calibration.links.network(), calibration, cores=cores_of(calibration)
    )
    model = Roofline(plan, machine.speed_of(plan))
    ratios: dict[str, list[float]] = {"F": [], "B": []}
    for (rank, action), pieces in costs.seconds.items():
        predicted_s = sum(model.steps_s(rank, action))
        if predicted_s and sum(pieces):
            ratios[action[0]].append(sum(pieces) / predicted_s)
    updates = [
        measured_s / (model.optimiser_s(rank) - model.device.besides_s(len(plan.actions_of(rank))))
        for rank, measured_s in costs.updates.items()
        if plan.training and measured_s
    ]
    every = (*ratios.values(), updates)
    return Factors(*(statistics.median(ones) if ones else 1.0 for ones in every))


def _kept_factors(calibration: Calibration, run: Path, attempt: int) -> Factors:
    file = file_names.attempt_dir(run, attempt) / timeline.FILE
    stat = file.stat()
    facts = [str(run.absolute()), attempt, stat.st_size, stat.st_mtime_ns, calibration.changed]
    key = cache.key_of(*facts)
    kept = cache.cached(CACHE, key)
    if kept is not None:
        return Factors(*map(float, kept))
    factors = factors_of(calibration, run, attempt)
    cache.keep(CACHE, key, [*factors])
    return factors


def _runs_like(machine: Machine, config: RunConfig, results: Path) -> list[tuple[Path, int]]:
    """Returns folders and attempts of runs of the same network, the latest first."""
    lines: Mapping[Any, Any] = {}
    with contextlib.suppress(*_DAMAGE):
        lines = run_index.lines_of(results, [])
    wanted = _network_of(plain(config))
    runs = []
    for (campaign, run, attempt), line in reversed([*lines.items()]):
        with contextlib.suppress(*_DAMAGE):
            values, made = line["config"], line["record"]["provenance"]
            hardware = made["hardware"]
            here = Machine(hardware["cpu"], hardware["cores"], made["torch"], made["hires"])
            counts = line["exit"]["state"] == "done" and values["device"] == "cpu"
            counts = counts and values["launcher"]["threads"] == 1
            # Ranks that take turns on a core measure each other's time.
            counts = counts and line["record"].get("world", 1) <= machine.cores
            if counts and here == machine and _network_of(values) == wanted:
                runs.append((results / campaign / run, attempt))
    return runs


def _network_of(values: Mapping[str, Any]) -> list[Any]:
    model = {key: value for key, value in values["model"].items() if key != "classes"}
    return [model, values["task"]["name"], *(values[section] for section in _SECTIONS)]
