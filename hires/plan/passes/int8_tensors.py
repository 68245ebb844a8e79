"""Declares the tensors of a quantised layer as recipes, by which ranks compute them.

    weight -> scale8 -> multiplier8      weight8, multiplier8, bias -> offset8
    weight, scale8 -> weight8

``hires.engine.derived_tensors`` has the functions that they name.
"""

from __future__ import annotations

from typing import Any

from hires.plan.graph import Graph, Node
from hires.plan.operators.windows import pair
from hires.plan.passes.int8_state import QuantisedValue, Quantiser
from hires.quant.affine import Affine


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
