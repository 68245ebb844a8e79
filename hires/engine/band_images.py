"""Reads the rows of a microbatch's images as a network in bands asks for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from hires.plan.tiling import Interval

Read = Callable[[Interval], Tensor]
"""Rows of the images -> (n, C, rows, W), channels_last in memory."""


class BandImages:
    """The images of a microbatch; a thread reads the next rows ahead."""

    def __init__(self, read: Read, ahead: bool) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="bands") if ahead else None
        self._next: tuple[Interval, Future[Tensor]] | None = None

    def rows(self, rows: Interval, ahead: Interval | None) -> Tensor:
        """Returns some rows; ``ahead`` are those that will be asked for next, if any.

        RunError: an image cannot be read, and which.
        """
        coming, self._next = self._next, None
        images = coming[1].result() if coming and coming[0] == rows else self._read(rows)
        if self._pool is not None and ahead is not None:
            self._next = ahead, self._pool.submit(self._read, ahead)
        return images
