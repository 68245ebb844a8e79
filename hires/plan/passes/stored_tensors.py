"""Reads the tensors of a quantised network from the file that holds them, in place of making them.

    quantised   bn1:weight8  <-recipe-  bn1:weight  <-recipe-  conv1.weight, bn1.weight ...
    stored      bn1:weight8  <- FILE.safetensors, beside FILE.json (hires.quant.scales)

So ranks neither build the network's own tensors nor need their numbers.
"""

from __future__ import annotations

import dataclasses

from hires.core.config.run_config import RunConfig
from hires.plan.graph import Graph
from hires.plan.passes.graph_edits import edited
from hires.plan.passes.int8_tensors import stored_params
from hires.quant.scales import stored_scales


def with_stored_tensors(graph: Graph, config: RunConfig) -> Graph:
    """Returns the network without recipes if ``weights`` is a quantised one's file."""
    if stored_scales(config) is None:
        return graph
    held = {name: graph.params[name] for name in stored_params(graph)}
    made = {n: dataclasses.replace(fact, recipe=None) for n, fact in held.items() if fact.recipe}
    return edited(graph, {}, made)
