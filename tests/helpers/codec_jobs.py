"""Random sums with codecs on real ranks, beside exact sums of what all ranks gave."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.comm import coding
from hires.core.codecs import CODECS, Codec, codec_named
from hires.core.config.run_config import from_dict
from hires.core.ranks.world import World
from hires.engine.build import build_rank
from hires.engine.device import open_device
from hires.plan.plan import Plan
from hires.plan.routes import Route
from tests.helpers.jobs import join
from tests.helpers.ranks import error_of

POOLED = True
BOUNDED = [name for name in CODECS if CODECS[name].unit is not None]
LARGEST = {"int8": 1 / 254, "fp8": 2.0**-4}
"""Codec -> its largest error as a part of the largest number of a block; others of a number."""


def coded_programs(world: World, backends: Sequence[str], seeds: range) -> list[str]:
    """Returns what was wrong in random programs, each of a codec, backend, group and sizes."""
    comm.init(backends, world=world, timeout_s=30.0)
    groups = {
        ranks: comm.new_group([*ranks])
        for size in range(2, world.size + 1)
        for ranks in itertools.combinations(range(world.size), size)
    }
    before, coding.BUFFER_BYTES = coding.BUFFER_BYTES, 2**14  # several buffers
    try:
        wrong = [one for seed in seeds for one in _program(world, backends, groups, seed)]
    finally:
        coding.BUFFER_BYTES = before
    comm.barrier()
    comm.shutdown()
    return wrong


def chained_broadcasts(world: World, backends: Sequence[str], seeds: range) -> list[str]:
    """Returns what was wrong in random broadcasts along chains, each beside the root's own codes.

    Without a codec, with one blocking, and several under way at once.
    """
    comm.init(backends, world=world, timeout_s=30.0)
    some = [rank for rank in range(world.size) if rank != 1] if world.size > 2 else [0, 1]
    groups = {(*range(world.size),): None, (*some,): comm.new_group(some)}
    wrong, late = list[str](), list[Any]()
    for seed in seeds:
        rng = random.Random(seed)
        ranks, name = rng.choice([*groups]), rng.choice(["", "", *CODECS])
        size, root = rng.choice([0, 1, 255, 257, rng.randrange(9000)]), rng.choice(ranks)
        segment = rng.choice([1, 6, 260, 1000, 4096, 2**20])
        route = Route(rng.choice(backends), "segmented", segment)
        dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
        [[given]] = _parts([[size]], dtype, seed)
        if world.rank not in ranks:
            continue
        numbers = given.clone() if world.rank == root else torch.full_like(given, 7.0)
        what = f"seed {seed}: {size} of {dtype} by {name or 'no codec'} over {route}"
        if not name:
            work = comm.broadcast(numbers, root, groups[ranks], True, backend=route)
            late.append((what, work, numbers, given))
            continue
        codec, among = codec_named(name), groups[ranks] or comm.default_world().all_ranks
        comm.broadcast_coded(numbers, root, among, backend=route, codec=codec)
        expected = coding.decode(codec, coding.encode(codec, given), torch.empty_like(given))
        if not torch.equal(numbers, expected):
            wrong.append(what)
    for what, work, numbers, given in reversed(late):
        work.wait()
        if not torch.equal(numbers, given):
            wrong.append(what)
    comm.barrier()
    comm.shutdown()
    return wrong


def broadcast_of_other_codecs(world: World, codecs: Sequence[str]) -> str:
    """Returns the error of a broadcast for which each rank names a codec of its own."""
    comm.init(["gloo"], world=world, timeout_s=30.0)
    every, route = comm.default_world().all_ranks, Route("gloo", "segmented", 64)
    codec, numbers = codec_named(codecs[world.rank]), torch.ones(100)
    error = error_of(lambda: comm.broadcast_coded(numbers, 0, every, backend=route, codec=codec))
    error_of(comm.shutdown)  # it finds the same
    return error


def sums_with_memory(world: World, kind: str, steps: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Returns what a rank gave in some steps, its sums of it, and what topk has left at the end.

    The last is the part of the bytes of fp32 that topk makes of the numbers.
    """
    comm.init(["gloo", "shm"], world=world, timeout_s=30.0)
    [group] = comm.make_groups([[*range(world.size)]]).values()
    before, coding.BUFFER_BYTES = coding.BUFFER_BYTES, 2**13
    codec, sizes = codec_named("topk"), [[700, 3], [1], [256, 1200]]
    left = [[torch.zeros(size) for size in own] for own in sizes]
    given = summed = torch.zeros(sum(map(sum, sizes)))
    for step in range(steps):
        parts = _parts(sizes, torch.float32, 10 * step + world.rank)
        given = given + _joined(parts)[1:]
        if kind == "sum":
            flat, rest = ([*itertools.chain.from_iterable(own)] for own in (parts, left))
            comm.all_reduce_coalesced(flat, group, codec=codec, left=rest)
        else:
            comm.reduce_scatter_coalesced(parts, group, codec=codec, left=left)
            for index, own in enumerate(parts):
                for tensor in own if index != group.index else ():
                    tensor.zero_()
        summed = summed + _joined(parts)[1:]
    coding.BUFFER_BYTES = before
    comm.barrier()
    comm.shutdown()
    return given, summed, _joined(left)[1:], codec.num_bytes(2**20) / 2**22


def trained_parameters(
    world: World, config: dict[str, Any], plan: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the parameters of a rank before and after three steps."""
    settings, made = from_dict(config), Plan.from_dict(plan)
    join(world, made)
    engine = build_rank(settings, made, world.rank, 3, open_device("cpu", 0))
    before = {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}
    for number in range(3):
        engine.executor.step(engine.loaders, number=number)
    engine.close()
    comm.barrier()
    comm.shutdown()
    return before, {name: tensor.detach().clone() for name, tensor in engine.parameters.items()}


def _program(world: World, backends: Sequence[str], groups: dict[Any, Any], seed: int) -> list[str]:
    rng = random.Random(seed)
    name, backend, ranks = rng.choice(BOUNDED), rng.choice(backends), rng.choice([*groups])
    kind = rng.choice(("sum", "scatter"))
    dtype = rng.choice((torch.float32, torch.float64))
    counts = [0, 1, 255, 256, 257, *(rng.randrange(3000) for _ in range(4))]
    sizes = [[rng.choice(counts) for _ in range(rng.randrange(4))] for _ in ranks]
    if world.rank not in ranks:
        return []
    group, codec = groups[ranks], codec_named(name)
    every = [_parts(sizes, dtype, 100 * seed + rank) for rank in ranks]
    parts, at = _parts(sizes, dtype, 100 * seed + world.rank), group.index
    facts: dict[str, Any] = {"backend": backend, "codec": codec}
    exact = [_joined(own) for own in every]
    if kind == "scatter":
        comm.reduce_scatter_coalesced(parts, group, **facts)
        terms, compared = [[own[at]] for own in every], [parts[at]]
        exact[at] = _joined(parts)  # others keep what they were
        if not all(
            torch.equal(a, b)
            for i, own in enumerate(parts)
            if i != at
            for a, b in zip(own, every[at][i], strict=True)
        ):
            return [f"seed {seed}: parts of others have changed"]
    else:
        flat = [*itertools.chain.from_iterable(parts)]
        comm.all_reduce_coalesced(flat, group, **facts)
        terms, compared = every, parts
    wrong = []
    for number, own in enumerate(compared):
        for index, result in enumerate(own):
            given = [term[number][index] for term in terms]
            if not _is_near(result, given, name, codec, kind):
                wrong.append(f"seed {seed}: {kind} of {sizes} by {name} over {backend}")
    if kind != "scatter":
        flat = _joined(parts)
        others = [torch.empty_like(flat) for _ in ranks]
        comm.all_gather(others, flat, group)
        if not all(torch.equal(flat, other) for other in others):
            wrong.append(f"seed {seed}: {kind} by {name}: ranks have different bits")
    return wrong


def _is_near(result: Tensor, terms: list[Tensor], name: str, codec: Codec, kind: str) -> bool:
    # Each term is coded once, and a sum that goes to all ranks once more.
    total = sum(term.double() for term in terms)
    size = sum(_most(term, name) for term in terms)
    unit = LARGEST.get(name, codec.unit)
    allowed = unit * size
    if kind == "sum":
        allowed = allowed + unit * (_most(total, name) + allowed)
    summed = len(terms) * torch.finfo(result.dtype).eps * size
    return bool(((result.double() - total).abs() <= 1.001 * allowed + summed).all())


def _most(numbers: Tensor, name: str) -> Tensor:
    # By number what its error is a part of: the number, or the largest of its tensor.
    sizes = numbers.double().abs()
    return sizes.max().expand_as(sizes) if name in LARGEST and len(sizes) else sizes


def _parts(sizes: list[list[int]], dtype: torch.dtype, seed: int) -> list[list[Tensor]]:
    facts = {"generator": torch.Generator().manual_seed(seed), "dtype": dtype}
    return [[torch.randn(size, **facts) for size in own] for own in sizes]


def _joined(parts: list[list[Tensor]]) -> Tensor:
    return torch.cat([torch.zeros(1), *itertools.chain.from_iterable(parts)])
