"""Lists the backends, which carry messages between ranks: another one is an entry here.

A backend is one file. It joins the world and returns an object with the functions that
:class:`hires.comm.backends.backend_protocol.Backend` has.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from hires.comm.backends import rendezvous
from hires.comm.backends.backend_protocol import Backend
from hires.comm.backends.gloo_backend import GlooBackend
from hires.comm.backends.mpi_backend import MpiBackend
from hires.comm.backends.nccl import NcclBackend
from hires.comm.backends.null import NullBackend
from hires.comm.backends.shm_backend import ShmBackend
from hires.core.ranks.network import interface_towards
from hires.core.ranks.world import World
from hires.core.registry import Registry

BACKENDS: Registry[Callable[[World, float], Backend]] = Registry("backend")
"""``comm.backend`` -> joins the world; its longest wait for another rank, now and later, in s."""

REACHES: dict[str, tuple[str, ...]] = {
    "nccl": ("cpu", "cuda"),
    "null": ("cpu", "cuda", "meta"),
}
"""``comm.backend`` -> the kinds of device whose memory it reads and writes. Without an entry it is
the host's; tensors of other devices go through that (:mod:`hires.comm.staging`)."""
HOST_ONLY = ("cpu",)

_GLOO_INTERFACE, _NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@BACKENDS.register("gloo")
def _gloo(world: World, timeout_s: float) -> Backend:
    _choose_interface(world)
    backend = GlooBackend()
    backend.join(world, timeout_s)
    return backend


@BACKENDS.register("nccl")
def _nccl(world: World, timeout_s: float) -> Backend:
    _choose_interface(world)
    backend = NcclBackend()
    store = rendezvous.store(world, timeout_s, "nccl")
    backend.join(store, timeout_s, world.size, world.rank)
    return backend


@BACKENDS.register("mpi")
def _mpi(world: World, timeout_s: float) -> Backend:
    backend = MpiBackend()
    backend.join(world, timeout_s)
    return backend


@BACKENDS.register("shm")
def _shm(world: World, timeout_s: float) -> Backend:
    backend = ShmBackend()
    backend.join(world, timeout_s)
    return backend


@BACKENDS.register("null")
def _null(world: World, timeout_s: float) -> Backend:
    return NullBackend(world.rank)


def _choose_interface(world: World) -> None:
    # The network that leads to the other machines, if there are any: gloo would take the interface
    # of this host's own name, which is often the loopback, and NCCL any that is up.
    apart = world.local_size < world.size
    if apart and _GLOO_INTERFACE not in os.environ and (own := interface_towards(world.address)):
        os.environ[_GLOO_INTERFACE] = own
        os.environ.setdefault(_NCCL_INTERFACE, f"={own}")  # without = also ib0 means ib0.1
