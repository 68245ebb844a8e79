r"""Computes a step of a quantised network on one process, for a comparison bit by bit.

A layout computes the same integers as one process, so nothing excuses a difference: each output is
compared with that of the plan's own network on one rank, on which no pixel travels.

Layers that stay in float are bitwise equal, too, where every rank computes them whole or number by
number. Others sum in an order that follows from the tiles: partial sums of an image, and the
kernels of fp32 convolutions and products, which the libraries choose by shape. Two sums of fp32
numbers in two orders differ by what each is rounded by, sqrt(2) times the error of one
(:mod:`hires.engine.verify_bounds`), so d operators behind the first such sum allow

    4 u sqrt(2 d)        u = 2^-24, of fp32

If a value of this kind is rounded to 8 bits again, one that lies half way between two integers may
become the one or the other. A step is 2^-8 of the range, so then u = 2^-8, and d counts what
rounds to 8 bits. Few numbers differ, but each by as much.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hires.core.config.run_config import RunConfig
from hires.core.precisions import INT8, SIGNIFICANT_BITS
from hires.engine.build import filled_tensors, placement
from hires.engine.derived_tensors import DerivedTensors
from hires.engine.loader import image_dtype, whole_microbatches
from hires.engine.verify_bounds import BITWISE, MOST, Bounds
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT, Node
from hires.plan.operators.operator_facts import ROUNDS_AGAIN, facts_of
from hires.plan.plan import Plan, Stage
from hires.plan.rules import CROP, GATHER, WHOLE, rule_in


@torch.no_grad()
def quantised_step(config: RunConfig, plan: Plan) -> dict[str, Tensor]:
    """Returns the outputs of one process for all microbatches of a step, by ``output/index``.

    Buffers of the network are there, too, as they are. ``weights`` may name the file of a quantised
    network.
    """
    context = alone(plan)
    own = filled_tensors(config, [context])
    place = placement(image_dtype(config), context.plan.graph)
    derived = DerivedTensors([context], own, place).tensors
    module = StageModule(context, {**own, **derived})
    outputs = {}
    replicas = range(config.parallel.replicas)
    batches = [batch for replica in replicas for batch in whole_microbatches(config, replica)]
    for index, (images, _) in enumerate(batches):
        outputs[f"output/{index}"] = module.forward({INPUT: images})[plan.graph.output]
    buffers = {name: t for name, t in own.items() if not isinstance(t, nn.Parameter)}
    return outputs | {f"running_stats/{name}": t for name, t in buffers.items()}


class FloatSums(NamedTuple):
    """What a layout of a quantised network sums in float, in an order that follows from it."""

    nodes: list[str]
    steps: int
    """Most roundings of fp32 behind the first such sum, on any way."""
    integer_steps: int
    """Most roundings to 8 bits behind it."""

    @property
    def bounds(self) -> Bounds:
        """How far outputs may be from one process: not at all without such sums."""
        if not self.nodes:
            return BITWISE
        precision, steps = (
            (INT8, self.integer_steps) if self.integer_steps else ("fp32", self.steps)
        )
        bound = min(MOST, 4 * 2.0 ** -SIGNIFICANT_BITS[precision] * math.sqrt(2 * steps))
        kinds = dict.fromkeys(("output", "loss"), bound)
        return BITWISE._replace(by_kind={**BITWISE.by_kind, **kinds})


def float_sums(plan: Plan) -> FloatSums:
    """Returns what the ranks of a plan sum in float where one process sums in another order."""
    graph, nodes = plan.graph, list[str]()
    steps, integer_steps = {INPUT: 0}, {INPUT: 0}
    stages = [stage for stage in plan.stages for _ in range(stage.first, stage.last)]
    for stage, node in zip(stages, graph.nodes, strict=True):
        name, facts = node.name, facts_of(node.kind)
        before = max((steps[one] for one in node.inputs), default=0)
        integers = max((integer_steps[one] for one in node.inputs), default=0)
        sums = _sums_in_parts(stage, node, plan)
        nodes += [name] if sums else []
        rounds = 0 if facts.view else 2 if facts.multiplies else 1
        steps[name] = before + rounds if before or sums else 0
        rounds_to_8 = node.kind in ROUNDS_AGAIN or (node.dtype == "uint8" and not facts.moves)
        integer_steps[name] = integers + (rounds_to_8 and before > 0)
    return FloatSums(nodes, max(steps.values()), max(integer_steps.values()))


def _sums_in_parts(stage: Stage, node: Node, plan: Plan) -> bool:
    facts = facts_of(node.kind)
    if facts.quantized or facts.moves or node.kind in (GATHER, CROP):
        return False
    rule = rule_in(stage, node, plan.graph)
    if rule is None or rule.kind == "whole":
        return False
    ways = {*facts.tiling} & {"window", "statistics", "reduction", "softmax", "product"}
    return bool(ways or facts.multiplies) and not (rule.kind == "pointwise" and _is_by_row(node))


def _is_by_row(node: Node) -> bool:
    # A norm of single rows sums all of them alike, however many there are.
    return "layer_norm" in node.kind


def alone(plan: Plan) -> Context:
    """Returns the only rank of a plan that has the same network and no other ranks."""
    graph = dataclasses.replace(plan.graph, nodes=[_as_whole(node) for node in plan.graph.nodes])
    layout = dict.fromkeys([INPUT, *graph.by_name], WHOLE)
    stage = Stage(0, 0, len(graph.nodes), [1, 1], 0, layout=layout)
    single = Plan(graph, [stage], [], 1, 1, False, plan.dtype, [["F0"]])
    ranks: Any = SimpleNamespace(ranks=[0], shared=None)
    return Context(single, 0, collections.defaultdict(lambda: ranks), Cursor([], {}))


def _as_whole(node: Node) -> Node:
    # What brings values from tiles to all ranks, and back, does nothing on one rank.
    if node.kind not in (GATHER, CROP):
        return node
    return dataclasses.replace(node, op="alias.default", args={"self": node.args["input"]})
