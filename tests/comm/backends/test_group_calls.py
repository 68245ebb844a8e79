"""Messages on channels: the communicators and group calls are those that the proof assumes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hires.comm.backends.group_calls import Channels, GroupCall
from hires.comm.backends.nccl import BOTH, NcclBackend
from hires.core.config.run_config import to_dict
from hires.core.errors import CommError
from hires.plan.channels import Channel, channels
from hires.plan.event import Event
from hires.plan.groups import groups
from hires.plan.plan import Plan
from hires.plan.program import events
from hires.plan.proof.prove import run_machine
from hires.plan.proof.semantics import SEPARATE
from tests.helpers.fake_nccl import HARD_TIMEOUT_S, ThreadBackend, Wire, verify_on_channels
from tests.helpers.layouts import config_of
from tests.helpers.layouts import plan_of as plan_of_config
from tests.helpers.ranks import run_ranks
from tests.helpers.small_plans import plan_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"stages": 3, "microbatches": 4, "schedule": "1f1b"},
    "skips": {"stages": 5, "microbatches": 8, "schedule": "1f1b", "balance": [1, 1, 2, 1, 2]},
    "tiles": {"tiles": [2, 2], "microbatches": 2},
    "gems": {"stages": 3, "directions": 2, "schedule": "gems", "microbatches": 2},
    "tiles and stages": {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "microbatches": 2},
    "replicas": {"replicas": 2, "stages": 2, "microbatches": 2},
}


def test_channels_are_those_of_halos_and_of_each_way_between_stages():
    plan = plan_of(tiles=[2, 1], stages=2, spatial_stages=1, replicas=2)
    found = [(channel.what, channel.ranks) for channel in channels(plan)]
    one = [
        ("the halos of stage 0", [0, 1]),
        ("messages from stage 0 to stage 1", [0, 2]),  # of a value that both tiles hold whole
        ("messages from stage 1 to stage 0", [0, 1, 2]),
    ]
    assert found == one + [(what, [rank + 3 for rank in ranks]) for what, ranks in one]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_message_has_a_channel_that_both_its_ranks_are_part_of(layout):
    plan = plan_of(**layout)
    made = channels(plan)
    used = set()
    for rank in range(plan.world):
        for event in events(plan, rank):
            if event.kind in ("send", "recv"):
                ends = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
                assert ends in made[event.channel - 1].pairs
                used.add((event.channel, ends))
    assert used == {(n, pair) for n, one in enumerate(made, start=1) for pair in one.pairs}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_programs_end_on_streams_without_tags_and_every_message_is_the_right_one(layout):
    plan, wire = plan_of(**layout), Wire()
    failures: list[str] = []
    calls: dict[int, list[tuple[int, int]]] = {}

    def run(rank: int) -> None:
        backend = ThreadBackend(rank, wire)
        try:
            walk(plan, rank, Channels(backend, channels(plan), torch.device("cpu")))
        except Exception as error:
            failures.append(f"rank {rank}: {error!r}")
        calls[rank] = backend.calls

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(plan.world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HARD_TIMEOUT_S)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)
    if "tiles" in layout and plan.stages[0].num_tiles == 4:
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


def test_first_message_that_comes_out_wrong_is_named():
    class Silent(ThreadBackend):
        def batch_isend_irecv(self, ops):
            return []

    with pytest.raises(CommError, match="on the channel of the halos came out wrong"):
        Channels(Silent(0, Wire()), [Channel("the halos", ((1, 0),))], torch.device("cpu"))


def test_torch_without_nccl_is_named_before_the_ranks_meet():
    with pytest.raises(CommError, match=r"no NCCL; use comm\.backend=gloo"):
        NcclBackend(type("Library", (), {"is_nccl_available": staticmethod(lambda: False)})).join(
            "tcp://127.0.0.1:1", 1.0, 1, 0
        )


@pytest.mark.dist
def test_ranks_compute_the_same_on_channels(tmp_path: Path):
    parallel = {"tiles": [2, 1], "stages": 2, "spatial_stages": 1, "microbatches": 2}
    config = config_of(parallel=parallel)
    plan = plan_of_config(config)
    plan.backend = "nccl"
    given = (to_dict(config), plan.to_dict(), str(tmp_path))
    answers = run_ranks(verify_on_channels, plan.world, *given)
    [verdict, backends] = answers[0]
    assert verdict["ok"], verdict
    assert backends.count("nccl") == len(channels(plan))
    assert set(backends) == {BOTH, "nccl"}


@pytest.mark.parametrize("layout", [LAYOUTS["pipeline"], LAYOUTS["gems"]], ids=["pipeline", "gems"])
def test_one_channel_for_everything_would_block_the_ranks(layout):
    plan = plan_of(**layout)
    programs = [list(events(plan, rank)) for rank in range(plan.world)]
    assert not run_machine(programs, groups(plan), SEPARATE).problems
    joined = [[event._replace(channel=min(1, event.channel)) for event in p] for p in programs]
    assert "deadlock" in run_machine(joined, groups(plan), SEPARATE).problems[0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.complex64, torch.bfloat16])
def test_messages_of_types_that_nccl_lacks_travel_as_bytes(dtype):
    wire, sent = Wire(), torch.tensor([[1, 0], [1, 1]]).to(dtype)
    first, second = (ThreadBackend(rank, wire) for rank in range(2))
    channel = [Channel("a message", ())]
    ends = [Channels(one, channel, torch.device("cpu")) for one in (first, second)]
    for backend in (first, second):
        wire.members[backend.made] = [0, 1]
    received = torch.zeros_like(sent)
    posts = [ends[0].post("send", sent, 1, 1), ends[1].post("recv", received, 0, 1)]
    for end, post in zip(ends, posts, strict=True):
        end.end_call()
        assert post.works
    ends[1].wait(posts[1])
    assert torch.equal(received, sent)
