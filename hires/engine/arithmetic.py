"""Prepares the device of a rank for the arithmetic of the run."""

from __future__ import annotations

import logging

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.precisions import INT8
from hires.engine.device import RankDevice

log = logging.getLogger(__name__)


def prepare(config: RunConfig, device: RankDevice, rank: int) -> None:
    """Lets a device use TF32 or forbids it; ConfigError: it has none.

    Rank 0 logs a warning if its GPU has no int8 kernels.
    """
    name = config.precision.name
    if name == "tf32" and not device.has_tf32:
        raise ConfigError(
            f"precision=tf32 needs NVIDIA GPUs of compute capability 8 or above, and rank {rank} "
            f"has none; use precision=fp32"
        )
    device.set_tf32(name == "tf32")
    if rank == 0 and name == INT8 and device.lacks_for_int8 is not None:
        log.warning("precision=int8 computes in fp64, which is slow: %s", device.lacks_for_int8)
