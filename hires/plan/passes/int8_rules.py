"""States for each operator how it computes with unsigned numbers of 8 bits.

With x = (x_q - z_in) * s_in of every input and y = (y_q - z_out) * s_out, a sum of products is

    y_q = x_q * (s_in / s_out) + (z_out - z_in * s_in / s_out)

for each operand. An activation behind it is a clamp of the numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hires.plan.graph import Node
from hires.plan.operators.activations import unfused
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.operator_table import has_stored_statistics
from hires.plan.passes.fold_norms import NORM_ROLES
from hires.plan.passes.graph_edits import constant_params
from hires.plan.passes.quantise import FOLLOWS, RULES, QuantisedValue, Quantiser
from hires.quant.affine import LAST, Affine

ALL = {"low": 0, "high": LAST}
REAL = Affine(1.0, 0)
"""Of values that are computed as real numbers."""


@RULES.register("conv2d")
@RULES.register("fused_conv2d")
def _convolution(q: Quantiser, node: Node) -> str:
    args = node.args
    x, weight = q.number(_value(args["input"])), args["weight"].get("param")
    if x is None:
        return "its input has no scale"
    if weight is None:
        return "its weight is computed"
    if len(node.shape or []) != 4:
        return "its input has no batch"
    other = None
    if args.get("other") is not None:
        other = q.number(_value(args["other"]))
        if other is None or q.graph.shape(_value(args["other"])) != node.shape:
            return "what it adds has no scale"
    clamp = _clamp(args.get("activation"))
    affine = q.scale_of(node) if other is not None or q.wants_numbers(node.name) else None
    if clamp is None or affine is None:
        return _real_convolution(q, node, x, weight) if other is None else "its value has no scale"
    to, more = affine, _beside(other, affine)
    made = _layer_args(q, node, x, weight, to, add=more.pop("add"))
    made |= {"dtype": {"dtype": "uint8"}, **more, **_bounds(clamp, affine)}
    return q.made(node, "q_conv2d", made, affine)


def _real_convolution(q: Quantiser, node: Node, x: QuantisedValue, weight: str) -> str:
    # Its value is wanted as real numbers, or an activation follows that is computed in float.
    made = _layer_args(q, node, x, weight, REAL)
    made |= {"dtype": {"dtype": "float32"}, **_beside(None, REAL), **ALL}
    made.pop("add")
    activation = node.args.get("activation")
    if not activation:
        return q.made_real(node, "q_conv2d", made)
    q.kept[node.name] = f"{activation[0]} has no rule for numbers of 8 bits"
    inner = q.add(f"{node.name}.sum", "q_conv2d", made, node.shape, "float32", node.flops)
    return q.made_real(node, *unfused(activation, inner))


def _layer_args(
    q: Quantiser, node: Node, x: QuantisedValue, weight: str, to: Affine, add: float = 0.0
) -> dict[str, Any]:
    """Returns the arguments of a convolution that makes numbers of some scale and zero point."""
    args = node.args
    tensors = _tensors(q, node, x, weight, to, {}, add)
    place = {name: args[name] for name in ("stride", "padding", "dilation", "groups")}
    return {"input": x.ref, **tensors, **place, "zero_point": x.affine.zero_point}


def _tensors(
    q: Quantiser,
    node: Node,
    x: QuantisedValue,
    weight: str,
    to: Affine,
    form: dict[str, Any],
    add: float = 0.0,
    shape: list[int] | None = None,
) -> dict[str, Any]:
    """Adds weight, multiplier and offset of a layer; returns them as arguments.

    ``form`` says in which form the weight is held; ``shape`` is that of this form.
    """
    facts = {**q.graph.params, **q.params}
    shape = shape or facts[weight].shape
    bias = node.args.get("bias")
    common = {**form, "factor": x.affine.scale / to.scale}
    recipes = {
        "weight": (shape, "int8", {"make": "quantized_weight", "params": [weight], **form}),
        "multiplier": (
            shape[:1], "float32", {"make": "quantized_multiplier", "params": [weight], **common}
        ),
        "offset": (
            shape[:1],
            "float32",
            {
                "make": "quantized_offset",
                "params": [weight] if bias is None else [weight, bias["param"]],
                **common,
                "bias_factor": 1 / to.scale,
                "add": to.zero_point + add,
                "zero_point": x.affine.zero_point,
            },
        ),
    }  # fmt: skip
    return {part: q.param(f"{node.name}:{part}8", *facts) for part, facts in recipes.items()}


def _beside(other: QuantisedValue | None, to: Affine) -> dict[str, Any]:
    """Returns the arguments of what a convolution adds, and what that adds to the offset."""
    if other is None:
        return {"other": None, "other_factor": 0.0, "add": 0.0}
    factor = other.affine.scale / to.scale
    add = -other.affine.zero_point * factor
    return {"other": other.ref, "other_factor": factor, "add": add}


@RULES.register("conv_transpose2d")
def _transposed(q: Quantiser, node: Node) -> str:
    args = node.args
    x, weight = q.number(_value(args["input"])), args["weight"].get("param")
    if x is None or weight is None or len(node.shape or []) != 4:
        return "its input has no scale" if x is None else "its weight is computed"
    affine = q.scale_of(node) if q.wants_numbers(node.name) else None
    stride, padding, dilation = (_pair(args[name]) for name in ("stride", "padding", "dilation"))
    channels, outputs, *kernel = q.graph.params[weight].shape
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    taps = [-(-size // step) for size, step in zip(reach, stride, strict=True)]
    groups = args["groups"]
    shape = [groups * outputs * stride[0] * stride[1], channels // groups, *taps]
    form = {"stride": stride, "dilation": dilation, "groups": groups}
    made = {
        "input": x.ref,
        **_tensors(q, node, x, weight, affine or REAL, form, shape=shape),
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
    x, own = _own_numbers(q, node), constant_params(node, q.graph, *NORM_ROLES)
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
    if _own_numbers(q, node) is None or len(node.shape or []) != 4:
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
def _linear(q: Quantiser, node: Node) -> str:
    x, weight = q.number(_value(node.args["input"])), node.args["weight"].get("param")
    if x is None or weight is None:
        return "its input has no scale" if x is None else "its weight is computed"
    affine = q.scale_of(node) if q.wants_numbers(node.name) else None
    shape = [*q.graph.params[weight].shape, 1, 1]
    made = {"input": x.ref, **_tensors(q, node, x, weight, affine or REAL, {}, shape=shape)}
    made |= {"dtype": {"dtype": "float32" if affine is None else "uint8"}, **ALL}
    if affine is None:
        return q.made_real(node, "q_linear", made)
    return q.made(node, "q_linear", made, affine)


@RULES.register("add")
def _add(q: Quantiser, node: Node) -> str:
    operands = [node.args["self"], node.args["other"]]
    if not all(isinstance(one, dict) and "value" in one for one in operands):
        return "it adds no two maps"
    names = [one["value"] for one in operands]
    if any(q.graph.shape(name) != node.shape for name in names) or node.args.get("alpha", 1) != 1:
        return "it adds maps of two sizes"
    if not any(map(q.has_numbers, names)):
        return FOLLOWS
    affine, first, second = q.scale_of(node), *(q.number(name) for name in names)
    if affine is None or first is None or second is None:
        return "a value of it has no scale"
    more = _beside(second, affine)
    made = {"input": first.ref, **_rescaled(first.affine, affine, more.pop("add")), **more, **ALL}
    return q.made(node, "q_add", made, affine)


@RULES.register("cat")
def _cat(q: Quantiser, node: Node) -> str:
    names = [one["value"] for one in node.args["tensors"] if "value" in one]
    if len(names) < len(node.args["tensors"]) or not any(map(q.has_numbers, names)):
        return FOLLOWS
    parts = [q.number(name) for name in names]
    affines = {part.affine for part in parts if part is not None}
    affine = q.scale_of(node, next(iter(affines)) if len(affines) == 1 else None)
    if affine is None or None in parts:
        return "a value of it has no scale"
    tensors = []
    for index, part in enumerate(parts):
        assert part is not None
        ref, shape = part.ref, q.graph.shape(names[index])
        if part.affine != affine:
            args = {"input": ref, **_rescaled(part.affine, affine), **ALL}
            ref = q.add(f"{node.name}.part{index}", "q_requantize", args, shape)
        tensors.append(ref)
    q.made(node, "cat", {"tensors": tensors, "dim": node.args["dim"]}, affine)
    return ""


@RULES.register("relu")
@RULES.register("relu6")
@RULES.register("hardtanh")
@RULES.register("clamp")
def _activation_alone(q: Quantiser, node: Node) -> str:
    x = _own_numbers(q, node)
    activation = facts_of(node.kind).activation
    clamp = None if activation is None else activation(node)
    ends = _clamp(clamp) if clamp else None
    if x is None or ends is None:
        return FOLLOWS if x is None else "its ends are no numbers"
    affine = q.scale_of(node, x.affine) or x.affine
    made = {"input": x.ref, **_rescaled(x.affine, affine), **_bounds(ends, affine)}
    return q.made(node, "q_requantize", made, affine)


@RULES.register("mul")
def _times_number(q: Quantiser, node: Node) -> str:
    x, factor = _own_numbers(q, node), node.args["other"]
    affine = q.scale_of(node)
    if x is None or affine is None or not isinstance(factor, (int, float)):
        return "it multiplies two maps" if isinstance(factor, dict) else "it has no scale"
    scaled = Affine(x.affine.scale * factor, x.affine.zero_point)
    made = {"input": x.ref, **_rescaled(scaled, affine), **ALL}
    return q.made(node, "q_requantize", made, affine)


@RULES.register("avg_pool2d")
def _avg_pool(q: Quantiser, node: Node) -> str:
    x = _own_numbers(q, node)
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
    dims = node.args.get("dim")
    pixels = isinstance(dims, list) and sorted(dim % 4 for dim in dims) == [2, 3]
    if not pixels or len(q.graph.shape(node.inputs[0])) != 4:
        return "it is no mean of all pixels"
    return _mean_of(q, node, [2, 3], keepdim=bool(node.args.get("keepdim")))


def _mean_of(q: Quantiser, node: Node, dims: list[int], keepdim: bool) -> str:
    x = _own_numbers(q, node)
    if x is None or len(q.graph.shape(node.inputs[0])) != 4:
        return FOLLOWS
    affine = q.scale_of(node, x.affine) or x.affine
    rows, cols = q.graph.shape(node.inputs[0])[2:]
    how = _rescaled(x.affine, affine)
    how["factor"] /= rows * cols
    made = {"input": x.ref, "dim": dims, "keepdim": keepdim, **how, **ALL}
    return q.made(node, "q_mean", made, affine)


@RULES.register("upsample_bilinear2d")
@RULES.register("_upsample_bilinear2d_aa")
@RULES.register("upsample_bicubic2d")
@RULES.register("_upsample_bicubic2d_aa")
def _mixed(q: Quantiser, node: Node) -> str:
    x = _own_numbers(q, node)
    if x is None or len(node.shape or []) != 4:
        return FOLLOWS
    affine, args = q.scale_of(node, x.affine) or x.affine, node.args
    given = args.get("scale_factors") or [args.get(f"scales_{dim}") for dim in "hw"]
    made = {"input": x.ref, "mode": node.kind, "align_corners": bool(args.get("align_corners"))}
    made |= {"scales_h": given[0], "scales_w": given[1]}
    made |= {**_rescaled(x.affine, affine), **ALL}
    return q.made(node, "q_interpolate", made, affine)


@RULES.register("moves")
def _moved(q: Quantiser, node: Node) -> str:
    """An operator that chooses among numbers, as they are."""
    x = _own_numbers(q, node)
    if x is None:
        return FOLLOWS
    (key, _), *_ = node.args.items()
    args = {**node.args, key: x.ref}
    if "value" in args and args.get("mode", "constant") == "constant":
        args["value"] = float(x.affine.quantized(args["value"] or 0.0))
    name, _, overload = node.op.partition(".")
    q.made(node, name, args, x.affine)
    q.nodes[-1].op = f"{name}.{overload}"
    return ""


def _own_numbers(q: Quantiser, node: Node) -> QuantisedValue | None:
    """Returns the one input of a node, if it is there as numbers."""
    if len(node.inputs) != 1 or next(iter(node.args.values())) != {"value": node.inputs[0]}:
        return None
    return q.number(node.inputs[0]) if q.has_numbers(node.inputs[0]) else None


def _rescaled(source: Affine, to: Affine, add: float = 0.0) -> dict[str, float]:
    """Returns with which factor and offset numbers get another scale and zero point."""
    factor = source.scale / to.scale
    return {"factor": factor, "offset": to.zero_point - source.zero_point * factor + add}


def _clamp(activation: list[Any] | None) -> tuple[float | None, float | None] | None:
    """Returns the ends of an activation that is a clamp, (None, None) of none; None: it is not."""
    if not activation:
        return None, None
    if activation[0] == "relu":
        return 0.0, None
    return (activation[1], activation[2]) if activation[0] == "clamp" else None


def _bounds(clamp: tuple[float | None, float | None], affine: Affine) -> dict[str, int]:
    low, high = clamp
    return {
        "low": 0 if low is None else affine.quantized(low),
        "high": LAST if high is None else affine.quantized(high),
    }


def _value(arg: Any) -> str:
    return str(arg.get("value", ""))


def _pair(value: Any) -> list[int]:
    return [value, value] if isinstance(value, int) else [value[0], value[-1]]
