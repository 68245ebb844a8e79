"""Computes convolutions and linear layers with what follows: a sum and an activation.

oneDNN adds and activates while a block of the result is in the cache. Its kernels serve inference
in fp32 and bf16 on the CPU; everything else runs torch's operators one after the other, which is
the same in float64. A linear layer of 256 to 4096 features is 1.1 to 3.4 times as fast as by
torch's two operators on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.parallel.torch_faults import (
    SUBSTITUTES,
    by_plain_onednn,
    convolve,
    geometry_of,
    in_numbers,
    is_safe,
    lacks_kernel,
    product_type,
)
from hires.plan.operators.activations import POST_OPERATIONS
from hires.quant.emptied_weights import is_emptied
from hires.quant.int8_kernels import Geometry


class _Packed(NamedTuple):
    # What follows from the shape of an input, found once.
    weight: Tensor
    """In the order in which oneDNN reads it."""
    how: Geometry
    shape: torch.Size
    dtype: torch.dtype

    def fits(self, x: Tensor, other: Tensor | None) -> bool:
        """Whether its kernel computes with these operands; with gradients torch's own do."""
        dtype = self.dtype
        return (
            x.shape == self.shape
            and x.dtype == dtype
            and (other is None or other.dtype == dtype)
            and product_type(x) == dtype
            and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        )


class FusedConvolution:
    """A convolution with a sum and an activation, or without, as a node of a network computes it.

    ``dtype``: of its inputs; ``overwrites``: its value may be written over ``other``, which nothing
    reads afterwards.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, overwrites: bool = False) -> None:
        self.dtype, self.overwrites = dtype, overwrites
        self._packed: _Packed | None = None

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        how: Geometry,
        other: Tensor | None = None,
        activation: list[Any] | None = None,
    ) -> Tensor:
        """Returns ``activation(conv2d(x, weight, bias) + other)``, (n, K, rows, cols).

        ``other`` has the shape of the result or is None. There is no gradient.
        """
        packed = self._packed
        x, how = in_numbers(x, weight, how)
        if packed is not None and packed.fits(x, other):
            return _by_onednn(
                x, packed.weight, bias, packed.how, other, activation, self.overwrites
            )
        operands = [tensor for tensor in (x, weight, bias, other) if tensor is not None]
        assert not is_emptied(weight), f"packed for {packed and packed.shape}, used for {x.shape}"
        if by_fused_kernel(operands, activation) and is_safe(x, weight, how):
            return _by_onednn(x, weight, bias, how, other, activation, self.overwrites)
        y = convolve(x, weight, bias, how)
        return with_sum_and_activation(y, other, activation)

    def of(self, args: dict[str, Any], padding: Sequence[int] | None = None) -> Tensor:
        """Returns the same of a node's arguments by name; ``padding``: in place of theirs."""
        operands, more = (args["input"], args["weight"], args["bias"]), ("other", "activation")
        return self(*operands, geometry_of(args, padding), *map(args.get, more))

    def pack(self, shape: Sequence[int], args: dict[str, Any]) -> Tensor | None:
        """Returns what it keeps: its weight in the order in which oneDNN reads it; None: nothing.

        ``shape`` is that of its input; ``args`` are its arguments, of which it reads no values.
        """
        weight, activation = args["weight"], args.get("activation")
        known = weight.dtype == self.dtype and isinstance(weight, nn.Parameter)
        if not (known and by_fused_kernel([weight], activation)):
            return None
        x = weight.new_empty(1).expand(*shape)  # of that shape, without memory
        x, how = in_numbers(x, weight, geometry_of(args))
        if not x.numel() or not is_safe(x, weight, how):
            return None
        place = how.padding, how.stride, how.dilation, how.groups, [*x.shape]
        packed = torch.ops.mkldnn._reorder_convolution_weight(weight.detach(), *place)
        self._packed = _Packed(packed, how, x.shape, self.dtype)
        return packed  # type: ignore[no-any-return]


class FusedLinear:
    """A linear layer and an activation, as a node of a network computes them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._packed: Tensor | None = None

    def __call__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, activation: list[Any]
    ) -> Tensor:
        """Returns ``activation(linear(input, weight, bias))``, (..., outputs); without gradient."""
        operands = [tensor for tensor in (input, weight, bias) if tensor is not None]
        if not by_fused_kernel(operands, activation):
            assert not is_emptied(weight), "a packed weight is used by another kernel"
            return with_sum_and_activation(F.linear(input, weight, bias), None, activation)
        weight = weight if self._packed is None else self._packed
        kernel = torch.ops.mkldnn._linear_pointwise
        return kernel(input, weight, bias, *post_operation(activation))  # type: ignore[no-any-return]

    def pack(self, shape: Sequence[int], args: dict[str, Any]) -> Tensor | None:
        """Returns the same as that of a convolution, for inputs of any shape."""
        weight = args["weight"]
        known = weight.dtype == self.dtype
        if not (
            known
            and by_fused_kernel([weight], args["activation"])
            and isinstance(weight, nn.Parameter)
        ):
            return None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        return self._packed


@SUBSTITUTES.register("fused_conv2d")
def fused_convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Returns :class:`FusedConvolution` of its arguments in their order."""
    return FusedConvolution()(x, weight, bias, Geometry(*rest[:4]), *rest[4:])


def fused_norm(input: Tensor, weight: Tensor, bias: Tensor, activation: list[Any] | None) -> Tensor:
    """Returns the activation of ``input * weight + bias``, (n, C, rows, cols), by channel.

    To oneDNN it is a convolution of each channel alone, which reads and writes the map once.
    """
    if by_fused_kernel([input, weight, bias], activation):
        how = Geometry([1, 1], [0, 0], [1, 1], len(weight))
        single = weight.view(-1, 1, 1, 1)
        return _by_onednn(input, single, bias, how, None, activation, False)
    parts = bias.view(-1, 1, 1), input, weight.view(-1, 1, 1)
    return with_sum_and_activation(torch.addcmul(*parts), None, activation)


def with_sum_and_activation(
    y: Tensor, other: Tensor | None, activation: list[Any] | None
) -> Tensor:
    """Returns the activation of a sum; the first operand may be overwritten."""
    if other is not None:
        y = y.add_(other) if y.dtype == other.dtype else y + other
    if activation is None:
        return y
    name, *numbers = activation
    if name == "gelu":
        return F.gelu(y, approximate=numbers[0])
    return getattr(torch.ops.aten, f"{name}_")(y, *numbers)  # type: ignore[no-any-return]


def by_fused_kernel(operands: list[Tensor], activation: list[Any] | None) -> bool:
    """Whether oneDNN's fused kernel computes it; with gradients or a compiler torch's own do.

    So they do in bf16 on a processor without AVX-512: torch prepares no weights for oneDNN there.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not operands[0].numel():
        return False
    if lacks_kernel(operands[0], product_type(operands[0])):
        return False
    types = {tensor.dtype for tensor in operands}
    known = activation is None or activation[0] in POST_OPERATIONS
    narrow = types in ({torch.float32}, {torch.bfloat16}) and product_type(operands[0]) in types
    return narrow and known and all(map(by_plain_onednn, operands))


def post_operation(activation: list[Any] | None) -> tuple[str, list[Any], str | None]:
    """Returns an activation as oneDNN's kernels take it: its name, numbers and algorithm."""
    if activation is None:
        return "none", [], None
    name, numbers = POST_OPERATIONS[activation[0]], activation[1:]
    return (name, [], numbers[0]) if name == "gelu" else (name, numbers, None)


def _by_onednn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: Geometry,
    other: Tensor | None,
    activation: list[Any] | None,
    overwrites: bool,
) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    kernel = torch.ops.mkldnn._convolution_pointwise
    place = how.padding, how.stride, how.dilation, how.groups
    if other is not None and how.groups == 1:
        # Behind a sum it has no other activation than ReLU.
        relu = "relu" if activation == ["relu"] else None
        rest: tuple[Any, ...] = (*place, "add", 1.0, relu, [], None)
        dense = other.is_contiguous(memory_format=torch.channels_last)
        if overwrites and dense:
            kernel = torch.ops.mkldnn._convolution_pointwise_
            y: Tensor = kernel.binary(other, x, weight, bias, *rest)
        else:
            other = other.contiguous(memory_format=torch.channels_last)
            y = kernel.binary(x, other, weight, bias, *rest)
        return y if relu else with_sum_and_activation(y, None, activation)
    y = kernel(x, weight, bias, *place, *post_operation(None if other is not None else activation))
    return y if other is None else with_sum_and_activation(y, other, activation)
