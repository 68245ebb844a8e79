"""What ranks on the simulated device do in tests: it changes torch, so no test loads it itself."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hires import comm
from hires.core.config.run_config import from_dict
from hires.core.errors import ParityError
from hires.core.ranks.world import World
from hires.engine.build import build_rank
from hires.engine.device import Accelerator, open_device
from hires.engine.verify import reference_step
from hires.parallel import norms, stage
from hires.parallel.slot_pass import SlotPass
from hires.parallel.window import Window
from hires.plan.plan import Plan
from hires.plan.traffic import backends_of_plan
from tests.helpers import simulated_device
from tests.helpers.simulated_device import Simulated


@contextlib.contextmanager
def _on_host(slot: SlotPass) -> Iterator[None]:
    slot.context.device, before = torch.device("cpu"), slot.context.device
    try:
        yield
    finally:
        slot.context.device = before


_empty, _rows, _combine = SlotPass.empty, Window.tap_rows, norms.combine_moments
_constant = stage.constant_tensor


def _empty_on_host(slot: SlotPass, *args: Any) -> Tensor:
    with _on_host(slot):
        return _empty(slot, *args)


class _Stuck:
    # A constant that does not move.
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> Tensor:
        return self.tensor


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "weights": (Accelerator, "place", lambda device, tensor: tensor),
    "images": (Accelerator, "uploads", lambda device: None),
    "receives": (SlotPass, "empty", _empty_on_host),
    "rows of a scaling": (Window, "tap_rows", lambda w, dim, _: _rows(w, dim, torch.device("cpu"))),
    "shares of the tiles": (norms, "combine_moments", lambda p, shares: _combine(p, shares.cpu())),
    "memory of images": (Simulated, "keep_for", lambda device, tensor, stream: None),
    "constants": (stage, "constant_tensor", lambda fact: _Stuck(_constant(fact))),
}
"""Each leaves something on the host that belongs on the device, a ``.to(device)`` less, or frees
memory while another stream uses it."""


def mutate_each(world: World, config: dict[str, Any], plan: dict[str, Any]) -> dict[str, str]:
    """Returns what each mutation makes of rank 0's step, alone: an error, or nothing.

    The step runs without the other ranks: what is received holds any numbers.
    """
    settings, made = from_dict(config), Plan.from_dict(plan)
    device = open_device("simulated", 0)

    def step() -> None:
        with comm.rehearsal(0, backends=backends_of_plan(made)):
            engine = build_rank(settings, made, 0, 1, device)
            engine.executor.step(engine.loaders)
            device.synchronize()
            engine.close()

    step()
    found = {}
    for name, (owner, attribute, changed) in MUTATIONS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, changed)
            try:
                step()
            except RuntimeError as error:
                found[name] = str(error)
    return found


def staged_messages(world: World, name: str) -> dict[str, Any]:
    """Returns what two ranks get of messages of a device, and how many buffers these took."""
    device = open_device(name, world.local_rank)
    allocated = []

    def allocate(shape: Any, dtype: torch.dtype) -> Tensor:
        allocated.append((dtype, *shape))
        return device.host_empty(shape, dtype)

    comm.init(world=world, timeout_s=60, host_empty=allocate)
    [group] = comm.make_groups([[0, 1]]).values()
    found: dict[str, Any] = {}
    for step in range(3):
        mine = torch.full((1, 2, 3, 4), float(world.rank + step), device=device.torch)
        mine = mine.contiguous(memory_format=torch.channels_last)
        arrived = torch.empty_like(mine)
        other = 1 - world.rank
        handles = [comm.irecv(arrived, other, tag=5), comm.isend(mine, other, tag=5)]
        for handle in handles:
            handle.wait()
        found[f"message {step}"] = arrived.mean().item()
        comm.all_reduce(mine, group=group)
        found[f"sum {step}"] = mine.mean().item()
        parts = [torch.full((n,), float(world.rank), device=device.torch) for n in (5, 70_000)]
        comm.all_reduce_coalesced(parts, group)
        found[f"sums {step}"] = [part.mean().item() for part in parts]
        gathered = comm.all_gather_stacked(torch.full((2,), world.rank, device=device.torch), group)
        found[f"gather {step}"] = (gathered.device.type, gathered.tolist())
        found[f"buffers {step}"] = len(allocated)
    comm.shutdown()
    return found


def careless_step(world: World, config: dict[str, Any]) -> str:
    """Returns the error of the module of a config, run on the simulated device."""
    settings, frames_of = from_dict(config), traceback.extract_tb

    def python_frames(tb: Any) -> list[traceback.FrameSummary]:  # an operator of a GPU has none
        return [f for f in frames_of(tb) if f.filename != simulated_device.__file__]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traceback, "extract_tb", python_frames)
        try:
            reference_step(settings, open_device("simulated", 0))
        except ParityError as error:
            return str(error)
    return ""
