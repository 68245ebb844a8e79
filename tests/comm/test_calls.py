"""Calls that cannot be right fail at once with the value and why; failures name the operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hires import comm
from hires.comm import comm_world, point_to_point
from hires.comm.comm_world import Group
from hires.core.errors import CommError
from hires.core.ranks import call_records
from hires.core.ranks.world import World
from hires.plan.routes import Route
from tests.helpers.ranks import error_of, run_ranks

X, D, M = torch.ones(6), torch.ones(9, dtype=torch.float64), torch.ones(3, device="meta")
SUM = dist.ReduceOp.SUM
post = functools.partial(comm.P2POp, tensor=X, peer=0)
WRONG: list[tuple[Callable[[Any, int], Any], str]] = [
    # a call with a group of ranks 0 and 1, by rank 1 of three; what its error says
    (lambda g, r: comm.broadcast(X, 7), "rank 7 is not among ranks [0, 1, 2]"),
    (lambda g, r: comm.broadcast(X, "0"), "rank '0' is not among ranks [0, 1, 2]"),
    (lambda g, r: comm.broadcast(X, 2, g), "rank 2 is not among ranks [0, 1]"),
    (lambda g, r: comm.broadcast([1], 0), "expected a torch.Tensor, got [1]"),
    (lambda g, r: comm.all_gather(X, X), "give a list of one tensor for each rank"),
    (lambda g, r: comm.all_reduce(X, SUM, [0, 1]), "expected a group, got [0, 1]; make"),
    (lambda g, r: comm.send(X, r), "rank 1 is this rank; copy the tensor"),
    (lambda g, r: comm.send(X, 9), "9 is not among ranks [0, 1, 2]; name"),
    (lambda g, r: comm.recv(X, None), "expected a rank, one of [0, 1, 2], got None"),
    (lambda g, r: comm.all_gather([X], X), "1 tensors for the 3 ranks [0, 1"),
    (lambda g, r: comm.all_gather([X.int()] * 3, X), "tensors of torch.int32 and torch.floa"),
    (lambda g, r: comm.all_gather_into_tensor(X, X), "expected a tensor of 72 bytes, got"),
    (lambda g, r: comm.all_gather_into_tensor(D, X), "tensors of torch.float64 and torch"),
    (lambda g, r: comm.reduce_scatter_tensor(X, X), "expected a tensor of 72 bytes, got one of 24"),
    (lambda g, r: comm.reduce_scatter(X.clone(), [X]), "1 tensors for the 3"),
    (lambda g, r: comm.scatter(X, None, r), "0 tensors for the 3"),
    (
        lambda g, r: comm.scatter(X, [X] * 3, (r + 1) % 3),
        "rank 1 gives 3 tensors, and only rank 2 may",
    ),
    (lambda g, r: comm.gather(X, None, r), "0 tensors for the 3"),
    (
        lambda g, r: comm.gather(X, [X] * 3, (r + 1) % 3),
        "rank 1 gives 3 tensors, and only rank 2 may",
    ),
    (lambda g, r: comm.all_to_all([X.clone()], [X]), "1 tensors for the"),
    (lambda g, r: comm.all_to_all_single(X[:4], X[:4]), "4 rows cannot be divided among 3"),
    (lambda g, r: comm.all_to_all_single(X[:3], X[:4], [1] * 3, [1] * 3), "do not divide 4"),
    (
        lambda g, r: comm.all_to_all_single(X[:4], X[:4], [-1, 4, 1], [2, 1, 1]),
        "sizes [-1, 4, 1] are",
    ),
    (lambda g, r: comm.all_to_all_single(X[:3], X[:3], None, [1.0, 1, 1]), "no list of whole numb"),
    (lambda g, r: comm.batch_isend_irecv([post(dist.all_reduce)]), "give isend or irecv, not <f"),
    (lambda g, r: comm.batch_isend_irecv([dist.isend]), "expected a hires.comm.P2POp, got <func"),
    (lambda g, r: comm.all_to_all_single(X[:3], X), "expected a tensor of 24 bytes, got"),
    (lambda g, r: comm.all_reduce(X.clone(), "sum"), "unknown reduction 'sum'; choose one of"),
    (lambda g, r: comm.all_reduce(X, dist.ReduceOp.BAND), "BAND of torch.float32 is not def"),
    (lambda g, r: comm.new_group([0, 0]), "ranks [0, 0] are no group of a world of 3; name"),
    (lambda g, r: comm.new_group([0, 5]), "ranks [0, 5]"),
    (lambda g, r: comm.new_group(5), "ranks 5 are no group of a world of 3; name some"),
    (lambda g, r: comm.new_group([False, True]), "ranks [False, True] are no group"),
    (lambda g, r: comm.new_group([0.0, "1"]), "ranks [0.0, '1'] are no group"),
    (lambda g, r: comm.new_group([]), "ranks [] are no group"),
    (lambda g, r: comm.new_group([0, 1], float("inf")), "a limit of inf s is none; give a num"),
    (lambda g, r: comm.new_group([0, 1], 0), "a limit of 0 s is none"),
    (lambda g, r: comm.new_group([0, 1], world=7), "world 7 is none; give what join_world"),
    (lambda g, r: comm.all_reduce(X, backend=3), "expected the name of a backend, gloo, got 3"),
    (lambda g, r: comm.all_reduce(X, backend="gloo:nope"), "unknown algorithm 'nope'"),
    (lambda g, r: comm.all_reduce(M), "on meta has no memory"),
    (lambda g, r: comm.all_reduce(X, backend="mpi"), "backend 'mpi' was not passed to init()"),
    (lambda g, r: comm.barrier(backend=str(SEGMENTED)), "segmented cannot carry out barrier; choo"),
]
SEGMENTED = Route("gloo", "segmented", 8)


def wrong_calls(world: World) -> list[str]:
    """Returns what each call raises; the calls leave nothing behind."""
    comm.init(("gloo",), world=world, timeout_s=20)
    pair, total = comm.new_group([0, 1]), torch.ones(2)
    errors = [error_of(functools.partial(call, pair, world.rank)) for call, _ in WRONG]
    comm.all_reduce(total)
    assert comm.batch_isend_irecv([]) == []
    assert total.tolist() == [3, 3]
    comm.shutdown()
    return errors


@pytest.mark.dist
def test_wrong_arguments_are_named():
    errors = run_ranks(wrong_calls, 3)[1]
    for number, (error, (_, text)) in enumerate(zip(errors, WRONG, strict=True)):
        assert text in error, number


@pytest.mark.parametrize("tag", [-1, 2**31 - 1024, 2**31 - 1, None])
def test_tags_of_messages_of_hires_itself_are_refused(tag: int | None):
    one, post = torch.zeros(1), comm.P2POp(comm.isend, torch.zeros(1), 1, tag=tag)
    for call in (
        lambda: comm.send(one, 1, tag=tag),
        lambda: comm.irecv(one, 1, tag=tag),
        lambda: comm.batch_isend_irecv([post]),
    ):
        with pytest.raises(CommError, match=r"under 2147482624 to 2147483647|no whole number"):
            call()


def test_rank_that_has_not_begun_does_not_go_on_alone():
    total = torch.ones(3)
    for call in (
        lambda: comm.all_reduce(total),
        lambda: comm.all_reduce(total, async_op=True),
        lambda: comm.broadcast(total, 0),
        comm.barrier,
        lambda: comm.all_gather([total], total),
        lambda: comm.send(total, 1),
        lambda: comm.max_all(1),
        comm.new_group,
    ):
        with pytest.raises(comm.CommError, match=r"call hires\.comm\.init first"):
            call()
    [alone] = comm.make_groups([[0]]).values()  # a plan's, of one process
    comm.all_reduce(total, group=alone)
    assert repr(alone) == "Group(ranks [0], position 0, no backend)"


# ---- a rank that is rehearsed, without the others


def test_small_tensors_are_summed_as_one_message(monkeypatch):
    sent = []
    with comm.rehearsal(0) as silent:
        monkeypatch.setattr(silent, "all_reduce", lambda *a, **k: sent.append(a[0].numel()))
        [group] = comm.make_groups([[0, 1]]).values()
        comm.all_reduce_coalesced([torch.zeros(4), torch.zeros(3)], group)
    assert sent == [7]


# ---- what a long program keeps


def test_sizes_and_tags_without_end_take_bounded_memory_and_keep_their_numbers(monkeypatch):
    """A program whose sizes vary for ever kept an entry of each; so did one whose tags do."""
    for module in (point_to_point, comm_world):
        monkeypatch.setattr(module, "MOST_CALLS", 8)
    monkeypatch.setattr(call_records, "MOST_CHANNELS", 20)
    with comm.rehearsal(0):
        joined, ring = comm.default_world(), call_records.CallRing(())
        world = joined.all_ranks = Group([0, 1], 0, {"gloo": None})
        joined.check = SimpleNamespace(ring=ring, note=ring.note)
        for size in range(1, 50):
            comm.all_reduce(torch.zeros(size))
            assert len(world.calls) <= 8
        for tag in [*range(100), 3]:
            comm.send(torch.zeros(1), 1, tag=tag)
        [sends] = [call for call in world.calls.values() if call.peer == 1]
        assert len(sends.channels) <= 8
        record = ring.record(0)
    assert record.channels["all ranks over gloo"] == [49, [0, 1]]
    # Tag 3 goes on where it was; further tags than are counted are no calls of the record.
    assert record.channels["messages 0 to 1, tag 3, in all ranks over gloo"] == [2, [0, 1]]
    assert len([name for name in record.channels if name.startswith("messages")]) == 20
