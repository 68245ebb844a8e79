"""Pre-activation ResNet of depth 9n+2, stride-1 stem (He et al. 2016)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hires.nets.build_network import NETS
from hires.networks.resnet import add_groups


class PreactBlock(nn.Module):
    """BN-ReLU-convolution three times; the first block of a group projects its activated input."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        width_out = 4 * width
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 1, stride, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width_out, 1, bias=False)
        self.projection: nn.Module | None = None
        if stride != 1 or width_in != width_out:
            self.projection = nn.Conv2d(width_in, width_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, 4 * width, h / stride, w / stride)."""
        y = F.relu(self.bn1(x))
        shortcut = x if self.projection is None else self.projection(y)
        y = self.conv2(F.relu(self.bn2(self.conv1(y))))
        y = self.conv3(F.relu(self.bn3(y)))
        return y + shortcut  # type: ignore[no-any-return]


@NETS.register("preact_resnet")
class PreactResNet(nn.Module):
    """Pre-activation bottleneck ResNet of depth 9n+2 with a stride-1 3x3 stem.

    Source:
        He et al., "Identity mappings in deep residual networks", ECCV 2016.
    """

    def __init__(self, depth: int, classes: int, channels: int = 3) -> None:
        super().__init__()
        n = (depth - 2) // 9
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        width = add_groups(self, "group", PreactBlock, (n, n, n), 16, 16, 4)
        self.bn = nn.BatchNorm2d(width)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, H, W) -> logits (n, classes)."""
        x = self.conv1(x)
        for number in (1, 2, 3):
            x = self.get_submodule(f"group{number}")(x)
        x = F.relu(self.bn(x))
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]
