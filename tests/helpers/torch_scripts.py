"""Runs scripts over the backend ``hires`` of torch.distributed, beside the same over gloo.

Each script takes a group of gloo with all ranks, while the default group is that of ``hires``. It
raises where both differ; with ``exact`` bits are compared, where hires takes gloo, too.
"""

from __future__ import annotations

import datetime
import os
import traceback
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hires import torch_backend
from hires.core.ranks.world import World
from tests.helpers import torch_operations, torch_training
from tests.helpers.torch_comparison import SCRIPTS, state

MODULES = (torch_operations, torch_training)
"""Their import fills ``SCRIPTS``."""


def run_scripts(
    world: World, backends: str, exact: bool, place: str = "", table: str = ""
) -> dict[str, str]:
    """Returns what each script raised, ``""`` where it passed."""
    state.exact, names = exact, [*SCRIPTS]
    os.environ.update(HIRES_COMM_BACKENDS=backends, HIRES_COMM_TABLE=table)
    place = place or f"tcp://{world.address}:{world.port}"
    patience = datetime.timedelta(seconds=60)
    torch_backend.register()  # torch has, where hires is installed as a package
    dist.init_process_group("hires", place, patience, world.size, world.rank)
    gloo, results = dist.new_group(backend="gloo"), {}
    for name in names:
        torch.manual_seed(1 + world.rank)
        try:
            state.differences.clear()
            SCRIPTS[name](gloo)
            results[name] = "".join(state.differences)
        except Exception:
            results[name] = traceback.format_exc()
        problems: list[Any] = [None] * world.size
        dist.all_gather_object(problems, results[name], group=gloo)
        if "Traceback" in str(problems):  # the ranks are no longer in step
            results.update({late: "not reached" for late in names if late not in results})
            return results
    dist.destroy_process_group()
    return results


def leave_early(world: World) -> str:
    """Returns the error of a backward pass that the last rank, which has ended, does not take."""
    torch_backend.register()
    place, limit = f"tcp://{world.address}:{world.port}", datetime.timedelta(seconds=5)
    dist.init_process_group("hires", place, limit, world.size, world.rank)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    if world.rank == 0:
        try:
            model(torch.ones(2, 8)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""
