"""Loads the microbatches of a rank: only its samples, and of these only its window.

One background thread reads the next microbatches while the rank computes. Tensors are filled in the
layout and type that the network wants.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.core.config.run_config import RunConfig
from hires.data.image_window import Source, Span
from hires.data.source import PairSource, open_data, step_indices
from hires.parallel.context import Context
from hires.plan.graph import INPUT, Rect
from hires.plan.rules import TILED

Data = Source | PairSource
Order = Callable[[int], list[int]]
"""Returns a rank's samples of a step."""
Target = Callable[[int], Any]
"""Returns what the output for a sample is compared with: its class, or an image (C, h, w)."""


class Microbatch(NamedTuple):
    """What one rank needs of one microbatch."""

    images: Tensor | None  # (n, C, h, w), channels_last in memory; None if it needs no pixels
    target: Tensor | None  # classes (n,), int64, or images; None if it compares nothing


_THREAD = "loader"


class Loader:
    """Returns the microbatches of a run, one after the other.

    Args:
        source: where images come from.
        order: this rank's samples of a step, microbatch after microbatch.
        num_microbatches: microbatches of a step, all of the same size.
        rows: rows of this rank's window; None, like ``cols``, if it needs no pixels.
        cols: its columns.
        target: what the output is compared with; None if this rank compares nothing.
        steps: a range of steps of the run, or how many.
        prefetch: microbatches that are read ahead; 0 reads on demand, without a thread.
        dtype: type of the images.
    """

    def __init__(
        self,
        source: Data,
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
        assert (rows is None) == (cols is None)
        self.wait_s = 0.0
        """Seconds that the caller has waited for data, so far."""
        window = None if rows is None or cols is None else (rows, cols)
        numbers = range(steps) if isinstance(steps, int) else steps
        work = _samples_by_microbatch(order, num_microbatches, numbers)
        self._microbatches = (_read(source, samples, window, target, dtype) for samples in work)
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: collections.deque[Future[Microbatch | None]] = collections.deque()
        if prefetch and (window or target):
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
            # The thread holds the generator but not the loader: a forgotten loader ends its thread.
            self._stop = weakref.finalize(self, _stop, self._pool)
            for _ in range(prefetch):
                self._read_ahead()

    def next_microbatch(self) -> Microbatch:
        """Returns the next microbatch.

        Raises:
            RunError: an image cannot be read; the message names the file.
            EOFError: there are no more, or the loader is closed.
        """
        begin, microbatch = time.perf_counter(), None
        try:
            if self._pool is None:
                microbatch = next(self._microbatches, None)
            elif self._stop.alive:
                # The end, and an error, stay at the head of the queue: later calls meet them again.
                microbatch = self._ahead[0].result()
        finally:
            self.wait_s += time.perf_counter() - begin
        if microbatch is None:
            raise EOFError("there are no more microbatches")
        if self._pool is not None:
            self._ahead.popleft()
            self._read_ahead()
        return microbatch

    def close(self) -> None:
        """Stops the thread and waits for it."""
        if self._pool is not None:
            self._stop()

    def __iter__(self) -> Iterator[Microbatch]:
        """Yields the microbatches that are left."""
        with contextlib.suppress(EOFError):
            while True:
                yield self.next_microbatch()

    def _read_ahead(self) -> None:
        assert self._pool is not None
        self._ahead.append(self._pool.submit(next, self._microbatches, None))


def _stop(pool: ThreadPoolExecutor) -> None:
    # A loader may be forgotten in its own thread, which cannot wait for itself.
    own = threading.current_thread().name.startswith(_THREAD)
    pool.shutdown(wait=not own, cancel_futures=True)


@dataclass
class Loaders:
    """The loaders of a rank's slots, one a direction."""

    by_direction: list[Loader]

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


def slot_loader(config: RunConfig, context: Context, steps: int | range) -> Loader:
    """Returns the loader of a slot: its window of its replica's images."""
    source = open_data(config)
    r0, r1, c0, c1 = context.own(config.image)
    reads = reads_images(context)
    size = context.plan.graph.input_shape[0]
    first, end = context.samples

    def order(step: int) -> list[int]:
        samples = replica_samples(config, source, step, context.replica)
        return [
            index
            for microbatch in context.plan.microbatches_of(context.direction)
            for index in samples[microbatch * size + first : microbatch * size + end]
        ]

    return Loader(
        source,
        order=order,
        num_microbatches=len(context.plan.microbatches_of(context.direction)),
        rows=(r0, r1) if reads else None,
        cols=(c0, c1) if reads else None,
        target=target_of(source, target_rect(config, context)) if reads_target(context) else None,
        steps=steps,
        prefetch=config.data.prefetch,
        dtype=image_dtype(config),
    )


def whole_microbatches(config: RunConfig, replica: int) -> list[tuple[Tensor, Tensor]]:
    """Returns whole images and targets of a replica's first step, microbatch by microbatch."""
    source = open_data(config)
    loader = Loader(
        source,
        order=lambda step: replica_samples(config, source, step, replica),
        num_microbatches=config.parallel.pieces // config.parallel.replicas,
        rows=(0, config.height),
        cols=(0, config.width),
        target=target_of(source, config.target_rect),
        steps=1,
        prefetch=0,
        dtype=image_dtype(config),
    )
    return [(images, t) for images, t in loader if images is not None and t is not None]


def reads_images(context: Context) -> bool:
    """Whether a slot needs pixels."""
    return any(INPUT in node.inputs for node in context.plan.nodes(context.stage.index))


def reads_target(context: Context) -> bool:
    """Whether a slot compares the network's output with something."""
    last = context.stage.index == len(context.plan.stages) - 1
    return last and context.plan.training


def target_rect(config: RunConfig, context: Context) -> Rect | None:
    """Returns the part of the target image that this rank's output is compared with."""
    size = config.target_size
    tiled = context.stage.layout[context.plan.graph.output] == TILED
    return context.own(list(size)) if size and tiled else config.target_rect


def image_dtype(config: RunConfig) -> torch.dtype:
    """Returns the type of images and parameters; under autocast they stay fp32."""
    if config.precision.name == "bf16" and config.task.name == "infer":
        return torch.bfloat16
    return torch.float64 if config.precision.name == "fp64" else torch.float32


def target_of(source: Data, rect: Rect | None) -> Target:
    """Returns the function from a sample to its class, or to a part of its larger image."""
    if isinstance(source, PairSource):
        assert rect is not None
        (r0, r1, c0, c1), pairs = rect, source
        return lambda sample: pairs.target(sample, (r0, r1), (c0, c1))
    return source.label


def replica_samples(config: RunConfig, source: Data, step: int, replica: int) -> list[int]:
    """Returns the indices of a replica's images in a step, microbatch after microbatch."""
    indices = step_indices(
        step, config.batch, len(source), config.seed, shuffle=config.data.shuffle
    )
    share = config.batch // config.parallel.replicas
    return indices[replica * share : (replica + 1) * share]


def _samples_by_microbatch(
    order: Order, num_microbatches: int, steps: range
) -> Iterator[list[int]]:
    for step in steps:
        samples = order(step)
        size, rest = divmod(len(samples), num_microbatches)
        assert rest == 0, f"{len(samples)} samples in {num_microbatches} microbatches"
        for k in range(num_microbatches):
            yield samples[k * size : (k + 1) * size]


def _read(
    source: Data,
    samples: list[int],
    window: tuple[Span, Span] | None,
    target: Target | None,
    dtype: torch.dtype,
) -> Microbatch:
    def stacked(read: Target) -> Tensor:
        first = read(samples[0])
        if isinstance(first, int):
            return torch.tensor([first, *map(read, samples[1:])])
        shape = (len(samples), *first.shape)
        images = torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
        images[0] = torch.from_numpy(first)
        for k, sample in enumerate(samples[1:], start=1):
            images[k] = torch.from_numpy(read(sample))
        return images

    return Microbatch(
        stacked(lambda sample: source.window(sample, *window)) if window else None,
        stacked(target) if target is not None else None,
    )
