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
_SIDE = 256
"""Windows of a block, down and across: an image of any size takes a few MiB beside its own."""


def similarity_sum(made: Tensor, wanted: Tensor) -> float:
    """Returns the sum of SSIM over all windows inside of two images, and over their channels.

    Both are (C, h, w), from -2 (black) to 2 (white). Where ``made`` is not finite the sum is NaN.
    """
    rows, cols = (length - 2 * REACH for length in made.shape[1:])
    sums = []
    for x, y in zip(made, wanted, strict=True):
        for row in range(0, rows, _SIDE):
            for col in range(0, cols, _SIDE):
                at = slice(row, row + _SIDE + 2 * REACH), slice(col, col + _SIDE + 2 * REACH)
                sums.append(_block_sum(x[at], y[at]))
    return math.fsum(sums)


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


def _block_sum(made: Tensor, wanted: Tensor) -> float:
    # The sum over the windows inside of a block, (h, w), whose copies are all the memory it takes.
    x, y = (one.clamp(-2, 2).double().add_(2).div_(4) for one in (made, wanted))
    x.masked_fill_(~made.isfinite(), math.nan)
    mean_x, mean_y = _weighted(x), _weighted(y)
    common = _weighted(x * y).sub_(mean_x * mean_y)
    squares = mean_x.square().add_(mean_y.square())
    spread = _weighted(x.square_().add_(y.square_())).sub_(squares)
    first, second = _SMALL
    above = mean_x.mul_(mean_y).mul_(2).add_(first).mul_(common.mul_(2).add_(second))
    return float(above.div_(squares.add_(first).mul_(spread.add_(second))).sum())


def _weighted(values: Tensor) -> Tensor:
    # (h, w) -> the Gaussian mean of each window, (h - 10, w - 10), tap by tap.
    places = range(-REACH, REACH + 1)
    weights = [math.exp(-(at**2) / (2 * _SIGMA**2)) for at in places]
    total = math.fsum(weights)
    for dim in (0, 1):
        length = values.shape[dim] - 2 * REACH
        made = values.narrow(dim, 0, length) * (weights[0] / total)
        for k in range(1, SIMILARITY_WINDOW):
            made.add_(values.narrow(dim, k, length), alpha=weights[k] / total)
        values = made
    return values
