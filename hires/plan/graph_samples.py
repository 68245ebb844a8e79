"""Makes the graph of another number of samples from the traces of two.

A network that is traced with 4 and with 8 samples differs in sizes alone, which grow evenly:

    4 samples   view [4, 2048]     flops 1000
    8 samples   view [8, 2048]     flops 2000
    2 samples   view [2, 2048]     flops 500       on the same line, for each number of the graph

A search looks at many numbers of samples, and a trace takes seconds. What runs was traced itself.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from hires.core.errors import PlanError
from hires.plan.graph import Graph


class GraphOfSamples:
    """Graphs of one network for any number of samples."""

    def __init__(self, one: Graph, other: Graph) -> None:
        self._sides = one.to_dict(), other.to_dict()
        self._samples = one.input_shape[0], other.input_shape[0]
        self._graphs = {one.input_shape[0]: one, other.input_shape[0]: other}

    def graph(self, samples: int) -> Graph:
        """Returns the graph; PlanError: it does not follow from the two traces."""
        if samples not in self._graphs:
            first, second = self._samples
            if first == second:
                raise PlanError(f"two traces of {first} samples say nothing of {samples}")
            values = _between(*self._sides, Fraction(samples - first, second - first))
            self._graphs[samples] = Graph.from_dict(values)
        return self._graphs[samples]


def _between(one: Any, other: Any, at: Fraction) -> Any:
    """Returns plain values on the line through two: ``at`` 0 is the one and 1 the other."""
    if type(one) is not type(other):
        raise PlanError(f"the network changes with the number of samples: {one!r} and {other!r}")
    if isinstance(one, dict):
        if one.keys() != other.keys():
            raise PlanError("the network has other operators for another number of samples")
        return {key: _between(value, other[key], at) for key, value in one.items()}
    if isinstance(one, list):
        if len(one) != len(other):
            raise PlanError("the network has other operators for another number of samples")
        return [_between(a, b, at) for a, b in zip(one, other, strict=True)]
    if one == other:
        return one
    if isinstance(one, bool) or not isinstance(one, (int, float)):
        raise PlanError(f"the network changes with the number of samples: {one!r} and {other!r}")
    if isinstance(one, float):
        return one + float(at) * (other - one)
    value = one + at * (other - one)
    if value != round(value):
        raise PlanError(f"{one} and {other} do not grow evenly with the number of samples")
    return round(value)
