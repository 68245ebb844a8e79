"""Compares the map of a slide in four tiles with one process on a crop around its middle."""

from pathlib import Path

import numpy as np
import tifffile


def map_of(campaign: str) -> np.ndarray:
    """Returns the probabilities of the only image of a campaign, (classes, rows, columns)."""
    [path] = Path("results", campaign).glob("*/a0/predictions/*.tif")
    return tifffile.imread(path)


whole = map_of("map")[:, 4240:4752, 5744:6256]
crop = map_of("crop")[:, 64:576, 64:576]
print("largest difference", np.abs(whole - crop).max())
print("share of equal classes", (whole.argmax(0) == crop.argmax(0)).mean())
print("pixels of each class", np.bincount(whole.argmax(0).ravel()))
