"""Turns writes into memory, which a network may do, into new values, which a graph has.

Values that share memory form a tree of views. A write makes a new value of the view, puts it into a
new value of what the view shows, and so on up to the root; other views are made again when they are
read next:

    y = x * 2            y          mul
    v = y[:, :3]         v          slice of y
    w = y.flatten(1)     w          flatten of y
    v.add_(1)            v'         add to v;  y' = y with v' in the place of v
    return w             w'         flatten of y'

What is written is computed out of place:

    y.add_(z)        add(y, z), in the type of y
    y.copy_(z)       z, in the shape and type of y
    y[:, 0] = 1      full_like(slice of y, 1)
    y[y < 0] = 1     masked_fill(y, y < 0, 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from hires.core.errors import ConfigError
from hires.nets.program_calls import Call, layer_of, variant_of
from hires.plan.operators.operator_facts import facts_of

OPERATORS = {"__ior__": "bitwise_or", "__iand__": "bitwise_and", "__ixor__": "bitwise_xor"}
"""Python's own names of operators in place."""
Ref = dict[str, Any]
"""``{"value": name}`` or ``{"param": name}``."""


class Emit(Protocol):
    """Adds a node to the graph and returns its value."""

    def __call__(self, op: str, args: dict[str, Any], like: Any, node: fx.Node) -> Ref:
        """Takes the operator, its arguments, a tensor of the value's shape, and the origin."""


class _Place(NamedTuple):
    root: fx.Node
    shows: fx.Node | None  # the node whose memory it is a view of


class TracedMemory:
    """The values of a program's nodes while its writes are turned into new values."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._refs: dict[fx.Node, Ref] = {}
        self._places: dict[fx.Node, _Place] = {}
        self._num_writes: dict[fx.Node, int] = {}  # into the memory of a root
        self._seen: dict[fx.Node, int] = {}  # the number of writes that a node's value contains

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._refs

    def add(self, node: fx.Node, ref: Ref, shows: fx.Node | None = None) -> None:
        """Sets the value of a node, a view of what it ``shows`` or in memory of its own."""
        root = self._places[shows].root if shows is not None else node
        self._refs[node], self._places[node] = ref, _Place(root, shows)
        self._seen[node] = self._num_writes.setdefault(root, 0)

    def read(self, node: fx.Node) -> Ref:
        """Returns the value of a node as it is after all writes so far."""
        root, shows = self._places[node]
        if self._seen[node] != self._num_writes[root]:
            assert shows is not None, "a write sets the value of the root"
            source, call = self.read(shows), Call.of(node)
            args = {name: self.encode(arg) for name, arg in call.arguments.items()}
            if not (call.same_value or call.writes):
                source = self._emit(call.op, args, value_of(node), node)
            self._refs[node], self._seen[node] = source, self._num_writes[root]
        return self._refs[node]

    def root_of(self, node: fx.Node) -> fx.Node:
        """Returns the node that made the memory of a node's value."""
        return self._places[node].root

    def write(self, node: fx.Node, made: Ref, origin: fx.Node) -> None:
        """Replaces the numbers of a node's value, at the place of ``origin``."""
        self.read(node)  # what its memory showed before, up to the root
        self._refs[node], changed, at = made, [node], node
        while (shows := self._places[at].shows) is not None:
            pieces = shows if isinstance(value_of(shows), (list, tuple)) else None
            whole = shows if pieces is None else self._places[pieces].shows
            assert whole is not None, "a list of views shows one tensor"
            back = self._piece_back(at, pieces, origin) if pieces else self._put_back(at, origin)
            self._refs[whole], at = back, whole
            changed.append(whole)
        self._num_writes[at] += 1
        self._seen |= dict.fromkeys(changed, self._num_writes[at])

    def encode(self, arg: Any) -> Any:
        """Returns an argument of an operator as plain values, with the values of nodes."""
        if isinstance(arg, fx.Node):
            if arg not in self._refs:
                where = layer_of(arg) or "the top level"
                raise ConfigError(
                    f"the network computes a size or a number from the values of tensors "
                    f"({arg.target} at {where}), as x.item() and x[mask] do; that is not known "
                    f"before it runs: compute it from shapes, or with tensors (torch.where)"
                )
            return self.read(arg)
        if isinstance(arg, (list, tuple)):
            return [self.encode(item) for item in arg]
        if isinstance(arg, torch.dtype):
            return {"dtype": name_of(arg)}
        if isinstance(arg, torch.device):
            return {"device": None}
        if isinstance(arg, torch.memory_format):
            return {"memory_format": str(arg).removeprefix("torch.")}
        if isinstance(arg, torch.layout):
            return None
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        raise ConfigError(f"the network passes {arg!r} to an operation; hires cannot record that")

    def _put_back(self, view: fx.Node, origin: fx.Node) -> Ref:
        # The new value of what a view shows, from the new value of the view.
        shows, call = self._places[view].shows, Call.of(view)
        assert shows is not None
        new, old, like = self._refs[view], self._refs[shows], value_of(shows)
        name, given = call.name, call.arguments
        if call.writes or call.same_value:
            return new
        shown = value_of(view)
        if (shown.dtype, shown.shape, shown.stride()) == (like.dtype, like.shape, like.stride()):
            return new
        if "regrouped" in facts_of(name).tiling:  # all numbers in the same order
            args = {"self": new, "shape": list(like.shape)}
            return self._emit("reshape.default", args, like, origin)
        if "permuted" in facts_of(name).tiling:
            order = order_of(call.target, [*given.values()][1:], like)
            if order is not None:
                args = {"self": new, "dims": [*map(order.index, range(like.dim()))]}
                return self._emit("permute.default", args, like, origin)
        into = {"self": old, "src": new}
        if name in ("slice", "narrow"):
            start, dim = given["start"], given["dim"]
            end = given["end"] if name == "slice" else start + given["length"]
            span = {"dim": dim, "start": start, "end": end, "step": given.get("step", 1)}
            return self._scattered(into | span, like, origin)
        if name == "select":
            return self._selected_back(old, new, given["dim"], given["index"], like, origin)
        if name == "diagonal":
            args = into | {key: given[key] for key in ("offset", "dim1", "dim2")}
            return self._emit("diagonal_scatter.default", args, like, origin)
        where = layer_of(origin) or "the top level"
        raise ConfigError(
            f"the network writes in place into memory that it also reads otherwise "
            f"({origin.target} at {where}, by way of {name}); use the out-of-place operation there"
        )

    def _piece_back(self, piece: fx.Node, pieces: fx.Node, origin: fx.Node) -> Ref:
        # The new value of the tensor that was split into pieces.
        whole, call, index = self._places[pieces].shows, Call.of(pieces), piece.args[1]
        assert whole is not None
        assert isinstance(index, int)
        like, sizes = value_of(whole), value_of(pieces)
        into = {"self": self._refs[whole], "src": self._refs[piece]}
        dim = call.arguments.get("dim", 0) % like.dim()
        if call.name == "unbind":
            return self._selected_back(into["self"], into["src"], dim, index, like, origin)
        start = sum(one.shape[dim] for one in sizes[:index])
        span = {"dim": dim, "start": start, "end": start + sizes[index].shape[dim], "step": 1}
        return self._scattered(into | span, like, origin)

    def _scattered(self, args: dict[str, Any], like: Tensor, origin: fx.Node) -> Ref:
        # A slice put into a tensor; torch does that with gradients for real numbers alone.
        if not like.is_complex():
            return self._emit("slice_scatter.default", args, like, origin)
        args["dim"] %= like.dim()
        pairs = torch.empty((*like.shape, 2), dtype=like.dtype.to_real(), device="meta")
        span = [args[name] for name in ("dim", "start", "end", "step")]
        for name, real in ("self", pairs), ("src", torch.ops.aten.slice.Tensor(pairs, *span)):
            args[name] = self._emit("view_as_real.default", {"self": args[name]}, real, origin)
        made = self._emit("slice_scatter.default", args, pairs, origin)
        return self._emit("view_as_complex.default", {"self": made}, like, origin)

    def _selected_back(
        self, old: Ref, new: Ref, dim: int, index: int, like: Tensor, origin: fx.Node
    ) -> Ref:
        # As a slice of one, which tiles can compute where the dim is not cut.
        dim, index = dim % like.dim(), index % like.shape[dim]
        args = {"self": new, "dim": dim}
        one = self._emit("unsqueeze.default", args, like.narrow(dim, 0, 1), origin)
        into = {"self": old, "src": one, "dim": dim, "start": index, "end": index + 1, "step": 1}
        return self._scattered(into, like, origin)


def value_of(node: fx.Node) -> Any:
    """Returns the fake tensor, or list of them, that a node made when it was traced."""
    return node.meta.get("val")


def storage_of(value: Any) -> int | None:
    """Returns what identifies the memory of a fake tensor, or of the first one of a list."""
    if isinstance(value, (list, tuple)):
        return storage_of(value[0]) if value else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def name_of(dtype: torch.dtype) -> str:
    """Returns a type as the plan names it."""
    return str(dtype).removeprefix("torch.")


def order_of(operator: Any, others: Sequence[Any], like: Tensor) -> list[int] | None:
    """Returns the dims of its input in the order in which an operator returns them.

    ``others`` are its further arguments. None: it does more, as ``mH`` of complex numbers.
    """
    # A tensor whose dims have different lengths shows where each of them goes.
    made = operator(torch.empty([*range(like.dim())], dtype=like.dtype, device="meta"), *others)
    return None if made.is_conj() else [*made.shape]


def written_value(
    node: fx.Node, args: dict[str, Any], numbers: Mapping[str, float], emit: Emit
) -> Ref:
    """Returns what a node in place leaves in its first argument.

    ``args`` are its arguments as plain values; ``numbers`` holds constants without dims. Raises
    ConfigError if the operator has no variant out of place.
    """
    call = Call.of(node)
    given, like = call.arguments, value_of(node.args[0])  # type: ignore[arg-type]
    if call.name == "copy_":
        return _fitted(args["src"], value_of(given["src"]), like, emit, node)
    if call.name in ("fill_", "zero_"):
        value = _number(args.get("value", 0), numbers)
        if isinstance(value, dict):
            return _fitted(value, value_of(given["value"]), like, emit, node)
        keys = dict.fromkeys(("dtype", "layout", "device", "pin_memory", "memory_format"))
        full = {"self": args["self"], "fill_value": value, **keys}
        return emit("full_like.default", full, like, node)
    if call.name == "index_put_" and not args["accumulate"]:
        value, [index, *others] = _number(args["values"], numbers), given["indices"]
        mask = value_of(index) if index is not None and not others else None
        if not isinstance(value, dict) and _is_mask(mask, like):
            fill = {"self": args["self"], "mask": args["indices"][0], "value": value}
            return emit("masked_fill.Scalar", fill, like, node)
    if (plain := _out_of_place(call)) is None:
        where = layer_of(node) or "the top level"
        raise ConfigError(
            f"the network calls {call.target} at {where}, which has no variant out of place; write "
            f"it with another operation"
        )
    made = emit(plain, args, like, node)
    operands = (value_of(arg) for arg in node.args[1:] if isinstance(arg, fx.Node))
    if any(isinstance(one, Tensor) and one.dtype != like.dtype for one in operands):
        made = _as_type(made, like, emit, node)  # the operation alone might return a wider type
    return made


def _number(ref: Any, numbers: Mapping[str, float]) -> Any:
    return numbers.get(ref.get("param", ""), ref) if isinstance(ref, dict) else ref


def _is_mask(index: Tensor | None, like: Tensor) -> bool:
    return index is not None and index.dtype == torch.bool and index.shape == like.shape


def _fitted(ref: Ref, old: Tensor, like: Tensor, emit: Emit, node: fx.Node) -> Ref:
    # A value in the type and shape of what it is copied into.
    if old.dtype != like.dtype:
        ref = _as_type(ref, old.to(like.dtype), emit, node)
    if old.shape != like.shape:
        args = {"self": ref, "size": list(like.shape), "implicit": False}
        ref = emit("expand.default", args, like, node)
    return ref


def _as_type(ref: Ref, like: Tensor, emit: Emit, node: fx.Node) -> Ref:
    rest = dict.fromkeys(("non_blocking", "copy"), False)
    args = {"self": ref, "dtype": {"dtype": name_of(like.dtype)}, **rest, "memory_format": None}
    return emit("to.dtype", args, like, node)


def _out_of_place(call: Call) -> str | None:
    """Returns the operator that computes what an operator in place leaves: ``add.Tensor``."""
    wanted = [str(argument.type) for argument in call.target._schema.arguments]
    base = OPERATORS.get(call.name, call.name.removesuffix("_"))
    for name in (base, f"{base}_functional"):
        if (plain := variant_of(name, wanted)) is not None:
            return f"{name}.{plain._overloadname}"
    return None
