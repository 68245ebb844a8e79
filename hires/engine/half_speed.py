"""Measures whether a precision of 16 bits is slower than fp32 on this CPU."""

from __future__ import annotations

import logging
import time

import torch

from hires.core.config.run_config import RunConfig
from hires.core.precisions import HALF, PRECISIONS

SHAPE, CHANNELS = (2, 64, 28, 28), 64
"""Of the input and the outputs of a convolution that takes a few milliseconds."""
RUNS = 3

log = logging.getLogger(__name__)


def warn_if_slower(config: RunConfig) -> None:
    """Logs a warning if a convolution in the run's precision takes longer than in fp32."""
    name = config.precision.name
    if name not in HALF:
        return
    half_s, single_s = (_convolution_s(getattr(torch, PRECISIONS[p])) for p in (name, "fp32"))
    if half_s > single_s:
        log.warning(
            "precision=%s is slower than fp32 on this CPU: a convolution takes %.1f ms, %.1f ms in "
            "fp32; it saves memory, not time",
            name,
            half_s * 1e3,
            single_s * 1e3,
        )


@torch.no_grad()
def _convolution_s(dtype: torch.dtype) -> float:
    x = torch.ones(SHAPE, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.ones((CHANNELS, SHAPE[1], 3, 3), dtype=dtype)
    taken_s = []
    for _ in range(RUNS):  # the first one compiles a kernel
        begin_s = time.perf_counter()
        torch.conv2d(x, weight, padding=1)
        taken_s.append(time.perf_counter() - begin_s)
    return min(taken_s)
