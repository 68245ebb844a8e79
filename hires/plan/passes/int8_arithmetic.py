"""Says how 8-bit integers get another scale, are added, clamped, or looked up in a table.

With x = (x_q - z_in) * s_in of every input and y = (y_q - z_out) * s_out, a sum of products is

    y_q = x_q * (s_in / s_out) + (z_out - z_in * s_in / s_out)

for each operand. An activation that is a clamp is one of the integers. Any other is a table of
the output for each of the 256 inputs.

The tensors of a layer are recipes, whose functions are in ``hires.engine.derived_tensors``:

    weight -> scale8 -> multiplier8      weight8, multiplier8, bias -> offset8
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hires.plan.graph import Graph, Node
from hires.plan.operators.formulas import Activation, Function, function_of
from hires.plan.operators.windows import pair
from hires.plan.passes.int8_state import QuantisedValue, Quantiser
from hires.quant.affine import LAST, Affine, affine_of

ALL = {"low": 0, "high": LAST}
FARTHEST = 2.0**40
"""An input at which every activation has come to its end, or left any range of 8 bits."""


class Sum(NamedTuple):
    """How a layer rounds its sums before an activation."""

    affine: Affine
    bounds: dict[str, int]
    table: Activation | None
    """The activation that a table computes from them; None: the bounds were all of it."""


def sum_before(activation: Activation | None, affine: Affine) -> Sum:
    """Returns how to round the sums behind which an activation makes values of ``affine``."""
    clamp = clamp_of(activation)
    if clamp is not None:
        return Sum(affine, bounds_of(clamp, affine), None)
    assert activation is not None
    return Sum(inputs_that_count(function_of(activation), affine), ALL, activation)


def inputs_that_count(function: Function, affine: Affine) -> Affine:
    """Returns how to round the inputs of an activation whose values have an affine map.

    Beyond this range its integers do not change any more, so its ends clamp inputs exactly:

        hardswish   0 0 0 0 . -1 . 0 . . . . . 255 255       range of its inputs: -3 to where its
                          -3       0                         values have the largest integer
    """

    def end(far: float) -> float:
        last = affine.quantized(function(far))
        near = far / 2
        while affine.quantized(function(near)) == last:
            far, near = near, near / 2
            if abs(near) < affine.scale / LAST:
                return 0.0
        for _ in range(60):
            middle = (far + near) / 2
            if affine.quantized(function(middle)) == last:
                far = middle
            else:
                near = middle
        return far

    return affine_of(end(-FARTHEST), end(FARTHEST))


def table_of(activation: Activation, source: Affine, to: Affine) -> list[int]:
    """Returns the integer of an activation's value for each integer of its input."""
    function = function_of(activation)
    return [to.quantized(function(source.real(number))) for number in range(LAST + 1)]


def rescaled(source: Affine, to: Affine, add: float = 0.0) -> dict[str, float]:
    """Returns the factor and offset that give integers another scale and zero point."""
    factor = source.scale / to.scale
    return {"factor": factor, "offset": to.zero_point - source.zero_point * factor + add}


def beside(other: QuantisedValue | None, to: Affine) -> dict[str, Any]:
    """Returns the arguments of what a layer adds, and what that adds to its offset."""
    if other is None:
        return {"other": None, "other_factor": 0.0, "add": 0.0}
    factor = other.affine.scale / to.scale
    add = -other.affine.zero_point * factor
    return {"other": other.ref, "other_factor": factor, "add": add}


def clamp_of(activation: Activation | None) -> tuple[float | None, float | None] | None:
    """Returns the ends of an activation that is a clamp, (None, None) of none; None: it is not."""
    if not activation:
        return None, None
    if activation[0] == "relu":
        return 0.0, None
    return (activation[1], activation[2]) if activation[0] == "clamp" else None


def bounds_of(clamp: tuple[float | None, float | None], affine: Affine) -> dict[str, int]:
    """Returns the bounds of a clamp as integers."""
    low, high = clamp
    return {
        "low": 0 if low is None else affine.quantized(low),
        "high": LAST if high is None else affine.quantized(high),
    }


def layer_tensors(
    q: Quantiser,
    node: Node,
    x: QuantisedValue,
    weight: str,
    to: Affine,
    form: dict[str, Any],
    add: float = 0.0,
    shape: list[int] | None = None,
) -> dict[str, Any]:
    """Adds weight, held in a ``form``, multiplier and offset of a layer; returns arguments."""
    shape = shape or {**q.graph.params, **q.params}[weight].shape
    scale, numbers = _scale_and_numbers(q, node, weight, shape, form)
    factor = x.affine.scale / to.scale
    recipe: dict[str, Any] = {"make": "quantized_multiplier", "params": [scale], "factor": factor}
    multiplier = q.param(f"{node.name}:multiplier8", shape[:1], "float32", recipe)
    bias = node.args.get("bias")
    recipe = {
        "make": "quantized_offset",
        "params": [one["param"] for one in (numbers, multiplier, bias) if one is not None],
        "bias_factor": 1 / to.scale,
        "add": to.zero_point + add,
        "zero_point": x.affine.zero_point,
    }
    offset = q.param(f"{node.name}:offset8", shape[:1], "float32", recipe)
    return {"weight": numbers, "multiplier": multiplier, "offset": offset, "largest": q.largest}


def row_tensors(q: Quantiser, node: Node, weight: str) -> dict[str, Any]:
    """Adds the tensors of a linear layer whose rows have scales of their own, as arguments."""
    shape = [*q.graph.params[weight].shape, 1, 1]
    scale, numbers = _scale_and_numbers(q, node, weight, shape, {})
    # Names of their own: a file of static layers has others in the place of these.
    recipe: dict[str, Any] = {"make": "quantized_multiplier", "params": [scale], "factor": 1.0}
    multiplier = q.param(f"{node.name}:row_multiplier8", shape[:1], "float32", recipe)
    of = [numbers["param"], multiplier["param"]]
    recipe = {"make": "quantized_offset", "params": of, "add": 0.0, "zero_point": 1}
    offset = q.param(f"{node.name}:row_offset8", shape[:1], "float32", recipe)
    return {"weight": numbers, "multiplier": multiplier, "offset": offset, "largest": q.largest}


def weight_form(node: Node) -> dict[str, Any]:
    """Returns the form of a layer's integers: as a convolution of stride 1 reads them."""
    if node.kind != "conv_transpose2d":
        return {}
    sides = {name: pair(node.args[name]) for name in ("stride", "dilation")}
    return {**sides, "groups": node.args["groups"]}


def stored_params(graph: Graph) -> set[str]:
    """Returns the names of what a file of a quantised network holds: all that its nodes read."""
    names = {name for node in graph.nodes for name in node.params}
    return {name for name in names if not graph.params[name].is_constant}


def _scale_and_numbers(
    q: Quantiser, node: Node, weight: str, shape: list[int], form: dict[str, Any]
) -> tuple[str, Any]:
    # The name of the scales of a weight's channels, and its integers as an argument.
    form = {**form, "largest": q.largest}
    recipe = {"make": "quantized_scale", "params": [weight], **form}
    scale = q.param(f"{node.name}:scale8", shape[:1], "float64", recipe)["param"]
    recipe = {"make": "quantized_weight", "params": [weight, scale], **form}
    return scale, q.param(f"{node.name}:weight8", shape, "int8", recipe)
