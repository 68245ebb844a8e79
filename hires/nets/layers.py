"""Layers that several networks share."""

from __future__ import annotations

from torch import nn


class ScaledConv2d(nn.Conv2d):
    """A convolution of odd kernel that keeps the size of the map, with a gain of its first weights.

    Where no norm follows, the usual first weights would let the signal grow from layer to layer.

    Args:
        width_in: channels of its input.
        width_out: channels of its output.
        kernel: rows and columns of its kernel.
        gain: factor of the usual first weights, applied by :mod:`hires.nets.build_network`.
    """

    def __init__(self, width_in: int, width_out: int, kernel: int, gain: float = 1.0) -> None:
        super().__init__(width_in, width_out, kernel, padding=kernel // 2)
        self.gain = gain
