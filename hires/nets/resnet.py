"""ResNets: the post-activation family of 2015 and the pre-activation family of depth 9n+2.

Both end in a global average pool, so the classifier does not depend on the image size, and return
logits: the loss applies the softmax.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.errors import ConfigError
from hires.nets.catalog import NETS

LAYOUTS: dict[int, tuple[bool, tuple[int, int, int, int]]] = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}
"""Depth -> (bottleneck blocks?, blocks per group): Table 1 of He et al."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around an identity or a 1x1 projection."""

    expansion = 1

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(width_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, width, h / stride, w / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the 3x3 one carries the stride."""

    expansion = 4

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _projection(width_in, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, 4 * width, h / stride, w / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """The network of He et al. with the usual 7x7 stride-2 stem and 3x3 max-pool.

    Source:
        He et al., "Deep residual learning for image recognition", CVPR 2016.
    """

    def __init__(self, depth: int, classes: int, channels: int = 3) -> None:
        super().__init__()
        if depth not in LAYOUTS:
            depths = ", ".join(map(str, LAYOUTS))
            raise ConfigError(f"model.depth={depth} is no ResNet; choose one of {depths}")
        bottleneck, counts = LAYOUTS[depth]
        block = Bottleneck if bottleneck else BasicBlock
        self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        width_in = 64
        for group, count in enumerate(counts):
            width = 64 * 2**group
            blocks = []
            for index in range(count):
                stride = 2 if group > 0 and index == 0 else 1
                blocks.append(block(width_in, width, stride))
                width_in = width * block.expansion
            self.add_module(f"layer{group + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, H, W) -> logits (n, classes)."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for number in (1, 2, 3, 4):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


class PreactBlock(nn.Module):
    """BN-ReLU-convolution three times; the first block of a group projects its activated input."""

    def __init__(self, width_in: int, width: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 1, stride, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width_out, 1, bias=False)
        self.projection = (
            nn.Conv2d(width_in, width_out, 1, stride, bias=False)
            if stride != 1 or width_in != width_out
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, width_out, h / stride, w / stride)."""
        y = F.relu(self.bn1(x))
        shortcut = x if self.projection is None else self.projection(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.bn2(y)))
        y = self.conv3(F.relu(self.bn3(y)))
        return y + shortcut  # type: ignore[no-any-return]


class PreactResNet(nn.Module):
    """Pre-activation bottleneck ResNet of depth 9n+2 with a stride-1 3x3 stem.

    n=12 has the depth, 110, of the "ResNet101" that the MPI4DL scripts train; the blocks there are
    wider (3x3, 3x3 and 1x1 of 16, 64 and 128 channels).

    Source:
        He et al., "Identity mappings in deep residual networks", ECCV 2016.
    """

    def __init__(self, n: int, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        width_in = 16
        for group in range(3):
            width = 16 * 2**group
            blocks = []
            for index in range(n):
                stride = 2 if group > 0 and index == 0 else 1
                blocks.append(PreactBlock(width_in, width, 4 * width, stride))
                width_in = 4 * width
            self.add_module(f"group{group + 1}", nn.Sequential(*blocks))
        self.bn = nn.BatchNorm2d(width_in)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, H, W) -> logits (n, classes)."""
        x = self.conv1(x)
        for number in (1, 2, 3):
            x = self.get_submodule(f"group{number}")(x)
        x = F.relu(self.bn(x))
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


@NETS.register("resnet")
def resnet(depth: int, classes: int, channels: int) -> ResNet:
    """Returns a ResNet of that depth."""
    return ResNet(depth, classes, channels)


@NETS.register("preact_resnet")
def preact_resnet(n: int, classes: int, channels: int) -> PreactResNet:
    """Returns a pre-activation ResNet of depth 9n+2."""
    return PreactResNet(n, classes, channels)


def _projection(width_in: int, width_out: int, stride: int) -> nn.Module:
    """Returns the layers that bring the shortcut to the output shape of a block."""
    if stride == 1 and width_in == width_out:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(width_in, width_out, 1, stride, bias=False), nn.BatchNorm2d(width_out)
    )
