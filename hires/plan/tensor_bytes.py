"""Counts the bytes of values and parameters, and of what a training keeps of them.

The plan's choice of ranks to rehearse, the estimates of a search and the work of a node use these
counts; what a rank needs in a run is predicted by a rehearsal (``hires.engine.footprint``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from hires.plan.event import BYTES
from hires.plan.graph import INPUT, Graph
from hires.plan.operators.operator_facts import facts_of, kept_of


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
