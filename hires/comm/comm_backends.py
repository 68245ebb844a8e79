"""Lists the backends, which carry messages between ranks: another one is an entry here.

A backend joins the world and returns what carries messages: ``torch.distributed``, or an object
with those of its functions that :class:`hires.comm.rehearsal.SilentBackend` has.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hires.comm.nccl import NcclBackend
from hires.core.ranks.network import interface_towards
from hires.core.ranks.world import World
from hires.core.registry import Registry

BACKENDS: Registry[Callable[[World, float], Any]] = Registry("backend")
"""``comm.backend`` -> joins the world; its longest wait for another rank, now and later, in s."""

REACHES: dict[str, tuple[str, ...]] = {"nccl": ("cpu", "cuda")}
"""``comm.backend`` -> the kinds of device whose memory it reads and writes. Without an entry it is
the host's; tensors of other devices go through that (:mod:`hires.comm.staging`)."""
HOST_ONLY = ("cpu",)

_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@BACKENDS.register("gloo")
def _gloo(world: World, timeout_s: float) -> Any:
    _choose_interface(world)
    place, patience = f"tcp://{world.address}:{world.port}", datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", place, patience, world.size, world.rank)
    return dist


@BACKENDS.register("nccl")
def _nccl(world: World, timeout_s: float) -> Any:
    _choose_interface(world)
    backend = NcclBackend()
    backend.join(f"tcp://{world.address}:{world.port}", timeout_s, world.size, world.rank)
    return backend


def _choose_interface(world: World) -> None:
    # The network that leads to the other machines, if there are any: gloo would take the interface
    # of this host's own name, which is often the loopback, and NCCL any that is up.
    apart = world.local_size < world.size
    if apart and _GLOO_INTERFACE not in os.environ and (own := interface_towards(world.address)):
        os.environ[_GLOO_INTERFACE] = own
        os.environ.setdefault(_NCCL_INTERFACE, f"={own}")  # without = also ib0 means ib0.1
