"""Predicts the memory that a rank takes to read images of files, from some headers.

    decoder      of the largest image: all of a PNG or JPEG, of a TIFF a strip or tile
    cache        the last PNG and JPEG that were decoded
    resizing     a band of the image, and of it what is summed up

Files of arrays, as those of CIFAR-10, may be there as a whole.
"""

from __future__ import annotations

import json
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.data.image_fit import BAND_PIXELS
from hires.data.image_format import Size, open_image
from hires.data.source import SOURCES, looked_at
from hires.data.sources.folder import FolderSource, naming


def decoding_bytes(config: RunConfig) -> int:
    """Returns the memory that a rank takes to read one image, beside its window.

    Slides are read in small pieces. Errors are those of :meth:`Source.open`.
    """
    reads_files = SOURCES[config.data.name].reads_files and config.data.path is not None
    if not reads_files or config.data.name == "slide":
        return 0
    size = config.fitted_size
    return _decoding_bytes(json.dumps(vars(config.data)), size, config.model.channels)


@lru_cache(maxsize=8)  # plans that are compared have one data set
def _decoding_bytes(facts: str, target: Size, channels: int) -> int:
    from hires.data.formats.pillow import CACHE_BYTES

    data = DataConfig(**json.loads(facts))
    source = SOURCES[data.name].open(data, target, channels, 0)
    most = kept = 0
    for index in looked_at(source) if isinstance(source, FolderSource) else ():
        path = Path(source.path(index))
        try:
            with naming(path, data), closing(open_image(path, data.max_pixels)) as image:
                decoding, keeps = image.facts.decoding_bytes, image.facts.kept_bytes
                resizing = _resizing_bytes(image.size, target) if data.fit == "resize" else 0
                # All of it is decoded before it is resized, or a part for each band.
                resizing = channels * resizing + (keeps or decoding)
                most, kept = max(most, decoding, resizing), max(kept, keeps)
        except RunError:
            continue  # the checks before a run name it
    return most + min(CACHE_BYTES, kept * (len(source) - 1)) + source.kept_bytes


def _resizing_bytes(source: Size, target: Size) -> int:
    # Of one sample a pixel.
    if source == target:
        return 0
    pixels = min(BAND_PIXELS, source[0] * source[1])  # of a band, copied
    shrunk = pixels / max(1.0, source[0] / target[0])  # as floats, for a tap, and once more
    return int(pixels + 12 * shrunk)
