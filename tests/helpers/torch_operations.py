"""The operations of torch.distributed, over hires and over torch's own gloo."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers.torch_comparison import numbers, ranks, same, script


@script
def messages(gloo: Any) -> None:
    rank, size = ranks()
    after, before = (rank + 1) % size, (rank - 1) % size
    given, taken = torch.full((5,), float(rank)), torch.empty(5)
    ops = [dist.P2POp(dist.irecv, taken, before), dist.P2POp(dist.isend, given, after)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(taken, torch.full((5,), float(before)))
    if rank == 0:
        dist.send(given, 1, tag=3)
    elif rank == 1:
        dist.recv(taken, 0, tag=3)
        same(taken, torch.zeros(5))
    strided = torch.zeros(4, 4)
    if rank == 0:
        dist.send(torch.arange(16.0).view(4, 4).t(), 1)
    elif rank == 1:
        dist.recv(strided.t(), 0)
        same(strided, torch.arange(16.0).view(4, 4))
    with pytest.raises(NotImplementedError, match="name src"):
        dist.recv(taken)  # from any rank


@script
def futures(gloo: Any) -> None:
    rank, size = ranks()
    total = sum(range(size))
    works = [dist.all_reduce(torch.full((9,), float(rank)), async_op=True) for _ in range(3)]
    sums = [work.get_future().then(lambda f: f.value()[0] * 2) for work in works]
    for work in works:
        assert work.wait(datetime.timedelta(seconds=30))
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        same(work.result()[0], torch.full((9,), float(total)))
    for value in torch.futures.wait_all(sums):
        same(value, torch.full((9,), 2.0 * total))

    def again(future: Any) -> Tensor:  # waits inside a callback, as PowerSGD does
        work = dist.all_reduce(future.value()[0], async_op=True)
        return work.get_future().wait()[0]

    first = dist.all_reduce(torch.full((9,), float(rank)), async_op=True).get_future()
    same(first.then(again).wait(), torch.full((9,), float(total * size)))
    assert dist.barrier(async_op=True).wait()


@script
def coalescing(gloo: Any) -> None:
    _, size = ranks()
    tensors = [numbers(3), numbers(2, 2), numbers(1)]
    ours, theirs = ([one.clone() for one in tensors] for _ in range(2))
    for group, copies in ((None, ours), (gloo, theirs)):
        with dist.distributed_c10d._coalescing_manager(group):
            for one in copies:
                dist.all_reduce(one, group=group)
    same(ours, theirs)
    outputs = [one.new_empty(size * one.numel()) for one in tensors]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output, one in zip(outputs, tensors, strict=True):
            dist.all_gather_into_tensor(output, one.view(-1))
    manager.wait()
    for output, one in zip(outputs, tensors, strict=True):
        parts = [torch.empty_like(one).view(-1) for _ in range(size)]
        dist.all_gather(parts, one.view(-1), group=gloo)
        same(output, torch.cat(parts))


@script
def groups(gloo: Any) -> None:
    rank, size = ranks()
    last = [*range(1, size)]
    group = dist.new_group(last)
    if rank in last:
        x = torch.full((2,), float(rank))
        dist.all_reduce(x, group=group)
        same(x, torch.full((2,), float(sum(last))))
        x.fill_(rank)
        dist.broadcast(x, size - 1, group)
        same(x, torch.full((2,), size - 1.0))
        each, is_root = [torch.full((2,), float(one)) for one in last], rank == size - 1
        dist.scatter(x, each if is_root else None, size - 1, group)
        same(x, torch.full((2,), float(rank)))
        parts = [torch.empty(2) for _ in last] if is_root else None
        dist.gather(x, parts, size - 1, group)
        dist.reduce(x, size - 1, group=group)
        same([x, *parts] if is_root else [], [sum(each), *each] if is_root else [])
        assert dist.get_process_group_ranks(group) == last
        assert dist.get_backend(group) == "hires"
        ours = group._group
        dist.destroy_process_group(group)
        assert ours.handles == {}
    # Only the members come here; each pair of neighbours makes its own.
    for low in range(size - 1):
        if rank in (low, low + 1):
            pair = dist.new_group([low, low + 1], use_local_synchronization=True)
            x = torch.ones(1)
            dist.all_reduce(x, group=pair)
            assert float(x) == 2
    dist.barrier()
