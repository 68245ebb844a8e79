"""Applies the passes that rewrite the graph of a network before it is cut and tiled.

    traced    conv1 -> bn1 -> relu1 -> conv2        what plan, ranks, log and `hires show` see is
    rewritten bn1          -> relu1 -> conv2        the rewritten one, of ordinary nodes

A node that replaces several has the name of the last of them, so that values keep their names. What
it reads may be computed from the network's own tensors at the start of a rank: such a parameter has
a recipe (``hires.plan.graph``), and ``hires.engine.derived_tensors`` the function that it names.

To add a pass: a function like those of :mod:`hires.plan.passes.fuse`, a line in ``PASSES``, a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hires.core.config.run_config import RunConfig
from hires.plan.graph import Graph
from hires.plan.passes.compute_once import fold_constants, share_equal_values
from hires.plan.passes.fuse import (
    drop_identities,
    fold_norms,
    fuse_convolutions,
    fuse_norms,
    with_nodes,
)
from hires.plan.passes.int8 import quantised_by_config
from hires.plan.passes.int8_tensors import stored_params
from hires.quant.scales import stored_scales

PASSES: dict[str, Callable[[Graph, RunConfig], Graph]] = {
    "drop_identities": lambda graph, config: drop_identities(graph),
    "fold_constants": lambda graph, config: fold_constants(graph, config.image_type),
    "share_equal_values": lambda graph, config: share_equal_values(graph),
    "fold_norms": lambda graph, config: fold_norms(graph),
    "fuse_norms": lambda graph, config: fuse_norms(graph),
    "fuse_convolutions": lambda graph, config: fuse_convolutions(graph),
}
"""Name -> (network, config) -> network that computes the same, in the order in which they run."""


def rewritten(config: RunConfig, graph: Graph) -> Graph:
    """Returns the network that a run's ranks compute; a second time it changes nothing."""
    if config.task.name == "train":
        return graph
    fuses = config.engine.fuse != "off"
    if fuses:
        for one in PASSES.values():
            graph = one(graph, config)
    graph = quantised_by_config(graph, config)
    return _with_stored_tensors(share_equal_values(graph) if fuses else graph, config)


def _with_stored_tensors(graph: Graph, config: RunConfig) -> Graph:
    """Returns the network without recipes if ``weights`` is a quantised one's file.

    quantised   bn1:weight8  <-recipe-  bn1:weight  <-recipe-  conv1.weight, bn1.weight ...
    stored      bn1:weight8  <- FILE.safetensors, beside FILE.json (hires.quant.scales)

    So ranks neither build the network's own tensors nor need their numbers.
    """
    if stored_scales(config) is None:
        return graph
    held = {name: graph.params[name] for name in stored_params(graph)}
    made = {n: dataclasses.replace(fact, recipe=None) for n, fact in held.items() if fact.recipe}
    return with_nodes(graph, {}, made)
