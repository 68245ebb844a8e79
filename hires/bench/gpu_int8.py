"""Compares int8 on a GPU with that of the CPU, bit by bit: convolutions, and networks in tiles.

Convolutions are random: of all kernels' sizes, strides, paddings, dilations and groups, also of odd
channels; some add another map. Their sums are exact on both (:mod:`hires.quant.int8_kernels`).
"""

from __future__ import annotations

import random

import torch

from hires.bench.gpu_runs import FAMILIES, Runs
from hires.bench.gpu_tensorrt import INFERENCE, observed_scales
from hires.core.precisions import INT8
from hires.engine.device import to_host
from hires.quant.int8_kernels import Added, Geometry, Rescale, by_triton, convolve_int8

COUNT = 60
"""Convolutions that are compared: each compiles a kernel of its own."""
CHANNELS = (1, 3, 17, 32, 64, 128)
WORDS = (
    "c3:16/2 bn relu save avg c3:16 bn swish add max3 save c3:8 gate cat t2:16 bilinear border c1:8"
)
"""A network with pools, tables, sums, a concatenation and a transposed convolution."""


def same_numbers(device: str, count: int = COUNT) -> tuple[bool, str]:
    """Returns whether a device's convolutions have the bits of the CPU, and which kernels ran."""
    drawn = random.Random(0)
    torch.manual_seed(0)
    wrong, by = [], set()
    for _ in range(count):
        x, weight, how, rescale, border, added = _convolution(drawn)
        expected = convolve_int8(x, weight, how, rescale, border, added)
        there = x.to(device)
        factors = rescale._replace(
            multiplier=rescale.multiplier.to(device), offset=rescale.offset.to(device)
        )
        beside = None if added is None else added._replace(numbers=added.numbers.to(device))
        made = convolve_int8(there, weight.to(device), how, factors, border, beside)
        by.add("Triton" if by_triton(there) else "torch")
        if not torch.equal(to_host(made), expected):
            wrong.append(f"{tuple(x.shape)} with {tuple(weight.shape)}, {how}")
    kernels = f"{count} convolutions by {' and '.join(sorted(by))}"
    if wrong:
        return False, f"{len(wrong)} of {kernels} differ, first {wrong[0]}"
    return True, f"{kernels} are bitwise equal"


def same_network(runs: Runs, linear: str) -> tuple[bool, str]:
    """Returns whether a network in two tiles has the bits of the CPU, and by how much it differs.

    Halos carry 8-bit integers. ``linear`` is ``quant.linear``.
    """
    target, args = "hires.bench.calibration_nets:Chain", {"words": WORDS, "classes": 10}
    model = {"model": {"name": "custom", "target": target, "args": args, "classes": 10}}
    quant = {"scales": str(observed_scales(runs, model)), "linear": linear}
    keys = {"precision": {"name": INT8}, "quant": quant}
    return runs.verify(runs.config("int8", FAMILIES["sp"], INFERENCE, model, keys))


def _convolution(
    drawn: random.Random,
) -> tuple[torch.Tensor, torch.Tensor, Geometry, Rescale, int, Added | None]:
    channels, outputs = drawn.choice(CHANNELS), drawn.choice(CHANNELS)
    groups = drawn.choice([1, 1, 2, channels])
    share = 1 if groups == channels else channels
    if groups != channels:
        channels, outputs = channels * groups, outputs * groups
    else:
        outputs = channels
    taps, dilation, stride, padding = (
        [drawn.randint(low, high) for _ in "rc"] for low, high in ((1, 3), (1, 2), (1, 2), (0, 2))
    )
    sizes = [
        apart * (tap - 1) + 1 + drawn.randint(0, 20)
        for apart, tap in zip(dilation, taps, strict=True)
    ]
    x = torch.randint(0, 256, (2, channels, *sizes), dtype=torch.uint8)
    weight = torch.randint(-127, 128, (outputs, share, *taps), dtype=torch.int8)
    how = Geometry(stride, padding, dilation, groups)
    width = 120.0 / (150 * 70 * (share * taps[0] * taps[1]) ** 0.5)
    rescale = Rescale(
        torch.full((outputs,), width), torch.rand(outputs) * 255, drawn.choice([0, 30])
    )
    if drawn.random() < 0.5:
        return x, weight, how, rescale, drawn.randint(0, 255), None
    shape = convolve_int8(x, weight, how, rescale).shape
    numbers = torch.randint(0, 256, shape, dtype=torch.uint8)
    return x, weight, how, rescale, drawn.randint(0, 255), Added(numbers, drawn.random())
