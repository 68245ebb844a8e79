"""Metrics of images, from -2 (black) to 2 (white)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hires.core.evaluation_summary import IMAGES, METRICS, SampleMetric

if TYPE_CHECKING:
    from torch import Tensor

PEAK = 4.0
"""From black to white."""
WINDOW = 11
"""Rows and columns of a window of SSIM."""
_SIGMA = 1.5
_SMALL = (0.01**2, 0.03**2)
"""Keep quotients finite; of values from 0 to 1."""
_SIDE = 256
"""Windows of a block, down and across: an image of any size takes a few MiB beside its own."""


@METRICS.register("psnr")
class Psnr(SampleMetric):
    """The peak signal-to-noise ratio, in dB; infinite without error."""

    outputs, title, unit, digits = (IMAGES,), "PSNR", "dB", 3

    @classmethod
    def count(cls, output: Tensor, target: Tensor) -> float:
        """Returns the sum of squared errors."""
        return math.fsum(map(_error_sum, output, target))  # of one channel at a time

    @classmethod
    def of_sample(cls, total: float, shape: Sequence[int]) -> float:
        """Returns the ratio of an image."""
        return 10 * math.log10(PEAK**2 * math.prod(shape) / total) if total else math.inf


@METRICS.register("ssim")
class Ssim(SampleMetric):
    """The structural similarity, over all windows that lie inside of the image.

    Source:
        Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to
        structural similarity", IEEE Transactions on Image Processing, 2004.
    """

    outputs, title = (IMAGES,), "SSIM"
    reach = WINDOW // 2

    @classmethod
    def fits(cls, shape: Sequence[int]) -> bool:
        """Whether a window lies inside of the image."""
        return min(shape[2:]) >= WINDOW

    @classmethod
    def count(cls, output: Tensor, target: Tensor) -> float:
        """Returns the sum over all windows inside, and over channels; NaN if not finite."""
        rows, cols = (length - 2 * cls.reach for length in output.shape[1:])
        sums = []
        for x, y in zip(output, target, strict=True):
            for row in range(0, rows, _SIDE):
                for col in range(0, cols, _SIDE):
                    ends = row + _SIDE + 2 * cls.reach, col + _SIDE + 2 * cls.reach
                    at = slice(row, ends[0]), slice(col, ends[1])
                    sums.append(_block_sum(x[at], y[at]))
        return math.fsum(sums)

    @classmethod
    def of_sample(cls, total: float, shape: Sequence[int]) -> float:
        """Returns the mean over windows and channels."""
        channels, *size = shape
        return total / (channels * math.prod(length - WINDOW + 1 for length in size))


def _error_sum(made: Tensor, wanted: Tensor) -> float:
    error = made.clamp(-2, 2).sub_(wanted).double().square_()
    error.masked_fill_(~made.isfinite(), math.nan)  # infinity is no white
    return float(error.sum())


def _block_sum(made: Tensor, wanted: Tensor) -> float:
    # The sum over the windows inside of a block, (h, w), whose copies are all the memory it takes.
    x, y = (one.clamp(-2, 2).double().add_(2).div_(4) for one in (made, wanted))
    x.masked_fill_(~made.isfinite(), math.nan)
    mean_x, mean_y = _weighted(x), _weighted(y)
    common = _weighted(x * y).sub_(mean_x * mean_y)
    squares = mean_x.square().add_(mean_y.square())
    spread = _weighted(x.square_().add_(y.square_())).sub_(squares)
    first, second = _SMALL
    above = mean_x.mul_(mean_y).mul_(2).add_(first).mul_(common.mul_(2).add_(second))
    return float(above.div_(squares.add_(first).mul_(spread.add_(second))).sum())


def _weighted(values: Tensor) -> Tensor:
    # (h, w) -> the Gaussian mean of each window, (h - 10, w - 10), tap by tap.
    places = range(-(WINDOW // 2), WINDOW // 2 + 1)
    weights = [math.exp(-(at**2) / (2 * _SIGMA**2)) for at in places]
    total = math.fsum(weights)
    for dim in (0, 1):
        length = values.shape[dim] - WINDOW + 1
        made = values.narrow(dim, 0, length) * (weights[0] / total)
        for k in range(1, WINDOW):
            made.add_(values.narrow(dim, k, length), alpha=weights[k] / total)
        values = made
    return values
