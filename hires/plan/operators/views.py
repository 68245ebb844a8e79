"""Registers operators that compute nothing: views, reshapes, new tensors, random draws."""

from __future__ import annotations

from hires.plan.graph import Node
from hires.plan.operators.operator_facts import OperatorFacts, declare


def _draws(node: Node) -> bool:
    return bool(node.args.get("training", True))


declare("getitem", OperatorFacts(("element",), "element", view=True, may_share=True))
declare("flatten", OperatorFacts((), "dims", "start_dim", view=True, may_share=True))
declare("view", OperatorFacts((), "sizes", "size", view=True))
declare("expand _unsafe_view", OperatorFacts((), "sizes", "size"))
declare("reshape", OperatorFacts((), "sizes", "shape", view=True, may_share=True))
declare("squeeze unsqueeze", OperatorFacts(view=True))
declare("expand_as reshape_as unflatten view_as", OperatorFacts(may_share=True))

declare("alias", OperatorFacts(same_value=True, view=True))
declare("contiguous", OperatorFacts(same_value=True, may_share=True))
declare("lift_fresh_copy _assert_tensor_metadata", OperatorFacts(same_value=True))

declare("empty_like new_empty new_full new_ones new_zeros", OperatorFacts(ends_gradient=True))
declare("rand_like randn_like", OperatorFacts(random=_draws, ends_gradient=True))
declare(
    "bernoulli multinomial normal rand randint randint_like randn randperm rrelu",
    OperatorFacts(random=_draws),
)
