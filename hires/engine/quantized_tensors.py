"""Computes the tensors of quantised layers: 8-bit weights, factors and offsets.

    weight  -> integers     round(weight / scale), a scale for each output channel
            -> multiplier   s_in * scale / s_out
    bias    -> offset       bias / s_out + z_out - z_in * multiplier * sum(its integers)

So a layer is sum(integers * x_q) * multiplier + offset. The s and z of its input and output stand
in the recipes, as ``factor`` (s_in / s_out), ``bias_factor`` (1 / s_out), ``add`` and
``zero_point``, and so does the ``largest`` integer of a weight.

A transposed convolution of stride s computes s x s phases of its output as channels, each with
every s-th row and column of the kernel (``hires.parallel.quantized_kernels``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.engine.derived_tensors import RECIPES, norm_scale, row_pieces

WEIGHT_RECIPE = "quantized_weight"
"""The recipe that rounds a float weight."""


@RECIPES.register("quantized_scale")
def quantized_scale(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    """Returns the scale of each output channel of a weight, in float64."""
    [weight] = tensors
    return _scales(recipe, _weight(recipe, weight)).flatten()


@RECIPES.register(WEIGHT_RECIPE)
def quantized_weight(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    """Returns the integers of a weight, int8: (K, C / groups, rows, columns)."""
    weight, scales = tensors
    weight, largest = _weight(recipe, weight), recipe["largest"]
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for rows in row_pieces(weight):
        real = weight[rows] / scales[rows].view(-1, 1, 1, 1)
        numbers[rows] = real.round_().clamp_(-largest, largest).to(torch.int8)
    return numbers


def rounded_weight(recipe: dict[str, Any], weight: Tensor) -> Tensor:
    """Returns a float weight after rounding, in float64 and in its own shape.

    ``recipe`` is that of its integers.
    """
    scales = _scales(recipe, _weight(recipe, weight))
    numbers = quantized_weight(recipe, [weight, scales.flatten()])
    real = numbers * scales
    if "stride" not in recipe:
        return real.view(weight.shape)
    # Each weight of a transposed convolution has one place among its phases; the others are 0.
    places = torch.arange(1, weight.numel() + 1, device=weight.device).view(weight.shape)
    place = _weight(recipe, places)
    made = torch.empty(weight.numel(), dtype=real.dtype, device=weight.device)
    made[place[place > 0].long() - 1] = real[place > 0]
    return made.view(weight.shape)


@RECIPES.register("quantized_multiplier")
def quantized_multiplier(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    """Returns the factor of each output channel, in fp32, from the scales."""
    [scales] = tensors
    factors: Tensor = scales * recipe["factor"]
    return factors.float()


@RECIPES.register("quantized_offset")
def quantized_offset(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    """Returns the offset of each output channel, in fp32: of its integers, factor and bias."""
    numbers, multiplier, *bias = tensors
    sums = torch.cat([numbers[r].sum((1, 2, 3), dtype=torch.int64) for r in row_pieces(numbers)])
    of_zeros = recipe["zero_point"] * sums.double() * multiplier
    offset: Tensor = recipe["add"] - of_zeros
    if bias:
        phases = len(offset) // len(bias[0])
        real = bias[0].double() * recipe["bias_factor"]
        offset = offset + real.repeat_interleave(phases)
    return offset.float()


@RECIPES.register("norm_weight")
def _norm_weight(recipe: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    # Of a norm with stored statistics: it multiplies every channel, as a convolution can.
    return norm_scale(recipe, tensors).view(-1, 1, 1, 1)


def _weight(recipe: dict[str, Any], weight: Tensor) -> Tensor:
    # As a convolution of stride 1 has it, in float64.
    weight = weight.double()
    if "stride" not in recipe:
        return weight if weight.dim() == 4 else weight[:, :, None, None]
    return _phases(weight, recipe["groups"], recipe["stride"], recipe["dilation"])


def _scales(recipe: dict[str, Any], weight: Tensor) -> Tensor:
    # (K, 1, 1, 1); the phases of a transposed convolution's channel have one scale.
    phases = recipe["stride"][0] * recipe["stride"][1] if "stride" in recipe else 1
    most = torch.cat([weight[rows].abs().amax((1, 2, 3)) for rows in row_pieces(weight)])
    most = most.view(-1, phases).amax(1, keepdim=True)
    scales = torch.where(most > 0, most / recipe["largest"], 1.0)
    return scales.expand(-1, phases).reshape(-1, 1, 1, 1)


def _phases(weight: Tensor, groups: int, stride: list[int], dilation: list[int]) -> Tensor:
    # (C, K / groups, rows, columns) -> (K * phases, C / groups, taps, taps)
    channels, outputs, *_ = weight.shape
    weight = weight.view(groups, channels // groups, outputs, *weight.shape[2:]).transpose(1, 2)
    weight = weight.reshape(groups * outputs, channels // groups, *weight.shape[3:])
    for dim, (step, apart) in enumerate(zip(stride, dilation, strict=True), start=2):
        reach = apart * (weight.shape[dim] - 1) + 1
        spread = weight.new_zeros([*weight.shape[:dim], reach, *weight.shape[dim + 1 :]])
        spread.narrow(dim, 0, reach)[(slice(None),) * dim + (slice(0, reach, apart),)] = weight
        missing = -reach % step
        weight = F.pad(spread, (0, 0) * (3 - dim) + (0, missing))
    taps = [size // step for size, step in zip(weight.shape[2:], stride, strict=True)]
    apart_phases = weight.view(len(weight), -1, taps[0], stride[0], taps[1], stride[1])
    # The last tap of a phase reads the earliest input: a convolution has it first.
    by_phase = apart_phases.flip(2, 4).permute(0, 3, 5, 1, 2, 4)
    return by_phase.reshape(-1, channels // groups, *taps)
