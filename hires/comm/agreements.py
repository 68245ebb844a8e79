"""Exchanges texts and numbers of all ranks, and compares how they begin."""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from hires.comm.guarded_waits import waiting
from hires.comm.operations import all_reduce
from hires.comm.plain_reductions import ReduceOp
from hires.comm.transport import Group, transport, unlogged
from hires.core.errors import CommError

PATIENCE_S = 3600.0  # longest wait for a rank that reads or writes a large file


def compare_starts(*facts: str) -> None:
    """Compares the facts that decide routes (R1); CommError: those of another rank differ."""
    # Only a digest travels, until one differs: all ranks see the same digests.
    if transport.world.size == 1:
        return
    own = "; ".join(facts)
    digest = torch.tensor([*hashlib.sha256(own.encode()).digest()], dtype=torch.uint8)
    digests = digest.repeat(transport.world.size, 1)
    gather = functools.partial(transport.backend.all_gather, [*digests], digest)
    waiting(gather, "a comparison of how ranks begin", backend=transport.default)
    if bool((digests == digests[0]).all()):
        return
    texts = gather_texts(own)
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


def gather_texts(
    text: str,
    what: str = "an exchange of names",
    ranks: Sequence[int] | None = None,
    process_group: Any = None,
) -> list[str]:
    """Returns the texts of all ranks of a group, or of the world, in their order."""
    among = transport.world.ranks if ranks is None else ranks
    return [broadcast_text(text, what, rank, process_group) for rank in among]


def broadcast_text(
    text: str, what: str = "a broadcast of rank 0", source: int = 0, process_group: Any = None
) -> str:
    """Returns the text of one rank, ``source``, on every rank of a group or of the world."""
    backend, data = transport.backend, os.fsencode(text)
    # As tensors, not as pickled objects: a stranger at the port must not be able to run code.
    size = torch.tensor([len(data)])
    waiting(lambda: backend.broadcast(size, source, group=process_group), what)
    letters = torch.zeros(int(size), dtype=torch.uint8)
    if transport.rank == source:
        letters = torch.tensor(list(data), dtype=torch.uint8)
    if len(letters):
        waiting(lambda: backend.broadcast(letters, source, group=process_group), what)
    return os.fsdecode(bytes(letters.tolist()))


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
