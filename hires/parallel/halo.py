"""How does a tile get the pixels around it, and how do their gradients get back?

The pixels of a value that other tiles hold travel once for all operations that read them (the
plan's ``readers``). Each adds the gradients of what it used, and when the backward pass comes to
the first reader, which is the last one that it comes to, they go to their owners and are added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hires.comm import Group, Handle, irecv, isend
from hires.parallel.context import Context
from hires.plan.graph import Rect
from hires.plan.halos import companions, name_of
from hires.plan.plan import CommOp
from hires.plan.program import Message
from hires.plan.tiling import inside, intersect, is_empty

Piece = tuple[Rect, Tensor]
"""Pixels of the whole map, and the tensor that holds them."""


@dataclass(frozen=True)
class Frame:
    """A window of a map, in pixels of the whole map."""

    held: Rect
    """What the tile holds."""
    window: Rect
    """What it wants; it may reach beyond the map."""
    size: tuple[int, int]
    """Rows and columns of the map."""
    fill: float = 0.0
    """Value of the pixels outside."""
    private: bool = True
    """Whether the gradient of the window is its reader's alone, and may be added to: not that of an
    addition, which hands one tensor to both operands."""


class Exchange:
    """The messages of one exchange on one rank: who sends and receives which pixels.

    Rectangles are in pixels of the whole map.
    """

    def __init__(self, context: Context, op: CommOp, leads: bool = True) -> None:
        """``leads``: whether the next value's pixels may set out with these."""
        plan, stage = context.plan, context.stage
        self.key = name_of(op)
        with_next = plan.remember(("with", stage.index), lambda: companions(plan.graph, stage))
        later = with_next.get(self.key)
        self.later = Exchange(context, later, leads=False) if leads and later else None
        self.value, self.readers = op.value, op.readers
        _, _, *size = context.plan.graph.shape(op.value)
        self.own = context.own(size)
        self.size = size[0], size[1]
        self.dtype = context.dtype
        self.tiles = context.tiles
        self.sends, self.receives = context.halo(op, back=False)
        self.back_sends, self.back_receives = context.halo(op, back=True)

    def borrow(self, values: dict[str, Any], reader: str) -> Borrowed:
        """Returns the pixels that travel, sent on their way by the first reader.

        Args:
            values: of this forward pass; it keeps the exchange until its last reader has come.
            reader: the node that asks.
        """
        if reader == self.readers[0]:
            self._begin(values)
            if self.later is not None:
                self.later._begin(values)
        borrowed: Borrowed = values[self.key]
        if reader == self.readers[-1]:
            del values[self.key]
        return borrowed

    def _begin(self, values: dict[str, Any]) -> None:
        """Sends the pixels on their way, unless they went with those of another value."""
        if self.key not in values:
            values[self.key] = Borrowed(self, values[self.value].detach())


class Pending:
    """Messages under way."""

    def __init__(
        self,
        source: Callable[[Message], Tensor],
        sends: list[Message],
        receives: list[Message],
        like: Tensor,
        tiles: Group,
    ) -> None:
        self.received: list[tuple[Handle, Message, Tensor]] = []
        for message in receives:
            buffer = new_map(like, message.shape)
            handle = irecv(buffer, message.peer, message.tag, tiles)
            self.received.append((handle, message, buffer))
        self.sent = [isend(source(m), m.peer, m.tag, tiles) for m in sends]

    def wait(self) -> list[Piece]:
        """Returns the received rectangles once all are there."""
        arrived = []
        for handle, message, buffer in self.received:
            handle.wait()
            assert message.rect is not None
            arrived.append((message.rect, buffer))
        for handle in self.sent:
            handle.wait()
        return arrived


class Borrowed:
    """The pixels that one forward pass borrows from other tiles, and their gradients.

    Args:
        exchange: what is sent and received.
        x: own pixels, (n, C, h, w).
    """

    def __init__(self, exchange: Exchange, x: Tensor) -> None:
        self.exchange = exchange
        source = x.to(exchange.dtype)
        self._like = source.new_empty(0)

        def border(message: Message) -> Tensor:
            return part(source, exchange.own, message.rect)

        self._pending: Pending | None = Pending(
            border, exchange.sends, exchange.receives, source, exchange.tiles
        )
        self._pieces: list[Piece] = []
        self._gradients: dict[Rect, Tensor] = {}
        self._readers_left = len(exchange.readers)

    def pieces(self) -> list[Piece]:
        """Returns the borrowed pixels once they have come."""
        if self._pending is not None:
            self._pieces, self._pending = self._pending.wait(), None
        return self._pieces

    def add_gradient(self, origin: Rect, grad: Tensor, within: Rect) -> None:
        """Adds the gradient of the borrowed pixels in a rectangle.

        Args:
            origin: pixels that ``grad`` holds.
            grad: (n, C, rows, cols).
            within: the borrowed pixels outside it have been, or will be, added apart.
        """
        for rect, pixels in self._pieces:
            common = intersect(rect, within)
            if is_empty(common):
                continue
            found = part(grad, origin, common)
            if common == rect and len(self.exchange.readers) == 1:
                self._gradients[rect] = found  # all of it: nobody else adds to these pixels
                continue
            if rect not in self._gradients:
                self._gradients[rect] = torch.zeros_like(pixels)
            part(self._gradients[rect], rect, common).add_(found)

    def give_back(self) -> Pending | None:
        """Sends the gradients to their owners when the last reader has added its own.

        Returns:
            To the last reader what is on its way: the gradients of own pixels that others borrowed.
        """
        self._readers_left -= 1
        if self._readers_left:
            return None
        exchange = self.exchange
        messages = exchange.back_sends, exchange.back_receives
        return Pending(self._gradient, *messages, self._like, exchange.tiles)

    def _gradient(self, message: Message) -> Tensor:
        """Returns the gradient of what came with a message."""
        assert message.rect is not None
        if message.rect in self._gradients:
            return self._gradients[message.rect]
        return new_map(self._like, message.shape).zero_()


class GatherWindow(torch.autograd.Function):
    """Held pixels -> a window of the map, with borrowed pixels and a ring outside the image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, borrowed: Borrowed | None, frame: Frame) -> Tensor:
        """(n, C, held rows, held cols) -> (n, C, window rows, window cols)."""
        ctx.borrowed, ctx.frame, ctx.shape = borrowed, frame, x.shape
        r0, r1, c0, c1 = frame.window
        gathered = new_map(x, (*x.shape[:2], r1 - r0, c1 - c0))
        _fill_ring(gathered, frame)
        pieces = borrowed.pieces() if borrowed is not None else []
        for rect, tensor in [(frame.held, x), *pieces]:
            common = intersect(rect, frame.window)
            if not is_empty(common):
                part(gathered, frame.window, common).copy_(part(tensor, rect, common))
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        """Gradient of the window -> gradient of the held pixels."""
        frame: Frame = ctx.frame
        arriving = None
        if ctx.borrowed is not None:
            ctx.borrowed.add_gradient(frame.window, grad, frame.window)
            arriving = ctx.borrowed.give_back()
        whole = inside(frame.held, frame.window) and not is_empty(frame.held)
        result = part(grad, frame.window, frame.held) if whole else None
        changed = arriving is not None
        if result is None or (changed and not (frame.private and _is_dense(result))):
            result = new_map(grad, ctx.shape)
            common = intersect(frame.held, frame.window)
            if not whole:
                result.zero_()
            if not is_empty(common):
                part(result, frame.held, common).copy_(part(grad, frame.window, common))
        add_pieces(result, frame.held, arriving)
        return result, None, None


def gather_window(x: Tensor, borrowed: Borrowed | None, frame: Frame) -> Tensor:
    """Returns the window of a tile; differentiable.

    Args:
        x: the pixels that the tile holds, (n, C, h, w).
        borrowed: pixels of other tiles, or None if the tile holds all of the window in the image.
        frame: which pixels these are.

    Raises:
        CommError: a neighbour died or did not answer within ``comm.timeout_s``.
    """
    if borrowed is not None:
        x = x.to(borrowed.exchange.dtype)
    return GatherWindow.apply(x, borrowed, frame)  # type: ignore[no-any-return,no-untyped-call]


def crop(x: Tensor, held: Rect, wanted: Rect) -> Tensor:
    """Returns the wanted part of a tensor; the tensor itself if that is all of it."""
    return x if wanted == held else part(x, held, wanted)


def add_pieces(grad: Tensor, held: Rect, arriving: Pending | None) -> None:
    """Waits for the gradients of pixels that others borrowed, and adds them to their owner's."""
    if arriving is not None:
        for rect, tensor in arriving.wait():
            part(grad, held, rect).add_(tensor)


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


def _fill_ring(gathered: Tensor, frame: Frame) -> None:
    """Fills what lies outside the image; everything else is written afterwards."""
    image = intersect(frame.window, (0, frame.size[0], 0, frame.size[1]))
    if is_empty(image):
        gathered.fill_(frame.fill)
        return
    r0, _, c0, _ = frame.window
    gathered[:, :, : image[0] - r0] = frame.fill
    gathered[:, :, image[1] - r0 :] = frame.fill
    gathered[:, :, :, : image[2] - c0] = frame.fill
    gathered[:, :, :, image[3] - c0 :] = frame.fill
