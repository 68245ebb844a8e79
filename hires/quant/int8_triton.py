"""Int8 convolutions on an NVIDIA GPU, in Triton: one kernel from integers to integers.

Sums of products are exact in int32, and what follows is the sequence of operations of
:mod:`hires.quant.int8_kernels`, so the bits are those of a CPU. **Never run on a GPU**: tests run
the kernels in Triton's interpreter and compile them for compute capabilities 8.0 and 9.0.

                  taps x channels                    outputs
               +------------------+                +---------+
        pixels | x, as it is read |  times  taps x | weights |  BLOCK_K at a time
               +------------------+       channels +---------+

Tensor cores multiply s8 by s8: 128 is subtracted from every integer, and sums begin with 128 times
the weights. What lies outside the image is read as its zero point, so no border is copied around
it. Where a group has a single channel, its few products are added one by one.

Importing this module imports Triton.

Source:
    Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014: the product whose left
    side is never stored.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from hires.quant.int8_kernels import Added, Geometry, Rescale

OPTIONS = {"enable_fp_fusion": False}
"""Of every kernel: a product is rounded before something is added to it."""
UNSPECIALIZED = ("border", "low", "high", "factor")
"""Arguments for whose values no kernel of its own is compiled."""


class KernelLaunch(NamedTuple):
    """A kernel and the numbers that it is compiled for."""

    kernel: Any
    constants: dict[str, Any]
    num_warps: int

    @property
    def options(self) -> dict[str, Any]:
        """How it is compiled."""
        return {"num_warps": self.num_warps, **OPTIONS}


def convolve(
    x: Tensor, weight: Tensor, how: Geometry, rescale: Rescale, border: int, added: Added | None
) -> Tensor:
    """Returns what ``convolve_int8`` returns, of tensors on one GPU, in channels-last order."""
    (n, channels, *sizes), (outputs, _, *taps) = x.shape, weight.shape
    made_sizes = [
        (size + 2 * pad - apart * (tap - 1) - 1) // step + 1
        for size, tap, step, pad, apart in zip(sizes, taps, *map(tuple, how[:3]), strict=True)
    ]
    like: Any = {"dtype": rescale.dtype, "device": x.device, "memory_format": torch.channels_last}
    made: Tensor = torch.empty((n, outputs, *made_sizes), **like)
    if not made.numel():
        return made
    pixels = made.numel() // outputs
    x = x.contiguous(memory_format=torch.channels_last)
    other = x if added is None else added.numbers.contiguous(memory_format=torch.channels_last)
    launch = launch_of(weight, how, rescale, pixels, adds=added is not None)
    constants = launch.constants
    columns = outputs if launch.kernel is _add_products else outputs // how.groups
    in_columns = _blocks(columns, constants["BLOCK_N"]) * (outputs // columns)
    launch.kernel[_blocks(pixels, constants["BLOCK_M"]), in_columns](
        x,
        *_packed(weight, constants["BLOCK_K"]),
        rescale.multiplier,
        rescale.offset,
        other,
        made,
        0.0 if added is None else _single(added.factor),
        rescale.low,
        rescale.high,
        border,
        pixels,
        *sizes,
        *made_sizes,
        channels,
        outputs,
        **constants,
        **launch.options,
    )
    return made


def launch_of(
    weight: Tensor, how: Geometry, rescale: Rescale, pixels: int, adds: bool
) -> KernelLaunch:
    """Returns the kernel of a convolution that makes so many pixels."""
    outputs, share, rows, columns = weight.shape
    (step_y, step_x), (pad_y, pad_x), (apart_y, apart_x) = map(tuple, how[:3])
    constants: dict[str, Any] = {
        "SHARE": share, "GROUP": outputs // how.groups, "ROWS": rows, "COLUMNS": columns,
        "STEP_Y": step_y, "STEP_X": step_x, "PAD_Y": pad_y, "PAD_X": pad_x,
        "APART_Y": apart_y, "APART_X": apart_x,
        "REAL": rescale.dtype != torch.uint8, "ADDS": adds,
    }  # fmt: skip
    if share == 1:
        wide = min(_power(outputs), 64)
        blocks = {"BLOCK_M": min(_power(pixels), 4096 // wide), "BLOCK_N": wide, "BLOCK_K": 1}
        return KernelLaunch(_add_products, constants | blocks, 4)
    # The least sizes of an 8-bit product are 16 x 16 x 32.
    wide = min(max(_power(constants["GROUP"]), 16), 128)
    high = min(max(_power(pixels), 16), 128)
    deep = 64 if share % 64 == 0 else 32
    blocks = {"BLOCK_M": high, "BLOCK_N": wide, "BLOCK_K": deep}
    return KernelLaunch(_multiply, constants | blocks, 8 if high * wide == 128 * 128 else 4)


_PACKED: Any = WeakIdKeyDictionary()  # weight -> version and block -> what kernels read of it


def _packed(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns the weights in the order of the products, and what sums begin with, int32."""
    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = _PACKED.setdefault(weight, {})
    key = weight._version, block
    if key not in held:
        outputs = len(weight)
        products = weight.permute(0, 2, 3, 1).reshape(outputs, -1)
        if block == 1:  # of one channel: what neighbouring outputs multiply stands together
            start = torch.zeros(outputs, dtype=torch.int32, device=weight.device)
            held[key] = products.t().contiguous(), start
        else:
            start = 128 * products.sum(1, dtype=torch.int32)
            missing = -products.shape[1] % block
            held[key] = torch.nn.functional.pad(products, (0, missing)).contiguous(), start
    return held[key]


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _power(number: int) -> int:
    # The least power of two that is as large.
    return 1 << (number - 1).bit_length()


def _single(number: float) -> float:
    # As fp32 holds it.
    return float(struct.unpack("f", struct.pack("f", number))[0])


@triton.jit
def _corners(pixel, height, width, STEP_Y, STEP_X, PAD_Y, PAD_X):  # type: ignore[no-untyped-def]
    # Of each output pixel the image, and the first row and column that it reads.
    row = (pixel // width % height).to(tl.int32) * STEP_Y - PAD_Y
    column = (pixel % width).to(tl.int32) * STEP_X - PAD_X
    return pixel // width // height, row, column


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    sums,
    multiplier,
    offset,
    other,
    made,
    factor,
    low,
    high,
    place,
    output,
    inside,
    exists,
    REAL,
    ADDS,
):
    # Operation by operation ``hires.quant.int8_kernels._rescaled``.
    scale = tl.load(multiplier + output, mask=exists, other=0.0)
    add = tl.load(offset + output, mask=exists, other=0.0)
    y = sums.to(tl.float32) * scale[None, :] + add[None, :]
    if ADDS:
        beside = tl.load(other + place, mask=inside, other=0).to(tl.float64)
        y = (beside * factor + y.to(tl.float64)).to(tl.float32)
    if REAL:
        tl.store(made + place, y, mask=inside)
    else:
        y = tl.minimum(tl.maximum(y, low), high)
        # fp32 has no halves above 2^23: the sum is rounded to the nearest even number.
        y = (y + 12582912.0) - 12582912.0
        tl.store(made + place, y.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x, weight, start, multiplier, offset, other, made, factor, low, high, border,
    pixels, height, width, made_height, made_width, channels, outputs,
    SHARE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP_Y: tl.constexpr, STEP_X: tl.constexpr, PAD_Y: tl.constexpr, PAD_X: tl.constexpr,
    APART_Y: tl.constexpr, APART_X: tl.constexpr, REAL: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # A block of pixels and of one group's outputs.
    PRODUCTS: tl.constexpr = ROWS * COLUMNS * SHARE
    STORED: tl.constexpr = (PRODUCTS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    PARTS: tl.constexpr = (GROUP + BLOCK_N - 1) // BLOCK_N
    group = tl.program_id(1) // PARTS
    within = tl.program_id(1) % PARTS * BLOCK_N + tl.arange(0, BLOCK_N)
    output, exists = group * GROUP + within, within < GROUP
    # Maps of a whole slide have more numbers than 32 bits count.
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    image, top, left = _corners(pixel, made_height, made_width, STEP_Y, STEP_X, PAD_Y, PAD_X)
    begin = tl.load(start + output, mask=exists, other=0)
    sums = tl.full((BLOCK_M, BLOCK_N), 0, tl.int32) + begin[None, :]
    for first in range(0, PRODUCTS, BLOCK_K):
        product = first + tl.arange(0, BLOCK_K)
        if SHARE % BLOCK_K == 0:  # all of one tap, whose channels stand together
            row = top + first // SHARE // COLUMNS * APART_Y
            column = left + first // SHARE % COLUMNS * APART_X
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            read = ((image * height + row) * width + column) * channels + group * SHARE
            # The compiler finds out by itself only with the hint: 16 numbers are read at a time.
            channel = tl.multiple_of(first % SHARE, BLOCK_K) + tl.arange(0, BLOCK_K)
            read = read[:, None] + channel[None, :]
            inside = (inside & (pixel < pixels))[:, None]
        else:
            tap = product // SHARE
            row = top[:, None] + (tap // COLUMNS * APART_Y)[None, :]
            column = left[:, None] + (tap % COLUMNS * APART_X)[None, :]
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            read = ((image[:, None] * height + row) * width + column) * channels
            read = read + (group * SHARE + product % SHARE)[None, :]
            inside = inside & (pixel < pixels)[:, None] & (product < PRODUCTS)[None, :]
        numbers = tl.load(x + read, mask=inside, other=border) ^ 128
        rows = weight + output[None, :] * STORED + product[:, None]
        weights = tl.load(rows, mask=exists[None, :], other=0)
        sums = tl.dot(numbers.to(tl.int8, bitcast=True), weights, sums, out_dtype=tl.int32)
    place = pixel[:, None] * outputs + output[None, :]
    inside = (pixel < pixels)[:, None] & exists[None, :]
    _finish(
        sums, multiplier, offset, other, made, factor, low, high,
        place, output, inside, exists, REAL, ADDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)  # type: ignore[untyped-decorator]
def _add_products(  # type: ignore[no-untyped-def]
    x, weight, start, multiplier, offset, other, made, factor, low, high, border,
    pixels, height, width, made_height, made_width, channels, outputs,
    SHARE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP_Y: tl.constexpr, STEP_X: tl.constexpr, PAD_Y: tl.constexpr, PAD_X: tl.constexpr,
    APART_Y: tl.constexpr, APART_X: tl.constexpr, REAL: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # A block of pixels and of outputs, each of one channel.
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = output < outputs
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    image, top, left = _corners(pixel, made_height, made_width, STEP_Y, STEP_X, PAD_Y, PAD_X)
    begin = tl.load(start + output, mask=exists, other=0)
    sums = tl.full((BLOCK_M, BLOCK_N), 0, tl.int32) + begin[None, :]
    for tap in range(ROWS * COLUMNS):
        row, column = top + tap // COLUMNS * APART_Y, left + tap % COLUMNS * APART_X
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        inside = (inside & (pixel < pixels))[:, None] & exists[None, :]
        read = ((image * height + row) * width + column) * channels
        read = read[:, None] + (output // GROUP)[None, :]
        numbers = tl.load(x + read, mask=inside, other=border).to(tl.int32)
        weights = tl.load(weight + tap * outputs + output, mask=exists, other=0).to(tl.int32)
        sums += numbers * weights[None, :]
    place = pixel[:, None] * outputs + output[None, :]
    inside = (pixel < pixels)[:, None] & exists[None, :]
    _finish(
        sums, multiplier, offset, other, made, factor, low, high,
        place, output, inside, exists, REAL, ADDS,
    )  # fmt: skip
