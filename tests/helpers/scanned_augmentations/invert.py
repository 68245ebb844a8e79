"""An augmentation that hires does not list, as a user would add it in ``hires.augmentations``."""

from __future__ import annotations

from hires.core.augmentations import AUGMENTATIONS, ColourChange
from hires.core.config.fields import value


@AUGMENTATIONS.register("invert")
class Invert(ColourChange):
    """Share of the images whose colours are inverted."""

    amount = value(0.0, 0, 1)

    def __init__(self, amount, size, random):
        self.sign = -1 if random.random() < amount else 1

    def colours(self, pixels):
        """Returns pixels, or their inverse."""
        return self.sign * pixels
