"""Writes as data what operators compute: products dim by dim, activations by name.

    matmul      (n, i, k) x (n, k, j)              ->  (n, i, j)
    linear      (n, i, k) x (o, k) + (o)           ->  (n, i, o)
    attention   (n, q, d) x (n, k, d) x (n, k, e)  ->  (n, q, e)

From the letters alone follows which operands of tiles must be gathered (``plan.factor_rules``). An
activation has its numbers behind its name:

    ["relu"]    ["clamp", 0.0, 6.0]    ["leaky_relu", 0.01]    ["gelu", "none"]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from hires.plan.graph import Graph, Node

Ref = tuple[str, str]
"""``value`` or ``param``, and its name."""


class Term(NamedTuple):
    """An operand and the letters of its dims."""

    ref: Ref
    letters: tuple[Hashable, ...]


Product = tuple[list[Term], list[Hashable], bool]
"""Its operands, the letters of its result, and whether it is a plain sum of products."""


def _rank(graph: Graph, ref: Ref) -> int:
    kind, name = ref
    return len(graph.params[name].shape if kind == "param" else graph.shape(name))


def _refs(*args: Any) -> list[Ref]:
    return [ref for arg in args if isinstance(arg, dict) for ref in arg.items()]


def _batch(rank: int) -> tuple[int, ...]:
    return tuple(range(-rank, 0))  # counted from the last: operands are broadcast


def matmul(node: Node, graph: Graph) -> Product:
    """Batches of rows times columns, of which either may be one alone; baddbmm adds to them."""
    *added, a, b = _refs(*node.args.values())
    ranks = _rank(graph, a), _rank(graph, b)
    terms = [
        Term(a, (*_batch(ranks[0] - 2), *(["row"] if ranks[0] > 1 else []), "inner")),
        Term(b, (*_batch(ranks[1] - 2), "inner", *(["col"] if ranks[1] > 1 else []))),
    ]
    out: list[Hashable] = [*_batch(max(ranks) - 2)]
    out += ["row"] * (ranks[0] > 1) + ["col"] * (ranks[1] > 1)
    terms += [Term(ref, tuple(out[len(out) - _rank(graph, ref) :])) for ref in added]
    return terms, out, not added


def linear(node: Node, graph: Graph) -> Product:
    """Input and weight, summed over the last dim of both, and the bias."""
    x, weight, *bias = _refs(*node.args.values())
    out: list[Hashable] = [*range(_rank(graph, x) - 1), "out"][-_rank(graph, x) :]
    terms = [Term(x, (*out[:-1], "in")), Term(weight, ("out", "in"))]
    return [*terms, *(Term(ref, ("out",)) for ref in bias)], out, False


def quantized_linear(node: Node, graph: Graph) -> Product:
    """As :func:`linear`, with a weight (out, in, 1, 1), and two vectors beside a bias, if any."""
    names = "input", "weight", "multiplier", "offset", "bias"
    x, weight, *vectors = _refs(*(node.args.get(name) for name in names))
    out: list[Hashable] = [*range(_rank(graph, x) - 1), "out"]
    terms = [Term(x, (*out[:-1], "in")), Term(weight, ("out", "in", "row", "col"))]
    return [*terms, *(Term(ref, ("out",)) for ref in vectors)], out, False


def einsum(node: Node, graph: Graph) -> Product:
    """Operands with the letters of an equation; the dims of ``...`` count from their last."""
    left, _, right = node.args["equation"].replace(" ", "").partition("->")
    refs = _refs(*node.args["tensors"])

    def letters(text: str, rank: int) -> tuple[Hashable, ...]:
        before, dots, behind = text.partition("...")
        return (*before, *(_batch(rank - len(before + behind)) if dots else ()), *behind)

    texts = left.split(",")
    terms = [Term(ref, letters(t, _rank(graph, ref))) for ref, t in zip(refs, texts, strict=True)]
    if "->" not in node.args["equation"]:
        single = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(single)
    return terms, [*letters(right, len(node.shape or []))], len(terms) == 2


def tensordot(node: Node, graph: Graph) -> Product:
    """Two operands, summed over pairs of their dims."""
    a, b = _refs(node.args["self"], node.args["other"])
    letters: list[list[Hashable]] = [
        [(which, place) for place in range(_rank(graph, ref))] for which, ref in enumerate((a, b))
    ]
    pairs = zip(node.args["dims_self"], node.args["dims_other"], strict=True)
    summed = [(i % len(letters[0]), j % len(letters[1])) for i, j in pairs]
    for i, j in summed:
        letters[1][j] = letters[0][i]
    inner = {letters[0][i] for i, _ in summed}
    out = [letter for letter in [*letters[0], *letters[1]] if letter not in inner]
    return [Term(a, tuple(letters[0])), Term(b, tuple(letters[1]))], out, True


def attention(node: Node, graph: Graph) -> Product:
    """Queries, keys, values and the mask of their weights."""
    args = node.args
    q, k, v, *mask = _refs(args["query"], args["key"], args["value"], args["attn_mask"])
    batch = _batch(_rank(graph, q) - 2)
    terms = [Term(q, (*batch, "row", "depth")), Term(k, (*batch, "key", "depth"))]
    terms.append(Term(v, (*batch, "key", "out")))
    weights = (*batch, "row", "key")
    terms += [Term(ref, weights[len(weights) - _rank(graph, ref) :]) for ref in mask]
    return terms, [*batch, "row", "out"], False


Activation = list[Any]
Function = Callable[[float], float]

POST_OPERATIONS = {
    "relu": "relu",
    "clamp": "hardtanh",
    "leaky_relu": "leaky_relu",
    "gelu": "gelu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "silu": "swish",
    "hardswish": "hardswish",
    "hardsigmoid": "hardsigmoid",
}
"""Name of an activation -> its name behind a kernel of oneDNN; others have none."""


def function_of(activation: Activation) -> Function:
    """Returns what an activation does to a number, in float64."""
    name, *numbers = activation
    function = FUNCTIONS[name]
    return lambda x: function(x, *numbers)


def described(*names: str) -> Callable[[Node], Activation]:
    """Returns what describes an activation: its kind, and its arguments of these names."""
    return lambda node: [node.kind, *(node.args[name] for name in names)]


def clamp(node: Node) -> Activation | None:
    """Returns a clamp between two numbers; one that starts at zero and has no end is a ReLU.

    One whose ends are the wrong way round, which makes all numbers ``max``, or NaN, is none: no
    kernel of oneDNN takes it. An infinite end is no end.
    """
    args = {"min_val": 0.0, "max_val": 6.0} if node.kind == "relu6" else node.args
    ends = (args.get(name, args.get(f"{name}_val")) for name in ("min", "max"))
    low, high = (None if isinstance(x, float) and math.isinf(x) else x for x in ends)
    if high is None and isinstance(low, (int, float)) and low == 0:
        return ["relu"]
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float))):
        return None
    return ["clamp", low, high] if low <= high else None


def unfused(activation: Activation, value: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Returns the operator that is an activation, and its arguments for a value."""
    name, *numbers = activation
    keys = {"clamp": ["min", "max"], "gelu": ["approximate"], "leaky_relu": ["negative_slope"]}
    return name, {"self": value, **dict(zip(keys.get(name, []), numbers, strict=True))}


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _hardsigmoid(x: float) -> float:
    return min(max(x + 3, 0.0), 6.0) / 6


def _gelu(x: float, approximate: str) -> float:
    if approximate == "tanh":
        return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * math.erfc(-x / math.sqrt(2))


FUNCTIONS: dict[str, Callable[..., float]] = {
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
    "silu": lambda x: x * _sigmoid(x),
    "hardswish": lambda x: x * _hardsigmoid(x),
    "hardsigmoid": _hardsigmoid,
    "mish": lambda x: x * math.tanh(_softplus(x)),
    "leaky_relu": lambda x, slope: max(x, 0.0) + slope * min(x, 0.0),
    "gelu": _gelu,
}
"""Name of an activation that is no clamp -> what it does to a number, and its own ones behind it.

Far from zero each of them is constant or rises or falls for ever.
"""
