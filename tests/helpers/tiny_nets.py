"""Networks of one or two operations, and how a stage of tiles would compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hires.nets.trace import trace
from hires.plan.conversions import convert
from hires.plan.graph import Graph
from hires.plan.layout import connected
from hires.plan.plan import Finding, Stage
from hires.plan.undivided import no_rules

Forward = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """A network whose forward pass is ``forward(net, x)``, with parts of any kind."""

    def __init__(self, forward: Forward, **parts: Any) -> None:
        super().__init__()
        self.steps = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.steps(self, x)


def traced(
    forward: Forward, shape: tuple[int, ...] = (2, 4, 9, 8), training: bool = True, **parts: Any
) -> Graph:
    """Returns the graph of ``forward(net, x)``, where ``net`` holds the parts."""
    return trace(Net(forward, **parts), list(shape), training)


def tiled(graph: Graph, tiles: tuple[int, int] = (2, 2)) -> tuple[Stage, list[Finding]]:
    """Returns the graph as one stage of tiles, and what tiles cannot compute without a gather."""
    stage = Stage(0, 0, len(graph.nodes), list(tiles), 0)
    [laid], findings = laid_out(graph, [stage])
    return laid, findings


def laid_out(graph: Graph, stages: list[Stage], fuse: int = 1) -> tuple[list[Stage], list[Finding]]:
    """Returns stages with their layouts and what travels, and what cannot be computed."""
    made = convert(graph, stages, gather=False)
    if made.refused:
        return made.stages, no_rules(made)
    return [connected(made.graph, stage, fuse) for stage in made.stages], []
