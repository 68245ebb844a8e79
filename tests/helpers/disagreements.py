"""Programs of ranks that disagree, and the error that each rank gets."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from hires import comm, worker
from hires.comm.backends import rendezvous
from hires.core.errors import CommError
from hires.core.ranks.world import World
from tests.helpers.patience import PATIENCE_S


def unequal_sums(world: World) -> str:
    """Returns what a rank is told of a sum over gloo to which ranks give tensors of two sizes."""
    comm.init(world=world, timeout_s=4)
    comm.all_reduce(torch.ones(4))
    told = "no error"
    try:
        comm.all_reduce(torch.ones(4000 if world.rank else 5))
    except CommError as error:
        told = str(error)
    with contextlib.suppress(CommError):
        comm.shutdown()
    return told


def different_begins(world: World, names: list[str], plan: str) -> str:
    """Returns the error of ranks of which one has other backends or another plan."""
    own = (names, plan) if world.rank == 1 else (["gloo"], "same")
    try:
        comm.init(own[0], world=world, timeout_s=20, plan=own[1])
    except CommError as error:
        return str(error)
    return "no error"


def own_folders(world: World, folders: list[str]) -> str:
    """Returns the error of ranks that have a run folder each."""
    try:
        worker.run_rank(Path(folders[world.rank]), world, False)
    except CommError as error:
        return str(error)
    return "no error"


def unequal_sides(world: World, facts: dict[str, list[int]]) -> str:
    """Returns the error of a message whose two sides have other tags or sizes."""
    rendezvous.store(world, PATIENCE_S, "start")
    comm.init(world=world, timeout_s=2)
    tag, numel = facts.get("tags", [0, 0])[world.rank], facts.get("numel", [1, 1])[world.rank]
    text = ""
    try:
        (comm.recv if world.rank else comm.send)(torch.zeros(numel), 1 - world.rank, tag=tag)
    except CommError as error:
        text = str(error)
    try:
        comm.shutdown()
    except CommError as error:
        text = text or str(error)
    return text


def callback_alone(world: World) -> str:
    """Returns the error of a future whose callback calls what the other rank does not."""
    rendezvous.store(world, PATIENCE_S, "start")
    comm.init(world=world, timeout_s=2)
    handle = comm.all_reduce(torch.ones(3), async_op=True)
    text = ""
    if world.rank == 0:
        try:
            handle.get_future().then(lambda _: comm.all_reduce(torch.ones(5))).wait()
        except (CommError, RuntimeError) as error:
            text = str(error)
    handle.wait()
    with contextlib.suppress(CommError):
        comm.shutdown()
    return text
