"""Loads the microbatches of a rank.

One background thread reads the next microbatches while the rank computes: only this rank's samples,
and of these only its window. Tensors are filled in the layout and type that the network wants.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.data.image_window import Source, Span
from hires.data.source import PairSource

Order = Callable[[int], list[int]]
"""Gives the samples that this rank needs in a step, in the order of its microbatches."""


Target = Callable[[int], Any]
"""Gives what the network shall make of a sample: its class, or an image (C, h, w)."""


class Microbatch(NamedTuple):
    """What one rank needs of one microbatch."""

    images: Tensor | None
    """(n, C, h, w), channels_last in memory; None if the rank needs no pixels."""
    target: Tensor | None
    """Classes (n,), int64, or images like ``images``; None if the rank compares nothing."""


class Loader:
    """Gives the microbatches of a run, one after the other."""

    def __init__(
        self,
        source: Source | PairSource,
        *,
        order: Order,
        num_microbatches: int,
        rows: Span | None,
        cols: Span | None,
        target: Target | None,
        steps: int | range,
        prefetch: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Starts to read ahead.

        Args:
            source: where images come from.
            order: this rank's samples of a step; their number is a multiple of
                ``num_microbatches``.
            num_microbatches: pieces of a step, all of the same size.
            rows: rows of this rank's window; None if it needs no pixels.
            cols: columns of this rank's window; None if it needs no pixels.
            target: gives what the output is compared with; None if this rank compares nothing.
            steps: steps of the run; a range of them, or how many.
            prefetch: microbatches that are read ahead; 0 reads when asked, without a thread.
            dtype: type of the images.
        """
        assert (rows is None) == (cols is None)
        self.wait_s = 0.0
        """Seconds that the caller has waited for data, so far."""
        window = None if rows is None or cols is None else (rows, cols)
        reader = _Reader(source, window, target, dtype)
        numbers = range(steps) if isinstance(steps, int) else steps
        work = _pieces(order, num_microbatches, numbers)
        self._microbatches = (reader.read(samples) for samples in work)
        self._ahead = None
        if prefetch and (window or target):
            self._ahead = _Ahead(self._microbatches, prefetch)
            # The thread holds _Ahead but not the loader, so a forgotten loader ends its thread.
            self._stop = weakref.finalize(self, self._ahead.stop)

    def next_microbatch(self) -> Microbatch:
        """Returns the next microbatch; those of a step come one after the other.

        Raises:
            RunError: an image cannot be read; the message names the file.
            EOFError: all steps have been read, or the loader is closed.
        """
        begin = time.perf_counter()
        try:
            microbatch = (
                next(self._microbatches, None) if self._ahead is None else self._ahead.take()
            )
        finally:
            self.wait_s += time.perf_counter() - begin
        if microbatch is None:
            raise EOFError("there are no more microbatches")
        return microbatch

    def close(self) -> None:
        """Stops the thread and waits for it; happens at the latest when the process ends."""
        if self._ahead is not None:
            self._stop()

    def __iter__(self) -> Iterator[Microbatch]:
        """Yields the microbatches that are left."""
        while True:
            try:
                microbatch = self.next_microbatch()
            except EOFError:
                return
            yield microbatch


class Loaders:
    """The loaders of a rank's slots, one a direction."""

    def __init__(self, by_direction: list[Loader]) -> None:
        self.by_direction = by_direction

    @property
    def wait_s(self) -> float:
        """Seconds that the caller has waited for data, so far."""
        return sum(loader.wait_s for loader in self.by_direction)

    def next_microbatch(self, direction: int = 0) -> Microbatch:
        """Returns the next microbatch of a direction, as :meth:`Loader.next_microbatch` does."""
        return self.by_direction[direction].next_microbatch()

    def close(self) -> None:
        """Stops all threads."""
        for loader in self.by_direction:
            loader.close()


class _Reader:
    """Reads samples into tensors."""

    def __init__(
        self,
        source: Source | PairSource,
        window: tuple[Span, Span] | None,
        target: Target | None,
        dtype: torch.dtype,
    ) -> None:
        self._source = source
        self._window = window
        self._target = target
        self._dtype = dtype

    def read(self, samples: list[int]) -> Microbatch:
        """Returns what the rank needs of these samples."""
        images = target = None
        if window := self._window:
            images = self._stacked(samples, lambda i: self._source.window(i, *window))
        if self._target is not None:
            target = self._stacked(samples, self._target)
        return Microbatch(images, target)

    def _stacked(self, samples: list[int], read: Target) -> Tensor:
        """Returns the samples' images as (n, C, h, w), channels_last, or their classes as (n,)."""
        first = read(samples[0])
        if isinstance(first, int):
            return torch.tensor([first, *map(read, samples[1:])])
        shape = (len(samples), *first.shape)
        images = torch.empty(shape, dtype=self._dtype, memory_format=torch.channels_last)
        images[0] = torch.from_numpy(first)
        for k, sample in enumerate(samples[1:], start=1):
            images[k] = torch.from_numpy(read(sample))
        return images


class _Ahead:
    """A thread that takes items from an iterator, up to ``depth`` ahead of the consumer."""

    def __init__(self, items: Iterator[Microbatch], depth: int) -> None:
        self._items = items
        self._free = threading.Semaphore(depth)
        self._ready: SimpleQueue[Microbatch | Exception | None] = SimpleQueue()
        self._stopped = False
        self._end: Exception | None = None
        self._ended = False
        # A daemon, because the interpreter waits for other threads before it stops this one.
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def take(self) -> Microbatch | None:
        """Returns the next item, or None after the last; raises an error where it occurred."""
        if not self._ended and not self._stopped:
            item = self._ready.get()
            self._free.release()
            if isinstance(item, Microbatch):
                return item
            self._ended, self._end = True, item
        if self._end is not None:
            raise self._end
        return None

    def stop(self) -> None:
        """Ends the thread, after the item that it is reading."""
        self._stopped = True
        self._free.release()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._ready.put(None)

    def _run(self) -> None:
        """Reads until the last item, an error, or the stop."""
        while True:
            self._free.acquire()
            if self._stopped:
                return
            try:
                item = next(self._items, None)
            except Exception as error:
                self._ready.put(error)
                return
            self._ready.put(item)
            if item is None:
                return


def _pieces(order: Order, num_microbatches: int, steps: range) -> Iterator[list[int]]:
    """Yields the samples of every microbatch."""
    for step in steps:
        samples = order(step)
        size, rest = divmod(len(samples), num_microbatches)
        assert rest == 0, f"{len(samples)} samples in {num_microbatches} microbatches"
        for k in range(num_microbatches):
            yield samples[k * size : (k + 1) * size]
