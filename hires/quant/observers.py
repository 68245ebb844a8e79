"""Observes the elements of a value over calibration images, and derives its range.

What is kept of a value merges exactly, by minima, maxima and sums of integers, so that ranges are
the same however images were divided over tiles, shards, replicas and stages:

    image      0     1     2           level 1: bins of 2 / 4        0 1 0 2 | 3 1 1 0
    low     -0.3  -0.1  -0.7                                        -2       0       2
    high     1.2   0.9   1.5           level 2: bins of 4 / 4        0 0 1 2 | 4 1 0 0
                                                                    -4       0       4
The histogram needs no pass of its own to find its range: bins are powers of two wide and begin at
0, so two neighbours become one bin of twice the width when an element beyond the last one comes,
and the counts are those that the wide bins would have had from the first image on.

Source:
    entropy: Migacz, "8-bit inference with TensorRT", GTC 2017, as in ONNX Runtime's calibrate.py;
    moving_average: Jacob et al., CVPR 2018, section 3.1, for each image in place of each batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HALF = 2**13
"""Bins on either side of 0, of which the largest element lies in the outer half."""
LEAST_LEVEL = -100
"""Elements below 2 ** -100 count as 0: their scale would not be a normal number of float32."""
AVERAGING = 0.01
"""Weight of each further image in ``moving_average``, torch's default for batches."""
ENTROPY_BINS = 2**11
"""Bins on either side of 0 that ``entropy`` compares, as TensorRT does."""
MOST_CLIPPED = 0.05
"""Share of the elements besides 0 that ``entropy`` may clip."""
_THRESHOLDS = 128
_LEVELS = 256
PIECE = 2**20
"""Elements that are looked at once: their bins take 8 bytes each."""

WITH_COUNTS = ("entropy", "percentile")
"""Observers that need a histogram."""
Counts = NDArray[np.int64]


class Observed:
    """What was seen of a value: the range of each image and, ``counting``, a histogram.

    The range of an image with a NaN or an infinite element is that of all numbers.
    """

    def __init__(self, num_images: int, counting: bool) -> None:
        self.lows = torch.full((num_images,), math.inf, dtype=torch.float64)
        self.highs = -self.lows
        self.level = LEAST_LEVEL  # all elements lie within 2 ** level
        self.counts = torch.zeros(2 * HALF, dtype=torch.int64) if counting else None

    def add(self, part: Tensor, first: int) -> None:
        """Adds part of a value, (n, ...), for the images from ``first`` on; others do not count."""
        rows = _rows(part.detach()[: max(0, len(self.lows) - first)])
        if not rows.numel():
            return
        low, high = (end.to("cpu", torch.float64) for end in rows.aminmax(dim=1))
        broken = ~(low.isfinite() & high.isfinite())
        low, high = low.masked_fill(broken, -math.inf), high.masked_fill(broken, math.inf)
        own = slice(first, first + len(rows))
        self.lows[own] = torch.minimum(self.lows[own], low)
        self.highs[own] = torch.maximum(self.highs[own], high)
        if self.counts is not None and not bool(broken.any()):
            self.raise_to(_level(max(-float(low.min()), float(high.max()))))
            for piece in torch.split(rows.flatten(), PIECE):
                counts = torch.bincount(_bins(piece, self.level), minlength=2 * HALF)
                self.counts += counts.cpu()

    def raise_to(self, level: int) -> None:
        """Widens the bins until they reach as far as 2 ** ``level``."""
        if level <= self.level or self.counts is None:
            return
        bins = torch.arange(-HALF, HALF) >> min(level - self.level, 62)
        self.counts = torch.zeros_like(self.counts).index_add_(0, bins + HALF, self.counts)
        self.level = level

    def range(self, observer: str, percentile: float) -> tuple[float, float]:
        """Returns the range that an observer chooses; ValueError: nan, infinite, or nothing seen.

        It lies within that of the elements, and may be a single number.
        """
        broken = int((self.lows == -math.inf).sum())
        if broken:
            has = "image has" if broken == 1 else "images have"
            raise ValueError(f"{broken} {has} NaN or infinite elements there")
        if not bool((self.lows <= self.highs).all()):
            seen = int((self.lows <= self.highs).sum())
            raise ValueError(f"{seen} of {len(self.lows)} images were seen there")
        low, high = float(self.lows.min()), float(self.highs.max())
        if observer == "moving_average":
            return _average(self.lows.tolist()), _average(self.highs.tolist())
        if observer == "min_max" or low == high:
            return low, high
        assert self.counts is not None
        width = math.ldexp(1.0, self.level) / HALF
        if observer == "percentile":
            ends = percentile_range(self.counts.numpy(), width, percentile)
        else:
            ends = entropy_range(self.counts.numpy(), width, low, high)
        return max(low, ends[0]), min(high, ends[1])


def num_bytes(num_images: int, counting: bool) -> int:
    """Returns the bytes that one :class:`Observed` keeps."""
    return 16 * num_images + (16 * HALF if counting else 0)


def scratch(part: Tensor, counting: bool) -> None:
    """Allocates what :meth:`Observed.add` does meanwhile, and looks at no number."""
    rows = _rows(part.detach())
    if counting:
        _bins(rows.flatten()[:PIECE], 0)


def reduce_all(
    observed: Mapping[str, Observed], names: Sequence[str], reduce: Callable[[Tensor, str], Any]
) -> None:
    """Merges what all ranks have seen; each has all ``names``, and sees a part of some of them.

    ``reduce`` takes a tensor and ``min``, ``max`` or ``sum``, and replaces it by that of all ranks.
    """
    all_of = [observed[name] for name in names]
    levels = torch.tensor([one.level for one in all_of], dtype=torch.int64)
    ends = [torch.stack([getattr(one, end) for one in all_of]) for end in ("lows", "highs")]
    for tensor, how in zip((*ends, levels), ("min", "max", "max"), strict=True):
        reduce(tensor, how)
    for k, one in enumerate(all_of):
        one.lows, one.highs = ends[0][k], ends[1][k]
        one.raise_to(int(levels[k]))
        if one.counts is not None:  # one by one: those of a whole network take 100 MB
            reduce(one.counts, "sum")


def percentile_range(counts: Counts, width: float, percentile: float) -> tuple[float, float]:
    """Returns a range with this percentage of the elements, cut equally on both sides.

    ``counts`` are those of bins as wide as ``width``, half of them below 0.
    """
    total = int(counts.sum())
    cut = max(1.0, total * (100 - percentile) / 200)
    first = int(np.searchsorted(np.cumsum(counts), cut))
    last = int(np.searchsorted(np.cumsum(counts[::-1]), cut))
    half = len(counts) // 2
    return (first - half) * width, (half - last) * width


def entropy_range(counts: Counts, width: float, low: float, high: float) -> tuple[float, float]:
    """Returns the range whose 256 integers lose least information of what lies in [low, high].

    Of the ranges [-t, t], within [low, high], it is the one with the smallest divergence of the
    quantised distribution from the clipped one (Kullback and Leibler).
    """
    half, low, high = len(counts) // 2, min(low, 0.0), max(high, 0.0)  # a range holds 0
    while max(-low, high) / width > ENTROPY_BINS:
        counts, width = counts.reshape(-1, 2).sum(1), 2 * width
        half //= 2
    bins = counts.astype(np.float64)
    # Zeros, perhaps most elements behind a ReLU, cost nothing in any range: they would hide the
    # others, so their bin counts as its neighbour does (as in NVIDIA's pytorch-quantization).
    bins[half] = min(bins[half], bins[half + 1])
    first, last = math.floor(low / width) + half, math.floor(high / width) + half + 1
    furthest = max(half - first, last - half)
    begin = min(_LEVELS // 2, furthest)
    chosen, least = furthest, math.inf
    total = bins.sum()
    for t in np.unique(np.linspace(begin, furthest, _THRESHOLDS).round().astype(int))[::-1]:
        ends = max(first, half - t), min(last, half + t)
        if total - bins[slice(*ends)].sum() > MOST_CLIPPED * total:
            break  # narrower ones clip more: where all elements are equal, 0 distance means nothing
        loss = _divergence(bins, *ends)
        if loss < least:
            chosen, least = int(t), loss
    return -chosen * width, chosen * width


def _divergence(bins: NDArray[np.float64], first: int, last: int) -> float:
    # Of the elements in bins first to last, shared evenly by the filled bins of each of 256 groups,
    # from all elements, those outside in the outer bins.
    inner = bins[first:last]
    clipped = inner.copy()
    clipped[0] += bins[:first].sum()
    clipped[-1] += bins[last:].sum()
    starts = np.unique(np.linspace(0, len(inner), _LEVELS, endpoint=False).astype(int))
    filled = clipped > 0
    sizes = np.diff(np.append(starts, len(inner)))
    mean = np.add.reduceat(inner, starts) / np.maximum(
        np.add.reduceat(filled, starts, dtype=int), 1
    )
    shared = np.repeat(mean, sizes)[filled]
    own, total = clipped[filled], shared.sum()
    if not total:
        return math.inf
    p, q = own / own.sum(), np.maximum(shared / total, 1e-12)
    return float((p * np.log(p / q)).sum())


def _level(largest: float) -> int:
    # The least power of two above all elements.
    return max(math.frexp(largest)[1], LEAST_LEVEL) if largest > 0 else LEAST_LEVEL


def _bins(numbers: Tensor, level: int) -> Tensor:
    return (numbers * math.ldexp(HALF, -level)).floor_().to(torch.int64).add_(HALF)


def _rows(part: Tensor) -> Tensor:
    rows = part.flatten(1)
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _average(ends: list[float]) -> float:
    return functools.reduce(lambda mean, end: mean + AVERAGING * (end - mean), ends)
