"""Inception-BN (Ioffe and Szegedy 2015) with the widths of MXNet's examples.

The branches of each block are concatenated:

          +-- 1x1 ------------------+          +-- 1x1, 3x3/2 -------+
          +-- 1x1, 3x3 -------------+          +-- 1x1, 3x3, 3x3/2 --+
    x --> +-- 1x1, 3x3, 3x3 --------+ cat  x --+-- 3x3/2 max-pool ---+ cat
          +-- 3x3 pool, 1x1 --------+          halves the map

The branches of a block have no order among themselves. So an engine that runs a graph as its inputs
arrive may sum the gradients of two ranks in different orders; papers on that problem train this
network.

Source:
    Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing
    internal covariate shift", ICML 2015, Figure 5, with the widths and the biases of the network
    of MXNet's examples (symbols/inception-bn.py, for images above 28 pixels), 11.3 M parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.nets.build_network import NETS

Widths = tuple[int, ...]

BLOCKS: dict[str, tuple[Widths, Widths, Widths, str]] = {
    "3a": ((64,), (64, 64), (64, 96), "avg 32"),
    "3b": ((64,), (64, 96), (64, 96), "avg 64"),
    "3c": ((), (128, 160), (64, 96), "max"),
    "4a": ((224,), (64, 96), (96, 128), "avg 128"),
    "4b": ((192,), (96, 128), (96, 128), "avg 128"),
    "4c": ((160,), (128, 160), (128, 160), "avg 128"),
    "4d": ((96,), (128, 192), (160, 192), "avg 128"),
    "4e": ((), (128, 192), (192, 256), "max"),
    "5a": ((352,), (192, 320), (160, 224), "avg 128"),
    "5b": ((352,), (192, 320), (192, 224), "max 128"),
}
"""Channels of the branches: of 1x1; of 1x1 and 3x3; of 1x1 and both 3x3; the pool and what follows.
A block without the first, and without a width behind its pool, halves the map."""


class ConvNormRelu(nn.Module):
    """A convolution with a bias, a norm and a ReLU."""

    def __init__(self, width_in: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, kernel, stride, kernel // 2)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, width, h / stride, w / stride)."""
        return F.relu(self.bn(self.conv(x)))


class InceptionBlock(nn.Module):
    """The branches of one entry of ``BLOCKS``, joined along the channels."""

    def __init__(self, width_in: int, widths: tuple[Widths, Widths, Widths, str]) -> None:
        super().__init__()
        single, double, triple, last = widths
        kind, _, projected = last.partition(" ")
        stride = 1 if projected else 2
        # Averages count the padding, as MXNet's do.
        pools: dict[str, nn.Module] = {
            "avg": nn.AvgPool2d(3, stride, 1),
            "max": nn.MaxPool2d(3, stride, 1),
        }
        self.branches = nn.ModuleList()
        if single:
            self.branches.append(ConvNormRelu(width_in, single[0], 1))
        for (reduced, width), depth in ((double, 1), (triple, 2)):
            steps: list[nn.Module] = [ConvNormRelu(width_in, reduced, 1)]
            for index in range(depth):
                step_stride = stride if index == depth - 1 else 1
                steps.append(ConvNormRelu(width if index else reduced, width, 3, step_stride))
            self.branches.append(nn.Sequential(*steps))
        if projected:
            projection = ConvNormRelu(width_in, int(projected), 1)
            self.branches.append(nn.Sequential(pools[kind], projection))
        else:
            self.branches.append(pools[kind])
        pooled = int(projected) if projected else width_in
        self.width = sum(single) + double[1] + triple[1] + pooled

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, self.width, h / stride, w / stride)."""
        return torch.cat([branch(x) for branch in self.branches], 1)


@NETS.register("inception_bn")
class InceptionBN(nn.Module):
    """Two convolutions with pools, ten Inception blocks, a global average and a classifier."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = ConvNormRelu(channels, 64, 7, 2)
        self.conv2_red = ConvNormRelu(64, 64, 1)
        self.conv2 = ConvNormRelu(64, 192, 3)
        self.maxpool = nn.MaxPool2d(3, 2)  # unpadded: an incomplete last window is dropped
        self.blocks = nn.ModuleDict()
        width = 192
        for name, widths in BLOCKS.items():
            block = InceptionBlock(width, widths)
            self.blocks[name] = block
            width = block.width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, H, W) -> logits (n, classes)."""
        x = self.maxpool(self.conv1(x))
        x = self.maxpool(self.conv2(self.conv2_red(x)))
        for block in self.blocks.values():
            x = block(x)
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]
