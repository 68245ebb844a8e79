"""Finds the parts of a stage that a rank computes without messages: they are compiled as one.

    conv1   bn1   relu   conv2   bn2   add   pool        a stage in tiles, in training
     halo   norm  |---|   halo   norm  |--------|        two regions without messages

With one rank and one stage all of a network is one region. ``hires.parallel.compiled_region`` runs
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hires.core.ranks.machine import TENSORRT
from hires.plan.hardware import CPU
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.plan import Finding, Plan, Stage
from hires.plan.rules import CROP, GATHER

LEAST_WORK = 2
"""Nodes that compute something in a region: of fewer there is nothing to fuse."""


@dataclass(frozen=True)
class Region:
    """Consecutive nodes of one segment of a stage, as indices in the graph."""

    first: int
    last: int  # after its last node


def regions_of(plan: Plan, stage: Stage) -> list[Region]:
    """Returns the regions of a stage, each as long as it can be, in order."""
    barred, nodes = _barred(plan, stage), plan.graph.nodes
    regions = []
    for first, last in itertools.pairwise(stage.segments or [stage.first, stage.last]):
        for out, group in itertools.groupby(range(first, last), lambda i: nodes[i].name in barred):
            run = [*group]
            if not out and sum(not facts_of(nodes[i].kind).view for i in run) >= LEAST_WORK:
                regions.append(Region(run[0], run[-1] + 1))
    return regions


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
    areas = "1 region" if len(regions) == 1 else f"{len(regions)} regions"
    text = (
        f"{inside} of {len(plan.graph.nodes)} nodes are compiled, in {areas}; others exchange "
        f"messages, draw random numbers, read a written buffer or have no neighbour to be compiled "
        f"with; memory is predicted as with engine.compile=off"
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


def _barred(plan: Plan, stage: Stage) -> set[str]:
    # Nodes that exchange messages, draw random numbers, or read a buffer that the network writes.
    barred = {name for op in stage.comm if op.kind != "loss" for name in (op.node, *op.readers)}
    for node in plan.nodes(stage.index):
        converts = node.kind in (GATHER, CROP)
        if converts or is_random(node) or not plan.graph.updates.keys().isdisjoint(node.params):
            barred.add(node.name)
    return barred
