"""States what it costs that the tiles of a stage compute operators whole, and the cut without."""

from __future__ import annotations

from typing import NamedTuple

from hires.core.units import size
from hires.plan.event import BYTES
from hires.plan.graph import Node
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import Finding, Plan, Stage
from hires.plan.rules import CROP, GATHER, WHOLE
from hires.plan.search.joins import end_before, nodes_in_words
from hires.plan.traffic import pass_traffic


class WholeNodes(NamedTuple):
    """What every tile of a stage computes because some operator has no rule for tiles."""

    causes: list[Node]
    """The nodes that read gathered values."""
    nodes: list[Node]
    """All that is computed whole, the gathered values included."""


def whole_notes(plan: Plan, listed: bool) -> list[Finding]:
    """Returns a note for each stage that gathers values: which operators, and their price."""
    sent = dict.fromkeys(range(len(plan.stages)), 0)
    for one in pass_traffic(plan):
        if one.kind in ("gather", "crop"):
            sent[one.makers.index] += sum(one.sizes) * plan.pieces
    pairs = ((stage, whole_nodes(plan, stage)) for stage in plan.stages)
    return [_note(plan, stage, whole, sent, listed) for stage, whole in pairs if whole.causes]


def whole_nodes(plan: Plan, stage: Stage) -> WholeNodes:
    """Returns the nodes of a stage that are computed whole because of a gather."""
    causes, nodes, behind = [], [], set[str]()
    gathered = {node.name for node in plan.nodes(stage.index) if node.kind == GATHER}
    for node in plan.nodes(stage.index):
        if not gathered.isdisjoint(node.inputs):
            causes.append(node)
        reached = node.name in gathered or not behind.isdisjoint(node.inputs)
        if reached and node.kind != CROP and stage.layout[node.name] == WHOLE:
            behind.add(node.name)
            nodes.append(node)
    return WholeNodes(causes, nodes)


def _note(
    plan: Plan, stage: Stage, whole: WholeNodes, sent: dict[int, int], listed: bool
) -> Finding:
    made = [node for node in whole.nodes if not facts_of(node.kind).view]
    numbers = [node.num_elements * BYTES[plan.dtype_of(node.name)] for node in made]
    held = sum(numbers) if plan.training else max(numbers)
    flops = sum(node.flops for node in whole.nodes)
    share = flops / max(1, sum(node.flops for node in plan.nodes(stage.index)))
    causes = [(stage, node) for node in whole.causes]
    _, cut = end_before(plan.graph, plan.stages, stage, whole.causes[0], listed)
    ranks, what = ("tiles", "maps") if stage.num_tiles > 1 else ("shards", "microbatches")
    text = (
        f"each of the {stage.num_ranks} {ranks} of stage {stage.index} gathers whole {what} for "
        f"{nodes_in_words(plan.graph, causes)}. A step sends {size(sent[stage.index])} for that, a "
        f"rank holds whole values of {size(held)}, and {share:.0%} of the stage's operations run "
        f"on every rank; {cut or 'it begins in the first layer, so no cut of the stages avoids it'}"
    )
    return Finding("note", "parallel.gather", text)
