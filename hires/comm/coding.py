"""Codes tensors of messages as bytes and back, and lays the parts of many tensors out in rows.

Maps travel as NHWC, as :func:`hires.comm.plan_messages.post` sends them. In a rehearsal buffers are
allocated, and nothing is computed (:mod:`hires.core.codecs`).

Where each rank needs a part of the sums, every rank names the same parts by member, as flat tensors
of one type in the same order. They are copied into buffers of equal rows, one for each member, some
MiB at a time:

    parts of 0   a a a b b b b b         buffer 1   | a a a b | c c c d |
    parts of 1   c c c d d d             buffer 2   | b b b b | d d . . |

With a codec each tensor begins at a block of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from time import perf_counter as clock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hires.comm.comm_world import default_world
from hires.core.codecs import Codec, codec_named
from hires.core.errors import CommError

usual_codec = functools.cache(codec_named)
"""Returns the codec of a name, one instance of each."""


@torch.no_grad()
def encode(codec: Codec, tensor: Tensor, codes: Tensor | None = None) -> Tensor:
    """Returns the bytes of a tensor; CommError: it holds integers.

    ``codes`` may take them, and be longer.
    """
    if not tensor.is_floating_point():
        raise CommError(f"codecs are for real numbers, not {tensor.dtype}; send it without one")
    if codes is None:
        codes = tensor.new_empty(codec.num_bytes(tensor.numel()), dtype=torch.uint8)
    if not isinstance(codes, FakeTensor):
        begin, log = clock(), default_world().log
        numbers, own = _ordered(tensor).reshape(-1), codes[: codec.num_bytes(tensor.numel())]
        codec.encode(numbers, own)
        if log is not None and log.note_codes(codec.called, clock() - begin):
            decoded = torch.empty_like(numbers)
            codec.decode(own, decoded)
            sizes = [float(one.double().square().sum()) for one in (decoded - numbers, numbers)]
            log.note_error(codec.called, *sizes)
    return codes


@torch.no_grad()
def decode(codec: Codec, codes: Tensor, tensor: Tensor) -> Tensor:
    """Fills a dense tensor, whose maps are channels-last, and returns it."""
    if not isinstance(codes, FakeTensor):
        begin, log = clock(), default_world().log
        codec.decode(codes[: codec.num_bytes(tensor.numel())], _ordered(tensor).view(-1))
        if log is not None:
            log.note_codes(codec.called, clock() - begin)
    return tensor


def _ordered(tensor: Tensor) -> Tensor:
    return tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor


BUFFER_BYTES = 2**24
"""Most that the rows of all members take at a time, where they are copied."""
Parts = Sequence[Sequence[Tensor]]
Buffers = Iterator[tuple[list[list[Tensor]], int]]
"""Rows of parts, and how long they are."""


def equal_shares(tensors: Sequence[Tensor], number: int, block: int) -> list[list[Tensor]]:
    """Returns as many parts of flat tensors, of whole blocks."""
    blocks = sum(-(-len(tensor) // block) for tensor in tensors)
    most = block * -(-blocks // number)
    return [[*_slices(tensors, n * most, (n + 1) * most, block)] for n in range(number)]


def places(row: Tensor, tensors: Sequence[Tensor], codec: Codec | None) -> Iterator[Tensor]:
    """Yields the part of a row that holds each of some flat tensors."""
    first = 0
    for tensor in tensors:
        yield row[first : first + len(tensor)]
        first += length(tensor, codec)


def buffers(parts: Parts, codec: Codec | None) -> Buffers:
    """Yields the parts in rows of at most BUFFER_BYTES in all, and the numbers of the longest."""
    longest = max(sum(length(tensor, codec) for tensor in own) for own in parts)
    width = next(tensor.element_size() for own in parts for tensor in own)
    block = 1 if codec is None else codec.block
    most = max(1, BUFFER_BYTES // (width * len(parts) * block)) * block
    for first in range(0, longest, most):
        rows = [[*_slices(own, first, first + most, block)] for own in parts]
        yield rows, min(most, longest - first)


def _slices(tensors: Sequence[Tensor], first: int, end: int, block: int) -> Iterator[Tensor]:
    begin = 0
    for tensor in tensors:
        size = tensor.numel()
        if begin < end and begin + size > first:
            yield tensor[max(0, first - begin) : end - begin]
        begin += -(-size // block) * block


def length(tensor: Tensor, codec: Codec | None) -> int:
    """Returns the numbers of a tensor, with a codec those of whole blocks."""
    return tensor.numel() if codec is None else codec.padded(tensor.numel())


def joined(rows: list[list[Tensor]], width: int, codec: Codec | None) -> Tensor:
    """Returns one tensor of rows of a width, with zeros behind tensors."""
    like = next(tensor for row in rows for tensor in row)
    joined = like.new_zeros((len(rows), width))
    for row, tensors in zip(joined, rows, strict=True):
        for tensor, part in zip(tensors, places(row, tensors, codec), strict=True):
            part.copy_(tensor)
    return joined


def divide(row: Tensor, tensors: list[Tensor], codec: Codec | None) -> None:
    """Fills tensors from the row that holds them."""
    for tensor, part in zip(tensors, places(row, tensors, codec), strict=True):
        tensor.copy_(part)
