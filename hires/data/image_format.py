"""Registers the formats of image files: by suffix, the function that opens a file.

An opened file gives any window of its first image, as it is stored. To add a format, write a file
like ``tiff.py`` that registers its function here, and import it in the package's ``__init__``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hires.core.registry import Registry
from hires.data.image_window import Pixels, Size, Span


class ImageFile(Protocol):
    """An open file."""

    size: Size
    """(height, width) in pixels."""
    colours: int
    """Samples that are colours: 1 or 3."""
    peak: float
    """The value of white."""

    def read(self, rows: Span, cols: Span) -> Pixels:
        """Returns a part of the image, (h, w, samples), colours first."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


FORMATS: Registry[Callable[[Path], ImageFile]] = Registry("image format")
"""Suffix in lower case -> opener, which raises an ImageError or whatever its decoder raises."""


def suffix_of(name: str) -> str:
    """Returns the suffix by which a file's format is known, as ``.tif``."""
    stem, dot, suffix = name.rpartition(".")
    return dot + suffix.lower() if stem else ""


def patterns() -> str:
    """Returns the names of image files in words, as ``*.png, *.tif``."""
    return ", ".join(f"*{suffix}" for suffix in FORMATS)


def open_image(path: Path) -> ImageFile:
    """Opens a file of a registered format.

    Raises:
        Exception: whatever its decoder raises when the file is broken.
    """
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    return FORMATS[suffix_of(path.name)](path)
