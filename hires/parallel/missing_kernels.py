"""Computes operators for which torch has no kernel of 16 bits on a CPU: in fp32, then rounded.

Of torch 2.13 these are scaling with antialiasing, pools of three dims, and distances.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hires.parallel.wide_convolution import HALF

_LACKS = re.compile(r"not implemented for '(Half|BFloat16)'|Unsupported dtype (Half|BFloat16)")


def with_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes the same as an operator, in fp32 where it lacks a kernel."""
    lacks = False

    def call(*args: Any, **named: Any) -> Any:
        nonlocal lacks
        if not lacks:
            try:
                return function(*args, **named)
            except RuntimeError as error:  # before anything was computed
                if _LACKS.search(str(error)) is None:
                    raise
                lacks = True
        return _in_float32(function, args, named)

    return call


def _in_float32(function: Callable[..., Any], args: Any, named: Any) -> Any:
    narrow: torch.dtype | None = None

    def widened(item: Any) -> Any:
        nonlocal narrow
        if isinstance(item, Tensor) and item.dtype in HALF:
            narrow = item.dtype
            return item.float()
        return item

    args, named = tree_map(widened, (args, named))
    value = function(*args, **named)

    def rounded(item: Any) -> Any:
        is_float = isinstance(item, Tensor) and item.dtype == torch.float32
        return item.to(narrow) if is_float and narrow is not None else item

    return tree_map(rounded, value)
