"""Prepares the device of a rank for the arithmetic of the run."""

from __future__ import annotations

import logging
import time

import torch

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.precisions import HALF, INT8, PRECISIONS
from hires.engine.device import HOST, RankDevice
from hires.parallel.convolution import convolve

SHAPE, CHANNELS = (2, 64, 28, 28), 64
"""Of the input and the outputs of a convolution that takes a few milliseconds."""
RUNS = 3

log = logging.getLogger(__name__)


def prepare(config: RunConfig, device: RankDevice, rank: int) -> None:
    """Lets a device use TF32 or forbids it; ConfigError: it has none.

    Rank 0 logs a warning if its CPU is slower in the run's precision than in fp32, and if its GPU
    has no int8 kernels.
    """
    name = config.precision.name
    if name == "tf32" and not device.has_tf32:
        raise ConfigError(
            f"precision=tf32 needs NVIDIA GPUs of compute capability 8 or above, and rank {rank} "
            f"has none; use precision=fp32"
        )
    device.set_tf32(name == "tf32")
    if rank == 0 and name in HALF and device.torch == HOST:
        _warn_if_slower(name)
    if rank == 0 and name == INT8 and device.lacks_for_int8 is not None:
        log.warning("precision=int8 computes in fp64, which is slow: %s", device.lacks_for_int8)


def _warn_if_slower(name: str) -> None:
    half_s, single_s = (_convolution_s(getattr(torch, PRECISIONS[p])) for p in (name, "fp32"))
    if half_s > single_s:
        log.warning(
            "precision=%s saves memory on this CPU and no time: a convolution takes %.1f ms, and "
            "%.1f ms in fp32",
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
        convolve(x, weight, None, 1, 1, 1, 1)
        taken_s.append(time.perf_counter() - begin_s)
    return min(taken_s)
