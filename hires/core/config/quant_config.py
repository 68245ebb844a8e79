"""Declares the keys of quantisation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.value_checks import (
    Checks,
    Section,
    check_word,
    choice,
    cosmetic,
    number,
    word,
)
from hires.core.errors import ConfigError

MIN_MAX = "min_max"
OBSERVERS = ("entropy", "percentile", MIN_MAX, "moving_average")
CALIBRATIONS = ("data", "noise")
STATIC, DYNAMIC = "static", "dynamic"
LINEAR = (STATIC, DYNAMIC)
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

    scales: str | None = cosmetic(word())
    """JSON file of scales that `hires quantize` has written; unset: the one beside ``weights``, or
    else a run calibrates first."""
    linear: str = choice(STATIC, LINEAR)
    """Where linear layers have the scale of their input from: ``static``, from the calibration, or
    ``dynamic``, from the elements of each row (sample, pixel or token) while it is computed. A file
    of weights has its own."""
    observer: str = choice("entropy", OBSERVERS)
    """How the range of a value follows from calibration images: ``entropy`` (least loss of
    information, as TensorRT), ``percentile``, ``min_max``, or ``moving_average`` (of the smallest
    and largest element of each image)."""
    percentile: float = number(99.99, above=True, most=100)
    """Share of a value's elements within its range, for ``quant.observer=percentile``."""
    images: int = number(256, least=1)
    """Images that are calibrated on."""
    calibration: str = choice("data", CALIBRATIONS)
    """What they are: images of the run's ``data``, or ``noise`` (made up, whose scales fit no real
    image: for measurements of speed only)."""
    data: dict[str, Any] = field(default_factory=dict)
    """Keys in which the data of the calibration differs from the run's ``data``, as
    ``quant.data.path=FOLDER``."""
    keep: list[str] = field(default_factory=list)
    """Layers that stay in float, by name or pattern, as ``[conv1,layer4.*]``."""
    auto: Any = field(default=None, metadata={"check": _check_auto})
    """Bound of the output's error, as ``30dB`` or ``0.001``: the operators whose quantisation costs
    most stay in float until the int8 network meets it on the first batch; unset: all are quantised
    that can be."""

    def _check_more(self, check: Checks) -> None:
        for name in self.keep:
            check(check_word, "quant.keep", name)
        if self.percentile != type(self).percentile and self.observer != "percentile":
            check.problems.append(
                f"quant.percentile={self.percentile:g} is for quant.observer=percentile, not "
                f"quant.observer={self.observer}; leave it out, or use quant.observer=percentile"
            )
