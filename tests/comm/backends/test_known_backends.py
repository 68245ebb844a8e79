"""A backend that is registered under a name carries all messages."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from hires import comm
from hires.comm.backends.cma_backend import CmaBackend
from hires.comm.backends.gloo_backend import GlooBackend
from hires.comm.backends.known_backends import BACKENDS
from hires.comm.backends.mpi_backend import MpiBackend
from hires.comm.backends.nccl import NcclBackend
from hires.comm.backends.nccl_direct import NcclDirectBackend
from hires.comm.backends.null import NullBackend
from hires.comm.rehearsal import SilentBackend
from hires.comm.transport import Transport, transport
from hires.core.config.comm_config import CommConfig
from hires.core.errors import CommError
from hires.core.ranks.world import World
from hires.plan.proof import prove

WORLD = World(0, 2, 0, 2, "127.0.0.1", 29500, 0)


class Doubling(SilentBackend):
    """A world of equal ranks: a sum over two of them doubles."""

    def all_reduce(
        self, tensor: Tensor, op: object = None, group: object = None, async_op: bool = False
    ) -> object:
        return super().all_reduce(tensor.mul_(2), op, group, async_op)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(BACKENDS, "_items", dict(BACKENDS._items))
    for name, value in vars(Transport()).items():
        monkeypatch.setattr(transport, name, value)


def test_backend_that_was_registered_carries_the_messages():
    BACKENDS.register("doubling")(lambda world, timeout_s: Doubling(world.rank, False))
    comm.init(["doubling"], world=WORLD, timeout_s=1.0)
    group = comm.make_groups([[0, 1]])[0]
    tensor = torch.ones(3)
    comm.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0, 2.0, 2.0]


def test_backend_that_cannot_join_names_the_rendezvous():
    def broken(world: World, timeout_s: float) -> object:
        raise RuntimeError("no such network")

    BACKENDS.register("broken")(broken)
    with pytest.raises(CommError, match=r"rendezvous at .* failed: no such network"):
        comm.init(["broken"], world=WORLD, timeout_s=1.0)


def test_backends_of_the_config_are_there_and_the_proof_has_their_semantics():
    [chosen] = [one for one in fields(CommConfig) if one.name == "backend"]
    offered = {*chosen.metadata["choices"]} - {"auto"}
    assert offered <= {*BACKENDS}
    assert offered <= {*prove.BACKENDS}


def test_group_that_was_destroyed_is_freed_on_its_backends_and_refused(monkeypatch):
    freed: list[object] = []
    monkeypatch.setattr(Doubling, "destroy_group", lambda _, group: freed.append(group))
    BACKENDS.register("doubling")(lambda world, timeout_s: Doubling(world.rank, False))
    comm.init(["doubling"], world=WORLD, timeout_s=1.0, algorithms=["two_step"])
    group = comm.new_group([0, 1])
    queues, handle = len(transport.queues), group.handles["doubling"]
    comm.all_reduce(torch.ones(3), group=group)
    comm.destroy_group(group)
    comm.destroy_group(group)
    assert freed[0] is handle
    assert len({*map(id, freed)}) == len(freed)
    assert len(transport.queues) == queues - 1
    with pytest.raises(CommError, match=r"ranks \[0, 1\] was destroyed"):
        comm.all_reduce(torch.ones(3), group=group)
    with pytest.raises(CommError, match="ends with shutdown"):
        comm.destroy_group(transport.world)


@pytest.mark.parametrize(
    "kind", [CmaBackend, GlooBackend, MpiBackend, NcclBackend, NcclDirectBackend, NullBackend]
)
def test_every_backend_frees_groups(kind):
    assert callable(kind.destroy_group)


def test_null_backend_makes_groups_that_their_members_alone_make():
    comm.init(["null"], world=WORLD)
    group = comm.new_group([0, 1], members_only=True)
    tensor = torch.ones(3)
    comm.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.ones(3))
