"""What does a network compute? ``python -m hires.nets.trace`` turns any network into a graph.

``torch.export`` runs the forward pass once without data and writes down the ATen operations, so
modules and functional calls look alike, sizes computed from other tensors become numbers, and
Python control flow that depends on shapes is resolved. Nothing is allocated.
The front end, which imports no torch, calls this file as a process: config as JSON on standard
input, ``{"graph": ...}`` or ``{"error": ...}`` as JSON on standard output.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import operator
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hires.core.config import RunConfig, from_dict
from hires.core.errors import ConfigError, HiresError
from hires.nets.build import build_model
from hires.plan.graph import INPUT, Graph, Node, Parameter

ALIASES = {"alias", "contiguous", "detach_", "lift_fresh_copy", "_assert_tensor_metadata"}
"""Operations that change no value: their readers read their input."""


def trace(model: nn.Module, input_shape: list[int], training: bool) -> Graph:
    """Returns the graph of one forward pass.

    Args:
        model: any module of one image tensor that returns one tensor; it is left as it was.
        input_shape: (n, C, H, W) of one microbatch.
        training: whether norms use the batch's statistics and dropout drops.

    Raises:
        ConfigError: the module cannot be traced; the message tells why.
    """
    model = copy.deepcopy(model).to("meta").train(training)
    images = torch.empty(input_shape, device="meta")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(model, (images,), strict=False)
    except Exception as error:  # torch.export raises whatever the forward pass raises
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"the network's forward pass on an input of {input_shape} failed or cannot be traced: "
            f"{reason[0]}"
        ) from error
    return _Writer(exported, model, input_shape).write()


def trace_config(config: RunConfig) -> Graph:
    """Returns the graph of the network and microbatch that a config describes."""
    pieces = config.parallel.replicas * config.parallel.microbatches
    samples = max(1, config.batch // pieces)
    model = build_model(config.model, config.seed)
    shape = [samples, config.model.channels, config.height, config.width]
    return trace(model, shape, config.task.name == "train")


class _Writer:
    """Turns an exported program into plain facts."""

    def __init__(self, exported: torch.export.ExportedProgram, model: nn.Module, shape: list[int]):
        self.nodes = list(exported.graph.nodes)
        signature = exported.graph_signature
        self.params = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.shape = shape
        self.tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.refs: dict[str, dict[str, str]] = {}  # name in the export -> our reference
        self.views: set[str] = set()
        self.taken = {INPUT}
        self.written: list[Node] = []

    def write(self) -> Graph:
        """Returns the graph."""
        for node in self.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
        output = self._output()
        used = {name for node in self.written for name in node.params}
        facts = {
            name: Parameter(list(t.shape), _name_of(t.dtype), bool(t.requires_grad))
            for name, t in self.tensors.items()
            if name in used
        }
        graph = Graph(_live(self.written, output), output, self.shape, facts)
        _mark_gradients(graph)
        return graph

    def _placeholder(self, node: torch.fx.Node) -> None:
        """Notes what an input of the exported program is: a parameter, a buffer or the images."""
        if node.name in self.params:
            self.refs[node.name] = {"param": self.params[node.name]}
        elif any(ref == {"value": INPUT} for ref in self.refs.values()):
            raise ConfigError(
                f"the network holds a constant tensor ({node.name}) that is neither parameter nor "
                f"buffer; register it with register_buffer"
            )
        else:
            self.refs[node.name] = {"value": INPUT}

    def _call(self, node: torch.fx.Node) -> None:
        """Writes one operation, or skips it if it changes no value."""
        name, overload = _operator(node)
        first = self.refs.get(node.args[0].name) if _is_node(node.args[:1]) else None
        if name in ALIASES and first is not None:
            self.refs[node.name] = first
            return
        if name.endswith("_") and not name.startswith("_"):
            if first is not None and "param" in first:
                return  # num_batches_tracked counts up; the engine does it once a step
            self._refuse_write_to_view(node, first)
            name = name[:-1]
        value = node.meta.get("val")
        single = isinstance(value, Tensor)
        made = Node(
            name=self._unique(node),
            op=f"{name}.{overload}",
            args={key: self._encode(arg) for key, arg in _arguments(node).items()},
            shape=list(value.shape) if single else None,
            dtype=_name_of(value.dtype) if single else None,
            layer=_layer(node),
        )
        made.flops = _flops(made, self.tensors, self.written, self.shape)
        if made.kind in VIEWS and first is not None:
            self.views.add(made.name)
        self.refs[node.name] = {"value": made.name}
        self.written.append(made)

    def _refuse_write_to_view(self, node: torch.fx.Node, first: dict[str, str] | None) -> None:
        """An in-place write becomes an ordinary operation unless it writes through a view."""
        if first is not None and first.get("value") in self.views:
            raise ConfigError(
                f"the network writes in place into a part of a tensor ({node.target} at "
                f"{_layer(node) or 'the top level'}); use the out-of-place operation there"
            )

    def _encode(self, arg: Any) -> Any:
        """Returns an argument as JSON can hold it."""
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
        """Returns the name of the value that the network returns."""
        [output] = [node for node in self.nodes if node.op == "output"]
        user = [
            self.refs[arg.name]
            for arg in output.args[0]
            if isinstance(arg, torch.fx.Node) and "value" in self.refs[arg.name]
        ]
        if len(user) != 1 or user[0] == {"value": INPUT}:
            raise ConfigError(
                f"the network must return one tensor computed from the image; it returns {len(user)}"
            )
        return user[0]["value"]

    def _unique(self, node: torch.fx.Node) -> str:
        """Returns a name for the value: its module's path, or with the operation's name after it."""
        path = _layer(node)
        plain = node.name.removesuffix("_")
        name = path if path and path not in self.taken else (f"{path}.{plain}" if path else plain)
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name


VIEWS = {"slice", "select", "view", "narrow", "chunk", "split", "getitem", "unsqueeze", "permute"}
"""Operations whose value shares memory with their input."""


def _is_node(args: tuple[Any, ...]) -> bool:
    """Whether the first argument is a value."""
    return bool(args) and isinstance(args[0], torch.fx.Node)


def _operator(node: torch.fx.Node) -> tuple[str, str]:
    """Returns an operation's name and overload."""
    target = node.target
    if target is operator.getitem:
        return "getitem", "default"
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return target._schema.name.split("::")[1], target._overloadname
    raise ConfigError(
        f"the network calls {target}, which is no ATen operation; write it with torch's own"
    )


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Returns all arguments by name, with the operator's defaults where none was given."""
    if node.target is operator.getitem:
        return dict(zip(("list", "index"), node.args, strict=True))
    assert isinstance(node.target, torch._ops.OpOverload)
    made: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            made[argument.name] = node.args[index]
        else:
            made[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return made


def _layer(node: torch.fx.Node) -> str:
    """Returns the path of the innermost module that made a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("L['self'].") if stack else ""


def _name_of(dtype: torch.dtype) -> str:
    """Returns ``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _flops(node: Node, tensors: dict[str, Tensor], before: list[Node], images: list[int]) -> int:
    """Estimates a node: two per multiply-add, and one per number for everything else."""
    if node.shape is None:
        return 0
    weights = [tensors[name] for name in node.params if tensors[name].dim() > 1]
    if node.kind == "conv2d" and weights:
        return 2 * node.num_elements * weights[0][0].numel()
    if node.kind == "linear" and weights:
        return 2 * node.num_elements * weights[0].shape[1]
    if node.kind == "conv_transpose2d" and weights:
        shapes = {made.name: made.shape for made in before}
        read = shapes.get(node.inputs[0], images) or [0]
        return 2 * math.prod(read) * weights[0][0].numel()
    return node.num_elements


def _live(nodes: list[Node], output: str) -> list[Node]:
    """Returns the nodes that the output depends on, in order."""
    wanted = {output}
    kept = []
    for node in reversed(nodes):
        if node.name in wanted:
            wanted.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _mark_gradients(graph: Graph) -> None:
    """Marks the values into which a gradient flows."""
    for node in graph.nodes:
        trainable = any(graph.params[name].trainable for name in node.params)
        above = any(graph.needs_grad(name) for name in node.inputs)
        floating = node.dtype is None or "float" in node.dtype
        node.needs_grad = floating and (trainable or above)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what a user's network prints out of the answer on standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def main() -> int:
    """Answers the front end: config on standard input, graph or error on standard output."""
    try:
        with _quiet():
            config = from_dict(json.load(sys.stdin))
            graph = trace_config(config)
        answer: dict[str, Any] = {"graph": graph.to_dict()}
    except HiresError as error:
        answer = {"error": {"type": type(error).__name__, "text": str(error)}}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
