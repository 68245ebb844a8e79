"""Backends with streams, as NCCL: messages go in the group calls that the proof assumes.

Stand-ins have its names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hires import comm
from hires.comm.backends import group_calls
from hires.comm.backends.backend import Backend, Post
from hires.comm.backends.group_calls import Channels, GroupCall, StreamWaits
from hires.comm.backends.nccl import NcclBackend
from hires.comm.backends.works import JoinedWork
from hires.comm.comm_world import CommWorld, Group, set_default
from hires.comm.dispatch import channel_message
from hires.comm.process_group import HiresProcessGroup
from hires.core.config.run_config import to_dict
from hires.core.errors import CommError, PeerError
from hires.core.message_backends import BACKEND_FACTS
from hires.core.ranks.world import World
from hires.plan.message_routes import channels
from tests.helpers.jobs import verify
from tests.helpers.layouts import config_of
from tests.helpers.layouts import plan_of as plan_of_config
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


class Coalescing:
    """Gloo with the group calls of NCCL."""

    def __init__(self, library: Any) -> None:
        self._gloo, self._works, self.calls = library, list[Any](), 0

    def _start_coalescing(self) -> None:
        self._works = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._works.append(self._gloo.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self._works.append(self._gloo.recv(tensors, peer, tag))

    def _end_coalescing(self) -> JoinedWork:
        self.calls += 1
        return JoinedWork(self._works)

    def shutdown(self) -> None:
        pass


def verify_on_channels(
    world: World, config: dict[str, Any], plan: dict[str, Any], folder: str
) -> tuple[Any, list[int]]:
    """Returns verify.json of rank 0, and the group calls of each communicator in order."""
    made: list[Coalescing] = []

    class OverGloo(NcclBackend):
        def _connected(self, store: Any, index: int, size: int, patience: timedelta) -> Any:
            made.append(Coalescing(dist.ProcessGroupGloo(store, index, size, patience)))
            return made[-1]

    vars(BACKEND_FACTS["nccl"])["backend"] = OverGloo
    dist.is_nccl_available = lambda: True
    torch.set_num_threads(1)
    # Its routes are those of the plan for gloo; by this one everything takes its backend.
    verdict = verify(world, config, {**plan, "routes": [{"route": "nccl"}]}, folder)
    return verdict, [one.calls for one in made]


@pytest.mark.dist
def test_ranks_compute_the_same_on_channels(tmp_path: Path):
    parallel = {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "microbatches": 2}
    config = config_of(parallel=parallel)
    plan = plan_of_config(config)
    plan = replace(plan, backend="nccl")
    given = (to_dict(config), plan.to_dict(), str(tmp_path))
    [verdict, calls] = run_ranks(verify_on_channels, plan.world, *given)[0]
    assert verdict["ok"], verdict
    own = [channel for channel in channels(plan) if 0 in channel.ranks]
    assert [count > 1 for count in calls if count] == [True] * len(own)


# ---- calls of users


class Streams(Backend):
    """A backend that keeps its group calls, and refuses a message by itself."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = []

    def begin_together(self, posts: Sequence[Post]) -> list[Any]:
        """Fills what is received; one work stands for all."""
        kinds = ["send" if post.sends else "recv" for post in posts]
        pairs = zip(kinds, posts, strict=True)
        self.texts.append([f"{kind} {post.peer} {post.tag}" for kind, post in pairs])
        for post in posts:
            if not post.sends:
                post.tensor.fill_(post.peer)
        return [SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)] * len(posts)

    def all_gather(self, *_: Any, **__: Any) -> None:
        """Returns at once."""


@pytest.fixture
def streams() -> Iterator[Streams]:
    world = CommWorld({"nccl": Streams()}, nodes=(0, 0, 0))
    world.all_ranks = Group([0, 1, 2], 0, {"nccl": None}, world=world)
    before = set_default(world)
    yield world.backend
    set_default(before)


def test_messages_of_a_batch_and_those_that_torch_coalesces_are_one_group_call(streams: Streams):
    got = [torch.zeros(2), torch.zeros(2)]
    posts = [comm.P2POp(comm.irecv, got[0], 1, tag=5), comm.P2POp(comm.isend, torch.ones(2), 1)]
    posts.append(comm.P2POp(comm.irecv, got[1], 2))
    for handle in comm.batch_isend_irecv(posts):
        handle.wait()
    assert [one.tolist() for one in got] == [[1.0, 1.0], [2.0, 2.0]]
    group, again = HiresProcessGroup(comm.default_world().all_ranks), torch.zeros(2)
    group._start_coalescing()
    group.recv([again], 1)
    group.send([torch.ones(2)], 2)
    assert len(streams.texts) == 1
    group._end_coalescing().wait()
    assert streams.texts == [["recv 1 5", "send 1 0", "recv 2 0"], ["recv 1 0", "send 2 0"]]
    assert again.tolist() == [1.0, 1.0]


class LateWork:
    """Messages that a test completes; records the limits of its waits."""

    def __init__(self) -> None:
        self.is_done, self.limits = False, list[timedelta]()

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self, *limit: timedelta) -> bool:
        self.limits += limit
        if not self.is_done:
            raise PeerError("it is late")
        return True


def test_message_on_a_channel_can_be_looked_at_and_stays_under_way_after_a_limit(streams: Streams):
    """It had no is_completed(), and its wait took no limit."""
    work, unit = LateWork(), GroupCall(Channels(streams, [], CPU), "a halo")
    unit.works = [work, work]
    call = channel_message("recv", 1, comm.default_world().all_ranks)
    handle = comm.Handle(unit, call)
    assert not handle.is_completed()
    with pytest.raises(CommError, match=r"a receive from rank 1 .* it is late"):
        handle.wait(0.5)
    assert work.limits == [timedelta(seconds=0.5)]
    work.is_done = True
    assert handle.is_completed()
    assert handle.wait()


# ---- what a stream waits for


@pytest.mark.parametrize(
    ("lost", "text"), [(False, "it has not ended on the device"), (True, "CUDA error: a launch")]
)
def test_message_of_a_rank_that_hangs_and_error_of_the_device_are_named(
    streams: Streams, monkeypatch, lost: bool, text: str
):
    aborted, broken = list[bool](), list[bool]()

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            if broken:
                raise RuntimeError("CUDA error: a launch failure\nand much advice")
            return False

    module = type("Module", (), {"Event": Event})
    monkeypatch.setattr(group_calls.torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(streams, "abort", lambda: aborted.append(True), raising=False)
    comm.default_world().streams = waits = StreamWaits(CPU, 0.05)
    waits.add("a group call with rank 1 on the channel of a halo", (1,))
    broken += [True] * lost
    waits.add("a sum", (0, 1))  # CUDA reports an error at any later call
    with pytest.raises(CommError, match=f"^a group call with rank 1 on the .* failed: {text}"):
        comm.finish_streams()
    assert aborted == [True]
    comm.finish_streams()  # nothing is left to wait for
