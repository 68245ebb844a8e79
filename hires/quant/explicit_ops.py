"""Declares the operators that turn real numbers into 8-bit integers in a graph, and back.

    quantize(x)              the nearest integer from -128 to 127, ties to even
    dequantize(q, scale)     q * scale; of a weight with a scale for each output channel

A compiler of graphs, as TensorRT, finds them around a product and computes that with integers;
torch computes what they say. The scale of ``quantize`` is 1: what enters it is scaled already.

Both are tagged as random, although they are not. It keeps compilers from computing the dequantised
weights beforehand, which would leave a product of real numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST, HIGHEST = -128, 127

_TAGS = (torch.Tag.nondeterministic_seeded,)
_OPS = torch.library.Library("hires", "FRAGMENT")  # type: ignore[no-untyped-call]
_OPS.define("quantize(Tensor x) -> Tensor", tags=_TAGS)  # type: ignore[no-untyped-call]
_OPS.define("dequantize(Tensor numbers, Tensor scale) -> Tensor", tags=_TAGS)  # type: ignore[no-untyped-call]


def quantize(x: Tensor) -> Tensor:
    """Returns the nearest signed 8-bit integers, in the shape of ``x``."""
    made: Tensor = torch.ops.hires.quantize(x)
    return made


def dequantize(numbers: Tensor, scale: Tensor) -> Tensor:
    """Returns the real numbers of signed integers, in fp32.

    ``scale`` has one element, or one for each index of the first dim.
    """
    made: Tensor = torch.ops.hires.dequantize(numbers, scale)
    return made


def signed(numbers: Tensor) -> Tensor:
    """Returns unsigned 8-bit integers as signed ones, 128 less, and signed ones as unsigned."""
    if numbers.dtype == torch.uint8:
        return numbers.bitwise_xor(128).view(torch.int8)
    return numbers.view(torch.uint8).bitwise_xor(128)


def _quantized(x: Tensor) -> Tensor:
    return x.round().clamp(LOWEST, HIGHEST).to(torch.int8)


def _dequantized(numbers: Tensor, scale: Tensor) -> Tensor:
    if scale.dim():
        scale = scale.view(-1, *[1] * (numbers.dim() - 1))
    return numbers.float() * scale


def _like_quantized(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.int8)


def _like_dequantized(numbers: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(numbers, dtype=torch.float32)


_OPS.impl("quantize", _quantized, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_OPS.impl("dequantize", _dequantized, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_OPS.impl("quantize", _like_quantized, "Meta")  # type: ignore[no-untyped-call]
_OPS.impl("dequantize", _like_dequantized, "Meta")  # type: ignore[no-untyped-call]
