"""Random int8 convolutions, and what they are by definition."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor

from hires.quant.int8_kernels import Added, Geometry, Rescale, convolve_int8


class Case:
    """A random convolution."""

    def __init__(self, drawn: random.Random, largest: int = 127) -> None:
        kind = drawn.choice(["plain", "plain", "1x1", "depthwise", "grouped", "dilated", "row"])
        kernel = [drawn.choice([1, 2, 3, 3, 5, 7]) for _ in "rc"]
        kernel = {"1x1": [1, 1], "row": drawn.choice([[1, 7], [7, 1]])}.get(kind, kernel)
        channels, outputs = drawn.choice([1, 3, 8, 17, 64]), drawn.choice([1, 8, 10, 33, 64])
        groups = channels if kind == "depthwise" else drawn.choice([2, 4])
        groups = groups if kind in ("depthwise", "grouped") else 1
        channels, outputs = (
            (channels, channels) if kind == "depthwise" else (groups * channels, groups * outputs)
        )
        dilation = [drawn.choice([1, 2, 3]) if kind == "dilated" else 1 for _ in "rc"]
        self.reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        padding = [drawn.randint(0, reach - 1) for reach in self.reach]
        least = [max(1, r - 2 * p) for r, p in zip(self.reach, padding, strict=True)]
        size = [low + drawn.choice([0, 1, 2, 5, 12]) for low in least]
        stride = [drawn.choice([1, 1, 2, 3]) for _ in "rc"]
        self.how = Geometry(stride, padding, dilation, groups)
        shape = (drawn.choice([1, 2]), channels, *size)
        self.x = torch.randint(0, 256, shape, dtype=torch.uint8)
        self.x = self.x.contiguous(memory_format=torch.channels_last)
        share = outputs, channels // groups, *kernel
        self.weight = torch.randint(-largest, largest + 1, share, dtype=torch.int8)
        self.border = drawn.choice([0, 0, 128, drawn.randint(1, 255)])
        sums = torch.conv2d(self.padded().double(), self.weight.double(), None, *self._unpadded())
        self.sums = sums
        factor = (torch.rand(outputs) + 0.1) * 100 / float(sums.abs().max().clamp_min(1))
        offset = torch.randn(outputs) * 20 + drawn.randint(0, 255)
        dtype = drawn.choice([torch.uint8, torch.uint8, torch.float32])
        low = drawn.choice([0, 0, 30])
        self.rescale = Rescale(factor, offset, low, 255 - low, dtype, largest)
        self.added: Added | None = None
        if dtype == torch.uint8 and drawn.random() < 0.5:
            numbers = torch.randint(0, 256, sums.shape, dtype=torch.uint8)
            self.added = Added(numbers, drawn.choice([1.0, drawn.random()]))

    def padded(self) -> Tensor:
        rows, columns = self.how.padding
        return F.pad(self.x, (columns, columns, rows, rows), value=self.border)

    def _unpadded(self) -> tuple[object, ...]:
        return self.how.stride, 0, self.how.dilation, self.how.groups

    def computed(self) -> Tensor:
        return convolve_int8(
            self.x, self.weight, self.how, self.rescale, self.border, added=self.added
        )

    def __str__(self) -> str:
        shapes = tuple(self.x.shape), tuple(self.weight.shape)
        return f"{shapes} {self.how} border {self.border} {self.rescale[2:]}"

    def expected(self) -> Tensor:
        """In float64, in which every sum is exact, with the roundings of the definition."""
        y = self.sums.float() * self.rescale.multiplier.view(1, -1, 1, 1)
        y = y + self.rescale.offset.view(1, -1, 1, 1)
        if self.added is not None:
            factor = torch.tensor(self.added.factor).double()
            y = (self.added.numbers.double() * factor + y.double()).float()
        if self.rescale.dtype == torch.float32:
            return y
        return y.round().clamp(self.rescale.low, self.rescale.high).to(torch.uint8)


def cases(count: int, seed: int = 0, largest: int = 127) -> list[Case]:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    return [Case(drawn, largest) for _ in range(count)]


def rows_by_definition(
    x: Tensor, weight: Tensor, multiplier: Tensor, offset: Tensor, bias: Tensor | None
) -> Tensor:
    """Returns what ``multiply_rows`` makes, in float64 with the roundings of its definition.

    An operation on numbers of fp32 that is rounded from float64 is rounded as fp32 rounds it.
    """

    def single(y: Tensor) -> Tensor:
        return y.float().double()

    known = torch.where(x.isfinite(), x, 0.0).double()
    low, high = known.amin(-1, keepdim=True), known.amax(-1, keepdim=True)
    low, high = torch.minimum(low, low * 0), torch.maximum(high, high * 0)
    scale = single(single(high / 255) - single(low / 255))
    empty = scale < 2.0**-126
    scale = torch.where(empty, 1.0, scale)
    factor = single(1 / scale)
    zero_point = single(-low * factor).round().clamp(0, 255)
    zero_point = torch.where(empty, 0.0, zero_point)
    numbers = single(single(x.double() * factor) + zero_point).round().clamp(0, 255)
    numbers = torch.where(x.isnan(), 0.0, numbers)
    sums = numbers @ weight[:, :, 0, 0].double().t()
    y = single(single(sums) * multiplier.double())
    y = single(y + single(zero_point * offset.double()))
    y = single(y * scale)
    y = y if bias is None else single(y + bias.double())
    return y.float()
