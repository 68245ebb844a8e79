"""Predicts what the kernels that oneDNN compiles for a quantised network take beside its tensors.

oneDNN writes machine code for each shape of a convolution or product, and for each reordering of a
weight, and keeps it. One kernel is little; a network of small maps and 8-bit weights has more
megabytes of code than of maps.

    ResNet-50, 32 tiles of 16 x 32 pixels, int8 (AVX2)    weights 22.4 MiB, code and caches 3.2 MiB
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from hires.parallel.context import Context
from hires.plan.graph import Node
from hires.plan.operators.operator_facts import COMPILED

KERNEL_BYTES = 64 * 2**10
"""Of one 8-bit kernel: on AVX2 a process grew by 40 to 60 KiB in the first call of a convolution,
of a product with a sum as much again, and by 12 to 48 KiB when its weight was packed."""


def kernel_bytes(contexts: Iterable[Context]) -> int:
    """Returns the bytes of the 8-bit kernels of a rank's slots; kernels of one shape are one."""
    kernels: set[Hashable] = set()
    for context in contexts:
        for node in context.plan.nodes(context.stage.index):
            if node.kind in COMPILED:
                kernels.add(_kernel(context, node))
    return KERNEL_BYTES * len(kernels)


def _kernel(context: Context, node: Node) -> Hashable:
    # What two nodes have in common that are computed by one kernel.
    graph = context.plan.graph

    def size(value: str) -> Hashable:
        shape = graph.shape(value)
        if len(shape) != 4:
            return tuple(shape)
        r0, r1, c0, c1 = context.extent(value)
        return shape[1], r1 - r0, c1 - c0

    weights = (tuple(graph.params[name].shape) for name in node.params)
    adds = node.args.get("other") is not None
    return node.kind, size(node.inputs[0]), size(node.name), *weights, adds
