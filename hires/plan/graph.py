"""Defines the graph of a network: its ATen operations with shapes, in execution order.

    input -> conv1 -> bn1 -> relu -> ... -> fc          one forward pass over one microbatch

``hires.nets.trace`` makes it, ``hires.plan`` decides on it, and ``hires.parallel`` executes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from hires.core.errors import PlanError

INPUT = "input"

Rect = tuple[int, int, int, int]
"""Rows and columns of an image as (row0, row1, col0, col1), ends excluded."""


@dataclass
class Parameter:
    """One parameter or buffer of the network."""

    shape: list[int]
    dtype: str
    trainable: bool
    """False for frozen parameters, for buffers and for constants."""
    data: str | None = None
    """Bytes of a constant in base64; None for what the network's module holds."""
    recipe: dict[str, Any] | None = None
    """How ranks compute it at their start, ``{"make": name, "params": [others], ...}``; None: the
    network or ``data`` has it (:mod:`hires.plan.passes`)."""

    @property
    def num_elements(self) -> int:
        """Numbers that it holds."""
        return math.prod(self.shape)

    @property
    def is_constant(self) -> bool:
        """Whether its numbers are here, and not in the network's module."""
        return self.data is not None


@dataclass
class Node:
    """One operation and the value that it makes."""

    name: str
    """Unique; the path of the module where it makes one value."""
    op: str
    """ATen operator and overload, as ``conv2d.default``."""
    args: dict[str, Any]
    """All arguments by the operator's own names, defaults included, in its order.

    ``{"value": name}``, ``{"param": name}``, ``{"dtype": name}`` and ``{"device": None}`` stand for
    what JSON cannot hold.
    """
    shape: list[int] | None
    """Shape of the value for one microbatch; None for a list of tensors."""
    dtype: str | None
    layer: str = ""
    """Path of the module that computed it."""
    flops: int = 0
    needs_grad: bool = False
    draw: int = -1
    """Which random draw of the forward pass it is, those without use included; -1: none."""
    seeded: bool = False
    """Whether torch declares that the operator draws random numbers."""

    @functools.cached_property
    def inputs(self) -> list[str]:
        """Values it reads, in order of appearance, each once."""
        return list(dict.fromkeys(_references(self.args, "value")))

    @functools.cached_property
    def params(self) -> list[str]:
        """Parameters and buffers it reads, each once."""
        return list(dict.fromkeys(_references(self.args, "param")))

    @property
    def kind(self) -> str:
        """The operator without its overload, as ``conv2d``."""
        return self.op.split(".")[0]

    @property
    def num_elements(self) -> int:
        """Numbers in its value."""
        return 0 if self.shape is None else math.prod(self.shape)


@dataclass
class Graph:
    """All operations of one microbatch's forward pass."""

    nodes: list[Node]
    output: str
    input_shape: list[int]
    """(n, C, H, W) of one microbatch."""
    params: dict[str, Parameter] = field(default_factory=dict)
    updates: dict[str, str] = field(default_factory=dict)
    """Buffers that the forward pass writes -> the value that it leaves there."""
    kept: dict[str, str] = field(default_factory=dict)
    """Nodes of a quantised network that stay in float, with the reason."""

    @functools.cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by the name of their value."""
        return {node.name: node for node in self.nodes}

    @property
    def results(self) -> set[str]:
        """Values that the network returns, or leaves in its buffers."""
        return {self.output, *self.updates.values()}

    def append(self, node: Node) -> None:
        """Adds a node behind the others, while the network is made."""
        self.nodes.append(node)
        self.by_name[node.name] = node

    def shape(self, value: str) -> list[int]:
        """Shape of a value that is one tensor."""
        shape = self.input_shape if value == INPUT else self.by_name[value].shape
        assert shape is not None, f"{value} is a list of tensors"
        return shape

    def is_list(self, *values: str) -> bool:
        """Whether one of some values is a list of tensors."""
        return any(name in self.by_name and self.by_name[name].shape is None for name in values)

    def needs_grad(self, value: str) -> bool:
        """Whether a gradient flows into a value; never into the images."""
        return value != INPUT and self.by_name[value].needs_grad

    def own_params(self, names: Iterable[str]) -> set[str]:
        """Returns the network's own parameters and buffers from which ranks compute some."""
        found, ahead = set[str](), [*names]
        while ahead:
            name = ahead.pop()
            fact = self.params[name]
            if fact.recipe is not None:
                ahead += fact.recipe["params"]
            elif not fact.is_constant:
                found.add(name)
        return found

    def modules(self, node: Node) -> list[str]:
        """Returns the modules whose parameters a node reads, also those that were fused into it."""
        modules = {name.rpartition(".")[0] for name in self.own_params(node.params)}
        return sorted(modules - {"", node.name})

    def described(self, name: str) -> str:
        """Returns how a table names a node: ``relu (bn1, conv1)``, with what was fused into it."""
        modules = self.modules(self.by_name[name])
        return f"{name} ({', '.join(modules)})" if modules else name

    @functools.cached_property
    def of_images(self) -> set[str]:
        """Values that depend on the images, the images included; others come from parameters."""
        values = {INPUT}
        for node in self.nodes:
            if not values.isdisjoint(node.inputs):
                values.add(node.name)
        return values

    @functools.cached_property
    def position(self) -> dict[str, int]:
        """Index of the node that makes a value."""
        return {node.name: index for index, node in enumerate(self.nodes)}

    @functools.cached_property
    def consumers(self) -> dict[str, list[int]]:
        """Indices of the nodes that read a value."""
        readers: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for name in node.inputs:
                readers.setdefault(name, []).append(index)
        return readers

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return dict(plain(self))

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Graph:
        """Returns the graph that :meth:`to_dict` described."""
        nodes = [Node(**node) for node in values["nodes"]]
        params = {name: Parameter(**param) for name, param in values["params"].items()}
        return Graph(**{**values, "nodes": nodes, "params": params})


def plain(item: Any) -> Any:
    """Returns the fields of a dataclass, and of those in its lists and dicts, as dicts.

    Other lists are not copied: those of thousands of tiles take seconds.
    """
    if dataclasses.is_dataclass(item):
        return {field.name: plain(getattr(item, field.name)) for field in dataclasses.fields(item)}
    if isinstance(item, dict):
        return {key: plain(value) for key, value in item.items()}
    if isinstance(item, list) and item and dataclasses.is_dataclass(item[0]):
        return [plain(value) for value in item]
    return item


def describe(node: Node) -> str:
    """Returns how a finding names a node: ``layer1.0.conv2 (conv2d)``."""
    return f"{node.name} ({node.kind})"


def _references(item: Any, key: str) -> Iterator[str]:
    """Yields the names that arguments refer to as ``{key: name}``."""
    if isinstance(item, dict) and list(item) == [key]:
        yield item[key]
    elif isinstance(item, (dict, list)):
        for part in item.values() if isinstance(item, dict) else item:
            yield from _references(part, key)


def renamed(node: Node, values: Mapping[str, str], params: Mapping[str, str] | None = None) -> Node:
    """Returns a node that reads values under other names, and some parameters as values."""
    refs = {("value", value): {"value": name} for value, name in values.items() if value != name}
    refs |= {("param", param): {"value": name} for param, name in (params or {}).items()}
    return rewired(node, refs) if refs else node


def rewired(node: Node, refs: Mapping[tuple[str, str], dict[str, str]]) -> Node:
    """Returns a node whose arguments that refer to some (kind, name) refer to others."""

    def other(arg: Any) -> Any:
        if isinstance(arg, list):
            return [other(item) for item in arg]
        return refs.get(next(iter(arg.items())), arg) if arg and isinstance(arg, dict) else arg

    return dataclasses.replace(node, args={key: other(arg) for key, arg in node.args.items()})


def reads_of(nodes: list[Node]) -> list[str]:
    """Returns the values that nodes read and none of them makes, in order."""
    made = {node.name for node in nodes}
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    return [name for name in read if name not in made]


def ancestors(by_name: dict[str, Node], value: str) -> set[str]:
    """Returns a value and all that it is computed from, the network's input included."""
    found, ahead = set[str](), [value]
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += by_name[name].inputs if name in by_name else []
    return found


def update_nodes(nodes: list[Node], values: set[str]) -> list[Node]:
    """Returns the nodes, in order, that compute some values."""
    by_name = {node.name: node for node in nodes}
    wanted = set[str]().union(*(ancestors(by_name, value) for value in values))
    return [node for node in nodes if node.name in wanted]


class GraphOfSamples:
    """Graphs of one network for any number of samples, from the traces of two.

    These differ in sizes alone, which grow evenly. What runs was traced itself.
    """

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
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {key: _between(value, other[key], at) for key, value in one.items()}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_between(a, b, at) for a, b in zip(one, other, strict=True)]
    if type(one) is type(other) and one == other:
        return one
    if type(one) is type(other) is float:
        return one + float(at) * (other - one)
    value = one + at * (other - one) if type(one) is type(other) is int else Fraction(1, 2)
    if value != round(value):
        raise PlanError(f"the network changes with the number of samples: {one!r} and {other!r}")
    return round(value)
