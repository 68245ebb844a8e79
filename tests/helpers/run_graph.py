"""The simplest way to compute a graph: one ATen operation after another."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from hires.nets.constants import constant_tensor
from hires.plan.graph import INPUT, Graph


def run_graph(graph: Graph, model: nn.Module, images: Tensor) -> Tensor:
    """Returns what the graph computes with a module's parameters and buffers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    facts = graph.params.items()
    tensors |= {name: constant_tensor(fact) for name, fact in facts if fact.is_constant}
    values: dict[str, Any] = {INPUT: images}

    def decode(arg: Any) -> Any:
        if isinstance(arg, list):
            return [decode(item) for item in arg]
        if not isinstance(arg, dict):
            return arg
        [(kind, name)] = arg.items()
        known = {"value": values.get, "param": tensors.get, "dtype": lambda n: getattr(torch, n)}
        return known[kind](name) if kind in known else None

    for node in graph.nodes:
        args = {key: decode(arg) for key, arg in node.args.items()}
        if node.kind == "getitem":
            values[node.name] = operator.getitem(args["list"], args["index"])
            continue
        name, overload = node.op.split(".", 1)
        function = getattr(getattr(torch.ops.aten, name), overload)
        named = {a.name: args.pop(a.name) for a in function._schema.arguments if a.kwarg_only}
        values[node.name] = function(*args.values(), **named)
        expected = node.shape
        assert expected is None or list(values[node.name].shape) == expected, node.name
    return values[graph.output]
