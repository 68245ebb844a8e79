r"""Multiplies unsigned 8-bit activations by signed 8-bit weights, on any device to the same bits.

Products are summed exactly, in int32. What follows is one sequence of fp32 operations for each
element, with one factor and one offset for each output channel:

    y = round_to_even(fma(other, other_factor, float(sum) * multiplier + offset)), then clamped

All scales and zero points are in these (:mod:`hires.plan.passes.int8_arithmetic`). So oneDNN gets
scales of 1 and zero points of 0: its kernels apply scales, bias and zero points one by one, and in
different orders, which now and then round differently.

Cases in which oneDNN's kernels are wrong are computed otherwise. Measured on torch 2.13 against
exact sums for 30,000 random convolutions, with AMX, AVX-512 VNNI and AVX-VNNI:

* One output column, with a stride and a kernel of two or more columns, on processors with AMX: as
  in half precision (``hires.parallel.torch_faults``). Stride 1 makes the same column first.
* Zero points of the input, where it is padded, and with more than 16 channels in each of several
  groups: they are in the offset.
* Zeros around an input that is shorter than a dilated kernel, which end the process: such borders,
  like those of other integers, are copied around the input.
* Without VNNI, sums of two products saturate at 16 bits, unless weights have 7 bits
  (255 * 63 * 2 < 2**15). One product for each range of weights finds out (:func:`has_exact_sums`).
* Without VNNI, a 1x1 kernel with a stride whose channels are no multiple of 16, now and then in
  several threads: the pixels that it reads are copied first.

On NVIDIA GPUs torch's product of int8 matrices sums the channels of each tap; where it takes no
such sizes, convolutions of fp64 do, as cuDNN may transform their input. Where sums saturate and on
other devices, convolutions of fp32 sum so few products at a time that every sum is exact.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from hires.core.config.precision_config import INT8
from hires.quant.affine import LARGEST, LAST

Sizes = Sequence[int]


class Rescale(NamedTuple):
    """How sums of products become the integers of the result."""

    multiplier: Tensor
    """fp32, (channels,)."""
    offset: Tensor
    low: int = 0
    high: int = 255
    dtype: torch.dtype = torch.uint8
    """Or fp32: then nothing is rounded or clamped."""
    largest: int = LARGEST[INT8]
    """Absolute value of any integer of the weight, at most, which bounds the sums."""


class Added(NamedTuple):
    """Numbers (n, C, H, W) that are added to the result before it is rounded."""

    numbers: Tensor
    factor: float
    overwrites: bool = False
    """Whether the result may be written over them."""


class Geometry(NamedTuple):
    """[rows, columns] of a convolution."""

    stride: Sizes = (1, 1)
    padding: Sizes = (0, 0)
    dilation: Sizes = (1, 1)
    groups: int = 1


def convolve_int8(
    x: Tensor,
    weight: Tensor,
    how: Geometry,
    rescale: Rescale,
    border: int = 0,
    added: Added | None = None,
) -> Tensor:
    """Returns a convolution of uint8 (n, C, H, W) with int8 (K, C / groups, rows, columns).

    ``border`` is the padding of ``x``: its zero point.
    """
    if by_onednn(x, rescale.largest):
        return product_of(weight, x.shape, how, border)(x, rescale, added)
    if any(how.padding):
        x, how = _bordered(x, border, how.padding), how._replace(padding=(0, 0))
    return _rescaled(_exact_sums(x, weight, how, rescale.largest), rescale, added)


class OnednnProduct:
    """A convolution by oneDNN for inputs of one shape: all that follows from it is found once.

    A 1x1 kernel without a border is also a product of matrices, ``by_rows``: one row a pixel, which
    torch adds to in place, whereas its convolution copies what it has added. Both have the same
    bits.
    """

    def __init__(
        self, weight: Tensor, shape: Sizes, how: Geometry, border: int, *, by_rows: bool = False
    ) -> None:
        self.shape, self._border = torch.Size(shape), border
        n, channels, height, width = shape
        picks = by_rows or (_is_pixelwise(weight, how) and channels % 16 != 0)
        self._picks = tuple(how.stride) if picks and max(how.stride) > 1 else None
        if self._picks is None:
            self._pads, self._columns, how = _arranged(shape, weight, how, border)
        else:
            self._pads, self._columns, how = how.padding, None, Geometry()
        width = width + 2 * self._pads[1] if self._columns is None else self._columns
        rows_step, columns_step = self._picks or (1, 1)
        height = -(-(height + 2 * self._pads[0]) // rows_step)
        inner = [n, channels, height, -(-width // columns_step)]
        self._place = (*map(list, how[:3]), how.groups)
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int32)
        self._arranges = any(self._pads) or self._columns is not None or self._picks is not None
        self.by_rows = by_rows
        if by_rows:
            matrix, rows = weight.detach().flatten(1), n * math.prod(inner[2:])
            self.packed: Tensor = torch.ops.onednn.qlinear_prepack(matrix, [rows, channels])
        else:
            ones = torch.ones(weight.shape[0])  # the packed integers do not depend on scales
            self.packed = torch.ops.onednn.qconv_prepack(weight, ones, 1.0, 0, *self._place, inner)

    def __call__(self, x: Tensor, rescale: Rescale, added: Added | None) -> Tensor:
        """Returns the integers (n, K, rows, columns) of an input of its shape."""
        if self._arranges:
            x = self._arrange(x)
        order = torch.channels_last
        x = x.contiguous(memory_format=order)
        compute = self._rows if self.by_rows else self._convolution
        if added is None:
            made = compute(x, rescale, None, 1.0)
        else:  # the kernel writes its result over what it adds
            other, factor, overwrites = added
            if not (overwrites and other.is_contiguous(memory_format=order)):
                other = other.clone(memory_format=order)
            made = compute(x, rescale, other, factor)
        if rescale.dtype != torch.uint8 or (rescale.low, rescale.high) == (0, 255):
            return made
        return made.clamp_(rescale.low, rescale.high)

    def _arrange(self, x: Tensor) -> Tensor:
        if any(self._pads):
            x = _bordered(x, self._border, self._pads)
        if self._columns is not None:
            x = x[:, :, :, : self._columns]
        return x if self._picks is None else x[:, :, :: self._picks[0], :: self._picks[1]]

    def _convolution(
        self, x: Tensor, rescale: Rescale, other: Tensor | None, factor: float
    ) -> Tensor:
        given = x, 1.0, 0, self.packed, rescale.multiplier, self._zeros
        rest = rescale.offset, *self._place, 1.0, 0, rescale.dtype
        kernel = torch.ops.onednn.qconv2d_pointwise
        if other is None:
            return kernel.default(*given, *rest, "none", [], "")  # type: ignore[no-any-return]
        kernel.binary(*given, other, *rest, factor, 0, "sum", 1.0, None, [], "")
        return other  # torch returns a copy of it

    def _rows(self, x: Tensor, rescale: Rescale, other: Tensor | None, factor: float) -> Tensor:
        n, channels, height, width = x.shape
        matrix = x.permute(0, 2, 3, 1).view(-1, channels)
        given = matrix, 1.0, 0, self.packed, rescale.multiplier, self._zeros
        rest = rescale.offset, 1.0, 0, rescale.dtype
        kernel = torch.ops.onednn.qlinear_pointwise
        if other is not None:
            rows = other.permute(0, 2, 3, 1).view(-1, other.shape[1])
            kernel.binary(*given, rows, *rest, factor, 0, "sum", 1.0, "none", [], "")
            return other
        made: Tensor = kernel.default(*given, *rest, "none", [], "")
        return made.view(n, height, width, -1).permute(0, 3, 1, 2)


_PRODUCTS: Any = WeakIdKeyDictionary()  # weight -> its products, by what they are made for


def product_of(
    weight: Tensor, shape: Sizes, how: Geometry, border: int = 0, *, by_rows: bool | None = None
) -> OnednnProduct:
    """Returns oneDNN's product of a weight with inputs of a shape, which is kept with the weight.

    ``by_rows`` None: the one that is kept, else a convolution.
    """
    key = (weight._version, tuple(shape), *map(tuple, how[:3]), how.groups, border)
    held = _PRODUCTS.get(weight)
    if held is None:
        held = _PRODUCTS[weight] = {}
    if key not in held or by_rows not in (None, held[key].by_rows):
        assert not is_emptied(weight), f"a weight is packed for {[*held]}, and needed for {key}"
        held[key] = OnednnProduct(weight, shape, how, border, by_rows=bool(by_rows))
    return held[key]  # type: ignore[no-any-return]


@torch.no_grad()
def empty(weight: Tensor) -> None:
    """Releases the memory of a weight that all kernels keep in an order of their own.

    What is left has the shape and the type, and one number for all places: NaN, or 0.
    """
    number = float("nan") if weight.is_floating_point() else 0
    weight.data = weight.new_full((), number).expand(weight.shape)


def is_emptied(weight: Tensor) -> bool:
    """Whether a weight of more than one number has none of them any more."""
    return weight.numel() > 1 and not any(weight.stride())


def is_packed(shape: Sizes, weight: Tensor, largest: int) -> bool:
    """Whether products of a weight with inputs of a shape are those of oneDNN, which packs it."""
    return by_onednn(weight, largest) and all(shape)


def is_matrix(weight: Tensor, how: Geometry) -> bool:
    """Whether a convolution is a product of matrices, too."""
    return _is_pixelwise(weight, how) and not any(how.padding)


def adds_by_rows(weight: Tensor, how: Geometry) -> bool:
    """Whether a convolution that adds to its result is faster as a product of matrices.

    Not without VNNI, where that takes five times as long with 64 channels.
    """
    return is_matrix(weight, how) and has_exact_sums()


def _is_pixelwise(weight: Tensor, how: Geometry) -> bool:
    return tuple(weight.shape[2:]) == (1, 1) and how.groups == 1


def _arranged(
    shape: Sizes, weight: Tensor, how: Geometry, border: int
) -> tuple[Sizes, int | None, Geometry]:
    # The pixels that are copied around the input, the columns of that which the kernel gets (None:
    # all), and the kernel's geometry.
    columns = how.dilation[1] * (weight.shape[3] - 1) + 1
    made = (shape[3] + 2 * how.padding[1] - columns) // how.stride[1] + 1
    one_column, pads = made == 1 and how.stride[1] > 1, (0, 0)
    pads_itself = border == 0 and tuple(how.dilation) == (1, 1)
    if any(how.padding) and (one_column or not pads_itself):
        pads, how = (how.padding[0], how.padding[1]), how._replace(padding=(0, 0))
    if not one_column:
        return pads, None, how
    return pads, columns, how._replace(stride=(how.stride[0], 1))


def multiply_int8(x: Tensor, weight: Tensor, rescale: Rescale) -> Tensor:
    """Returns the product of uint8 (..., features) with int8 (outputs, features, 1, 1)."""
    # One image of a column, in channels-last order: nothing is copied.
    column = x.reshape(1, -1, 1, x.shape[-1]).permute(0, 3, 1, 2)
    made = convolve_int8(column, weight, Geometry(), rescale)
    return made.permute(0, 2, 3, 1).reshape(*x.shape[:-1], weight.shape[0])


def multiply_add_int8(x: Tensor, factor: Tensor, offset: Tensor) -> Tensor:
    """Returns the integers nearest to ``x * factor + offset``; x: uint8 (n, C, H, W).

    ``factor`` and ``offset`` are fp32 of equal shapes, which broadcast to that of ``x``.
    """
    return nearest_numbers(x.float().mul_(factor), offset)


def nearest_numbers(
    scaled: Tensor, offset: Tensor | float, low: int = 0, high: int = 255
) -> Tensor:
    """Returns the integers nearest to ``scaled + offset``, uint8; ``scaled``, fp32, is used up."""
    whole = scaled.add_(offset).round_().clamp_(low, high)
    # In the same memory first: torch narrows integers to 8 bits several times as fast as fp32.
    return whole.view(torch.int32).copy_(whole).to(torch.uint8)


class Rescaling:
    """Rescales uint8 integers to another scale and zero point, and may add others to them.

    A convolution of every channel with a weight of one: y = round(x * factor + offset),
    with the same operations as behind any other sum.
    """

    def __init__(
        self, channels: int, factor: float, offset: float, device: torch.device | None = None
    ) -> None:
        self.groups = channels
        self.weight = torch.ones((channels, 1, 1, 1), dtype=torch.int8, device=device)
        factors, offsets = (
            torch.full((channels,), number, device=device) for number in (factor, offset)
        )
        self.rescale = Rescale(factors, offsets, largest=1)

    def __call__(self, x: Tensor, low: int, high: int, added: Added | None = None) -> Tensor:
        """Returns the integers (n, C, H, W), or (..., C) with any other number of dims."""
        shape, rescale = x.shape, self.rescale._replace(low=low, high=high)
        if x.dim() != 4:
            x = x.reshape(-1, shape[-1], 1, 1)
            if added is not None:
                added = added._replace(numbers=added.numbers.reshape(x.shape))
        how = Geometry(groups=self.groups)
        made = convolve_int8(x, self.weight, how, rescale, added=added)
        return made if len(shape) == 4 else made.reshape(shape)


@functools.cache
def has_exact_sums(largest: int = LARGEST[INT8]) -> bool:
    """Whether oneDNN sums products with weights of this range without saturating at 16 bits."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    with _disable_current_modes():  # the rehearsal of a rank computes shapes only
        x = torch.full((1, 64, 5, 5), 255, dtype=torch.uint8)
        weight = torch.full((16, 64, 3, 3), largest, dtype=torch.int8)
        # The largest sums that there are: saturated ones would lose a part of them.
        factor = torch.full((16,), 200.0 / (64 * 9 * LAST * largest))
        product = OnednnProduct(weight, x.shape, Geometry(), 0)
        made = product(x, Rescale(factor, torch.zeros(16)), None)
        return bool((made == 200).all())


def by_onednn(x: Tensor, largest: int) -> bool:
    """Whether oneDNN's int8 kernels compute with a tensor, and not the exact path."""
    return x.device.type in ("cpu", "meta") and has_exact_sums(largest)


def _bordered(x: Tensor, border: int, padding: Sizes) -> Tensor:
    rows, columns = padding
    return F.pad(x, (columns, columns, rows, rows), value=border)


def _exact_sums(x: Tensor, weight: Tensor, how: Geometry, largest: int) -> Tensor:
    """Returns the sums of products as fp32, each rounded once from the exact one."""
    if not _sums_products(x):
        sums = _sums_of_taps(x, weight, how)
        if sums is not None:
            return sums.float()
    # Products of which fp32 holds any sum exactly.
    most = 2**24 // (LAST * largest * weight.shape[2] * weight.shape[3])
    dtype = torch.float32
    if not most or not _sums_products(x):
        dtype, most = torch.float64, weight.shape[1]
    apart, parts = how.groups, weight.shape[1]
    n, _, *size = x.shape
    by_group = x.view(n, apart, parts, *size)
    sums = None
    for first in range(0, parts, most):
        share = by_group[:, :, first : first + most]
        share = share.to(dtype).reshape(n, -1, *size)
        share = share.contiguous(memory_format=torch.channels_last)
        some = weight[:, first : first + most].to(dtype)
        rest = how.stride, how.padding, how.dilation, apart
        part = torch.conv2d(share, some, None, *rest)
        if parts <= most:
            return part.round_().float()
        sums = part.int() if sums is None else sums.add_(part.int())
    assert sums is not None
    return sums.float()


def _sums_products(x: Tensor) -> bool:
    # cuDNN may transform its input, which rounds: in fp64 by less than the half of an integer.
    return x.device.type != "cuda"


def _sums_of_taps(x: Tensor, weight: Tensor, how: Geometry) -> Tensor | None:
    """Returns the sums as int32, by products of int8 matrices; None: of other sizes."""
    outputs, channels, *kernel = weight.shape
    apart, steps = how.dilation, how.stride
    size = [(x.shape[d + 2] - apart[d] * (kernel[d] - 1) - 1) // steps[d] + 1 for d in (0, 1)]
    if how.groups > 1 or channels % 8 or outputs % 8 or len(x) * math.prod(size) <= 16:
        return None
    signed = (x.permute(0, 2, 3, 1) ^ 128).view(torch.int8)  # 128 less
    sums = 128 * weight.sum((1, 2, 3), dtype=torch.int32)
    for tap in itertools.product(*map(range, kernel)):
        first = [tap[d] * apart[d] for d in (0, 1)]
        rows, columns = (
            slice(first[d], first[d] + (size[d] - 1) * steps[d] + 1, steps[d]) for d in (0, 1)
        )
        pixels = signed[:, rows, columns].reshape(-1, channels)
        sums = sums + torch._int_mm(pixels, weight[:, :, tap[0], tap[1]].contiguous().t())
    return sums.view(len(x), *size, outputs).permute(0, 3, 1, 2)


def _rescaled(sums: Tensor, rescale: Rescale, added: Added | None) -> Tensor:
    y = sums * rescale.multiplier.view(1, -1, 1, 1) + rescale.offset.view(1, -1, 1, 1)
    if added is not None:  # float64 holds the product exactly, as a fused multiply-add does
        factor = torch.tensor(added.factor, dtype=torch.float32).double()
        y = (added.numbers.double() * factor.to(y.device) + y.double()).float()
    if rescale.dtype != torch.uint8:
        return y
    return y.round_().clamp_(rescale.low, rescale.high).to(torch.uint8)
