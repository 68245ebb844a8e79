"""An operator that hires does not list, with its entry and its kernel, as a user would add it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hires.parallel.window import WINDOW_KERNELS, Window
from hires.plan.graph import Graph, Node
from hires.plan.operators.operator_facts import OPERATORS, OperatorFacts, WindowFacts, declare
from hires.plan.operators.windows import window_axes
from hires.plan.tiling import Axes


def axes(node: Node, shape: list[int], graph: Graph) -> Axes | None:
    """Differences of neighbouring rows: row a of the output reads rows a and a + 1."""
    if node.args["dim"] % 4 != 2 or node.args["n"] != 1:
        return None
    return window_axes("window", node, shape, [2, 1], [1, 1], [0, 0], [1, 1])


def kernel(window: Window, x: Tensor, args: dict[str, Any]) -> Tensor:
    return torch.diff(x, dim=2)


def register() -> None:
    if "diff" not in OPERATORS:
        declare("diff", OperatorFacts(("window",), window=WindowFacts(axes)))
        WINDOW_KERNELS.register("diff")(kernel)


class Differences(nn.Module):
    """A classifier on the differences of rows, which a convolution made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, 4)."""
        x = torch.diff(self.stem(x), dim=2)
        return self.head((x * x).mean((2, 3)))  # type: ignore[no-any-return]


def network() -> nn.Module:
    register()
    return Differences()
