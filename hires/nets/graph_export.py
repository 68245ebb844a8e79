"""Turns an exported program into a graph of plain data.

The user's code may write into tensors; a graph has no writes. An in-place operation becomes the
ordinary one, which computes the same if no other value lies in the memory that was overwritten:

    y = x.view(-1)      x and y share memory
    y.add_(1)           refused if x is read later: it would read the old numbers
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from hires.core.errors import ConfigError
from hires.plan.graph import INPUT, Graph, Node, Parameter
from hires.plan.operators.operator_facts import facts_of, flops_of

COUNTER = "num_batches_tracked"
"""The one buffer that a network may write to; the engine counts once a step."""


def written(name: str) -> ConfigError:
    """Returns the error of a forward pass that changes a parameter or buffer."""
    return ConfigError(
        f"the network's forward pass writes to {name}; hires keeps only the running statistics of "
        f"norms: compute it without writing to parameters or buffers"
    )


class GraphWriter:
    """Turns an exported program of one forward pass into a graph.

    ``tensors`` are parameters and buffers by their first name, which ``names`` gives for all names.
    """

    def __init__(
        self, exported: ExportedProgram, tensors: dict[str, Tensor], names: dict[str, str]
    ) -> None:
        self.exported = exported
        self.nodes = list(exported.graph.nodes)
        self.order = {node: index for index, node in enumerate(self.nodes)}
        self.tensors = tensors
        self.refs = _inputs(exported, names)
        self.memory: dict[torch.fx.Node, set[torch.fx.Node]] = {}  # all nodes in a node's memory
        self.shapes: dict[str, list[int] | None] = {}
        self.written: list[Node] = []

    def write(self, input_shape: list[int]) -> Graph:
        """Returns the graph for images (n, C, H, W); ConfigError: what it cannot hold."""
        self.shapes[INPUT] = input_shape
        for node in self.nodes:
            if node.op == "call_function":
                self._call(node)
        output = self._output()
        live, wanted = [], {output}
        for made in reversed(self.written):
            if made.name in wanted:
                wanted.update(made.inputs)
                live.append(made)
        if INPUT not in wanted:
            raise ConfigError("the network's output does not depend on the image")
        used = {name for made in live for name in made.params}
        facts = {
            name: Parameter(list(t.shape), _name_of(t.dtype), bool(t.requires_grad))
            for name, t in self.tensors.items()
            if name in used
        }
        graph = Graph(live[::-1], output, input_shape, facts)
        for made in graph.nodes:
            trainable = any(facts[name].trainable for name in made.params)
            above = any(map(graph.needs_grad, made.inputs))
            floating = made.dtype is None or "float" in made.dtype
            ends = facts_of(made.kind).ends_gradient
            made.needs_grad = floating and (trainable or above) and not ends
        return graph

    def _call(self, node: torch.fx.Node) -> None:
        # Adds the node of one operation, unless its value equals its input.
        call = _Call.of(node)
        name, facts = call.name, facts_of(call.name)
        source = node.args[0] if node.args and isinstance(node.args[0], torch.fx.Node) else None
        self.memory[node] = {node}
        if source is not None and (facts.may_share or call.aliases):
            self.memory[node] = self.memory.setdefault(source, {source})
            self.memory[node].add(node)
        if source is not None and source.name in self.refs:
            first = self.refs[source.name]
            counts = call.writes and first.get("param", "").endswith(COUNTER)
            if facts.same_value or counts:
                self.refs[node.name] = first
                return
            if call.writes:
                self._refuse_write(node, source, name)
                name = name.removesuffix("_")
        value = node.meta.get("val")
        shape = list(value.shape) if isinstance(value, Tensor) else None
        dtype = _name_of(value.dtype) if isinstance(value, Tensor) else None
        args = {key: self._encode(arg) for key, arg in call.arguments.items()}
        op, made_name = f"{name}.{call.overload}", self._unique(node)
        made = Node(made_name, op, args, shape, dtype, _layer(node))
        weights = (list(self.tensors[param].shape) for param in made.params)
        weight = next((shape for shape in weights if len(shape) > 1), None)
        read = self.shapes[made.inputs[0]] if made.inputs else None
        made.flops = flops_of(made, weight, read or [0])
        self.shapes[made.name] = made.shape
        self.refs[node.name] = {"value": made.name}
        self.written.append(made)

    def _refuse_write(self, node: torch.fx.Node, source: torch.fx.Node, name: str) -> None:
        # A write to the memory of a parameter, or of a value that is read later.
        plain = hasattr(torch.ops.aten, name.removesuffix("_"))
        for other in self.memory[source] - {node}:
            if param := self.refs[other.name].get("param"):
                raise written(param)
            if any(self.order[user] > self.order[node] for user in other.users):
                plain = False
        if not plain:
            where = _layer(node) or "the top level"
            raise ConfigError(
                f"the network writes in place into memory that it also reads otherwise "
                f"({node.target} at {where}); use the out-of-place operation there"
            )

    def _encode(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self.refs[arg.name]
        if isinstance(arg, (list, tuple)):
            return [self._encode(item) for item in arg]
        if isinstance(arg, torch.dtype):
            return {"dtype": _name_of(arg)}
        if isinstance(arg, torch.device):
            return {"device": None}
        if isinstance(arg, torch.memory_format):
            return {"memory_format": str(arg).removeprefix("torch.")}
        if isinstance(arg, torch.layout):
            return None
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise ConfigError(f"the network passes {arg!r} to an operation; hires cannot record that")

    def _output(self) -> str:
        [returned] = [node for node in self.nodes if node.op == "output"]
        spec = self.exported.call_spec.out_spec
        values = [arg for arg in returned.args[0] if isinstance(arg, torch.fx.Node)]
        ref = self.refs[values[0].name] if len(values) == 1 else {}
        if spec is not None and not spec.is_leaf():
            what = f"a {spec.type.__name__}"
        elif "value" not in ref:
            what = "something else"
        elif ref["value"] == INPUT:
            what = "the image itself"
        else:
            return ref["value"]
        raise ConfigError(
            f"the network must return one tensor computed from the image; it returns {what}"
        )

    def _unique(self, node: torch.fx.Node) -> str:
        # The path of its module, with the operation if that is taken.
        path = _layer(node)
        name = path if path not in self.shapes else f"{path}.{node.name.removesuffix('_')}"
        name = name or node.name.removesuffix("_")
        while name in self.shapes:
            name += "_"
        return name


def _inputs(exported: ExportedProgram, names: dict[str, str]) -> dict[str, dict[str, str]]:
    refs = {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            assert spec.target is not None
            refs[spec.arg.name] = {"param": names.get(spec.target, spec.target)}
        elif spec.kind is InputKind.USER_INPUT:
            refs[spec.arg.name] = {"value": INPUT}
        else:
            raise ConfigError(
                f"the network holds a constant tensor ({spec.target or spec.arg.name}) that is "
                f"neither parameter nor buffer; register it with register_buffer"
            )
    return refs


class _Call(NamedTuple):  # an operation of the program, as the schema of its operator describes it
    name: str
    overload: str
    arguments: dict[str, Any]  # all of them by name, with the defaults of the operator
    aliases: bool = False  # whether it returns its input's memory, as a view or after a write
    writes: bool = False  # whether it writes into its first argument; others are refused

    @classmethod
    def of(cls, node: torch.fx.Node) -> _Call:
        target = node.target
        if target is operator.getitem:
            return cls("getitem", "default", dict(zip(("list", "index"), node.args, strict=True)))
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            raise ConfigError(
                f"the network calls {target}, which is no ATen operation; write it with torch's own"
            )
        schema = target._schema
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        if any(written[1:]):
            raise ConfigError(f"the network calls {target}; use the variant without out=")
        arguments = {a.name: node.kwargs.get(a.name, a.default_value) for a in schema.arguments}
        arguments |= {a.name: arg for a, arg in zip(schema.arguments, node.args, strict=False)}
        aliases = any(returned.alias_info is not None for returned in schema.returns)
        name = schema.name.split("::")[1]
        return cls(name, target._overloadname, arguments, aliases, any(written))


def _layer(node: torch.fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("L['self'].") if stack else ""


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
