"""Changes of the colours of pixels, from -2 (black) to 2 (white)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hires.core.augmentations import AUGMENTATIONS, ColourChange
from hires.core.config.fields import value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hires.data.image_format import Size, Window


class ColourFactor(ColourChange):
    """A factor that differs from 1 by at most the amount."""

    def __init__(self, amount: float, size: Size, random: np.random.Generator) -> None:
        self.factor = 1 + amount * (2 * random.random() - 1)


@AUGMENTATIONS.register("brightness")
class Brightness(ColourFactor):
    """By how much the factor of all values may differ from 1."""

    amount = value(0.0, 0, below=1)
    order = 10

    def colours(self, pixels: Window) -> NDArray[Any]:
        """Returns pixels whose distance from black is multiplied."""
        return (pixels + 2) * self.factor - 2


@AUGMENTATIONS.register("contrast")
class Contrast(ColourFactor):
    """By how much the factor of the distance from middle grey may differ from 1."""

    amount = value(0.0, 0, below=1)
    order = 20

    def colours(self, pixels: Window) -> NDArray[Any]:
        """Returns pixels whose distance from middle grey is multiplied."""
        return pixels * self.factor


@AUGMENTATIONS.register("saturation")
class Saturation(ColourFactor):
    """By how much the factor of the distance from the pixel's own grey may differ from 1.

    Of images of three channels.
    """

    amount = value(0.0, 0, below=1)
    of_three = True
    order = 30

    def colours(self, pixels: Window) -> NDArray[Any]:
        """Returns pixels whose distance from the grey of their luminance is multiplied."""
        from hires.data.image_format import LUMINANCE

        grey = sum(weight * channel for weight, channel in zip(LUMINANCE, pixels, strict=True))
        scaled: NDArray[Any] = grey + self.factor * (pixels - grey)
        return scaled


@AUGMENTATIONS.register("hue")
class Hue(ColourChange):
    """By how much of the circle of colours hues may be turned, at most 0.5.

    Of images of three channels.
    """

    amount = value(0.0, 0, 0.5)
    of_three = True
    order = 40

    def __init__(self, amount: float, size: Size, random: np.random.Generator) -> None:
        self.turn = amount * (2 * random.random() - 1)

    def colours(self, pixels: Window) -> NDArray[Any]:
        """Returns pixels whose hue is turned by a share of the circle of colours.

        The brightest and darkest channel of a pixel keep their values, as those of HSV do.

        Source:
            torchvision, ``adjust_hue``.
        """
        import numpy as np

        top, low = pixels.max(0), pixels.min(0)
        spread = top - low
        red, green, blue = (pixels - low) / np.where(spread > 0, spread, np.float32(1))
        # Sixths of the circle from red, of the channel that is the brightest.
        of_blue = red - green + 4
        hue = np.where(red == 1, green - blue, np.where(green == 1, blue - red + 2, of_blue))
        hue = hue + 6 * self.turn
        channels = []
        for shift in (5, 3, 1):  # of red, green and blue: one line that rises, stays and falls
            at = np.mod(hue + shift, 6)
            channels.append(top - spread * np.minimum(at, 4 - at).clip(0, 1))
        return np.stack(channels)
