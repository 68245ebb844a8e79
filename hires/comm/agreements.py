"""Exchanges texts and numbers of all ranks, and compares how they begin."""

from __future__ import annotations

import datetime
import functools

import torch

from hires.comm.guarded_waits import waiting
from hires.comm.operations import all_reduce
from hires.comm.plain_reductions import ReduceOp
from hires.comm.transport import Group, transport, unlogged
from hires.core.errors import CommError

PATIENCE_S = 3600.0  # longest wait for a rank that reads or writes a large file


def compare_starts(*facts: str) -> None:
    """Compares the facts that decide routes (R1); CommError: those of another rank differ."""
    texts = gather_texts("; ".join(facts), "a comparison of how ranks begin")
    if len({*texts}) > 1:
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        raise CommError(
            f"rank {other} has begun with {texts[other]}, and rank 0 with {texts[0]}; "
            "all ranks need the same"
        )


@functools.cache
def patient_group() -> Group:
    """Returns all ranks with a timeout long enough for slow disks, on the default backend."""
    world, name = transport.world, transport.default
    patience = datetime.timedelta(seconds=max(transport.timeout_s, PATIENCE_S))
    create = functools.partial(transport.backend.new_group, world.ranks, patience)
    return Group(world.ranks, world.index, {name: waiting(create, "the group of all ranks")})


def gather_texts(text: str, what: str = "an exchange of texts") -> list[str]:
    """Returns the texts of all ranks of the world in their order, through their store."""
    exchange = transport.texts
    if exchange is None:
        return [text] * transport.world.size
    return waiting(lambda: exchange(text), what, ranks=tuple(transport.world.ranks))  # type: ignore[no-any-return]


def broadcast_text(text: str) -> str:
    """Returns the text of rank 0 on every rank of the world."""
    return gather_texts(text if transport.rank == 0 else "", "a broadcast of rank 0")[0]


def max_all(number: int, patient: bool = False) -> int:
    """Returns the largest number of all ranks of the world; also a barrier.

    ``patient``: the others may take as long as they need to read or write files.
    """
    numbers = torch.tensor([number])
    if not patient:
        all_reduce(numbers, ReduceOp.MAX, backend=transport.default)
        return int(numbers)
    with unlogged:  # it is no part of a step
        all_reduce(numbers, ReduceOp.MAX, patient_group(), backend=transport.default)
    return int(numbers)


def sum_all(number: float) -> float:
    """Returns the sum of a number over all ranks of the world, in float64; also a barrier."""
    numbers = torch.tensor([number], dtype=torch.float64)
    all_reduce(numbers, backend=transport.default)
    return float(numbers)
