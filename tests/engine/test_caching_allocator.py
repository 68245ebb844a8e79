"""Does the simulated allocator hold what that of torch would: blocks, segments and what is left?"""

from __future__ import annotations

import random

import pytest

from hires.core.units import MIB
from hires.engine.caching_allocator import CachingAllocator


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of 1 MiB is no block of its own
        (21 * MIB - 1, 22 * MIB, 22 * MIB),
    ],
)
def test_tensor_is_rounded_and_takes_a_segment(size, block, segment):
    allocator = CachingAllocator()
    assert allocator.allocate(size).size == block
    assert (allocator.allocated, allocator.reserved) == (block, segment)


def test_all_that_is_freed_joins_again():
    rng, allocator = random.Random(1), CachingAllocator()
    held = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            allocator.free(held.pop(rng.randrange(len(held))))
        else:
            held.append(allocator.allocate(rng.choice((100, 70_000, 3 * MIB, 40 * MIB))))
        assert allocator.allocated == sum(block.size for block in held) <= allocator.reserved
    for block in held:
        allocator.free(block)
    free = [block for blocks in allocator._free.values() for _, _, block in blocks]
    assert sum(block.size for block in free) == allocator.reserved
    assert all(block.before is None and block.after is None for block in free)
