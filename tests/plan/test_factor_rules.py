"""Tiles follow every reshape, and a tile that follows the rules makes its part of every node."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hires.nets.constants import constant_tensor
from hires.parallel.compile_node import local_operator
from hires.parallel.map_views import from_map, tile_of, to_map
from hires.plan.factor_rules import Fit, Reading, fit_of, on_tile
from hires.plan.factors import (
    Dims,
    is_map,
    local_shape,
    map_dims,
    map_shape,
    regrouped,
    shape_of,
    whole_dims,
)
from hires.plan.graph import INPUT, Graph, Node, Rect
from hires.plan.operators.operator_facts import facts_of
from hires.plan.tiling import own_rects
from tests.helpers.tiny_nets import Forward, Net, traced


def rects(dims: Dims, grid: tuple[int, int]) -> list[Rect]:
    """What each tile owns of a value's map."""
    return own_rects(map_shape(dims)[2:], grid)


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
    tiles = [tile_of(whole, dims, rect) for rect in rects(dims, grid)]
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
            both = zip(tiles, rects(dims, grid), strict=True)
            tiles = [tile.reshape(local_shape(dims, rect)) for tile, rect in both]
        assert shape_of(dims) == list(whole.shape)
        everything = to_map(whole, dims, (0, map_shape(dims)[2], 0, map_shape(dims)[3]))
        for tile, rect in zip(tiles, rects(dims, grid), strict=True):
            assert torch.equal(tile, tile_of(whole, dims, rect))
            part = to_map(tile, dims, rect)
            assert torch.equal(part, everything[:, :, rect[0] : rect[1], rect[2] : rect[3]])
            assert torch.equal(from_map(part, dims, rect), tile)


def test_windows_across_a_border_are_refused():
    # 21 rows on 2 tiles: 11 and 10. A window of 7 rows would be cut.
    grid = (2, 1)
    assert regrouped(map_dims([1, 8, 21, 21], grid), [1, 8, 3, 7, 3, 7]) is None
    assert regrouped(map_dims([1, 8, 21, 21], (1, 3)), [1, 8, 3, 7, 3, 7]) is not None


ON_HOST = torch.device("cpu")
WAYS = ("window", "statistics", "reduction", "softmax")  # of maps alone: they are tested elsewhere


class Walk:
    """The nodes of a network, each computed whole and, from its whole operands, by every tile."""

    def __init__(self, graph: Graph, model: nn.Module, images: Tensor, grid: tuple[int, int]):
        self.graph, self.grid = graph, grid
        self.tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        constants = {name: fact for name, fact in graph.params.items() if fact.is_constant}
        self.tensors |= {name: constant_tensor(fact).double() for name, fact in constants.items()}
        self.values: dict[str, Any] = {INPUT: images}
        self.dims: dict[str, Dims] = {INPUT: map_dims(images.shape, grid)}
        self.fits: dict[str, Fit | None] = {}
        for node in graph.nodes:
            # ``view`` of what lies in memory in another order is a reshape.
            whole = on_tile(node, whole_dims(node.shape), (0, 1, 0, 1)) if node.shape else node
            self.values[node.name] = local_operator(whole, ON_HOST, self.tensors)(self.values)
            self.add(node)

    def add(self, node: Node) -> None:
        tiled = {name: self.dims[name] for name in node.inputs if name in self.dims}
        reading = Reading(node, self.graph, tiled)
        ways = [way for way in facts_of(node.kind).tiling if way not in WAYS]
        fits = (fit_of(way, reading) for way in ways) if tiled else iter(())
        fit = self.fits[node.name] = next((fit for fit in fits if fit is not None), None)
        if fit is None:
            return
        parts = self.parts(node, fit)
        whole = self.values[node.name]
        if fit.dims is None:
            assert torch.allclose(sum(parts), whole, atol=1e-12)  # type: ignore[arg-type]
            return
        self.dims[node.name] = fit.dims
        if isinstance(whole, Tensor):
            for part, rect in zip(parts, self.rects(fit.dims), strict=True):
                expected = tile_of(whole, fit.dims, rect)
                assert part.shape == expected.shape, node.name
                assert torch.allclose(part, expected, atol=1e-12), node.name

    def rects(self, dims: Dims) -> list[Any]:
        return own_rects(map_shape(dims)[2:], self.grid)

    def parts(self, node: Node, fit: Fit) -> list[Any]:
        made = []
        for tile in range(self.grid[0] * self.grid[1]):
            values, tensors = dict(self.values), dict(self.tensors)
            cut = {("value", n): d for n, d in self.dims.items() if n in node.inputs}
            cut = {ref: dims for ref, dims in cut.items() if ref[1] not in fit.gathered}
            for (kind, name), dims in {**cut, **fit.crops}.items():
                held = values if kind == "value" else tensors
                held[name] = self.cut(held[name], dims, tile)
            dims = fit.dims
            here = node if dims is None else on_tile(node, dims, self.rects(dims)[tile])
            made.append(local_operator(here, ON_HOST, tensors)(values))
        return made

    def cut(self, whole: Any, dims: Dims, tile: int) -> Any:
        if isinstance(whole, Tensor):
            return tile_of(whole, dims, self.rects(dims)[tile])
        parts = []
        for tensor in whole:  # the dims of a list are those of its elements, but for sizes
            sizes = whole_dims(tensor.shape)
            cut = [any(f.axis is not None for f in dim) for dim in dims]
            own = tuple(d if c else s for d, s, c in zip(dims, sizes, cut, strict=True))
            parts.append(tile_of(tensor, own, self.rects(own)[tile]))
        return parts


def walk(
    forward: Forward, shape: tuple[int, ...], grid: tuple[int, int] = (2, 2), **parts: Any
) -> Walk:
    torch.manual_seed(0)
    graph = traced(forward, shape, **parts)
    model = Net(forward, **copy.deepcopy(parts)).double()
    return Walk(graph, model, torch.randn(shape, dtype=torch.float64), grid)


def attention(n: Any, x: Tensor) -> Tensor:
    size, channels, height, width = x.shape
    tokens = x.flatten(2).transpose(1, 2) + n.position
    qkv = n.qkv(tokens).reshape(size, -1, 3, 2, channels // 2).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    weights = (q @ k.transpose(-2, -1) * 0.3).softmax(-1)
    y = (weights @ v).transpose(1, 2).reshape(size, -1, channels)
    y = y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return y.transpose(1, 2).reshape(size, channels, height, width)


def windows(n: Any, x: Tensor) -> Tensor:
    size, channels, height, width = x.shape
    x = x.permute(0, 2, 3, 1)
    parts = x.view(size, height // 3, 3, width // 3, 3, channels).permute(0, 1, 3, 2, 4, 5)
    parts = parts.reshape(-1, 9, channels)
    q, k, v = n.qkv(parts).view(-1, 9, 3, 2, channels // 2).permute(2, 0, 3, 1, 4)
    weights = q @ k.transpose(-2, -1) + n.bias
    count = height // 3 * (width // 3)
    weights = weights.view(size, count, 2, 9, 9) + n.mask.unsqueeze(1).unsqueeze(0)
    weights = weights.view(-1, 2, 9, 9).softmax(-1)
    y = (weights @ v).transpose(1, 2).reshape(-1, 9, channels)
    y = y.view(size, height // 3, width // 3, 3, 3, channels).permute(0, 1, 3, 2, 4, 5)
    return y.reshape(size, height, width, channels).permute(0, 3, 1, 2)


def einsums(n: Any, x: Tensor) -> Tensor:
    y = torch.einsum("nchw,dc->ndhw", x, n.weight) + torch.einsum("...hw,k->...hw", x, n.gamma)
    gram = torch.einsum("nchw,ndhw->ncd", x, y)
    y = torch.einsum("ncd,ndhw->nchw", gram, x)
    y = y + torch.tensordot(x, n.weight, ([1], [0])).movedim(-1, 1)
    return y + x.mT.transpose(2, 3)


def lists(n: Any, x: Tensor) -> Tensor:
    a, b = x.flatten(2).split([1, 3], dim=1)
    both = torch.stack((a.squeeze(1), b.select(1, 0)), dim=-1).flip(-1)
    both = both.repeat(1, 1, 2).index_select(2, n.index)
    whole = torch.cat((both, n.scale.expand(2, both.shape[1], 2)), -1)
    whole = whole.mean(-1, keepdim=True).expand(-1, -1, 4)
    return whole.transpose(1, 2).unflatten(2, (x.shape[2], x.shape[3]))


P = nn.Parameter
CASES: dict[str, tuple[Forward, tuple[int, ...], dict[str, Any], set[str]]] = {
    "attention": (
        attention,
        (2, 4, 5, 3),
        {"qkv": nn.Linear(4, 12), "position": P(torch.rand(1, 15, 4))},
        set(),
    ),
    "windows": (
        windows,
        (2, 4, 6, 12),
        {
            "qkv": nn.Linear(4, 12),
            "bias": P(torch.rand(2, 9, 9)),
            "mask": P(torch.rand(8, 9, 9)),
        },
        set(),
    ),
    "einsum": (
        einsums,
        (2, 4, 5, 4),
        {"weight": P(torch.rand(4, 4)), "gamma": P(torch.rand(3))},
        set(),
    ),
    "lists": (
        lists,
        (2, 4, 5, 4),
        {"index": nn.Parameter(torch.tensor([2, 0]), False), "scale": P(torch.rand(1, 1, 1))},
        {"expand"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_node_is_made_in_parts(name):
    forward, shape, parts, whole = CASES[name]
    for grid in ((2, 2), (1, 2)):
        walked = walk(forward, shape, grid, **parts)
        nodes, dims = walked.graph.nodes, walked.dims
        tiled = [node for node in nodes if not dims.keys().isdisjoint(node.inputs)]
        assert {node.kind for node in tiled if walked.fits[node.name] is None} <= whole
        assert is_map(dims[walked.graph.output])


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
    "adjoint": lambda n, x: x.adjoint(),
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
    "flip": lambda n, x: x.flip(1, 3),
    "fliplr": lambda n, x: torch.fliplr(x),
    "rot90": lambda n, x: torch.rot90(x, 1, (2, 3)),
    "rot90 of channels": lambda n, x: torch.rot90(x, -1, (1, 2)),
    "roll": lambda n, x: x.moveaxis(1, -1).roll((1, 2), (1, 2)),
    "roll of all": lambda n, x: x.roll(5),
    "pixel shuffle": lambda n, x: F.pixel_shuffle(x, 2),
    "pixel unshuffle": lambda n, x: F.pixel_unshuffle(x, 2),
    "unfold": lambda n, x: x.unfold(2, 2, 2),
    "diagonal": lambda n, x: x.diagonal(0, 2, 3),
    "einsum": lambda n, x: torch.einsum("nchw->whnc", x),
    "select": lambda n, x: x.moveaxis(1, 0).select(1, 1),
    "strided": lambda n, x: x.moveaxis(1, 3)[:, ::2, 1::2],
    "prelu of all in a row": lambda n, x: F.prelu(x.flatten(0), x.new_tensor([0.3])),
    "prelu of columns": lambda n, x: F.prelu(x.permute(2, 1, 0, 3), x[0, :, 0, 0]),
    "kron": lambda n, x: torch.kron(x.unflatten(1, (2, -1)), x[:1, :1, :1, None, :2]),
    "unbind": lambda n, x: torch.stack(x.swapaxes(1, 3).unbind(3), 1),
}  # fmt: skip


@pytest.mark.parametrize(("size", "grid"), [((8, 8), (2, 1)), ((12, 8), (1, 2))], ids=str)
def test_dims_in_another_order_are_those_of_torch(size, grid):
    def forward(n: Any, x: Tensor) -> Tensor:
        return sum(order(n, x).sum() for order in ORDERS.values())

    walked = walk(forward, (2, 4, *size), grid)
    fitting = {node.kind for node in walked.graph.nodes if walked.fits[node.name] is not None}
    assert {"permute", "prelu", "cat"} <= fitting
