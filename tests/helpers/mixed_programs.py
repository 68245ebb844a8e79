"""Random programs of all operations, over several backends at once, beside a reference.

All ranks draw one list of steps, and each takes its part in this order; so a program cannot
deadlock: whatever a rank waits for stands before that in the list.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch

from hires import comm
from hires.core.ranks.world import World
from hires.plan.routes import parse_route
from tests.helpers.operations import EVEN, FOLDS, TYPES, UNEVEN, Check, Members, values

BATCH = 100
BATCHES = [(n, 400 * (n - 2) + BATCH * at) for n in (2, 3, 4) for at in range(4)]
"""Ranks and first seed of the tests of many programs, each of BATCH and with a limit of its own."""
SEGMENTED = ("all_reduce", "reduce", "broadcast", "all_gather_into_tensor")


def run_programs(world: World, backends: Sequence[str], seeds: range, largest: int) -> int:
    """Returns how many random programs gave the reference result on this rank."""
    comm.init(backends, world=world, timeout_s=30.0)
    everybody, groups = range(world.size), dict[tuple[int, ...], Any]()
    for size in range(2, world.size + 1):
        for ranks in itertools.combinations(everybody, size):
            groups[ranks] = comm.new_group([*ranks])
    for seed in seeds:
        run_program(world, backends, groups, seed, largest)
    comm.barrier()
    comm.shutdown()
    return len(seeds)


def run_program(
    world: World, backends: Sequence[str], groups: dict[Any, Any], seed: int, largest: int
) -> None:
    """Runs a program of 12 steps; AssertionError: a result is wrong."""
    rng, own = random.Random(seed), random.Random(f"{seed} {world.rank}")
    late: list[tuple[str, Any, Check]] = []

    def settle(most: int) -> None:
        while len(late) > most:
            what, work, is_right = late.pop(own.randrange(len(late)))
            work.wait()
            assert is_right(), f"seed {seed}: {what}"

    def count(dtype: torch.dtype) -> int:  # mostly few, at times none, and up to the largest size
        most, kind = largest // dtype.itemsize, rng.random()
        few = min(most, int(2 ** rng.uniform(0, 14)))
        return 0 if kind < 0.08 else few if kind < 0.97 else rng.randint(most // 64, most)

    for step in range(12):
        backend, dtype, kind = rng.choice(backends), rng.choice(TYPES), rng.random()
        what, seed_of = f"step {step}, {dtype} over {backend}", 100 * seed + step
        if kind < 0.65:
            name, ranks = rng.choice((*EVEN, *UNEVEN, "barrier")), rng.choice([*groups])
            is_whole = not (dtype.is_floating_point or dtype.is_complex)
            ops = [*FOLDS][: 1 if dtype.is_complex else 7 if is_whole else 4]
            facts = rng.randrange(len(ranks)), rng.choice(ops), seed_of
            rows, size = [count(dtype) // 8 for _ in ranks], count(dtype)
            rows = rows if rng.random() < 0.4 else rows[:1] * len(rows)
            algorithm = rng.choice(("", "", ":segmented:1KiB")) if name in SEGMENTED else ""
            if world.rank not in ranks:
                continue
            members = Members(world.rank, [*ranks], dtype, *facts)
            args, is_right = members.call(name, (size,), rows)
            is_late, route = own.random() < 0.4, parse_route(backend + algorithm)
            flags = {"group": groups[ranks], "async_op": is_late, "backend": route}
            work = getattr(comm, name)(*args, **flags)
            if is_late:
                late.append((f"{name} among {ranks}, {what}", work, is_right))
            else:
                assert is_right(), f"seed {seed}: {name} among {ranks}, {what}"
        else:  # a message, or a ring of them
            ranks = (*rng.sample(range(world.size), 2 if kind < 0.9 else world.size),)
            size, tag, posts = count(dtype), rng.randint(0, 3), []
            pairs = [*zip(ranks, ranks[1:] + ranks[:1], strict=True)]
            for source, target in pairs if kind >= 0.9 else pairs[:1]:
                if world.rank in (source, target):
                    sends = world.rank == source
                    tensor = values(dtype, (size,), source if sends else 99, seed_of)
                    wanted = values(dtype, (size,), source, seed_of)
                    call, peer = (comm.isend, target) if sends else (comm.irecv, source)
                    posts.append((comm.P2POp(call, tensor, peer, None, tag, backend), wanted))
            works = comm.batch_isend_irecv([post for post, _ in posts]) if posts else []
            for (post, wanted), work in zip(posts, works, strict=True):
                check = functools.partial(torch.equal, post.tensor, wanted)
                late.append((f"message between {ranks}, {what}", work, check))
            if kind < 0.9 and own.random() < 0.5:
                settle(0)
        if own.random() < 0.5:
            settle(own.randint(0, len(late)))
    settle(0)
