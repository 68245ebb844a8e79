"""Simulates torch's allocator of GPU memory: what it holds, of the GPU, for tensors of given sizes.

It takes whole segments from the GPU and cuts them into blocks; a freed block goes to the next
tensor that it is large enough for, and its segment stays. So the GPU needs more than the tensors:

    tensor           segment taken if no free block will do      rest of a block
    up to 1 MiB      2 MiB, for small tensors                    is kept from 512 bytes on
    below 10 MiB     20 MiB                                      is kept above 1 MiB
    10 MiB or more   its own size, in steps of 2 MiB             is kept above 1 MiB

Source:
    c10/cuda/CUDACachingAllocator.cpp of torch 2.13, without max_split_size, expandable segments and
    garbage collection, which are off unless PYTORCH_CUDA_ALLOC_CONF sets them.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from hires.core.units import MIB

ROUND, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
LARGE_SEGMENT, OWN_SEGMENT, OWN_ROUND = 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """Consecutive bytes of a segment."""

    size: int
    place: int
    """Segments lie one behind the other, so that it orders blocks as their addresses would."""
    small: bool
    """Whether its segment is for small tensors."""
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class CachingAllocator:
    """The blocks of one GPU, of one stream."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0  # bytes of blocks in use, of segments
        self._end = 0
        # By whether they are small: free blocks in order of size, then of place.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, num_bytes: int) -> Block:
        """Returns a block for a tensor: the smallest free one, or of a new segment."""
        size = max(ROUND, -(-num_bytes // ROUND) * ROUND)
        small = size <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (size, -1))
        if place < len(free):
            block = free.pop(place)[2]
            block.free = False
        else:
            block = Block(_segment_bytes(size), self._end, small)
            self._end += block.size
            self.reserved += block.size
        rest = block.size - size
        if rest >= ROUND if small else rest > SMALL:
            other = Block(rest, block.place + size, small, block, block.after)
            if other.after is not None:
                other.after.before = other
            block.size, block.after = size, other
            self._release(other)
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Gives a block back, which joins free ones beside it."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            self._free[other.small].remove((other.size, other.place, other))
            block.size += other.size
            if other is block.before:
                block.place, block.before = other.place, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
        self._release(block)

    def _release(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.place, block))


def _segment_bytes(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // OWN_ROUND) * OWN_ROUND
