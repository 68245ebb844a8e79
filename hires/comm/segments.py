"""Carries out a collective as one operation of its backend for each segment, all begun at once.

The backend adds in its own order within each segment; all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hires.comm.backends.backend import Backend, Work
from hires.comm.backends.joined_work import JoinedWork

IN_PLACE = ("all_reduce", "reduce", "broadcast")


def in_segments(backend: Backend, operation: str, segment_bytes: int) -> Callable[..., Work | None]:
    """Returns what takes the arguments of a backend's method, and calls it for each segment."""

    def in_place(handle: Any, tensor: Tensor, *args: Any) -> list[Work]:
        flat, method = tensor.view(-1), getattr(backend, operation)
        ends = segments(flat.numel(), flat.element_size(), segment_bytes)
        return [method(flat[a:b], *args, handle, async_op=True) for a, b in ends]

    def gather(handle: Any, outputs: Sequence[Tensor], tensor: Tensor) -> list[Work]:
        rows, own = [output.view(-1) for output in outputs], tensor.view(-1)
        # Every rank has all sizes, and so the same segments; the last ones may be empty.
        longest = max(row.numel() for row in rows)
        ends = segments(longest, own.element_size(), segment_bytes)
        return [
            backend.all_gather([row[a:b] for row in rows], own[a:b], handle, async_op=True)
            for a, b in ends
        ]

    begin: Callable[..., list[Work]] = in_place if operation in IN_PLACE else gather

    def carry_out(*args: Any, group: Any = None, async_op: bool = False) -> Work | None:
        work = JoinedWork(begin(group, *args))
        if async_op:
            return work
        work.wait()
        return None

    return carry_out


def segments(num_elements: int, element_bytes: int, segment_bytes: int) -> list[tuple[int, int]]:
    """Returns where each segment of a tensor begins and ends; at least one, of any size.

    >>> segments(10, 4, 16)
    [(0, 4), (4, 8), (8, 10)]
    """
    length = max(1, segment_bytes // element_bytes)
    begins = range(0, max(1, num_elements), length)
    return [(begin, min(num_elements, begin + length)) for begin in begins]
