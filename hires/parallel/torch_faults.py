"""Computes operators of torch without faults of its libraries, and 1x1 convolutions faster.

One output column in half precision: on processors with AMX, a convolution whose stride and kernel
are two or more columns and whose output is one column reads memory that it never wrote. Outputs and
gradients of weights are wrong, differ from run to run and may be NaN. The backward pass of a
transposed convolution does the same if its input is one column. Narrow tiles of deep layers have
that shape; they are computed in fp32. Measured on torch 2.13 over 13,000 random bf16 convolutions:
no other shape failed. A related fault is https://github.com/pytorch/pytorch/issues/169688.

Half precision without a kernel: oneDNN has plain loops for gradients in fp16, which take 70 to 600
times as long as fp32, and without AVX-512 also for bf16. These convolutions are computed in fp32
from the same rounded numbers, forward and backward, and each result is rounded.

Strided 1x1 kernels in fp32: on processors with AVX-512, the gradient of a weight with fewer than 16
channels per group is written beyond its memory if the maps are large, and the process dies later or
computes with overwritten numbers. Measured with a checking allocator on 1920 strided 1x1
convolutions of 1 to 104 channels in fp32 and bf16, of which 102 failed, all of this shape, and on
1360 random others.

Row strides above the rows of the kernel, also of the gradient of a transposed convolution: on
processors with AVX-512, outputs on narrow maps may be wrong in any type but float64, and memory
overwritten, as a buffer is sized for a stride cut to the kernel
(https://github.com/uxlfoundation/oneDNN/pull/5494).

These and the strided 1x1 kernels are computed in float64, which oneDNN does not take.

Gradients of norms on a CPU, of maps that lie channels-last (torch 2.13):

* Group norm whose input has no gradient (the first layer, or one behind frozen layers): the kernel
  of its backward pass writes that gradient all the same, and the process ends with a segmentation
  fault. The kernel for contiguous maps does not.
* Instance norm of one sample: the gradients of weight and bias are wrong, by as much as their own
  size. Of one sample it is the batch norm of that sample, whose gradients are right.

Order in memory: a network is traced with images in the usual order (n, C, H, W), and a rank holds
them channels-last, so a ``view`` that was possible need not be:

    traced    x.view(n, C * H * W)    the numbers of a sample in a row
    held      n, H, W, C              C is the fastest: the view is made of a copy
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.core.registry import Registry
from hires.plan.operators.windows import pair
from hires.quant.int8_kernels import Geometry

SUBSTITUTES: Registry[Callable[..., Tensor]] = Registry("substitute")
"""ATen name -> the function of the same arguments that is called in place of torch's own."""
HALF = (torch.bfloat16, torch.float16)
BLOCK = 16  # channels that oneDNN pads a weight to

Size = int | Sequence[int]


@SUBSTITUTES.register("conv2d")
def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    """Returns :func:`convolve` of torch's own arguments."""
    return convolve(x, weight, bias, Geometry(*how))


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, how: Geometry) -> Tensor:
    """Returns the convolution of (n, C, h, w) with (K, C / groups, rows, cols), as torch's.

    The batch may be absent. Under autocast the arithmetic and the result are of autocast's type.
    """
    if x.dim() == 3:
        return convolve(x[None], weight, bias, how)[0]
    x, how = in_numbers(x, weight, how)
    dtype = product_type(x)
    safe = _safe_type(x, dtype, weight, how, _columns(x, weight, how))
    how = how._replace(dilation=_dilation(weight, how.dilation))
    if safe != dtype:
        return _in_type(x, weight, bias, (*how[:3], False, [0, 0], how.groups), dtype, safe)
    return torch.conv2d(x, weight, bias, *how)


@SUBSTITUTES.register("conv_transpose2d")
def convolve_transposed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size,
    output_padding: Size,
    groups: int,
    dilation: Size,
) -> Tensor:
    """Returns the transposed convolution of (n, C, h, w) with (C, K / groups, rows, cols).

    The batch may be absent. Under autocast the arithmetic and the result are of autocast's type.
    """
    rest = (stride, padding, output_padding, groups, dilation)
    if x.dim() == 3:
        return convolve_transposed(x[None], weight, bias, *rest)[0]
    dtype, how = product_type(x), Geometry(pair(stride), pair(padding), pair(dilation), groups)
    safe = _safe_type(x, dtype, weight, how, x.shape[3])
    if safe != dtype:
        facts = how.stride, how.padding, how.dilation, True, pair(output_padding), groups
        return _in_type(x, weight, bias, facts, dtype, safe)
    return torch.conv_transpose2d(x, weight, bias, *rest)


def convolve_backward(
    grad: Tensor, x: Tensor, weight: Tensor, how: Geometry, mask: list[bool]
) -> Any:
    """Returns the gradients of input, weight and bias that the mask selects, None for the others.

    ``grad`` is that of the convolution, (n, K, rows, cols), of the type of ``x`` and ``weight``.
    """
    dtype = x.dtype
    safe = _safe_type(x, dtype, weight, how, grad.shape[3])
    if safe == torch.float16 and by_onednn(x):
        safe = torch.float32
    dilation = _dilation(weight, how.dilation)
    rest = how.stride, how.padding, dilation, False, [0, 0], how.groups, mask
    operands = (one.to(safe) for one in (grad, x, weight))
    grads = torch.ops.aten.convolution_backward(*operands, [weight.shape[0]], *rest)
    return tuple(None if one is None else one.to(dtype) for one in grads)


def is_safe(x: Tensor, weight: Tensor, how: Geometry) -> bool:
    """Whether oneDNN computes a convolution of a batch without a fault; it is in numbers."""
    dtype = product_type(x)
    return _safe_type(x, dtype, weight, how, _columns(x, weight, how)) == dtype


def product_type(x: Tensor) -> torch.dtype:
    """Returns the type in which products with a tensor are computed: autocast may lower it."""
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else x.dtype


_of_gpus: list[None] = []


@contextlib.contextmanager
def on_gpus() -> Iterator[None]:
    """Treats tensors of no device as those of a GPU, whose rank is rehearsed in the block."""
    _of_gpus.append(None)
    try:
        yield
    finally:
        _of_gpus.pop()


def by_onednn(x: Tensor) -> bool:
    """Whether a convolution of a tensor is oneDNN's: on every device but a GPU."""
    return not (x.is_cuda or _of_gpus)


def by_plain_onednn(x: Tensor) -> bool:
    """Whether a tensor is one of the CPU itself, which oneDNN's own calls take."""
    return x.device.type == "cpu"


def lacks_kernel(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether oneDNN has plain loops only for a product with a tensor, or for its gradients."""
    if not by_onednn(x) or dtype not in HALF:
        return False
    if dtype == torch.bfloat16:
        return not onednn_has_bf16()
    return torch.is_grad_enabled() or not _onednn_has_fp16()


def _constant(function: Callable[..., bool]) -> Callable[..., bool]:
    # A constant for torch.compile: it could not trace these operators, which return no tensor. What
    # torch.compiler.assume_constant_result does; that imports the compiler, half of a rank's start.
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function


@_constant
def onednn_has_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this processor: from AVX-512 on."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@_constant
def _onednn_has_fp16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def geometry_of(args: dict[str, Any], padding: Sequence[int] | None = None) -> Geometry:
    """Returns the geometry in arguments by name; ``padding``: in place of theirs."""
    pads = args["padding"] if padding is None else padding
    return Geometry(args["stride"], pads, args["dilation"], args["groups"])


def in_numbers(x: Tensor, weight: Tensor, how: Geometry) -> tuple[Tensor, Geometry]:
    """Returns an input and its geometry in pairs of numbers.

    An odd padding of ``same`` has one more after the input, which is padded by it.
    """
    stride, dilation, pads = pair(how.stride), pair(how.dilation), [0, 0]
    given: Any = how.padding
    if given == "same":
        totals = [n * (size - 1) for n, size in zip(dilation, weight.shape[2:], strict=True)]
        if any(total % 2 for total in totals):
            x = F.pad(x, [n for total in reversed(totals) for n in (0, total % 2)])
        pads = [total // 2 for total in totals]
    elif given != "valid":
        pads = pair(given)
    return x, Geometry(stride, pads, dilation, how.groups)


class _WideConvolution(torch.autograd.Function):
    # It keeps its operands in their own type for the way back.
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any, kind: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.kind = how, kind
        wide = (None if t is None else t.to(kind) for t in (x, weight, bias))
        with torch.autocast(x.device.type, enabled=False):
            y: Tensor = torch.ops.aten.convolution(*wide, *how)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        is_transposed, groups = ctx.how[3], ctx.how[5]
        channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
        operands = (one.to(ctx.kind) for one in (grad, x, weight))
        mask = [*ctx.needs_input_grad[:3]]
        grads = torch.ops.aten.convolution_backward(*operands, [channels], *ctx.how, mask)
        return *(None if g is None else g.to(x.dtype) for g in grads), None, None


def _in_type(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    how: tuple[Any, ...],
    dtype: torch.dtype,
    kind: torch.dtype,
) -> Tensor:
    # The operands are rounded outside, so that autograd takes their gradients back to their types.
    rounded = (None if t is None else t.to(dtype) for t in (x, weight, bias))
    return _WideConvolution.apply(*rounded, how, kind)  # type: ignore[no-any-return,no-untyped-call]


def _safe_type(
    x: Tensor, dtype: torch.dtype, weight: Tensor, how: Geometry, columns: int
) -> torch.dtype:
    # In which a product is computed without a fault of oneDNN; ``columns`` are those of the result,
    # or of the input of a transposed convolution. 1x1 kernels without padding take another way
    # through the library where rows are skipped.
    if dtype == torch.float64 or not by_onednn(x):
        return dtype
    is_pointwise = not any(how.padding) and tuple(weight.shape[2:]) == (1, 1)
    overruns = dtype == torch.float32 and weight.shape[1] < BLOCK and tuple(how.stride) != (1, 1)
    if overruns if is_pointwise else how.stride[0] > weight.shape[2]:
        return torch.float64
    is_narrow = columns == 1 and how.stride[1] > 1 and weight.shape[3] > 1
    if lacks_kernel(x, dtype) or (dtype in HALF and is_narrow):
        return torch.float32
    return dtype


def _columns(x: Tensor, weight: Tensor, how: Geometry) -> int:
    # Those of the result.
    reach = how.dilation[1] * (weight.shape[3] - 1) + 1
    return int((x.shape[3] + 2 * how.padding[1] - reach) // how.stride[1] + 1)


def _dilation(weight: Tensor, dilation: Size) -> Any:
    # For 1x1 kernels in fp32 ATen chooses a matrix product at half the speed of oneDNN, unless they
    # are dilated, which changes nothing in a 1x1 kernel.
    small = tuple(weight.shape[2:]) == (1, 1) and weight.dtype == torch.float32
    return [2, 2] if small and by_onednn(weight) else dilation


@SUBSTITUTES.register("group_norm")
def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, *how: Any
) -> Tensor:
    """Returns the group norm of (n, C, ...), as torch's."""
    return torch.group_norm(
        x if x.requires_grad else x.contiguous(), num_groups, weight, bias, *how
    )


@SUBSTITUTES.register("instance_norm")
def instance_norm(x: Tensor, *how: Any) -> Tensor:
    """Returns the instance norm of (n, C, ...), as torch's; running statistics move in place."""
    is_one = x.shape[0] == 1 and by_onednn(x) and not torch.compiler.is_compiling()
    normalised: Tensor = (torch.batch_norm if is_one else torch.instance_norm)(x, *how)
    return normalised


@SUBSTITUTES.register("view")
@SUBSTITUTES.register("_unsafe_view")
def view(x: Tensor, size: list[int] | torch.dtype) -> Tensor:
    """Returns the numbers in another shape, or the bytes as another type."""
    return x.contiguous().view(size) if isinstance(size, torch.dtype) else x.reshape(size)


@SUBSTITUTES.register("view_as_complex")
def view_as_complex(x: Tensor) -> Tensor:
    """Returns pairs of numbers, which must lie side by side, as complex ones."""
    return torch.view_as_complex(x.contiguous())


@SUBSTITUTES.register("as_strided")
def as_strided(
    x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None
) -> Tensor:
    """Returns numbers at given places of a tensor that was traced in contiguous order."""
    return x.contiguous().as_strided(size, stride, storage_offset or 0)


@SUBSTITUTES.register("kron")
def kron(x: Tensor, other: Tensor) -> Tensor:
    """Returns the Kronecker product, which torch computes by a view of both."""
    return torch.kron(x.contiguous(), other.contiguous())
