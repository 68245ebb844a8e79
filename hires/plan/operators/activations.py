"""Describes activations as fused operators have them: a name, and its numbers behind it.

["relu"]    ["clamp", 0.0, 6.0]    ["leaky_relu", 0.01]    ["gelu", "none"]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hires.plan.graph import Node

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
