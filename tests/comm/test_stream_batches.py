"""Are messages that wait for each other one group call on backends of streams?"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from hires import comm
from hires.bench.message_sweep import routes_here
from hires.comm.process_group import HiresProcessGroup
from hires.comm.transport import Group, transport
from hires.core.errors import CommError
from hires.plan.routes import Route
from hires.plan.tuning_table import TuningTable


class Post(NamedTuple):
    """One side of a message."""

    op: str
    tensor: torch.Tensor
    peer: int
    group: Any = None


class Streams:
    """A backend that keeps its group calls, and refuses a message by itself."""

    has_streams = True
    isend, irecv, P2POp = "send", "recv", Post

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def batch_isend_irecv(self, posts: list[Post]) -> list[Any]:
        """Fills what is received; one work stands for all."""
        self.calls.append([f"{post.op} {post.peer}" for post in posts])
        for post in posts:
            if post.op == "recv":
                post.tensor.fill_(post.peer)
        return [Done()]

    def all_gather(self, *_: Any, **__: Any) -> None:
        """Returns at once."""


class Done:
    """A work that is complete."""

    def wait(self, *_: Any) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Returns True."""
        return True


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    backend = Streams()
    group = Group([0, 1, 2], 0, {"nccl": None})
    for name, value in {"backends": {"nccl": backend}, "world": group, "nodes": (0, 0, 0)}.items():
        monkeypatch.setattr(transport, name, value)
    return backend


def test_batch_is_one_group_call(streams: Streams):
    got = [torch.zeros(2), torch.zeros(2)]
    posts = [comm.P2POp(comm.irecv, got[0], 1), comm.P2POp(comm.isend, torch.ones(2), 1)]
    posts.append(comm.P2POp(comm.irecv, got[1], 2))
    for handle in comm.batch_isend_irecv(posts):
        handle.wait()
    assert streams.calls == [["recv 1", "send 1", "recv 2"]]
    assert [one.tolist() for one in got] == [[1.0, 1.0], [2.0, 2.0]]


def test_messages_that_torch_coalesces_begin_together(streams: Streams):
    group, got = HiresProcessGroup(transport.world), torch.zeros(2)
    group._start_coalescing()
    group.recv([got], 1)
    group.send([torch.ones(2)], 2)
    assert streams.calls == []
    work = group._end_coalescing()
    work.wait()
    assert streams.calls == [["recv 1", "send 2"]]
    assert got.tolist() == [1.0, 1.0]


def test_streams_have_no_direct_route(streams: Streams, monkeypatch: pytest.MonkeyPatch):
    parts = [torch.zeros(1) for _ in range(3)]
    with pytest.raises(CommError, match=r"route nccl:direct: .* use nccl"):
        comm.all_gather(parts, torch.ones(1), backend=Route("nccl", "direct"))
    rules = [{"operation": "all_gather", "route": "nccl:direct"}]
    values = {"format": 1, "made": {}, "rules": rules, "default": "nccl"}
    monkeypatch.setattr(transport, "table", TuningTable.from_dict(values))
    comm.all_gather(parts, torch.ones(1))  # by the table's default
    assert "nccl:direct" not in routes_here("cuda", False)
    assert "gloo:direct" in routes_here("cuda", False)
