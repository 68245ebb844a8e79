"""Brings a tile of an output the pixels around it that a metric of images reaches, as SSIM does.

    own pixels of a tile       what it counts with: windows whose centres are its own
      +----------+               + - - - - - - - +
      |          |      -->      |  +----------+ |  ``reach`` pixels of its neighbours, where
      |          |                  |          |    the image goes on
      +----------+               |  +----------+ |

Each window that lies inside of the image counts once, at the tile that owns its centre, so the sums
of all tiles are that of one process. Outputs of the border come from the tiles that have them,
between two steps, when no message of the plan is under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hires import comm
from hires.parallel.context import Context
from hires.parallel.halo import new_part, part, paste
from hires.plan.graph import Rect
from hires.plan.tiling import intersect, is_empty, own_rects


def grown(rect: Rect, size: Sequence[int], reach: int) -> Rect:
    """Returns a tile's rectangle with the pixels of the image that are so near to it."""
    r0, r1, c0, c1 = rect
    whole = (0, size[0], 0, size[1])
    return intersect((r0 - reach, r1 + reach, c0 - reach, c1 + reach), whole)


def with_border(context: Context, values: Tensor, size: Sequence[int], reach: int) -> Tensor:
    """Returns a tile's part of a map, (n, C, h, w), with the border of :func:`grown`.

    All tiles of the map call it together, between two steps. ``size`` is [rows, columns] of the
    whole map.
    """
    rects = own_rects(size, context.stage.tiles)
    own = rects[context.tile]
    window = grown(own, size, reach)
    made, posts = new_part(values, window), list[comm.P2POp]()
    pieces = [(own, values)]
    for tile, rect in enumerate(rects):
        if tile == context.tile:
            continue
        place = context.replica, context.direction, context.stage.index, tile
        peer = context.plan.rank_of(*place)
        if not is_empty(sent := intersect(own, grown(rect, size, reach))):
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
