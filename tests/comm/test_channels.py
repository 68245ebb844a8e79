"""Backends with streams, as NCCL: messages go in the group calls that the proof assumes.

Stand-ins have its names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hires import comm
from hires.comm.backends import group_calls
from hires.comm.backends.backend import BACKENDS, Backend
from hires.comm.backends.group_calls import StreamWaits
from hires.comm.backends.nccl import BOTH, NcclBackend
from hires.comm.process_group import HiresProcessGroup
from hires.comm.transport import Group, transport
from hires.core.config.run_config import to_dict
from hires.core.errors import CommError
from hires.core.ranks.world import World
from hires.plan.channels import channels
from tests.helpers.jobs import verify
from tests.helpers.layouts import config_of
from tests.helpers.layouts import plan_of as plan_of_config
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


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

    class OverGloo(NcclBackend):
        def __init__(self) -> None:
            super().__init__(library)

    BACKENDS._items["nccl"] = OverGloo
    torch.set_num_threads(1)
    # Its routes are those of the plan for gloo; without them everything takes its backend.
    return verify(world, config, {**plan, "routes": []}, folder), library.backends


@pytest.mark.dist
def test_ranks_compute_the_same_on_channels(tmp_path: Path):
    parallel = {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "microbatches": 2}
    config = config_of(parallel=parallel)
    plan = plan_of_config(config)
    plan = replace(plan, backend="nccl")
    given = (to_dict(config), plan.to_dict(), str(tmp_path))
    [verdict, backends] = run_ranks(verify_on_channels, plan.world, *given)[0]
    assert verdict["ok"], verdict
    assert backends.count("nccl") == len(channels(plan))
    assert set(backends) == {BOTH, "nccl"}


# ---- calls of users


@dataclass(eq=False)
class Op:
    """One side of a message, as torch.distributed.P2POp."""

    kind: Any
    tensor: torch.Tensor
    peer: int
    group: Any
    tag: int = 0


class Streams(Backend):
    """A backend that keeps its group calls, and refuses a message by itself."""

    has_streams, P2POp = True, Op
    isend: Any = "send"
    irecv: Any = "recv"

    def __init__(self) -> None:
        self.texts: list[list[str]] = []

    def batch_isend_irecv(self, ops: list[Op]) -> list[Any]:
        """Fills what is received; one work stands for all."""
        self.texts.append([f"{op.kind} {op.peer} {op.tag}" for op in ops])
        for op in ops:
            if op.kind == "recv":
                op.tensor.fill_(op.peer)
        return [SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)]

    def all_gather(self, *_: Any, **__: Any) -> None:
        """Returns at once."""


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    backend = Streams()
    group = Group([0, 1, 2], 0, {"nccl": None})
    for name, value in {"backends": {"nccl": backend}, "world": group, "nodes": (0, 0, 0)}.items():
        monkeypatch.setattr(transport, name, value)
    return backend


def test_messages_of_a_batch_and_those_that_torch_coalesces_are_one_group_call(streams: Streams):
    got = [torch.zeros(2), torch.zeros(2)]
    posts = [comm.P2POp(comm.irecv, got[0], 1, tag=5), comm.P2POp(comm.isend, torch.ones(2), 1)]
    posts.append(comm.P2POp(comm.irecv, got[1], 2))
    for handle in comm.batch_isend_irecv(posts):
        handle.wait()
    assert [one.tolist() for one in got] == [[1.0, 1.0], [2.0, 2.0]]
    group, again = HiresProcessGroup(transport.world), torch.zeros(2)
    group._start_coalescing()
    group.recv([again], 1)
    group.send([torch.ones(2)], 2)
    assert len(streams.texts) == 1
    group._end_coalescing().wait()
    assert streams.texts == [["recv 1 5", "send 1 0", "recv 2 0"], ["recv 1 0", "send 2 0"]]
    assert again.tolist() == [1.0, 1.0]


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
    monkeypatch.setattr(transport, "streams", waits := StreamWaits(CPU, 0.05))
    waits.add("a group call with rank 1 on the channel of a halo", (1,))
    broken += [True] * lost
    waits.add("a sum", (0, 1))  # CUDA reports an error at any later call
    with pytest.raises(CommError, match=f"^a group call with rank 1 on the .* failed: {text}"):
        comm.finish_streams()
    assert aborted == [True]
    comm.finish_streams()  # nothing is left to wait for
