"""Loads the microbatches of a rank: only its samples, and of these only its window.

A thread reads ahead while the rank computes, into the layout and type that the network wants.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.data.opening import open_data
from hires.data.order import step_images
from hires.data.source import Source
from hires.engine.band_images import BandImages
from hires.engine.device import RankDevice, Uploads
from hires.parallel.context import Context
from hires.plan.graph import INPUT, Rect
from hires.plan.rules import TILED
from hires.plan.tiling import Interval

Order = Callable[[int], list[int]]  # step -> a rank's samples, microbatch after microbatch
Target = Callable[[int], Any]
"""Returns what the output for a sample is compared with: its class, its labels or numbers
(C), an image (C, h, w), or the class of each pixel, (h, w)."""
_THREAD = "loader"


class Microbatch(NamedTuple):
    """What one rank needs of one microbatch."""

    images: Any
    """(n, C, h, w), channels_last in memory; None if it needs no pixels; of a network in bands
    :class:`~hires.engine.band_images.BandImages`."""
    target: Tensor | None
    """int64 classes, (n,) or (n, h, w), rows or images; None: none."""


class Loader:
    """Returns microbatches, of which a thread reads ``prefetch`` ahead; 0: read on demand."""

    def __init__(
        self, microbatches: Iterator[Microbatch], prefetch: int, uploads: Uploads | None = None
    ) -> None:
        self.wait_s = 0.0  # seconds that the caller has waited for data, so far
        self._uploads = uploads
        # With the event of the device behind the copies of each, begun in the thread that reads.
        self._microbatches = (
            (batch, None) if uploads is None else uploads.begin(batch) for batch in microbatches
        )
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: collections.deque[Future[Any]] = collections.deque()
        if prefetch:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
            # The thread holds the generator but not the loader: a forgotten loader ends its thread.
            self._stop = weakref.finalize(self, _stop, self._pool)
            for _ in range(prefetch):
                self._read_ahead()

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        """Returns the next microbatch; RunError: an image cannot be read, and which."""
        begin, coming = time.perf_counter(), None
        try:
            if self._pool is None:
                coming = next(self._microbatches, None)
            elif self._stop.alive:
                # The end, and an error, stay at the head of the queue: later calls meet them again.
                coming = self._ahead[0].result()
        finally:
            self.wait_s += time.perf_counter() - begin
        if coming is None:
            raise StopIteration
        if self._pool is not None:
            self._ahead.popleft()
            self._read_ahead()
        batch, event = coming
        if self._uploads is not None:
            self._uploads.finish(batch, event)
        return Microbatch(*batch)

    def close(self) -> None:
        """Stops the thread and waits for it."""
        if self._pool is not None:
            self._stop()

    def _read_ahead(self) -> None:
        assert self._pool is not None
        self._ahead.append(self._pool.submit(next, self._microbatches, None))


def _stop(pool: ThreadPoolExecutor) -> None:
    # A loader may be forgotten in its own thread, which cannot wait for itself.
    is_own = threading.current_thread().name.startswith(_THREAD)
    pool.shutdown(wait=not is_own, cancel_futures=True)


class Needs(NamedTuple):
    """What a slot needs of every microbatch."""

    num_samples: int
    window: Rect | None  # pixels of the images; None: none; those of the first band of several
    compares: bool  # whether it compares the output with something
    target: Rect | None  # pixels of the target, if that is an image or a label map


def needs_of(config: RunConfig, context: Context) -> Needs:
    """Returns what a slot needs of every microbatch."""
    plan, stage = context.plan, context.stage
    first, end = context.samples
    reads = any(INPUT in node.inputs for node in plan.nodes(stage.index))
    window = context.own(config.image) if reads else None
    if window is not None and plan.band_rows:
        window = 0, plan.band_rows, *window[2:]
    compares = stage.index == len(plan.stages) - 1 and plan.training
    target, size = config.target_rect, config.target_size
    if config.data.name == "masks":
        size = config.height, config.width
        target = 0, size[0], 0, size[1]
    if compares and size and stage.layout[plan.graph.output] == TILED:
        target = context.own(list(size))
    return Needs(end - first, window, compares, target if compares else None)


def slot_loader(
    config: RunConfig,
    context: Context,
    source: Source,
    steps: range,
    device: RankDevice | None = None,
    needs: Needs | None = None,
) -> Loader:
    """Returns the loader of a slot: its window of its replica's images, for some steps.

    ``needs`` None: :func:`needs_of`; another, what an evaluation compares the outputs with.
    """
    needs = needs or needs_of(config, context)
    image = None if needs.window is None else image_of(source, needs.window, config.data)
    target = target_of(source, needs.target) if needs.compares else None
    device, (first, end) = device or RankDevice(), context.samples
    size = context.plan.graph.input_shape[0]
    numbers = context.plan.microbatches_of(context.direction)

    def order(step: int) -> list[int]:
        samples = replica_samples(config, source, step, context.replica)
        return [index for m in numbers for index in samples[m * size + first : m * size + end]]

    parts = split_steps(order, len(numbers), steps)
    if context.plan.band_rows and image is not None:

        def rows_of(samples: list[int], rows: Interval) -> Tensor:
            some = image_of(source, (*rows, 0, config.width), config.data)
            read = read_microbatches([samples], some, None, image_dtype(config), device.host_empty)
            images = next(read).images
            assert isinstance(images, Tensor)
            return device.place(images)

        ahead = config.data.prefetch > 0
        microbatches: Iterator[Microbatch] = (
            Microbatch(BandImages(functools.partial(rows_of, samples), ahead), None)
            for samples in parts
        )
        return Loader(microbatches, 0)
    microbatches = read_microbatches(parts, image, target, image_dtype(config), device.host_empty)
    prefetch = 0 if image is None and target is None else config.data.prefetch
    return Loader(microbatches, prefetch, device.uploads())


def whole_microbatches(
    config: RunConfig, replica: int, step: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Returns whole images and targets of a replica's step, microbatch by microbatch."""
    source = open_data(config)
    samples = replica_samples(config, source, step, replica)
    num_microbatches = config.parallel.pieces // config.parallel.replicas
    parts = split_steps(lambda step: samples, num_microbatches, range(1))
    image = image_of(source, (0, config.height, 0, config.width), config.data)
    target = target_of(source, config.target_rect or (0, config.height, 0, config.width))
    read = read_microbatches(parts, image, target, image_dtype(config))
    return [(images, t) for images, t in read if images is not None and t is not None]


def image_dtype(config: RunConfig) -> torch.dtype:
    """Returns the type of images and parameters; under autocast they stay fp32."""
    return getattr(torch, config.image_type)  # type: ignore[no-any-return]


def image_of(source: Source, rect: Rect, data: DataConfig | None = None) -> Target:
    """Returns the function from a sample to a part of its image, as the network gets it.

    Without ``data`` it is not normalised by means and deviations.
    """
    if data is None or data.mean is None or data.std is None:
        return lambda sample: source.window(sample, rect[:2], rect[2:])
    # A value from -2 to 2 is 4 v - 2: (v - mean) / std in one product and one sum.
    factors = [1 / (4 * std) for std in data.std]
    terms = [(0.5 - mean) / std for mean, std in zip(data.mean, data.std, strict=True)]
    scale, shift = (np.array(n, np.float32)[:, None, None] for n in (factors, terms))
    return lambda sample: source.window(sample, rect[:2], rect[2:]) * scale + shift


def target_of(source: Source, rect: Rect | None) -> Target:
    """Returns the function from a sample to its class, or a part of its image or label map."""
    rows, cols = (rect[:2], rect[2:]) if rect is not None else ((0, 0), (0, 0))
    return lambda sample: source.target(sample, rows, cols)


def replica_samples(config: RunConfig, source: Source, step: int, replica: int) -> list[int]:
    """Returns the indices of a replica's images in a step, microbatch after microbatch.

    Of images that are changed at random they count on through the epochs
    (:mod:`hires.data.opening`).
    """
    share, length = config.batch // config.parallel.replicas, len(source)
    indices = step_images(config, source, step)
    if config.augments:  # each epoch has changes of its own
        first = step * config.batch
        indices = [(first + k) // length * length + index for k, index in enumerate(indices)]
    return indices[replica * share : (replica + 1) * share]


def sample_names(config: RunConfig, replica: int, step: int) -> list[str]:
    """Returns the names of a replica's images in a step, microbatch after microbatch."""
    source = open_data(config)
    return [source.name(sample) for sample in replica_samples(config, source, step, replica)]


def split_steps(order: Order, num_microbatches: int, steps: range) -> Iterator[list[int]]:
    """Yields the samples of each microbatch; those of a step have the same size."""
    for step in steps:
        samples = order(step)
        size, rest = divmod(len(samples), num_microbatches)
        assert rest == 0, f"{len(samples)} samples in {num_microbatches} microbatches"
        for k in range(num_microbatches):
            yield samples[k * size : (k + 1) * size]


def read_microbatches(
    parts: Iterable[list[int]],
    image: Target | None,
    target: Target | None,
    dtype: torch.dtype,
    empty: Callable[..., Tensor] | None = None,
) -> Iterator[Microbatch]:
    """Yields the microbatches of some samples each, of what ``image`` and ``target`` read.

    They lie on the host, in memory that ``empty`` allocates. Images are of the type ``dtype``,
    targets of fp32 at the least.
    """
    empty = empty or RankDevice().host_empty

    def stacked(samples: list[int], read: Target, dtype: torch.dtype) -> Tensor:
        first = read(samples[0])
        if isinstance(first, int):
            labels = torch.tensor([first, *map(read, samples[1:])])
            return empty(labels.shape, labels.dtype).copy_(labels)
        if first.ndim == 1:  # labels or numbers
            rows = np.stack([first, *map(read, samples[1:])])
            return empty(rows.shape, dtype).copy_(torch.from_numpy(rows))
        if first.ndim == 2:  # label maps
            maps = [torch.from_numpy(labels) for labels in (first, *map(read, samples[1:]))]
            return empty((len(maps), *first.shape), torch.int64).copy_(torch.stack(maps))
        shape = (len(samples), *first.shape)
        images = empty(shape, dtype, memory_format=torch.channels_last)
        images[0] = torch.from_numpy(first)
        for k, sample in enumerate(samples[1:], start=1):
            images[k] = torch.from_numpy(read(sample))
        return images

    wide = torch.promote_types(dtype, torch.float32)
    for samples in parts:
        images = None if image is None else stacked(samples, image, dtype)
        yield Microbatch(images, None if target is None else stacked(samples, target, wide))
