"""Compares tensors that a script leaves over hires with those over torch's own gloo."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOLERANCE = 1e-12
"""Of float64; other types: see :func:`same`."""


@dataclasses.dataclass
class Comparison:
    """How tensors of one script are compared, and where they differ."""

    exact: bool = True
    differences: list[str] = dataclasses.field(default_factory=list)
    """A script goes on after a difference, so that the ranks stay in step."""


SCRIPTS: dict[str, Callable[[Any], None]] = {}
state = Comparison()


def script(function: Callable[[Any], None]) -> Callable[[Any], None]:
    SCRIPTS[function.__name__] = function
    return function


def same(ours: Any, theirs: Any) -> None:
    """Compares tensors, or lists and dictionaries of them."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = [*ours.values()], [*theirs.values()]
    if isinstance(ours, Sequence):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
        return
    assert ours.shape == theirs.shape
    if torch.equal(ours, theirs):
        return
    worst, scale = (float(one.to(torch.cdouble).abs().max()) for one in (ours - theirs, theirs))
    bound = TOLERANCE if ours.dtype == torch.float64 else 0.0
    if ours.dtype in (torch.float32, torch.bfloat16):
        bound = 8 * torch.finfo(ours.dtype).eps
    if state.exact or not worst <= bound * scale:
        where = "".join(traceback.format_stack(limit=6))
        state.differences.append(f"{where}off by {worst:.2e} of {scale:.2e}: {ours} {theirs}\n")


def ranks() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).mul(9).to(dtype)
