"""Which layers do several networks share?"""

from __future__ import annotations

from torch import nn


class ScaledConv2d(nn.Conv2d):
    """A convolution of odd kernel that keeps the image's size, and says how small it begins.

    Where no norm follows, the usual first values would let the signal grow from layer to layer.

    Args:
        width_in: channels of its input.
        width_out: channels of its output.
        kernel: rows and columns of its kernel.
        gain: by which :mod:`hires.nets.build_network` multiplies the usual first weights.
    """

    def __init__(self, width_in: int, width_out: int, kernel: int, gain: float = 1.0) -> None:
        super().__init__(width_in, width_out, kernel, padding=kernel // 2)
        self.gain = gain
