"""Turns an exported program into a graph of plain data.

Parameters and buffers go by their names; other tensors that the forward pass reads are constants,
whose numbers are part of the graph. What ran under ``torch.no_grad`` ends in a ``detach``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from hires.core.errors import ConfigError
from hires.nets.buffer_updates import READ, check_updates, constant_updates, with_reads, written
from hires.nets.build_network import constant_of
from hires.nets.program_calls import NO_GRAD, Call, inline, layer_of, overload_of
from hires.nets.traced_memory import (
    Emit,
    Ref,
    TracedMemory,
    name_of,
    order_of,
    storage_of,
    value_of,
    written_value,
)
from hires.plan.graph import INPUT, Graph, Node, Parameter
from hires.plan.operators.operator_facts import facts_of, flops_of, gradient_inputs, num_draws

COUNTER = "num_batches_tracked"
"""A buffer of norms; the engine counts once a step."""
MOST_CONSTANT_BYTES = 8 * 2**20
"""Size of all constants of a network: they are stored in the plan."""


SIZED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "view_as.default": ("reshape.default", "shape", {}),
    "reshape_as.default": ("reshape.default", "shape", {}),
    "expand_as.default": ("expand.default", "size", {"implicit": False}),
}
"""Operator that reads a size from another tensor -> the one with the size as an argument."""


class GraphWriter:
    """Turns an exported program of one forward pass into a graph.

    ``tensors`` are parameters and buffers by their first name, which ``names`` gives for all names;
    ``assigned`` is what the forward pass assigned to buffers.
    """

    def __init__(
        self,
        exported: ExportedProgram,
        tensors: dict[str, Tensor],
        names: dict[str, str],
        assigned: dict[str, Tensor],
    ) -> None:
        inline(exported.graph_module)
        self.spec = exported.call_spec.out_spec
        self.nodes = list(exported.graph.nodes)
        self.facts = {
            name: Parameter(list(t.shape), name_of(t.dtype), bool(t.requires_grad))
            for name, t in tensors.items()
        }
        self.memory = TracedMemory(self._emit)
        self.shapes: dict[str, list[int] | None] = {}
        self.made: list[Node] = []
        self.draws = 0
        self.firsts: set[fx.Node] = set()  # of whose values only the first is read
        self.numbers: dict[str, float] = {}  # constants without dims
        self.no_grad: set[str] = set()  # values that were made without gradients
        self.detached: dict[str, Ref] = {}  # such a value, for readers with gradients
        self.buffers: set[str] = set()
        self.written: dict[str, fx.Node] = {}  # buffers that the forward pass writes
        self.node = self.nodes[0]  # the one that is turned
        specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
        for node in self.nodes:
            if node.op == "placeholder":
                self.memory.add(node, self._input(specs[node.name], exported.constants, names))
        # torch.export may leave out the copy of what was assigned into the buffer.
        for name, tensor in assigned.items():
            made = [n for n in self.nodes if storage_of(value_of(n)) == storage_of(tensor)]
            if made and made[0].op != "placeholder":  # else it was written in place
                self.written[names.get(name, name)] = made[-1]

    def write(self, input_shape: list[int]) -> Graph:
        """Returns the graph for images (n, C, H, W); ConfigError: what it cannot hold."""
        self.shapes[INPUT] = input_shape
        for node in self.nodes:
            if node.op == "call_function":
                self.node = node
                self._call(node)
        output, updates = self._output(), self._updates()
        reads = with_reads(self.made, updates, self.facts)
        live, wanted = list[Node](), {output, *updates.values(), *reads}
        for made in reversed(self.made):
            if made.name in wanted:
                wanted.update(made.inputs)
                live.append(made)
        if INPUT not in wanted:
            raise ConfigError("the network's output does not depend on the image")
        used = {name for made in live for name in made.params}
        facts = {name: fact for name, fact in self.facts.items() if name in used}
        graph = Graph(live[::-1], output, input_shape, facts, updates)
        for made in graph.nodes:
            trainable = any(facts[name].trainable for name in made.params)
            above = any(map(graph.needs_grad, gradient_inputs(made)))
            floating = made.dtype is None or "float" in made.dtype or "complex" in made.dtype
            ends = facts_of(made.kind).ends_gradient or made.name in self.no_grad
            made.needs_grad = floating and (trainable or above) and not ends
        check_updates(graph)
        return graph

    def _updates(self) -> dict[str, str]:
        updates = {}
        for name, root in self.written.items():
            made = self.memory.read(root)
            if "value" not in made:  # another tensor was copied into it
                like = torch.empty(self.facts[name].shape, device="meta")
                args = {"self": made, "memory_format": None}
                made = self._emit(READ, args, like.to(value_of(root).dtype), self.node)
            updates[name] = made["value"]
        tables = constant_updates(self.made, updates, self.facts)
        return {name: value for name, value in updates.items() if name not in tables}

    def _call(self, node: fx.Node) -> None:
        # Adds the node of one operation, unless its value equals its input.
        call = Call.of(node)
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is not None and source not in self.memory:
            return  # a check of a number that the graph does not hold
        if call.into is not None:
            made = self._overwritten(node, call.into, call)
            self.memory.write(call.into, made, node)
            self.memory.add(node, made, call.into)
            return
        shows = source if source is not None and self._is_view(node, source, call) else None
        if source is not None and call.same_value:
            self.memory.add(node, self.memory.read(source), shows)
            return
        value = value_of(node)
        if not isinstance(value, (Tensor, list, tuple)):
            return  # a number: refused where it is used
        if source is not None and source in self.firsts:
            self.memory.add(node, self.memory.read(source))
            return
        if isinstance(value, (list, tuple)) and _only_first_is_read(node):
            self.firsts.add(node)
            value = value[0]
        if call.name == "as_strided":
            _check_strides(node)
        args = {name: self._encode(arg) for name, arg in call.arguments.items()}
        if call.name == "scaled_dot_product_attention" and call.arguments["dropout_p"] > 0:
            self.memory.add(node, _attention_with_dropout(node, args, self._emit))
            return
        self.memory.add(node, self._emit(call.op, args, value, node), shows)

    def _is_view(self, node: fx.Node, source: fx.Node, call: Call) -> bool:
        if call.name == "lift_fresh_copy":
            return False
        if call.name == "getitem":  # of views, or of new tensors
            return self.memory.root_of(source) is not source
        if call.name == "dropout" and not (call.arguments["train"] and call.arguments["p"]):
            return True  # its input itself, which torch.export takes for a new tensor
        return storage_of(value_of(node)) == storage_of(value_of(source))

    def _overwritten(self, node: fx.Node, into: fx.Node, call: Call) -> Ref:
        # The value that an operation leaves in the memory that it writes into.
        root = self.memory.root_of(into)
        name = self.memory.read(root).get("param", "")
        if name.endswith(COUNTER):
            return {"param": name}
        if name in self.buffers:
            self.written[name] = root
        elif name:
            raise written(name)
        args = {key: self._encode(arg) for key, arg in call.arguments.items()}
        if into is not node.args[0]:  # the argument ``out``
            return self._emit(call.op, args, value_of(node), node)
        return written_value(node, args, self.numbers, self._emit)

    def _encode(self, arg: Any) -> Any:
        # A value that was made without gradients is detached for readers that have some.
        given = self.memory.encode(arg)
        return given if self.node.meta.get(NO_GRAD) else self._with_end(given)

    def _with_end(self, given: Any) -> Any:
        if isinstance(given, list):
            return [self._with_end(one) for one in given]
        name = given.get("value") if isinstance(given, dict) else None
        if name not in self.no_grad:
            return given
        if name not in self.detached:
            [maker] = [made for made in reversed(self.made) if made.name == name]
            if maker.dtype is None or "float" not in maker.dtype:
                return given
            like = torch.empty(maker.shape or [], dtype=getattr(torch, maker.dtype), device="meta")
            self.detached[name] = self._emit("detach.default", {"self": given}, like, self.node)
        return self.detached[name]

    def _emit(self, op: str, args: dict[str, Any], like: Any, node: fx.Node) -> Ref:
        shape = list(like.shape) if isinstance(like, Tensor) else None
        if shape is not None and not all(isinstance(length, int) for length in shape):
            raise ConfigError(
                f"the size of a tensor depends on the values of others ({node.target} at "
                f"{layer_of(node) or 'the top level'}); use torch.where or a fixed size"
            )
        dtype = name_of(like.dtype) if isinstance(like, Tensor) else None
        if op in SIZED:  # the size of the other tensor, which other ranks may hold
            op, size, more = SIZED[op]
            args = {"self": args["self"], size: shape, **more}
        if "permuted" in facts_of(op.partition(".")[0]).tiling:
            order = order_of(overload_of(op), [*args.values()][1:], like)
            if order is not None:
                op, args = "permute.default", {"self": args["self"], "dims": order}
        made = Node(self._unique(node), op, args, shape, dtype, layer_of(node))
        tags: Collection[torch.Tag] = getattr(overload_of(op), "tags", ())
        made.seeded = torch.Tag.nondeterministic_seeded in tags
        if count := num_draws(made):
            made.draw, self.draws = self.draws, self.draws + count
        weights = [self.facts[param].shape for param in made.params]
        weights += [self.shapes[value] or [] for value in made.inputs[1:]]  # that it computes
        weight = next((shape for shape in weights if len(shape) > 1), None)
        read = self.shapes[made.inputs[0]] if made.inputs else None
        made.flops = flops_of(made, weight, read or [0])
        self.shapes[made.name] = made.shape
        self.made.append(made)
        if self.node.meta.get(NO_GRAD):
            self.no_grad.add(made.name)
        return {"value": made.name}

    def _output(self) -> str:
        [self.node] = [node for node in self.nodes if node.op == "output"]
        [values] = self.node.args
        assert isinstance(values, tuple)
        ref = self._encode(values[0]) if values and isinstance(values[0], fx.Node) else {}
        if self.spec is not None and not self.spec.is_leaf():
            what = f"a {self.spec.type.__name__}"
        elif ref.get("value") == INPUT:
            what = "the image itself"
        elif "value" not in ref:
            what = "something else"
        else:
            return str(ref["value"])
        raise ConfigError(
            f"the network must return one tensor computed from the image; it returns {what}"
        )

    def _unique(self, node: fx.Node) -> str:
        # The path of its module, with the operation if that is taken.
        path = layer_of(node)
        name = path if path not in self.shapes else f"{path}.{node.name.removesuffix('_')}"
        name = name or node.name.removesuffix("_")
        while name in self.shapes:
            name += "_"
        return name

    def _input(
        self, spec: InputSpec, constants: dict[str, Any], names: dict[str, str]
    ) -> dict[str, str]:
        target = spec.target or spec.arg.name
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = names.get(target, target)
            self.buffers |= {name} if spec.kind is InputKind.BUFFER else set()
            return {"param": name}
        if spec.kind is InputKind.USER_INPUT:
            return {"value": INPUT}
        constant = constants.get(target)
        if not isinstance(constant, Tensor) or isinstance(constant, FakeTensor):
            raise ConfigError(
                f"the network reads {target}, which is computed when it is built or traced and "
                f"has no numbers; register it with register_buffer, or compute it from the image"
            )
        name = f"constant.{target}"
        self.facts[name] = constant_of(constant)
        if not constant.dim() and not constant.is_complex():
            self.numbers[name] = constant.item()
        total = sum(len(fact.data or "") for fact in self.facts.values()) * 3 // 4
        if total > MOST_CONSTANT_BYTES:
            raise ConfigError(
                f"the network holds {total >> 20} MiB of tensors that are neither parameters nor "
                f"buffers, as {target}; register them with register_buffer"
            )
        return {"param": name}


def _only_first_is_read(node: fx.Node) -> bool:
    """Whether of an operator's values, as a pool and its indices, only the first is read."""
    several = len(getattr(getattr(node.target, "_schema", None), "returns", ())) > 1
    takes = [user for user in node.users if user.users]  # others are of values without use
    return several and all(u.target is operator.getitem and u.args[1] == 0 for u in takes)


def _check_strides(node: fx.Node) -> None:
    """Refuses to read memory by strides where it holds more, or another order, than the tensor."""
    [source, *_] = node.args
    assert isinstance(source, fx.Node)
    x = value_of(source)
    if not x.is_contiguous() or x.untyped_storage().nbytes() != x.numel() * x.element_size():
        where = layer_of(node) or "the top level"
        raise ConfigError(
            f"the network reads memory by strides ({node.target} at {where}) of a tensor that is a "
            f"view; call contiguous() before it, or use reshape, unfold or slices"
        )


class _Value(NamedTuple):
    ref: Ref
    like: Tensor  # without numbers


def _attention_with_dropout(node: fx.Node, args: dict[str, Any], emit: Emit) -> Ref:
    """Writes attention that drops weights, over (..., L, E) of q, k and v, as single operators.

    In one kernel the weights have no place in the graph, so their noise could not follow from it.
    The order of operations is that of torch's own ``_scaled_dot_product_attention_math``:
    dropout(softmax(q k^T * scale, masked)) v. ``args`` are the node's arguments as plain values.
    """
    given = Call.of(node).arguments

    def value(name: str) -> _Value:
        like = value_of(given[name])
        return _Value(args[name], torch.empty(like.shape, dtype=like.dtype, device="meta"))

    def step(op: str, *operands: Any) -> _Value:
        operator = overload_of(op)
        like = operator(*[one.like if isinstance(one, _Value) else one for one in operands])
        plain = {a.name: a.default_value for a in operator._schema.arguments}
        refs = [one.ref if isinstance(one, _Value) else one for one in operands]
        plain |= {a.name: ref for a, ref in zip(operator._schema.arguments, refs, strict=False)}
        return _Value(emit(op, plain, like, node), like)

    query, key, values = map(value, ("query", "key", "value"))
    if given["enable_gqa"]:  # several heads of queries share one of keys and values
        key, values = (
            step("repeat_interleave.self_int", one, query.like.shape[-3] // one.like.shape[-3], -3)
            for one in (key, values)
        )
    root = math.sqrt(given["scale"] or 1 / math.sqrt(query.like.shape[-1]))
    keys = step("transpose.int", step("mul.Tensor", key, root), -2, -1)
    weights = step("matmul.default", step("mul.Tensor", query, root), keys)
    mask = value("attn_mask") if given["attn_mask"] is not None else None
    if given["is_causal"]:
        ones = torch.ones(weights.like.shape[-2:], device="meta", dtype=torch.bool)
        row = {"size": list(ones.shape), "dtype": {"dtype": "bool"}, "device": {"device": None}}
        full = {**row, "layout": None, "pin_memory": None}
        mask = step("tril.default", _Value(emit("ones.default", full, ones, node), ones))
    if mask is not None and mask.like.dtype == torch.bool:
        weights = step("masked_fill.Scalar", weights, step("logical_not.default", mask), -math.inf)
    elif mask is not None:
        weights = step("add.Tensor", weights, mask)
    # A row whose weights are all masked is 0 and not NaN.
    softmax = "softmax.int" if given["attn_mask"] is None else "_safe_softmax.default"
    weights = step("dropout.default", step(softmax, weights, -1), given["dropout_p"], True)
    return step("matmul.default", weights, values).ref
