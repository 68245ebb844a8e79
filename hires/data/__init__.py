"""Where images come from; importing the package registers the formats of image files."""

from hires.data import tiff, whole

__all__ = ["tiff", "whole"]
