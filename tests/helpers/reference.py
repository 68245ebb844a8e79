"""Plain references: what exact computations are compared with, written in the simplest way."""

from __future__ import annotations

import colorsys
import math

import numpy as np
from numpy.typing import NDArray


def structural_similarity(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Returns the mean SSIM of images, (C, h, w) from 0 to 1, window by window (Wang et al.)."""
    line = np.array([math.exp(-(at**2) / (2 * 1.5**2)) for at in range(-5, 6)])
    weights = np.outer(line, line) / np.outer(line, line).sum()
    found = []
    for x, y in zip(a, b, strict=True):
        for row in range(x.shape[0] - 10):
            for col in range(x.shape[1] - 10):
                p, q = (one[row : row + 11, col : col + 11] for one in (x, y))
                mean_p, mean_q = (weights * p).sum(), (weights * q).sum()
                spread_p = (weights * (p - mean_p) ** 2).sum()
                spread_q = (weights * (q - mean_q) ** 2).sum()
                common = (weights * (p - mean_p) * (q - mean_q)).sum()
                above = (2 * mean_p * mean_q + 1e-4) * (2 * common + 9e-4)
                below = (mean_p**2 + mean_q**2 + 1e-4) * (spread_p + spread_q + 9e-4)
                found.append(above / below)
    return float(np.mean(found))


def turned_hues(image: NDArray[np.float64], turn: float) -> NDArray[np.float64]:
    """Returns an image, (3, h, w) from 0 to 1, whose hues are turned by a share of the circle."""
    made = np.empty_like(image)
    for row in range(image.shape[1]):
        for col in range(image.shape[2]):
            hue, saturation, value = colorsys.rgb_to_hsv(*image[:, row, col].tolist())
            made[:, row, col] = colorsys.hsv_to_rgb((hue + turn) % 1.0, saturation, value)
    return made
