"""A backend that is registered under a name carries all messages."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from hires import comm
from hires.comm import membership
from hires.comm.comm_backends import BACKENDS
from hires.comm.rehearsal import SilentBackend
from hires.core.config.run_config import CommConfig
from hires.core.errors import CommError
from hires.core.ranks.world import World
from hires.plan.proof import prove

WORLD = World(0, 2, 0, 2, "127.0.0.1", 29500, 0)


class Doubling(SilentBackend):
    """A world of equal ranks: a sum over two of them doubles."""

    def all_reduce(self, tensor: Tensor, group: object, async_op: bool) -> object:
        return super().all_reduce(tensor.mul_(2), group, async_op)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(BACKENDS, "_items", dict(BACKENDS._items))
    monkeypatch.setattr(membership, "transport", membership.Transport())


def test_backend_that_was_registered_carries_the_messages(monkeypatch):
    monkeypatch.setattr("hires.comm.runtime.transport", membership.transport)
    BACKENDS.register("doubling")(lambda world, timeout_s: Doubling(world.rank, False))
    comm.start(WORLD, 1.0, backend="doubling")
    group = comm.make_groups([[0, 1]])[0]
    tensor = torch.ones(3)
    comm.all_reduce(tensor, group)
    assert tensor.tolist() == [2.0, 2.0, 2.0]


def test_backend_that_cannot_join_names_the_rendezvous():
    def broken(world: World, timeout_s: float) -> object:
        raise RuntimeError("no such network")

    BACKENDS.register("broken")(broken)
    with pytest.raises(CommError, match=r"rendezvous at .* failed: no such network"):
        comm.start(WORLD, 1.0, backend="broken")


def test_backends_of_the_config_are_there_and_the_proof_has_their_semantics():
    [chosen] = [one for one in fields(CommConfig) if one.name == "backend"]
    assert set(chosen.metadata["choices"]) == {"auto", *BACKENDS}
    assert {*BACKENDS} <= {*prove.BACKENDS}
