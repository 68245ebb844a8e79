"""Codecs that send one byte for each number, and a scale for each block of 256.

    numbers   | x0 ... x255 | x256 ... |        scale = largest |x| of the block / largest code
    codes     | scale | scale | ... | c0 ... c255 | c256 ...       c = x / scale, rounded

A block that holds NaN or an infinite number is NaN on the other side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from hires.core.codecs import CODECS, Codec

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256
AT_ONCE = 2**17
"""Numbers that are coded at a time: they stay in the cache between the steps."""


class _Scaled(Codec):
    block = BLOCK
    largest: ClassVar[float]
    """The largest code."""

    def num_bytes(self, numbers: int) -> int:
        return 4 * -(-numbers // BLOCK) + numbers

    def encode(self, numbers: Tensor, codes: Tensor) -> None:
        import torch

        buffer = _buffer(numbers)
        least = torch.finfo(torch.float32).tiny  # quotients of smaller ones would wrap
        for part, scale, code in _parts(numbers, codes):
            blocks, source = buffer[: len(scale)], _as_blocks(part, buffer)
            if source.data_ptr() == blocks.data_ptr():
                blocks.view(-1)[: len(part)].copy_(part)
                blocks.view(-1)[len(part) :].zero_()
            lowest = source.amin(1).neg_()
            torch.maximum(source.amax(1), lowest, out=scale)
            scale.div_(self.largest).clamp_(min=least)
            torch.div(source, scale[:, None], out=blocks)
            self._round(blocks, code)

    def decode(self, codes: Tensor, numbers: Tensor) -> None:
        buffer = _buffer(numbers)
        for part, scale, code in _parts(numbers, codes):
            blocks = _as_blocks(part, buffer)
            self._widen(code, blocks)
            blocks.mul_(scale[:, None])
            if blocks.data_ptr() == buffer.data_ptr():
                part.copy_(blocks.view(-1)[: len(part)])

    def _round(self, blocks: Tensor, code: Tensor) -> None:
        """Makes codes, of type int8, of numbers up to ``largest``, which it may change."""
        raise NotImplementedError

    def _widen(self, code: Tensor, blocks: Tensor) -> None:
        """Fills fp32 numbers, of which the last may have no code."""
        raise NotImplementedError


def _buffer(numbers: Tensor) -> Tensor:
    import torch

    size = min(AT_ONCE, -(-len(numbers) // BLOCK) * BLOCK)
    return numbers.new_empty(size, dtype=torch.float32).view(-1, BLOCK)


def _as_blocks(part: Tensor, buffer: Tensor) -> Tensor:
    """Returns whole blocks of fp32 as they lie, and of all else the buffer."""
    if part.dtype == buffer.dtype and len(part) % BLOCK == 0:
        return part.view(-1, BLOCK)
    return buffer[: -(-len(part) // BLOCK)]


def _parts(numbers: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields numbers, their scales and their codes, some at a time."""
    import torch

    num_blocks = -(-len(numbers) // BLOCK)
    scales = codes[: 4 * num_blocks].view(torch.float32)
    own = codes[4 * num_blocks :].view(torch.int8)
    for first in range(0, len(numbers), AT_ONCE):
        end, block = first + AT_ONCE, first // BLOCK
        yield numbers[first:end], scales[block : block + AT_ONCE // BLOCK], own[first:end]


@CODECS.register("int8")
class Integers(_Scaled):
    """Integers of 8 bits and a scale for every 256 numbers: a quarter of the bytes of fp32."""

    largest = 127.0
    # A code is wrong by half a scale, 1 / 254 of the largest of 256 numbers; that of normal ones is
    # sqrt(2 ln 256) = 3.33 times their root mean square.
    unit = 3.33 / 254

    def _round(self, blocks: Tensor, code: Tensor) -> None:
        code.copy_(blocks.round_().view(-1)[: len(code)])

    def _widen(self, code: Tensor, blocks: Tensor) -> None:
        blocks.view(-1)[: len(code)].copy_(code)


@CODECS.register("fp8")
class Float8(_Scaled):
    """Numbers as float8 (e4m3) and a scale for every 256: a quarter of fp32, 4 bits of each."""

    largest = 448.0
    unit = 2.0**-4

    def _round(self, blocks: Tensor, code: Tensor) -> None:
        import torch

        code.view(torch.float8_e4m3fn).copy_(blocks.view(-1)[: len(code)])

    def _widen(self, code: Tensor, blocks: Tensor) -> None:
        # By its bits, seven times as fast as torch: those of e4m3 (bias 7), where fp32 (bias 127)
        # has exponent and mantissa, are the number times 2^-120.
        import torch

        bits = blocks.view(torch.int32)
        bits.view(-1)[: len(code)].copy_(code)
        bits.bitwise_left_shift_(20).bitwise_and_(-0x78100000)  # s0000eee emmm0000 ...
        blocks.mul_(2.0**120)
