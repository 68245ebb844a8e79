"""Names what a calibration observes, and what makes two networks one for their scales.

Both are of the fused float graph, whatever the layout, batch and image that it is run with.
"""

from __future__ import annotations

from hires.core.store.frozen import digest
from hires.plan.graph import INPUT, Graph
from hires.plan.rules import CROP, GATHER


def observed_values(graph: Graph) -> list[str]:
    """Returns the real values that depend on the images, sample by sample, in order."""
    samples = graph.input_shape[0]
    values = [INPUT] if INPUT in graph.consumers else []
    for node in graph.nodes:
        shape = node.shape or []
        if node.name in graph.of_images and "float" in (node.dtype or "") and len(shape) > 1:
            converts = node.kind in (GATHER, CROP)  # nodes of a layout, which another one lacks
            values += [node.name] if shape[0] == samples and not converts else []
    return values


def params_digest(graph: Graph) -> str:
    """Returns 16 digits that differ where the parameters and buffers of two networks do.

    They are the network's own: how it was rewritten, cut and tiled makes no difference.
    """
    own = graph.own_params(name for node in graph.nodes for name in node.params)
    return digest([[name, graph.params[name].shape] for name in sorted(own)])
