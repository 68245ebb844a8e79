"""Applies the passes that rewrite the graph of a network before it is cut and tiled.

    traced    conv1 -> bn1 -> relu1 -> conv2        what plan, ranks, log and `hires show` see is
    rewritten bn1          -> relu1 -> conv2        the rewritten one, of ordinary nodes

A node that replaces several has the name of the last of them, so that values keep their names. What
it reads may be computed from the network's own tensors at the start of a rank: such a parameter has
a recipe (``hires.plan.graph``), and ``hires.engine.derived_tensors`` the function that it names.

To add a pass: a file like :mod:`hires.plan.passes.fold_norms`, its line in ``PASSES``, a test.
"""

from __future__ import annotations

from collections.abc import Callable

from hires.core.config.run_config import RunConfig
from hires.plan.graph import Graph
from hires.plan.passes.drop_identities import drop_identities
from hires.plan.passes.fold_constants import fold_constants
from hires.plan.passes.fold_norms import fold_norms
from hires.plan.passes.fuse_convolutions import fuse_convolutions
from hires.plan.passes.fuse_norms import fuse_norms
from hires.plan.passes.int8_scales import quantised_by_config
from hires.plan.passes.share_equal_values import share_equal_values
from hires.plan.passes.stored_tensors import with_stored_tensors

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
    return with_stored_tensors(share_equal_values(graph) if fuses else graph, config)
