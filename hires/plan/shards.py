"""Which operation can be computed where ranks divide the samples of a microbatch, and how?

A stage behind the join may be data-parallel inside (``parallel.local_dp``): each of its ranks holds
all pixels of some samples. Every operation that treats samples alone needs nothing; batch
normalisation in training takes its statistics over all shards, since it looks at the microbatch.

Source:
    The join of Jain's spatial parallelism in the manner of LBANN (thesis, chapter 3).
"""

from __future__ import annotations

from typing import Any

from hires.plan.graph import Graph, Node
from hires.plan.rules import CHANNELWISE, DROPOUTS, POINTWISE, SHARDED, WINDOWS, Rule, is_random

SAMPLEWISE = (
    POINTWISE
    | set(WINDOWS)
    | DROPOUTS
    | {
        *("linear", "adaptive_avg_pool2d", "adaptive_max_pool2d", "getitem"),
        *("group_norm", "layer_norm", "pixel_unshuffle", "upsample_bicubic2d"),
        *("reflection_pad2d", "replication_pad2d"),
    }
)
"""Operations on each sample alone, whatever their arguments."""

RESHAPES = {"view": "size", "reshape": "shape", "expand": "size", "_unsafe_view": "size"}
"""Operations whose argument spells the sizes out, that of the batch too."""


def shard_rule(node: Node, graph: Graph, layout: dict[str, str]) -> Rule | None:
    """Returns the rule of a node among shards, or None if shards cannot compute it.

    Args:
        node: a node of the graph.
        graph: the network.
        layout: SHARDED or WHOLE for each value that the node reads.
    """
    if is_random(node):
        return None
    divided = [name for name in node.inputs if layout[name] == SHARDED]
    if not divided:
        return Rule("whole")  # made from parameters alone; its gradient is summed as theirs are
    batch = graph.input_shape[0]
    if node.kind != "getitem" and (node.shape or [batch])[0] != batch:
        return None
    # A whole operand is made from parameters: it must fit every sample alike.
    whole = [graph.shape(name) for name in node.inputs if name not in divided]
    dims = len(node.shape or [])
    if node.kind in POINTWISE and any(len(s) >= dims and s[:1] != [1] for s in whole):
        return None
    if node.kind in CHANNELWISE and whole:
        return None
    if node.kind == "batch_norm":
        return Rule("norm" if node.args["training"] else "pointwise")
    alone = node.kind in SAMPLEWISE or _leaves_samples(node, graph, divided[0])
    return Rule("pointwise") if alone else None


def shard_args(node: Node, batch: int, samples: int) -> dict[str, Any]:
    """Returns a node's arguments for so many samples instead of the whole microbatch."""
    key = RESHAPES.get(node.kind)
    if key is None or node.args[key][0] != batch:
        return node.args
    return {**node.args, key: [samples, *node.args[key][1:]]}


def _leaves_samples(node: Node, graph: Graph, value: str) -> bool:
    """Whether an operation along dims or sizes leaves the samples alone."""
    if node.kind in RESHAPES:
        return node.args[RESHAPES[node.kind]][0] in (graph.input_shape[0], -1)
    if node.kind not in CHANNELWISE and node.kind != "flatten":
        return False
    dims = node.args.get("start_dim" if node.kind == "flatten" else "dim")
    listed = dims if isinstance(dims, list) else [dims]
    num_dims = len(graph.shape(value))
    return bool(listed) and all(d is not None and d % num_dims != 0 for d in listed)
