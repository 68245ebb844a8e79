"""Writes attention that drops weights as operators that tiles can divide.

    attention(q, k, v)    dropout(softmax(q k^T * scale, masked)) v

In one kernel the weights have no place in the graph, so their noise could not follow from it. The
order of operations is that of torch's own ``_scaled_dot_product_attention_math``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from hires.nets.program_calls import Call, overload_of
from hires.nets.traced_memory import Emit, Ref, value_of

ATTENTION = "scaled_dot_product_attention"


class _Value(NamedTuple):
    ref: Ref
    like: Tensor  # without numbers


def drops_weights(call: Call) -> bool:
    """Whether an operation is attention with a dropout."""
    return call.name == ATTENTION and call.arguments["dropout_p"] > 0


def attention_with_dropout(node: fx.Node, args: dict[str, Any], emit: Emit) -> Ref:
    """Returns the value of attention over the last two dims, (..., L, E), of q, k and v.

    ``args`` are the arguments of the node as plain values.
    """
    given = Call.of(node).arguments

    def value(name: str) -> _Value:
        like = value_of(given[name])
        return _Value(args[name], torch.empty(like.shape, dtype=like.dtype, device="meta"))

    def step(op: str, *operands: Any) -> _Value:
        operator = overload_of(op)
        like = operator(*[one.like if isinstance(one, _Value) else one for one in operands])
        plain = {a.name: a.default_value for a in operator._schema.arguments}
        refs = [one.ref if isinstance(one, _Value) else one for one in operands]
        plain |= {a.name: ref for a, ref in zip(operator._schema.arguments, refs, strict=False)}
        return _Value(emit(op, plain, like, node), like)

    query, key, values = map(value, ("query", "key", "value"))
    if given["enable_gqa"]:  # several heads of queries share one of keys and values
        key, values = (
            step("repeat_interleave.self_int", one, query.like.shape[-3] // one.like.shape[-3], -3)
            for one in (key, values)
        )
    root = math.sqrt(given["scale"] or 1 / math.sqrt(query.like.shape[-1]))
    keys = step("transpose.int", step("mul.Tensor", key, root), -2, -1)
    weights = step("matmul.default", step("mul.Tensor", query, root), keys)
    mask = value("attn_mask") if given["attn_mask"] is not None else None
    if given["is_causal"]:
        ones = torch.ones(weights.like.shape[-2:], device="meta", dtype=torch.bool)
        row = {"size": list(ones.shape), "dtype": {"dtype": "bool"}, "device": {"device": None}}
        full = {**row, "layout": None, "pin_memory": None}
        mask = step("tril.default", _Value(emit("ones.default", full, ones, node), ones))
    if mask is not None and mask.like.dtype == torch.bool:
        weights = step("masked_fill.Scalar", weights, step("logical_not.default", mask), -math.inf)
    elif mask is not None:
        weights = step("add.Tensor", weights, mask)
    # A row whose weights are all masked is 0 and not NaN.
    softmax = "softmax.int" if given["attn_mask"] is None else "_safe_softmax.default"
    weights = step("dropout.default", step(softmax, weights, -1), given["dropout_p"], True)
    return step("matmul.default", weights, values).ref
