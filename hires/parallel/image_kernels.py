"""Computes norms and means, which need sums over all tiles or shards of the image.

A new norm is one function here, registered under its ATen name, beside its entry in
``hires.plan.operators``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hires.core.registry import Registry
from hires.parallel.collective import mean_over_image
from hires.parallel.context import Context
from hires.parallel.halo import crop
from hires.parallel.norm import NormTiles, tiled_batch_norm
from hires.plan.graph import Node
from hires.plan.layout import held_by

Values = dict[str, Any]
"""The values of a pass by the names of their nodes."""
Operator = Callable[[Values], Any]
"""Computes the value of a node."""
Bind = Callable[[Values], dict[str, Any]]
"""Collects the arguments of a node by name."""

IMAGE_KERNELS: Registry[Callable[[Node, Context, Bind], Operator]] = Registry("image kernel")
"""ATen name -> makes the callable of a node whose rule is ``norm`` or ``reduce``."""


@IMAGE_KERNELS.register("batch_norm")
def _batch_norm(node: Node, context: Context, bind: Bind) -> Operator:
    """Returns the callable of batch normalisation in training, its statistics over all ranks."""
    source = node.inputs[0]
    shape = context.plan.graph.shape(source)
    boxes = held_by(context.plan.graph, context.stage, source)
    counts = [(b.n1 - b.n0) * (b.r1 - b.r0) * (b.c1 - b.c0) for b in boxes]
    if len(shape) != 4:  # shards of a vector or a sequence; tiles are of images
        counts = [count * math.prod(shape[2:]) for count in counts]
    counts = [counts[tile] for tile in context.tile_order]
    rects = None
    if context.stage.num_tiles > 1 and context.extent(node.name) != context.own(shape[2:]):
        rects = context.extent(node.name), context.own(shape[2:])
    tiles = NormTiles(context.cursor, node.name, counts, rects)

    def run(values: Values) -> Tensor:
        a = bind(values)
        tracked = a["running_mean"] is not None and not context.recomputing
        running = (a["running_mean"], a["running_var"]) if tracked else None
        return tiled_batch_norm(
            a["input"], a["weight"], a["bias"], running, tiles, a["momentum"], a["eps"]
        )

    return run


@IMAGE_KERNELS.register("mean")
@IMAGE_KERNELS.register("adaptive_avg_pool2d")
def _global_mean(node: Node, context: Context, bind: Bind) -> Operator:
    """Returns the callable of a mean over the whole image."""
    [source] = node.inputs
    _, _, height, width = context.plan.graph.shape(source)
    flat = node.shape is not None and len(node.shape) == 2
    held, own = context.extent(source), context.own([height, width])

    def run(values: Values) -> Tensor:
        x = crop(values[source], held, own)
        mean = mean_over_image(x, context.cursor, node.name, height * width)
        return mean.flatten(1) if flat else mean

    return run
