"""A network with an operator that hires does not list, of which a module of its own says all."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
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
    OPERATORS._items.pop("diff", None)
    sys.modules.pop(_NAME, None)
    hires.operators.__path__[:] = [one for one in hires.operators.__path__ if one != FOLDER]


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
