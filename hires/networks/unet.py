"""U-Net, transposed convolutions on the way up (Ronneberger 2015).

An encoder, a decoder, and skips between maps of equal size; logits for every pixel:

    HxW   double conv ------------- skip ------------- join -> logits
    /2       double conv --------- skip --------- join
    /4          double conv ----- up -----------^

Every level halves the map rounding up, and the decoder crops to the size of the skip, so images may
have any size.

Source:
    Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation", MICCAI
    2015; padded convolutions and batch norms as is usual today.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hires.nets.build_network import NETS, ScaledConv2d

HEAD_GAIN = 0.1
"""Gain of the last convolution: its first logits are small, so classes are about equally likely."""


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions, each followed by a norm and a ReLU."""

    def __init__(self, width_in: int, width: int) -> None:
        layers: list[nn.Module] = []
        for inputs in (width_in, width):
            conv = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
            layers += [conv, nn.BatchNorm2d(width), nn.ReLU()]
        super().__init__(*layers)


class TransposedUp(nn.Module):
    """A transposed convolution doubles the map, which is cropped to the size of the skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(2 * width, width, 2, 2)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """(n, 2 * width, h, w) -> (n, width, *size)."""
        x = self.conv(x)
        beyond = (x.shape[2] - size[0], x.shape[3] - size[1])
        return F.pad(x, (0, -beyond[1], 0, -beyond[0])) if any(beyond) else x


class InterpolatedUp(nn.Module):
    """Interpolation to the skip's size, then a 3x3 convolution: no checkerboard artefacts."""

    def __init__(self, width: int, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.conv = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """(n, 2 * width, h, w) -> (n, width, *size)."""
        return self.conv(F.interpolate(x, size, mode=self.mode))  # type: ignore[no-any-return]


@NETS.register("unet")
class UNet(nn.Module):
    """The network: ``levels`` halvings, each of which doubles the ``width`` at full size.

    ``upsample`` is ``transposed`` (a transposed convolution), ``bilinear`` or ``nearest``
    (interpolation, then a convolution).
    """

    def __init__(
        self, levels: int, width: int, upsample: str, classes: int, channels: int = 3
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        inputs = [channels, *widths[:-1]]
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip(inputs, widths, strict=True))
        self.up = nn.ModuleList(
            TransposedUp(w) if upsample == "transposed" else InterpolatedUp(w, upsample)
            for w in widths[-2::-1]
        )
        self.join = nn.ModuleList(DoubleConv(2 * w, w) for w in widths[-2::-1])
        self.head = ScaledConv2d(width, classes, 1, HEAD_GAIN)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, H, W) -> logits (n, classes, H, W)."""
        skips: list[Tensor] = []
        for level, down in enumerate(self.down):
            x = down(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            skip = skips.pop()
            x = up(x, (skip.shape[2], skip.shape[3]))
            x = join(torch.cat([skip, x], 1))
        return self.head(x)  # type: ignore[no-any-return]
