"""Convolutions of 8 bits are the same bits however they are computed, and oneDNN computes them."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hires.quant import int8_kernels
from hires.quant.int8_kernels import Added, Geometry, Rescale, Rescaling, convolve_int8

NEEDS_VNNI = pytest.mark.skipif(
    not int8_kernels.has_exact_sums(), reason="this CPU sums products of 8 bits in 16"
)


class Case:
    """A random convolution."""

    def __init__(self, drawn: random.Random) -> None:
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
        self.weight = torch.randint(-127, 128, share, dtype=torch.int8)
        self.border = drawn.choice([0, 0, 128, drawn.randint(1, 255)])
        sums = torch.conv2d(self.padded().double(), self.weight.double(), None, *self._unpadded())
        self.sums = sums
        factor = (torch.rand(outputs) + 0.1) * 100 / float(sums.abs().max().clamp_min(1))
        offset = torch.randn(outputs) * 20 + drawn.randint(0, 255)
        dtype = drawn.choice([torch.uint8, torch.uint8, torch.float32])
        low = drawn.choice([0, 0, 30])
        self.rescale = Rescale(factor, offset, low, 255 - low, dtype)
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


def cases(count: int, seed: int = 0) -> list[Case]:
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    return [Case(drawn) for _ in range(count)]


def test_every_shape_has_the_bits_of_the_definition():
    for case in cases(600):
        before = None if case.added is None else case.added.numbers.clone()
        assert torch.equal(case.computed(), case.expected()), str(case)
        if case.added is not None and before is not None:
            assert torch.equal(case.added.numbers, before), "what is added was overwritten"


def test_any_window_has_the_bits_of_the_whole():
    """Rows, columns and rectangles of the output, from windows whose border was copied."""
    drawn = random.Random(1)
    for case in cases(300, seed=1):
        whole, (rows, columns) = case.computed(), case.how.stride
        r0, c0 = (drawn.randrange(size) for size in whole.shape[2:])
        r1 = drawn.randint(r0 + 1, whole.shape[2])
        c1 = drawn.randint(c0 + 1, whole.shape[3])
        window = case.padded()[:, :, r0 * rows : (r1 - 1) * rows + case.reach[0]]
        window = window[:, :, :, c0 * columns : (c1 - 1) * columns + case.reach[1]]
        added = case.added
        if added is not None:
            added = added._replace(numbers=added.numbers[:, :, r0:r1, c0:c1])
        how = case.how._replace(padding=(0, 0))
        part = convolve_int8(window, case.weight, how, case.rescale, added=added)
        assert torch.equal(part, whole[:, :, r0:r1, c0:c1]), str(case)


def test_processors_that_saturate_compute_the_same_bits(monkeypatch):
    monkeypatch.setattr(int8_kernels, "has_exact_sums", lambda: False)
    for case in cases(150, seed=2):
        assert torch.equal(case.computed(), case.expected()), str(case)


@NEEDS_VNNI
def test_kernels_of_onednn_compute():
    """What ``by_onednn`` promises: the profiler lists its kernel of 8 bits, and no other one."""
    drawn = random.Random(3)
    torch.manual_seed(3)
    case = Case(drawn)
    with torch.profiler.profile() as profile:
        case.computed()
        Rescaling(case.x.shape[1], 0.5, 3.0)(case.x, 0, 255)
    names = {event.key for event in profile.key_averages()}
    assert any(name.startswith("onednn::qconv2d_pointwise") for name in names), names
    assert names.isdisjoint({"aten::conv2d", "aten::convolution", "aten::mkldnn_convolution"})


@pytest.mark.parametrize("shape", [(2, 5, 7, 3), (3, 10), (2, 4, 6), (1, 1, 1, 1)])
def test_other_scales_of_numbers_of_any_dims(shape):
    x, other = (torch.randint(0, 256, shape, dtype=torch.uint8) for _ in "ab")
    channels = shape[1] if len(shape) == 4 else shape[-1]
    made = Rescaling(channels, 0.7, 12.0)(x, 3, 200, Added(other, 0.25))
    exact = x.float() * torch.tensor(0.7) + 12.0
    exact = (other.double() * 0.25 + exact.double()).float()
    assert torch.equal(made, exact.round().clamp(3, 200).to(torch.uint8))


@pytest.mark.parametrize("other", [(3, 17, 1, 1), (3, 17, 6, 5), (3, 1, 6, 5), (1, 17, 1, 1)])
def test_products_and_sums_of_any_operands(other):
    x = torch.randint(0, 256, (3, 17, 6, 5), dtype=torch.uint8)
    for rows in (x, x.contiguous(memory_format=torch.channels_last)[:, :, 1:, :4], x[:, :, :0]):
        size = [b if b == 1 else a for a, b in zip(rows.shape, other, strict=True)]
        factor, offset = torch.randn(size) * 2, torch.randn(size) * 100
        made = int8_kernels.multiply_add_int8(rows, factor, offset)
        assert torch.equal(made, (rows * factor + offset).round().clamp(0, 255).to(torch.uint8))


def test_weights_that_change_are_packed_again():
    case = cases(1, seed=5)[0]
    case.computed()
    with torch.no_grad():
        case.weight.neg_()
    again = Case.__new__(Case)
    again.__dict__ = {**case.__dict__, "weight": case.weight.clone()}
    assert torch.equal(case.computed(), again.computed())
