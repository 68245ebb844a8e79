"""Opens the images that a config names."""

from __future__ import annotations

from collections.abc import Sequence

from hires.core.config.run_config import DataConfig, RunConfig
from hires.core.errors import ConfigError
from hires.data.folder import FolderSource
from hires.data.image_index import scan, scan_images
from hires.data.image_pairs import PairSource
from hires.data.image_window import Source
from hires.data.synthetic import SyntheticSource


def open_data(config: RunConfig) -> Source | PairSource:
    """Returns what a run learns from: images with classes, or pairs of images; reads no pixel.

    Raises:
        ConfigError: as for :func:`open_source`.
    """
    channels = config.model.channels
    if config.target_size is None:
        return open_source(config.data, config.image, channels, config.seed)
    large = open_source(config.data, config.target_size, channels, config.seed)
    return PairSource(large, (config.height, config.width), config.model.scale, channels)


def open_source(data: DataConfig, image: Sequence[int], channels: int, seed: int) -> Source:
    """Returns the images that the config names; reads no pixel.

    Args:
        data: the config group ``data``.
        image: [height, width] that every image is given.
        channels: channels that every image is given.
        seed: decides the images of ``data=synthetic``.

    Raises:
        ConfigError: ``data.name`` is unknown, or ``data.path`` is no folder with one sub-folder of
            images per class, or with images for ``data=pairs``.
    """
    size = (image[0], image[1])
    if data.name == "synthetic":
        return SyntheticSource(data.classes, data.length, size, channels, seed)
    if data.name == "folder":
        return FolderSource(scan(data.path), size, channels, data.fit)
    if data.name == "pairs":
        return FolderSource(scan_images(data.path), size, channels, data.fit)
    raise ConfigError(f"data={data.name!r} is unknown; choose one of synthetic, folder, pairs")
