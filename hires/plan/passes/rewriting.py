"""Applies the passes that rewrite the graph of a network before it is cut and tiled.

    traced    conv1 -> bn1 -> relu1 -> conv2        what plan, ranks, log and `hires show` see is
    rewritten bn1          -> relu1 -> conv2        the rewritten one, of ordinary nodes

A node that replaces several has the name of the last of them, so that values keep their names. What
it reads may be computed from the network's own tensors at the start of a rank: such a parameter has
a recipe (``hires.plan.graph``), and ``hires.engine.derived_tensors`` the function that it names.

A value that depends on parameters alone is computed once, at the start of a rank, unless it is a
view or much larger than they are.

To add a pass: a function like those of :mod:`hires.plan.passes.fuse`, a line in ``PASSES``, a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hires.core.config.run_config import RunConfig
from hires.plan.graph import Graph, Node, Parameter, ancestors, plain, rewired
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.passes.fuse import (
    drop_identities,
    fold_norms,
    fuse_convolutions,
    fuse_norms,
    with_nodes,
)
from hires.plan.passes.int8 import quantised_by_config
from hires.plan.passes.int8_arithmetic import stored_params
from hires.quant.scales import stored_scales

PASSES: dict[str, Callable[[Graph, RunConfig], Graph]] = {
    "drop_identities": lambda graph, config: drop_identities(graph),
    "fold_constants": lambda graph, config: fold_constants(graph, config.image_type),
    "fold_norms": lambda graph, config: fold_norms(graph),
    "fuse_norms": lambda graph, config: fuse_norms(graph),
    "fuse_convolutions": lambda graph, config: fuse_convolutions(graph),
}
"""Name -> (network, config) -> network that computes the same, in the order in which they run."""


def rewritten(config: RunConfig, graph: Graph) -> Graph:
    """Returns the network that a run's ranks compute; a second time it changes nothing."""
    if config.task.name == "train":
        return graph
    for one in PASSES.values() if config.engine.fuse != "off" else ():
        graph = one(graph, config)
    return _with_stored_tensors(quantised_by_config(graph, config), config)


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


SMALL = 2**16
"""Numbers of a value that is kept however few it is computed from."""


def fold_constants(graph: Graph, dtype: str) -> Graph:
    """Returns the network without such values; ``dtype`` is that of the run's parameters."""
    folded = _folded(graph, dtype)
    views = {n.name for n in graph.nodes if n.name not in graph.of_images and facts_of(n.kind).view}
    kept, read, params = set[str](), set[str](), dict[str, Parameter]()
    for node in reversed(graph.nodes):
        if node.name in folded:
            if node.name in read:
                params[f"{node.name}:value"] = _parameter(node, graph, dtype)
        elif node.name not in views or node.name in read | graph.results:
            kept.add(node.name)
            read |= {*node.inputs}
    if not params:
        return graph
    nodes: dict[str, Node | None] = {}
    for node in graph.nodes:
        if node.name not in kept:
            nodes[node.name] = None
        elif not folded.isdisjoint(node.inputs):
            inner = (value for value in node.inputs if value in folded)
            refs = {("value", value): {"param": f"{value}:value"} for value in inner}
            nodes[node.name] = rewired(node, refs)
    return with_nodes(graph, nodes, params)


def _folded(graph: Graph, dtype: str) -> set[str]:
    folded, views = set[str](), set[str]()
    for node in graph.nodes:
        writes = node.name in graph.results or not graph.updates.keys().isdisjoint(node.params)
        inner = folded | views >= {*node.inputs} and node.name not in graph.of_images
        if writes or not inner or node.shape is None or is_random(node):
            continue
        if facts_of(node.kind).view:
            views.add(node.name)
        elif ("float" not in (node.dtype or "") or node.dtype == dtype) and _pays(node, graph):
            folded.add(node.name)
    return folded


def _pays(node: Node, graph: Graph) -> bool:
    if "complex" in (node.dtype or ""):
        return False
    behind = ancestors(graph.by_name, node.name)
    names = {name for value in behind for name in graph.by_name[value].params}
    return node.num_elements <= max(sum(graph.params[n].num_elements for n in names), SMALL)


def _parameter(node: Node, graph: Graph, dtype: str) -> Parameter:
    behind = ancestors(graph.by_name, node.name)
    nodes = [one for one in graph.nodes if one.name in behind]
    names = list(dict.fromkeys(name for one in nodes for name in one.params))
    recipe = {"make": "computed", "params": names, "dtype": dtype, "value": node.name}
    recipe["nodes"] = plain(nodes)
    assert node.shape is not None
    return Parameter(node.shape, node.dtype or dtype, False, recipe=recipe)
