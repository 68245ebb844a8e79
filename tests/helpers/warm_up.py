"""Loads what torch imports at its first trace, in a process that is forked later."""

from __future__ import annotations

from torch import nn

from hires.nets.trace import trace


def trace_something() -> None:
    """Traces a convolution."""
    trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), [1, 3, 8, 8], True)
