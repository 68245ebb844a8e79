"""What ranks on the simulated device do in tests: it changes torch, so no test loads it itself."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hires import comm
from hires.core.config.run_config import from_dict
from hires.core.errors import ParityError
from hires.core.ranks.world import World
from hires.engine.build import build_rank
from hires.engine.device import Accelerator, open_device
from hires.engine.verify import reference_step
from hires.parallel import stage, window
from hires.parallel.joint_norms import NormTiles
from hires.parallel.slot_pass import SlotPass
from hires.plan.message_routes import joined_backends
from hires.plan.plan import Plan
from tests.helpers import simulated_device
from tests.helpers.simulated_device import Simulated


@contextlib.contextmanager
def _on_host(slot: SlotPass) -> Iterator[None]:
    slot.context.device, before = torch.device("cpu"), slot.context.device
    try:
        yield
    finally:
        slot.context.device = before


_empty, _rows, _shares = SlotPass.empty, window._rows, NormTiles.shares
_constant = stage.constant_tensor


def _empty_on_host(slot: SlotPass, *args: Any) -> Tensor:
    with _on_host(slot):
        return _empty(slot, *args)


class _Stuck:
    # A constant that does not move.
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> Tensor:
        """Returns it where it is."""
        return self.tensor


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "weights": (Accelerator, "place", lambda device, tensor: tensor),
    "images": (Accelerator, "uploads", lambda device: None),
    "receives": (SlotPass, "empty", _empty_on_host),
    "rows of a scaling": (window, "_rows", lambda taps, x: _rows(taps, torch.empty(0))),
    "shares of the tiles": (NormTiles, "shares", lambda t, like: t._shares.to(like.dtype)),
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
        with comm.rehearsal(0, False, backends=joined_backends(made)):
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


def mixed_operands(world: World) -> dict[str, str]:
    """Returns what comes of operations that have tensors of the host and of the device."""
    place = simulated_device.load()
    own, other = torch.arange(6.0, device=place).view(2, 3), torch.ones(2, 3)
    number, index = torch.tensor(2.0), torch.tensor([1, 0])
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: own + other,
        "add a number": lambda: own + number,
        "a number of the device": lambda: other + own.sum(),
        "cat": lambda: torch.cat([own, other]),
        "stack numbers": lambda: torch.stack([own.sum(), number]),
        "matmul": lambda: own @ other.t(),
        "linear": lambda: nn.functional.linear(own, other),
        "index": lambda: own[index].sum(),
        "put": lambda: own.clone().index_put_((index,), other),
        "out": lambda: torch.add(own, own, out=other),
        "copy to the host": lambda: torch.empty(2, 3).copy_(own).sum(),
        "copy to the device": lambda: torch.empty(2, 3, device=place).copy_(other).sum(),
        "module": lambda: nn.Linear(3, 3)(own),
        "factory": lambda: (own + torch.ones(3, device=own.device)).sum(),
        "tensor": lambda: torch.tensor([1, 2], device=place).tolist(),
        "numpy": lambda: own.numpy(),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = f"{call()}"
        except (RuntimeError, TypeError) as error:
            found[name] = type(error).__name__
    return found


def late_copies(world: World) -> list[Any]:
    """Returns what is read before and behind the events of copies that do not block."""
    device = open_device("simulated", 0)
    assert isinstance(device, Accelerator)
    uploads, computes = device.uploads(), device.module.current_stream()
    host = device.host_empty([3], torch.float32).copy_(torch.arange(3.0))
    [image], event = uploads.begin([host])
    assert image is not None
    early = (image + 0).tolist()
    host += 1  # too early: the copy reads it later
    uploads.finish([image], event)
    behind = (image + 0).tolist()
    back = device.host_empty([3], torch.float32)
    back.copy_(image, non_blocking=True)
    begun = back.tolist()
    image.fill_(7.0)  # behind the copy in the stream
    computes.synchronize()
    plain = torch.zeros(3).copy_(image, non_blocking=True)  # not pinned, so it blocks
    return [early, behind, begun, back.tolist(), plain.tolist()]


def freed_memory(world: World) -> dict[str, bool]:
    """Returns which ways fail to free a tensor that one stream allocates and another uses."""
    device = open_device("simulated", 0)
    assert isinstance(device, Accelerator)
    side, computes = device.module.Stream(), device.module.current_stream()

    def allocated() -> Tensor:
        with device.module.stream(side):
            return torch.ones(3, device=device.torch)

    def of_view() -> None:
        view = allocated().view(3, 1)
        view.add_(1)

    def kept() -> None:
        tensor = allocated()
        tensor.add_(1)
        device.keep_for(tensor, computes)

    def synchronised() -> None:
        tensor = allocated()
        tensor.add_(1)
        device.synchronize()

    def used_elsewhere() -> None:
        tensor = torch.ones(3, device=device.torch)
        with device.module.stream(side):
            tensor.add_(1)

    def saved_for_backward() -> None:
        weight = torch.ones(3, device=device.torch, requires_grad=True)
        (allocated() * weight).sum().backward()

    ways: dict[str, Callable[[], Any]] = {
        "used": lambda: allocated().add_(1),
        "not used": allocated,
        **{way.__name__: way for way in (of_view, kept, synchronised)},
        **{way.__name__: way for way in (used_elsewhere, saved_for_backward)},
    }
    found = {}
    for name, way in ways.items():
        try:
            way()
            torch.ones(1, device=device.torch)  # the next operator
            found[name] = False
        except RuntimeError as error:
            found[name] = "keep_for" in str(error)
    return found


def staged_messages(world: World) -> dict[str, Any]:
    """Returns what two ranks get of messages of the device, and how many buffers these took."""
    device = open_device("simulated", world.local_rank)
    allocated = []

    def allocate(shape: Any, dtype: torch.dtype) -> Tensor:
        allocated.append((dtype, *shape))
        return device.host_empty(shape, dtype)

    comm.init(world=world, timeout_s=60, shared_memory=False, host_empty=allocate)
    [group] = comm.make_groups([[0, 1]], 1).values()
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


def assigned_numbers(world: World) -> tuple[str, list[float]]:
    """Returns the type and the numbers of a parameter, after others have taken their place."""
    device = open_device("simulated", 0)
    weight = nn.Parameter(device.place(torch.tensor([1.0, 2.0]).double()), requires_grad=False)
    weight.data = weight.data.float() * 2
    return str((weight + 1).dtype), (weight + 1).tolist()
