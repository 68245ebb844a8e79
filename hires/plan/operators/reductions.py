"""Registers operators that reduce over a dim or the image, norms, and products with a matrix."""

from __future__ import annotations

from hires.plan.graph import Node
from hires.plan.operators.operator_facts import OperatorFacts, declare


def uses_batch_statistics(node: Node) -> bool:
    """Whether a node normalises by the microbatch's own mean and variance, as in training."""
    return node.kind == "batch_norm" and bool(node.args["training"])


def updates_statistics(node: Node) -> bool:
    """Whether a node also updates running statistics, as batch norms with ``running_mean`` do."""
    return uses_batch_statistics(node) and bool(node.args.get("running_mean"))


def _mean_and_variance(node: Node, shape: list[int]) -> int:
    return 2 * shape[1] if uses_batch_statistics(node) else 0


declare(
    "batch_norm",
    OperatorFacts(("statistics",), "statistics", statistics=_mean_and_variance, overwritable=True),
)
declare("group_norm layer_norm", OperatorFacts(sharding="samples"))

declare(
    "cat chunk split split_with_sizes softmax log_softmax glu sum amax amin",
    OperatorFacts(("channels",), "dims"),
)
declare("mean", OperatorFacts(("channels", "global mean"), "dims"))
declare("adaptive_avg_pool2d", OperatorFacts(("global mean",), "samples"))
declare("adaptive_max_pool2d", OperatorFacts(sharding="samples"))
declare("linear", OperatorFacts(sharding="samples", multiplies="output"))
