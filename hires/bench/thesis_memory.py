"""Predicts the memory that the thesis publishes, in several readings of each figure.

A reading is either a plan of hires, or MPI4DL's own code: its blocks as Python executes them, which
frees a map when the last name for it is gone, replayed on a simulation of torch's allocator.

    x ──▶ norm ──▶ ReLU ──▶ conv 3x3, to a quarter of the channels ──▶ ... ──▶ conv 1x1 ──▶ + x
    alive: x, norm, ReLU    x, ReLU, [ReLU with its halo], output, [workspace]      x, y, x + y

The thesis measured with nvidia-smi, so all that the allocator reserves counts, and CUDA's context.

Source:
    ``src/models/resnet.py``, ``src/torchgems/spatial.py`` and ``src/torchgems/utils.py`` of MPI4DL
    (github.com/OSU-Nowlab/MPI4DL).
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from typing import Any

from hires.bench.contestants import bench_data
from hires.bench.thesis import LAYOUTS, NETWORKS, planned, with_published
from hires.engine.caching_allocator import Block, CachingAllocator
from hires.engine.footprint import footprint
from hires.nets.mpi4dl_resnet import STEM
from hires.plan.event import BYTES
from hires.plan.gpu_memory import CONTEXT_BYTES

_DATA = bench_data("thesis.yaml")
FIGURES = [with_published(row, LAYOUTS) for row in _DATA["memory"]]
"""What is published, in GB, and the readings of each figure."""
RATIOS = [with_published(row, LAYOUTS) for row in _DATA["memory_ratios"]]
"""The same of ratios between two precisions."""
MEANING: str = _DATA["memory_meaning"]
RATIOS_MEANING: str = _DATA["memory_ratios_meaning"]
"""How to read the tables."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
CUDNN_NUMBERS = 2**31
"""Numbers of one image's map from which on torch left convolutions to its own kernels, which write
every window as a column, until cuDNN 9.3 (``ConvParams::use_cudnn`` of Convolution.cpp)."""


def predict_memory(figure: dict[str, Any]) -> dict[str, Any]:
    """Returns a figure with what each of its readings predicts.

    It is GB, or with ``base_precision`` the ratio of that precision's memory to that of the
    figure's own, the mean over its ``images``.
    """
    readings = []
    for reading in figure["readings"]:
        parallel = _layout(reading)["parallel"]
        # A stage that is not in tiles is one GPU more.
        gpus = math.prod(parallel["tiles"]) + parallel.get("stages", 1) - 1
        found = {**reading, "gpus": gpus}
        if base := figure.get("base_precision"):
            cases = [{**figure, "image": image} for image in figure["images"]]
            found["predicted"] = statistics.mean(
                _bytes({**case, "precision": base}, reading, gpus) / _bytes(case, reading, gpus)
                for case in cases
            )
        else:
            found["predicted_gb"] = _bytes(figure, reading, gpus) / 1e9
        readings.append(found)
    return {**figure, "readings": readings}


def _layout(reading: dict[str, Any]) -> dict[str, Any]:
    """Returns the layout that a reading names, or else square tiles on its GPUs."""
    if "layout" in reading:
        return LAYOUTS[reading["layout"]]
    gpus = reading.get("gpus", 1)
    side = round(gpus**0.5)
    return {"parallel": {"tiles": [side, gpus // side]}}


def _bytes(figure: dict[str, Any], reading: dict[str, Any], gpus: int) -> float:
    """Returns the bytes of all GPUs of a reading, each with ``fixed_gb`` for CUDA's context."""
    sizes = (figure["precision"], figure["image"], figure["batch"])
    if reading["by"] == "plan":
        each = _planned(json.dumps(_layout(reading)), gpus, *sizes)
    else:
        each = (_replayed(figure, reading),)
    total: float = sum(each) * (gpus // len(each))
    if "fixed_gb" in reading:
        total += gpus * (reading["fixed_gb"] * 1e9 - CONTEXT_BYTES)
    return total


@functools.cache
def _planned(layout: str, gpus: int, precision: str, image: int, batch: int) -> tuple[int, ...]:
    """Returns the bytes of each GPU in hires in a layout (JSON); gloo as MPI uses the host."""
    config, plan = planned(
        json.loads(layout), "infer", precision,
        model=NETWORKS["resnet"], image=image, batch=batch,
        device="cuda", cluster={"gpus": gpus}, comm={"backend": "gloo"},
    )  # fmt: skip
    return tuple(rank.device_bytes for rank in footprint(config, plan))


def _replayed(figure: dict[str, Any], reading: dict[str, Any]) -> int:
    """Returns the bytes of one GPU under MPI4DL's own code."""
    side = figure["image"] // round(reading.get("gpus", 1) ** 0.5)
    numbers = figure["batch"] * BYTES[DTYPES[figure["precision"]]]
    replay = Replay(numbers, reading.get("gpus", 1) > 1, reading.get("workspace"))
    replay.network(side, NETWORKS["resnet"]["n"])
    return replay.allocator.reserved + CONTEXT_BYTES


class Replay:
    """Allocates and frees the maps of a forward pass; ``pixel_bytes`` are those of one channel.

    ``padded``: every 3x3 convolution reads a copy of its input with its halo. ``workspace``: what
    a convolution holds while it runs, ``copies`` of its input and output in another order of
    dimensions, or ``columns`` of all its windows.
    """

    def __init__(self, pixel_bytes: int, padded: bool = False, workspace: str | None = None):
        self.allocator = CachingAllocator()
        self.peak_bytes = 0
        """Of the maps alone."""
        self._pixel_bytes, self._padded, self._workspace = pixel_bytes, padded, workspace

    def network(self, side: int, n: int) -> None:
        """Runs the network of depth 9n+2 on a square image, up to its last map."""
        self._map(3, side)
        x = self._activated(STEM, side, self._conv(3, STEM, side))
        width_in = inner = STEM
        for group in range(3):
            width = inner * (4 if group == 0 else 2)
            for index in range(n):
                stride = 2 if group > 0 and index == 0 else 1
                x = self._block(x, (width_in, inner, width), side, stride, group + index > 0)
                side, width_in = side // stride, width
            inner = width

    def _block(
        self, x: Block, widths: tuple[int, int, int], side: int, stride: int, normed: bool
    ) -> Block:
        width_in, inner, width = widths
        begins, inside = width_in != width, side // stride  # the first of a group projects x
        y = self._activated(width_in, side) if normed else None
        made = self._conv(width_in, inner, side, stride=stride)
        if y is not None:
            self.allocator.free(y)
        for out, kernel in ((inner, 3), (width, 1)):
            y, before = self._activated(inner, inside), made
            made = self._conv(inner, out, inside, kernel)
            self.allocator.free(y)
            self.allocator.free(before)
        shortcut = self._conv(width_in, width, side, 1, stride) if begins else None
        total = self._map(width, inside)
        for block in filter(None, (shortcut, made, x)):
            self.allocator.free(block)
        return total

    def _activated(self, width: int, side: int, given: Block | None = None) -> Block:
        """Returns the map behind a norm and a ReLU; ``given`` has no other reader."""
        normed = self._map(width, side)
        if given is not None:
            self.allocator.free(given)
        made = self._map(width, side)
        self.allocator.free(normed)
        return made

    def _conv(
        self, width_in: int, width: int, side: int, kernel: int = 3, stride: int = 1
    ) -> Block:
        held, inside = [], side // stride
        if self._padded and kernel > 1:
            held.append(self._map(width_in, side + kernel - 1))
        made = self._map(width, inside)
        if self._workspace == "copies":
            held.append(self._allocate(width_in * side**2 + width * inside**2))
        elif self._workspace == "columns" and kernel > 1:
            held.append(self._map(width_in * kernel**2, inside))
        for block in held:
            self.allocator.free(block)
        return made

    def _map(self, width: int, side: int) -> Block:
        return self._allocate(width * side**2)

    def _allocate(self, numbers: int) -> Block:
        block = self.allocator.allocate(numbers * self._pixel_bytes)
        self.peak_bytes = max(self.peak_bytes, self.allocator.allocated)
        return block
