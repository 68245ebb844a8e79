"""Changes of where the pixels of an image are.

A window is mapped back to the window of the image before that it shows:

    image             part, enlarged    moved            mirrored          turned
    +---------+       +---------+       +---------+      +---------+       +---------+
    |  +--+   |  -->  | a       |  -->  |         | -->  |         |  -->  |         |
    |  |a |   |       |         |       |   a     |      |     a   |       |    a    |
    +--+--+---+       +---------+       +---------+      +---------+       +---------+
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hires.core.augmentations import AUGMENTATIONS, PlaceChange
from hires.core.config.fields import value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hires.data.image_fit import ReadWindow
    from hires.data.image_format import Pixels, Size, Span


@AUGMENTATIONS.register("crop")
class Crop(PlaceChange):
    """Least share of an image's area that a random part of it has; 1: all of it.

    The part is enlarged to the whole size.
    """

    amount = value(1.0, above=0, high=1)
    order = 10

    def __init__(self, amount: float, size: Size, random: np.random.Generator) -> None:
        share, *corner = random.random(3).tolist()
        side = (amount + (1 - amount) * share) ** 0.5
        self.size = size
        self.part = (max(1, round(side * size[0])), max(1, round(side * size[1])))
        self.top, self.left = (
            min(int(place * (length - kept + 1)), length - kept)
            for place, length, kept in zip(corner, size, self.part, strict=True)
        )

    def window(
        self, read: ReadWindow, rows: Span, cols: Span, label_fill: float | None
    ) -> NDArray[Any]:
        """Returns a window of the enlarged part."""
        from hires.data.image_fit import nearest_window, resize

        def of_part(rows: Span, cols: Span) -> NDArray[Any]:
            return read(_moved(rows, self.top), _moved(cols, self.left))

        if label_fill is not None:
            return nearest_window(of_part, self.part, self.size, rows, cols)

        def samples_last(rows: Span, cols: Span) -> Pixels:
            return of_part(rows, cols).transpose(1, 2, 0)

        return resize(samples_last, self.part, self.size, rows, cols).transpose(2, 0, 1)


@AUGMENTATIONS.register("shift")
class Shift(PlaceChange):
    """Most pixels by which images are moved up, down, left or right; what comes in is grey."""

    amount, kind = value(0, 0), int
    fills = True
    order = 20

    def __init__(self, amount: int, size: Size, random: np.random.Generator) -> None:
        self.size = size
        self.down, self.right = random.integers(-amount, amount, 2, endpoint=True).tolist()

    def window(
        self, read: ReadWindow, rows: Span, cols: Span, label_fill: float | None
    ) -> NDArray[Any]:
        """Returns a window of the image, which lies further down and right."""
        from hires.data.image_fit import crop

        def samples_last(rows: Span, cols: Span) -> Pixels:
            pixels = read(rows, cols)
            return pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels[:, :, None]

        moved = _moved(rows, -self.down), _moved(cols, -self.right)
        pixels = crop(samples_last, self.size, self.size, *moved, fill=label_fill or 0.0)
        return pixels.transpose(2, 0, 1) if label_fill is None else pixels[:, :, 0]


@AUGMENTATIONS.register("flip")
class Flip(PlaceChange):
    """In which ways half of the images are mirrored.

    ``none``, ``horizontal`` (left to right), ``vertical`` (upside down) or ``both``, each by
    itself.
    """

    amount, kind = value("none", choices=("none", "horizontal", "vertical", "both")), str
    order = 30

    def __init__(self, amount: str, size: Size, random: np.random.Generator) -> None:
        self.size = size
        vertical, horizontal = (random.random(2) < 0.5).tolist()
        self.vertical = vertical and amount in ("vertical", "both")
        self.horizontal = horizontal and amount in ("horizontal", "both")

    def window(
        self, read: ReadWindow, rows: Span, cols: Span, label_fill: float | None
    ) -> NDArray[Any]:
        """Returns a window of the mirrored image."""
        height, width = self.size
        rows = (height - rows[1], height - rows[0]) if self.vertical else rows
        cols = (width - cols[1], width - cols[0]) if self.horizontal else cols
        down, across = (
            -1 if is_mirrored else 1 for is_mirrored in (self.vertical, self.horizontal)
        )
        return read(rows, cols)[..., ::down, ::across]


@AUGMENTATIONS.register("rotate")
class Rotate(PlaceChange):
    """Whether images are turned by 0, 90, 180 or 270 degrees.

    Those that are not square are turned by 0 or 180.
    """

    amount, kind = value(False), bool
    order = 40

    def __init__(self, amount: bool, size: Size, random: np.random.Generator) -> None:
        self.size = size
        turns = int(random.integers(4))
        self.turns = turns if size[0] == size[1] else turns // 2 * 2

    def window(
        self, read: ReadWindow, rows: Span, cols: Span, label_fill: float | None
    ) -> NDArray[Any]:
        """Returns a window of the image, turned counterclockwise."""
        import numpy as np

        height, width = self.size
        for _ in range(self.turns):
            # A turn brings the last column to the top: row r shows column height - 1 - r.
            rows, cols = cols, (height - rows[1], height - rows[0])
            height, width = width, height
        turned: NDArray[Any] = np.rot90(read(rows, cols), self.turns, (-2, -1))
        return turned


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
