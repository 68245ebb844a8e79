"""Declares the keys of the arithmetic and of quantisation, and the type that each computes in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hires.core.config.fields import MOST_STEPS, Section, value
from hires.core.errors import ConfigError

PRECISIONS = {
    "fp64": "float64",
    "fp32": "float32",
    "tf32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "float32",
}
"""Name -> the type of what a network computes, the most exact first. ``tf32`` holds fp32 numbers,
whose matrix products a GPU computes with 10 bits of each factor. ``int8`` computes with 8-bit
integers what it can, and the rest in fp32."""

INT8 = "int8"

HALF = ("fp16", "bf16")
"""To these autocast lowers matrix products; weights that are learned stay fp32."""

CPU_FLAGS = {
    "fp16": ("avx512_fp16", "amx_fp16"),
    "bf16": ("avx512_bf16", "amx_bf16"),
    INT8: ("avx512_vnni", "avx_vnni", "amx_int8"),
}
"""Precision -> flags of /proc/cpuinfo: a CPU with one of them multiplies such numbers itself."""

SIGNIFICANT_BITS = {"fp64": 53, "fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8, INT8: 8}
"""Bits of a factor in a matrix product, the hidden one included: a number is rounded by at most
2 ** -bits of itself."""

DYNAMIC = "dynamic"


def _check_scale(key: str, scale: Any) -> None:
    if scale != DYNAMIC and type(scale) not in (int, float):
        raise ConfigError(f"{key}={scale!r} must be {DYNAMIC}, or a number above 0 as 1024")


PRECISION_NAMES = {
    "fp64": "64-bit floating point, for comparisons",
    "fp32": "32-bit floating point",
    "tf32": "32-bit floating point; GPUs round the factors of matrix products to 10 bits",
    "fp16": "16-bit floating point: autocast and a loss scale in training, else cast weights",
    "bf16": "bfloat16: autocast in training, cast weights in inference",
    "int8": "8-bit integers, for inference, with the scales of a calibration (quant.scales)",
}


@dataclass
class PrecisionConfig(Section, key="precision", choices=PRECISION_NAMES):
    """``precision=NAME``: the arithmetic."""

    name: str = value("fp32", choices=PRECISIONS)
    """``fp64``, ``fp32``, ``tf32`` (fp32 whose matrix products have 10 bits of each factor, on
    NVIDIA GPUs from compute capability 8 on), ``bf16`` or ``fp16``: autocast in training, cast
    weights in inference. ``int8``, for inference: 8-bit integers, by the scales of
    ``quant.scales``; what has none is computed in fp32."""
    weights: str = value("auto", choices=("auto", "fp32", *HALF))
    """Type in which inference holds weights and images: ``auto`` (that of the precision, which may
    be named: ``fp16`` or ``bf16``), or ``fp32`` under autocast. Training holds them in fp32, or
    fp64 with ``precision=fp64``."""
    loss_scale: Any = value(DYNAMIC, above=0, high=2**127, check=_check_scale, of=("fp16",))
    """Training in ``fp16``: the loss is multiplied by it, so that small gradients are no zeros:
    ``dynamic`` (65536 at first, halved with every step that overflows) or a fixed number. The
    optimiser skips a step whose gradients are not finite."""
    scale_interval: int = value(2000, 1, MOST_STEPS)
    """Steps without an overflow after which a ``dynamic`` loss scale is doubled."""

    def _problems(self) -> Iterator[str]:
        fitting = ("auto", self.name) if self.name == "fp64" else ("auto", "fp32", self.name)
        if self.weights not in fitting:
            yield (
                f"precision.weights={self.weights} needs precision={self.weights}, not "
                f"precision={self.name}; leave it out"
            )


MIN_MAX = "min_max"
OBSERVERS = ("entropy", "percentile", MIN_MAX, "moving_average")
CALIBRATIONS = ("data", "noise")
STATIC = "static"
LINEAR = (STATIC, DYNAMIC)
INT7 = "int7"
_BOUND = re.compile(r"(\d+(?:\.\d+)?) ?dB", re.IGNORECASE)


def _check_auto(key: str, value: Any) -> None:
    if noise_bound(value) is None:
        raise ConfigError(
            f"{key}={value!r} is no bound of the error; give the signal over the noise, as 30dB, "
            f"or the share of noise, above 0 and below 1, as 0.001"
        )


def noise_bound(value: Any) -> float | None:
    """Returns the largest ratio of noise to signal, as powers, that ``quant.auto`` allows."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if 0 < value < 1 else None
    match = _BOUND.fullmatch(value) if isinstance(value, str) else None
    return 10 ** (-float(match[1]) / 10) if match else None


@dataclass
class QuantConfig(Section, key="quant"):
    """``quant.*``: how ``precision=int8`` finds its scales, and what it leaves in float."""

    scales: str | None = value(line=True, path=(), identity=False)
    """JSON file of scales that `hires quantize` has written; unset: the one beside ``weights``, or
    else a run calibrates first."""
    linear: str = value(STATIC, choices=LINEAR)
    """Where linear layers have the scale of their input from: ``static``, from the calibration, or
    ``dynamic``, from the elements of each row (sample, pixel or token) while it is computed. A file
    of weights has its own."""
    weights: str = value(INT8, choices=(INT8, INT7))
    """Integers of weights: ``int8`` (-127 to 127) or ``int7`` (-63 to 63), with which processors
    without VNNI or AMX compute fast, to the same bits. A file of weights has its own."""
    observer: str = value("entropy", choices=OBSERVERS, calibrates=True)
    """How the range of a value follows from calibration images: ``entropy`` (least loss of
    information, as TensorRT), ``percentile``, ``min_max``, or ``moving_average`` (of the smallest
    and largest element of each image)."""
    percentile: float = value(
        99.99, above=0, high=100, of=("observer=percentile",), calibrates=True
    )
    """Share of a value's elements within its range, for ``quant.observer=percentile``."""
    images: int = value(256, 1, calibrates=True)
    """Images that are calibrated on."""
    calibration: str = value("data", choices=CALIBRATIONS, calibrates=True)
    """What they are: images of the run's ``data``, or ``noise`` (made up, whose scales fit no real
    image: for measurements of speed only)."""
    data: dict[str, Any] = value({}, calibrates=True)
    """Keys in which the data of the calibration differs from the run's ``data``, as
    ``quant.data.path=FOLDER``."""
    keep: list[str] = value([], line=True)
    """Layers that stay in float, by name or pattern, as ``[conv1,layer4.*]``."""
    auto: Any = value(check=_check_auto)
    """Bound of the output's error, as ``30dB`` or ``0.001``: the operators whose quantisation costs
    most stay in float until the int8 network meets it on the first batch; unset: all are quantised
    that can be."""
