"""Measures the memory of this process, and how much a step of it needs.

The resident size of a process misleads: it counts the libraries' pages, which all ranks of a
machine share, and freed memory that the allocator keeps, a third of the peak for small tensors.
:class:`PeakMeter` measures one step of the warm-up with an allocator that gives everything of
64 KiB and more back at once, and counts the process's own pages only, as a GPU's allocator counts
what is allocated and not what it has reserved.

    step        0 (warm-up)   1 (last of the warm-up)   2   3   4 ...
    allocator   exact         exact: measured           keeps what is freed: fast

Kept memory has gaps: a process grew by 2 to 27 % more than the peak that was measured. Blocks above
32 MiB, whose pages cost the most to clear again, are kept only where the ranks of the node have
room for half as much again. Maps of bands have so many sizes that gaps may double the memory: of
these nothing is kept unless there is room for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from hires.core.config.run_config import RunConfig
from hires.core.units import parse_size
from hires.engine.device import RankDevice
from hires.engine.optimizer import Optimizer
from hires.parallel.torch_faults import convolve, convolve_backward
from hires.plan.hardware import ranks_of_node
from hires.plan.memory import free_bytes
from hires.quant.int8_kernels import Geometry, has_exact_sums

EXACT_BYTES = 2**16
"""From this size on memory comes straight from the system, and goes back when it is freed."""
LARGEST_THRESHOLD = 2**25
"""The largest such size that glibc takes."""
KEPT_BYTES = 2**31 - 1
"""Freed memory that the process keeps. A step allocates what the last one freed; if that went back
in between, the system would have to clear every page again: for maps above 32 MiB a sixth of the
time of a step (U-Net, eight images of 256x256, fp32)."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # numbers of glibc's malloc.h
_BLOCKS = 65536
"""Blocks that come straight from the system at most: glibc's default."""


class PeakMeter:
    """Measures the peak of one rank; made as soon as everything is imported.

    Source of ``peak_bytes``: ``device`` (what an accelerator's allocator gave out at most),
    ``step`` (own pages in one step of the warm-up above those after the imports) or ``rss`` (the
    largest resident size above that after the imports: the warm-up is too short, or the allocator
    is not glibc).
    """

    def __init__(self, config: RunConfig, device: RankDevice | None = None) -> None:
        self._device = device or RankDevice()
        self._device.reset_peak()
        # The last step of the warm-up, if the optimiser's state is there by then.
        enough = 2 if config.task.name == "train" else 1
        measures = config.measure.warmup >= enough and not self._device.memory()
        self._in_bands = config.parallel.band_rows is not None
        exact = measures or self._in_bands
        exact = exact and _set_allocator(EXACT_BYTES, 2 * EXACT_BYTES)
        if not exact:
            keep_memory(large=False)
        self._ranks, self._limit = ranks_of_node(config), parse_size(config.memory.limit)
        self.step = config.measure.warmup - 1 if exact and measures else None
        """The step that is measured, from the first of the attempt; None if none is."""
        load_lazy_parts()
        self.rss_import = _status("VmRSS")
        # What the rank itself has filled, and no file backs.
        self._own_import = _status("RssAnon") + _status("RssShmem")
        self._peak_rss = 0
        self._own_peak: int | None = None
        _reset_peak()

    @contextlib.contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Measures what runs inside if it is the chosen step; then the allocator becomes fast."""
        if step != self.step:
            yield
            return
        gc.collect()
        self._peak_rss = _status("VmHWM")
        _reset_peak()
        yield
        self._own_peak = _status("VmHWM") - _status("RssFile")
        # All ranks of the node come here at the same time, with what they keep for good.
        room, free = 2.0 if self._in_bands else 1.5, free_bytes()
        rank_bytes = round(room * (self._own_peak - self._own_import))
        fits = self._limit is None or rank_bytes <= self._limit
        fits = fits and free is not None and self._ranks * rank_bytes < free
        if fits or not self._in_bands:
            keep_memory(large=fits)

    def end_start(self) -> int:
        """Returns the peak of the rank before its first step; the steps have one of their own."""
        if memory := self._device.memory():
            self._device.reset_peak()
            return int(memory["peak_bytes"])
        if self.step is None:
            return max(0, _status("VmHWM") - self.rss_import)
        return max(0, _status("VmHWM") - _status("RssFile") - self._own_import)

    def line(self) -> dict[str, int | str]:
        """Returns the peak as the record holds it."""
        peak_rss = max(self._peak_rss, _status("VmHWM"))
        if memory := self._device.memory():
            return {**memory, "source": "device", "peak_rss_bytes": peak_rss}
        peak, source = peak_rss - self.rss_import, "rss"
        if self._own_peak is not None:
            peak, source = self._own_peak - self._own_import, "step"
        return {"peak_bytes": max(0, peak), "source": source, "peak_rss_bytes": peak_rss}


def keep_memory(large: bool = True) -> None:
    """Makes this process keep the memory that it frees; ``large``: also blocks above 32 MiB."""
    _set_allocator(None if large else LARGEST_THRESHOLD, KEPT_BYTES)


def load_lazy_parts() -> None:
    """Takes one step of a tiny network, so that what torch loads on first use is loaded."""
    # Without autograd: the first backward pass of a process starts a thread for each accelerator,
    # and processes that are forked from this one have none, and cannot start theirs.
    weight = nn.Parameter(torch.ones(8, 8, 1, 1))
    optimizer = Optimizer([weight], torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True})
    images = torch.ones(1, 8, 8, 8).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        how = Geometry()
        made = convolve(images, weight, None, how)
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            place = [0, 0], [1, 1], [1, 1], 1, [*images.shape]
            torch.ops.mkldnn._reorder_convolution_weight(weight.detach(), *place)
        has_exact_sums()
        grads = convolve_backward(made, images, weight, how, [True, True, False])
    weight.grad = grads[1]
    optimizer.step()
    # backward() with a given gradient, as in a pipeline, imports 30 MiB of sympy from there.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    np.random.default_rng()


def _reset_peak() -> None:
    with contextlib.suppress(OSError):  # where the kernel does not allow it, the old peak stands
        Path("/proc/self/clear_refs").write_text("5")


def _set_allocator(system_bytes: int | None, kept_bytes: int) -> bool:
    # From ``system_bytes`` on memory comes straight from the system (None: never); up to
    # ``kept_bytes`` of freed memory at the end of the heap are not given back. False if the
    # allocator is not glibc's.
    try:
        library = ctypes.CDLL("libc.so.6")
        set_option, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return False
    done = set_option(_MMAP_THRESHOLD, system_bytes or LARGEST_THRESHOLD)
    done = done and set_option(_MMAP_MAX, 0 if system_bytes is None else _BLOCKS)
    done = done and set_option(_TRIM_THRESHOLD, kept_bytes)
    trim(0)
    return bool(done)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
