"""Computes out of place what an operation of a network writes into memory.

y.add_(z)        add(y, z), in the type of y
y.copy_(z)       z, in the shape and type of y
y[:, 0] = 1      full_like(slice of y, 1)
y[y < 0] = 1     masked_fill(y, y < 0, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hires.core.errors import ConfigError
from hires.nets.program_calls import Call, layer_of, variant_of
from hires.nets.traced_memory import Emit, Ref, name_of, value_of

OPERATORS = {"__ior__": "bitwise_or", "__iand__": "bitwise_and", "__ixor__": "bitwise_xor"}
"""Python's own names of operators in place."""


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
