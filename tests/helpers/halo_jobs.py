"""Compares a halo exchange with its adjoint: the dot products of both must be equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.core.ranks.world import World
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.halo import Frame, exchange_at, gather_window
from hires.parallel.window import Window
from hires.plan.event import Event
from hires.plan.groups import groups
from hires.plan.plan import CommOp, Plan
from hires.plan.program import halo_messages
from hires.plan.rules import window_axes_of
from tests.helpers.jobs import join


def adjoints(
    world: World, plan: dict[str, Any], nodes: list[str], seed: int
) -> list[tuple[float, float]]:
    """Returns (<H x, y>, <x, H* y>) of halo exchanges, as this rank sees them.

    ``nodes`` are their first readers. H is linear: what each reader computes, without bias, from
    the pixels that it gets.
    """
    made = Plan.from_dict(plan)
    join(world, made)
    place = Cursor([], comm.make_groups(groups(made), 1))
    context = Context(made, world.rank, place.groups, place)
    found = []
    for node in nodes:
        op = next(op for op in context.stage.comm if op.node == node and op.kind == "halo")
        found.append(_adjoint(context, op, seed))
    comm.barrier()
    comm.shutdown()
    return found


def _adjoint(context: Context, op: CommOp, seed: int) -> tuple[float, float]:
    """Returns both products of one exchange."""
    context.cursor.events = exchange_events(context, op)
    context.cursor.restart()
    generator = torch.Generator().manual_seed(seed + context.rank)
    n, channels, *_ = context.plan.graph.shape(op.value)
    r0, r1, c0, c1 = context.extent(op.value)
    x = torch.randn(n, channels, r1 - r0, c1 - c0, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    values: dict[str, Any] = {op.value: x}
    outputs = [_linear_part(context, op, reader, values) for reader in op.readers]
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in outputs]
    torch.autograd.backward(outputs, weights)
    assert x.grad is not None
    pairs = zip(outputs, weights, strict=True)
    forward = sum(float((o.detach() * y).sum()) for o, y in pairs)
    return forward, float((x.detach() * x.grad).sum())


def exchange_events(context: Context, op: CommOp) -> list[Event]:
    """Returns the events of one exchange alone, forward and back."""
    made = [Event("end", -1, 0)]
    for back in (True, False):
        sends, receives = halo_messages(context.plan, context.rank, 0, op, back)
        posts = [*receives, *sends]
        made = [*posts, *(post._replace(kind=f"wait_{post.kind}") for post in posts), *made]
    return made


def _linear_part(context: Context, op: CommOp, reader: str, values: dict[str, Any]) -> Tensor:
    """Returns what a reader of an exchange computes from its pixels: a convolution, or them."""
    node = context.plan.graph.by_name[reader]
    exchange = exchange_at(context, context.stage.comm.index(op))
    if window_axes_of(node, context.plan.graph) is None:
        frame = Frame(exchange.own, context.extent(reader), exchange.size)
        return gather_window(values[op.value], exchange.borrow(values, reader), frame)
    window = Window(node, context, exchange)
    borrowed = exchange.borrow(values, reader)
    if window.strips is None:
        frame = Frame(window.held, window.rect, window.size)
        return gather_window(values[op.value], borrowed, frame)
    generator = torch.Generator().manual_seed(1)
    shape = context.plan.graph.params[node.args["weight"]["param"]].shape
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    return window(values[op.value], borrowed, {**node.args, "weight": weight, "bias": None})
