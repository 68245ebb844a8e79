"""Registers operators that compute every number alone: activations, arithmetic, casts, dropout."""

from __future__ import annotations

import functools

from hires.plan.graph import Node
from hires.plan.operators.operator_facts import OperatorFacts, declare

pointwise = functools.partial(OperatorFacts, tiling=("pointwise",), sharding="pointwise")
"""Makes an entry; the operands align because equal maps are cut into equal tiles."""


def _drops(node: Node) -> bool:
    return bool(node.args["train"]) and node.args["p"] > 0


declare("relu", pointwise(in_place=True))
declare("prelu", pointwise(vectors=True))
declare("add", pointwise(overwritable=True))
declare(
    "relu6 leaky_relu elu selu celu gelu silu mish "
    "sigmoid log_sigmoid hardsigmoid tanh hardtanh hardswish softplus "
    "softshrink hardshrink threshold clamp clamp_min clamp_max logit",
    pointwise(),
)
declare(
    "sub rsub mul div neg abs sign reciprocal square pow "
    "exp expm1 log log1p log2 sqrt rsqrt sin cos atan erf "
    "floor ceil round trunc frac fmod remainder maximum minimum lerp addcmul addcdiv",
    pointwise(),
)
declare(
    "eq ne lt le gt ge isnan nan_to_num where masked_fill "
    "logical_and logical_or logical_not logical_xor",
    pointwise(),
)
declare("clone _to_copy", pointwise())
declare("to type_as", pointwise(may_share=True))
declare("detach", pointwise(view=True, ends_gradient=True))
declare("zeros_like ones_like full_like", pointwise(ends_gradient=True))

declare("dropout feature_dropout", pointwise(random=_drops, may_share=True))
declare("alpha_dropout feature_alpha_dropout", pointwise(random=_drops))
