"""Declares the keys of the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hires.core.config.value_checks import MOST_STEPS, Checks, Section, choice, number
from hires.core.errors import ConfigError
from hires.core.precisions import HALF, PRECISIONS

DYNAMIC = "dynamic"


def _check_scale(key: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value != DYNAMIC and not (is_number and 0 < value < 2**127):
        raise ConfigError(f"{key}={value!r} must be {DYNAMIC}, or a number above 0 as 1024")


CHOICES = {
    "fp64": "64-bit floating point, for comparisons",
    "fp32": "32-bit floating point",
    "tf32": "32-bit floating point; GPUs round the factors of matrix products to 10 bits",
    "fp16": "16-bit floating point: autocast and a loss scale in training, else cast weights",
    "bf16": "bfloat16: autocast in training, cast weights in inference",
    "int8": "8-bit integers, for inference, with the scales of a calibration (quant.scales)",
}
"""Choices of ``precision`` without further keys, and what each is."""


@dataclass
class PrecisionConfig(Section, key="precision", choices=CHOICES):
    """``precision=NAME``: the arithmetic."""

    name: str = choice("fp32", PRECISIONS)
    """``fp64``, ``fp32``, ``tf32`` (fp32 whose matrix products have 10 bits of each factor, on
    NVIDIA GPUs from compute capability 8 on), ``bf16`` or ``fp16``: autocast in training, cast
    weights in inference. ``int8``, for inference: 8-bit integers, by the scales of
    ``quant.scales``; what has none is computed in fp32."""
    weights: str = choice("auto", ("auto", "fp32", *HALF))
    """Type in which inference holds weights and images: ``auto`` (that of the precision, which may
    be named: ``fp16`` or ``bf16``), or ``fp32`` under autocast. Training holds them in fp32, or
    fp64 with ``precision=fp64``."""
    loss_scale: Any = field(default=DYNAMIC, metadata={"check": _check_scale, "most": 2**127})
    """Training in ``fp16``: the loss is multiplied by it, so that small gradients are no zeros:
    ``dynamic`` (65536 at first, halved with every step that overflows) or a fixed number. The
    optimiser skips a step whose gradients are not finite."""
    scale_interval: int = number(2000, least=1, most=MOST_STEPS)
    """Steps without an overflow after which a ``dynamic`` loss scale is doubled."""

    def _check_more(self, check: Checks) -> None:
        if self.weights not in ("auto", "fp32", self.name):
            raise ConfigError(
                f"precision.weights={self.weights} needs precision={self.weights}, not "
                f"precision={self.name}, or leave it out"
            )
        if self.weights == "fp32" and self.name == "fp64":
            raise ConfigError(
                "precision.weights=fp32 does not go with precision=fp64; leave it out, or use "
                "precision=fp32"
            )
        if self.loss_scale != DYNAMIC and self.name != "fp16":
            raise ConfigError(
                f"precision.loss_scale={self.loss_scale} is for precision=fp16, not "
                f"precision={self.name}; leave it out"
            )
