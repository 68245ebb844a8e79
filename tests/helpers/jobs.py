"""Verifies, evaluates and runs layouts on ranks: functions that ``run_ranks`` can name."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hires import comm, worker
from hires.comm.staging import Staging
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import HiresError, ParityError
from hires.core.ranks.world import World
from hires.core.store import file_names, records
from hires.data.opening import open_data
from hires.engine.build import build_rank
from hires.engine.device import open_device
from hires.engine.evaluate import evaluate_pass
from hires.engine.memory_meter import PeakMeter
from hires.engine.rank_engine import RankEngine
from hires.engine.region_compiler import compile_regions
from hires.engine.verify import verify_rank
from hires.engine.weights_file import agreed_weights, open_weights
from hires.parallel.gradients import StageGradients
from hires.parallel.halo import Borrowed
from hires.plan.plan import Plan
from hires.plan.traffic import backends_of_plan

POOLED = True
"""The jobs leave a rank as it was, so that it serves others."""


def join(world: World, *plans: Plan, **options: Any) -> None:
    """Joins the world with all backends of some plans; the first is that of the first plan."""
    backends = dict.fromkeys(name for plan in plans for name in backends_of_plan(plan))
    comm.init([*backends], world=world, timeout_s=60, **options)


def verify_in(folder: str, engine: RankEngine, config: RunConfig) -> None:
    """Compares a step with one process, and writes what it found in a folder."""
    (Path(folder) / file_names.LOGS).mkdir(parents=True, exist_ok=True)
    verify_rank(engine, config, Path(folder))


def verify(world: World, config: dict[str, Any], plan: dict[str, Any], folder: str) -> Any:
    """Returns verify.json of one layout, on rank 0, with what was ``compiled`` there.

    ``later`` counts what was compiled in the step.
    """
    settings, made = from_dict(config), Plan.from_dict(plan)
    device = open_device(made.device, world.local_rank)
    join(world, made, host_empty=device.host_empty)
    weights = agreed_weights(settings, Path(folder))
    engine = build_rank(settings, made, world.rank, 1, device, weights=weights)
    compiled = compile_regions(engine, settings)
    graphs = torch._dynamo.utils.counters["stats"] if compiled is not None else {"unique_graphs": 0}
    before = graphs["unique_graphs"]
    verify_in(folder, engine, settings)
    later = graphs["unique_graphs"] - before
    comm.barrier()
    comm.shutdown()
    if world.rank:
        return None
    answer = json.loads((Path(folder) / "verify.json").read_text())
    if compiled is not None:
        counts = {"regions": compiled.regions, "failed": compiled.failed, "later": later}
        answer["compiled"] = counts
    return answer


def verify_each(world: World, layouts: list[tuple[Any, ...]]) -> dict[str, float]:
    """Returns ``max_rel_err`` of several layouts that have as many ranks, by name, on rank 0.

    Each is (name, config, plan, folder); device and backend are those of the first plan.
    """
    errors, plans = {}, [Plan.from_dict(plan) for _, _, plan, _ in layouts]
    device = open_device(plans[0].device, world.local_rank)
    join(world, *plans, host_empty=device.host_empty)
    for name, config, plan, folder in layouts:
        settings, made = from_dict(config), Plan.from_dict(plan)
        verify_in(folder, build_rank(settings, made, world.rank, 1, device), settings)
        comm.barrier()
        if world.rank == 0:
            answer = json.loads((Path(folder) / "verify.json").read_text())
            errors[name] = answer["max_rel_err"]
    comm.shutdown()
    return errors


def evaluate_each(world: World, layouts: list[tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    """Returns the summary of a pass over the data of several layouts, by name, on each rank."""
    found, plans = {}, [Plan.from_dict(plan) for _, _, plan in layouts]
    device = open_device(plans[0].device, world.local_rank)
    join(world, *plans, host_empty=device.host_empty)
    for name, config, plan in layouts:
        settings, made = from_dict(config), Plan.from_dict(plan)
        weights = open_weights(settings.weights) if settings.weights else None
        engine = build_rank(settings, made, world.rank, 0, device, weights=weights)
        found[name] = evaluate_pass(engine, settings, open_data(settings))
        engine.close()
    comm.shutdown()
    return found


def run_folders(world: World, folders: list[str]) -> None:
    """Runs the first attempt of several run folders, each on the device of its plan."""
    plans = [Plan.from_dict(records.read_plan(folder)) for folder in folders]
    devices = {plan.device: open_device(plan.device, world.local_rank) for plan in plans}
    join(world, *plans)
    for folder, plan in zip(folders, plans, strict=True):
        device, config = devices[plan.device], records.read_config(folder)
        stage = functools.partial(Staging, ("cpu",), device.host_empty)
        joined = comm.default_world()
        joined.stagings = {name: stage() for name in joined.backends}
        meter = PeakMeter(config, device)
        assert worker.run_attempt(Path(folder), config, plan, world, meter, device) == 0
    comm.shutdown()


def failing_folder(world: World, folder: str) -> str:
    """Returns the error that ends the first attempt of a run folder."""
    plan, config = Plan.from_dict(records.read_plan(folder)), records.read_config(folder)
    join(world, plan)
    text, meter = "", PeakMeter(config, open_device("cpu", 0))
    try:
        worker.run_attempt(Path(folder), config, plan, world, meter)
    except HiresError as error:
        text = str(error)
    comm.shutdown()
    return text


def wrong_verify(
    world: World, config: dict[str, Any], plan: dict[str, Any], folder: str, fault: str
) -> Any:
    """Returns :func:`verify` of a layout with a fault, on rank 0.

    ``halo``: borrowed pixels are zero; ``average``: gradients are averaged over the tiles.
    """
    pieces, terms = Borrowed.pieces, StageGradients.terms

    def blank(borrowed: Borrowed) -> Any:
        return [(rect, torch.zeros_like(pixels)) for rect, pixels in pieces(borrowed)]

    def averaged(stage: StageGradients, number: int) -> Any:
        return [term.div_(stage.num_tiles) for term in terms(stage, number)]

    with pytest.MonkeyPatch.context() as patch:
        if fault == "halo":
            patch.setattr(Borrowed, "pieces", blank)
        else:
            patch.setattr(StageGradients, "terms", averaged)
        try:
            return verify(world, config, plan, folder)
        except ParityError:
            comm.barrier()
            comm.shutdown()
            return json.loads((Path(folder) / "verify.json").read_text())
