"""Holds the store at which the ranks of a world meet, one for all backends of a process."""

from __future__ import annotations

import collections
import datetime
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hires.core.ranks.world import World

_library: Any = torch._C._distributed_c10d
_stores: dict[World, Any] = {}
_served: list[Any] = []  # the last one, as long as no other is served: another rank may be early
_meetings: collections.Counter[tuple[str, int, int]] = collections.Counter()  # of a world


class GroupNumbers:
    """Numbers groups alike on all their members, whatever other groups each rank makes."""

    def __init__(self) -> None:
        self._made: collections.Counter[str] = collections.Counter()

    def next(self, ranks: Sequence[int]) -> int:
        """Returns the number of one more group of these ranks, below 2^63."""
        text = ",".join(map(str, ranks))
        self._made[text] += 1
        digest = hashlib.blake2b(f"{text} {self._made[text]}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def store(world: World, timeout_s: float, name: str) -> Any:
    """Returns the part of the world's store that belongs to ``name``.

    Rank 0 serves it at the address of the world, unless torchrun does; RuntimeError: a rank does
    not come within ``timeout_s``.
    """
    if world not in _stores:
        patience, serves = datetime.timedelta(seconds=timeout_s), world.rank == 0
        whole = _library.TCPStore(
            world.address,
            world.port,
            world.size,
            serves and not agent_serves(world),
            patience,
            multi_tenant=True,
        )
        if serves and world.size > 1:
            # A rank of the next world may connect before this one leaves.
            _served[:] = [whole]
        use(world, whole)
    return part(_stores[world], name)


def agent_serves(world: World, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun's agent serves the store at the address of the world."""
    place = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return serves and place == (world.address, str(world.port))


def use(world: World, whole: Any) -> None:
    """Makes the ranks of a world meet at a store that they share already."""
    # It may outlive the world, and the next one must not read what this one has left.
    place = world.address, world.port, world.size
    _meetings[place] += 1
    _stores[world] = part(whole, f"hires, {world.size} ranks, world {_meetings[place]}")


def part(whole: Any, name: str) -> Any:
    """Returns a part of a store whose keys no other part has."""
    return _library.PrefixStore(name, whole)


def texts(meeting: Any, num_ranks: int, index: int) -> Callable[[str], list[str]]:
    """Returns a function that exchanges texts of some ranks, in a part of a store for them alone.

    The first rank collects the texts and hands them out together, so that a call costs each other
    rank two looks at the store. It deletes what all have read.
    """
    rounds = itertools.count()

    def exchange(text: str) -> list[str]:
        number = next(rounds)
        own = part(meeting, f"texts {number}")
        if index == 0:
            others = [own.get(str(rank)).decode() for rank in range(1, num_ranks)]
            own.set("all", json.dumps([text, *others]))
            for rank in range(1, num_ranks):
                own.delete_key(str(rank))
            if number:  # the others are here, so they have read what came before
                part(meeting, f"texts {number - 1}").delete_key("all")
        else:
            own.set(str(index), text)
        return list(json.loads(own.get("all")))

    return exchange


def file_store(path: Path, size: int) -> Any:
    """Returns a store in a file, for ranks of one machine."""
    return _library.FileStore(str(path), size)


def torch_world(world: World, timeout_s: float) -> None:
    """Makes the default group of torch.distributed, over gloo, for what is built on that."""
    rank, patience = world.rank, datetime.timedelta(seconds=timeout_s)
    own = store(world, timeout_s, "torch")
    dist.init_process_group("gloo", None, patience, world.size, rank, own)


def leave() -> None:
    """Leaves the stores of this process."""
    _stores.clear()
