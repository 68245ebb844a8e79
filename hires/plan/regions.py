"""Finds the parts of a stage that a rank computes without messages: they are compiled as one.

    conv1   bn1   relu   conv2   bn2   add   pool        a stage in tiles, in training
     halo   norm  |---|   halo   norm  |--------|        two regions without messages

With one rank and one stage all of a network is one region. The plan states what is in none, and
why. ``hires.parallel.compiled_region`` runs them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hires.core.ranks.machine import TENSORRT
from hires.plan.graph import Node
from hires.plan.hardware import CPU
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.plan import Finding, Plan, Stage
from hires.plan.rules import CROP, GATHER

LEAST_WORK = 2
"""Nodes that compute something in a region: of fewer there is nothing to fuse."""

MESSAGES = "exchanges messages with other ranks"
RANDOM = "draws random numbers that follow from their place in the batch"
WRITTEN = "reads a buffer that the network writes"
ALONE = "has no neighbour to be compiled with"


@dataclass(frozen=True)
class Region:
    """Consecutive nodes of one segment of a stage, as indices in the graph."""

    first: int
    last: int  # after its last node


def regions_of(plan: Plan, stage: Stage) -> list[Region]:
    """Returns the regions of a stage, each as long as it can be, in order."""
    return [run for run in _runs(plan, stage) if _is_worth(plan, run)]


def reasons(plan: Plan, stage: Stage) -> dict[str, str]:
    """Returns why nodes of a stage are in no region, by name."""
    found = _barred(plan, stage)
    for run in _runs(plan, stage):
        if not _is_worth(plan, run):
            found |= {node.name: ALONE for node in plan.graph.nodes[run.first : run.last]}
    return found


def findings(plan: Plan, mode: str = "stage") -> Iterator[Finding]:
    """Yields how many nodes ``mode`` compiles, what keeps others out, and where it does not pay."""
    tiled = [stage for stage in plan.stages if stage.num_tiles > 1]
    if mode == TENSORRT and tiled:
        rows, columns = tiled[0].tiles
        text = (
            f"engine.compile={TENSORRT}: stage {tiled[0].index} is cut into {rows} x {columns} "
            f"tiles, which exchange messages between layers, and an engine exchanges none; use a "
            f"layout without tiles (parallel=single, lp, pp or gems), or engine.compile=off"
        )
        yield Finding("error", "engine.compile", text)
        return
    regions = [region for stage in plan.stages for region in regions_of(plan, stage)]
    inside = sum(region.last - region.first for region in regions)
    why = Counter(why for stage in plan.stages for why in reasons(plan, stage).values())
    others = "".join(f"; {count} not: each {reason}" for reason, count in why.most_common())
    areas = "1 region" if len(regions) == 1 else f"{len(regions)} regions"
    more = (
        "an engine of TensorRT holds its weights again, and room for its values"
        if mode == TENSORRT
        else "the compiler takes about 80 MiB more of a rank, and weights that are constants in "
        "inference on a CPU take their size again"
    )
    text = (
        f"{inside} of {inside + why.total()} nodes are compiled, in {areas}{others}; "
        f"memory is predicted as with engine.compile=off: {more}"
    )
    yield Finding("note", "engine.compile", text)
    if plan.training and plan.device == CPU:
        slower = (
            "engine.compile=stage pays in inference: on a CPU a compiled training step takes 1.2 "
            "to 1.4 times as long (ResNet-50 and ResNet-101); use engine.compile=off"
        )
        yield Finding("warning", "engine.compile", slower)


def _runs(plan: Plan, stage: Stage) -> Iterator[Region]:
    # The longest runs of nodes that are not barred; none crosses a segment's bound.
    barred = _barred(plan, stage)
    for first, last in itertools.pairwise(stage.segments or [stage.first, stage.last]):
        indices = range(first, last)
        for out, group in itertools.groupby(
            indices, lambda index: plan.graph.nodes[index].name in barred
        ):
            run = [*group]
            if not out:
                yield Region(run[0], run[-1] + 1)


def _barred(plan: Plan, stage: Stage) -> dict[str, str]:
    # Nodes that cannot be in a region, and why.
    exchanging = {name for op in stage.comm if op.kind != "loss" for name in (op.node, *op.readers)}
    written = plan.graph.updates.keys()

    def reason(node: Node) -> str:
        if node.name in exchanging or node.kind in (GATHER, CROP):
            return MESSAGES
        if is_random(node):
            return RANDOM
        return "" if written.isdisjoint(node.params) else WRITTEN

    nodes = plan.graph.nodes[stage.first : stage.last]
    return {node.name: why for node in nodes if (why := reason(node))}


def _is_worth(plan: Plan, run: Region) -> bool:
    working = (not facts_of(n.kind).view for n in plan.graph.nodes[run.first : run.last])
    return sum(working) >= LEAST_WORK
