"""Declares the keys of how training images are changed at random: ``augment``."""

from __future__ import annotations

from dataclasses import dataclass

from hires.core.config.value_checks import Checks, Section, changed_keys, choice, number
from hires.core.errors import ConfigError


@dataclass
class AugmentConfig(Section, key="augment"):
    """``augment=NAME``: random changes of the images of a training, and of their targets.

    They follow from ``seed``, the epoch and the image, so every layout sees the same pixels. No
    other task has any.
    """

    flip: str = choice("none", ("none", "horizontal", "vertical", "both"))
    """In which ways half of the images are mirrored: ``none``, ``horizontal`` (left to right),
    ``vertical`` (upside down) or ``both``, each by itself."""
    rotate: bool = False
    """Whether images are turned by 0, 90, 180 or 270 degrees; those that are not square by 0 or
    180."""
    crop: float = number(1.0, above=True)
    """Least share of an image's area that a random part of it has, which is enlarged to the whole
    size; 1: all of it."""
    shift: int = number(0)
    """Most pixels by which images are moved up, down, left or right; what comes in is grey."""
    brightness: float = number(0.0)
    """By how much the factor of all values may differ from 1."""
    contrast: float = number(0.0)
    """By how much the factor of the distance from middle grey may differ from 1."""
    saturation: float = number(0.0)
    """By how much the factor of the distance from the pixel's own grey may differ from 1; of images
    of three channels."""
    hue: float = number(0.0)
    """By how much of the circle of colours hues may be turned, at most 0.5; of images of three
    channels."""

    def _check_more(self, check: Checks) -> None:
        check(self._check_shares)

    def _check_shares(self) -> None:
        if self.crop > 1:
            raise ConfigError(f"augment.crop={self.crop} must be a share of the area, at most 1")
        if self.hue > 0.5:
            raise ConfigError(f"augment.hue={self.hue} must be a share of the circle, at most 0.5")
        for name in ("brightness", "contrast", "saturation"):
            if getattr(self, name) >= 1:
                raise ConfigError(
                    f"augment.{name}={getattr(self, name)} must be below 1, or factors could be 0"
                )

    @property
    def is_on(self) -> bool:
        """Whether anything changes."""
        return any(True for _ in changed_keys(self))
