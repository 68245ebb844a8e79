"""Turns a node of the graph into the callable with which this rank computes it.

    values held by the rank -> crop, or borrow what is missing -> kernel -> its part of the value

The rule of the node says what it needs of other ranks. Torch's own operator computes what needs
nothing of them. Other kernels are those of the operator's entry
(:class:`~hires.plan.operators.operator_facts.OperatorFacts`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hires.core.registry import imported
from hires.nets.program_calls import overload_of
from hires.nets.random_draws import Draws, Places
from hires.parallel.context import Context, Packer
from hires.parallel.conversion_kernels import CONVERSIONS, count_once, on_tile
from hires.parallel.halo import Exchange, Frame, exchange_at, gather_window, part
from hires.parallel.image_kernels import Bind, Operator, Values, share
from hires.parallel.reductions import sum_over_tiles
from hires.parallel.torch_faults import SUBSTITUTES
from hires.parallel.window import Window, window_of
from hires.plan.factors import local_size
from hires.plan.graph import Node
from hires.plan.groups import used_both_ways
from hires.plan.halos import on_one_map
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.rules import SHARDED, TILED, WHOLE, dims_of, rule_in
from hires.plan.tiling import inside


def compile_node(
    node: Node, context: Context, tensors: dict[str, Tensor], overwrites: bool = False
) -> Operator:
    """Returns the callable that computes a node of this rank's stage from the stage's values.

    ``overwrites``: a fused operator may write its value over the one beside its window.
    """
    stage, facts = context.stage, facts_of(node.kind)
    rule = rule_in(stage, node, context.plan.graph)
    if rule.kind in CONVERSIONS:
        return CONVERSIONS[rule.kind](node, context, tensors)
    if rule.kind == "window":
        return _windowed(node, context, tensors, overwrites)
    if rule.fit is not None and rule.fit.dims is not None:
        shards = stage.shards > 1
        rect = (*context.samples, 0, 1) if shards else context.extent(node.name)
        node = on_tile(node, rule.fit.dims, rect)
    if rule.kind == "norm" and rule.fit is None:
        # Its operands are fitted when they are bound: joint norms run at the first of them.
        bind, fit = bind_arguments(node, context.device, tensors), _operand_fit(node, context)
        fitted = bind if fit is None else lambda values: bind(fit(values))
        return imported(facts.kernel)(node, context, fitted)  # type: ignore[no-any-return]
    if rule.kind == "norm" or (rule.kind == "reduce" and rule.fit is None):
        run = imported(facts.kernel)(node, context, bind_arguments(node, context.device, tensors))
    else:
        both = used_both_ways(context.plan, stage) if rule.result == WHOLE else set()
        run = _counted_once(node, context, tensors, both & {*node.params}, overwrites)
    if is_random(node):
        run = _drawn(run, node, context)
    tiled = stage.num_tiles > 1 and rule.result == TILED
    if rule.kind == "reduce" and rule.fit is not None:
        parts = _with_operands(run, node, context)
        return lambda values: sum_over_tiles(parts(values), context, node.name)
    return _with_operands(run, node, context) if tiled else run


def _alone(
    node: Node, context: Context, tensors: dict[str, Tensor], overwrites: bool = False
) -> Operator:
    # The callable of a node that needs nothing of other ranks.
    facts, bind = facts_of(node.kind), bind_arguments(node, context.device, tensors)
    if (own := imported(facts.own)) is not None:
        kernel = own(node, context)
        _pack_later(node, context, tensors, kernel)
        return lambda values: kernel(bind(values))
    if facts.quantized or overload_of(node.op) is None:  # an operator of hires alone
        source, window = node.inputs[0], window_of(node, context, whole=True, overwrites=overwrites)
        _pack_later(node, context, tensors, window)
        return lambda values: window(values[source], None, bind(values))
    if updates_statistics(node):
        # A microbatch that is computed again must not count twice in the running statistics.
        no_tracking = {**node.args, "running_mean": None, "running_var": None}
        again = dataclasses.replace(node, args=no_tracking)
        first_run = local_operator(node, context.device, tensors)
        second_run = local_operator(again, context.device, tensors)
        return lambda values: (second_run if context.recomputing else first_run)(values)
    return local_operator(node, context.device, tensors)


def _counted_once(
    node: Node,
    context: Context,
    tensors: dict[str, Tensor],
    names: set[str],
    overwrites: bool,
) -> Operator:
    # The same, where only one tile may add the gradient of some parameters: they become values.
    if not names:
        return _alone(node, context, tensors, overwrites)

    def as_values(arg: Any) -> Any:
        if isinstance(arg, list):
            return [*map(as_values, arg)]
        if isinstance(arg, dict) and arg.get("param") in names:
            return {"value": f"parameter {arg['param']}"}
        return arg

    args = {key: as_values(arg) for key, arg in node.args.items()}
    run = _alone(dataclasses.replace(node, args=args), context, tensors, overwrites)
    return lambda values: run(
        {
            **values,
            **{f"parameter {name}": count_once(tensors[name], context.tile) for name in names},
        }
    )


def _drawn(run: Operator, node: Node, context: Context) -> Operator:
    # The callable under a mode that draws the numbers of this rank's part of the value.
    whole = node.shape or []
    places = [range(size) for size in whole]
    layout = context.stage.layout.get(node.name)
    if layout == TILED:
        # Of every factor: in a row, the factors of all dims are the whole value's numbers.
        rect = context.extent(node.name)
        dims = dims_of(context.plan.graph, context.stage, node.name)
        whole, places = [], []
        for factor in itertools.chain.from_iterable(dims):
            first = rect[2 * factor.axis] if factor.axis is not None else 0
            whole.append(factor.size)
            places.append(range(first, first + local_size(factor, rect)))
    elif layout == SHARDED:
        places[0] = range(*context.samples)

    def places_of(shape: Sequence[int]) -> tuple[Places, Sequence[int]]:
        # The noise of whole channels or samples has one number for all pixels.
        single = facts_of(node.kind).positional == "channel"
        sizes = [*whole[:2], *[1] * len(whole[2:])] if single else whole
        return [*places[:2], *map(range, sizes[2:])] if single else places, sizes

    samples = context.plan.graph.input_shape[0]
    shared = places_of if layout in (TILED, SHARDED) else None

    def run_drawn(values: Values) -> Any:
        place = context.step, context.first_sample
        with Draws(context.seed, *place, samples, node.draw, shared):
            return run(values)

    return run_drawn


def _comm_of(node: Node, context: Context, kind: str) -> dict[str, int]:
    # The values that a node gets from other ranks in one way, and the position in ``Stage.comm``.
    comm = [(n, op) for n, op in enumerate(context.stage.comm) if op.kind == kind]
    return {op.value: n for n, op in comm if node.name in (op.node, *op.readers)}


def _exchanges(node: Node, context: Context) -> dict[str, Exchange]:
    numbers = _comm_of(node, context, "halo")
    return {value: exchange_at(context, number) for value, number in numbers.items()}


def _pack_later(node: Node, context: Context, tensors: dict[str, Tensor], kernel: Any) -> None:
    # Lets a kernel, or the window of one, keep its weight in its own order, once that has values.
    pack, window = imported(facts_of(node.kind).packs), None
    if isinstance(kernel, Window):
        window = kernel
        pack = None if window.is_blank or window.strips else pack
    if pack is None or context.plan.training:
        return
    args = fixed_arguments(node, tensors)
    if args["weight"] is None:  # it is a value
        return
    shape = _input_shape(node, context, window)

    def run() -> Tensor | None:
        like = args["weight"].new_empty(1, dtype=context.dtype).expand(*shape)
        return pack(kernel, like, args)  # type: ignore[no-any-return]

    context.packers.append(Packer(node.args["weight"]["param"], run))


def _input_shape(node: Node, context: Context, window: Window | None = None) -> list[int]:
    # Of what a kernel gets on this rank; ``window``: the pixels that it reads of a map.
    [source, *_], stage, graph = node.inputs, context.stage, context.plan.graph
    layout, shape = stage.layout[source], graph.shape(source)
    if layout in (TILED, SHARDED):
        rect = (*context.samples, 0, 1) if layout == SHARDED else context.extent(node.name)
        dims = dims_of(graph, stage, source)
        shape = [math.prod(local_size(factor, rect) for factor in dim) for dim in dims]
    if window is not None:
        r0, r1, c0, c1 = window.rect
        shape = [*shape[:2], r1 - r0, c1 - c0]
    return shape


def _windowed(
    node: Node, context: Context, tensors: dict[str, Tensor], overwrites: bool
) -> Operator:
    bind = bind_arguments(node, context.device, tensors)
    source, exchanges = node.inputs[0], _exchanges(node, context)
    exchange, shared = exchanges.get(source), _comm_of(node, context, "share")
    window = window_of(node, context, exchange, overwrites=overwrites)
    _pack_later(node, context, tensors, window)
    operand = node.args.get(facts_of(node.kind).residual_arg)
    beside = "" if operand is None else operand["value"]
    sizes = window.axes[0].size_out, window.axes[1].size_out
    frame = Frame(context.extent(beside), window.out, sizes) if beside else None

    def run_window(values: Values) -> Tensor:
        weights = {name: share(values[name], context.cursor, node.name) for name in shared}
        borrowed = {}
        for name, one in exchanges.items():
            borrowed[name] = one.borrow(values, node.name)
            if len(exchanges) > 1:  # the next one sets out behind it
                borrowed[name].pieces()
        if frame is not None:  # as of other operands: cropped, or with borrowed pixels
            inner, own = inside(frame.window, frame.held), values[beside]
            weights[beside] = (
                part(own, frame.held, frame.window)
                if inner
                else gather_window(own, borrowed.get(beside), frame)
            )
        return window(values[source], borrowed.get(source), bind({**values, **weights}))

    return run_window


def _with_operands(run: Operator, node: Node, context: Context) -> Operator:
    fit = _operand_fit(node, context)
    return run if fit is None else lambda values: run(fit(values))


def _operand_fit(node: Node, context: Context) -> Callable[[Values], Values] | None:
    # What fits the operands of a node to the pixels that it makes, if they do not fit:
    #
    #     tile holds of an operand    | # # # # # # |         more than the node makes: cropped
    #     node makes                      | o o o o o o |
    #     borrowed                                  | h |     fewer: the others are borrowed
    #
    # A tile holds more than it owns where one halo exchange serves several layers. An operand that
    # all tiles hold whole is shared: its gradient is the sum over the tiles. Lists of tensors and
    # values that are no maps are made of own pixels.
    graph, layout = context.plan.graph, context.stage.layout
    exchanges, makes_map = _exchanges(node, context), layout[node.name] == TILED
    shared = _comm_of(node, context, "share")

    def fit_of(name: str) -> Callable[[Values], Tensor] | None:
        held = context.extent(name)
        one_map = makes_map and on_one_map(graph, context.stage, node.name, name)
        wanted = context.extent(node.name) if one_map else context.own_of(name)
        if name not in exchanges:
            return None if wanted == held else lambda v: part(v[name], held, wanted)
        # The gradient of an operand may be another operand's too: nothing is added to it.
        exchange = exchanges[name]
        frame = Frame(held, wanted, exchange.size, private=False)
        return lambda v: gather_window(v[name], exchange.borrow(v, node.name), frame)

    maps = [n for n in node.inputs if layout[n] == TILED and not graph.is_list(n)]
    maps = [n for n in maps if n not in context.stage.factors]
    fits = {name: fit for name in maps if (fit := fit_of(name)) is not None}
    if not shared and not fits:
        return None

    def fitted(values: Values) -> Values:
        changed = {name: share(values[name], context.cursor, node.name) for name in shared}
        return {**values, **changed, **{name: fit(values) for name, fit in fits.items()}}

    return fitted


def local_operator(node: Node, device: torch.device, tensors: dict[str, Tensor]) -> Operator:
    """Returns torch's own operator of a node, of values as a rank holds them."""
    function = overload_of(node.op)
    schema = getattr(function, "_schema", None)
    keyword = {a.name for a in schema.arguments if a.kwarg_only} if schema is not None else {}
    function = SUBSTITUTES.get(node.kind) or function
    bind = bind_arguments(node, device, tensors)

    def run(values: Values) -> Any:
        args = bind(values)
        named = {key: args.pop(key) for key in keyword}
        value = function(*args.values(), **named)
        return value[0] if first and isinstance(value, tuple) else value

    def run_apart(values: Values) -> Any:
        with torch.no_grad():  # torch has no derivative of randint_like, for example
            return run(values)

    first = node.shape is not None  # of an operator's values only the first is read
    return run_apart if facts_of(node.kind).ends_gradient else run


def bind_arguments(node: Node, device: torch.device, tensors: dict[str, Tensor]) -> Bind:
    """Returns what collects a node's arguments by name; its constants are decoded only once."""
    from_values = [(key, arg) for key, arg in node.args.items() if _reads_value(arg)]
    fixed = fixed_arguments(node, tensors)
    if "device" in fixed:  # of an operator that makes a tensor, perhaps without an operand
        fixed["device"] = device
    single = [(key, arg["value"]) for key, arg in from_values if isinstance(arg, dict)]
    lists = [(key, arg) for key, arg in from_values if isinstance(arg, list)]

    def bind(values: Values) -> dict[str, Any]:
        args = fixed.copy()
        for key, name in single:
            args[key] = values[name]
        for key, arg in lists:
            args[key] = _decode(arg, values, tensors)
        return args

    return bind


def fixed_arguments(node: Node, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Returns a node's arguments by name, None for those that are values."""
    args = node.args.items()
    return {k: None if _reads_value(arg) else _decode(arg, {}, tensors) for k, arg in args}


def _reads_value(arg: Any) -> bool:
    if isinstance(arg, list):
        return any(map(_reads_value, arg))
    return isinstance(arg, dict) and "value" in arg


def _decode(arg: Any, values: Values, tensors: dict[str, Tensor]) -> Any:
    if isinstance(arg, list):
        return [_decode(item, values, tensors) for item in arg]
    if not isinstance(arg, dict):
        return arg
    [(kind, name)] = arg.items()
    if kind == "value":
        return values[name]
    if kind == "param":
        return tensors[name]
    # A layout is that of the operands.
    return getattr(torch, name) if kind in ("dtype", "memory_format") else None
