"""Computes the structural similarity (SSIM) of images, whole or in tiles.

    own pixels of a tile       what it computes with: windows whose centres are its own
      +----------+               + - - - - - - - +
      |          |      -->      |  +----------+ |  5 pixels of its neighbours, where the
      |          |                  |          |    image goes on
      +----------+               |  +----------+ |

Each window of 11 x 11 pixels that lies inside of the image counts once, at the tile that owns its
centre, so the sums of all tiles are that of one process. Outputs of the border come from the tiles
that have them, between two steps, when no message of the plan is under way.

Source:
    Wang, Bovik, Sheikh and Simoncelli, "Image quality assessment: from error visibility to
    structural similarity", IEEE Transactions on Image Processing, 2004.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from hires import comm
from hires.core.evaluation_summary import SIMILARITY_WINDOW
from hires.parallel.context import Context
from hires.parallel.halo import new_part, part, paste
from hires.plan.graph import Rect
from hires.plan.tiling import intersect, is_empty, own_rects

REACH = SIMILARITY_WINDOW // 2
_SIGMA = 1.5
_SMALL = (0.01**2, 0.03**2)
"""Keep quotients finite; of values from 0 to 1."""


def similarity_sum(made: Tensor, wanted: Tensor) -> float:
    """Returns the sum of SSIM over all windows inside of two images, and over their channels.

    Both are (C, h, w), from -2 (black) to 2 (white). Where ``made`` is not finite the sum is NaN.
    """
    if min(made.shape[1:]) < SIMILARITY_WINDOW:
        return 0.0
    x, y = (one.double().clamp(-2, 2).add(2).div(4) for one in (made, wanted))
    x.masked_fill_(~made.isfinite(), math.nan)
    mean_x, mean_y = _weighted(x), _weighted(y)
    spread_x = _weighted(x * x) - mean_x * mean_x
    spread_y = _weighted(y * y) - mean_y * mean_y
    common = _weighted(x * y) - mean_x * mean_y
    first, second = _SMALL
    above = (2 * mean_x * mean_y + first) * (2 * common + second)
    below = (mean_x * mean_x + mean_y * mean_y + first) * (spread_x + spread_y + second)
    return float((above / below).sum())


def grown(rect: Rect, size: Sequence[int]) -> Rect:
    """Returns a tile's rectangle with all pixels of the image that its windows reach."""
    r0, r1, c0, c1 = rect
    whole = (0, size[0], 0, size[1])
    return intersect((r0 - REACH, r1 + REACH, c0 - REACH, c1 + REACH), whole)


def with_border(context: Context, values: Tensor, size: Sequence[int]) -> Tensor:
    """Returns a tile's part of a map, (n, C, h, w), with the border of :func:`grown`.

    All tiles of the map call it together, between two steps. ``size`` is [rows, columns] of the
    whole map.
    """
    rects = own_rects(size, context.stage.tiles)
    own = rects[context.tile]
    window = grown(own, size)
    made, posts = new_part(values, window), list[comm.P2POp]()
    pieces = [(own, values)]
    for tile, rect in enumerate(rects):
        if tile == context.tile:
            continue
        place = context.replica, context.direction, context.stage.index, tile
        peer = context.plan.rank_of(*place)
        if not is_empty(sent := intersect(own, grown(rect, size))):
            posts.append(comm.P2POp(comm.isend, part(values, own, sent).contiguous(), peer))
        if not is_empty(rect := intersect(rect, window)):
            arrives = values.new_empty(new_part(values, rect).shape)
            pieces.append((rect, arrives))
            posts.append(comm.P2POp(comm.irecv, arrives, peer))
    with comm.logged(None):
        for handle in comm.batch_isend_irecv(posts):
            handle.wait()
    paste(made, window, pieces, window)
    return made


def _weighted(values: Tensor) -> Tensor:
    # (C, h, w) -> the Gaussian mean of each window, (C, h - 10, w - 10), tap by tap.
    places = range(-REACH, REACH + 1)
    weights = [math.exp(-(at**2) / (2 * _SIGMA**2)) for at in places]
    total = math.fsum(weights)
    for dim in (1, 2):
        length = values.shape[dim] - 2 * REACH
        taps = [values.narrow(dim, k, length) * (w / total) for k, w in enumerate(weights)]
        values = sum(taps[1:], taps[0])
    return values
