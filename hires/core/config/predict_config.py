"""Declares the keys of what ``task=predict`` writes: ``predict``."""

from __future__ import annotations

from dataclasses import dataclass

from hires.core.config.value_checks import Section, choice

PROBABILITY = "probability"
PARQUET = "parquet"
TIFF, OME_TIFF, ZARR = "tiff", "ome-tiff", "zarr"


@dataclass
class PredictConfig(Section, key="predict"):
    """``predict.*``: what ``task=predict`` writes."""

    reduce: str = choice("argmax", ("argmax", PROBABILITY))
    """What is written of the scores of the classes. ``argmax``: of an image its class and that
    one's probability, of a map the class of each pixel (8 bits; 16 above 255 classes).
    ``probability``: of an image that of each class beside them, of a map that of each class and
    pixel (32-bit floats). Images that a network makes are written as they are."""

    table: str = choice("csv", ("csv", PARQUET))
    """Form of the table of images: ``csv``, or ``parquet``, which is smaller and keeps the types
    of its columns."""

    format: str = choice(TIFF, (TIFF, OME_TIFF, ZARR))
    """Form of the map, or image, of each sample: ``tiff`` (``ID.tif``), ``ome-tiff``
    (``ID.ome.tif``, with axes and names of classes as OME-XML), or ``zarr`` (``ID.zarr``, a folder
    of Zarr 3, in chunks of at most 1024 x 1024 pixels). All hold the same numbers, uncompressed."""
