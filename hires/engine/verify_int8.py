"""Computes a step of a quantised network on one process, for a comparison bit by bit.

A layout computes the same integers as one process, so nothing excuses a difference: each output is
compared with that of the plan's own network on one rank, on which no pixel travels.
"""

from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.precisions import INT8
from hires.core.ranks.compilers import TENSORRT
from hires.engine.build import filled_tensors, placement
from hires.engine.derived_tensors import DerivedTensors
from hires.engine.loader import image_dtype, whole_microbatches
from hires.parallel.context import Context
from hires.parallel.cursor import Cursor
from hires.parallel.stage import StageModule
from hires.plan.graph import INPUT, Node
from hires.plan.plan import Plan, Stage
from hires.plan.rules import CROP, GATHER, WHOLE


@torch.no_grad()
def quantised_step(config: RunConfig, plan: Plan) -> dict[str, Tensor]:
    """Returns the outputs of one process for all microbatches of a step, by ``output/index``.

    Buffers of the network are there, too, as they are. ``weights`` may name the file of a quantised
    network. ConfigError: engines of TensorRT compute it, which round in an order of their own.
    """
    if config.engine.compile == TENSORRT:
        raise ConfigError(
            f"engine.compile={TENSORRT} with precision={INT8} has no bits to compare: TensorRT "
            f"rounds in an order of its own; use engine.compile=off, or compare accuracies by "
            f"task=evaluate"
        )
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
