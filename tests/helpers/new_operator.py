"""Networks with an operator that hires does not list, of which a module of its own says all."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hires.operators
from hires.plan.operators.operator_facts import OPERATORS

FOLDER = str(Path(__file__).with_name("scanned_operators"))
_NAME = "hires.operators.difference"


def register() -> None:
    """Does what the scan does in a process where the module lies in ``hires.operators``."""
    if "diff" not in OPERATORS:
        hires.operators.__path__.append(FOLDER)
        importlib.import_module(_NAME)


def remove() -> None:
    for name in ("diff", "hires_tests::row_diff"):
        OPERATORS._items.pop(name, None)
    sys.modules.pop(_NAME, None)
    hires.operators.__path__[:] = [one for one in hires.operators.__path__ if one != FOLDER]


def _differences(x: Tensor) -> Tensor:
    return torch.diff(x, dim=2)


def _gradient(_: Any, grad: Tensor) -> Tensor:
    return F.pad(grad, (0, 0, 1, 0)) - F.pad(grad, (0, 0, 0, 1))


row_diff = torch.library.custom_op(
    "hires_tests::row_diff", _differences, mutates_args=(), schema="(Tensor x) -> Tensor"
)
"""The same as an operator of ``torch.library``, in a namespace of its own."""
row_diff.register_fake(_differences)
row_diff.register_autograd(_gradient)


class Differences(nn.Module):
    """A classifier on the differences of rows, which a convolution made."""

    def __init__(self, is_own: bool = False) -> None:
        super().__init__()
        self.is_own = is_own
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 3, H, W) -> logits (n, 4)."""
        x = (row_diff if self.is_own else _differences)(self.stem(x))
        return self.head((x * x).mean((2, 3)))  # type: ignore[no-any-return]


def network() -> nn.Module:
    register()
    return Differences()


def network_of_own_namespace() -> nn.Module:
    register()
    return Differences(is_own=True)
