"""Tiles of a small network in one process: threads that hold what they need, no more."""

from __future__ import annotations

import collections
import copy
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hires.nets.build_network import constant_tensor
from hires.nets.random_draws import Draws
from hires.nets.trace import trace
from hires.parallel.compile_node import compile_node
from hires.parallel.context import Context
from hires.plan.conversions import convert
from hires.plan.graph import INPUT, Graph
from hires.plan.halos import wanted_parts
from hires.plan.layout import connected, with_norms_together
from hires.plan.plan import Plan, Stage
from hires.plan.rules import TILED, rule_in
from hires.plan.tiling import cover, own_rects, rect_around
from tests.helpers.thread_ranks import run_threads

FUSED = 1000
"""So many windows share one exchange: that of the images, whose pixels the test hands out."""
HANG_S = 30.0


class Gathers:
    """A cursor without a plan: threads meet at every gather, which must be as large as planned."""

    def __init__(self, rank: int, meeting: threading.Barrier, shared: dict[int, Tensor]) -> None:
        self.rank, self.meeting, self.shared = rank, meeting, shared
        self.elements: dict[str, list[int]] = collections.defaultdict(list)

    def gather(self, tensor: Tensor, node: str, back: bool = False) -> Tensor:
        """Returns the tensors of all tiles."""
        assert tensor.numel() in self.elements[node], (node, tensor.shape)
        self.shared[self.rank] = tensor.detach().clone()
        self.meeting.wait(HANG_S)
        gathered = torch.stack([self.shared[rank] for rank in range(self.meeting.parties)])
        self.meeting.wait(HANG_S)
        return gathered


def laid_out(
    graph: Graph, grid: tuple[int, int], fuse: int = FUSED, joint: bool = False
) -> tuple[Graph, Stage]:
    """Returns one stage of tiles whose only exchange would be that of the images."""
    stage = Stage(0, 0, len(graph.nodes), list(grid), 0)
    graph, [stage], refused, _ = convert(graph, [stage], gather=False)
    assert not refused, refused
    graph = with_norms_together(graph, [stage]) if joint else graph
    stage = connected(graph, stage, fuse, joint)
    held = [(0, 0, 0, 0)] * stage.num_tiles
    for index in graph.consumers[INPUT]:
        node = graph.nodes[index]
        rule = rule_in(stage, node, graph)
        wanted = wanted_parts(graph, stage, node, INPUT, rule)
        held = [cover(a, rect_around(b)) for a, b in zip(held, wanted, strict=True)]
    stage.extents[INPUT] = [list(rect) for rect in held]
    return graph, replace(stage, comm=[op for op in stage.comm if op.kind != "halo"])


def run_tiles(
    net: nn.Module,
    graph: Graph,
    grid: tuple[int, int],
    x: Tensor,
    slope: Tensor,
    joint: bool = False,
) -> tuple[Tensor, Tensor, nn.Module]:
    """Returns the value of a network, and the gradients of image and parameters, from tiles.

    ``slope`` is the gradient of the value; ``joint``: norms share messages. Buffers of the returned
    module are those of tile 0.
    """
    graph, stage = laid_out(graph, grid, joint=joint)
    tiles = range(stage.num_tiles)
    plan = Plan(graph, [stage], [], 1, 1, True, "float64", [["F0", "B0"]] * stage.num_tiles)
    meeting, shared = threading.Barrier(stage.num_tiles), dict[int, Tensor]()
    group = SimpleNamespace(ranks=list(tiles), shared=None)
    copies = [copy.deepcopy(net) for _ in tiles]
    tiled = stage.layout[graph.output] == TILED
    outs = own_rects(slope.shape[2:], grid) if tiled else [None] * stage.num_tiles

    def run(tile: int) -> tuple[Tensor, Tensor]:
        cursor = Gathers(tile, meeting, shared)
        for op in stage.comm:
            cursor.elements[op.node].append(op.elements)
        groups = collections.defaultdict(lambda: group)
        context = Context(plan, tile, groups, cursor)  # type: ignore[arg-type]
        tensors = {**dict(copies[tile].named_parameters()), **dict(copies[tile].named_buffers())}
        facts = graph.params.items()
        tensors |= {n: constant_tensor(fact) for n, fact in facts if fact.is_constant}
        own = _part(x, context.extent(INPUT)).clone().requires_grad_()
        values: dict[str, Any] = {INPUT: own * 1}
        operators = [compile_node(node, context, tensors) for node in graph.nodes]
        for node, operator in zip(graph.nodes, operators, strict=True):
            values[node.name] = operator(values)
        y = values[graph.output]
        y.backward(slope if outs[tile] is None else _part(slope, outs[tile]))
        return y.detach(), own.grad if own.grad is not None else torch.zeros_like(own)

    made = run_threads(run, stage.num_tiles, meeting)
    grad = torch.zeros_like(x)
    for (_, own), rect in zip(made, stage.extents[INPUT], strict=True):
        _part(grad, rect).add_(own)
    if tiled:
        value = torch.full_like(slope, torch.nan)
        for (y, _), rect in zip(made, outs, strict=True):
            _part(value, rect).copy_(y)
    else:
        value = made[0][0]
        assert all(torch.equal(value, y) for y, _ in made), "tiles differ"
    for name, parameter in copies[0].named_parameters():
        others = [dict(one.named_parameters())[name].grad for one in copies[1:]]
        for grad_of_other in (g for g in others if g is not None):
            base = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = base + grad_of_other
    return value, grad, copies[0]


def check_tiles(
    net: nn.Module, shape: tuple[int, ...], *grids: tuple[int, int], ties: bool = False, **keys: Any
) -> Graph:
    """Compares tiles with torch: value, gradients and buffers, in float64.

    With ``ties`` also for an image of many equal pixels.
    """
    torch.manual_seed(0)
    training, net = keys.get("training", True), _Learns(net)
    net = copy.deepcopy(net).double().train(training)
    graph = trace(net, list(shape), training, torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    for pixels in (x, x.relu()) if ties else (x,):
        _compare(net, graph, pixels, grids, keys.get("joint", False))
    return graph


def _compare(
    net: nn.Module, graph: Graph, x: Tensor, grids: tuple[tuple[int, int], ...], joint: bool
) -> None:
    whole = copy.deepcopy(net)
    image = x.clone().requires_grad_()
    with Draws(0, 0, 0, len(x)):
        expected = whole(image)
    slope = torch.randn_like(expected)
    expected.backward(slope)
    for grid in grids:
        value, grad, tiled = run_tiles(net, graph, grid, x, slope, joint)
        _close(value, expected.detach(), f"value in {grid}")
        assert image.grad is not None
        _close(grad, image.grad, f"gradient in {grid}")
        theirs = dict(tiled.named_parameters())
        for name, parameter in whole.named_parameters():
            if parameter.grad is not None:
                _close(theirs[name].grad, parameter.grad, f"{name} in {grid}")
        # Batches are counted by the engine, once a microbatch.
        buffers = (one for one in whole.named_buffers() if "num_batches_tracked" not in one[0])
        for name, buffer in buffers:
            _close(dict(tiled.named_buffers())[name].double(), buffer.double(), f"{name} in {grid}")


class _Learns(nn.Module):
    # The gradient flows to something before the network, so that values are shared as in training.
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.gain = net, nn.Parameter(torch.tensor([[[[1.5]]]]))

    def forward(self, x: Tensor) -> Any:
        return self.net(x * self.gain)


def _close(made: Tensor | None, expected: Tensor, what: str) -> None:
    assert made is not None, what
    assert made.shape == expected.shape, what
    # The gradient of a bias before a norm is zero but for rounding.
    scale = max(float(expected.abs().max()), 1e-3) if expected.numel() else 1.0
    error = float((made - expected).abs().max()) / scale if expected.numel() else 0.0
    assert error < 1e-11, f"{what}: {error:.1e}"


def _part(x: Tensor, rect: Any) -> Tensor:
    return x[:, :, rect[0] : rect[1], rect[2] : rect[3]]
