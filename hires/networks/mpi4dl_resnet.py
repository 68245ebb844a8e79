"""ResNet of MPI4DL, of depth 9n+2: 110 is the thesis's ResNet101.

Pre-activation blocks on maps of 64 channels at full size:

    images -> 3x3 stem, 16 -> n blocks, 64 -> n blocks, 128 -> n blocks, 256 -> norm, ReLU, head
              full size       full size      a half           a quarter

It differs from ``preact_resnet`` in its blocks (3x3, 3x3 and 1x1, four to eight times as wide
inside), in projections of the input as it is, and in biases: five times the operations.

Source:
    ``get_resnet_v2`` of MPI4DL (github.com/OSU-Nowlab/MPI4DL, src/models/resnet.py), which follows
    the CIFAR example of Keras. The softmax that the original applies before its cross-entropy,
    which applies another, is left out.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.errors import ConfigError
from hires.nets.build_network import NETS

STEM = 16
POOL = 8
"""Side of the windows that the original averages before its classifier."""


class NormedConv(nn.Module):
    """A convolution with a bias, after a norm and a ReLU, before them, or alone.

    Each holds a norm of its inputs and one of its outputs and applies at most one of them, as in
    the original: so checkpoints of MPI4DL have the same names, and counts are the published ones.
    """

    def __init__(
        self, width_in: int, width: int, kernel: int = 3, stride: int = 1, norm: str = "before"
    ) -> None:
        super().__init__()
        self.norm = norm
        self.conv1 = nn.Conv2d(width_in, width, kernel, stride, kernel // 2)
        self.batch_first = nn.BatchNorm2d(width_in)
        self.batch_last = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, width, h / stride, w / stride)."""
        if self.norm == "before":
            x = F.relu(self.batch_first(x))
        x = self.conv1(x)
        return F.relu(self.batch_last(x)) if self.norm == "after" else x


class WideBlock(nn.Module):
    """Two 3x3 convolutions of ``inner`` channels and one 1x1; the first of a group projects."""

    def __init__(
        self, width_in: int, inner: int, width: int, stride: int, is_first: bool, norm: str
    ) -> None:
        super().__init__()
        self.r1 = NormedConv(width_in, inner, stride=stride, norm=norm)
        self.r2 = NormedConv(inner, inner)
        self.r3 = NormedConv(inner, width, kernel=1)
        self.r4: nn.Module = nn.Identity()
        if is_first:
            self.r4 = NormedConv(width_in, width, kernel=1, stride=stride, norm="none")

    def forward(self, x: Tensor) -> Tensor:
        """(n, width_in, h, w) -> (n, width, h / stride, w / stride)."""
        return self.r4(x) + self.r3(self.r2(self.r1(x)))  # type: ignore[no-any-return]


class EndPart(nn.Module):
    """A norm, a ReLU, an average and a classifier of (n, width, h, w).

    ``cells`` unset: of the whole map, so any image fits; else of windows of 8x8, ``cells`` of which
    the classifier reads side by side, as in the original.
    """

    def __init__(self, width: int, classes: int, cells: int | None) -> None:
        super().__init__()
        self.batch_last = nn.BatchNorm2d(width)
        self.pool = nn.AdaptiveAvgPool2d(1) if cells is None else nn.AvgPool2d(POOL)
        self.fc1 = nn.Linear(width * (cells or 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, width, h, w) -> logits (n, classes)."""
        return self.fc1(self.pool(F.relu(self.batch_last(x))).flatten(1))  # type: ignore[no-any-return]


@NETS.register("mpi4dl_resnet")
class MPI4DLResNet(nn.Sequential):
    """The layers under the original's names, ``1`` to ``3n + 2``.

    ``head`` is ``pool``, or ``flatten`` for the original's classifier, whose size follows the image
    (height, width); ConfigError: the image is too small for it.
    """

    def __init__(
        self, depth: int, classes: int, head: str, image: tuple[int, int] | None, channels: int = 3
    ) -> None:
        n = (depth - 2) // 9
        layers: list[nn.Module] = [NormedConv(channels, STEM, norm="after")]
        width_in = inner = width = STEM
        for group in range(3):
            width = inner * (4 if group == 0 else 2)
            for index in range(n):
                is_first = index == 0
                stride = 2 if is_first and group > 0 else 1
                norm = "none" if is_first and group == 0 else "before"
                layers.append(WideBlock(width_in, inner, width, stride, is_first, norm))
                width_in = width
            inner = width
        layers.append(EndPart(width, classes, _cells(image) if head == "flatten" else None))
        super().__init__()
        for number, layer in enumerate(layers, start=1):
            self.add_module(str(number), layer)


def _cells(image: tuple[int, int] | None) -> int:
    # Windows of the last map, a quarter of the image (two halvings, rounded up).
    assert image is not None, "a classifier of flattened maps needs the size of the images"
    rows, columns = (-(-side // 4) // POOL for side in image)
    if not rows * columns:
        raise ConfigError(
            f"model.head=flatten averages 8x8 pixels of a map of a quarter of the image, and "
            f"image={list(image)} leaves fewer; use image=32 or more, or model.head=pool"
        )
    return rows * columns
