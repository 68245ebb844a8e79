"""Says why the ranks of a stage cannot divide a node, for findings."""

from __future__ import annotations

from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.operator_facts import OPERATORS, facts_of, is_random
from hires.plan.plan import Stage
from hires.plan.rules import TILED

_KINDS = {
    "moves pixels across the borders of tiles": "view reshape _unsafe_view view_as reshape_as "
    "flatten unflatten permute transpose t swapaxes movedim numpy_T squeeze unsqueeze "
    "expand expand_as unbind select stack unfold as_strided",
    "multiplies along rows or columns": "linear matmul mm bmm addmm baddbmm mv einsum tensordot",
    "compares every pixel with every other": "scaled_dot_product_attention cdist",
    "reads the order of the pixels": "flip roll rot90 cumsum cumprod sort argsort topk gather "
    "scatter index index_select index_put grid_sampler im2col col2im",
}
REASONS = {kind: reason for reason, kinds in _KINDS.items() for kind in kinds.split()}
"""ATen name -> why tiles have no rule for it, whatever its arguments."""


def why_whole(node: Node, graph: Graph, stage: Stage) -> str:
    """Returns why a node of a stage has no rule, as ``reflect padding``; it names the cause."""
    if is_random(node) and not facts_of(node.kind).positional:
        return "draws random numbers for the whole value"
    if stage.shards > 1:
        return "works across the samples"
    facts, args = facts_of(node.kind), node.args
    maps = [value for value in node.inputs if stage.layout[value] == TILED]
    if _is_list(graph, maps):
        return "reads a list of maps"
    if node.kind in REASONS:
        return REASONS[node.kind]
    if node.kind.startswith("fft_"):
        return "mixes all rows and columns"
    if node.kind not in OPERATORS:
        return "no entry in the table of operators"
    if "pad" in args:
        mode = args.get("mode", "constant")
        return f"{mode} padding" if mode != "constant" else "pads channels or samples"
    if "output_size" in args:
        return f"pools to {args['output_size']} cells"
    if args.get(facts.argument) is not None:
        return f"works along {facts.argument} {args[facts.argument]}"
    sizes = {tuple(graph.shape(value)[2:]) for value in maps}
    if "pointwise" in facts.tiling and len(sizes) > 1:
        return f"its maps differ: {' and '.join('x'.join(map(str, s)) for s in sorted(sizes))}"
    if args.get("weight") in [{"value": value} for value in maps]:
        return "its weight is a map"
    if "pointwise" in facts.tiling and len(maps) > 1:
        return "its operands have their rows and columns in other dims"
    return "has no rule for tiles"


def _is_list(graph: Graph, values: list[str]) -> bool:
    return any(value != INPUT and graph.by_name[value].shape is None for value in values)
