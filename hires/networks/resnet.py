"""ResNet (He et al. 2015): model.depth=18, 34, 50, 101 or 152.

It ends in a global average pool, so the classifier does not depend on the image size, and returns
logits: the loss applies the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.errors import ConfigError
from hires.nets.build_network import NETS

LAYOUTS: dict[int, tuple[bool, tuple[int, int, int, int]]] = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}
"""Depth -> (bottleneck blocks?, blocks per group): Table 1 of He et al."""


class PostactBlock(nn.Module):
    """Convolutions, each with a norm and a ReLU, the last ReLU after the sum with the shortcut.

    ``convs`` are (kernel, channels, stride) of each convolution.
    """

    def __init__(self, width_in: int, convs: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.num_convs, width = len(convs), width_in
        for k, (kernel, width_out, stride) in enumerate(convs, start=1):
            conv = nn.Conv2d(width, width_out, kernel, stride, kernel // 2, bias=False)
            self.add_module(f"conv{k}", conv)
            self.add_module(f"bn{k}", nn.BatchNorm2d(width_out))
            width = width_out
        stride = max(stride for _, _, stride in convs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            projection = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, channels of the last, h / stride, w / stride)."""
        y = x
        for k in range(1, self.num_convs + 1):
            y = self.get_submodule(f"bn{k}")(self.get_submodule(f"conv{k}")(y))
            y = F.relu(y) if k < self.num_convs else y
        return F.relu(y + self.downsample(x))


@NETS.register("resnet")
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

        def block(width_in: int, width: int, stride: int) -> nn.Module:
            convs = [(3, width, stride), (3, width, 1)]
            if bottleneck:
                convs = [(1, width, 1), (3, width, stride), (1, 4 * width, 1)]
            return PostactBlock(width_in, convs)

        self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        width = add_groups(self, "layer", block, counts, 64, 64, 4 if bottleneck else 1)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, H, W) -> logits (n, classes)."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for number in (1, 2, 3, 4):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(self.avgpool(x).flatten(1))  # type: ignore[no-any-return]


def add_groups(
    net: nn.Module,
    name: str,
    block: Callable[[int, int, int], nn.Module],
    counts: Sequence[int],
    width_in: int,
    width: int,
    expansion: int,
) -> int:
    """Adds groups of blocks, ``name`` 1, 2, ...; returns the channels of the last.

    The first block of every group but the first halves the map; each group doubles the width.
    """
    for group, count in enumerate(counts):
        blocks = []
        for index in range(count):
            stride = 2 if group > 0 and index == 0 else 1
            blocks.append(block(width_in, width * 2**group, stride))
            width_in = expansion * width * 2**group
        net.add_module(f"{name}{group + 1}", nn.Sequential(*blocks))
    return width_in
