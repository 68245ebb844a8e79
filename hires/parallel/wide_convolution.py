"""Computes convolutions of 16 bits in fp32, or their gradients only, and rounds what comes out.

Gradients in fp16: oneDNN has plain loops for them, which take 70 to 600 times as long as fp32. They
are computed in fp32 from the same rounded numbers, and then rounded: 64 channels of 16 x 16 pixels,
3 x 3, take 0.7 ms instead of 380. Without AVX-512 oneDNN has no kernel of bf16 at all, so these
convolutions, too, are computed in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)

Size = int | Sequence[int]
Operands = tuple[Tensor, Tensor, Tensor]
"""In fp32: the gradient of a convolution, its input and its weight."""
Backward = Callable[[Operands, list[bool]], Any]
"""Returns the gradients of input, weight and bias that the mask selects, None for the others."""


def product_type(x: Tensor) -> torch.dtype:
    """Returns the type in which products with a tensor are computed: autocast may lower it."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else x.dtype


def by_onednn(x: Tensor) -> bool:
    """Whether a convolution of a tensor is oneDNN's: on every device but a GPU."""
    return not x.is_cuda


def by_plain_onednn(x: Tensor) -> bool:
    """Whether a tensor is one of the CPU itself, which oneDNN's own calls take."""
    return x.device.type == "cpu"


def with_exact_sums(
    operation: Callable[..., Tensor], x: Tensor, dtype: torch.dtype
) -> Callable[..., Tensor]:
    """Returns a transposed convolution of a tensor that adds its products in fp32.

    For fp16 on processors for which oneDNN has none, torch's own loops add products that are
    rounded to fp16. There it is one in fp32, rounded once; so it is for bf16, which is faster.
    """
    slow = dtype == torch.float16 and by_onednn(x) and not _onednn_has_fp16()
    if not slow and not lacks_bf16(x, dtype):
        return operation
    return lambda x, weight, bias, *how: run_wide(operation, (x, weight, bias), how, dtype)


def lacks_bf16(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a product with a tensor is one of bf16 for which oneDNN has no kernel.

    torch's own loops for it take 7 to 15 times as long as a convolution of fp32.
    """
    return dtype == torch.bfloat16 and by_onednn(x) and not onednn_has_bf16()


@functools.cache
def onednn_has_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this processor: from AVX-512 on."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@functools.cache
def _onednn_has_fp16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def is_slow_back(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the gradients of a convolution in a type would be computed in plain loops."""
    return dtype == torch.float16 and torch.is_grad_enabled() and by_onednn(x)


def run_wide(
    operation: Callable[..., Tensor],
    operands: tuple[Tensor, Tensor, Tensor | None],
    how: tuple[Any, ...],
    narrow: torch.dtype,
) -> Tensor:
    """Returns an operation in fp32 on operands that are rounded to the narrow type, rounded to it.

    The products are exact in fp32.
    """
    wide = [None if t is None else t.to(narrow).float() for t in operands]
    with torch.autocast(operands[0].device.type, enabled=False):
        return operation(*wide, *how).to(narrow)


def with_wide_gradients(
    operation: Callable[..., Tensor],
    operands: tuple[Tensor, Tensor, Tensor | None],
    how: tuple[Any, ...],
    back: Backward,
) -> Tensor:
    """Returns an operation on input, weight and bias in fp16, whose gradients are fp32's."""
    # The operands are lowered outside, so that autograd takes their gradients back to their types.
    lowered = [None if t is None else t.to(torch.float16) for t in operands]
    return _HalfConvolution.apply(*lowered, operation, how, back)  # type: ignore[no-any-return,no-untyped-call]


def plain_backward(weight: Tensor, rest: tuple[Any, ...]) -> Backward:
    """Returns torch's own backward pass of a convolution.

    ``rest``: stride, padding, dilation, whether it is transposed, padding of the output, groups.
    """
    channels = weight.shape[1] * rest[5] if rest[3] else weight.shape[0]
    return lambda operands, mask: torch.ops.aten.convolution_backward(
        *operands, [channels], *rest, mask
    )


def per_dim(value: Size, dims: int) -> list[int]:
    """Returns an argument that is one number, one in a list, or one for each dim, for each."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def numeric_padding(
    x: Tensor, weight: Tensor, padding: Size | str, dilation: Size
) -> tuple[Tensor, list[int]]:
    """Returns an input and its padding in numbers; an odd one of ``same`` has one more after it."""
    pads = pads_of(weight, padding, dilation)
    if any(before != after for before, after in pads):
        more = [n for before, after in reversed(pads) for n in (0, after - before)]
        x = torch.nn.functional.pad(x, more)
    return x, [before for before, _ in pads]


def pads_of(weight: Tensor, padding: Size | str, dilation: Size) -> list[tuple[int, int]]:
    """Returns what a convolution pads before and after each dim, in pixels of its input."""
    dims = weight.dim() - 2
    if not isinstance(padding, str):
        return [(one, one) for one in per_dim(padding, dims)]
    if padding == "valid":
        return [(0, 0)] * dims
    sizes = zip(per_dim(dilation, dims), weight.shape[2:], strict=True)
    totals = [one * (size - 1) for one, size in sizes]
    return [(total // 2, total - total // 2) for total in totals]


class _HalfConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operation: Callable[..., Tensor],
        how: tuple[Any, ...],
        back: Backward,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.back = back
        return operation(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grads = ctx.back((grad.float(), x.float(), weight.float()), [*ctx.needs_input_grad[:3]])
        halves = (None if g is None else g.to(grad.dtype) for g in grads)
        return *halves, None, None, None
