"""Multiplies real numbers by signed 8-bit weights: each row of the input gets a scale of its own.

    x (rows, features)      -> low, high of each row, widened to hold 0
    scale                   = high / 255 - low / 255
    zero_point              = round(-low * (1 / scale))
    x_q                     = round(x * (1 / scale) + zero_point), 0 to 255
    y (rows, outputs)       = ((float(sum) * multiplier) + zero_point * offset) * scale + bias

A row is what the layer sums over: one sample, pixel or token, which a rank holds as a whole or not
at all: so its scale costs no message and has the bits of one process, and no image changes the
scores of the one beside it in its batch.

Sums of products are exact, in int32 (:mod:`hires.quant.int8_kernels`). All else is the sequence of
fp32 operations above, each rounded once, of single elements: a kernel that fuses two of them would
round the ends of a vector otherwise than its middle. ``multiplier`` is the scale of an output's
weights and ``offset`` is -multiplier * (the sum of its weights).

A row of zeros has the scale 1 and its output is the bias. A range is of finite elements: infinite
ones are clamped to its ends and NaN to its low one, as by a scale that a calibration has found.

Source:
    Dettmers et al., "LLM.int8()", NeurIPS 2022: vector-wise quantisation; here with a zero point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hires.core.config.precision_config import INT8
from hires.quant.affine import LARGEST, LAST
from hires.quant.int8_kernels import Rescale, multiply_int8, nearest_numbers

LEAST_SCALE = 2.0**-126
"""The least that fp32 holds to all its digits."""


class RowNumbers(NamedTuple):
    """Rows as unsigned integers: x = (x_q - zero_point) * scale."""

    numbers: Tensor
    """uint8, (..., features)."""
    scale: Tensor
    """fp32, (..., 1)."""
    zero_point: Tensor
    """Integers of 0 to 255 in fp32, (..., 1)."""


def quantized_rows(x: Tensor) -> RowNumbers:
    """Returns rows (..., features) of fp32 as integers with a scale and zero point for each."""
    low, high = x.nan_to_num(0.0, 0.0, 0.0).aminmax(dim=-1, keepdim=True)
    # Divided first: the distance of two ends may be more than fp32 holds.
    scale = high.clamp_(min=0).div_(LAST).sub_(low.clamp_(max=0) / LAST)
    empty = scale < LEAST_SCALE
    scale = scale.masked_fill_(empty, 1.0)
    factor = scale.reciprocal()
    zero_point = (low * -factor).masked_fill_(empty, 0.0).round_().clamp_(0, LAST)
    return RowNumbers(nearest_numbers(x * factor, zero_point), scale, zero_point)


def fake_quantized_rows(x: Tensor) -> Tensor:
    """Returns the real numbers of quantised rows (..., features), in fp32."""
    rows = quantized_rows(x.float())
    return rows.numbers.float().sub_(rows.zero_point).mul_(rows.scale)


def multiply_rows(
    x: Tensor,
    weight: Tensor,
    multiplier: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    largest: int = LARGEST[INT8],
) -> Tensor:
    """Returns the product of fp32 (..., features) with int8 (outputs, features, 1, 1), in fp32.

    ``multiplier``, ``offset`` and ``bias`` are fp32, (outputs,).
    """
    rows = quantized_rows(x)
    zeros = torch.zeros_like(multiplier)
    sums = Rescale(multiplier, zeros, dtype=torch.float32, largest=largest)
    y = multiply_int8(rows.numbers, weight, sums)
    y.add_(rows.zero_point * offset).mul_(rows.scale)
    return y if bias is None else y.add_(bias)
