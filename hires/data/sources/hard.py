"""Draws the images of ``data=hard``, which no network classifies without errors.

A class is a direction of stripes; an image of it turns them by up to :data:`OVERLAP` of half the
distance to the next class, so that directions of neighbours overlap. Colour, width, brightness and
strong noise say nothing of the class.

    class 0   |--------|
    class 1         |--------|        directions; in the overlap half of the answers are wrong
    class 2               |--------|

The best answers are right for 1 / OVERLAP of the images: differences between precisions then show
in the share of right answers, as they do not where every answer is right.
"""

from __future__ import annotations

import numpy as np

from hires.data.image_fit import Place
from hires.data.image_format import Span, Window, check_window, normalised
from hires.data.source import SOURCES
from hires.data.sources.synthetic import SyntheticSource, noise, waves

OVERLAP = 1.2
STRIPES, BRIGHTNESS, NOISE = 0.16, 0.06, 0.24
"""How far each moves a value away from 0.5; together less than 0.5."""
PERIODS = 5.0, 11.0


@SOURCES.register("hard")
class OverlappingSource(SyntheticSource):
    """Images drawn from the seed and their number alone, a window at a time."""

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of an image, (C, h, w); no other pixel is computed."""
        check_window(rows, cols, self._size)
        random = np.random.Generator(np.random.PCG64([self._seed, 1, i]))
        turn = 0.5 * OVERLAP * random.uniform(-1, 1)
        angle = np.pi * (self.label(i) + turn) / self.num_classes
        wave = random.uniform(*PERIODS), random.uniform(0, 2 * np.pi), self._size, rows, cols
        plane = np.float32(STRIPES) * waves(angle, *wave)
        plane += noise(random, self._size, rows, cols, NOISE)
        tints = BRIGHTNESS * random.uniform(-1, 1, self._channels)
        drawn = plane[..., None] + np.asarray(0.5 + tints, np.float32)
        return normalised(drawn, 1.0, self._channels)
