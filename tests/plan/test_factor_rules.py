"""Tiles follow every reshape and permutation, and compute their part of what is behind them."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hires.parallel.conversion_kernels import from_map, tile_of, to_map
from hires.plan.factors import Dims, local_shape, map_dims, map_shape, regrouped, shape_of
from hires.plan.tiling import own_rects
from tests.helpers.simulated_tiles import check_tiles
from tests.helpers.tiny_nets import Forward, Net


def random_shape(total: int, choose: random.Random) -> list[int]:
    """Sizes of a few dims that hold so many numbers."""
    sizes = []
    while total > 1 and len(sizes) < 5:
        sizes.append(choose.choice([n for n in range(1, total + 1) if total % n == 0]))
        total //= sizes[-1]
    return [*sizes, total]


def regroup(shape: list[int], choose: random.Random) -> list[int]:
    """A new shape: dims are merged with the next ones and divided anew."""
    sizes, left = [], list(shape)
    while left:
        count = choose.randint(1, len(left))
        sizes += random_shape(math.prod(left[:count]), choose)
        left = left[count:]
    return sizes if len(sizes) <= 10 else [math.prod(shape)]


@settings(max_examples=120, deadline=None)
@given(
    size=st.tuples(st.integers(2, 12), st.integers(2, 12)),
    grid=st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 2), (1, 4)]),
    seed=st.integers(0, 2**30),
)
def test_any_chain_of_reshapes_and_permutations_keeps_pixels_in_their_tiles(size, grid, seed):
    choose = random.Random(seed)
    whole = torch.arange(2 * 6 * math.prod(size)).view(2, 6, *size)
    dims: Dims = map_dims(whole.shape, grid)

    def rects() -> list[Any]:
        return own_rects(map_shape(dims)[2:], grid)

    tiles = [tile_of(whole, dims, rect) for rect in rects()]
    for _ in range(6):
        order = choose.sample(range(len(dims)), len(dims))
        if choose.random() < 0.5:
            whole, dims = whole.permute(order), tuple(dims[place] for place in order)
            tiles = [tile.permute(order) for tile in tiles]
        else:
            shape = regroup(list(whole.shape), choose)
            later = regrouped(dims, shape)
            if later is None:
                continue
            whole, dims = whole.reshape(shape), later
            both = zip(tiles, rects(), strict=True)
            tiles = [tile.reshape(local_shape(dims, rect)) for tile, rect in both]
        assert shape_of(dims) == list(whole.shape)
        everything = to_map(whole, dims, (0, map_shape(dims)[2], 0, map_shape(dims)[3]))
        for tile, rect in zip(tiles, rects(), strict=True):
            assert torch.equal(tile, tile_of(whole, dims, rect))
            part = to_map(tile, dims, rect)
            assert torch.equal(part, everything[:, :, rect[0] : rect[1], rect[2] : rect[3]])
            assert torch.equal(from_map(part, dims, rect), tile)


def test_windows_across_a_border_are_refused():
    # 21 rows on 2 tiles: 11 and 10. A window of 7 rows would be cut.
    grid = (2, 1)
    assert regrouped(map_dims([1, 8, 21, 21], grid), [1, 8, 3, 7, 3, 7]) is None
    assert regrouped(map_dims([1, 8, 21, 21], (1, 3)), [1, 8, 3, 7, 3, 7]) is not None


ORDERS: dict[str, Forward] = {
    "permute": lambda n, x: x.permute(2, 0, 3, 1),
    "permute, negative": lambda n, x: x.permute(0, -2, -1, -3),
    "moveaxis": lambda n, x: x.moveaxis(1, 3),
    "moveaxis back": lambda n, x: torch.moveaxis(x, -1, 1),
    "moveaxis of lists": lambda n, x: x.moveaxis((1, 2), (-1, 0)),
    "moveaxis of one in a list": lambda n, x: torch.moveaxis(x, [1], [3]),
    "moveaxis of all": lambda n, x: x.moveaxis([0, 1, 2, 3], [3, 0, 1, 2]),
    "movedim": lambda n, x: x.movedim(1, -1),
    "movedim of lists": lambda n, x: x.movedim([3, 1], [0, 2]),
    "transpose": lambda n, x: x.transpose(-3, -1),
    "transpose of rows": lambda n, x: x.transpose(2, 3),
    "swapaxes": lambda n, x: x.swapaxes(1, -2),
    "swapdims": lambda n, x: torch.swapdims(x, 0, 3),
    "mT": lambda n, x: x.mT,
    "mH": lambda n, x: x.mH,
    "T of pixels": lambda n, x: x[0].flatten(1).T.reshape(x.shape[2], x.shape[3], -1),
    "t of pixels": lambda n, x: x[0].flatten(1).t().reshape(x.shape[2], x.shape[3], -1),
    "H of pixels": lambda n, x: x[1].flatten(1).H.reshape(x.shape[2], x.shape[3], -1),
    "tokens": lambda n, x: x.flatten(2).moveaxis(1, 2).unflatten(1, x.shape[2:]),
    "tokens, last first": lambda n, x: x.flatten(2).moveaxis(-1, 0).unflatten(0, x.shape[2:]),
    "windows": lambda n, x: (
        x.unflatten(3, (2, -1)).unflatten(2, (2, -1)).moveaxis((2, 4), (1, 2)).flatten(0, 2)
    ),
    "depth to space": lambda n, x: (
        x.unflatten(1, (-1, 2, 2)).permute(0, 1, 4, 2, 5, 3).flatten(4).flatten(2, 3)
    ),
    "channel shuffle": lambda n, x: x.unflatten(1, (2, -1)).swapaxes(1, 2).flatten(1, 2),
    "stack and move": lambda n, x: torch.stack((x, 2 * x), -1).moveaxis(-1, 1).flatten(1, 2),
    "chunk and move": lambda n, x: torch.cat(x.moveaxis(1, -1).chunk(2, -1)[::-1], -1),
    "pixel shuffle": lambda n, x: F.pixel_shuffle(x, 2),
    "pixel unshuffle": lambda n, x: F.pixel_unshuffle(x, 2),
    "einsum": lambda n, x: torch.einsum("nchw->whnc", x),
    "select": lambda n, x: x.moveaxis(1, 0).select(1, 1),
    "strided": lambda n, x: x.moveaxis(1, 3)[:, ::2, 1::2],
    "prelu of all in a row": lambda n, x: F.prelu(x.flatten(0), x.new_tensor([0.3])),
    "unbind": lambda n, x: torch.stack(x.swapaxes(1, 3).unbind(3), 1),
}  # fmt: skip


def einsums(n: Any, x: Tensor) -> Tensor:
    y = torch.einsum("nchw,dc->ndhw", x, n.weight) + torch.einsum("...hw,k->...hw", x, n.gamma)
    gram = torch.einsum("nchw,ndhw->ncd", x, y)
    y = torch.einsum("ncd,ndhw->nchw", gram, x)
    return y + torch.tensordot(x, n.weight, ([1], [0])).movedim(-1, 1)


@pytest.mark.parametrize(("size", "grid"), [((8, 8), (2, 1)), ((12, 8), (1, 2))], ids=str)
def test_dims_in_another_order_are_those_of_torch(size, grid):
    def forward(n: Any, x: Tensor) -> Tensor:
        values = [order(n, x) for order in ORDERS.values()]
        places = (torch.linspace(-1, 2, y.numel(), dtype=x.dtype).view(y.shape) for y in values)
        return sum((y * place).sum() for y, place in zip(values, places, strict=True))

    check_tiles(Net(forward), (2, 4, *size), grid)
    weights = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(3))
    check_tiles(Net(einsums, weight=weights[0], gamma=weights[1]), (2, 4, 5, 4), (2, 2), grid)
