"""Converts stored samples to the channels of the network, every pixel alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hires.data.image_window import ImageError, Pixels

LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue (ITU-R BT.601), as Pillow uses them."""


def to_channels(pixels: Pixels, colours: int, channels: int) -> Pixels:
    """Returns the samples that the network sees.

    An image with exactly ``channels`` samples is used as it is. Otherwise alpha and other extra
    samples are dropped, colour becomes luminance for a network of one channel, and grey stays one
    sample, which ``normalised`` gives to every channel.

    Args:
        pixels: (h, w, samples), colours first.
        colours: how many of the samples are colours: 1 or 3.
        channels: channels of the network's input.

    Raises:
        ImageError: the image has neither that many samples nor colours that can be converted.
    """
    samples = pixels.shape[2]
    if samples == channels:
        return pixels
    if colours == 1:
        return pixels[:, :, :1]
    if channels == 1:
        return luminance(pixels)
    if colours == channels:
        return pixels[:, :, :channels]
    raise ImageError(
        f"it has {samples} samples per pixel where model.channels={channels}; convert it, or set "
        f"model.channels={samples}"
    )


def luminance(pixels: Pixels) -> NDArray[np.float32]:
    """Returns the brightness of red, green and blue, (h, w, 1), in the units of the samples."""
    light = np.zeros((*pixels.shape[:2], 1), np.float32)
    for c, weight in enumerate(LUMINANCE):
        light += np.multiply(pixels[:, :, c : c + 1], np.float32(weight), dtype=np.float32)
    return light


def from_cmyk(pixels: Pixels, peak: float) -> NDArray[np.float32]:
    """Returns red, green and blue of cyan, magenta, yellow and black, (h, w, 3), same peak."""
    light = np.float32(1) - np.divide(pixels[:, :, :4], np.float32(peak), dtype=np.float32)
    rgb: NDArray[np.float32] = light[:, :, :3] * light[:, :, 3:]
    rgb *= np.float32(peak)
    return rgb


def from_palette(pixels: Pixels, palette: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Returns the colours that a palette, (3, entries), gives to the indices in sample 0."""
    colours: NDArray[np.uint16] = palette.T[pixels[:, :, 0]]
    return colours
