"""States how each operator computes with unsigned 8-bit integers.

Layers come first, then pools and copies, then what works on each number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NoReturn

from hires.core.config.precision_config import DYNAMIC
from hires.plan.graph import Node
from hires.plan.operators.formulas import Activation, unfused
from hires.plan.operators.operator_facts import activation_of
from hires.plan.operators.windows import pair
from hires.plan.passes.fuse import norm_recipe, norm_tensors
from hires.plan.passes.int8_arithmetic import (
    ALL,
    beside,
    bounds_of,
    clamp_of,
    layer_tensors,
    rescaled,
    row_tensors,
    sum_before,
    table_of,
    weight_form,
)
from hires.plan.passes.int8_state import FOLLOWS, QuantisedValue, Quantiser, StaysFloat
from hires.quant.affine import LAST, MOST_PRODUCTS, Affine

TOO_MANY = "it sums more products than 32 bits hold"
NO_SCALE = "a value of it has no scale"
REAL = Affine(1.0, 0)
"""Of values that are computed as real numbers."""

Args = dict[str, Any]


def _refuse(why: str) -> NoReturn:
    raise StaysFloat(why)


def _value(arg: Any) -> str:
    return str(arg.get("value", ""))


def _layer(
    q: Quantiser,
    node: Node,
    kind: str,
    args_of: Callable[[Affine, dict[str, int]], Args],
    affine: Affine | None,
) -> None:
    """Appends a layer and its activation, whose value is real numbers without an ``affine``.

    ``args_of`` returns the layer's arguments for a rounding of its sums, and their bounds.
    """
    activation = node.args.get("activation")
    if affine is None:
        _real_layer(q, node, kind, args_of(REAL, ALL) | {"dtype": {"dtype": "float32"}})
        return
    inner = sum_before(activation, affine)
    args = args_of(inner.affine, inner.bounds) | {"dtype": {"dtype": "uint8"}}
    if inner.table is None:
        q.emit(node, kind, args, affine)
        return
    name = f"{node.name}.sum"
    q.add(name, kind, args, node.shape, flops=node.flops)
    q.numbers[name] = QuantisedValue(name, inner.affine)
    _by_table(q, node, inner.table, q.numbers[name], affine)


def _real_layer(q: Quantiser, node: Node, kind: str, args: Args) -> None:
    activation: Activation | None = node.args.get("activation")
    if activation:
        inner = q.add(f"{node.name}.sum", kind, args, node.shape, "float32", node.flops)
        kind, args = unfused(activation, inner)
    q.emit(node, kind, args, None)


def _by_table(
    q: Quantiser, node: Node, activation: Activation, source: QuantisedValue, to: Affine
) -> None:
    table = table_of(activation, source.affine, to)
    q.emit(node, "q_table", {"input": source.ref, "table": table}, to)


def convolution(q: Quantiser, node: Node) -> None:
    """Computes a convolution with what follows it."""
    args, other = node.args, None
    x, weight = q.integers(_value(args["input"])), args["weight"].get("param")
    if weight is None:
        _refuse("its weight is computed")
    if len(node.shape or []) != 4:
        _refuse("its input has no batch")
    held = q.graph.params.get(weight)  # else of a norm, which has one product for each element
    if held is not None and math.prod(held.shape[1:]) > MOST_PRODUCTS:
        _refuse(TOO_MANY)
    if args.get("other") is not None:
        other = q.integers(_value(args["other"]), "what it adds has no scale")
        if q.graph.shape(_value(args["other"])) != node.shape:
            _refuse("what it adds has no scale")
    affine = q.values.get(node.name)
    if other is not None and affine is None:
        _refuse("its value has no scale")
    if other is None and not q.has_int8_reader(node.name):
        affine = None

    def args_of(to: Affine, bounds: dict[str, int]) -> Args:
        more = beside(other, to)
        tensors = layer_tensors(q, node, x, weight, to, {}, more.pop("add"))
        place = {name: args[name] for name in ("stride", "padding", "dilation", "groups")}
        made = {"input": x.ref, **tensors, **place, "zero_point": x.affine.zero_point}
        return made | more | bounds

    _layer(q, node, "q_conv2d", args_of, affine)


def transposed(q: Quantiser, node: Node) -> None:
    """Computes a transposed convolution."""
    args = node.args
    x, weight = q.integers(_value(args["input"])), args["weight"].get("param")
    if weight is None or len(node.shape or []) != 4:
        _refuse("its weight is computed")
    stride, padding, dilation = (pair(args[name]) for name in ("stride", "padding", "dilation"))
    (channels, outputs, *kernel), groups = q.graph.params[weight].shape, args["groups"]
    if math.prod([channels, *kernel]) // groups > MOST_PRODUCTS:
        _refuse(TOO_MANY)
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    taps = [-(-size // step) for size, step in zip(reach, stride, strict=True)]
    shape = [groups * outputs * stride[0] * stride[1], channels // groups, *taps]

    def args_of(to: Affine, bounds: dict[str, int]) -> Args:
        tensors = layer_tensors(q, node, x, weight, to, weight_form(node), shape=shape)
        made = {"input": x.ref, **tensors, "kernel_size": kernel, "stride": stride}
        made |= {"padding": padding, "dilation": dilation, "groups": groups}
        return {**made, "zero_point": x.affine.zero_point, **bounds}

    affine = q.values.get(node.name) if q.has_int8_reader(node.name) else None
    _layer(q, node, "q_conv_transpose2d", args_of, affine)


def norm(q: Quantiser, node: Node) -> None:
    """A norm with stored statistics multiplies every channel, as a convolution of each does."""
    tensors = norm_tensors(node, q.graph)
    if tensors is None:
        _refuse("it has the statistics of its input")
    channels, recipe = q.graph.shape(node.inputs[0])[1:2], norm_recipe("folded_bias", node, tensors)
    bias = q.param(f"{node.name}:bias", channels, "float32", recipe)
    as_fused = dataclasses.replace(node, args={**node.args, "bias": bias})
    _by_channel(q, as_fused, recipe, channels)


def fused_norm(q: Quantiser, node: Node) -> None:
    """The same with an activation behind it."""
    scale = q.graph.params[node.args["weight"]["param"]]
    _by_channel(q, node, scale.recipe or {}, scale.shape)


def _by_channel(q: Quantiser, node: Node, recipe: Args, channels: list[int]) -> None:
    """Adds a norm as a convolution of each channel alone; ``recipe`` names its tensors."""
    _only_map(q, node)
    made = {**recipe, "make": "norm_weight"}
    weight = q.param(f"{node.name}:weight", [*channels, 1, 1, 1], "float32", made)
    as_layer = {name: node.args.get(name) for name in ("input", "bias", "activation")}
    as_layer |= {"weight": weight, "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1]}
    as_layer["groups"] = channels[0]
    convolution(q, dataclasses.replace(node, op="conv2d.default", args=as_layer))


def linear(q: Quantiser, node: Node) -> None:
    """Computes a linear layer."""
    weight, bias = (node.args.get(name) or {} for name in ("weight", "bias"))
    if "value" in weight or "value" in bias:
        _refuse(f"its {'weight' if 'value' in weight else 'bias'} is computed")
    weight = weight["param"]
    if q.graph.params[weight].shape[-1] > MOST_PRODUCTS:
        _refuse(TOO_MANY)
    if q.linear == DYNAMIC:  # of real numbers, whose rows are quantised while it is computed
        if node.dtype != "float32":
            _refuse(f"it computes in {node.dtype}")
        args: Args = {"input": {"value": q.real(_value(node.args["input"]))}}
        args |= {**row_tensors(q, node, weight), "bias": node.args.get("bias")}
        _real_layer(q, node, "q_dynamic_linear", args)
        return
    x = q.integers(_value(node.args["input"]))
    shape = [*q.graph.params[weight].shape, 1, 1]

    def args_of(to: Affine, bounds: dict[str, int]) -> Args:
        return {"input": x.ref, **layer_tensors(q, node, x, weight, to, {}, shape=shape), **bounds}

    affine = q.values.get(node.name) if q.has_int8_reader(node.name) else None
    _layer(q, node, "q_linear", args_of, affine)


def _only_map(q: Quantiser, node: Node) -> QuantisedValue:
    # The only input of a node that makes a map.
    x = q.only_input(node)
    return x if len(node.shape or []) == 4 else _refuse(FOLLOWS)


def avg_pool(q: Quantiser, node: Node) -> None:
    """Computes an average pool."""
    x, args = _only_map(q, node), node.args
    affine = q.values.get(node.name, x.affine)
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    made = {"input": x.ref, **{name: args[name] for name in (*names, "divisor_override")}}
    made |= {"zero_point": x.affine.zero_point, "factor": x.affine.scale / affine.scale}
    q.emit(node, "q_avg_pool2d", {**made, "offset": float(affine.zero_point), **ALL}, affine)


def adaptive_pool(q: Quantiser, node: Node) -> None:
    """Computes a mean of the image."""
    if node.shape is not None and node.shape[2:] == [1, 1]:
        _mean_of(q, node, [2, 3], keepdim=True)
    else:
        mixed(q, node)


def mean(q: Quantiser, node: Node) -> None:
    """Computes a mean of rows and columns."""
    dims, rank = node.args.get("dim"), len(q.graph.shape(node.inputs[0]))
    of_pixels = {4: [2, 3], 3: [1]}.get(rank)  # of a map (n, C, H, W), or of tokens (n, H W, C)
    if not isinstance(dims, list) or sorted(dim % rank for dim in dims) != of_pixels:
        _refuse("it is no mean of all pixels")
    _mean_of(q, node, of_pixels or [], keepdim=bool(node.args.get("keepdim")))


def _mean_of(q: Quantiser, node: Node, dims: list[int], keepdim: bool) -> None:
    x = q.only_input(node)
    affine, shape = q.values.get(node.name, x.affine), q.graph.shape(node.inputs[0])
    how = rescaled(x.affine, affine)
    pixels = math.prod(shape[dim] for dim in dims)
    how["factor"] /= pixels
    # fp32, in which tiles send their sums, holds every integer up to 2 ** 24.
    parts = 1 if LAST * pixels <= 2**24 else 2
    made = {"input": x.ref, "dim": dims, "keepdim": keepdim, "parts": parts, **how, **ALL}
    q.emit(node, "q_mean", made, affine)


def mixed(q: Quantiser, node: Node) -> None:
    """Computes an interpolation."""
    x, args = _only_map(q, node), node.args
    affine = q.values.get(node.name, x.affine)
    given = args.get("scale_factors") or [args.get(f"scales_{dim}") for dim in "hw"]
    made = {"input": x.ref, "mode": node.kind, "align_corners": bool(args.get("align_corners"))}
    made |= {"scales_h": given[0], "scales_w": given[1]}
    q.emit(node, "q_interpolate", {**made, **rescaled(x.affine, affine), **ALL}, affine)


def moved(q: Quantiser, node: Node) -> None:
    """An operator that selects integers without changing them."""
    x, args = q.only_input(node), {**node.args}
    args[next(iter(args))] = x.ref
    if "value" in args and args.get("mode", "constant") == "constant":
        fill, ends = args["value"] or 0.0, (x.affine.real(0), x.affine.real(LAST))
        if not ends[0] <= fill <= ends[1]:
            _refuse(f"it fills in {fill:g}, and its input has {ends[0]:.4g} to {ends[1]:.4g}")
        args["value"] = float(x.affine.quantized(fill))
    q.emit(node, node.op, args, x.affine)


def clamp(q: Quantiser, node: Node) -> None:
    """Computes a clamp, or a ReLU, by other bounds."""
    x, activation = q.only_input(node), activation_of(node)
    ends = clamp_of(activation) if activation else None
    if ends is None:
        _refuse("its bounds are no range of numbers")
    affine = q.values.get(node.name, x.affine)
    made = {"input": x.ref, **rescaled(x.affine, affine), **bounds_of(ends, affine)}
    q.emit(node, "q_requantize", made, affine)


def activation(q: Quantiser, node: Node) -> None:
    """Computes an activation by a table."""
    x, affine, activation = q.only_input(node), q.values.get(node.name), activation_of(node)
    if affine is None or activation is None:
        _refuse("its value has no scale")
    _by_table(q, node, activation, x, affine)


def _operands(node: Node) -> list[str]:
    # The values that an operator of two maps reads; fewer if one is no value.
    operands = (node.args["self"], node.args["other"])
    return [one["value"] for one in operands if isinstance(one, dict) and "value" in one]


def add(q: Quantiser, node: Node) -> None:
    """Computes a sum of two maps."""
    names = _operands(node)
    if len(names) < 2 or node.args.get("alpha", 1) != 1:
        _refuse("it adds no two maps")
    if any(q.graph.shape(name) != node.shape for name in names):
        _refuse("it adds maps of two sizes")
    if q.numbers.keys().isdisjoint(names):
        _refuse(FOLLOWS)
    affine, first, second = q.values.get(node.name), *(q.integers(n, NO_SCALE) for n in names)
    if affine is None:
        _refuse(NO_SCALE)
    more = beside(second, affine)
    made = {"input": first.ref, **rescaled(first.affine, affine, more.pop("add")), **more, **ALL}
    q.emit(node, "q_add", made, affine)


def mul(q: Quantiser, node: Node) -> None:
    """Computes a product of two maps, or with one number for each channel."""
    affine, factor = q.values.get(node.name), node.args["other"]
    if isinstance(factor, (int, float)):
        x = q.only_input(node)
        if affine is None:
            _refuse("it has no scale")
        scaled = Affine(x.affine.scale * factor, x.affine.zero_point)
        q.emit(node, "q_requantize", {"input": x.ref, **rescaled(scaled, affine), **ALL}, affine)
        return
    # The map first, what multiplies its channels or pixels second.
    names = sorted(_operands(node), key=lambda name: q.graph.shape(name) != node.shape)
    if len(names) < 2 or any(len(q.graph.shape(name)) != 4 for name in names):
        _refuse("it multiplies no two maps")
    if q.graph.shape(names[0]) != node.shape:
        _refuse("neither map has the size of the product")
    if q.numbers.keys().isdisjoint(names):
        _refuse(FOLLOWS)
    first, second = (q.integers(name, NO_SCALE) for name in names)
    if affine is None:
        _refuse(NO_SCALE)
    made: Args = {"input": first.ref, "other": second.ref}
    made["factor"] = first.affine.scale * second.affine.scale / affine.scale
    made |= {"zero_point": first.affine.zero_point, "other_zero_point": second.affine.zero_point}
    q.emit(node, "q_mul", {**made, "offset": float(affine.zero_point)}, affine)


def cat(q: Quantiser, node: Node) -> None:
    """Computes maps one behind the other, at one scale."""
    names = [one["value"] for one in node.args["tensors"] if "value" in one]
    if len(names) < len(node.args["tensors"]) or q.numbers.keys().isdisjoint(names):
        _refuse(FOLLOWS)
    parts = [q.integers(name, NO_SCALE) for name in names]
    same = all(part.affine == parts[0].affine for part in parts)
    affine = q.values.get(node.name, parts[0].affine if same else None)
    if affine is None:
        _refuse(NO_SCALE)
    tensors = []
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        ref = part.ref
        if part.affine != affine:
            args = {"input": ref, **rescaled(part.affine, affine), **ALL}
            shape = q.graph.shape(name)
            ref = q.add(f"{node.name}.part{index}", "q_requantize", args, shape)
        tensors.append(ref)
    q.emit(node, "cat", {"tensors": tensors, "dim": node.args["dim"]}, affine)
