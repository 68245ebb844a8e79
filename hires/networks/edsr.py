"""EDSR baseline, 16 blocks of 64 channels (Lim et al. 2017); model.scale=2, 3 or 4.

Residual blocks have no norms; after them channels become the pixels of a larger image. The data is
normalised already, so the network does not shift the mean.

Source:
    Lim et al., "Enhanced deep residual networks for single image super-resolution", CVPR Workshops
    2017.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from hires.core.errors import ConfigError
from hires.nets.build_network import NETS, ScaledConv2d

FACTORS = {2: (2,), 3: (3,), 4: (2, 2)}
"""Scale -> what each step of the upsampler multiplies the image by."""


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, scaled and added to the input.

    The first weights of all ``blocks`` are so small that together they add about as much as their
    input.
    """

    def __init__(self, width: int, res_scale: float, blocks: int) -> None:
        super().__init__()
        self.conv1 = ScaledConv2d(width, width, 3)
        self.conv2 = ScaledConv2d(width, width, 3, gain=1 / math.sqrt(2 * blocks))
        self.res_scale = res_scale

    def forward(self, x: Tensor) -> Tensor:
        """(n, width, h, w) -> the same."""
        y = self.conv2(F.relu(self.conv1(x)))
        return x + (y if self.res_scale == 1 else y * self.res_scale)  # type: ignore[no-any-return]


@NETS.register("edsr")
class EDSR(nn.Module):
    """The network: the image becomes ``scale`` times larger, 2, 3 or 4.

    ``res_scale`` is the factor of every block's result; the paper uses 0.1 for its 256 channels.
    """

    def __init__(
        self, blocks: int, width: int, scale: int, res_scale: float, channels: int = 3
    ) -> None:
        super().__init__()
        if scale not in FACTORS:
            scales = ", ".join(map(str, FACTORS))
            raise ConfigError(f"model.scale={scale} is no scale of edsr; choose one of {scales}")
        self.head = ScaledConv2d(channels, width, 3)
        self.body = nn.Sequential(*(ResidualBlock(width, res_scale, blocks) for _ in range(blocks)))
        self.after = ScaledConv2d(width, width, 3, gain=math.sqrt(0.5))
        steps: list[nn.Module] = []
        for factor in FACTORS[scale]:
            steps += [ScaledConv2d(width, width * factor**2, 3), nn.PixelShuffle(factor)]
        self.upsample = nn.Sequential(*steps)
        # The usual gain counts the outputs of a convolution; this one has few, but many inputs.
        self.tail = ScaledConv2d(width, channels, 3, gain=math.sqrt(channels / (2 * width)))

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, H, W) -> (n, channels, scale * H, scale * W)."""
        x = self.head(x)
        x = x + self.after(self.body(x))
        return self.tail(self.upsample(x))  # type: ignore[no-any-return]
