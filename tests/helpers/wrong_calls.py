"""Calls with wrong arguments, of hires.comm and of torch.distributed, and what they raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hires import comm
from hires.comm.backends import rendezvous
from hires.core.ranks.world import World

Calls = dict[str, Callable[[Any, Any, int], Any]]
"""Name -> a call of a library (hires.comm or torch.distributed) with a group, by a rank."""

X = torch.ones(6)
CALLS: Calls = {
    "root is no rank": lambda lib, _, __: lib.broadcast(X, 7),
    "root is not in the group": lambda lib, pair, _: lib.broadcast(X, 2, pair),
    "target is no rank": lambda lib, _, __: lib.send(X, 9),
    "sender is not named": lambda lib, _, __: lib.recv(X, None),
    "no tensor": lambda lib, _, __: lib.broadcast([1], 0),
    "no list": lambda lib, _, __: lib.all_gather(X, X),
    "no group": lambda lib, _, __: lib.all_reduce(X, dist.ReduceOp.SUM, [0, 1]),
    "target is this rank": lambda lib, _, rank: lib.send(X, rank),
    "negative tag": lambda lib, _, rank: lib.send(X, (rank + 1) % 3, None, -1),
    "too few outputs": lambda lib, _, __: lib.all_gather([X], X),
    "outputs of another type": lambda lib, _, __: lib.all_gather(
        [torch.ones(6, dtype=torch.int32) for _ in range(3)], X
    ),
    "output too small": lambda lib, _, __: lib.all_gather_into_tensor(torch.ones(5), X),
    "output of another type": lambda lib, _, __: lib.all_gather_into_tensor(
        torch.ones(9, dtype=torch.float64), X
    ),
    "input too small": lambda lib, _, __: lib.reduce_scatter_tensor(torch.ones(5), X),
    "too few inputs": lambda lib, _, __: lib.reduce_scatter(X.clone(), [X]),
    "nothing to scatter": lambda lib, _, rank: lib.scatter(X, None, rank),
    "another rank scatters": lambda lib, _, rank: lib.scatter(X, [X] * 3, (rank + 1) % 3),
    "nowhere to gather": lambda lib, _, rank: lib.gather(X, None, rank),
    "another rank gathers": lambda lib, _, rank: lib.gather(X, [X] * 3, (rank + 1) % 3),
    "too few to exchange": lambda lib, _, __: lib.all_to_all([X.clone()], [X]),
    "rows do not divide": lambda lib, _, __: lib.all_to_all_single(torch.ones(4), torch.ones(4)),
    "sizes do not add up": lambda lib, _, __: lib.all_to_all_single(
        torch.ones(3), torch.ones(4), [1, 1, 1], [1, 1, 1]
    ),
    "output smaller than input": lambda lib, _, __: lib.all_to_all_single(torch.ones(3), X),
    "rows of other widths": lambda lib, _, __: lib.all_to_all_single(
        torch.ones(3, 1), torch.ones(3, 2), [1, 1, 1], [1, 1, 1]
    ),
    "unknown reduction": lambda lib, _, __: lib.all_reduce(X.clone(), "sum"),
    "bits of floats": lambda lib, _, __: lib.all_reduce(X.clone(), dist.ReduceOp.BAND),
    "no memory": lambda lib, _, __: lib.all_reduce(torch.ones(3, device="meta")),
    "rank twice": lambda lib, _, __: lib.new_group([0, 0]),
    "rank beyond": lambda lib, _, __: lib.new_group([0, 5]),
}


def wrong_calls(world: World) -> dict[str, tuple[str, str]]:
    """Returns what each call raises: in hires.comm, and in torch.distributed over gloo."""
    comm.init(("gloo",), world=world, timeout_s=20)
    rendezvous.torch_world(world, 20)
    ours, theirs = comm.new_group([0, 1]), dist.new_group([0, 1])
    raised = {}
    for name, call in CALLS.items():
        if name == "root is not in the group" and world.rank == 2:
            continue
        own = _raised(call, comm, ours, world.rank)
        # torch 2.13 with gloo looks a target up beyond its list of ranks, and may crash.
        # It takes a message of any rank.
        unsafe = name in ("target is no rank", "sender is not named")
        raised[name] = own, "" if unsafe else _raised(call, dist, theirs, world.rank)
    # The calls above have left nothing behind.
    total = torch.ones(2)
    comm.all_reduce(total)
    assert total.tolist() == [3, 3]
    comm.shutdown()
    return raised


def _raised(call: Callable[..., Any], library: Any, group: Any, rank: int) -> str:
    try:
        call(library, group, rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
