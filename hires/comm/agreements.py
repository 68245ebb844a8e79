"""Exchanges texts and numbers of all ranks of a world, and compares how they begin."""

from __future__ import annotations

import contextlib
import datetime
import functools

import torch

from hires.comm.comm_world import LEFT, CommWorld, Group, default_world, unlogged
from hires.comm.handles import waiting
from hires.comm.operations import all_reduce
from hires.comm.plain_reductions import ReduceOp
from hires.core.errors import CommError
from hires.core.ranks.call_records import CallFacts

PATIENCE_S = 3600.0  # longest wait for a rank that reads or writes a large file
_TEXTS = CallFacts("exchange of texts", 0, "text", "the store")


def compare_starts(world: CommWorld, *facts: str) -> None:
    """Compares the facts that decide routes (R1); CommError: those of another rank differ."""
    texts = gather_texts("; ".join(facts), "a comparison of how ranks begin", world)
    if world.texts is not None and len({*texts}) > 1:
        with contextlib.suppress(CommError):
            world.texts("", is_last=True)
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        raise CommError(
            f"rank {other} has begun with {texts[other]}, and rank 0 with {texts[0]}; "
            "all ranks need the same"
        )


def gather_texts(
    text: str, what: str = "an exchange of texts", world: CommWorld | None = None
) -> list[str]:
    """Returns the texts of all ranks of a world in their order, through their store."""
    world = world or default_world()
    if world.was_left:
        raise CommError(LEFT)
    exchange, check, number = world.texts, world.check, -1
    if exchange is None:
        return [text] * world.all_ranks.size
    ranks = tuple(world.all_ranks.ranks)
    if check is not None:
        number = check.note(check.ring.channel("texts of all ranks", ranks), _TEXTS)
    texts: list[str] = waiting(lambda: exchange(text), what, world, ranks, number)
    return texts


def broadcast_text(text: str) -> str:
    """Returns the text of rank 0 on every rank of the world."""
    return gather_texts(text if default_world().rank == 0 else "", "a broadcast of rank 0")[0]


def max_all(number: int, patient: bool = False) -> int:
    """Returns the largest number of all ranks of the world; also a barrier.

    ``patient``: the others may take as long as they need to read or write files.
    """
    numbers, world = torch.tensor([number]), default_world()
    if not patient:
        all_reduce(numbers, ReduceOp.MAX, backend=world.default)
        return int(numbers)
    with unlogged:  # it is no part of a step
        all_reduce(numbers, ReduceOp.MAX, _patient_group(world), backend=world.default)
    return int(numbers)


def sum_all(number: float) -> float:
    """Returns the sum of a number over all ranks of the world, in float64; also a barrier."""
    numbers = torch.tensor([number], dtype=torch.float64)
    all_reduce(numbers, backend=default_world().default)
    return float(numbers)


def _patient_group(world: CommWorld) -> Group:
    # All ranks with a timeout long enough for slow disks, on the default backend.
    if world.patient is None:
        every, name = world.all_ranks, world.default
        patience = datetime.timedelta(seconds=max(world.timeout_s, PATIENCE_S))
        create = functools.partial(world.backend.new_group, every.ranks, patience)
        handle = waiting(create, "the group of all ranks", world, world.all_ranks.ranks)
        world.patient = Group(every.ranks, every.index, {name: handle}, world=world)
    return world.patient
