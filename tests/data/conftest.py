"""Writes small image files, and opens them as hires does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.config.data_config import DataConfig
from hires.data.image_format import MAX_PIXELS
from hires.data.opening import open_source
from hires.data.source import Source


@pytest.fixture
def pixels() -> Callable[..., np.ndarray]:
    """Returns random pixels of a shape and type."""

    def make(*shape: int, dtype: Any = np.uint8, seed: int = 0) -> np.ndarray:
        random = np.random.default_rng(seed)
        if np.dtype(dtype).kind == "f":
            return random.random(shape).astype(dtype)
        return random.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)

    return make


@pytest.fixture
def source_of(tmp_path: Path) -> Callable[..., Source]:
    """Writes an array, a Pillow image or bytes into a folder of one class, and opens the folder."""

    def make(
        image: Any, name: str = "a.tif", *, size: tuple[int, int] = (16, 16), channels: int = 3,
        fit: str = "error", max_pixels: int = MAX_PIXELS, bands: Any = None, **how: Any,
    ) -> Source:  # fmt: skip
        path = tmp_path / "data" / "only" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(image, bytes):
            path.write_bytes(image)
        elif isinstance(image, Image.Image):
            image.save(path, **how)
        else:
            tifffile.imwrite(path, image, **how)
        folder = str(path.parents[1])
        data = DataConfig("folder", folder, fit=fit, max_pixels=max_pixels, bands=bands)
        return open_source(data, size, channels, seed=0)

    return make


@pytest.fixture
def whole() -> Callable[[Source, int, int], np.ndarray]:
    """Returns image 0 of a source as values from 0 to 1, (H, W, C)."""

    def read(source: Source, height: int, width: int) -> np.ndarray:
        window = source.window(0, (0, height), (0, width))
        assert window.dtype == np.float32
        return window.transpose(1, 2, 0) / 4 + 0.5

    return read
