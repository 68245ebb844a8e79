"""Reads the operations of an exported program, and brings its nested parts into one list.

torch.export puts what runs under ``torch.no_grad`` or ``torch.autocast`` into programs of its own:

    y = wrap_with_set_grad_enabled(False, inner, x)        inner(x) without gradients
"""

from __future__ import annotations

import importlib
import operator
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from hires.core.errors import ConfigError
from hires.plan.operators.operator_facts import OPERATORS, facts_of

NO_GRAD = "no_grad"
"""Key of a node's ``meta``: whether it ran without gradients."""
ONLY_SHAPE = {
    *("squeeze_", "unsqueeze_", "t_", "transpose_", "swapdims_", "swapaxes_", "detach_"),
    "requires_grad_",
}
"""Operators that change a tensor in place, but not its numbers."""


class Call(NamedTuple):
    """An operation of the program, as the schema of its operator describes it."""

    target: Any
    name: str
    overload: str
    arguments: dict[str, Any]
    """All of them by name, with the defaults of the operator."""
    into: fx.Node | None = None
    """The argument that it writes into: its first one, or ``out``."""

    @property
    def op(self) -> str:
        """The operator as a node of the graph names it."""
        return f"{self.name}.{self.overload}"

    @property
    def writes(self) -> bool:
        """Whether it writes into memory that it is given."""
        return self.into is not None

    @property
    def same_value(self) -> bool:
        """Whether its value equals its input."""
        return facts_of(self.name).is_identity

    @classmethod
    def of(cls, node: fx.Node) -> Call:
        """Returns the operation of a node; ConfigError: it is none of ATen, nor has an entry."""
        target: Any = node.target
        if target is operator.getitem:
            arguments = dict(zip(("list", "index"), node.args, strict=True))
            return cls(target, "getitem", "default", arguments)
        schema = getattr(target, "_schema", None)
        name = "" if schema is None else schema.name.removeprefix("aten::")
        if schema is None or ("::" in name and name not in OPERATORS):
            where = layer_of(node) or "the top level"
            raise ConfigError(
                f"the network calls {target} at {where}, which is no ATen operation; write it with "
                f"torch's own, or give an operator of torch.library an entry in hires.operators"
            )
        written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        arguments = {a.name: node.kwargs.get(a.name, a.default_value) for a in schema.arguments}
        arguments |= {a.name: arg for a, arg in zip(schema.arguments, node.args, strict=False)}
        aliases = any(returned.alias_info is not None for returned in schema.returns)
        if "::" in name and (aliases or any(written)):
            raise ConfigError(
                f"the network calls {target}, which may return or change the memory of its input; "
                f"return a new tensor"
            )
        if any(written[1:]):  # ``out``, as in the normalisation of spectral_norm
            plain = variant_of(name, [str(a.type) for a in schema.arguments if a.name != "out"])
            out = arguments.pop("out", None)
            if plain is None or sum(written) > 1 or not _fits(node, out):
                raise ConfigError(f"the network calls {target}; use the variant without out=")
            written_to = cast(fx.Node, out)
            return cls(plain, name, plain._overloadname, arguments, written_to)
        changed = any(written) and name not in ONLY_SHAPE
        into = cast(fx.Node, node.args[0]) if changed else None
        name = name.removesuffix("_") if name in ONLY_SHAPE else name
        if facts_of(name).converts and facts_of(name).may_share:  # also to another tensor's type
            return cls(target, "to", "dtype", _conversion(node))
        return cls(target, name, target._overloadname, arguments, into)


def packet_of(name: str) -> Any:
    """Returns all overloads of an operator; None: torch has none of this name."""
    if module := facts_of(name).module:
        importlib.import_module(module)
    namespace, _, own = name.rpartition("::")
    return getattr(getattr(torch.ops, namespace or "aten"), own, None)


def overload_of(op: str) -> Any:
    """Returns what a node of the graph names, as ``add.Tensor``; None: torch has none."""
    name, _, overload = op.partition(".")
    if name == operator.getitem.__name__:  # Python's own
        return operator.getitem
    return getattr(packet_of(name), overload or "default", None)


def variant_of(name: str, types: list[str]) -> Any:
    """Returns the overload of an operator that takes arguments of these types; None if none is."""
    packet = packet_of(name)
    for overload in packet.overloads() if packet is not None else ():
        function = getattr(packet, overload)
        given = [str(argument.type) for argument in function._schema.arguments]
        if given == types and len(function._schema.returns) == 1:
            return function
    return None


def _fits(node: fx.Node, into: Any) -> bool:
    """Whether an operation writes into a tensor of the shape and type that it would make."""
    if not isinstance(into, fx.Node):
        return False
    tensors = [into, *(arg for arg in node.args if isinstance(arg, fx.Node))]
    values = [one.meta["val"] for one in tensors if isinstance(one.meta.get("val"), torch.Tensor)]
    same_type = all(value.dtype == values[0].dtype for value in values)
    return same_type and node.meta["val"].shape == values[0].shape


def _conversion(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of ``to.dtype`` for a node that brings a tensor to a type."""
    rest = {"non_blocking": False, "copy": False, "memory_format": None}
    return {"self": node.args[0], "dtype": node.meta["val"].dtype, **rest}


def inline(program: fx.GraphModule) -> None:
    """Replaces the calls of nested programs by their operations, which are marked ``NO_GRAD``.

    ConfigError: a part is computed in lower precision, or is no plain part of the program.
    """
    for node in list(program.graph.nodes):
        position = _NESTED.get(str(node.target)) if node.op == "call_function" else None
        if position is None:
            continue
        settings, [inner, *operands] = node.args[:position], node.args[position:]
        part: Any = program.get_submodule(str(inner.target))
        if position == _AUTOCAST and settings[0] == "cpu" and settings[2]:
            raise ConfigError(
                "the network lowers its precision itself (torch.autocast); leave that out and use "
                "precision=bf16"
            )
        inline(part)
        for one in part.graph.nodes:
            if position == _GRAD:
                one.meta.setdefault(NO_GRAD, not settings[0])
        starts = [one for one in part.graph.nodes if one.op == "placeholder"]
        with program.graph.inserting_before(node):
            made = program.graph.graph_copy(part.graph, dict(zip(starts, operands, strict=True)))
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]
            program.graph.erase_node(user)
        program.graph.erase_node(node)


def layer_of(node: fx.Node) -> str:
    """Returns the path of the module that a node runs in; empty at the top level."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("L['self'].") if stack else ""


_GRAD, _AUTOCAST = 1, 4
_NESTED = {"wrap_with_set_grad_enabled": _GRAD, "wrap_with_autocast": _AUTOCAST}
"""Operators that call a nested program -> position of the program in their arguments."""
