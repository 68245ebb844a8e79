"""Every tensor that torch.distributed takes is carried: parameters, views that negate, strided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hires import comm
from hires.comm.dispatch import call_of
from hires.comm.message_log import ALL_REDUCE
from hires.comm.plain_reductions import ReduceOp
from hires.comm.transport import Group
from hires.core.errors import CommError
from hires.core.ranks.world import World
from tests.helpers.ranks import run_ranks


def odd_tensors(world: World) -> list[str]:
    """Returns which sums and copies of odd tensors are wrong, or fail, over gloo and shm."""
    comm.init(["gloo", "shm"], world=world, timeout_s=20)
    own, wrong = world.rank + 1.0, list[str]()
    twos = torch.complex(torch.ones(3, 2), torch.full((3, 2), own))
    odd = {
        "parameter": lambda: torch.nn.Parameter(torch.full((2, 3), own)),
        "strided parameter": lambda: torch.nn.Parameter(torch.full((2, 3), own).t()),
        "of a graph": lambda: torch.nn.Parameter(torch.full((2, 3), own)) * 2,
        "negated": lambda: torch._neg_view(torch.full((2, 3), own)),
        "negated and strided": lambda: torch._neg_view(torch.full((2, 3), own)).t(),
        "conjugated": lambda: twos.clone().conj(),
        "part of a conjugate": lambda: twos.clone().conj().imag,
    }
    sums = {
        "sum": lambda tensor, how: comm.all_reduce(tensor, **how),
        "mean": lambda tensor, how: comm.all_reduce(tensor, ReduceOp.AVG, **how),
        "broadcast": lambda tensor, how: comm.broadcast(tensor, 1, **how),
    }
    for backend in ("gloo", "shm"):
        for kind, make in odd.items():
            for name, operation in sums.items():
                tensor = make()
                both = torch.empty(2, *tensor.shape, dtype=tensor.dtype)
                plain = tensor.detach().clone(memory_format=torch.contiguous_format)
                plain = plain.resolve_conj().resolve_neg()
                comm.all_gather_into_tensor(both, plain, backend="gloo")
                expected = {"sum": both.sum(0), "mean": both.mean(0), "broadcast": both[1]}[name]
                for how in ({}, {"async_op": True}):
                    again = make()
                    try:
                        handle = operation(again, {"backend": backend, **how})
                        if handle is not None:
                            handle.wait()
                        if not torch.equal(again, expected):
                            wrong.append(f"{name} of {kind} over {backend}: {again.tolist()}")
                    except Exception as error:
                        wrong.append(f"{name} of {kind} over {backend}: {error!r}")
    comm.shutdown()
    return wrong


@pytest.mark.dist
def test_parameters_and_views_that_negate_are_reduced_in_place():
    assert run_ranks(odd_tensors, 2) == [[], []]


def test_tensor_on_meta_is_refused_after_one_of_its_size_on_a_gpu():
    like = torch.ones(3)
    on_gpu: Any = SimpleNamespace(dtype=like.dtype, is_cpu=False, device=torch.device("cuda"))
    among = Group([0], 0, {})
    call_of(ALL_REDUCE, "all_reduce", among, None, on_gpu, like.nbytes)
    with pytest.raises(CommError, match="a tensor on meta has no memory"):
        call_of(ALL_REDUCE, "all_reduce", among, None, like.to("meta"), like.nbytes)
