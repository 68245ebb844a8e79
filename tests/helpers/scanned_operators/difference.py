"""Operators that hires does not list, as a user would add them in ``hires.operators``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hires.plan.graph import Graph, Node
from hires.plan.operators.operator_facts import WindowFacts, declare, windowed
from hires.plan.operators.windows import window_axes
from hires.plan.tiling import Axes

if TYPE_CHECKING:
    from torch import Tensor

    from hires.parallel.window import Window


def axes(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Differences of neighbouring rows: row a of the output reads rows a and a + 1."""
    if node.args.get("dim", 2) % 4 != 2 or node.args.get("n", 1) != 1:
        return None
    return window_axes("window", node, shape, [2, 1], [1, 1], [0, 0], [1, 1])


def kernel(window: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    import torch

    return torch.diff(x, dim=2)


declare("diff", windowed(WindowFacts(axes, kernel)))
declare(
    "hires_tests::row_diff",
    windowed(WindowFacts(axes, kernel), module="tests.helpers.new_operator"),
)
