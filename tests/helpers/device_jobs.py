"""What ranks on the simulated device do in tests: it changes torch, so no test loads it itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hires import comm
from hires.comm import membership
from hires.core.config.run_config import RunConfig, from_dict, to_dict
from hires.core.ranks.world import World
from hires.engine.build import build_rank
from hires.engine.device import open_device
from hires.engine.verify import verify_rank
from hires.plan.plan import Plan
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks

Given = tuple[str, dict[str, Any], dict[str, Any], str]
"""Name, config and plan of a layout, and the folder for its comparison."""


def given(name: str, folder: Path, config: RunConfig) -> Given:
    """Returns a layout as ranks take it."""
    plan, place = plan_of(config), folder / name.replace("/", " ")
    assert plan.ok, plan.findings
    place.mkdir()
    return name, to_dict(config), plan.to_dict(), str(place)


def verify_each(world: World, layouts: list[Given]) -> dict[str, Any]:
    """Returns ``max_rel_err`` of several layouts that have as many ranks, by name, on rank 0."""
    errors, device = {}, open_device("simulated", world.local_rank)
    comm.start(world, 60, host_empty=device.host_empty)
    for name, config, plan, folder in layouts:
        settings, made = from_dict(config), Plan.from_dict(plan)
        membership.transport.one_machine = settings.comm.shared_memory
        verify_rank(build_rank(settings, made, world.rank, 1, device), settings, Path(folder))
        comm.barrier()
        if world.rank == 0:
            answer = json.loads((Path(folder) / "verify.json").read_text())
            errors[name] = answer["max_rel_err"]
    comm.shutdown()
    return errors


def errors_of(folder: Path, configs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Returns by how much layouts on the simulated device differ from one process, by name."""
    by_size: dict[int, list[Given]] = {}
    for name, keys in configs.items():
        layout = given(name, folder, config_of(device="simulated", **keys))
        by_size.setdefault(layout[2]["world"], []).append(layout)
    errors = {}
    for size, layouts in sorted(by_size.items()):
        errors |= run_ranks(verify_each, size, layouts, timeout_s=60 + 10 * len(layouts))[0]
    return errors
