"""Decodes an image file as a run would, in bands, and keeps facts and a digest of its pixels."""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hires.data.image_fit import BAND_PIXELS
from hires.data.image_format import FORMATS, ImageFacts, Size, open_image, suffix_of
from hires.data.sources.folder import reason_of, to_channels

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass
class DataFinding:
    """What stands out in some files."""

    severity: str
    text: str
    files: list[str] = field(default_factory=list)
    """The files, relative to the folder, with a reason behind a colon where each has its own."""


@dataclass(frozen=True)
class CheckedImage:
    """One file after it was decoded."""

    path: str
    size: Size = (0, 0)
    facts: ImageFacts | None = None
    digest: bytes = b""
    """Of its pixels, as a run sees them."""
    reason: str = ""
    """Why it cannot be read."""


def decoded(file: str, channels: int, max_pixels: int) -> CheckedImage:
    """Returns one file after all of it was decoded, in bands, as a run reads it."""
    pixels_seen = hashlib.blake2b(digest_size=16)
    try:
        if suffix_of(Path(file).name) not in FORMATS:
            raise ValueError(f"images are files named {', '.join(f'*{one}' for one in FORMATS)}")
        with closing(open_image(Path(file), max_pixels)) as image:
            (height, width), facts = image.size, image.facts
            step = facts.band * max(1, BAND_PIXELS // max(1, facts.band * width))
            pixels_seen.update(repr(image.size).encode())
            for top in range(0, height, step):
                stored = image.read((top, min(top + step, height)), (0, width))
                pixels = to_channels(stored, image.colours, channels)
                pixels_seen.update(np.ascontiguousarray(pixels).data)
            return CheckedImage(file, image.size, facts, pixels_seen.digest())
    except Exception as error:  # decoders raise nearly anything
        return CheckedImage(file, reason=reason_of(error))
