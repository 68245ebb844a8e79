"""A rank that fails to join leaves what it has joined without the other ranks."""

from __future__ import annotations

import pytest

from hires import comm
from hires.comm import membership
from hires.core.errors import CommError
from hires.core.ranks.world import World


class Joined:
    """A backend that records how it is left."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def is_initialized(self) -> bool:
        return not self.ends

    def destroy_process_group(self) -> None:
        self.ends.append("together")

    def abort(self) -> None:
        self.ends.append("alone")


def test_rank_whose_second_backend_fails_waits_for_no_other(monkeypatch):
    """The end of MPI waited without limit for ranks that had joined both."""
    joined = Joined()

    def fail(world: World, timeout_s: float) -> None:
        raise CommError("no room")

    backends = {"mpi": lambda world, timeout_s: joined, "shm": fail}
    monkeypatch.setattr(membership, "BACKENDS", backends)
    world = World(0, 2, 0, 2, "127.0.0.1", 1, 0)
    with pytest.raises(CommError, match="no room"):
        comm.init(["mpi", "shm"], world=world, timeout_s=1.0)
    assert joined.ends == ["alone"]
    assert not comm.is_initialized()
