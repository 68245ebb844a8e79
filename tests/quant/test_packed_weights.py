"""Are 4-bit weights those with the least error, packed into half the bytes, and no others?"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hires.quant.affine import GROUP, packed_bytes
from hires.quant.packed_weights import LARGEST_STEP, MOST, pack, require_packed, unpack

COUNTS = (1, 2, GROUP - 1, GROUP, GROUP + 1, 147)


def numbers_of(count, rows=5):
    drawn = torch.randn(rows, count, generator=torch.Generator().manual_seed(count)) * 40
    return drawn.round().clamp(-127, 127).to(torch.int8)


def least_error(group):
    """The least squared error that any step leaves, number by number."""
    return min(
        sum(min((n - step * k) ** 2 for k in range(-MOST, MOST + 1)) for n in group)
        for step in range(1, LARGEST_STEP + 1)
    )


@pytest.mark.parametrize("count", COUNTS)
def test_every_group_has_the_least_error_of_all_steps(count):
    numbers = numbers_of(count)
    made = unpack(pack(numbers), [*numbers.shape]).int()
    for row, own in zip(numbers.tolist(), made.tolist(), strict=True):
        for first in range(0, count, GROUP):
            group, rounded = row[first : first + GROUP], own[first : first + GROUP]
            off = sum((n - r) ** 2 for n, r in zip(group, rounded, strict=True))
            assert off == least_error(group)


@pytest.mark.parametrize("count", COUNTS)
def test_weights_that_4_bits_hold_come_back_as_they_were(count):
    steps = range(1, LARGEST_STEP + 1)
    every = torch.tensor([[k * s for k in range(-MOST, MOST + 1)] for s in steps])
    numbers = every.repeat(1, math.ceil(count / every.shape[1]))[:, :count].to(torch.int8)
    assert torch.equal(unpack(pack(numbers), [*numbers.shape]), numbers)


def test_shapes_and_bytes():
    numbers = numbers_of(32 * 9, rows=4).view(4, 32, 3, 3)
    packed = pack(numbers)
    assert list(packed.shape) == [4, packed_bytes(288)] == [4, 144 + 5]
    assert packed.dtype == torch.uint8
    assert unpack(packed, [4, 32, 3, 3]).shape == numbers.shape
    assert not unpack(pack(torch.zeros_like(numbers)), [4, 32, 3, 3]).any()


def damaged(packed, name):
    packed = packed.clone()
    if name == "a number of -8":
        packed[2, 3] &= 0xF0
    elif name == "a number behind the last":
        packed[0, 32] ^= 0x10
    elif name == "a step of 0":
        packed[1, -1] = 0
    elif name == "a step of 19":
        packed[1, -2] = LARGEST_STEP + 1
    elif name == "a byte less":
        packed = packed[:, 1:]
    elif name == "a row less":
        packed = packed[1:]
    elif name == "signed bytes":
        packed = packed.view(torch.int8)
    return packed


NAMES = (
    "a number of -8", "a number behind the last", "a step of 0", "a step of 19", "a byte less",
    "a row less", "signed bytes",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_are_no_weights_are_refused(name):
    packed = pack(numbers_of(65))
    require_packed(packed, [5, 65])
    with pytest.raises(ValueError, match=r"4 bits|4-bit"):
        require_packed(damaged(packed, name), [5, 65])


def test_all_pairs_of_numbers_share_a_byte():
    pairs = [*itertools.product(range(-MOST, MOST + 1), repeat=2)]
    # A largest number of 7 and a smallest of -7 in the group: only a step of 1 has no error.
    numbers = torch.tensor([[MOST, -MOST, *pair] for pair in pairs], dtype=torch.int8)
    packed = pack(numbers)
    assert len({tuple(row) for row in packed.tolist()}) == len(pairs)
    assert torch.equal(unpack(packed, [*numbers.shape]), numbers)
