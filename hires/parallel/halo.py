"""How does a tile get the pixels around it, and how do their gradients get back?

The window of an operation is the rectangle of its input that a tile's output depends on: own
pixels, halo, and a ring outside the image that is filled with what the whole-image operation would
use. The exchange is differentiable: the gradient of a halo pixel travels to its owner and is added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires.comm import Group, Handle, irecv, isend
from hires.parallel.context import Context
from hires.plan.graph import Rect
from hires.plan.plan import CommOp
from hires.plan.program import Message
from hires.plan.tiling import intersect, is_empty


class Exchange:
    """The messages around one node on one rank, and the rectangles that they concern.

    Rectangles are in pixels of the whole input map; ``window`` may reach beyond the map.
    """

    def __init__(self, context: Context, op: CommOp | None, own: Rect, window: Rect) -> None:
        self.own = own
        self.window = window
        self.inner = intersect(own, window)
        self.dtype = context.dtype
        self.tiles = context.tiles
        self.sends, self.receives = context.halo(op, back=False) if op else ([], [])
        self.back_sends, self.back_receives = context.halo(op, back=True) if op else ([], [])

    def begin(self, x: Tensor) -> Pending:
        """Posts the receives of the halo and the sends of the border pixels of ``x``."""
        return Pending(x, self.own, self.sends, self.receives, self.tiles)

    def begin_back(self, grad: Tensor) -> Pending:
        """Posts the way back: gradients of borrowed pixels go to their owners."""
        return Pending(grad, self.window, self.back_sends, self.back_receives, self.tiles)


class Pending:
    """An exchange under way."""

    def __init__(
        self,
        source: Tensor,
        origin: Rect,
        sends: list[Message],
        receives: list[Message],
        tiles: Group,
    ) -> None:
        self.received: list[tuple[Handle, Message, Tensor]] = []
        for message in receives:
            buffer = new_map(source, message.shape)
            handle = irecv(buffer, message.peer, message.tag, tiles)
            self.received.append((handle, message, buffer))
        self.sent = [
            isend(part(source, origin, message.rect), message.peer, message.tag, tiles)
            for message in sends
        ]

    def wait(self) -> list[tuple[Rect, Tensor]]:
        """Returns the received rectangles once all are there."""
        arrived = []
        for handle, message, buffer in self.received:
            handle.wait()
            assert message.rect is not None
            arrived.append((message.rect, buffer))
        for handle in self.sent:
            handle.wait()
        return arrived


class GatherWindow(torch.autograd.Function):
    """x of a tile -> its window, with halo and ring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, fill: float) -> Tensor:
        """(n, C, h, w) -> (n, C, window rows, window cols)."""
        ctx.exchange = exchange
        ctx.shape = x.shape
        pending = exchange.begin(x)
        r0, r1, c0, c1 = exchange.window
        shape = (x.shape[0], x.shape[1], r1 - r0, c1 - c0)
        window = new_map(x, shape)
        _fill_ring(window, exchange, fill)
        if not is_empty(exchange.inner):
            part(window, exchange.window, exchange.inner).copy_(
                part(x, exchange.own, exchange.inner)
            )
        for rect, buffer in pending.wait():
            part(window, exchange.window, rect).copy_(buffer)
        return window

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        """Gradient of the window -> gradient of the tile."""
        exchange = ctx.exchange
        pending = exchange.begin_back(grad)
        whole = exchange.inner == exchange.own
        result = part(grad, exchange.window, exchange.own) if whole else None
        if result is None or (pending.received and not _is_dense(result)):
            result = new_map(grad, ctx.shape)
            if not whole:
                result.zero_()
            if not is_empty(exchange.inner):
                inner = part(grad, exchange.window, exchange.inner)
                part(result, exchange.own, exchange.inner).copy_(inner)
        # The window had one reader, so its gradient is nobody else's and may be added to.
        for rect, buffer in pending.wait():
            part(result, exchange.own, rect).add_(buffer)
        return result, None, None


def gather_window(x: Tensor, exchange: Exchange, fill: float = 0.0) -> Tensor:
    """Returns the window of a tile; differentiable.

    Args:
        x: this rank's tile, (n, C, h, w).
        exchange: what to send and receive.
        fill: value of the pixels outside the image.

    Raises:
        CommError: a neighbour died or did not answer within ``comm.timeout_s``.
    """
    if exchange.window == exchange.own and not (exchange.sends or exchange.receives):
        return x
    return GatherWindow.apply(x.to(exchange.dtype), exchange, fill)  # type: ignore[no-any-return,no-untyped-call]


def part(x: Tensor, origin: Rect, rect: Rect | None) -> Tensor:
    """Returns the view of ``rect`` of a tensor that holds the pixels of ``origin``."""
    assert rect is not None
    rows = slice(rect[0] - origin[0], rect[1] - origin[0])
    return x[:, :, rows, rect[2] - origin[2] : rect[3] - origin[2]]


def new_map(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns an uninitialised channels-last tensor of another's type and device."""
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _is_dense(x: Tensor) -> bool:
    """Whether a view lies in memory as a tensor of its own would."""
    return x.is_contiguous(memory_format=torch.channels_last)


def _fill_ring(window: Tensor, exchange: Exchange, fill: float) -> None:
    """Fills what lies outside the image; everything else is written afterwards."""
    inside = exchange.inner
    for message in exchange.receives:
        assert message.rect is not None
        inside = _cover(inside, message.rect)
    if is_empty(inside):
        window.fill_(fill)
        return
    r0, _, c0, _ = exchange.window
    window[:, :, : inside[0] - r0] = fill
    window[:, :, inside[1] - r0 :] = fill
    window[:, :, :, : inside[2] - c0] = fill
    window[:, :, :, inside[3] - c0 :] = fill


def _cover(a: Rect, b: Rect) -> Rect:
    """Returns the smallest rectangle that holds both."""
    if is_empty(a):
        return b
    return min(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), max(a[3], b[3])
