"""States how layers, pools and copies compute with unsigned 8-bit integers.

Elementwise operators are in :mod:`hires.plan.passes.int8_pointwise`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from hires.core.config.precision_config import DYNAMIC
from hires.plan.graph import Node
from hires.plan.operators.activations import Activation, unfused
from hires.plan.operators.operator_table import has_stored_statistics
from hires.plan.operators.windows import pair
from hires.plan.passes.fuse import NORM_ROLES, constant_params
from hires.plan.passes.int8_arithmetic import (
    ALL,
    beside,
    made_by_table,
    own_numbers,
    rescaled,
    sum_before,
)
from hires.plan.passes.int8_tensors import layer_tensors, row_tensors, weight_form
from hires.plan.passes.quantise import FOLLOWS, RULES, QuantisedValue, Quantiser
from hires.quant.affine import LAST, MOST_PRODUCTS, Affine

TOO_MANY = "it sums more products than 32 bits hold"
REAL = Affine(1.0, 0)
"""Of values that are computed as real numbers."""


@RULES.register("conv2d")
@RULES.register("fused_conv2d")
def _convolution(q: Quantiser, node: Node) -> str:
    args = node.args
    x, weight = q.as_integers(_value(args["input"])), args["weight"].get("param")
    if x is None:
        return "its input has no scale"
    if weight is None:
        return "its weight is computed"
    if len(node.shape or []) != 4:
        return "its input has no batch"
    held = q.graph.params.get(weight)  # else of a norm, which has one product for each element
    if held is not None and math.prod(held.shape[1:]) > MOST_PRODUCTS:
        return TOO_MANY
    other = None
    if args.get("other") is not None:
        other = q.as_integers(_value(args["other"]))
        if other is None or q.graph.shape(_value(args["other"])) != node.shape:
            return "what it adds has no scale"
    if q.scale_of(node) is None or (other is None and not q.has_int8_reader(node.name)):
        return _real_convolution(q, node, x, weight) if other is None else "its value has no scale"

    def sums(to: Affine, bounds: dict[str, int]) -> dict[str, Any]:
        more = beside(other, to)
        made = _layer_args(q, node, x, weight, to, add=more.pop("add"))
        return made | {"dtype": {"dtype": "uint8"}, **more, **bounds}

    return _activated(q, node, "q_conv2d", args.get("activation"), sums)


def _activated(
    q: Quantiser,
    node: Node,
    kind: str,
    activation: Activation | None,
    sums: Callable[[Affine, dict[str, int]], dict[str, Any]],
) -> str:
    """Appends a layer and its activation; ``sums`` are the layer's arguments for some rounding."""
    affine = q.scale_of(node)
    assert affine is not None
    inner = sum_before(activation, affine)
    made = sums(inner.affine, inner.bounds)
    if inner.table is None:
        return q.made(node, kind, made, affine)
    name = f"{node.name}.sum"
    q.add(name, kind, made, node.shape, flops=node.flops)
    q.numbers[name] = QuantisedValue(name, inner.affine)
    return made_by_table(q, node, inner.table, q.numbers[name], affine)


def _real_convolution(q: Quantiser, node: Node, x: QuantisedValue, weight: str) -> str:
    # Its value is wanted as real numbers.
    made = _layer_args(q, node, x, weight, REAL)
    made |= {"dtype": {"dtype": "float32"}, **beside(None, REAL), **ALL}
    made.pop("add")
    return _real(q, node, "q_conv2d", node.args.get("activation"), made)


def _real(
    q: Quantiser, node: Node, kind: str, activation: Activation | None, made: dict[str, Any]
) -> str:
    """Appends a layer whose output is real numbers, and its activation."""
    if not activation:
        return q.made_real(node, kind, made)
    inner = q.add(f"{node.name}.sum", kind, made, node.shape, "float32", node.flops)
    return q.made_real(node, *unfused(activation, inner))


def _layer_args(
    q: Quantiser, node: Node, x: QuantisedValue, weight: str, to: Affine, add: float = 0.0
) -> dict[str, Any]:
    """Returns the arguments of a convolution whose output has some scale and zero point."""
    args = node.args
    tensors = layer_tensors(q, node, x, weight, to, {}, add)
    place = {name: args[name] for name in ("stride", "padding", "dilation", "groups")}
    return {"input": x.ref, **tensors, **place, "zero_point": x.affine.zero_point}


@RULES.register("conv_transpose2d")
def _transposed(q: Quantiser, node: Node) -> str:
    args = node.args
    x, weight = q.as_integers(_value(args["input"])), args["weight"].get("param")
    if x is None or weight is None or len(node.shape or []) != 4:
        return "its input has no scale" if x is None else "its weight is computed"
    affine = q.scale_of(node) if q.has_int8_reader(node.name) else None
    stride, padding, dilation = (pair(args[name]) for name in ("stride", "padding", "dilation"))
    channels, outputs, *kernel = q.graph.params[weight].shape
    if math.prod([channels, *kernel]) // args["groups"] > MOST_PRODUCTS:
        return TOO_MANY
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    taps = [-(-size // step) for size, step in zip(reach, stride, strict=True)]
    groups = args["groups"]
    shape = [groups * outputs * stride[0] * stride[1], channels // groups, *taps]
    form = weight_form(node)
    made = {
        "input": x.ref,
        **layer_tensors(q, node, x, weight, affine or REAL, form, shape=shape),
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "zero_point": x.affine.zero_point,
        "dtype": {"dtype": "float32" if affine is None else "uint8"},
        **ALL,
    }
    kind = "q_conv_transpose2d"
    if affine is None:
        return q.made_real(node, kind, made)
    return q.made(node, kind, made, affine)


@RULES.register("batch_norm")
def _norm(q: Quantiser, node: Node) -> str:
    """A norm with stored statistics multiplies every channel, as a convolution of each does."""
    x, own = own_numbers(q, node), constant_params(node, q.graph, *NORM_ROLES)
    if not has_stored_statistics(node) or own is None:
        return "it has the statistics of its input"
    if x is None or len(node.shape or []) != 4:
        return FOLLOWS
    roles = {NORM_ROLES[name]: param for name, param in own.items()}
    channels, eps = q.graph.shape(node.inputs[0])[1], node.args["eps"]
    common = {"roles": [*roles], "params": [*roles.values()], "eps": eps}
    weight, bias = f"{node.name}:weight", f"{node.name}:bias"
    shape = [channels, 1, 1, 1]
    q.param(weight, shape, "float32", {"make": "norm_weight", **common})
    recipe = {"make": "folded_bias", **common}
    args = {**node.args, "bias": q.param(bias, shape[:1], "float32", recipe)}
    return _by_channel(q, dataclasses.replace(node, args=args), weight, channels)


@RULES.register("fused_norm")
def _fused_norm(q: Quantiser, node: Node) -> str:
    """The same with an activation behind it."""
    if own_numbers(q, node) is None or len(node.shape or []) != 4:
        return FOLLOWS
    scale = q.graph.params[node.args["weight"]["param"]]
    weight, [channels] = f"{node.name}:weight", scale.shape
    recipe = {**(scale.recipe or {}), "make": "norm_weight"}
    q.param(weight, [channels, 1, 1, 1], "float32", recipe)
    return _by_channel(q, node, weight, channels)


def _by_channel(q: Quantiser, node: Node, weight: str, channels: int) -> str:
    """Adds a norm as a convolution of each channel alone."""
    as_layer = {
        "input": node.args["input"],
        "weight": {"param": weight},
        "bias": node.args["bias"],
        "stride": [1, 1],
        "padding": [0, 0],
        "dilation": [1, 1],
        "groups": channels,
        "activation": node.args.get("activation"),
    }
    return _convolution(q, dataclasses.replace(node, op="conv2d.default", args=as_layer))


@RULES.register("linear")
@RULES.register("fused_linear")
def _linear(q: Quantiser, node: Node) -> str:
    weight, bias = (node.args.get(name) or {} for name in ("weight", "bias"))
    if "value" in weight or "value" in bias:
        return f"its {'weight' if 'value' in weight else 'bias'} is computed"
    weight = weight["param"]
    if q.graph.params[weight].shape[-1] > MOST_PRODUCTS:
        return TOO_MANY
    if q.linear == DYNAMIC:
        return _dynamic_linear(q, node, weight)
    x = q.as_integers(_value(node.args["input"]))
    if x is None:
        return "its input has no scale"
    shape = [*q.graph.params[weight].shape, 1, 1]

    def sums(to: Affine, bounds: dict[str, int], dtype: str = "uint8") -> dict[str, Any]:
        made = {"input": x.ref, **layer_tensors(q, node, x, weight, to, {}, shape=shape)}
        return made | {"dtype": {"dtype": dtype}, **bounds}

    activation = node.args.get("activation")
    if q.scale_of(node) is None or not q.has_int8_reader(node.name):
        return _real(q, node, "q_linear", activation, sums(REAL, ALL, "float32"))
    return _activated(q, node, "q_linear", activation, sums)


def _dynamic_linear(q: Quantiser, node: Node, weight: str) -> str:
    """Adds a layer of real numbers, whose rows are quantised while it is computed."""
    if node.dtype != "float32":
        return f"it computes in {node.dtype}"
    made = {"input": {"value": q.real(_value(node.args["input"]))}, **row_tensors(q, node, weight)}
    made["bias"] = node.args.get("bias")
    return _real(q, node, "q_dynamic_linear", node.args.get("activation"), made)


@RULES.register("avg_pool2d")
def _avg_pool(q: Quantiser, node: Node) -> str:
    x = own_numbers(q, node)
    if x is None or len(node.shape or []) != 4:
        return FOLLOWS
    affine, args = q.scale_of(node, x.affine) or x.affine, node.args
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    made = {"input": x.ref, **{name: args[name] for name in names}}
    made["divisor_override"] = args["divisor_override"]
    made |= {"zero_point": x.affine.zero_point, "factor": x.affine.scale / affine.scale}
    made |= {"offset": float(affine.zero_point), **ALL}
    return q.made(node, "q_avg_pool2d", made, affine)


@RULES.register("adaptive_avg_pool2d")
def _adaptive_pool(q: Quantiser, node: Node) -> str:
    if node.shape is not None and node.shape[2:] == [1, 1]:
        return _mean_of(q, node, [2, 3], keepdim=True)
    return _mixed(q, node)


@RULES.register("mean")
def _mean(q: Quantiser, node: Node) -> str:
    dims, rank = node.args.get("dim"), len(q.graph.shape(node.inputs[0]))
    of_pixels = {4: [2, 3], 3: [1]}.get(rank)  # of a map (n, C, H, W), or of tokens (n, H W, C)
    if not isinstance(dims, list) or sorted(dim % rank for dim in dims) != of_pixels:
        return "it is no mean of all pixels"
    return _mean_of(q, node, of_pixels, keepdim=bool(node.args.get("keepdim")))


def _mean_of(q: Quantiser, node: Node, dims: list[int], keepdim: bool) -> str:
    x = own_numbers(q, node)
    if x is None:
        return FOLLOWS
    affine, shape = q.scale_of(node, x.affine) or x.affine, q.graph.shape(node.inputs[0])
    how = rescaled(x.affine, affine)
    pixels = math.prod(shape[dim] for dim in dims)
    how["factor"] /= pixels
    # fp32, in which tiles send their sums, holds every integer up to 2 ** 24.
    parts = 1 if LAST * pixels <= 2**24 else 2
    made = {"input": x.ref, "dim": dims, "keepdim": keepdim, "parts": parts, **how, **ALL}
    return q.made(node, "q_mean", made, affine)


@RULES.register("upsample_bilinear2d")
@RULES.register("_upsample_bilinear2d_aa")
@RULES.register("upsample_bicubic2d")
@RULES.register("_upsample_bicubic2d_aa")
def _mixed(q: Quantiser, node: Node) -> str:
    x = own_numbers(q, node)
    if x is None or len(node.shape or []) != 4:
        return FOLLOWS
    affine, args = q.scale_of(node, x.affine) or x.affine, node.args
    given = args.get("scale_factors") or [args.get(f"scales_{dim}") for dim in "hw"]
    made = {"input": x.ref, "mode": node.kind, "align_corners": bool(args.get("align_corners"))}
    made |= {"scales_h": given[0], "scales_w": given[1]}
    made |= {**rescaled(x.affine, affine), **ALL}
    return q.made(node, "q_interpolate", made, affine)


@RULES.register("moves")
def _moved(q: Quantiser, node: Node) -> str:
    """An operator that selects integers without changing them."""
    x = own_numbers(q, node)
    if x is None:
        return FOLLOWS
    (key, _), *_ = node.args.items()
    args = {**node.args, key: x.ref}
    if "value" in args and args.get("mode", "constant") == "constant":
        fill, ends = args["value"] or 0.0, (x.affine.real(0), x.affine.real(LAST))
        if not ends[0] <= fill <= ends[1]:
            return f"it fills in {fill:g}, and its input has {ends[0]:.4g} to {ends[1]:.4g}"
        args["value"] = float(x.affine.quantized(fill))
    name, _, overload = node.op.partition(".")
    q.made(node, name, args, x.affine)
    q.nodes[-1].op = f"{name}.{overload}"
    return ""


def _value(arg: Any) -> str:
    return str(arg.get("value", ""))
