"""A stand-in for NCCL over gloo, for real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hires.comm.backends import rendezvous
from hires.comm.backends.known_backends import BACKENDS
from hires.comm.backends.nccl import NcclBackend
from hires.core.ranks.world import World
from tests.helpers.jobs import verify


class Library:
    """torch.distributed over gloo, under the names of NCCL."""

    def __init__(self) -> None:
        self.backends: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def is_nccl_available(self) -> bool:
        return True

    def init_process_group(self, backend: str, *args: Any) -> None:
        self.backends.append(backend)
        dist.init_process_group("gloo", *args)

    def new_group(self, ranks: Any, timeout: Any, backend: str) -> Any:
        self.backends.append(backend)
        return dist.new_group(ranks, timeout, "gloo")


def verify_on_channels(
    world: World, config: dict[str, Any], plan: dict[str, Any], folder: str
) -> tuple[Any, list[str]]:
    """Returns verify.json of rank 0, and the backends of all groups, in order."""
    library = Library()

    def join(world: World, timeout_s: float) -> NcclBackend:
        backend = NcclBackend(library)
        store = rendezvous.store(world, timeout_s, "nccl")
        backend.join(store, timeout_s, world.size, world.rank)
        return backend

    BACKENDS._items["nccl"] = join
    torch.set_num_threads(1)
    # Its routes are those of the plan for gloo; without them everything takes its backend.
    return verify(world, config, {**plan, "routes": []}, folder), library.backends
