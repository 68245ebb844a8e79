"""Backends with streams, as NCCL: messages go in the group calls that the proof assumes.

Stand-ins have NCCL's order of posts; ``nccl_direct`` runs on a C library with its interface.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hires import comm
from hires.comm.backends import nccl_library
from hires.comm.backends.group_calls import Channels, GroupCall
from hires.comm.backends.nccl import BOTH, NcclBackend
from hires.comm.backends.nccl_library import NcclLibrary
from hires.comm.process_group import HiresProcessGroup
from hires.comm.transport import Group, transport
from hires.core.config.run_config import to_dict
from hires.core.errors import CommError
from hires.plan.channels import Channel, channels
from hires.plan.event import Event
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.proof.prove import run_machine
from hires.plan.proof.semantics import SEPARATE
from hires.plan.routes import Route
from hires.plan.tuning_table import TuningTable
from tests.helpers import nccl_direct_jobs
from tests.helpers.fake_nccl import Op, ThreadBackend, Wire, verify_on_channels
from tests.helpers.layouts import config_of
from tests.helpers.layouts import plan_of as plan_of_config
from tests.helpers.ranks import run_ranks
from tests.helpers.small_plans import plan_of
from tests.helpers.thread_ranks import run_threads

CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"stages": 3, "microbatches": 4, "schedule": "1f1b"},
    "skips": {"stages": 5, "microbatches": 8, "schedule": "1f1b", "balance": [1, 1, 2, 1, 2]},
    "tiles": {"tiles": [2, 2], "microbatches": 2},
    "gems": {"stages": 3, "directions": 2, "schedule": "gems", "microbatches": 2},
    "tiles and stages": {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "replicas": 2},
}


def test_channels_are_those_of_halos_and_of_each_way_between_stages():
    plan = plan_of(**LAYOUTS["tiles and stages"])
    found = [(channel.what, channel.ranks) for channel in channels(plan)]
    one = [
        ("the halos of stage 0", [0, 1]),
        ("messages from stage 0 to stage 1", [0, 2]),  # of a value that both tiles hold whole
        ("messages from stage 1 to stage 0", [0, 1, 2]),
    ]
    assert found == one + [(what, [rank + 3 for rank in ranks]) for what, ranks in one]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_programs_end_on_streams_without_tags_and_every_message_is_the_right_one(layout):
    plan, wire = plan_of(**layout), Wire()

    def run(rank: int) -> list[tuple[int, int]]:
        backend = ThreadBackend(rank, wire)
        walk(plan, rank, Channels(backend, channels(plan), CPU))
        return backend.calls

    calls = run_threads(run, plan.world)
    if layout.get("tiles") == [2, 2]:
        # A halo exchange with three neighbours is one group call of six messages.
        assert max(number for _, number in calls[0]) >= 6


def walk(plan: Plan, rank: int, own: Channels) -> None:
    """Posts and waits as the program of a rank says; each message holds what identifies it."""
    program = list(events(plan, rank))
    posted: dict[tuple[str, int, int], list[tuple[GroupCall, torch.Tensor, float]]] = {}
    counts: dict[tuple[str, int, int], int] = {}
    for at, event in enumerate(program):
        key = (event.kind.removeprefix("wait_"), event.peer, event.tag)
        if event.kind in ("send", "recv"):
            counts[key] = counts.get(key, 0) + 1
            code = float(1000 * event.tag + counts[key])
            tensor = torch.full((1,), code if event.kind == "send" else -1.0)
            unit = own.post(event.kind, tensor, event.peer, event.channel)
            posted.setdefault(key, []).append((unit, tensor, code))
            if ends_call(event, program[at + 1 :]):
                own.end_call()
        elif event.kind in ("wait_recv", "wait_send"):
            unit, tensor, code = posted[key].pop(0)
            own.wait(unit)
            assert tensor.item() == code, event.words
        elif event.kind == "wait_sends":
            for (kind, _, _), sends in posted.items():
                while kind == "send" and sends:
                    own.wait(sends.pop(0)[0])
    assert not any(posted.values())


def ends_call(event: Event, rest: list[Event]) -> bool:
    """Whether no post of the same call follows."""
    return not event.call or not rest or rest[0].call != event.call


@pytest.mark.parametrize("layout", [LAYOUTS["pipeline"], LAYOUTS["gems"]], ids=["pipeline", "gems"])
def test_one_channel_for_everything_would_block_the_ranks(layout):
    plan = plan_of(**layout)
    programs = [list(events(plan, rank)) for rank in range(plan.world)]
    assert not run_machine(programs, groups(plan), SEPARATE).problems
    joined = [[event._replace(channel=min(1, event.channel)) for event in p] for p in programs]
    assert "deadlock" in run_machine(joined, groups(plan), SEPARATE).problems[0]


def test_first_message_that_comes_out_wrong_and_a_torch_without_nccl_are_named():
    class Silent(ThreadBackend):
        def batch_isend_irecv(self, ops):
            return []

    with pytest.raises(CommError, match="on the channel of the halos came out wrong"):
        Channels(Silent(0, Wire()), [Channel("the halos", ((1, 0),))], CPU)
    without = type("Library", (), {"is_nccl_available": staticmethod(lambda: False)})
    with pytest.raises(CommError, match=r"no NCCL; use comm\.backend=gloo"):
        NcclBackend(without).join("tcp://127.0.0.1:1", 1.0, 1, 0)


@pytest.mark.dist
def test_ranks_compute_the_same_on_channels(tmp_path: Path):
    parallel = {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "microbatches": 2}
    config = config_of(parallel=parallel)
    plan = plan_of_config(config)
    plan.backend = "nccl"
    given = (to_dict(config), plan.to_dict(), str(tmp_path))
    [verdict, backends] = run_ranks(verify_on_channels, plan.world, *given)[0]
    assert verdict["ok"], verdict
    assert backends.count("nccl") == len(channels(plan))
    assert set(backends) == {BOTH, "nccl"}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.bfloat16])
def test_messages_of_types_that_nccl_lacks_travel_as_bytes(dtype):
    wire, sent = Wire(), torch.tensor([[1, 0], [1, 1]]).to(dtype)
    backends = [ThreadBackend(rank, wire) for rank in range(2)]
    ends = [Channels(one, [Channel("a message", ())], CPU) for one in backends]
    for backend in backends:
        wire.members[backend.made] = [0, 1]
    received = torch.zeros_like(sent)
    posts = [ends[0].post("send", sent, 1, 1), ends[1].post("recv", received, 0, 1)]
    for end, post in zip(ends, posts, strict=True):
        end.end_call()
        assert post.works
    ends[1].wait(posts[1])
    assert torch.equal(received, sent)


# ---- calls of users


class Streams(ThreadBackend):
    """A backend that keeps its group calls, and refuses a message by itself."""

    has_streams, isend, irecv = True, "send", "recv"

    def __init__(self) -> None:
        super().__init__(0, Wire())
        self.texts: list[list[str]] = []

    def batch_isend_irecv(self, ops: list[Op]) -> list[Any]:
        """Fills what is received; one work stands for all."""
        self.texts.append([f"{op.kind} {op.peer}" for op in ops])
        for op in ops:
            if op.kind == "recv":
                op.tensor.fill_(op.peer)
        done = {"wait": lambda *_: True, "is_completed": lambda _: True}
        return [type("Done", (), done)()]

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
    posts = [comm.P2POp(comm.irecv, got[0], 1), comm.P2POp(comm.isend, torch.ones(2), 1)]
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
    assert streams.texts == [["recv 1", "send 1", "recv 2"], ["recv 1", "send 2"]]
    assert again.tolist() == [1.0, 1.0]


def test_streams_have_no_direct_route(streams: Streams, monkeypatch: pytest.MonkeyPatch):
    parts = [torch.zeros(1) for _ in range(3)]
    with pytest.raises(CommError, match=r"route nccl:direct: .* use nccl"):
        comm.all_gather(parts, torch.ones(1), backend=Route("nccl", "direct"))
    rules = [{"operation": "all_gather", "route": "nccl:direct"}]
    values = {"format": 1, "made": {}, "rules": rules, "default": "nccl"}
    monkeypatch.setattr(transport, "table", TuningTable.from_dict(values))
    comm.all_gather(parts, torch.ones(1))  # by the table's default


# ---- NCCL without torch's groups


@pytest.mark.dist
def test_nccl_direct_is_right_and_names_its_failures(tmp_path: Path):
    if (made := nccl_direct_jobs.compiled(tmp_path)) is None:
        pytest.skip("there is no C compiler here")
    given = str(made), str(tmp_path)
    for wrong, first in run_ranks(nccl_direct_jobs.every_operation, 2, *given):
        assert wrong == []
        # The communicator's stream waits for the caller's, NCCL runs there, the caller's waits.
        assert first == [
            "7 waits for 1",
            "1 waits for 7",
            "AllReduce count=3 type=7 op=0 root=-1 stream=7 group=0",
        ]
    [said] = run_ranks(nccl_direct_jobs.failures, 1, *given)
    late, failed, stranger, stuck, old, last = said
    assert late == "an operation of NCCL took over 0.1 s"
    assert failed == "ncclAllReduce failed: internal error: the fake library said so"
    assert stranger == "rank 5 is not among ranks [0]"
    assert stuck == "the start of NCCL among ranks [0] took over 0.2 s"
    assert "is NCCL 2.17.0; comm.backend=nccl_direct needs 2.18.0 or newer" in old
    assert last == "CommAbort"


def test_torch_without_nccl_and_a_library_that_is_none_are_refused(monkeypatch):
    monkeypatch.setattr(nccl_library, "_places", lambda: iter(()))
    monkeypatch.setattr(nccl_library, "_NAME", "libno_such_nccl.so.2")
    nccl_library.shipped_library.cache_clear()
    with pytest.raises(CommError, match=r"no libno_such_nccl.* install a torch that is built for"):
        nccl_library.shipped_library()
    with pytest.raises(CommError, match="is no NCCL that hires can call"):
        NcclLibrary("libm.so.6")
