"""Runs layouts whose regions are engines of the stand-in: what ``run_ranks`` can name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.core.config.run_config import from_dict
from hires.core.ranks.world import World
from hires.engine.build import RankEngine, build_rank
from hires.engine.device import open_device
from hires.engine.region_calls import blank, calls_of
from hires.engine.region_engines import build_engines
from hires.engine.verify import verify_rank
from hires.engine.weights_file import agreed_weights
from hires.plan.plan import Plan
from tests.helpers.export_library import ExportLibrary
from tests.helpers.jobs import join


def engines(
    world: World, config: dict[str, Any], plan: dict[str, Any], folder: str, times: int = 1
) -> dict[str, Any]:
    """Builds the engines of a rank, some times over; returns what became of them.

    ``errors`` are the largest relative differences of the regions' real outputs from node by node,
    ``off`` the mean difference of numbers; ``operators`` those of the exported graphs.
    """
    settings, made = from_dict(config), Plan.from_dict(plan)
    device = open_device(made.device, world.local_rank)
    join(world, made, host_empty=device.host_empty)
    weights = agreed_weights(settings, Path(folder))
    engine = build_rank(settings, made, world.rank, 1, device, weights=weights)
    library, builds = ExportLibrary(gpu="none"), []
    for _ in range(times):
        built = build_engines(engine, settings, library, Path(folder) / "engines")
        builds.append({"failed": built.failed, "engines": built.engines})
    answer: dict[str, Any] = {"builds": builds, **_compared(engine, settings)}
    nodes = [node for program in library.programs for node in program.graph.nodes]
    answer["operators"] = sorted({str(n.target) for n in nodes if n.op == "call_function"})
    if settings.precision.name != "int8":
        verify_rank(engine, settings, Path(folder))
    comm.barrier()
    comm.shutdown()
    return answer


@torch.no_grad()
def _compared(engine: RankEngine, config: Any) -> dict[str, list[float]]:
    errors, off = [], []
    calls = calls_of(engine, config)
    generator = torch.Generator().manual_seed(3)
    for (direction, number), own in calls.items():
        region = engine.modules[direction].regions[number]
        for call in own:
            given = [_drawn(blank(one, torch.device("cpu")), generator) for one in call.inputs]
            values = dict(zip(region.inputs, given, strict=True))
            for name, run in ((node.name, run) for node, run in region.steps):
                values[name] = run(values)
            expected = [values[name] for name in region.outputs]
            found = dict(zip(region.inputs, given, strict=True))
            region.run(found)
            for name, one in zip(region.outputs, expected, strict=True):
                if one.dtype == torch.uint8:
                    off.append(float((found[name].float() - one.float()).abs().mean()))
                else:
                    most = one.abs().max().clamp_min(1e-9)
                    errors.append(float((found[name] - one).abs().max() / most))
    return {"errors": errors, "off": off}


def _drawn(blank: Tensor, generator: torch.Generator) -> Tensor:
    if blank.dtype == torch.uint8:
        return blank.random_(0, 256, generator=generator)
    return blank.uniform_(0.0, 1.0, generator=generator)
