"""Calls with wrong arguments, of hires.comm and of torch.distributed, and what they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hires import comm
from hires.comm.backends import rendezvous
from hires.core.ranks.world import World
from hires.plan.routes import Route

Call = Callable[[Any, Any, int], Any]
"""Of a library (hires.comm or torch.distributed) with a group of ranks 0 and 1, by a rank."""

X, D = torch.ones(6), torch.ones(9, dtype=torch.float64)
COMMON: dict[str, tuple[Call, str]] = {
    "root is no rank": (lambda lib, *_: lib.broadcast(X, 7), "rank 7 is not among ranks [0, 1, 2]"),
    "root is not in the group": (
        lambda lib, pair, _: lib.broadcast(X, 2, pair), "rank 2 is not among ranks [0, 1]",
    ),
    "no tensor": (lambda lib, *_: lib.broadcast([1], 0), "[1] is no tensor; give a torch.Tensor"),
    "no list": (lambda lib, *_: lib.all_gather(X, X), "give a list of one tensor for each rank"),
    "no group": (
        lambda lib, *_: lib.all_reduce(X, dist.ReduceOp.SUM, [0, 1]),
        "[0, 1] is no group; make one with hires.comm.new_group",
    ),
    "target is this rank": (
        lambda lib, _, rank: lib.send(X, rank), "rank 1 is this rank; copy the tensor",
    ),
    "negative tag": (
        lambda lib, _, rank: lib.send(X, (rank + 1) % 3, None, -1),
        "tag -1 is not among those of users, 0 to 2147482623",
    ),
    "too few outputs": (lambda lib, *_: lib.all_gather([X], X), "1 tensors for the 3 ranks [0, 1"),
    "outputs of another type": (
        lambda lib, *_: lib.all_gather([X.int() for _ in range(3)], X),
        "tensors of torch.int32 and torch.float32",
    ),
    "output too small": (
        lambda lib, *_: lib.all_gather_into_tensor(torch.ones(5), X),
        "a tensor of 20 bytes in the place of 72",
    ),
    "output of another type": (
        lambda lib, *_: lib.all_gather_into_tensor(D, X), "tensors of torch.float64 and torch",
    ),
    "input too small": (
        lambda lib, *_: lib.reduce_scatter_tensor(torch.ones(5), X),
        "a tensor of 24 bytes in the place of 60",
    ),
    "too few inputs": (lambda lib, *_: lib.reduce_scatter(X.clone(), [X]), "1 tensors for the 3"),
    "nothing to scatter": (lambda lib, _, rank: lib.scatter(X, None, rank), "0 tensors for the 3"),
    "another rank scatters": (
        lambda lib, _, rank: lib.scatter(X, [X] * 3, (rank + 1) % 3),
        "rank 1 gives 3 tensors, and only rank 2 may",
    ),
    "nowhere to gather": (lambda lib, _, rank: lib.gather(X, None, rank), "0 tensors for the 3"),
    "another rank gathers": (
        lambda lib, _, rank: lib.gather(X, [X] * 3, (rank + 1) % 3),
        "rank 1 gives 3 tensors, and only rank 2 may",
    ),
    "too few to exchange": (lambda lib, *_: lib.all_to_all([X.clone()], [X]), "1 tensors for the"),
    "rows do not divide": (
        lambda lib, *_: lib.all_to_all_single(torch.ones(4), torch.ones(4)),
        "4 rows cannot be divided among 3 ranks",
    ),
    "sizes do not add up": (
        lambda lib, *_: lib.all_to_all_single(torch.ones(3), torch.ones(4), [1] * 3, [1] * 3),
        "split sizes [1, 1, 1] do not divide 4 rows",
    ),
    "output smaller than input": (
        lambda lib, *_: lib.all_to_all_single(torch.ones(3), X),
        "a tensor of 12 bytes in the place of 24",
    ),
    "rows of other widths": (
        lambda lib, *_: lib.all_to_all_single(torch.ones(3, 1), torch.ones(3, 2), [1] * 3, [1] * 3),
        "rows of 1 numbers and of 2; give rows of one size",
    ),
    "unknown reduction": (
        lambda lib, *_: lib.all_reduce(X.clone(), "sum"),
        "unknown reduction 'sum'; choose one of SUM, PRODUCT",
    ),
    "bits of floats": (
        lambda lib, *_: lib.all_reduce(X.clone(), dist.ReduceOp.BAND),
        "BAND of torch.float32 is not defined",
    ),
    "rank twice": (
        lambda lib, *_: lib.new_group([0, 0]),
        "ranks [0, 0] are no group of a world of 3; name some of ranks 0 to 2, each once",
    ),
    "rank beyond": (lambda lib, *_: lib.new_group([0, 5]), "ranks [0, 5]"),
}  # fmt: skip
"""What torch.distributed refuses, too, and what hires says."""
OURS: dict[str, tuple[Call, str]] = {
    # torch 2.13 with gloo looks a target up beyond its list of ranks, and may crash.
    "target is no rank": (lambda lib, *_: lib.send(X, 9), "9 is not among ranks [0, 1, 2]; name"),
    "sender is not named": (lambda lib, *_: lib.recv(X, None), "rank None is no rank; name one of"),
    "no memory": (
        lambda lib, *_: lib.all_reduce(torch.ones(3, device="meta")), "on meta has no memory",
    ),
    "backend not in use": (
        lambda lib, *_: lib.all_reduce(X, backend="mpi"),
        "backend 'mpi' is not in use; begin with it, or use gloo",
    ),
    "algorithm without the operation": (
        lambda lib, *_: lib.barrier(backend=Route("gloo", "segmented", 8)),
        "segmented cannot carry out barrier; choose one of collective",
    ),
}  # fmt: skip


def wrong_calls(world: World) -> dict[str, tuple[str, str]]:
    """Returns what each call raises: in hires.comm, and in torch.distributed over gloo."""
    comm.init(("gloo",), world=world, timeout_s=20)
    rendezvous.torch_world(world, 20)
    ours, theirs = comm.new_group([0, 1]), dist.new_group([0, 1])
    raised = {}
    for name, (call, _) in (COMMON | OURS).items():
        if name == "root is not in the group" and world.rank == 2:
            continue
        theirs_raised = _raised(call, dist, theirs, world.rank) if name in COMMON else ""
        raised[name] = _raised(call, comm, ours, world.rank), theirs_raised
    # The calls above have left nothing behind.
    total = torch.ones(2)
    comm.all_reduce(total)
    assert total.tolist() == [3, 3]
    comm.shutdown()
    return raised


def _raised(call: Call, library: Any, group: Any, rank: int) -> str:
    try:
        call(library, group, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
