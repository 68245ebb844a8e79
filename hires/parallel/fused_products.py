"""Computes convolutions and linear layers with what follows: a sum and an activation.

oneDNN adds and activates while a block of the result is in the cache. Its kernels serve inference
in fp32 and bf16 on the CPU; everything else runs torch's operators one after the other, which is
the same in float64. A linear layer of 256 to 4096 features is 1.1 to 3.4 times as fast as by
torch's two operators on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hires.parallel.context import Context
from hires.parallel.torch_faults import (
    by_plain_onednn,
    convolve,
    geometry_of,
    in_numbers,
    is_safe,
    lacks_kernel,
    product_type,
)
from hires.plan.graph import Node
from hires.plan.operators.formulas import POST_OPERATIONS
from hires.quant.int8_kernels import Geometry

if TYPE_CHECKING:
    from hires.parallel.window import Window

_PACKED: Any = WeakIdKeyDictionary()  # weight -> in oneDNN's order, by version and groups


def convolve_fused(
    x: Tensor,
    args: dict[str, Any],
    padding: Sequence[int] | None = None,
    overwrites: bool = False,
) -> Tensor:
    """Returns ``activation(conv2d(x, weight, bias) + other)`` of a node's arguments by name.

    ``other`` has the shape of the result, (n, K, rows, cols), or is None; with ``overwrites`` it
    may be written over. ``padding`` replaces theirs. The weight may be one of :func:`pack_weight`.
    """
    weight, bias, other = args["weight"], args["bias"], args.get("other")
    activation = args.get("activation")
    x, how = in_numbers(x, weight, geometry_of(args, padding))
    operands = [tensor for tensor in (x, weight, bias, other) if tensor is not None]
    # Where nothing follows, torch's own kernel: a training's passes without gradients, as those
    # that are computed again, have the bits of the others.
    fuses = "activation" in args and by_fused_kernel(operands, activation)
    if weight.is_mkldnn or (fuses and is_safe(x, weight, how)):
        return _by_onednn(x, weight, bias, how, other, activation, overwrites)
    return with_sum_and_activation(convolve(x, weight, bias, how), other, activation)


def packed_convolution(w: Window, like: Tensor, args: dict[str, Any]) -> Tensor | None:
    """Returns the weight of a fused convolution as oneDNN reads it."""
    packed = pack_weight(like, args, w.padding)
    if packed is not None:
        w.kept["weight"] = packed
    return packed


def pack_weight(
    like: Tensor, args: dict[str, Any], padding: Sequence[int] | None = None
) -> Tensor | None:
    """Returns a weight in the order that oneDNN prefers for inputs like one; None: it has none.

    All nodes that read the weight get the first that was made. Else it is brought to that order in
    every call: a quarter of the time of ResNet-101 at 224 pixels, an eighth in bands of 64 rows,
    2 % at 2048.
    """
    weight, bias = args["weight"], args["bias"]
    like, how = in_numbers(like, weight, geometry_of(args, padding))
    operands = [tensor for tensor in (like, weight, bias) if tensor is not None]
    if not by_fused_kernel(operands, args["activation"]) or not is_safe(like, weight, how):
        return None
    held, key = _PACKED.setdefault(weight, {}), (weight._version, how.groups)
    if key not in held:
        place = how.padding, how.stride, how.dilation, how.groups, [*like.shape]
        held[key] = torch.ops.mkldnn._reorder_convolution_weight(weight, *place)
    return held[key]  # type: ignore[no-any-return]


def fused_linear(node: Node, context: Context) -> Callable[[dict[str, Any]], Tensor]:
    """Returns what computes ``activation(linear(input, weight, bias))``; without gradient."""

    def run(args: dict[str, Any]) -> Tensor:
        x, weight, bias, activation = (args[n] for n in ("input", "weight", "bias", "activation"))
        if not by_fused_kernel([t for t in (x, weight, bias) if t is not None], activation):
            return with_sum_and_activation(F.linear(x, weight, bias), None, activation)
        kernel = torch.ops.mkldnn._linear_pointwise
        return kernel(x, weight, bias, *post_operation(activation))  # type: ignore[no-any-return]

    return run


def fused_norm(node: Node, context: Context) -> Callable[[dict[str, Any]], Tensor]:
    """Returns what computes the activation of ``input * weight + bias``, (n, C, rows, cols).

    To oneDNN it is a convolution of each channel alone, which reads and writes the map once.
    """

    def run(args: dict[str, Any]) -> Tensor:
        x, weight, bias, activation = (args[n] for n in ("input", "weight", "bias", "activation"))
        if by_fused_kernel([x, weight, bias], activation):
            how = Geometry([1, 1], [0, 0], [1, 1], len(weight))
            return _by_onednn(x, weight.view(-1, 1, 1, 1), bias, how, None, activation, False)
        scaled = torch.addcmul(bias.view(-1, 1, 1), x, weight.view(-1, 1, 1))
        return with_sum_and_activation(scaled, None, activation)

    return run


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
    if other is not None and how.groups == 1 and other.dtype == x.dtype:
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
