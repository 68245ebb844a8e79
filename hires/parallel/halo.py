"""Borrows the pixels around a tile from other tiles, and returns their gradients.

The pixels of a value that other tiles hold travel once for all operations that read them (the
plan's ``readers``). Each adds the gradients of what it used, and when the backward pass comes to
the first reader, which is the last one that it comes to, they go to their owners and are added.

    forward    tile 0 |  own rows  | last row  --->  halo |  own rows  | tile 1
    backward   tile 0 |  own rows  | + gradient <--- halo |  own rows  | tile 1

A pixel that is borrowed has an influence on both tiles, so its gradient is the sum of what both
find. Without the way back the gradient of the weights before the exchange would be wrong at every
border. Which messages these are, and in which order, is in the events of the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.plan.event import Event
from hires.plan.graph import Rect
from hires.plan.groups import sent_as
from hires.plan.halos import name_of
from hires.plan.plan import CommOp
from hires.plan.tiling import inside, intersect, is_empty

Piece = tuple[Rect, Tensor]  # pixels of the whole map, and the tensor that holds them


class Frame(NamedTuple):
    """A window of a map, in pixels of the whole map."""

    held: Rect  # what the tile holds
    window: Rect  # what it wants; it may reach beyond the map
    size: tuple[int, int]  # rows and columns of the map
    fill: float = 0.0  # value of the pixels outside
    # Whether the gradient of the window is its reader's alone, and may be added to: not that of an
    # addition, which hands one tensor to both operands.
    private: bool = True
    # Whether rows, and columns, go on at the other end of the map.
    turns: tuple[bool, bool] = (False, False)

    def origins(self) -> list[Rect]:
        """Returns the window, and where it lies as seen from the map's other ends.

        A window of rows -2 to 3 of 9 is also one of rows 7 to 12.
        """
        shifts = [
            (0, -size, size) if turns else (0,)
            for size, turns in zip(self.size, self.turns, strict=True)
        ]
        r0, r1, c0, c1 = self.window
        return [(r0 + y, r1 + y, c0 + x, c1 + x) for y, x in itertools.product(*shifts)]


class Exchange:
    """One exchange of pixels on one rank, all microbatches alike."""

    # Readers a, b and c of one value, in a forward pass and on its way back:
    #
    #   forward    a: post sends and receives, wait, compute    b: compute    c: compute
    #   backward   c: keep its part of the gradient    b: add its part
    #              a: add its part, post; compute; wait, add what returns to own pixels
    def __init__(self, context: Context, op: CommOp, number: int) -> None:
        self.context, self.cursor, self.number = context, context.cursor, number
        self.key, self.node = name_of(op), op.node
        self.value, self.readers = op.value, op.readers
        _, _, *size = context.plan.graph.shape(op.value)
        self.own, self.size = context.own(size), (size[0], size[1])
        dtype, _ = sent_as(context.plan, op.value, op.kind)
        self.dtype: torch.dtype = getattr(torch, dtype)  # of messages
        self.tiles = context.tiles

    def borrow(self, values: dict[str, Any], reader: str) -> Borrowed:
        """Returns the pixels that travel; ``values`` keep them until the last reader has come."""
        if reader == self.readers[0]:
            # Where this exchange has no message for this rank, the next one of the node comes.
            for event in self.cursor.posts(self.node, back=False):
                exchange_at(self.context, event.part.number)._borrowed(values).post(event)
            self._borrowed(values)  # where this rank sends and receives nothing
        borrowed: Borrowed = values[self.key]
        if reader == self.readers[-1]:
            del values[self.key]
        return borrowed

    def _borrowed(self, values: dict[str, Any]) -> Borrowed:
        if self.key not in values:
            values[self.key] = Borrowed(self, values[self.value].detach())
        return values[self.key]  # type: ignore[no-any-return]


def exchange_at(context: Context, number: int) -> Exchange:
    """Returns an exchange by its position in ``Stage.comm``; its readers share it."""
    if number not in context.exchanges:
        context.exchanges[number] = Exchange(context, context.stage.comm[number], number)
    return context.exchanges[number]  # type: ignore[no-any-return]


class Borrowed:
    """The pixels that one forward pass borrows from other tiles, and their gradients."""

    def __init__(self, exchange: Exchange, x: Tensor) -> None:  # x: own pixels, (n, C, h, w)
        self.exchange = exchange
        self._source: Tensor | None = x
        self._like = x.new_empty(0, dtype=exchange.dtype)
        self._pieces: list[Piece] = []
        self._gradients: dict[Rect, Tensor] = {}
        self._readers_left = len(exchange.readers)

    def post(self, event: Event) -> None:
        """Posts a message of the exchange, forward or back."""
        if event.kind == "recv":
            tensor = new_map(self._like, event.shape)
        elif event.part.back:
            assert event.rect is not None
            if event.rect not in self._gradients:
                # No reader used these pixels, but their owner waits for a message.
                self._gradients[event.rect] = new_map(self._like, event.shape).zero_()
            tensor = self._gradients[event.rect].to(self.exchange.dtype)
        else:
            assert self._source is not None
            tensor = part(self._source, self.exchange.own, event.rect).to(self.exchange.dtype)
        self.exchange.cursor.post(event, tensor, self.exchange.tiles)

    def pieces(self) -> list[Piece]:
        """Returns the borrowed pixels once they have come."""
        if self._source is not None:  # the first reader waits, and lets own pixels go
            self._pieces = self.exchange.cursor.waits(self.exchange.number, back=False)
            self._source = None
        return self._pieces

    def add_gradient(self, origin: Rect, grad: Tensor, once: bool) -> None:
        """Adds the gradient of the borrowed pixels in a rectangle, ``origin``; ``grad`` holds it.

        ``once``: the reader has no second part of it.
        """
        for rect, pixels in self._pieces:
            common = intersect(rect, origin)
            if is_empty(common):
                continue
            added = part(grad, origin, common)
            if once and common == rect and len(self.exchange.readers) == 1:
                # All of it, and no other reader adds to these pixels: a view is sent as it lies.
                self._gradients[rect] = added
                continue
            if rect not in self._gradients:
                self._gradients[rect] = torch.zeros_like(pixels, dtype=grad.dtype)
            part(self._gradients[rect], rect, common).add_(added)

    def reduce_halo_gradients(self) -> Borrowed | None:
        """Sends the gradients to their owners when the last reader has added its own.

        Only that reader gets ``self`` back, to wait in :meth:`returned` for what others send.
        """
        self._readers_left -= 1
        if self._readers_left:
            return None
        for event in self.exchange.cursor.posts(self.exchange.node, back=True):
            self.post(event)
        return self

    def returned(self) -> list[Piece]:
        """Returns the gradients of own pixels that others borrowed, once they have come."""
        return self.exchange.cursor.waits(self.exchange.number, back=True)


class _GatherWindow(torch.autograd.Function):
    # Held pixels (n, C, rows, cols) -> a window of the map, with borrowed pixels and the ring.
    @staticmethod
    def forward(ctx: Any, x: Tensor, borrowed: Borrowed | None, frame: Frame) -> Tensor:
        ctx.borrowed, ctx.frame, ctx.shape = borrowed, frame, x.shape
        return gathered_window(x, borrowed, frame)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        arriving = send_gradients(grad, ctx.borrowed, ctx.frame)
        return own_gradient(grad, arriving, ctx.frame, ctx.shape), None, None


def gather_window(x: Tensor, borrowed: Borrowed | None, frame: Frame) -> Tensor:
    """Returns a tile's window from what it holds, (n, C, h, w), and borrows; differentiable.

    It has the type of what the tile holds, in whatever type the borrowed pixels came.
    """
    if not torch.is_grad_enabled():  # autograd's call costs as much as the copies of a small window
        return gathered_window(x, borrowed, frame)
    return _GatherWindow.apply(x, borrowed, frame)  # type: ignore[no-any-return,no-untyped-call]


def gathered_window(x: Tensor, borrowed: Borrowed | None, frame: Frame) -> Tensor:
    """Returns the same without a gradient."""
    gathered = new_part(x, frame.window)
    _fill_ring(gathered, frame)
    pieces = borrowed.pieces() if borrowed is not None else []
    for origin in frame.origins():
        paste(gathered, origin, [(frame.held, x), *pieces], origin)
    return gathered


def send_gradients(grad: Tensor, borrowed: Borrowed | None, frame: Frame) -> Borrowed | None:
    """Sends the gradients of a window's borrowed pixels; returns what :func:`own_gradient` gets."""
    if borrowed is None:
        return None
    origins = frame.origins()
    for origin in origins:
        borrowed.add_gradient(origin, grad, once=len(origins) == 1)
    return borrowed.reduce_halo_gradients()


def own_gradient(
    grad: Tensor, arriving: Borrowed | None, frame: Frame, shape: tuple[int, ...]
) -> Tensor:
    """Returns the gradient of what a tile holds, from that of a window and those that arrive."""
    origins = frame.origins()
    once = len(origins) == 1
    whole = once and inside(frame.held, frame.window) and not is_empty(frame.held)
    if whole:
        own = part(grad, frame.window, frame.held)
        # A view does where nothing is added to it, or where it may be: it is no other operand's
        # gradient, and lies in memory as a tensor of its own would.
        dense = own.is_contiguous(memory_format=torch.channels_last)
        if arriving is None or (frame.private and dense):
            add_pieces(own, frame.held, arriving)
            return own
    result = new_map(grad, shape)
    if not whole:
        result.zero_()
    for origin in origins:
        common = intersect(origin, frame.held)
        if not is_empty(common):
            target, added = part(result, frame.held, common), part(grad, origin, common)
            _ = target.copy_(added) if whole else target.add_(added)
    add_pieces(result, frame.held, arriving)
    return result


def add_pieces(grad: Tensor, held: Rect, arriving: Borrowed | None) -> None:
    """Waits for the gradients of pixels that others borrowed, and adds them to their owner's."""
    if arriving is not None:
        for rect, tensor in arriving.returned():
            part(grad, held, rect).add_(tensor)


def paste(target: Tensor, origin: Rect, pieces: Iterable[Piece], within: Rect) -> None:
    """Copies what pieces hold of a rectangle; ``target`` holds the pixels of ``origin``."""
    for rect, tensor in pieces:
        common = intersect(rect, within)
        if not is_empty(common):
            part(target, origin, common).copy_(part(tensor, rect, common))


def part(x: Tensor, origin: Rect, rect: Rect | None) -> Tensor:
    """Returns ``rect`` of a tensor that holds ``origin``, as a view or, if it is all, itself."""
    assert rect is not None
    if rect == origin:
        return x
    rows = slice(rect[0] - origin[0], rect[1] - origin[0])
    return x[:, :, rows, rect[2] - origin[2] : rect[3] - origin[2]]


def new_part(like: Tensor, rect: Rect) -> Tensor:
    """Returns :func:`new_map` for a rectangle, with the samples and channels of ``like``."""
    return new_map(like, (*like.shape[:2], rect[1] - rect[0], rect[3] - rect[2]))


def new_map(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns an uninitialised channels-last tensor of another's type and device."""
    order = torch.channels_last
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=order)


def _fill_ring(gathered: Tensor, frame: Frame) -> None:
    # Only what lies outside the image: everything else is written afterwards.
    image = intersect(frame.window, (0, frame.size[0], 0, frame.size[1]))
    if is_empty(image):
        gathered.fill_(frame.fill)
        return
    edges = zip(frame.window[::2], frame.window[1::2], image[::2], image[1::2], strict=True)
    for dim, (first, end, low, high) in enumerate(edges, start=2):
        if low > first:
            gathered.narrow(dim, 0, low - first).fill_(frame.fill)
        if end > high:
            gathered.narrow(dim, high - first, end - high).fill_(frame.fill)
