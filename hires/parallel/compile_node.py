"""Turns a node of the graph into the callable with which this rank computes it.

    values held by the rank -> crop, or borrow what is missing -> kernel -> its part of the value

The rule of the node says what it needs of other ranks. Torch's own operator computes what needs
nothing of them. The kernels of windows are in :mod:`hires.parallel.window`, those of norms and
means of the image in :mod:`hires.parallel.image_kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.parallel.convolution import SUBSTITUTES
from hires.parallel.halo import Exchange, Frame, exchange_of, gather_window, part
from hires.parallel.image_kernels import IMAGE_KERNELS, Bind, Operator, Values, share
from hires.parallel.window import Window
from hires.plan.graph import Node, Rect
from hires.plan.halos import is_list
from hires.plan.operators.operator_table import uses_batch_statistics
from hires.plan.plan import CommOp
from hires.plan.rules import TILED, rule_in, shard_args

MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
}


def compile_node(node: Node, context: Context, tensors: dict[str, Tensor]) -> Operator:
    """Returns the callable that computes a node from the values of the stage.

    Args:
        node: a node of this rank's stage.
        context: the rank.
        tensors: parameters and buffers of the stage by name.
    """
    stage = context.stage
    rule = rule_in(stage, node, context.plan.graph)
    assert rule is not None, f"{node.name} was planned without a rule"
    if rule.kind == "window":
        return _windowed(node, context, tensors)
    if rule.kind in ("norm", "reduce"):
        run = IMAGE_KERNELS[node.kind](node, context, _binder(node, tensors))
    elif uses_batch_statistics(node):
        run = _local_norm(node, context, tensors)
    elif stage.shards > 1:
        first, end = context.samples
        args = shard_args(node, context.plan.graph.input_shape[0], end - first)
        run = _local(dataclasses.replace(node, args=args), tensors)
    else:
        run = _local(node, tensors)
    tiled = stage.num_tiles > 1 and rule.result == TILED
    return _with_operands(run, node, context) if tiled else run


def _comm_of(node: Node, context: Context, kind: str) -> list[CommOp]:
    """Returns the communication of one kind that brings a node its operands."""
    comm = context.stage.comm
    return [op for op in comm if op.kind == kind and node.name in (op.node, *op.readers)]


def _windowed(node: Node, context: Context, tensors: dict[str, Tensor]) -> Operator:
    """Returns the callable of a node that reads a window of its one input."""
    bind, [source] = _binder(node, tensors), node.inputs
    exchanges = {op.value: exchange_of(context, op) for op in _comm_of(node, context, "halo")}
    window = Window(node, context, exchanges.get(source))

    def run_window(values: Values) -> Tensor:
        borrowed = exchanges[source].borrow(values, node.name) if exchanges else None
        return window(values[source], borrowed, bind(values))

    return run_window


def _with_operands(run: Operator, node: Node, context: Context) -> Operator:
    """Returns the callable that first fits the operands of a node to the pixels that it makes.

    A tile may hold more pixels of an operand than the node makes, where halos are fused: they are
    cropped. It may hold fewer: the others are borrowed. An operand that all tiles hold whole is
    shared: its gradient is the sum over the tiles. Lists of tensors are made of own pixels.
    """
    graph, layout = context.plan.graph, context.stage.layout
    exchanges = {op.value: exchange_of(context, op) for op in _comm_of(node, context, "halo")}
    shared = [op.value for op in _comm_of(node, context, "share")]
    fits: dict[str, Callable[[Values], Tensor]] = {}
    for name in node.inputs:
        if layout[name] != TILED or is_list(graph, name):
            continue
        held, makes_map = context.extent(name), not is_list(graph, node.name)
        wanted = context.extent(node.name) if makes_map else context.own(graph.shape(name)[2:])
        if name in exchanges:
            # The gradient of an operand may be another operand's too: nothing is added to it.
            frame = Frame(held, wanted, exchanges[name].size, private=False)
            fits[name] = functools.partial(_gathered, exchanges[name], node.name, frame)
        elif wanted != held:
            fits[name] = functools.partial(_cropped, name, held, wanted)
    if not shared and not fits:
        return run

    def run_on(values: Values) -> Any:
        changed = {name: share(values[name], context.cursor, node.name) for name in shared}
        return run({**values, **changed, **{name: fit(values) for name, fit in fits.items()}})

    return run_on


def _gathered(exchange: Exchange, reader: str, frame: Frame, values: Values) -> Tensor:
    return gather_window(values[exchange.value], exchange.borrow(values, reader), frame)


def _cropped(name: str, held: Rect, wanted: Rect, values: Values) -> Tensor:
    return part(values[name], held, wanted)


def _local_norm(node: Node, context: Context, tensors: dict[str, Tensor]) -> Operator:
    """Returns the callable of batch normalisation in training whose statistics are the rank's own.

    A microbatch that is computed again must not count twice in the running statistics.
    """
    track = _local(node, tensors)
    untracked = {**node.args, "running_mean": None, "running_var": None}
    again = _local(dataclasses.replace(node, args=untracked), tensors)
    return lambda values: again(values) if context.recomputing else track(values)


def _local(node: Node, tensors: dict[str, Tensor]) -> Operator:
    """Returns the callable of a node that needs nothing of other ranks: the ATen operator."""
    if node.kind == "getitem":
        [source], index = node.inputs, node.args["index"]
        return lambda values: operator.getitem(values[source], index)
    name, overload = node.op.split(".", 1)
    function = getattr(getattr(torch.ops.aten, name), overload or "default")
    keyword = {a.name for a in function._schema.arguments if a.kwarg_only}
    function = SUBSTITUTES.get(node.kind) or function
    bind = _binder(node, tensors)

    def run(values: Values) -> Any:
        args = bind(values)
        named = {key: args.pop(key) for key in keyword}
        return function(*args.values(), **named)

    return run


def _binder(node: Node, tensors: dict[str, Tensor]) -> Bind:
    """Returns the callable that collects a node's arguments; constants are decoded only once."""
    fixed: dict[str, Any] = {}
    from_values: list[tuple[str, Any]] = []
    for key, arg in node.args.items():
        fixed[key] = None
        if _has_value(arg):
            from_values.append((key, arg))
        else:
            fixed[key] = _decode(arg, {}, tensors)

    def bind(values: Values) -> dict[str, Any]:
        bound = dict(fixed)
        for key, arg in from_values:
            bound[key] = _decode(arg, values, tensors)
        return bound

    return bind


def _has_value(arg: Any) -> bool:
    if isinstance(arg, list):
        return any(_has_value(item) for item in arg)
    return isinstance(arg, dict) and "value" in arg


def _decode(arg: Any, values: Values, tensors: dict[str, Tensor]) -> Any:
    """Returns an argument of a graph as torch takes it."""
    if isinstance(arg, list):
        return [_decode(item, values, tensors) for item in arg]
    if not isinstance(arg, dict):
        return arg
    [(kind, name)] = arg.items()
    if kind == "value":
        return values[name]
    if kind == "param":
        return tensors[name]
    if kind == "dtype":
        return getattr(torch, name)
    return MEMORY_FORMATS[name] if kind == "memory_format" else None
