"""Describes what a pass over a node asks of a rank, and counts what a training keeps of values.

node of the graph, share of its pixels or samples  ->  NodeWork  ->  seconds on a device
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hires.plan.event import BYTES
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.operator_facts import (
    CONV,
    CONV_1X1,
    COPY,
    GROUPED,
    OTHER,
    POINTWISE,
    PRODUCT,
    REDUCTION,
    RESIZE,
    TRANSPOSED,
    OperatorFacts,
    facts_of,
    kept_of,
)

CONVOLUTIONS = (CONV, CONV_1X1, GROUPED, TRANSPOSED)
ARITHMETIC = (*CONVOLUTIONS, PRODUCT)
"""Classes whose speed is one of operations; that of others is one of bytes."""

Share = float | Callable[[str], float]
"""Of a value's numbers that a rank computes or reads: of all values, or by the value's name."""


class NodeWork(NamedTuple):
    """One pass over one node on one rank."""

    kind: str
    family: str
    """The class of operators that is measured together."""
    back: bool
    training: bool
    dtype: str
    flops: float
    num_bytes: float
    sizes: tuple[float, ...]
    """Convolutions: output pixels of all samples (transposed: input pixels), channels in and out
    of a group, kernel area, stride, groups. Products: rows, columns in, columns out. Others:
    numbers of the value, and its channels."""
    input_grad: bool = True
    """Whether a gradient flows to what it reads: not of the first layer."""
    shared: bool = False
    """Whether the ranks of a stage exchange pixels or sums for it."""

    @property
    def phase(self) -> str:
        """Returns which pass it is: ``inference``, ``forward`` (of a training) or ``backward``."""
        return "backward" if self.back else "forward" if self.training else "inference"


def node_work(
    graph: Graph,
    node: Node,
    share: Share = 1.0,
    *,
    dtype: str,
    training: bool,
    back: bool = False,
    shared: bool = False,
) -> NodeWork | None:
    """Returns what a pass over a node takes; None: nothing, it is a view.

    The rank computes a ``share`` of its pixels or samples, in a ``dtype`` that integers do not
    follow. ``training``: the forward pass keeps what the backward one (``back``) needs; ``shared``:
    the ranks of its stage exchange something for it.
    """
    facts = facts_of(node.kind)
    if facts.view or node.shape is None:
        return None
    part = share if callable(share) else lambda value: share
    num_bytes: float = params_bytes(graph, node.params, dtype)
    for value in (node.name, *node.inputs):
        if not graph.is_list(value):  # of which no rank has a share
            num_bytes += part(value) * value_bytes(graph, value, dtype)
    own, family = part(node.name), family_of(graph, node, facts)
    return NodeWork(
        node.kind,
        family,
        back,
        training,
        dtype,
        flops=own * _flops(graph, node, family),
        num_bytes=num_bytes,
        sizes=_sizes(graph, node, family, own),
        input_grad=any(value != INPUT and graph.needs_grad(value) for value in node.inputs),
        shared=shared,
    )


def family_of(graph: Graph, node: Node, facts: OperatorFacts | None = None) -> str:
    """Returns the class of operators that a node is measured with."""
    facts = facts or facts_of(node.kind)
    weight = _weight(graph, node)
    if facts.multiplies and facts.window is not None and weight is not None:
        if node.kind.startswith("conv_transpose"):
            return TRANSPOSED
        if node.args.get("groups", 1) > 1:
            return GROUPED
        return CONV_1X1 if math.prod(weight[2:]) == 1 else CONV
    if facts.product is not None:
        return PRODUCT
    if facts.family:
        return facts.family
    if "upsample" in node.kind:
        return RESIZE
    if "reduction" in facts.tiling:
        return REDUCTION
    if "pointwise" in facts.tiling:
        return POINTWISE
    return COPY if facts.is_selection or "joined" in facts.tiling else OTHER


def _weight(graph: Graph, node: Node) -> list[int] | None:
    weight: Any = node.args.get("weight")
    if not isinstance(weight, dict):
        return None
    name = weight.get("param")
    return graph.params[name].shape if name else graph.shape(weight["value"])


def _flops(graph: Graph, node: Node, family: str) -> float:
    if family != PRODUCT or node.flops != node.num_elements or not node.inputs:
        return node.flops
    inner = (graph.shape(node.inputs[0]) or [1])[-1]  # two values multiplied: the graph counts none
    if node.kind == "scaled_dot_product_attention":
        # Two products, with as many columns between them as there are keys.
        keys = graph.shape(node.inputs[min(1, len(node.inputs) - 1)])[-2]
        return 4.0 * node.num_elements * keys
    return 2.0 * node.num_elements * inner


def _sizes(graph: Graph, node: Node, family: str, own: float) -> tuple[float, ...]:
    assert node.shape is not None
    shape, weight = node.shape, _weight(graph, node)
    if family in CONVOLUTIONS and weight is not None:
        source = graph.shape(node.inputs[0])
        transposed, groups = family == TRANSPOSED, node.args.get("groups", 1)
        pixels = own * math.prod(source if transposed else shape)
        pixels /= source[1] if transposed else shape[1]
        stride = node.args.get("stride", 1)
        stride = stride if isinstance(stride, int) else max(stride)
        channels = source[1] / groups, shape[1] / groups
        return (pixels, *channels, math.prod(weight[2:]), stride, groups)
    if family == PRODUCT and shape:
        source = graph.shape(node.inputs[0]) if node.inputs else shape
        rows = own * node.num_elements / max(1, shape[-1])
        return rows, (source or [1])[-1], shape[-1]
    return own * node.num_elements, shape[1] if len(shape) > 1 else 1


def value_bytes(graph: Graph, value: str, dtype: str) -> int:
    """Returns the bytes of a whole value, none of a list; integers have their own width."""
    if graph.is_list(value):
        return 0
    node = graph.by_name.get(value)
    return math.prod(graph.shape(value)) * _width(dtype, None if node is None else node.dtype)


def params_bytes(graph: Graph, names: Iterable[str], dtype: str) -> int:
    """Returns the bytes of some parameters."""
    params = [graph.params[name] for name in names]
    return sum(param.num_elements * _width(dtype, param.dtype) for param in params)


def kept_bytes(graph: Graph, dtype: str) -> dict[str, int]:
    """Returns the bytes that a training keeps until the backward pass, by value.

    A map that convolution, norm and activation read is kept once, beside the places of the maxima
    of a pool. A norm's value that an activation writes over is not kept.
    """
    read: set[str] = set()
    own: Counter[str] = Counter()
    for node in graph.nodes:
        if node.shape is None or not node.needs_grad:
            continue
        kept, by_number = kept_of(facts_of(node.kind)), len(node.inputs + node.params) == 1
        if "inputs" in kept or ("factors" in kept and not by_number):
            read.update(_base(graph, value) for value in node.inputs)
        if "value" in kept:
            read.add(_base(graph, node.name))
        widths = {"places": BYTES["int64"], "more": BYTES[dtype]}
        own[node.name] = node.num_elements * sum(widths.get(name, 0) for name in kept)
    values = {value: value_bytes(graph, value, dtype) for value in read - {INPUT}}
    return dict(Counter(values) + own)


def most_in_flight(actions: Iterable[str]) -> int:
    """Returns how many microbatches some actions of a training have in flight at the most."""
    in_flight = most = 0
    for action in actions:
        in_flight += -1 if action[0] == "B" else 1
        most = max(most, in_flight)
    return most


def _base(graph: Graph, value: str) -> str:
    """Returns the value in whose memory another one lies."""
    while value != INPUT and facts_of(graph.by_name[value].kind).view:
        if not graph.by_name[value].inputs:
            break
        value = graph.by_name[value].inputs[0]
    return value


def _width(dtype: str, own: str | None) -> int:
    return BYTES[dtype if own is None or "float" in own else own]
