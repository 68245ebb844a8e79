"""States how activations, sums, products and concatenations compute with 8-bit integers."""

from __future__ import annotations

from hires.plan.graph import Node
from hires.plan.operators.activations import FUNCTIONS
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8_arithmetic import (
    ALL,
    beside,
    bounds_of,
    clamp_of,
    made_by_table,
    own_numbers,
    rescaled,
)
from hires.plan.passes.quantise import FOLLOWS, RULES, QuantisedValue, Quantiser
from hires.quant.affine import Affine


@RULES.register("relu")
@RULES.register("relu6")
@RULES.register("hardtanh")
@RULES.register("clamp")
def _clamp(q: Quantiser, node: Node) -> str:
    x = own_numbers(q, node)
    activation = facts_of(node.kind).activation
    clamp = None if activation is None else activation(node)
    ends = clamp_of(clamp) if clamp else None
    if x is None or ends is None:
        return FOLLOWS if x is None else "its bounds are no range of numbers"
    affine = q.scale_of(node, x.affine) or x.affine
    made = {"input": x.ref, **rescaled(x.affine, affine), **bounds_of(ends, affine)}
    return q.made(node, "q_requantize", made, affine)


def _activation(q: Quantiser, node: Node) -> str:
    x, affine, describe = own_numbers(q, node), q.scale_of(node), facts_of(node.kind).activation
    activation = None if describe is None else describe(node)
    if x is None or affine is None or activation is None:
        return FOLLOWS if x is None else "its value has no scale"
    return made_by_table(q, node, activation, x, affine)


for _name in FUNCTIONS:
    RULES.register(_name)(_activation)


@RULES.register("add")
def _add(q: Quantiser, node: Node) -> str:
    names = _operands(node)
    if len(names) < 2 or node.args.get("alpha", 1) != 1:
        return "it adds no two maps"
    if any(q.graph.shape(name) != node.shape for name in names):
        return "it adds maps of two sizes"
    if not any(map(q.has_numbers, names)):
        return FOLLOWS
    affine, first, second = q.scale_of(node), *(q.as_integers(name) for name in names)
    if affine is None or first is None or second is None:
        return "a value of it has no scale"
    more = beside(second, affine)
    made = {"input": first.ref, **rescaled(first.affine, affine, more.pop("add")), **more, **ALL}
    return q.made(node, "q_add", made, affine)


@RULES.register("mul")
def _product(q: Quantiser, node: Node) -> str:
    affine, factor = q.scale_of(node), node.args["other"]
    if isinstance(factor, (int, float)):
        x = own_numbers(q, node)
        if x is None or affine is None:
            return FOLLOWS if x is None else "it has no scale"
        scaled = Affine(x.affine.scale * factor, x.affine.zero_point)
        made = {"input": x.ref, **rescaled(scaled, affine), **ALL}
        return q.made(node, "q_requantize", made, affine)
    # The map first, what multiplies its channels or pixels second.
    names = sorted(_operands(node), key=lambda name: q.graph.shape(name) != node.shape)
    if len(names) < 2 or any(len(q.graph.shape(name)) != 4 for name in names):
        return "it multiplies no two maps"
    if q.graph.shape(names[0]) != node.shape:
        return "neither map has the size of the product"
    if not any(map(q.has_numbers, names)):
        return FOLLOWS
    parts = [q.as_integers(name) for name in names]
    if affine is None or None in parts:
        return "a value of it has no scale"
    return _made_product(q, node, [part for part in parts if part is not None], affine)


def _made_product(q: Quantiser, node: Node, parts: list[QuantisedValue], to: Affine) -> str:
    first, second = parts
    made = {
        "input": first.ref,
        "other": second.ref,
        "factor": first.affine.scale * second.affine.scale / to.scale,
        "zero_point": first.affine.zero_point,
        "other_zero_point": second.affine.zero_point,
        "offset": float(to.zero_point),
    }
    return q.made(node, "q_mul", made, to)


@RULES.register("cat")
def _cat(q: Quantiser, node: Node) -> str:
    names = [one["value"] for one in node.args["tensors"] if "value" in one]
    if len(names) < len(node.args["tensors"]) or not any(map(q.has_numbers, names)):
        return FOLLOWS
    parts = [q.as_integers(name) for name in names]
    affines = {part.affine for part in parts if part is not None}
    affine = q.scale_of(node, next(iter(affines)) if len(affines) == 1 else None)
    if affine is None or None in parts:
        return "a value of it has no scale"
    tensors = []
    for index, part in enumerate(parts):
        assert part is not None
        ref, shape = part.ref, q.graph.shape(names[index])
        if part.affine != affine:
            args = {"input": ref, **rescaled(part.affine, affine), **ALL}
            ref = q.add(f"{node.name}.part{index}", "q_requantize", args, shape)
        tensors.append(ref)
    q.made(node, "cat", {"tensors": tensors, "dim": node.args["dim"]}, affine)
    return ""


def _operands(node: Node) -> list[str]:
    # The values that an operator of two maps reads; fewer if one is no value.
    operands = (node.args["self"], node.args["other"])
    return [one["value"] for one in operands if isinstance(one, dict) and "value" in one]
